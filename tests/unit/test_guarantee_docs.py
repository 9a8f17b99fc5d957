"""docs/guarantees.md: each promise names a test, each exception a scene."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
TEST = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")
TITLED = re.compile(r'\]\(\.\./(tests/[\w/]+\.py) "(test_\w+)"\)')
SENTENCE = re.compile(r"[.!?](?=\s|$)")
SCENE = re.compile(r"\]\(what-happens\.md#[\w-]+\)")


def part(title):
    """Return the text below a heading of the second level, by headings of the third."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    below = re.split(r"\n## ", rest)[0]
    sections = re.split(r"\n### ", below)[1:]
    return {name: text for name, _, text in (section.partition("\n") for section in sections)}


PROMISED, NOT_PROMISED = part("What is promised"), part("What is not promised")


def promises(text):
    """Return the points of a section: bullets and rows of tables; quotations only explain."""
    lines = [line for line in text.splitlines() if not line.startswith(">")]
    rows = [line for line in lines if line.startswith("|")][2:]
    plain = "\n".join(line for line in lines if not line.startswith("|"))
    return [*re.split(r"\n(?=- )", plain.strip()), *rows] if plain.strip() else rows


POINTS = [(name, point) for name, text in PROMISED.items() for point in promises(text)]


@cache
def names_in(path):
    """Return the names of the tests in a file."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def short(value):
    return re.sub(r"\W+", "-", TEST.sub("", value))[:50].strip("-")


@pytest.mark.parametrize(("section", "point"), POINTS, ids=short)
def test_each_sentence_that_promises_names_the_tests_that_hold_it(section, point):
    """A point is one sentence with its tests; there is no text outside of points."""
    assert point.startswith(("- ", "| ")), f"neither point nor quotation: {point}"
    assert TEST.search(point), f"no test: {point}"
    said = TEST.sub("", point).strip()
    if point.startswith("- "):
        assert len(SENTENCE.findall(said)) == 1, f"not one sentence: {said}"
        assert said.endswith("."), f"something behind the tests: {said}"


@pytest.mark.parametrize(("name", "text"), NOT_PROMISED.items(), ids=short)
def test_each_reservation_names_the_scenario_that_shows_it(name, text):
    """A test, or a scene of docs/what-happens.md."""
    _, found, shown = text.partition("\nShown by")
    assert found, f"{name}: shown by nothing"
    assert TEST.search(shown) or SCENE.search(shown)


def test_all_named_tests_exist():
    """Where the page says, under the name that it says."""
    text = PAGE.read_text(encoding="utf-8")
    named = [*TEST.findall(text), *((name, path) for path, name in TITLED.findall(text))]
    assert len(named) > len(POINTS)
    missing = [f"{path}::{name}" for name, path in named if name not in names_in(path)]
    assert not missing


def test_the_readme_promises_nothing_that_is_not_here():
    """Its list of promises links to sections of this page."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    anchors = {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in PROMISED}
    _, _, rest = readme.partition("\n## What is promised\n")
    for line in re.findall(r"^- .*", rest.partition("\n## ")[0], re.MULTILINE):
        assert re.search(r"docs/guarantees\.md#([\w-]+)", line)[1] in anchors

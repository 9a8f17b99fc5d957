"""docs/cli.md and docs/runbook.md speak of commands and options that there are, and of all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from celery_singleton_lock.cli.commands import COMMANDS
from celery_singleton_lock.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {page: (DOCS / page).read_text(encoding="utf-8") for page in ("cli.md", "runbook.md")}
NAMES = {command.name for command in COMMANDS}
OPTIONS = {
    option
    for command in (*COMMANDS, main)
    for parameter in command.params
    for option in parameter.opts
}


def test_every_command_has_its_section():
    headings = re.findall(r"^### (.*)$", PAGES["cli.md"], re.MULTILINE)
    assert {name for heading in headings for name in heading.split(", ")} == NAMES


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_commands_and_options_that_there_are(page):
    text = PAGES[page]
    named = re.findall(r"(?:celery -A \w+ |`)locks ([a-z-]+)", text)
    assert named
    assert set(named) <= NAMES
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--help"} <= OPTIONS


def test_no_page_shows_locks_without_a_command_which_prints_only_the_help():
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    typed = [line for line in lines if re.match(r"\$ celery -A \w+ locks\b", line)]
    assert typed
    for line in typed:
        assert re.match(r"\$ celery -A \w+ locks ([a-z]+)", line), line
        assert line.split()[5] in NAMES, line


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_help_text(command):
    assert command.help
    for parameter in command.params:
        assert parameter.name

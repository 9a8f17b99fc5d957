"""The reference has every public name, every option of a command, and every error and event."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import celery_singleton_lock
from celery_singleton_lock import errors
from celery_singleton_lock.cli.commands import COMMANDS
from celery_singleton_lock.cli.main import main
from support import event_docs

DOCS = Path(__file__).parents[2] / "docs"
API = (DOCS / "api.md").read_text(encoding="utf-8")
CLI = (DOCS / "cli.md").read_text(encoding="utf-8")
DOCUMENTED = set(re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)$", API, re.MULTILINE))

NEEDS = {"django": "django", "testing": "fakeredis"}
"""Module -> what it cannot be imported without."""


def documented(module, names):
    """Return the names that the page has no entry for."""
    return {name for name in names if f"{module}.{name}" not in DOCUMENTED}


def test_each_public_name_of_the_package_is_in_the_api():
    """Errors stand in the section of their module."""
    names = {name for name in celery_singleton_lock.__all__ if not hasattr(errors, name)}
    assert documented("celery_singleton_lock", names) == set()
    assert "celery_singleton_lock.errors" in DOCUMENTED


@pytest.mark.parametrize("name", ["admin", "django", "testing"])
def test_each_public_name_of_a_module_is_in_the_api(name):
    pytest.importorskip(NEEDS.get(name, "redis"))
    module = importlib.import_module(f"celery_singleton_lock.{name}")
    names = {each for each in module.__all__ if not hasattr(errors, each)}
    assert documented(module.__name__, names) == set()


def test_each_event_is_in_the_api():
    names = {kind.__name__ for kind in event_docs.kinds()}
    assert documented("celery_singleton_lock.events", names) == set()


def test_each_option_of_a_command_is_on_the_page_of_commands():
    options = {
        option
        for command in (*COMMANDS, main)
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    assert {option for option in options if not re.search(rf"{option}(?![\w-])", CLI)} == set()

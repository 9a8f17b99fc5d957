"""``import celery_singleton_lock.flower``: what it adds to Flower, and to which versions."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from support.flower import needs_flower


@pytest.fixture
def mounting():
    """The module that adds the pages. Importing it adds them to Flower in this process."""
    needs_flower()
    from celery_singleton_lock.flower import mount  # noqa: PLC0415  # Flower may be missing

    return mount


def test_the_pages_are_added_once_and_before_the_handler_that_matches_every_path(mounting):
    from flower import urls  # noqa: PLC0415

    mounting.mount()
    mounting.mount()
    names = [getattr(rule, "name", None) for rule in urls.handlers]
    assert names.count("locks") == 1
    assert names.index("locks") < len(names) - 1
    assert urls.settings["ui_modules"] == [{"Template": mounting.Template}]


@pytest.mark.parametrize(
    ("version", "known"), [("2.0.1", True), ("2.2.0", True), ("2.9.0", False), ("3.0.0", False)]
)
def test_an_untested_version_of_flower_gets_the_pages_with_a_warning(
    mounting, monkeypatch, caplog, version, known
):
    """The warning says what may be wrong, and what to do."""
    monkeypatch.setattr("flower.__version__", version)
    with caplog.at_level(logging.WARNING):
        mounting.mount()
    assert (version in caplog.text) is not known
    assert ("remove the import from flowerconfig.py" in caplog.text) is not known


def test_without_flower_the_error_says_what_to_install():
    script = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'flower' else find(name, *rest)\n"
        "import celery_singleton_lock.flower\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 1
    assert 'pip install "celery-singleton-lock[flower]"' in found.stderr

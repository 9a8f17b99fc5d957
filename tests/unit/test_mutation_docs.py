"""What is said about mutants is about the code as it is."""

from __future__ import annotations

import importlib
import inspect
import re
import sys

import pytest

from mutation.accepted import accepted
from mutation.page import END, LIST, PAGE, reasons, written
from mutation.verdicts import PACKAGE, ROOT, Mutant

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGURED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
LEFT_OUT = {"embedded"}
"""Starts servers for tests and the demo; decides about no lock."""


def test_what_must_not_import_celery_is_what_is_mutated():
    """A module that is new below Celery is added to both lists."""
    contracts = CONFIGURED["importlinter"]["contracts"]
    (below,) = [each for each in contracts if each["id"] == "no-celery-below"]
    modules = {name.removeprefix(f"{PACKAGE}.") for name in below["source_modules"]}
    mutated = {
        re.sub(r"(/\*)?\.py$", "", path).removeprefix(f"{PACKAGE}/")
        for path in CONFIGURED["mutmut"]["only_mutate"]
    }
    assert mutated == modules - LEFT_OUT


WHERE = sorted({(mutant.module, mutant.function) for mutant in accepted()})


@pytest.mark.parametrize(("module", "function"), WHERE)
def test_a_mutant_that_may_live_is_one_of_the_code_as_it_is(module, function):
    """A line that has changed or gone is off the list; and each mutant has its reason."""
    (found,) = [each for each in functions(module) if each.__qualname__ == function]
    lines = {line.strip() for line in inspect.getsource(found).splitlines()}
    for mutant, reason in accepted().items():
        if (mutant.module, mutant.function) == (module, function):
            assert set(mutant.was.splitlines()) <= lines
            assert mutant.was != mutant.becomes
            assert reason


def functions(module):
    """Return the functions and methods of a module, unwrapped."""
    here = importlib.import_module(f"{PACKAGE}.{module.removesuffix('.py').replace('/', '.')}")
    found = [
        each for each in vars(here).values() if getattr(each, "__module__", "") == here.__name__
    ]
    methods = [
        getattr(each, "fget", None) or getattr(each, "__func__", each)
        for kind in found
        if inspect.isclass(kind)
        for each in vars(kind).values()
    ]
    unwrapped = [inspect.unwrap(each) for each in (*found, *methods) if callable(each)]
    return [each for each in unwrapped if inspect.isfunction(each)]


def test_the_docs_list_every_mutant_that_may_live():
    """Write them anew with ``python -m tests.mutation --report``."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(text, LIST, reasons())
    assert text.count(END) == 2


@pytest.mark.parametrize(
    ("was", "becomes", "rewords"),
    [
        ('msg = "it is too late"', 'msg = "XXit is too lateXX"', True),
        ('msg = "It is too late"', 'msg = "IT IS TOO LATE"', True),
        ('msg = "it is too late"', "msg = None", False),
        ('get("two words")', 'get("TWO WORDS")', False),
        ('get("it is too late", 1)', 'get("it is too late", 2)', False),
    ],
)
def test_to_say_the_same_in_other_letters_is_no_mutant(was, becomes, rewords):
    """That it is said does count, and so does what a program could read."""
    assert Mutant("", "", "", was, becomes, 0).rewords is rewords

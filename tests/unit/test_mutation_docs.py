"""The lists about mutants match the present code."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from dataclasses import replace

import pytest

from mutation.accepted import accepted
from mutation.page import END, LIST, PAGE, reasons, table, written
from mutation.results import CRASHED, FAILED, PACKAGE, ROOT, SURVIVED, Mutant
from mutation.sample import interval, judged, sampled

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGURED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
LEFT_OUT = {
    "demo.fakeredis_server",
    "demo.redis_provider",
    "demo.redis_server",
    "demo.redis_supervisor",
}
"""They start servers for tests and the demo, and decide about no lock."""


def test_what_must_not_import_celery_is_what_is_mutated():
    """A module that is new below Celery is added to both lists."""
    contracts = CONFIGURED["importlinter"]["contracts"]
    (below,) = [each for each in contracts if each["id"] == "no-celery-below"]
    modules = {name.removeprefix(f"{PACKAGE}.") for name in below["source_modules"]}
    mutated = {
        re.sub(r"(/\*)?\.py$", "", path).removeprefix(f"{PACKAGE}/").replace("/", ".")
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
    """Write them again with ``python -m tests.mutation --report``."""
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
    """Whether there is a text counts, and so do values that a program reads."""
    assert Mutant("", "", "", was, becomes, 0).rewords is rewords


def made(number, code=None, module="a.py"):
    return Mutant(f"{module} {number}", module, "", "was", "becomes", code)


def test_a_larger_sample_begins_with_the_smaller_one():
    """A larger share extends the sample; another seed makes a new one."""
    found = [made(number, module=module) for module in ("a.py", "b.py") for number in range(100)]
    for module in ("a.py", "b.py"):
        small, large, other = (
            [mutant for mutant in sampled(found, share, seed) if mutant.module == module]
            for share, seed in [(0.1, 1), (0.3, 1), (0.1, 2)]
        )
        assert (len(small), len(large)) == (10, 30)
        assert large[:10] == small != other
    assert set(sampled(found)) == set(found)


def test_what_was_judged_out_of_its_turn_is_no_part_of_a_sample():
    """It was picked by something else than chance."""
    order = list(sampled([made(number) for number in range(10)]))
    known = [replace(mutant, code=SURVIVED) for mutant in order]
    found = [*known[:4], order[4], *known[5:]]
    assert judged(found) == known[:4]
    assert judged(known) == known


def test_the_crash_of_the_runner_is_no_kill():
    assert made(1, CRASHED).judged
    assert not made(1, CRASHED).killed


@pytest.mark.parametrize(
    ("killed", "of", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (50, 100, 0.4038, 0.5962),
        (95, 100, 0.888, 0.978),
    ],
)
def test_the_interval_is_wilsons(killed, of, low, high):
    """Compared with published values: it does not leave 0 to 100 %, and says most of few."""
    assert interval(killed, of) == pytest.approx((low, high), abs=0.001)


def test_a_score_has_its_sample_size():
    """A module that was judged in full has no bounds; one that was not judged has no score."""
    full = [made(number, min(FAILED), "full.py") for number in range(10)]
    part = [
        replace(mutant, code=min(FAILED) if number < 8 else None)
        for number, mutant in enumerate(sampled([made(n, module="part.py") for n in range(10)]))
    ]
    lines = list(table([*full, *part]))
    assert "| `full.py` | 10 | 10 | 10 | 0 | 0 | 100 % |" in lines
    assert "| `part.py` | 10 | 8 | 8 | 0 | 0 | 100 % (67.6 to 100.0 %) |" in lines
    assert lines[-1] == "| **all** | 20 | 18 | 18 | 0 | 0 | 100 % |"
    assert "| `none.py` | 1 | 0 | 0 | 0 | 0 |  |" in table([made(1, module="none.py")])

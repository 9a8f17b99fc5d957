"""The tests of the usual run and of the full run."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.variants import Shard, left_out, words_of_no_test


class Item:
    """The attributes of a test that the selection uses."""

    def __init__(self, test, *, file="test_file.py", marks=(), **params):
        self.path = Path("tests", file)
        self.name = f"{test}[{'-'.join(map(str, params.values()))}]"
        self.nodeid = f"tests/{file}::{self.name}"
        self.callspec = SimpleNamespace(params=params)
        self._marks = [SimpleNamespace(name=name, args=args) for name, args in marks]

    def iter_markers(self, name):
        return (mark for mark in self._marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)


def selected(items, **run):
    left = left_out(items, **{"full": False} | run)
    return [item for item in items if item.nodeid not in left]


def test_the_usual_run_has_one_variant_and_every_value_of_other_parameters():
    pools, brokers = ("prefork", "threads"), ("redis", "classic", "quorum")
    items = [
        Item("test_a", pool=pool, kind=kind, number=number)
        for pool, kind, number in product(pools, brokers, (1, 2, 3))
    ]
    assert sorted(item.callspec.params["number"] for item in selected(items)) == [1, 2, 3]
    assert len({item.callspec.params["pool"] for item in selected(items)}) == 1
    assert [item.nodeid for item in selected(items)] == [
        item.nodeid for item in reversed(selected(items[::-1]))
    ]
    assert selected(items, full=True) == items


def test_a_variant_that_would_skip_itself_is_not_chosen():
    marks = [("not_on_quorum", ("why",)), ("not_in_memory", ("why",))]
    for n in range(20):
        items = [
            Item(f"test_{n}", marks=marks, kind=kind) for kind in ("quorum", "in_memory", "redis")
        ]
        assert [item.callspec.params["kind"] for item in selected(items)] == ["redis"]


def test_a_parameter_with_other_values_makes_no_variants():
    items = [Item("test_a", kind=kind) for kind in ("same", "other")]
    assert selected(items) == items


def test_marks_exclude_a_test_or_variants_from_the_usual_run_or_from_both():
    full, long = Item("test_a", marks=[("full", ())]), Item("test_b", marks=[("long", ("2",))], n=2)
    rest = Item("test_b", marks=[("long", ("2",))], n=1)
    assert selected([full, long, rest]) == [rest]
    assert selected([full, long, rest], full=True) == [full, rest]


def test_a_word_of_a_mark_that_no_test_of_its_file_contains_is_reported():
    """The mark would apply to nothing, which nobody sees but in the time of the run."""
    test = Item("test_new_name", marks=[("full", ("test_old_name", "new"))])
    assert words_of_no_test([test, Item("test_old_name", file="test_other.py")]) == [
        "tests/test_file.py: no test has 'test_old_name' in its name, which a mark 'full' names"
    ]


def test_the_shards_together_contain_everything_and_each_contains_the_usual_run():
    items = [
        Item("test_a", file=f"test_{n}.py", marks=[("full", ("gevent",))], pool=pool)
        for n, pool in product(range(20), ("prefork", "threads", "gevent"))
    ]
    items.append(Item("test_b", marks=[("long", ())]))
    shards = [selected(items, full=True, shard=Shard(n, 3)) for n in (1, 2, 3)]
    usual, everything = selected(items), selected(items, full=True)
    assert [item for item in everything if any(item in shard for shard in shards)] == everything
    assert sum(len(shard) - len(usual) for shard in shards) == len(everything) - len(usual)
    for shard in shards:
        assert len(usual) < len(shard) < len(everything)
        assert [item for item in usual if item in shard] == usual


def test_a_shard_is_a_part_and_the_number_of_parts():
    assert Shard.of("2/3") == (2, 3)
    for text in ("0/3", "4/3", "2", "2/3/4", "a/b", ""):
        with pytest.raises(ValueError, match=r".*"):
            Shard.of(text)

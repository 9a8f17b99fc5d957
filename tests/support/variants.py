"""Selects the tests of the usual run. With ``--full`` all tests run.

Many tests have a variant for each pool, broker and store. The usual run contains one variant of
each such test, chosen by the test's name: it is the same one in every run, and each pool, broker
and store gets its share of the tests.

``--full --shard 2/3`` runs the usual tests, and all tests of every third file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple
from zlib import crc32

import pytest

AXES: Final = ("pool", "ground", "kind", "broker", "make_lock", "task", "late")
"""Fixtures and parameters that make variants."""
VALUES: Final = frozenset(
    (
        *("prefork", "prefork-polling", "prefork-spawn", "threads", "solo", "gevent", "eventlet"),
        *("redis", "asyncio", "cluster", "quorum", "in_memory", "classic", "rabbitmq"),
        *("Lock", "AsyncLock"),
        *("act", "act_late", "True", "False"),
    )
)
"""Their values: pools, stores, brokers, locks, and early or late acknowledgement.

A parameter of that name with other values makes no variants.
"""
POOLS: Final = ("prefork", "prefork", "prefork", "threads")
"""Pools of the usual run. All tests of a file use the same pool, since they share its worker."""
NOT_EVERYWHERE: Final = "prefork-spawn"
"""A pool that some versions of Celery do not have."""
UNFIT: Final = {"quorum": "not_on_quorum", "in_memory": "not_in_memory"}
"""The mark of a test that skips itself on such a store."""
FULL: Final = "full"
"""Mark of tests, or variants with certain words in their names, that only the full run contains."""
LONG: Final = "long"
"""Mark of those that no run contains: they take minutes, or need the machine for themselves."""


class Shard(NamedTuple):
    """One of several parts into which the test files are divided."""

    number: int
    """From 1."""
    parts: int
    """How many there are."""

    @classmethod
    def of(cls, text: str) -> Shard:
        """Parse a shard such as ``2/3``.

        Raises:
            ValueError: the text has another form, or there is no such part.
        """
        number, parts = map(int, text.split("/"))
        if not 1 <= number <= parts:
            raise ValueError(text)
        return cls(number, parts)

    def contains(self, item: pytest.Item) -> bool:
        """Return whether the item's file belongs to this part."""
        return _number(item.path.name) % self.parts == self.number - 1


def left_out(items: Iterable[pytest.Item], *, full: bool, shard: Shard | None = None) -> set[str]:
    """Return the ids of the tests that a run does not contain.

    Args:
        items: all tests that were collected.
        full: whether the run contains all variants.
        shard: the part whose variants it contains; None stands for all parts.
    """
    items = list(items)
    long = {item.nodeid for item in items if _is_marked(item, LONG)}
    if full and shard is None:
        return long
    unusual = _unusual([item for item in items if item.nodeid not in long])
    played = {item.nodeid for item in items if full and shard and shard.contains(item)}
    return long | (unusual - played)


def _unusual(items: list[pytest.Item]) -> set[str]:
    """Return the ids of the tests that only the full run contains."""
    left, products = set(), defaultdict(list)
    for item in items:
        if _is_marked(item, FULL):
            left.add(item.nodeid)
        elif _values(item):
            products[_group(item)].append(item)
    for variants in products.values():
        chosen = _chosen(sorted(variants, key=lambda item: item.nodeid))
        left.update(item.nodeid for item in variants if item is not chosen)
    return left


def words_of_no_test(items: Iterable[pytest.Item]) -> list[str]:
    """Return the words of marks that no test of the file has in its name, as a message each."""
    names, words = defaultdict(list), set()
    for item in items:
        names[item.path].append(item.name)
        marks = [mark for name in (FULL, LONG) for mark in item.iter_markers(name)]
        words |= {(item.path, mark.name, word) for mark in marks for word in mark.args}
    return [
        f"{path}: no test has {word!r} in its name, which a mark {mark!r} names"
        for path, mark, word in sorted(words)
        if not any(word in name for name in names[path])
    ]


def _is_marked(item: pytest.Item, name: str) -> bool:
    """Return whether a mark applies to this variant of a test."""
    return any(
        not mark.args or any(word in item.name for word in mark.args)
        for mark in item.iter_markers(name)
    )


def _values(item: pytest.Item) -> dict[str, str]:
    """Return its values of the axes."""
    call = getattr(item, "callspec", None)
    given = {} if call is None else {axis: str(call.params.get(axis)) for axis in AXES}
    return {axis: value for axis, value in given.items() if value in VALUES}


def _group(item: pytest.Item) -> Hashable:
    """Return a key that is the same for all variants of a test."""
    values, others = _values(item), item.callspec.params.items()
    same = frozenset((name, id(value)) for name, value in others if name not in values)
    return item.nodeid.partition("[")[0], same


def _chosen(variants: list[pytest.Item]) -> pytest.Item:
    """Return the variant of the usual run."""
    fit = [item for item in variants if not _skips_itself(item)] or variants
    pool = POOLS[_number(fit[0].path.name) % len(POOLS)]
    fit = [item for item in fit if _values(item).get("pool") == pool] or fit
    return fit[_number(fit[0].nodeid) % len(fit)]


def _skips_itself(item: pytest.Item) -> bool:
    values = set(_values(item).values())
    if NOT_EVERYWHERE in values or values >= {"in_memory", "AsyncLock"}:
        return True
    marks = [mark for store, mark in UNFIT.items() if store in values]
    return any(map(item.get_closest_marker, marks))


def _number(name: str) -> int:
    return crc32(name.encode())

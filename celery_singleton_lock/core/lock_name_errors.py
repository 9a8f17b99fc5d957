"""The words that errors about lock names use (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class Wording:
    """The words of errors for what takes the lock, and for the option that names it.

    Args:
        kind: what takes the lock.
        key: the option, a template or a callable.
        has: verb between the option and what is wrong in it.
        callable_key: the option if it is a callable.
        several: advice: what to write for several locks.
        looks_into: advice: how a template reads a part of a value.
        leave_out: advice: how to leave an argument out of the name.
        if_none: what follows if an argument is None.
    """

    kind: str = "task"
    key: str = "lock_key"
    has: str = "is"
    callable_key: str = "callable lock_key"
    several: str = "for several locks use lock_keys"
    looks_into: str = "Arguments are plain data: read their parts with [ ], not with a dot"
    leave_out: str = "leave it out with lock_key or lock_args"
    if_none: str = "all such calls would share one lock"


OF_TASK: Final = Wording()

OF_FUNCTION: Final = Wording(
    kind="function",
    key="the key",
    callable_key="callable key",
    several="a key names one lock",
    looks_into="A template reads parts of dicts and lists, with [ ]. For an attribute use a "
    "callable key, such as lambda order: f'order:{order.id}'",
    leave_out="leave it out with a key that names the others",
)


class Unnameable(Exception):
    """A value cannot be part of a lock name.

    Args:
        told: returns the reason and what to change, with the given words.
    """

    def __init__(self, told: Callable[[Wording], str]) -> None:
        super().__init__()
        self.told = told

"""How a call takes part in preemption (``lock_on_conflict="preempt"``)."""

from __future__ import annotations

import enum
import functools
import json


class Age(enum.IntEnum):
    """What is known about the age of a call, compared with others of its task."""

    NEW = 1
    """Its age is the time since its arrival."""
    RETRY = 0
    """It is a retry, and older than every new call: its first attempt has ended."""
    COPY = -1
    """The broker has delivered it again: it may be older or newer than calls that came before.

    So it replaces none of them, and none of them replaces it."""


def packed_preempt(most: int, age: Age = Age.NEW) -> list[int]:
    """Return the value for the scripts.

    Args:
        most: largest number of calls of the task that are preempted in a row.
        age: of this call.
    """
    return [most, int(age)]


@functools.lru_cache(maxsize=1024)
def is_preempting(flow: str) -> bool:
    """Return whether flow options are of a call that preempts older ones."""
    return '"preempt":' in flow and json.loads(flow).get("preempt", [0, 0])[1] == Age.NEW


@functools.lru_cache(maxsize=1024)
def aged(flow: str, age: Age) -> str:
    """Return the flow options of a call of this age; see ``packed``."""
    options = json.loads(flow) if age is not Age.NEW and '"preempt":' in flow else {}
    if "preempt" not in options:
        return flow
    preempt = packed_preempt(options["preempt"][0], age)
    return json.dumps({**options, "preempt": preempt}, separators=(",", ":"))

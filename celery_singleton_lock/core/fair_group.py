"""The group of a task, by which a lock shares its permits fairly (pure).

A lock with groups grants in the order of start-time fair queueing: each group gets a share of the
starts by its weight, whatever the others have parked. ``open_groups`` in ``groups.lua`` decides.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final, NamedTuple

LONGEST_GROUP: Final = 100
"""Longest name of a group in a key, in bytes; the end of a longer one is a digest."""

LEAST_WEIGHT: Final = 0.001
MOST_WEIGHT: Final = 1000.0


class Group(NamedTuple):
    """The group of a task.

    Args:
        name: as :func:`group_name` returns it.
        limit: permits that the group may hold at once; None for no limit of its own.
        weight: its share of the starts, relative to the other groups.
    """

    name: str
    limit: int | None = None
    weight: float = 1.0

    @property
    def packed(self) -> list[object]:
        """The flow option ``group``: name, limit and weight, except default values."""
        if self.weight == 1:
            return [self.name, self.limit] if self.limit else [self.name]
        return [self.name, self.limit or 0, self.weight]


def group_name(value: str) -> str:
    """Return the name of a group as keys and records have it: the end of a long one is a digest."""
    encoded = value.encode()
    if len(encoded) <= LONGEST_GROUP:
        return value
    start = encoded[:32].decode(errors="ignore")
    return f"{start}-sha256-{hashlib.sha256(encoded).hexdigest()[:48]}"


def group_in(flow: str) -> str:
    """Return the name of the group in the flow options of a caller; empty if it has none."""
    group = json.loads(flow).get("group") if flow else None
    return str(group[0]) if group else ""

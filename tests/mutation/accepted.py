"""Mutants that may survive, each with the reason: they do not change the behaviour.

They are in accepted.txt: a line ``# reason``, then for each mutant ``@@ module function``,
the present lines (``-``) and the mutated ones (``+``), as printed by ``mutmut show``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from mutation.results import Mutant

LIST: Final = Path(__file__).with_suffix(".txt")


class Accepted(NamedTuple):
    """One change that may be made.

    Args:
        module: path below the package: ``store/redis/sync.py``.
        function: ``RedisStore.acquire``.
        was: the lines as they are.
        becomes: what may stand there instead.
    """

    module: str
    function: str
    was: str
    becomes: str


@cache
def accepted() -> dict[Accepted, str]:
    """Return the mutants that may live, and why."""
    found: dict[Accepted, str] = {}
    for part in LIST.read_text(encoding="utf-8").split("\n# ")[1:]:
        reason, *entries = part.split("\n@@ ")
        for entry in entries:
            place, *lines = entry.strip("\n").split("\n")
            module, function = place.split(" ")
            found[Accepted(module, function, _marked(lines, "-"), _marked(lines, "+"))] = reason
    return found


def _marked(lines: list[str], mark: str) -> str:
    return "\n".join(line[1:] for line in lines if line.startswith(mark))


def reason_for(mutant: Mutant) -> str:
    """Return why a mutant may live; an empty string if it must not."""
    here = Accepted(mutant.module, mutant.function, mutant.was, mutant.becomes)
    return accepted().get(here, "")

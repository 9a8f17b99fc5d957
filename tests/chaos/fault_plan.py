"""The plan of a storm: which fault happens when. The same seed gives the same plan.

The plan cannot know in advance which process runs a task. It has a number from 0 to 1 instead, by
which the storm picks one of the candidates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

LEASE = 3.0

MEAN_PAUSE = 1.1
"""Seconds between two faults, on average."""

CALM = 2.0
"""Seconds at the beginning in which tasks get going."""

WEIGHTS = {
    "kill child": 5,
    "stop child": 4,
    "stop main": 2,
    "stop worker": 5,
    "kill worker": 3,
    "retire worker": 1,
    "kill locks": 1,
    "stop locks": 1,
    "cut broker": 1,
    "revoke": 3,
    "terminate": 2,
}

KILLS_AND_STOPS = frozenset(kind for kind in WEIGHTS if kind.startswith(("kill", "stop")))

SURE = ("stop worker", "stop worker", "stop main", "kill child", "kill worker", "kill locks")
"""These come first, so that a short storm has them too, and those past the lease."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        at: seconds after the storm's begin.
        kind: see :data:`WEIGHTS`.
        where: 0 to 1, picks the victim.
        length: seconds until what was stopped goes on, or what was killed is started again.
    """

    at: float
    kind: str
    where: float
    length: float


def plan(seed: int, seconds: float, kinds: Sequence[str] = tuple(WEIGHTS)) -> list[Fault]:
    """Return the faults of a storm.

    Args:
        seed: the same seed and seconds give the same plan.
        seconds: how long the storm lasts.
        kinds: those that may come.
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    first = [kind for kind in SURE if kind in kinds]
    at = CALM
    while at < seconds:
        kind = first.pop(0) if first else rng.choices(kinds, [WEIGHTS[k] for k in kinds])[0]
        length = _length(kind, rng, past_lease=bool(first))
        faults.append(Fault(round(at, 3), kind, rng.random(), round(length, 3)))
        at += rng.uniform(0.2, 2 * MEAN_PAUSE - 0.2)
    return faults


def _length(kind: str, rng: random.Random, *, past_lease: bool) -> float:
    """Return for how long: past the lease where that is the point, and sometimes within it."""
    past = LEASE * rng.uniform(1.2, 2.0)
    match kind:
        case "stop child" | "stop main" | "stop worker":
            return past if past_lease else rng.choice([past, LEASE * rng.uniform(0.1, 0.8)])
        case "kill locks" | "stop locks":
            return rng.choice([rng.uniform(0.1, 1.0), rng.uniform(1.0, 1.4 * LEASE)])
        case "kill worker":
            return rng.uniform(0.1, 2.0)
        case _:
            return 0.0

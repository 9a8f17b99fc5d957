"""A fixed random order of the mutants: the first ones are a sample, with a confidence interval."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Final

from mutation.results import Mutant

SEED: Final = 1
SURE: Final = 1.96
"""Standard deviations on either side, for 95 %."""


def sampled(found: Iterable[Mutant], share: float = 1.0, seed: int = SEED) -> Iterator[Mutant]:
    """Yield the share of each module's mutants that comes first, in the order of chance.

    The order depends on the mutants' names and the seed alone, so that who goes on after an
    interruption, or with a larger share, goes on with the same sample.
    """
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in found:
        by_module[mutant.module].append(mutant)
    for those in by_module.values():
        those.sort(key=lambda mutant: _rank(mutant, seed))
        yield from those[: math.ceil(share * len(those))]


def judged(those: Iterable[Mutant], seed: int = SEED) -> list[Mutant]:
    """Return the mutants of a module that were judged before the first that was not.

    In the order of chance: what else was judged was picked by something else, such as that its
    function is old, and would bend the score.
    """
    return list(takewhile(lambda mutant: mutant.judged, sampled(those, seed=seed)))


def interval(killed: int, of: int) -> tuple[float, float]:
    """Return the bounds of a share that was found in a sample, after Wilson, with 95 %."""
    share, square = killed / of, SURE**2
    middle = share + square / (2 * of)
    around = SURE * math.sqrt(share * (1 - share) / of + square / (4 * of**2))
    return (middle - around) / (1 + square / of), (middle + around) / (1 + square / of)


def _rank(mutant: Mutant, seed: int) -> str:
    return hashlib.sha256(f"{seed} {mutant.name}".encode()).hexdigest()

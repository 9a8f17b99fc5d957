"""The table in docs/endings.md: the measured times, endings x pools.

::

    CSL_TEST_MATRIX=/tmp/matrix pytest --full tests/integration/test_ending_matrix*.py
    PYTHONPATH=tests python -m integration.ending_matrix /tmp/matrix

The first command runs every ending in every pool, and records the time until the next task starts.
The second one writes the longest times into docs/endings.md, between the marks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from integration.endings import ENDINGS, POOLS, Ending

VARIABLE: Final = "CSL_TEST_MATRIX"
DOC: Final = Path(__file__).parents[2] / "docs" / "endings.md"
BEGIN, END = (
    "<!-- matrix: written by tests/integration/ending_matrix.py -->",
    "<!-- end of matrix -->",
)

Measured = dict[tuple[str, str], float]
"""(ending, pool) -> the longest that the next task waited, in seconds."""


def note(ending: Ending, pool: str, took: float) -> None:
    """Append a measurement to the file that the environment names, if it does."""
    path = os.environ.get(VARIABLE)
    if path:
        line = json.dumps({"ending": ending.name, "pool": pool, "took": took})
        with Path(path).open("a") as file:
            file.write(line + "\n")


def read(path: Path) -> Measured:
    """Return the worst of each cell."""
    worst: Measured = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        cell = (entry["ending"], entry["pool"])
        worst[cell] = max(worst.get(cell, 0.0), entry["took"])
    return worst


def reasons() -> dict[str, str]:
    """Return why endings do not exist in pools, each with its letter."""
    found = dict.fromkeys(r for ending in ENDINGS for p, r in ending.cannot.items() if p in POOLS)
    return {reason: chr(ord("a") + number) for number, reason in enumerate(found)}


def states(ending: Ending) -> str:
    """Return Celery's state in the end; where they differ, with early and with late ack."""
    said = [ending.state]
    if ending.late is not None and ending.late != ending.state:
        said.append(f"late: {ending.late}")
    for found in dict.fromkeys(ending.but[pool][0] for pool in POOLS if pool in ending.but):
        pools = ", ".join(p for p in POOLS if p in ending.but and ending.but[p][0] == found)
        said.append(f"{pools}: {' or '.join(found)}")
    return "; ".join(said)


def cell(ending: Ending, pool: str, measured: Measured) -> str:
    """Return what a cell shows: milliseconds, or the letter of a reason."""
    if pool in ending.cannot:
        return f"[{reasons()[ending.cannot[pool]]}](#where-a-pool-has-no-such-ending)"
    return f"{1000 * measured[ending.name, pool]:.0f} ms"


def lines(measured: Measured) -> Iterator[str]:
    """Yield the lines of the matrix."""
    for part in dict.fromkeys(ending.part for ending in ENDINGS):
        yield from ("", f"### {part}", "")
        yield f"| ending | Celery's state | bound | {' | '.join(POOLS)} |"
        yield "|---" * (3 + len(POOLS)) + "|"
        for ending in ENDINGS:
            if ending.part == part:
                cells = [cell(ending, pool, measured) for pool in POOLS]
                row = [ending.name, states(ending), f"{ending.bound:g} s", *cells]
                yield f"| {' | '.join(row)} |"
    yield from ("", "### Where a pool has no such ending", "")
    for reason, letter in reasons().items():
        yield f"- **{letter}**: {reason}."
    yield ""


def render(text: str, measured: Measured) -> str:
    """Return the text of the docs with the matrix between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *lines(measured), END + after])


if __name__ == "__main__":
    DOC.write_text(render(DOC.read_text(), read(Path(sys.argv[1]))))

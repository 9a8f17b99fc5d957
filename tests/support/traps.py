"""The known defects of comparable systems ("traps"), and the tests that this library avoids them.

A test that is about a trap carries its number in its name: ``test_T5_…``, ``test_t24_l29_…``.
``PYTHONPATH=tests python -m support.traps`` writes the table into docs/traps.md.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]
PAGE: Final = TESTS.parent / "docs" / "traps.md"
BEGIN, END = "<!-- traps: written by tests/support/traps.py -->", "<!-- end of traps -->"
NUMBERS: Final = re.compile(r"test_((?:[tl]\d+_)+)", re.IGNORECASE)


@dataclass(frozen=True)
class Trap:
    """One way in which locks and queues have failed.

    Args:
        number: T: of tasks; L: of locks.
        story: what went wrong.
        source: where.
        untested: why no test is about it.
    """

    number: str
    story: str
    source: str = ""
    untested: str = ""


def traps() -> list[Trap]:
    """Return all traps: the lines of traps.txt."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if not line.startswith("#")]
    return [Trap(*row) for row in rows]


TRAPS: Final = traps()

Tests = Mapping[str, list[tuple[Path, str]]]
"""Number -> file and name of each test that carries it."""


@functools.cache
def carriers() -> Tests:
    """Return which tests carry which number."""
    found: dict[str, list[tuple[Path, str]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            carried = isinstance(node, ast.FunctionDef) and NUMBERS.match(node.name)
            for number in carried[1].upper().strip("_").split("_") if carried else ():
                found.setdefault(number, []).append((path.relative_to(TESTS), node.name))
    return found


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    carrying = carriers()
    yield from ("", "| trap | what went wrong, and where | tests |", "|---|---|---|")
    for trap in TRAPS:
        where = f" ({trap.source})" if trap.source else ""
        named = [
            f"[`{short(name)}`](../tests/{path.as_posix()})"
            for path, name in carrying.get(trap.number, [])
        ]
        yield f"| {trap.number} | {trap.story}{where} | {' '.join(named) or trap.untested} |"
    yield ""


def short(name: str) -> str:
    """Return a test's name as a sentence."""
    return NUMBERS.sub("", name).replace("_", " ")


def rendered(text: str) -> str:
    """Return the text of the page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *table(), END + after])


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

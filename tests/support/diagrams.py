"""The state diagrams of the documentation, from the tables of moves.

Write them anew with ``python -m tests.support.diagrams``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from celery_singleton_lock.core.record_state import RECORD_MOVES
from celery_singleton_lock.worker.message_stage import ACK_MOVES, STAGE_MOVES

PAGE: Final = Path(__file__).parents[2] / "docs" / "how-it-works.md"
TABLES: Final[Mapping[str, Mapping[Any, Mapping[Any, str]]]] = {
    "stages": STAGE_MOVES,
    "acknowledgement": ACK_MOVES,
    "records": RECORD_MOVES,
}


def diagram(moves: Mapping[Any, Mapping[Any, str]]) -> Iterator[str]:
    """Yield the lines of a diagram; the first state is where it begins."""
    first = next(iter(moves))
    yield "stateDiagram-v2"
    if first is not None:
        yield f"    [*] --> {_name(first)}"
    for was, ways in moves.items():
        for to, when in ways.items():
            yield f"    {_name(was)} --> {_name(to)}: {when}"
        if not ways:
            yield f"    {_name(was)} --> [*]"


def _name(state: enum.Enum | None) -> str:
    return "[*]" if state is None else state.name.lower()


def written(page: str) -> str:
    """Return the text of the page with the diagrams as the tables give them."""
    for name, moves in TABLES.items():
        begin, end = f"<!-- {name}: written by python -m tests.support.diagrams -->", "<!-- end -->"
        block = "\n".join([begin, "", "```mermaid", *diagram(moves), "```", "", end])
        page, found = re.subn(
            f"{re.escape(begin)}.*?{end}", lambda _, text=block: text, page, flags=re.DOTALL
        )
        assert found == 1, f"{name} is {found} times in {PAGE.name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

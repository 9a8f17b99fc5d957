"""docs/mutation.md: what became of the mutants, and of which it may be so."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from mutation.accepted import accepted, reason_for
from mutation.verdicts import ROOT, Mutant

PAGE: Final = ROOT / "docs" / "mutation.md"
SCORE: Final = "<!-- score: written by python -m tests.mutation -->"
LIST: Final = "<!-- accepted: written by python -m tests.mutation -->"
END: Final = "<!-- end -->"

COLUMNS: Final = (
    "module",
    "mutants",
    "killed",
    "no difference",
    "survived",
    "not run",
    "score",
)


def table(found: Iterable[Mutant]) -> Iterator[str]:
    """Yield the lines of the score table; what only words a sentence otherwise is left out."""
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in found:
        if not mutant.rewords:
            by_module[mutant.module].append(mutant)
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|" + "---:|" * (len(COLUMNS) - 1)
    for module, mutants in sorted(by_module.items()):
        yield _row(f"`{module}`", mutants)
    yield _row("**all**", [mutant for mutants in by_module.values() for mutant in mutants])


def _row(name: str, mutants: Sequence[Mutant]) -> str:
    judged = [mutant for mutant in mutants if mutant.judged]
    killed = sum(mutant.killed for mutant in judged)
    accepted = sum(not mutant.killed and bool(reason_for(mutant)) for mutant in judged)
    survived = len(judged) - killed - accepted
    numbers = (len(mutants), killed, accepted, survived, len(mutants) - len(judged))
    score = "" if len(judged) < len(mutants) else _percent(killed, len(judged) - accepted)
    return f"| {name} | {' | '.join(map(str, numbers))} | {score} |"


def _percent(killed: int, of: int) -> str:
    """Write a score; 100 % is said of no less."""
    return "100 %" if killed == of else f"{min(100 * killed / of, 99.9):.1f} %"


def reasons() -> Iterator[str]:
    """Yield the lines of the list of mutants that may live."""
    for reason, those in groupby(accepted(), key=accepted().__getitem__):
        yield from (f"**{reason}**", "", "```diff")
        for module, function, was, becomes in those:
            yield f"@@ {module} {function}"
            yield from (f"-{line}" for line in was.splitlines())
            yield from (f"+{line}" for line in becomes.splitlines())
        yield from ("```", "")


def written(text: str, mark: str, lines: Iterable[str]) -> str:
    """Return the text of the page with ``lines`` behind ``mark``."""
    body = "\n".join(["", *lines]).rstrip()
    pattern = re.compile(f"({re.escape(mark)}\n).*?({re.escape(END)})", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{body}\n\n{match[2]}", text)


def write(found: Iterable[Mutant], page: Path = PAGE) -> None:
    """Write the page anew."""
    text = written(page.read_text(encoding="utf-8"), SCORE, table(found))
    page.write_text(written(text, LIST, reasons()), encoding="utf-8")

"""docs/mutation.md: the results, and the accepted mutants."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from mutation.accepted import accepted, reason_for
from mutation.results import ROOT, Mutant
from mutation.sample import SEED, interval, judged

PAGE: Final = ROOT / "docs" / "mutation.md"
SCORE: Final = "<!-- score: written by python -m tests.mutation -->"
LIST: Final = "<!-- accepted: written by python -m tests.mutation -->"
END: Final = "<!-- end -->"

COLUMNS: Final = (
    "module",
    "mutants",
    "judged",
    "killed",
    "no difference",
    "survived",
    "score",
)


def table(found: Iterable[Mutant], seed: int = SEED) -> Iterator[str]:
    """Yield the lines of the score table; what only words a sentence otherwise is left out."""
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in found:
        if not mutant.rewords:
            by_module[mutant.module].append(mutant)
    rows = [Row(name, len(those), judged(those, seed)) for name, those in by_module.items()]
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|" + "---:|" * (len(COLUMNS) - 1)
    for row in sorted(rows, key=lambda row: row.module):
        yield f"| `{row.module}` | {' | '.join(map(str, row.numbers))} | {row.score} |"
    numbers = map(sum, zip(*(row.numbers for row in rows), strict=True))
    yield f"| **all** | {' | '.join(map(str, numbers))} | {_overall(rows)} |"


@dataclass(frozen=True)
class Row:
    """What became of a module's mutants.

    Args:
        module: path below the package.
        mutants: how many there are.
        judged: all of them, or a sample.
    """

    module: str
    mutants: int
    judged: Sequence[Mutant]

    @property
    def killed(self) -> int:
        return sum(mutant.killed for mutant in self.judged)

    @property
    def accepted(self) -> int:
        return sum(not mutant.killed and bool(reason_for(mutant)) for mutant in self.judged)

    @property
    def of(self) -> int:
        """How many a test should have killed."""
        return len(self.judged) - self.accepted

    @property
    def is_sample(self) -> bool:
        return len(self.judged) < self.mutants

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.mutants, len(self.judged), self.killed, self.accepted, self.of - self.killed

    @property
    def score(self) -> str:
        if not self.of:
            return ""
        if not self.is_sample:
            return _percent(self.killed / self.of)
        low, high = interval(self.killed, self.of)
        return f"{_percent(self.killed / self.of)} ({100 * low:.1f} to {100 * high:.1f} %)"


def _overall(rows: Sequence[Row]) -> str:
    """Return the score of all: each module's counts as much as it has mutants."""
    if not all(row.of for row in rows):
        return ""
    mutants = sum(row.mutants for row in rows)
    return _percent(sum(row.mutants * row.killed / row.of for row in rows) / mutants)


def _percent(share: float) -> str:
    """Write a score; 100 % is said of no less."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.9):.1f} %"


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


def write(found: Iterable[Mutant], page: Path = PAGE, *, seed: int = SEED) -> None:
    """Write the page anew."""
    text = written(page.read_text(encoding="utf-8"), SCORE, table(found, seed))
    page.write_text(written(text, LIST, reasons()), encoding="utf-8")

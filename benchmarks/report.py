"""Format results as tables and JSON."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from benchmarks.board import Ran


def machine(server: str) -> dict[str, Any]:
    """Return the machine and the versions."""
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "celery": version("celery"),
        "redis_py": version("redis"),
        "redis": server,
    }


def command(benchmark: str) -> str:
    """Return the command line of this process, without ``--json``."""
    options = [argument for argument in sys.argv[1:] if argument != "--json"]
    return shlex.join(["python", "-m", f"benchmarks.{benchmark}", *options])


def describe(facts: dict[str, Any]) -> str:
    return f"{facts['date']} (load before: {facts['load_before']}), {describe_versions(facts)}"


def describe_versions(facts: dict[str, Any]) -> str:
    """Return the machine and the versions, without what differs from run to run."""
    return (
        f"{facts['cores']} cores, Python {facts['python']}, Celery {facts['celery']}, "
        f"redis-py {facts['redis_py']}, {facts['redis']}"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table with columns of equal width; the first is text."""
    cells = [[str(cell) for cell in row] for row in [heads, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join(
        "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)
    )
    return "\n".join([lines[0], rule + "|", *lines[1:]])


def target(
    what: str, value: float | None, *, most: float | None = None, least: float | None = None
) -> dict[str, Any]:
    """Return a target, the measured value, and whether the target is met."""
    met = value is not None
    met = met and (most is None or value <= most) and (least is None or value >= least)  # type: ignore[operator]
    bound = f"<= {most:g}" if most is not None else f">= {least:g}"
    return {"what": what, "value": value, "target": bound, "met": met}


def verdicts(targets: Sequence[dict[str, Any]]) -> str:
    return "\n".join(
        f"{'met   ' if each['met'] else 'MISSED'}  {each['what']}: {each['value']} "
        f"(target {each['target']})"
        for each in targets
    )


def median(values: Sequence[float], digits: int = 3) -> float:
    return round(statistics.median(values), digits)


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def gaps(chain: Sequence[Ran]) -> list[float]:
    """Return the milliseconds from each end to the next start, in order of start."""
    ordered = sorted(chain, key=lambda ran: ran.start)
    return [1000 * (after.start - before.end) for before, after in pairwise(ordered)]


def inversions(chain: Sequence[Ran]) -> int:
    """Return how often a task ran directly after one that was published later."""
    order = [ran.slot for ran in sorted(chain, key=lambda ran: ran.start)]
    return sum(after < before for before, after in pairwise(order))

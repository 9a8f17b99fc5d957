"""``python -m benchmarks.table FILE.json... [--write]``: the tables of speed in the documentation.

The files are what benchmarks print with ``--json``. Their figures replace those of the same rows in
``results.json``; all other rows keep theirs, so a benchmark can be run without the others. With
``--write``, README.md and docs/costs.md get the new tables; without it, one is only printed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import report

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = Path(__file__).with_name("results.json")
BEGIN: Final = "<!-- figures:benchmarks -->"
END: Final = "<!-- /figures:benchmarks -->"
COLUMNS: Final = {
    "work": "work",
    "ours": "this package",
    "peer": "compared with",
    "ratio": "ratio",
    "target": "target",
    "command": "command",
    "date": "date",
}

Figures = dict[str, dict[str, str]]
"""Key of a row -> its cells, and the machine."""


class Row(NamedTuple):
    """A row of the table. Its cells are formats of what :func:`facts` returns.

    Attributes:
        source: the benchmark, see :func:`source_of`.
        targets: patterns of targets of the benchmark, each of which matches one. In cells, ``{0}``
            is the value of the first.
    """

    source: str
    work: str
    ours: str
    peer: str = ""
    ratio: str = ""
    targets: tuple[str, ...] = ()


def rate(peer: str, title: str = "") -> str:
    return f"{title}{{peers[{peer}][tasks_per_second]:.0f}} tasks/s"


FAULTS: Final = ("two tasks of a key at once", "*after a later one*", "*not run exactly once")
ROWS: Final = {
    "no-op": Row(
        "uncontended",
        "no-op tasks, each with its own free lock",
        rate("locked"),
        rate("redis_py", "redis-py's lock in the body: "),
        "{0:.2f}",
        ("rate, of redis-py's lock*",),
    ),
    "no-op, plain": Row(
        "uncontended",
        "the same",
        rate("locked"),
        rate("plain", "plain tasks: "),
        "{peers[locked][of_plain]:.2f}",
    ),
    "no-op, cpu": Row(
        "uncontended",
        "CPU time of a no-op task in the worker and both Redis servers",
        "{peers[locked][cpu_ms]:.2f} ms",
        "redis-py's lock in the body: {peers[redis_py][cpu_ms]:.2f} ms",
        "{0:.2f}",
        ("CPU, redis-py's lock's of ours",),
    ),
    "no-op, calls": Row(
        "uncontended",
        "additional round trips of a no-op task: in pool processes / at the broker / "
        "in the main process",
        "{0:g} / {1:g} / {2:g}",
        targets=("*in children, at most", "extra calls at the broker*", "*by the main process"),
    ),
    "delay": Row(
        "uncontended --delay",
        "no-op tasks, {ms[delay]:g} ms each way to the locks' Redis",
        rate("locked"),
        rate("redis_py", "redis-py's lock in the body: "),
        "{0:.2f}",
        ("rate, of redis-py's lock*",),
    ),
    "body": Row(
        "uncontended --body",
        "tasks of {ms[body]:g} ms, {settings[processes]} processes",
        rate("locked"),
        rate("redis_py", "redis-py's lock in the body: "),
        "{0:.2f}",
        ("rate, of redis-py's lock*",),
    ),
    **{
        f"hand-over, {scene}": Row(
            "hand_over",
            f"end of a task to the start of the next of its key, {slots}: p50 / p99",
            "{0:.2f} / {1:.1f} ms",
            f"redis-py's lock in the body: {{scenes[{scene}][redis_py][p50_ms]:.2f}} / "
            f"{{scenes[{scene}][redis_py][p99_ms]:.1f}} ms",
            targets=(f"{scene}: p50 in ms", f"{scene}: p99 in ms"),
        )
        for scene, slots in (("beside", "other tasks in all other slots"), ("alone", "free slots"))
    },
    "hand-over, faults": Row(
        "hand_over",
        "both: tasks at once / not run exactly once, in the worst round",
        "{0:g} / {1:g}, and {2:g} / {3:g}",
        targets=("beside: overlaps*", "beside: not run*", "alone: overlaps*", "alone: not run*"),
    ),
    "contended": Row(
        "contended",
        "time for {settings[hot]} tasks of one key and {settings[cold]} others, of {ms[hold]:g} ms",
        "{peers[locked][makespan]:.2f} s",
        "python-redis-lock in the body: {peers[redis_lock][makespan]:.2f} s",
        "{0:.2f}",
        ("makespan, of python-redis-lock's",),
    ),
    "contended, others": Row(
        "contended",
        "the same: end of the last task with another key",
        "{peers[locked][last_cold]:.2f} s",
        "plain tasks: {peers[plain][last_cold]:.2f} s",
        "{0:.2f}",
        ("last cold task, of plain's*",),
    ),
    "contended, faults": Row(
        "contended",
        "the same: tasks at once / out of order / not run exactly once, in the worst round",
        "{0:g} / {1:g} / {2:g}",
        targets=("overlaps*", "order inversions*", "tasks not run exactly once"),
    ),
    "flights": Row(
        "flights",
        "legs of {settings[aircraft]} aircraft at a time, each aircraft in order",
        "{peers[locked][per_second]:.0f} tasks/s",
        "plain tasks, out of order: {peers[plain][per_second]:.0f} tasks/s",
        "{0:.2f}",
        ("rate, of plain",),
    ),
    "flights, idle": Row(
        "flights",
        "the same: a lock is free and wanted while a slot is free, p50",
        "{0:.1f} ms",
        "redis-py's lock in the body: {peers[redis_py][idle_p50_ms]:.1f} ms",
        targets=("lock free and wanted*",),
    ),
    "flights, faults": Row(
        "flights",
        "the same: tasks at once / out of order / not run exactly once, in the worst round",
        "{0:g} / {1:g} / {2:g}",
        targets=FAULTS,
    ),
    "zipf": Row(
        "zipf",
        "tasks of {ms[body]:g} ms with {settings[keys]:,} keys, a few of which most tasks use",
        "{peers[locked][per_second]:.0f} tasks/s",
        "redis-py's lock in the body: {peers[redis_py][per_second]:.0f} tasks/s",
        "{0:.2f}",
        ("rate, of redis-py's lock*",),
    ),
    "zipf, faults": Row(
        "zipf",
        "the same: tasks at once / out of order / not run exactly once, in the worst round",
        "{0:g} / {1:g} / {2:g}",
        targets=FAULTS,
    ),
    "renewals": Row(
        "scale",
        "longest script while a worker renews 1,000 / 5,000 leases",
        "{0:.2f} / {1:.2f} ms",
        targets=("longest script, 1000 leases*", "longest script, 5000 leases*"),
    ),
    "refused": Row(
        "scale",
        "script of a refused acquire, with 1,000 holders: new / redelivered message",
        "{rows[refused][new message][usec_at_1000]:.0f} / "
        "{rows[refused][redelivered message][usec_at_1000]:.0f} us",
        "one holder: {rows[refused][new message][usec_at_1]:.0f} / "
        "{rows[refused][redelivered message][usec_at_1]:.0f} us",
        "{0:.2f} / {1:.2f}",
        ("*of a new message*", "*of a redelivered message*"),
    ),
    "views": Row(
        "scale",
        "slowest view of an operator, with {settings[locks]:,} locks",
        "{0:.3f} s",
        targets=("slowest view*",),
    ),
    "idle": Row(
        "scale",
        "commands in Redis for an idle worker",
        "{0:g} per second",
        targets=("idle worker, commands a second",),
    ),
    "idle fleet": Row(
        "scale",
        "share of a core that Redis uses for {rows[idle][fleet]:,} idle workers / "
        "share of their commands that was sent",
        "{0:.3f} / {1:.3f}",
        targets=("*idle workers, share of a core", "of what they send"),
    ),
    "parked": Row(
        "scale",
        "memory of Redis for each parked task beyond its message, {settings[parked]:,} parked: "
        "one key / ten on each key",
        "{0:.0f} / {1:.0f} bytes",
        targets=("one key: bytes*", "* keys: bytes*"),
    ),
    "parked, release": Row(
        "scale",
        "script of a release, {settings[parked]:,} parked: one key / ten on each key",
        "{rows[parked][one key][usec_of_a_release]:.0f} / "
        "{rows[parked][many keys][usec_of_a_release]:.0f} us",
        "{rows[parked][one key][few]:,} parked: "
        "{rows[parked][one key][usec_of_a_release_at_few]:.0f} / "
        "{rows[parked][many keys][usec_of_a_release_at_few]:.0f} us",
        "{0:.2f} / {1:.2f}",
        ("one key: release*", "* keys: release*"),
    ),
    **{
        f"rate, {rate}": Row(
            "flow",
            f"tasks of one key at {spoken_rate}, two workers: most starts in a period / "
            "share of the rate",
            "{0:g} / {1:.3f}",
            "Celery's rate_limit, divided by the workers: "
            f"{{rows[rates][{rate}][rate_limit][most_starts]:g}} / "
            f"{{rows[rates][{rate}][rate_limit][share]:.3f}}",
            targets=(f"{rate}: most starts in a period", f"{rate}: share of the rate"),
        )
        for rate, spoken_rate in (("200/s", "200 a second"), ("1/3s", "1 in 3 seconds"))
    },
    "rate, calls": Row(
        "flow",
        "calls to the locks' Redis of a task that waited for its rate / of one that did not",
        "{0:g} / {1:g}",
        targets=("200/s: calls of a task that waited", "200/s: calls of a task that did not"),
    ),
    "rate, backlog": Row(
        "flow",
        "scripts of a start at a rate, with {rows[backlog][parked]:,} parked",
        "{rows[backlog][usec_of_a_start]:.0f} us",
        "{rows[backlog][few]:,} parked: {rows[backlog][usec_of_a_start_at_few]:.0f} us",
        "{0:.2f}",
        ("start, of that with * parked",),
    ),
    "groups, share": Row(
        "flow",
        "a task of a small group beside {rows[fairness][parked]:,} of another: starts until its "
        "own, p99 / starts off the share by weights",
        "{0:g} / {1:g}",
        targets=("wait of a small group, p99, in tasks", "starts off the share*"),
    ),
    "groups, wait": Row(
        "flow",
        "wait of a small tenant's task beside {settings[backlog]:,} of another, at most, in tasks; "
        "two workers",
        "{0:.1f}",
        "without groups: {rows[tenants][in_order][wait_most]:.0f}",
        targets=("wait of a small tenant, at most, in tasks",),
    ),
    "unique, send": Row(
        "unique",
        "sending a unique call / one like a call that was sent before",
        "{rows[sent][locked][us]:.0f} / {rows[refused][locked][us]:.0f} us",
        "plain task: {rows[sent][plain][us]:.0f} us; celery-singleton: "
        "{rows[sent][celery-singleton][us]:.0f} / {rows[refused][celery-singleton][us]:.0f} us; "
        "celery-once: {rows[sent][celery-once][us]:.0f} / "
        "{rows[refused][celery-once][us]:.0f} us",
    ),
    "unique, threads": Row(
        "unique",
        "messages of 50 threads that send the same call / at most, if one more sender is killed",
        "{0:g} / {1:g}",
        targets=("messages of 50 threads*", "the same, if one more sender dies: most"),
    ),
    "followers": Row(
        "unique",
        "{followers[followers]:,} duplicates that follow a call: its runs / time until all have "
        "its result",
        "{0:g} / {followers[ended_after]:.1f} s",
        targets=("runs of a call that others follow",),
    ),
    "debounce": Row(
        "unique",
        "{debounce[messages]:,} debounced calls of {debounce[keys]:,} keys: runs of a key / keys "
        "whose newest call ran",
        "{0:g} / {1:g}",
        targets=("runs of debounced calls, per key", "keys whose newest call ran"),
    ),
}
PAGES: Final = {
    "docs/costs.md": (list(ROWS), list(COLUMNS)),
    "README.md": (
        ["no-op", "no-op, plain", "hand-over, beside", "parked", "idle"],
        ["work", "ours", "peer", "ratio", "command", "date"],
    ),
}
"""Page -> its rows and columns."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    parser.add_argument("--write", action="store_true", help="write results.json and both pages")
    asked = parser.parse_args(arguments)
    results = known()
    for file in asked.files:
        renewed = figures(json.loads(file.read_text(encoding="utf-8")))
        print(f"{file}: {', '.join(renewed) or 'no row'}", file=sys.stderr)
        results |= renewed
    if not asked.write:
        print(section(results, "docs/costs.md"))
        return 0
    in_order = {key: results[key] for key in ROWS if key in results}
    RESULTS.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text(encoding="utf-8"), page, results), encoding="utf-8")
    return 0


def known() -> Figures:
    """Return the rows of results.json."""
    found: Figures = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return found


# -- from a benchmark to its rows -----------------------------------------------------------------


def source_of(found: dict[str, Any]) -> str:
    """Return the benchmark, with the option that makes it a row of its own."""
    own = ("delay", "body") if found["benchmark"] == "uncontended" else ()
    return " ".join(
        [found["benchmark"], *(f"--{option}" for option in own if found["settings"][option])]
    )


def figures(found: dict[str, Any]) -> Figures:
    """Return the rows of one benchmark's output, without those of which it has not all figures."""
    source, given = source_of(found), facts(found)
    rows = {key: cells(row, given) for key, row in ROWS.items() if row.source == source}
    return {key: row for key, row in rows.items() if row}


def facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return the output, and what a format cannot compute: ``ms``, ``cpu_ms``, ``many keys``."""
    given = {**found, "ms": {}, "rows": dict(found.get("rows", {}))}
    for setting, value in found["settings"].items():
        if isinstance(value, float):
            given["ms"][setting] = 1000 * value
    if found["benchmark"] == "uncontended":
        given["peers"] = {peer: {**row, "cpu_ms": cpu(row)} for peer, row in found["peers"].items()}
    if parked := given["rows"].get("parked"):
        *_, many = parked.values()
        given["rows"]["parked"] = {**parked, "many keys": many}
    return given


def cpu(row: dict[str, Any]) -> float:
    """Return the CPU milliseconds of a task, without those of the proxy that delays."""
    used: dict[str, int] = row["cpu_us_per_task"]
    return sum(us for part, us in used.items() if part != "delay") / 1000


def cells(row: Row, given: dict[str, Any]) -> dict[str, str] | None:
    """Return the cells of a row; None if a peer or a part of the benchmark was left out."""
    targets = [
        target
        for pattern in row.targets
        for target in given["targets"]
        if fnmatchcase(target["what"], pattern)
    ]
    values = [target["value"] for target in targets]
    if len(targets) != len(row.targets) or None in values:
        return None
    try:
        found = {
            column: getattr(row, column).format(*values, **given)
            for column in ("work", "ours", "peer", "ratio")
        }
    except (KeyError, TypeError):  # a peer without a row, a ratio that is None
        return None
    machine = given["machine"]
    busy = " (busy machine)" if machine["load_before"] > machine["cores"] / 2 else ""
    server = machine["redis"].partition(" (")[0]  # without the path of the program
    return {
        **found,
        "target": " / ".join(dict.fromkeys(map(spoken, targets))),
        "command": f"`{given['command']}`",
        "date": f"{machine['date']}, load {machine['load_before']:.1f}{busy}",
        "machine": report.describe_versions({**machine, "redis": server}),
    }


def spoken(target: dict[str, Any]) -> str:
    bound = target["target"].replace("<=", "at most").replace(">=", "at least")
    return bound if target["met"] else f"{bound} (missed)"


# -- from the rows to the pages -------------------------------------------------------------------


def section(results: Figures, page: str) -> str:
    """Return what stands between the markers of a page."""
    keys, columns = PAGES[page]
    rows = [results[key] for key in keys if key in results]
    table = plain_table(
        [COLUMNS[column] for column in columns],
        [[row[column] for column in columns] for row in rows],
    )
    machines = dict.fromkeys(row["machine"] for row in rows)
    return "\n\n".join([table, f"Measured with {'; and with '.join(machines)}."])


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without padding: one wide cell would widen all rows."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written(text: str, page: str, results: Figures) -> str:
    """Return the text of a page with its section written again.

    Raises:
        ValueError: the page does not have the markers once.
    """
    between = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    new, times = between.subn(lambda _: section(results, page) + "\n", text)
    if times != 1:
        msg = f"{page} has {BEGIN} … {END} {times} times; it needs them once"
        raise ValueError(msg)
    return new


if __name__ == "__main__":
    sys.exit(main())

"""Look for holes in real traffic: ``python -m tests.chaos --minutes 5 --seed 7``.

Kills, stops and cuts what runs real tasks, and judges the history. The same seed gives the same
plan of faults and the same tasks; who meets whom is up to the machine. A history in which a
rule was broken is kept, and what happened around it is printed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos.bounds import measure, table
from chaos.broker import BROKERS
from chaos.defects import VARIANTS
from chaos.fleet import CREWS
from chaos.history import History
from chaos.rules import RULES, Violation, lost_on_the_way
from chaos.storm import Report, Storm

SHOWN = 3
"""Violations whose history is printed."""
BEFORE, AFTER = 8.0, 2.0
"""Seconds of the history that are printed before and after a violation."""
PROVED = 60.0
"""Seconds of a storm that is to catch a wrong variant: half of them are enough, unless the machine
is busy otherwise."""


OF_TIME = {"nothing waits beside a free lock"}
"""Rules that a machine can break that is busy with something else."""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    options = _options()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    unseen = [variant for variant in options.catch if not _sees(variant, seed)]
    return _storm(options, seed) or len(unseen)


def _sees(variant: str, seed: int) -> bool:
    """Return whether one of two storms sees a wrong variant soon."""
    for each in (seed, seed + 1):
        with tempfile.TemporaryDirectory(prefix="csl-chaos-", ignore_cleanup_errors=True) as folder:
            caught = Storm(Path(folder), each, PROVED, broken=variant).run().caught
        after = "NOT caught" if caught is None else f"caught after {caught:.0f} s"
        print(f"{variant}: {after} (seed {each})", flush=True)
        if caught is not None:
            return True
    return False


def _storm(options: argparse.Namespace, seed: int) -> int:
    seconds = options.minutes * 60
    folder = Path(tempfile.mkdtemp(prefix=f"csl-chaos-{seed}-"))
    print(f"--minutes {options.minutes:g} --seed {seed}; history in {folder}", flush=True)
    began = time.monotonic()
    report = Storm(
        folder,
        seed,
        seconds,
        broker=options.broker,
        broken=options.broken,
        managed_workers=tuple(options.workers),
        flow=options.flow,
    ).run()
    print(f"{time.monotonic() - began:.0f} s\n{summary(report)}")
    if options.broken:
        return _caught(report, options.broken, folder)
    kept = options.rounds == 0 or _bounds_kept(options.rounds)
    if report.violations:
        print(excerpts(report))
        print(f"seed {seed}; the history is kept in {folder}/journal")
    elif not options.keep:
        shutil.rmtree(folder, ignore_errors=True)  # a keeper of RabbitMQ may be at it as well
    return 0 if kept and not report.violations else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="how long the storm lasts")
    parser.add_argument("--seed", type=int, default=None, help="repeat a plan")
    parser.add_argument("--broker", choices=BROKERS, default="redis")
    parser.add_argument(
        "--workers",
        type=_pool_and_slots,
        default=CREWS,
        nargs="+",
        metavar="POOL:SLOTS",
        help="pool and concurrency of each worker, as prefork:3 gevent:8 solo:1",
    )
    parser.add_argument("--flow", action="store_true", help="also tasks with flow control")
    parser.add_argument("--broken", choices=VARIANTS, default="", help="a variant to be caught")
    parser.add_argument(
        "--catch",
        choices=VARIANTS,
        default=[],
        nargs="*",
        help="variants to be caught before: else the storm proves nothing",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="how often each time to the next one is measured"
    )
    parser.add_argument("--keep", action="store_true", help="keep the history in any case")
    return parser.parse_args()


def _pool_and_slots(text: str) -> tuple[str, int]:
    pool, _, slots = text.partition(":")
    return pool, int(slots)


def _bounds_kept(rounds: int) -> bool:
    """Measure after the storm how soon the next one begins; return whether all bounds were kept."""
    with tempfile.TemporaryDirectory(prefix="csl-chaos-bounds-") as folder:
        found = measure(Path(folder), rounds)
    print(table(found), flush=True)
    return all(each.kept for each in found)


def _caught(report: Report, broken: str, folder: Path) -> int:
    if report.violations:
        after = "" if report.caught is None else f" after {report.caught:.0f} s"
        print(f"{broken}: caught{after}")
        shutil.rmtree(folder, ignore_errors=True)  # a keeper of RabbitMQ may be at it as well
        return 0
    print(f"{broken}: NOT caught; the history is kept in {folder}/journal")
    return 1


def summary(report: Report) -> str:
    """Return what happened, and which rules were broken."""
    history = report.history
    states = Counter(event["state"] for event in history.of("final"))
    disturbed = sum(map(history.disturbed, history.runs))
    killed = sum(run.killed for run in history.runs)
    refused = sum(not row["accepted"] for row in history.of("register"))
    tasks = f"tasks: {len(history.of('published'))} published; {dict(states)}"
    runs = f"runs: {len(history.runs)}; {killed} died in the middle, {disturbed} were disturbed, "
    runs += f"{len(history.of('lost'))} were told that they lost their lock"
    writes = f"register: {len(history.of('register'))} writes, {refused} of them refused"
    faults = f"faults: {dict(report.faults)}; {report.struck} kills and stops; "
    faults += f"{len(history.of('hung'))} warm shutdowns hung"
    ready = {event["id"] for event in history.of("final")}
    if report.caught is None:
        tasks += f"; {len(lost_on_the_way(history) - ready)} reached no worker (lost by the broker)"
    lines = [tasks, runs, writes, faults]
    broken = Counter(violation.rule for violation in report.violations)
    lines += [f"  {broken[name] or 'ok':>4}  {name}" for name in RULES]
    lines += [f"{v.at:.3f} {v.rule}: {v.text}" for v in report.violations[:40]]
    return "\n".join(lines)


def excerpts(report: Report) -> str:
    """Return what happened around the first violations."""
    shown = report.violations[:SHOWN]
    return "\n".join(line for each in shown for line in _excerpt(report.history, each))


def _excerpt(history: History, violation: Violation) -> list[str]:
    lines = [f"\nbefore and after {violation.at:.3f}, {violation.rule}: {violation.text}"]
    for event in history.events:
        since = event["t"] - violation.at
        if -BEFORE <= since <= AFTER and (event["e"] != "look" or event["free"]):
            facts = {name: fact for name, fact in event.items() if name not in ("t", "e", "last")}
            lines.append(f"{since:+8.3f} {event['e']:9} {facts}")
    return lines


if __name__ == "__main__":
    sys.exit(main())

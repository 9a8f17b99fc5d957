"""``python -m benchmarks.scale``: what grows with leases, locks, workers and messages.

Rows (``--only`` selects):

- ``renewals``: the longest script of a watchdog that renews many leases.
- ``refused``: the time of a refused acquire, with one holder and with a thousand.
- ``views``: what operators look at, with 100,000 locks; and how often it uses SCAN.
- ``idle``: the commands of an idle worker, and the load of a thousand (see ``fleet.py``).
- ``parked``: memory and release cost with 1,000,000 parked messages, on one key and with ten on
  each key. It takes most of the time; ``--parked`` makes it smaller.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import redis

from benchmarks import crowd, fleet, report
from benchmarks.meter import command_counts, script_cost
from celery_singleton_lock.admin import why
from celery_singleton_lock.cli import main as command_line
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.flower.rows import LockRows
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore

LEASES: Final = (1_000, 5_000)
LIMITS: Final = (1, 1_000)
PER_KEY: Final = 10
"""Parked messages on each of many keys."""

FEW: Final = 1_000
"""Parked messages with which many are compared."""

OF_A_WORKER: Final = 100
"""Running tasks in the list of a worker."""

REPEAT: Final = 100
"""Calls of which the time of one script is the mean."""

Found = dict[str, Any]
Measure = Callable[[argparse.Namespace], Found]
Check = Callable[[Found], list[Found]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--locks", type=int, default=100_000, help="locks of the row views")
    parser.add_argument("--workers", type=int, default=1_000, help="simulated workers")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part of the row idle")
    parser.add_argument("--parked", type=int, default=1_000_000, help="messages of the row parked")
    asked = parser.parse_args(arguments)
    with RedisServer() as server:
        machine = report.machine(server.describe())
    found: Found = {
        "benchmark": "scale",
        "command": report.command("scale"),
        "machine": machine,
        "settings": {key: value for key, value in vars(asked).items() if key != "json"},
        "rows": {},
    }
    for row in asked.only:
        if not asked.json:
            print(f"measuring {row}", file=sys.stderr)
        found["rows"][row] = ROWS[row][0](asked)
    found["targets"] = [each for row, of in found["rows"].items() for each in ROWS[row][1](of)]
    print(json.dumps(found, indent=2) if asked.json else shown(found))
    return 0


@contextlib.contextmanager
def locks_redis() -> Iterator[tuple[RedisServer, redis.Redis, RedisAdminStore]]:
    """Start a server for one row, and connect to it."""
    with RedisServer() as server, server.client(decode_responses=False) as client:
        store = RedisAdminStore(client, claim_lease=crowd.LEASE)
        crowd.join_fleet(store)
        try:
            yield server, client, store
        finally:
            store.close()


# -- renewals -------------------------------------------------------------------------------------


def renewals(asked: argparse.Namespace) -> Found:
    """Return number of leases -> the longest script of one renewal of all, and their number."""
    found = {}
    for leases in LEASES:
        with locks_redis() as (_, client, store):
            watchdog, ids = Watchdog(store), crowd.task_ids(leases)
            for number in range(leases):
                owner = crowd.hold(store, f"lease:{number}", next(ids))
                watchdog.watch(f"lease:{number}", owner.token, crowd.LEASE)
            rounds = [longest_scripts(client, watchdog) for _ in range(asked.rounds)]
        found[str(leases)] = {
            "longest_ms": report.median([max(each) / 1000 for each in rounds]),
            "median_ms": report.median([report.median(each) / 1000 for each in rounds]),
            "scripts": round(report.median([len(each) for each in rounds])),
            "all_ms": report.median([sum(each) / 1000 for each in rounds]),
        }
    return found


def longest_scripts(client: redis.Redis, watchdog: Watchdog) -> list[int]:
    """Let a watchdog renew all its leases; return the microseconds of each script."""
    client.config_set("slowlog-max-len", 100_000)
    client.config_set("slowlog-log-slower-than", 0)
    client.slowlog_reset()
    watchdog.stop(flush=True)
    entries: Any = client.slowlog_get(100_000)
    client.config_set("slowlog-log-slower-than", -1)
    return [entry["duration"] for entry in entries if entry["command"].upper().startswith(b"EVAL")]


def renewal_targets(found: Found) -> list[Found]:
    return [
        report.target(f"longest script, {leases} leases, ms", row["longest_ms"], most=1)
        for leases, row in found.items()
    ]


# -- refused --------------------------------------------------------------------------------------


def refused(asked: argparse.Namespace) -> Found:
    """Return kind -> microseconds of a refused acquire at each limit, and their ratio."""
    with locks_redis() as (_, client, store):
        ids = crowd.task_ids(0)
        for limit in LIMITS:
            for _ in range(limit):
                crowd.hold(store, f"limit:{limit}", next(ids), limit)
        rounds = [
            {
                kind: {limit: refusal(client, store, limit, next(ids), copy) for limit in LIMITS}
                for kind, copy in (("new message", 0), ("redelivered message", 1))
            }
            for _ in range(asked.rounds)
        ]
    least, most = LIMITS
    return {
        kind: {
            **{
                f"usec_at_{limit}": report.median([each[kind][limit] for each in rounds], 1)
                for limit in LIMITS
            },
            "ratio": report.median([each[kind][most] / each[kind][least] for each in rounds], 2),
        }
        for kind in rounds[0]
    }


def refusal(client: redis.Redis, store: RedisStore, limit: int, task_id: str, copy: int) -> float:
    """Return the microseconds of Redis for one refused acquire.

    Raises:
        RuntimeError: it was not refused.
    """
    owner = Owner(new_token(), f"{task_id}/0/0", crowd.TASK, crowd.WORKER, "host", 7)
    calls, usec = script_cost(client)
    for _ in range(REPEAT):
        reply = store.acquire(
            owner._replace(token=new_token()), Claim(f"limit:{limit}", limit=limit, copy=copy)
        )
        if reply.verdict is not Verdict.BLOCKED:
            msg = f"the acquire at limit {limit} was {reply.verdict.value}"
            raise RuntimeError(msg)
    calls_after, usec_after = script_cost(client)
    return (usec_after - usec) / (calls_after - calls)


def refused_targets(found: Found) -> list[Found]:
    return [
        report.target(
            f"refused acquire of a {kind} at limit {LIMITS[1]}, of limit {LIMITS[0]}",
            row["ratio"],
            most=1.5,
        )
        for kind, row in found.items()
    ]


# -- views ----------------------------------------------------------------------------------------


def views(asked: argparse.Namespace) -> Found:
    """Return view -> seconds, and its number of SCAN commands. A tenth of the locks has waiters."""
    with locks_redis() as (server, client, store):
        ids = crowd.task_ids(1)
        held = ""
        running = []
        for number in range(asked.locks):
            held = next(ids)
            owner = crowd.hold(store, f"account:{number}", held)
            running.append((held, f"account:{number}", owner.token))
        for number in range(0, len(running), OF_A_WORKER):  # as workers do for tasks of two seconds
            some = running[number : number + OF_A_WORKER]
            store.list_running(f"{crowd.WORKER}{number}", some, (), crowd.LEASE)
        parked_ids = list(itertools.islice(crowd.task_ids(2), asked.locks // 10))
        names = (f"account:{number}" for number in itertools.count(0, 10))
        crowd.park(store, names, iter(parked_ids), len(parked_ids))
        looks = looks_of(server, store, held, parked_ids[-1])
        found: dict[str, list[tuple[float, int]]] = {view: [] for view in looks}
        for _, (view, look) in itertools.product(range(asked.rounds), looks.items()):
            found[view].append(timed(client, look))
    return {
        view: {
            "seconds": report.median([seconds for seconds, _ in rounds], 4),
            "scans": max(scans for _, scans in rounds),
        }
        for view, rounds in found.items()
    }


def looks_of(
    server: RedisServer, store: RedisAdminStore, held: str, parked: str
) -> dict[str, Callable[[], object]]:
    def listed() -> None:
        arguments = ["--backend", server.url, "list", "--limit", "20"]
        with contextlib.redirect_stdout(io.StringIO()):
            command_line(arguments, standalone_mode=False)

    return {
        "why, of a task that runs": lambda: why(store, held),
        "why, of a parked task": lambda: why(store, parked),
        "why, of an unknown task": lambda: why(store, "00000000-0000-4000-8000-000000000000"),
        "why, of the first 8 characters": lambda: why(store, held[:8]),
        "locks list --limit 20": listed,
        "data of Flower's page": lambda: LockRows(store).page(),
        "workers": store.workers,
    }


def timed(client: redis.Redis, look: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds of a call, and how many commands of it scan keys."""
    before = command_counts(client)
    began = time.perf_counter()
    look()
    took = time.perf_counter() - began
    after = command_counts(client)
    return took, sum(after.get(name, 0) - before.get(name, 0) for name in ("scan", "hscan"))


def view_targets(found: Found) -> list[Found]:
    polled = ("data of Flower's page", "workers")
    slowest = max(found, key=lambda view: found[view]["seconds"])
    return [
        report.target(f"slowest view ({slowest}), s", found[slowest]["seconds"], most=0.05),
        report.target("SCANs of a page", max(found[view]["scans"] for view in polled), most=0),
    ]


# -- idle -----------------------------------------------------------------------------------------


def idle(asked: argparse.Namespace) -> Found:
    return fleet.measure(asked.workers, asked.seconds)


def idle_targets(found: Found) -> list[Found]:
    return [
        report.target(
            "idle worker, commands a second", round(found["commands_per_second"], 1), most=15
        ),
        report.target(
            f"{found['fleet']} idle workers, share of a core",
            found["fleet_share_of_a_core"],
            most=0.1,
        ),
        report.target("of what they send", found["fleet_sent_of_due"], least=0.98),
    ]


# -- parked ---------------------------------------------------------------------------------------


def parked(asked: argparse.Namespace) -> Found:
    """Return scene -> bytes of a message beyond its body, and the cost of a release.

    The body is the whole message as a worker packs it, with its headers and properties.
    """
    keys = max(1, asked.parked // PER_KEY)
    return {
        "one key": filled(1, asked.parked),
        f"{keys} keys": filled(keys, asked.parked),
    }


def filled(keys: int, count: int) -> Found:
    """Park few messages, then many; all keys are held."""
    with locks_redis() as (_, client, store):
        ids, few = crowd.task_ids(keys), min(FEW, count)
        few_keys = max(1, few * keys // count)
        owners = held_keys(store, 0, few_keys)
        crowd.park(store, cycled(0, few_keys), ids, few)
        cost_at_few = release_cost(client, store, owners, few)
        memory = used_memory(client)
        began = time.monotonic()
        owners = held_keys(store, few_keys, few_keys + keys) if keys > 1 else owners
        names = cycled(few_keys, few_keys + keys) if keys > 1 else cycled(0, 1)
        length = crowd.park(store, names, ids, count)
        took = time.monotonic() - began
        each = (used_memory(client) - memory) / count
        parts = {what: round(size / (few + count)) for what, size in size_of_keys(client).items()}
        cost = release_cost(client, store, owners, count)
    return {
        "parked": count,
        "bytes_of_a_body": length,
        "bytes_in_redis": round(each),
        "bytes_beyond": round(each - length),
        **{f"bytes_of_{what}": size for what, size in parts.items()},
        "usec_of_a_release": cost,
        "usec_of_a_release_at_few": cost_at_few,
        "few": few,
        "parked_per_second": round(count / took),
    }


def held_keys(store: RedisStore, first: int, last: int) -> dict[str, str]:
    """Hold the locks of some keys; return name -> owner token."""
    ids = crowd.task_ids(-last)
    names = [f"parked:{number}" for number in range(first, last)]
    return {name: crowd.hold(store, name, next(ids)).token for name in names}


def cycled(first: int, last: int) -> Iterator[str]:
    return itertools.cycle([f"parked:{number}" for number in range(first, last)])


def release_cost(
    client: redis.Redis, store: RedisStore, owners: dict[str, str], parked: int
) -> float:
    """Return the median microseconds of releases that grant to the next message, which claims.

    ``owners`` is brought up to date.
    """
    costs = []
    for name in itertools.islice(itertools.cycle(list(owners)), min(REPEAT, parked // 2)):
        _, before = script_cost(client)
        store.release(name, owners[name], Ending.FINAL, worker=crowd.WORKER)
        _, after = script_cost(client)
        costs.append(after - before)
        granted = store.receive(crowd.WORKER, 5.0)
        if granted is None or granted.name != name:
            msg = f"the release of {name!r} granted nothing"
            raise RuntimeError(msg)
        owner = Owner(granted.token, "", crowd.TASK, crowd.WORKER, "host", 7)
        store.claim(owner, name, crowd.LEASE)
        owners[name] = granted.token
    return report.median(costs, 1)


def used_memory(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


KEYS: Final = {
    ":bodies": "bodies",
    ":record": "records",
    ":queue": "queues",
    "fleet:parked:": "list_of_the_route",
    ":index": "index_of_task_ids",
}
"""Part of a key -> what is in it: one entry a message."""


def size_of_keys(client: redis.Redis) -> dict[str, int]:
    """Return the bytes of all keys of each kind."""
    sizes = dict.fromkeys(KEYS.values(), 0)
    for key in map(bytes.decode, client.scan_iter(count=1000)):
        for part, what in KEYS.items():
            if part in key:
                sizes[what] += client.memory_usage(key, samples=0)
    return sizes


def parked_targets(found: Found) -> list[Found]:
    return [
        each
        for scene, row in found.items()
        for each in (
            report.target(f"{scene}: bytes beyond the body", row["bytes_beyond"], most=600),
            report.target(
                f"{scene}: release, of that with {row['few']} parked",
                round(row["usec_of_a_release"] / row["usec_of_a_release_at_few"], 2),
                most=1.2,
            ),
        )
    ]


# -- the result -----------------------------------------------------------------------------------

ROWS: Final[dict[str, tuple[Measure, Check]]] = {
    "renewals": (renewals, renewal_targets),
    "refused": (refused, refused_targets),
    "views": (views, view_targets),
    "idle": (idle, idle_targets),
    "parked": (parked, parked_targets),
}


def shown(found: Found) -> str:
    lines = [report.describe(found["machine"]), ""]
    for row, of in found["rows"].items():
        nested = {what: value for what, value in of.items() if isinstance(value, dict)}
        flat = {what: value for what, value in of.items() if not isinstance(value, dict)}
        if flat:
            lines += [report.table([row, ""], [[spoken(what), flat[what]] for what in flat]), ""]
        elif nested:
            heads = list(next(iter(nested.values())))
            cells = [[what, *(each[head] for head in heads)] for what, each in nested.items()]
            lines += [report.table([row, *map(spoken, heads)], cells), ""]
    return "\n".join([*lines, report.verdicts(found["targets"])])


def spoken(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    sys.exit(main())

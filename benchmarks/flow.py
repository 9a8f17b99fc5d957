"""``python -m benchmarks.flow``: tasks that wait for more than a lock.

Rows (``--only`` selects; each is described in its module):

- ``rates``: tasks that start at a rate, beside what one would use instead.
- ``backlog``: 100,000 messages that wait for a rate.
- ``fairness``: a small group of a lock beside 100,000 messages of another, in the scripts.
- ``tenants``: a small group of a lock beside a large one, with real workers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks import report
from benchmarks.backlog import backlog, backlog_table, backlog_targets
from benchmarks.fairness import fairness, fairness_table, fairness_targets
from benchmarks.peers import TITLES, add_peers, taking_part
from benchmarks.rates import PEERS, RATES, rate_table, rate_targets, rates
from benchmarks.tenants import tenant_table, tenant_targets, tenants
from celery_singleton_lock.demo.redis_server import RedisServer

Found = dict[str, Any]
Measure = Callable[[argparse.Namespace, Sequence[str]], Found]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flow",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--processes", type=int, default=4, help="pool processes of each worker")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the row rates")
    parser.add_argument("--parked", type=int, default=100_000, help="messages in Redis")
    parser.add_argument("--published", type=int, default=10_000, help="messages in the broker")
    parser.add_argument("--backlog", type=int, default=1_000, help="tasks of the large tenant")
    add_peers(parser, PEERS)
    asked = parser.parse_args(arguments)
    peers, skipped = taking_part(asked.peers, PEERS)
    with RedisServer() as server:
        machine = report.machine(server.describe())
    found: Found = {
        "benchmark": "flow",
        "command": report.command("flow"),
        "machine": machine,
        "settings": {key: value for key, value in vars(asked).items() if key != "json"},
        "skipped": skipped,
        "rows": {},
    }
    for row in asked.only:
        found["rows"][row] = ROWS[row][0](asked, peers)
    found["targets"] = [each for row, of in found["rows"].items() for each in ROWS[row][1](of)]
    print(json.dumps(found, indent=2) if asked.json else shown(found))
    return 0


ROWS: Final[dict[str, tuple[Measure, Callable[[Found], list[Found]], Callable[[Found], str]]]] = {
    "rates": (rates, rate_targets, rate_table),
    "backlog": (lambda asked, _: backlog(asked), backlog_targets, backlog_table),
    "fairness": (lambda asked, _: fairness(asked.parked), fairness_targets, fairness_table),
    "tenants": (lambda asked, _: tenants(asked), tenant_targets, tenant_table),
}


def shown(found: Found) -> str:
    skipped = [f"skipped: {TITLES[peer]}: {why}" for peer, why in found["skipped"].items()]
    tables = [f"{ROWS[row][2](of)}\n" for row, of in found["rows"].items()]
    heading = report.describe(found["machine"])
    return "\n".join([heading, "", *tables, *skipped, report.verdicts(found["targets"])])


if __name__ == "__main__":
    sys.exit(main())

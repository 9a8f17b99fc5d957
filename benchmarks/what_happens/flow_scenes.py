"""The scenes of flow control: what starts a task besides a free lock.

There each package other than this one makes its lock of all arguments, since a lock of the key
would not let many tasks of the key be queued, or run.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from benchmarks.what_happens.packages import PERIOD, Wanted
from benchmarks.what_happens.scene import Scene, Seen
from benchmarks.what_happens.stage import Call, Run, Stage, when

MANY: Final = 30
FEW: Final = 5
WAY: Final = 0.1
"""Most seconds from the decision that a task may start to the start of its body."""

LONG: Final = 60.0
"""Seconds after which what has not run does not run."""

CLOSED: Final = 5.0
ASKING: Final = 10
SETTLED: Final = 1.0
"""Seconds in which a worker has received what it may."""


def rate(stage: Stage) -> Seen:
    """30 calls of a key at 10 in 3 s.

    Two workers. At most 10 tasks of a key are to start in any 3 s, and 30 are called. 6 s are the
    shortest time in which they can all have started.

    Here `lock_rate="10/3s"`. celery-heimdall has a rate of its own (`times=10, per=3`), with which
    a task above it retries. It spaces retries by whole seconds, here 0, so it suits lower rates, of
    at most one start a second. celery-singleton, celery-once and redis-py have no rate, so the task
    has Celery's own `rate_limit="200/m"`, which each worker keeps for itself, evenly spaced, and
    for all keys of the task together.
    """
    calls = [stage.call("hot", n) for n in range(MANY)]
    when(lambda: len(_ended(stage)) >= len(_sent(calls)), LONG)
    starts = sorted(run.began for run in stage.runs())
    most = max(bisect_left(starts, start + PERIOD - WAY) - n for n, start in enumerate(starts))
    last = f"the last starts after {starts[-1] - starts[0]:.1f} s"
    lost = "" if len(starts) == MANY else f"; {len(starts)} of {MANY} ran"
    return Seen(
        f"{most} in {PERIOD} s; {last}{lost}",
        f"At most {most} tasks start in any {PERIOD} s; {last}{lost}",
    )


def asked_to_wait(stage: Stage) -> Seen:
    """429: the service asks to wait 5 s.

    Two slots. Each of 10 tasks calls a service, which for 5 s refuses every call, and says for how
    long. A refused task runs again after that time.

    Here the task raises `RetryLater`, which closes the key for all of its tasks. With the others it
    raises `self.retry(countdown=…)`, so each task may be refused once.
    celery-singleton and celery-heimdall lose the retry, as in [another
    scenario](#selfretrycountdown1).
    """
    stage.journal.close_service(CLOSED)
    calls = _sent([stage.call("hot", n, 0, "429") for n in range(ASKING)])
    when(lambda: len(_answers(stage, served=True)) >= len(calls), 3 * CLOSED)
    refused, served = _answers(stage, served=False), _answers(stage, served=True)
    done = f"{len(served)} of {ASKING} tasks are served"
    calls_refused = f"{len(refused)} {'call' if len(refused) == 1 else 'calls'} refused"
    return Seen(f"{calls_refused}; {done}", f"{calls_refused}; {done}")


def urgent(stage: Stage) -> Seen:
    """An urgent task behind 30.

    Two slots. Two tasks run, and 30 others wait. An urgent one is called; a second later the first
    one ends. The second goes on. All calls have Celery's `priority`: the urgent one has that which
    Redis delivers first.

    Here two tasks of the lock run at a time, and the urgent one has `lock_priority=600`, a head
    start of ten minutes. The others have Celery's priority, which orders what is in the broker, and
    not what a worker has received already: by default four tasks for each slot, and with
    `worker_prefetch_multiplier=1` one.
    """
    for n in range(2 + MANY):
        stage.call("usual", n, ["first", "second"][n] if n < 2 else 0.1, priority=9)
    when(lambda: len(stage.runs()) == 2)
    time.sleep(SETTLED)
    call = stage.call("urgent", MANY + 2, priority=0)
    time.sleep(SETTLED)
    stage.journal.open_gate("first")
    return _behind(stage, call, time.monotonic(), 2)


def small_tenant(stage: Stage) -> Seen:
    """5 tasks of a small tenant behind 30 of a large one.

    Two slots. Two tasks of the large tenant run, and 30 others wait. Then 5 of the small tenant are
    called; a second later the two end. All later tasks take 0.1 s.

    Here two tasks of the lock run at a time, and `lock_fair_by="{key}"` makes a group of each
    tenant. The others run the tasks in the order of the broker's queue.
    """
    for n in range(2 + MANY):
        stage.call("large", n, "first" if n < 2 else 0.1)
    when(lambda: len(stage.runs()) == 2)
    calls = [stage.call("small", n, 0.1) for n in range(2 + MANY, 2 + MANY + FEW)]
    time.sleep(SETTLED)
    stage.journal.open_gate("first")
    return _behind(stage, calls[-1], time.monotonic(), 2, "The last one")


def _behind(stage: Stage, call: Call, since: float, running: int, it: str = "It") -> Seen:
    """Tell how many tasks of others started before one, not counting those that ran already."""
    run = when(lambda: stage.run_of(call.id), LONG)
    if not run:
        return Seen("does not run", f"{it} does not run")
    earlier = [other for other in stage.runs() if other.began < run.began]
    before = [other for other in earlier if other.key != run.key]
    told = f"after {len(before) - running} of {MANY} others, after {run.began - since:.1f} s"
    return Seen(f"starts {told}", f"{it} starts {told}")


def _sent(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.id]


def _ended(stage: Stage) -> list[Run]:
    return [run for run in stage.runs() if run.ended]


def _answers(stage: Stage, *, served: bool) -> list[dict[str, object]]:
    return [one for one in stage.noted("asked") if (not one["wait"]) is served]


FLOW_SCENES: Final = [
    Scene("rate", rate, Wanted(seconds=60, flow="rate"), workers=2),
    Scene("asked-to-wait", asked_to_wait, Wanted(flow="closed")),
    Scene("urgent", urgent, Wanted(seconds=60, flow="priority")),
    Scene("small-tenant", small_tenant, Wanted(seconds=60, flow="fair")),
]

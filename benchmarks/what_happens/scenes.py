"""The scenes. Each is played in the same way on every package, and says what was seen.

A scene's docstring is what the page says of it. It returns short words for the table and a full
sentence; both are made of what was observed: runs of the body, answers to the caller, states in the
result backend.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, Final

from celery import chord

from benchmarks.what_happens.call_scenes import CALL_SCENES
from benchmarks.what_happens.flow_scenes import FLOW_SCENES
from benchmarks.what_happens.packages import TASK, Wanted
from benchmarks.what_happens.scene import Scene, Seen
from benchmarks.what_happens.stage import Call, Run, Stage, overlap, when

READY: Final = ("SUCCESS", "FAILURE", "REVOKED")
SOON = 1.5
"""Seconds in which a task that nothing is in the way of has begun."""


def second_call(stage: Stage) -> Seen:
    """A second call while the first runs.

    Two slots. A task runs, and the same key is called again. Then an unrelated task of another
    key is called, to see whether it finds a slot. Then the first task ends.

    celery-singleton, celery-once and celery-heimdall prevent that a task is *queued* twice, so they
    do not send the second call. Here it is sent, and waits. `lock_on_conflict="skip"` is the
    closest option.
    """
    stage.first("hot")
    second = stage.call("hot", 2)
    if not second.id:
        stage.journal.open_gate("first")
        return Seen("not sent", f"The second call is not sent: it {_answered(second)}")
    other = stage.call("other", 3)
    free = when(lambda: stage.run_of(other.id), SOON)
    beside = stage.run_of(second.id)
    stage.journal.open_gate("first")
    run = when(lambda: stage.run_of(second.id))
    how = _turn(stage.runs("hot")[0], run) if not beside else "runs beside it"
    slot = "no slot blocked" if free else "its slot is blocked"
    return Seen(f"{how}; {slot}", f"The second task {how}; while it waits, {slot}")


def child_killed(stage: Stage) -> Seen:
    """SIGKILL of the task's process.

    The process that runs the task is killed with SIGKILL, as the kernel does when memory is
    short.

    The other packages document this case, with the time-out as the remedy. celery-singleton also
    has `clear_locks`, to be called when a worker starts. Its repository, but not release 0.3.1, has
    an option with which the caller asks the workers whether the lock's task still exists.
    """
    run = stage.first("hot")
    os.kill(run.pid, signal.SIGKILL)
    return _freed(stage, run, time.monotonic())


def worker_killed(stage: Stage) -> Seen:
    """SIGKILL of the whole worker.

    Two workers. The one that runs the task is killed with SIGKILL, with all its processes. The
    task is acknowledged early, as is Celery's default.

    No process is left that could release the lock, so all packages wait for the time-out, this one
    too. A time-out that is not renewed has to be longer than the longest run. One that is renewed
    may be short.
    """
    run = stage.first("hot")
    next(worker for worker in stage.workers if worker.has(run.pid)).kill()
    following = stage.next_of("hot", time.monotonic())
    return Seen(following.brief, f"State {stage.state(run.id)}; the {following.told}")


def revoked_before(stage: Stage) -> Seen:
    """`revoke` before it starts.

    All slots are occupied. The task waits in the worker, is revoked there, and is discarded
    when the slots are free.

    Hooks of the task (`on_success`, `on_failure`, `after_return`) release a lock that the caller
    has taken. Celery calls none of them for a task that is discarded.
    """
    gates = ["slot1", "slot2"]
    for gate in gates:
        stage.app.tasks["occupy"].delay(gate)
    when(lambda: len(stage.noted("occupied")) == len(gates))
    call = stage.call("hot", 1)
    stage.app.control.revoke(call.id)
    when(lambda: any(call.id in w.log() for w in stage.workers) and _knows(stage, call.id))
    for gate in gates:
        stage.journal.open_gate(gate)
    state = stage.await_state(call.id, "REVOKED")
    following = stage.next_of("hot", time.monotonic())
    ran = "ran all the same" if stage.run_of(call.id) else "did not run"
    return Seen(following.brief, f"The revoked task {ran}, state {state}; the {following.told}")


def terminated(stage: Stage) -> Seen:
    """`revoke(terminate=True)` while it runs.

    The task runs, and is revoked with `terminate=True`.

    Celery sends SIGTERM to the process, which raises `SystemExit` there. So a `with` block releases
    its lock, and hooks of the task are not called.
    """
    run = stage.first("hot")
    stage.app.control.revoke(run.id, terminate=True)
    return _freed(stage, run, time.monotonic())


def time_limit(stage: Stage) -> Seen:
    """Hard time limit.

    The task exceeds its hard time limit (`time_limit=1`), and Celery ends its process.

    After a hard time limit Celery 5.7 calls `on_failure` and `after_return` in the worker's main
    process, which releases the locks of the other packages. Celery 5.4 does not call them. The
    process gets a SIGTERM before the SIGKILL; if it handles that, a `with` block releases its lock.
    """
    run = stage.first("hot", hold=20)
    stage.await_state(run.id, *READY)
    return _freed(stage, run, time.monotonic())


def retried(stage: Stage) -> Seen:
    """`self.retry(countdown=1)`.

    The first attempt raises `self.retry(countdown=1)`. The key is called again at once, and
    again until that call is sent.

    `self.retry` calls `apply_async`, where the package finds the task's own lock held. celery-once
    takes no lock for a retry, and keeps that of the first attempt. Here `lock_on_retry="keep"`
    keeps the lock during the countdown.
    """
    run = stage.first("hot", hold="first", end="retry")
    stage.journal.open_gate("first")
    ended = when(lambda: stage.run_of(run.id).ended)
    following = stage.next_of("hot", ended or time.monotonic())
    again = when(lambda: [r for r in stage.runs("hot") if r.id == run.id and r.retries], 5)
    state = stage.await_state(run.id, *READY) if again else stage.state(run.id)
    how = "retry runs" if again else "retry is lost"
    return Seen(
        f"{how}; {following.brief}",
        f"{_capital(how)}, state {state}; after the first attempt the {following.told}",
    )


def redelivered(stage: Stage) -> Seen:
    """Redelivery while it runs.

    Late acknowledgement, two workers. While the task runs, the broker's visibility time-out is
    over, and its message is delivered a second time (by Kombu's own code, which is told of a
    time-out of 0).

    The message was sent once, so a lock that the caller takes has no effect. The other packages do
    not document this case. A visibility time-out longer than any run avoids it.
    """
    run = stage.first("hot")
    _redeliver(stage)
    if not when(lambda: _delivered(stage)):
        msg = "nobody took the second copy"
        raise RuntimeError(msg)
    when(lambda: len(stage.runs("hot")) > 1, 3)
    stage.journal.open_gate("first")
    stage.await_state(run.id, *READY)
    when(lambda: len(stage.runs("hot")) > 1, 2)
    when(lambda: all(r.ended for r in stage.runs("hot")))
    runs = stage.runs("hot")
    if len(runs) == 1:
        left = when(lambda: not _unacknowledged(stage), 5)
        copies = "both messages were acknowledged" if left else "a message is left"
        return Seen("runs once", f"The task ran once; {copies}")
    seconds = overlap(*runs[:2])
    how = "at once" if seconds else "one after the other"
    times = "twice" if len(runs) == 2 else f"{len(runs)} times"
    return Seen(f"runs {times}, {how}", f"The task ran {times}, {how}")


def chord_members(stage: Stage) -> Seen:
    """Chord of two tasks of one key.

    A chord of two tasks of the same key, each of which takes half a second.

    A chord waits for one result per member. A member that was not sent has no result.
    """
    task = stage.app.tasks[TASK]
    header = [task.s("hot", n, 0.5) for n in (1, 2)]
    raised = ""
    try:
        chord(header)(stage.app.tasks["total"].s())
    except Exception as error:  # noqa: BLE001  # whatever the package raises is the observation
        raised = f"; the caller gets `{type(error).__name__}`"
    ended = when(lambda: stage.noted("total"), 8)
    ran = sorted(run.n for run in stage.runs("hot"))
    members = f"{len(ran)} of 2 members ran"
    if ended:
        return Seen("finishes", f"The chord finished with {ended[0]['numbers']}; {members}{raised}")
    return Seen(
        f"never finishes; {members}", f"The chord had not finished after 8 s; {members}{raised}"
    )


def positional_and_keyword(stage: Stage) -> Seen:
    """Positional, then by keyword.

    The lock's name is made of all arguments, as the package does by default. The task is called
    with positional arguments, and while it runs with the same arguments by name.

    celery-singleton's `unique_on` binds the arguments to the signature, which gives one lock.
    celery-heimdall's `key` is a function of the arguments as they were given. A lock in the body
    has no default: the body computes its name from the bound argument.
    """
    first = stage.first("hot")
    second = stage.call_by_name("hot", 1, "first")
    beside = second.id and when(lambda: stage.run_of(second.id), SOON)
    stage.journal.open_gate("first")
    if not second.id:
        return Seen("one lock", f"The second call is not sent: it {_answered(second)}")
    if beside:
        return Seen("two locks: both run at once", "The second task ran beside the first")
    run = when(lambda: stage.run_of(second.id))
    return Seen("one lock", f"The second task {_turn(stage.run_of(first.id), run)}")


def longer_than_the_lock(stage: Stage) -> Seen:
    """The task takes longer than the time-out.

    The lock's time-out is 2 s, and the task takes 5 s. The key is called again until that call
    is sent.

    The other packages do not renew a lock, so their time-out has to be longer than any run; the
    documentation of celery-singleton says so. With a lock in the body, the body could call
    `lock.extend()` from time to time.
    """
    first = stage.first("hot", hold=5.0)
    following = stage.next_of("hot", first.began)
    state = stage.await_state(first.id, *READY)
    one, *others = stage.runs("hot")
    seconds = max([overlap(one, other) for other in others], default=0.0)
    beside = seconds > 0 or (others and one.ended and others[0].began < one.ended)
    how = "next runs beside it" if beside else "next runs after it"
    return Seen(
        how if state == "SUCCESS" else f"{how}; then it fails",
        f"Counted from the first one's begin the {following.told}, "
        f"{'while the first ran' if beside else 'when the first had ended'}; "
        f"state of the first: {state}",
    )


HOT, COLD, BUSY = 20, 20, 0.1


def hot_and_cold(stage: Stage) -> Seen:
    """20 of one key and 20 others, two slots.

    20 calls of one key, then 20 of other keys; each task takes 0.1 s. The worker begins when
    all calls were made. 2 s are the shortest time in which two slots could run all 40.

    For the three packages that take the lock in the caller, one hot task is the intended result.
    celery-heimdall asks for its lock again in the worker, where each task waits, by default for a
    second, until it finds that it holds the lock already.
    """
    (worker,) = stage.workers
    with worker.stopped():
        hot = [stage.call("hot", n, BUSY) for n in range(HOT)]
        cold = [stage.call(f"cold{n}", n, BUSY) for n in range(COLD)]
        began = time.monotonic()
    sent = [call for call in hot + cold if call.id]
    when(lambda: len([run for run in stage.runs() if run.ended]) >= len(sent), 60)
    runs = [run for run in stage.runs("hot") if run.ended]
    others = [run for run in stage.runs() if run.key != "hot"]
    last = max(run.ended or 0 for run in others) - began
    numbers = [run.n for run in runs]
    order = "in order" if numbers == sorted(numbers) else "not in order"
    most = f"{len(runs)} of {HOT} hot ran" + (f", {order}" if len(runs) > 1 else "")
    done = f"last cold ends after {last:.1f} s"
    whole = max(run.ended or 0 for run in runs + others) - began
    refused = [call for call in hot if not call.id]
    why = ""
    if refused:
        why = f"; {len(refused)} hot calls were not sent: each {_answered(refused[0])}"
    return Seen(
        f"{most}; {done}",
        f"{most}; of the cold {len(others)} of {COLD} ran, the {done}, everything after "
        f"{whole:.1f} s{why}",
    )


def redis_emptied(stage: Stage) -> Seen:
    """Redis restarts empty while it runs.

    The Redis of the locks (and results) is killed while the task runs, and comes back empty.
    The broker is another Redis. Then the key is called again.

    No lock on one Redis survives this. With a lock in the body, the body could call `lock.owned()`.
    Otherwise the release at the end fails. See [what is not
    promised](guarantees.md#eviction-failover-restart-without-persistence).
    """
    first = stage.first("hot")
    stage.locks.kill()
    stage.locks.restart(keep_data=False)
    following = stage.next_of("hot", time.monotonic())
    beside = stage.run_of(first.id).ended is None
    # A task that can be told is told at its next renewal: a third of the time-out.
    time.sleep(stage.app.tasks[TASK].lock_lease / 3 + 1 if _can_tell(stage) else 0)
    stage.journal.open_gate("first")
    run = when(lambda: (r := stage.run_of(first.id)).ended and r)
    state = stage.await_state(first.id, *READY)
    heard = bool(run and run.lost)
    words = ["next runs beside it" if beside and following.after is not None else following.brief]
    words += ["it is told"] if heard else []
    words += ["then it fails"] if state == "FAILURE" else []
    return Seen(
        "; ".join(words),
        f"Counted from the restart the {following.told}, "
        f"{'beside the first' if beside else 'after the first'}; "
        f"{'in the first `self.lock.lost` is True' if heard else 'the first is not told'}; "
        f"it ends with state {state}",
    )


# -- words -----------------------------------------------------------------------------------------


def _freed(stage: Stage, run: Run, since: float) -> Seen:
    """Tell what became of a task that was ended, and when the key's next one ran."""
    following = stage.next_of("hot", since)
    state = stage.await_state(run.id, *READY)
    return Seen(following.brief, f"State {state}; the {following.told}")


def _turn(first: Run | None, run: Run | None) -> str:
    if run is None or first is None:
        return "does not run"
    return "runs beside it" if first.ended is None or run.began < first.ended else "runs after it"


def _answered(call: Call) -> str:
    return call.answer if call.answer.startswith("r") else f"returns {call.answer}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _knows(stage: Stage, task_id: str) -> bool:
    """Whether a worker has heard of a revoke."""
    told = stage.app.control.inspect(timeout=0.5).revoked() or {}
    return any(task_id in ids for ids in told.values())


def _redeliver(stage: Stage) -> None:
    """Have the broker deliver again what is not acknowledged, as a worker does every 10 s."""
    if not _unacknowledged(stage):
        msg = "no message is unacknowledged, so there is nothing to deliver again"
        raise RuntimeError(msg)
    at_once = {"visibility_timeout": 0}
    with stage.app.connection_for_write(transport_options=at_once) as connection:
        connection.default_channel.qos.restore_visible(num=100, interval=1)


def _delivered(stage: Stage) -> bool:
    with stage.broker.client() as client:
        return not client.llen("celery")


def _unacknowledged(stage: Stage) -> int:
    with stage.broker.client() as client:
        return int(client.hlen("unacked"))


def _can_tell(stage: Stage) -> bool:
    return hasattr(stage.app.tasks[TASK], "lock_lease")


SCENES: Final = [
    Scene("second-call", second_call),
    Scene("child-killed", child_killed),
    Scene("worker-killed", worker_killed, workers=2),
    Scene("revoked-before", revoked_before),
    Scene("terminated", terminated),
    Scene("time-limit", time_limit, Wanted(options={"time_limit": 1})),
    Scene("retry", retried),
    Scene("redelivered", redelivered, Wanted(seconds=60, options={"acks_late": True}), workers=2),
    Scene("chord", chord_members),
    Scene("positional-keyword", positional_and_keyword, Wanted(by_key=False)),
    Scene("longer", longer_than_the_lock, Wanted(seconds=2)),
    Scene("hot-cold", hot_and_cold, Wanted(seconds=60)),
    Scene("redis-emptied", redis_emptied),
    *FLOW_SCENES,
    *CALL_SCENES,
]


def named(name: str) -> Scene:
    with contextlib.suppress(StopIteration):
        return next(scene for scene in SCENES if scene.name == name)
    msg = f"there is no scene {name!r}; there are {', '.join(scene.name for scene in SCENES)}"
    raise ValueError(msg)


def play(name: str, package: str) -> dict[str, Any]:
    """Play one scene on one package."""
    seen = named(name).on(package)
    return {"scene": name, "package": package, "brief": seen.brief, "told": seen.told}

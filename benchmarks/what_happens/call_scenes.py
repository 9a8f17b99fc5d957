"""The scenes of what becomes of a call while one like it is not done: run, wait, end the other.

In these the other packages make their lock of the key, as in most scenes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Final

from celery import chord

from benchmarks.what_happens.app import ENVIRONMENT
from benchmarks.what_happens.packages import TASK, Wanted
from benchmarks.what_happens.scene import Scene, Seen
from benchmarks.what_happens.stage import ROOT, Run, Stage, when

CALLS: Final = 20
APART: Final = 0.05
"""Seconds between two calls of a burst."""

MEMBERS: Final = 4
QUIET: Final = 4.0
"""Seconds without a begin after which a burst counts as over."""

LONG: Final = 5.0
KILLED: Final = "killed"
"""Id of a task whose caller is killed."""

SENDING: Final = 5.0
"""Seconds within which a caller has taken its lock, if it takes one."""


def burst(stage: Stage) -> Seen:
    """A burst of 20 calls, of which the last one counts.

    Two slots. A document changes 20 times within a second, and each change calls the task that
    indexes it, which takes 0.3 s. One run with the last version would be enough.

    Here `lock_debounce=2`: a call waits for 2 s without a further one, and ends REVOKED if one
    comes. The packages that take the lock in the caller leave out calls while an earlier one is not
    done. Whether the last version is indexed depends on when it comes.
    """
    for n in range(CALLS):
        stage.call("hot", n, 0.3)
        time.sleep(APART)
    when(lambda: _is_over(stage), 60)
    numbers = [run.n for run in stage.runs("hot")]
    ran = f"{len(numbers)} of {CALLS} run"
    last = "the last one runs" if CALLS - 1 in numbers else "the last one does not run"
    return Seen(f"{ran}; {last}", f"{ran}; {last}")


def _is_over(stage: Stage) -> bool:
    """Whether all that began has ended, and nothing more has begun for a time."""
    runs = stage.runs("hot")
    return bool(runs) and all(r.ended and r.ended < time.monotonic() - QUIET for r in runs)


def one_result_for_all(stage: Stage) -> Seen:
    """A chord of four calls that are alike.

    Two slots. A page wants the same chart four times, as a chord of four calls with the same
    arguments. One run with four times its result would be enough.

    Here `lock_unique="until_done", lock_on_duplicate="follow"`: a duplicate is sent, waits without
    a slot, and ends with the result of the first one. A chord waits for one result per member, and
    a member that was not sent has none.
    """
    task = stage.app.tasks[TASK]
    raised = ""
    try:
        chord([task.s("hot", 1, 1.0)] * MEMBERS)(stage.app.tasks["total"].s())
    except Exception as error:  # noqa: BLE001  # whatever the package raises is the observation
        raised = f"; the caller gets `{type(error).__name__}`"
    ended = when(lambda: stage.noted("total"), 12)
    ran = f"{len(stage.runs('hot'))} of {MEMBERS} members ran"
    if ended:
        told = f"The chord finished with {ended[0]['numbers']}; {ran}{raised}"
        return Seen(f"finishes; {ran}", told)
    return Seen(f"never finishes; {ran}", f"The chord had not finished after 12 s; {ran}{raised}")


def caller_killed(stage: Stage) -> Seen:
    """The caller is killed before its message is sent.

    The broker does not answer. A process calls the task, and is killed with SIGKILL while it tries
    to send the message. The broker answers again. Then the key is called again, until that call is
    sent.

    Here `lock_unique="until_done"`: the caller announces its call, and confirms it when the broker
    has it. A later caller waits a second for a confirmation, and then sends its own call. A lock in
    the body is not taken by a caller.
    """
    before = _keys(stage)
    stage.broker.pause()
    stage.know(KILLED)
    caller = subprocess.Popen(
        [sys.executable, "-c", _CALLER],
        env={**os.environ, ENVIRONMENT: stage.setup.to_json(), "PYTHONPATH": str(ROOT)},
    )
    when(lambda: _keys(stage) - before, SENDING)
    caller.kill()
    caller.wait()
    stage.broker.resume()
    since = time.monotonic()
    following = stage.next_of("hot", since)
    return Seen(following.brief, f"Counted from the kill the {following.told}")


_CALLER: Final = f"""
from benchmarks.what_happens.app import app
app.tasks[{TASK!r}].apply_async(("hot", 1), task_id={KILLED!r})
"""


def _keys(stage: Stage) -> set[bytes]:
    """Return the keys of locks; the others are of workers."""
    with stage.locks.client() as client:
        return {key for key in client.scan_iter() if b":fleet:" not in key}


def newest(stage: Stage) -> Seen:
    """The newest call is wanted, while an older one runs.

    Two slots. A preview is drawn for 5 s, when the document changes and is called again.

    Here `lock_on_conflict="preempt"`: `LockPreempted` ends the older body, and the newest one
    starts when it has ended. With the others a caller would have to find the older task, revoke it
    with `terminate=True`, and wait until its lock is free; see [another
    scenario](#revoketerminatetrue-while-it-runs).
    """
    first = stage.first("hot", hold=LONG)
    called = time.monotonic()
    call = stage.call("hot", 2)
    ended = when(lambda: stage.run_of(first.id).ended, 3 * LONG)
    if not call.id:
        return Seen("not sent; the older one goes on", "The newest call is not sent")
    run = when(lambda: stage.run_of(call.id))
    if run is None:
        return Seen("does not run", "The newest call does not run")
    return _start_of(run, called, ended, stage.await_state(first.id, "SUCCESS", "REVOKED"))


def _start_of(run: Run, called: float, ended: float | None, state: str) -> Seen:
    after = f"starts after {run.began - called:.1f} s"
    how = "when the older one has ended" if ended and run.began >= ended else "beside the older one"
    return Seen(f"{after}, {how}", f"It {after}, {how}; state of the older one: {state}")


CALL_SCENES: Final = [
    Scene("burst", burst, Wanted(seconds=60, flow="debounce")),
    Scene("one-result", one_result_for_all, Wanted(flow="follow")),
    Scene("caller-killed", caller_killed, Wanted(flow="unique")),
    Scene("newest", newest, Wanted(seconds=60, flow="preempt")),
]

"""A worker that interrupts the task of a lost lock, and one that receives a delivery twice."""

from __future__ import annotations

from types import SimpleNamespace

from celery_singleton_lock.worker.runtime import Runtime


def test_a_task_whose_process_is_not_known_yet_is_interrupted_when_it_is():
    """The process has announced its lock, and the pool has not reported that it has the task."""
    request = SimpleNamespace(worker_pid=None, lock_header=SimpleNamespace(token="t"))
    later, interrupted = [], []
    worker = SimpleNamespace(
        kind="prefork",
        dispatcher=SimpleNamespace(
            pool_callbacks=SimpleNamespace(interruptible={"t": request}.get)
        ),
        lost_tokens=SimpleNamespace(interrupt=lambda *whom: interrupted.append(whom)),
        loop_channel=SimpleNamespace(later=later.append),
    )
    worker.abort = lambda token: Runtime.abort(worker, token)
    worker.abort("t")
    assert interrupted == []
    request.worker_pid = 4711
    later.pop()()
    assert interrupted == [(4711, "t")]
    assert later == []


def test_a_message_that_waits_for_a_slot_is_not_decoded_again():
    """Redis repeats a delivery that must end its task until a slot has been free for it."""
    received = []
    worker = SimpleNamespace(
        agent=SimpleNamespace(inbox=SimpleNamespace(retired=False)),
        dispatcher=SimpleNamespace(in_flight=SimpleNamespace(by_token={"t": object()})),
        _receive=received.append,
    )
    Runtime.receive(worker, SimpleNamespace(token="t"))
    assert received == []
    other = SimpleNamespace(token="other")
    Runtime.receive(worker, other)
    assert received == [other]


def test_a_lock_that_a_greenlet_has_released_is_not_lost():
    """The main loop stood still while it tried to reach the broker, and did not know of the end."""
    noticed = []
    agent = SimpleNamespace(lost_leases=SimpleNamespace(noticed=lambda *lost: noticed.append(lost)))
    tracer = SimpleNamespace(has_left={"released"}.__contains__)
    worker = SimpleNamespace(extension=SimpleNamespace(tracer=tracer), agent=agent)
    for token in ("released", "held"):
        Runtime._lease_lost(worker, "k", token)
    assert noticed == [("k", "held")]

"""The order in which tasks get a pool slot: granted ones first, but not always."""

from __future__ import annotations

import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from celery_singleton_lock.worker.granted_first import Order, Precedence, ThreadQueue, granted_first
from celery_singleton_lock.worker.lock_header import NO_HEADER
from celery_singleton_lock.worker.request import LockedRequest


def request(name, *, granted=False, error=None):
    made = LockedRequest.__new__(LockedRequest)
    made.id, made.lock_header = name, NO_HEADER._replace(granted=granted, error=error)
    return made


def replaced(name):
    """A delivery that ends its task, since a later call replaced it."""
    return request(name, granted=True, error=Exception("replaced"))


class Slots:
    """A worker with a prefork pool, all of whose slots are taken."""

    def __init__(self, semaphore=None):
        self.semaphore = LaxBoundedSemaphore(0) if semaphore is None else semaphore
        self.pool = SimpleNamespace(uses_semaphore=True)
        self.started = []
        self.send = granted_first(self, self._to_pool)

    def _to_pool(self, request):
        self.semaphore.acquire(self._start, request)

    def _start(self, request):
        self.started.append(getattr(request, "id", request))

    def free(self, slots=1):
        for _ in range(slots):
            self.semaphore.release()


def test_a_granted_task_passes_those_that_wait_for_a_slot():
    slots = Slots()
    for name in "abc":
        slots.send(request(name))
    slots.send(request("G", granted=True))
    slots.free(4)
    assert slots.started == ["G", "a", "b", "c"]


def test_a_free_slot_is_taken_at_once():
    slots = Slots(LaxBoundedSemaphore(1))
    slots.send(request("G", granted=True))
    assert slots.started == ["G"]


def test_granted_tasks_keep_their_order_and_leave_each_second_slot():
    slots = Slots()
    for name in "abc":
        slots.send(name)
    for name in "GHIJ":
        slots.send(request(name, granted=True))
    slots.free(7)
    assert slots.started == ["G", "a", "H", "b", "I", "c", "J"]


def test_a_steady_stream_of_granted_tasks_holds_up_no_other_task():
    """Whenever a slot is free, a granted task has just arrived."""
    slots = Slots()
    for name in "abcd":
        slots.send(name)
    for number in range(8):
        slots.send(request(number, granted=True))
        slots.free()
    assert slots.started == [0, "a", 1, "b", 2, "c", 3, "d"]


def test_a_granted_task_does_not_wait_behind_a_burst_of_replaced_ones():
    """They hold no lock, and its own lock is idle while it waits."""
    slots = Slots()
    for number in range(100):
        slots.send(replaced(number))
    slots.send(request("G", granted=True))
    slots.send(request("H", granted=True))
    slots.free(5)
    assert slots.started == ["G", 0, "H", 1, 2]


def test_replaced_tasks_and_those_of_the_broker_take_turns():
    slots = Slots()
    for name in "ab":
        slots.send(request(name))
    for number in range(4):
        slots.send(replaced(number))
    for name in "cd":
        slots.send(request(name))
    slots.send(request("G", granted=True))
    slots.free(9)
    assert slots.started == ["G", 0, "a", 1, "b", 2, 3, "c", "d"]


def test_a_burst_of_replaced_tasks_is_put_in_order_at_once():
    """A search through all of them for each one would stop the main loop."""
    asked = []
    waiting = deque()

    def rank(item):
        asked.append(item)
        return Precedence.ENDS

    order = Order(waiting, rank)
    for number in range(1000):
        waiting.append(number)
        order.advance_last()
    assert list(waiting) == list(range(1000))
    assert len(asked) < 3000


def test_a_task_whose_connection_was_lost_is_not_waited_for():
    """Celery clears the semaphore then."""
    slots = Slots()
    slots.send(request("a"))
    slots.send(request("G", granted=True))
    slots.semaphore.clear()
    slots.send(request("b"))
    slots.send(request("H", granted=True))
    slots.free(2)
    assert slots.started == ["H", "b"]


class Reversed(LaxBoundedSemaphore):
    """A semaphore whose waiters are not in a deque that it reads from the left."""

    def release(self):
        waiter, args, kwargs = self._waiting.pop()
        waiter(*args, **kwargs)


@pytest.mark.parametrize("semaphore", [Reversed(0), object()], ids=["another order", "none"])
def test_another_semaphore_is_left_alone_and_a_warning_says_so(semaphore, caplog):
    sent = []
    worker = SimpleNamespace(semaphore=semaphore, pool=SimpleNamespace(uses_semaphore=True))
    forward = granted_first(worker, sent.append)
    forward(request("G", granted=True))
    assert [each.id for each in sent] == ["G"]
    (warning,) = [r for r in caplog.records if r.name.endswith("granted_first")]
    assert type(semaphore).__qualname__ in warning.getMessage()


def test_a_pool_without_a_queue_of_its_own_is_left_alone():
    sent = []
    worker = SimpleNamespace(pool=SimpleNamespace())
    assert granted_first(worker, sent.append) == sent.append


def test_granted_tasks_get_the_next_thread():
    ran, gate = [], threading.Event()
    with ThreadPoolExecutor(1) as executor:
        worker = SimpleNamespace(pool=SimpleNamespace(executor=executor))
        send = granted_first(worker, lambda each: executor.submit(ran.append, each.id))
        executor.submit(gate.wait)
        for name in "ab":
            send(request(name))
        send(request("G", granted=True))
        gate.set()
    assert ran == ["G", "a", "b"]


def test_a_granted_task_gets_the_next_thread_before_replaced_ones():
    ran, gate = [], threading.Event()
    with ThreadPoolExecutor(1) as executor:
        worker = SimpleNamespace(pool=SimpleNamespace(executor=executor))
        send = granted_first(worker, lambda each: executor.submit(ran.append, each.id))
        executor.submit(gate.wait)
        for number in range(3):
            send(replaced(number))
        send(request("G", granted=True))
        gate.set()
    assert ran == ["G", 0, 1, 2]


def test_threads_that_have_begun_keep_their_queue(caplog):
    sent = []
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        work = executor._work_queue
        granted_first(SimpleNamespace(pool=SimpleNamespace(executor=executor)), sent.append)
        assert executor._work_queue is work
    assert "ThreadPoolExecutor" in caplog.text


def test_a_thread_queue_that_is_empty_says_so():
    order = ThreadQueue()
    with pytest.raises(queue.Empty):
        order.get_nowait()
    order.put(None)
    assert order.qsize() == 1
    assert order.get(timeout=1) is None


def test_items_may_be_taken_while_others_wait():
    """The place of a granted item depends only on what still waits."""
    waiting = deque()
    order = Order(
        waiting, lambda item: Precedence.GRANTED if item.isupper() else Precedence.FROM_BROKER
    )
    for item in "abGHcI":
        waiting.append(item)
        if item.isupper():
            order.advance_last()
    assert "".join(waiting) == "GaHbIc"
    waiting.popleft()
    waiting.append("J")
    order.advance_last()
    assert "".join(waiting) == "aHbIcJ"

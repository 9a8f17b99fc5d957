"""Starts granted tasks before tasks that wait for a pool slot and hold no lock.

While a granted task waits for a slot, no other task can use its lock. So it passes the tasks that
hold no lock. Only one granted task may pass a task that is first and holds no lock. So a steady
stream of granted tasks leaves every second slot to tasks without a lock.

A delivery may also end its task, since a later one replaced it, for example. Such a delivery holds
no lock, and there may be thousands. It passes tasks from the broker by the same rule, and granted
tasks pass it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Final, Generic, TypeVar

from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from celery_singleton_lock.worker.request import LockedRequest

T = TypeVar("T")
ToPool = Callable[[Any], None]

logger: Final = logging.getLogger(__name__)

_UNSUPPORTED: Final = (
    "celery-singleton-lock: granted tasks wait for a slot behind other tasks, since %s is not as "
    "expected. Their locks stay idle meanwhile. Please report the versions of Celery and kombu."
)


class Precedence(IntEnum):
    """An item passes the items of a lower precedence."""

    FROM_BROKER = 0
    """It holds no lock."""

    ENDS = 1
    """It was parked, and ends without its lock."""

    GRANTED = 2
    """It holds its lock."""


class Order(Generic[T]):
    """The order in which the waiting items of a deque get a slot.

    Args:
        waiting: items in their order; other code may append items and take the first.
        precedence: returns the precedence of an item.
    """

    def __init__(self, waiting: deque[T], precedence: Callable[[T], Precedence]) -> None:
        self._waiting = waiting
        self._precedence = precedence
        self._passed: T | None = None

    def advance_last(self) -> None:
        """Move the last item before items of a lower precedence."""
        item = self._waiting.pop()
        place = min(self._place(self._precedence(item)), len(self._waiting))
        self._passed = self._waiting[place] if place < len(self._waiting) else None
        self._waiting.insert(place, item)

    def _place(self, precedence: Precedence) -> int:
        """Return the place of the next item of this precedence.

        Between two items of this precedence, one item of a lower precedence starts. If the last
        item has this precedence or a higher one, the next item may pass none.
        """
        if self._waiting and self._precedence(self._waiting[-1]) >= precedence:
            return len(self._waiting)
        last = -1
        for place, item in enumerate(self._waiting):
            if self._precedence(item) >= precedence:
                last = place
            elif place > last + 1:
                break
        if last < 0 and self._waiting and self._waiting[0] is not self._passed:
            return 0
        return last + 2


def granted_first(worker: Any, to_pool: ToPool) -> ToPool:
    """Return a function that sends requests to the pool, granted ones before others.

    Args:
        worker: Celery's worker, with its pool.
        to_pool: Celery's function that sends a request to the pool.

    Returns:
        ``to_pool`` itself for a pool that has no queue of its own.
    """
    semaphore = getattr(worker, "semaphore", None)
    if semaphore is not None and getattr(worker.pool, "uses_semaphore", False):
        return _before_slots(semaphore, to_pool)
    executor = getattr(worker.pool, "executor", None)
    if executor is not None:
        return _before_threads(executor, to_pool)
    return to_pool


def _precedence_of(request: Any) -> Precedence:
    if not isinstance(request, LockedRequest) or not request.lock_header.granted:
        return Precedence.FROM_BROKER
    return Precedence.GRANTED if request.lock_header.error is None else Precedence.ENDS


def _before_slots(semaphore: Any, to_pool: ToPool) -> ToPool:
    """Order the requests that wait for the semaphore of a prefork pool."""
    if not _waits_in_deque(type(semaphore)):
        logger.warning(_UNSUPPORTED, f"the semaphore {type(semaphore).__qualname__}")
        return to_pool
    waiting = semaphore._waiting  # noqa: SLF001  # kombu's
    order = Order(
        waiting, lambda entry: max(map(_precedence_of, entry[1]), default=Precedence.FROM_BROKER)
    )

    def forward(request: Any) -> None:
        before = len(waiting)
        to_pool(request)
        if len(waiting) > before and _precedence_of(request):
            order.advance_last()

    return forward


def _waits_in_deque(kind: type) -> bool:
    """Return whether a semaphore of this class calls its waiters in the order of ``_waiting``."""
    called: list[int] = []
    try:
        semaphore: Any = kind(1)
        for number in range(3):
            semaphore.acquire(called.append, number)
        semaphore._waiting.rotate()  # noqa: SLF001  # kombu's
        semaphore.release()
    except Exception:  # noqa: BLE001  # another class may raise anything
        return False
    return issubclass(kind, LaxBoundedSemaphore) and called == [0, 2]


def _before_threads(executor: Any, to_pool: ToPool) -> ToPool:
    """Order the requests that wait for a thread."""
    order = ThreadQueue()
    if not _takes_from_queue(ThreadQueue()) or not _replace_queue(executor, order):
        logger.warning(_UNSUPPORTED, f"the executor {type(executor).__qualname__}")
        return to_pool

    def forward(request: Any) -> None:
        precedence = _precedence_of(request)
        if not precedence:
            return to_pool(request)
        with order.with_precedence(precedence):
            return to_pool(request)

    return forward


def _replace_queue(executor: Any, order: ThreadQueue) -> bool:
    """Let an executor that has not begun take its work from ``order``."""
    threads, work = getattr(executor, "_threads", None), getattr(executor, "_work_queue", None)
    if threads or not isinstance(work, queue.SimpleQueue) or work.qsize():
        return False
    executor._work_queue = order  # noqa: SLF001
    return True


def _takes_from_queue(order: ThreadQueue) -> bool:
    """Return whether an executor of this Python works with ``order``."""
    with ThreadPoolExecutor(1) as executor:
        if not _replace_queue(executor, order):
            return False
        gate = threading.Event()
        ran: list[int] = []
        executor.submit(gate.wait)
        executor.submit(ran.append, 1)
        with order.with_precedence(Precedence.GRANTED):
            executor.submit(ran.append, 2)
        gate.set()
    return ran == [2, 1]


class ThreadQueue:
    """The queue of work of a ``ThreadPoolExecutor``, with granted tasks before others."""

    def __init__(self) -> None:
        self._tickets: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting: deque[tuple[Precedence, Any]] = deque()
        self._order = Order(self._waiting, lambda entry: entry[0])
        self._mutex = threading.RLock()  # the executor may put while garbage is collected
        self._mode = threading.local()

    @contextmanager
    def with_precedence(self, precedence: Precedence) -> Iterator[None]:
        """Give a precedence to the items that this thread puts."""
        self._mode.precedence = precedence
        try:
            yield
        finally:
            self._mode.precedence = Precedence.FROM_BROKER

    def put(self, item: Any) -> None:
        """Add an item."""
        precedence = getattr(self._mode, "precedence", Precedence.FROM_BROKER)
        with self._mutex:
            self._waiting.append((precedence, item))
            if precedence:
                self._order.advance_last()
        self._tickets.put(None)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item.

        Raises:
            queue.Empty: there is none.
        """
        self._tickets.get(block, timeout)
        with self._mutex:
            return self._waiting.popleft()[1]

    def get_nowait(self) -> Any:
        """Return the next item.

        Raises:
            queue.Empty: there is none.
        """
        return self.get(block=False)

    def qsize(self) -> int:
        """Return the number of items."""
        return self._tickets.qsize()

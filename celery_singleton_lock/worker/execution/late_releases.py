"""Releases the locks of ended tasks without waiting for the reply.

The release is sent at once. A process of the pool reads its reply with the next command on that
connection. If it gets no task meanwhile, a thread reads the reply. The thread also repeats a
release that failed, and reports the result as if the process had waited for the reply. A process
that ends waits for its thread.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from celery.signals import worker_process_shutdown
from redis.exceptions import NoScriptError

from celery_singleton_lock.core.model import Ending, Reply, Verdict
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.worker.lock_header import LockHeader

logger: Final = logging.getLogger(__name__)

IDLE: Final = 0.05
"""Seconds after which the thread reads a reply that no other command has read."""

LAST: Final = 2.0
"""Most seconds for which a process that ends waits for the replies to its releases."""

_RELEASED: Final = b"released"

_FOR_A_TIME: Final = (b"\nrate\n", b"\nclosed\n")
"""Parts of the reply if it contains the time at which a waiter may start."""


class Report(Protocol):
    """Called with the result of a release, unless it only released the lock."""

    def __call__(self, header: LockHeader, outcome: Reply | BackendError, *, expired: bool) -> None:
        """Report it. ``expired``: the lease had ended when the task ended."""
        ...


class _Late(NamedTuple):
    """A release that has failed, that found no lock, or after which a waiter waits for the rate."""

    header: LockHeader
    expired: bool
    sent_at: float
    answer: bytes | Exception


class LateReleases:
    """Sends the releases of one process.

    Args:
        store: returns the store of this process.
        done_for: seconds for which an ended attempt is remembered.
        report: called in another thread if a lock was not released, or a waiter waits for its rate.
    """

    def __init__(self, store: Callable[[], Store], done_for: float, report: Report) -> None:
        self._store = store
        self._done_for = done_for
        self._report = report
        self._pid = 0

    def send(self, header: LockHeader, *, expired: bool = False) -> bool:
        """Send the release of a lock, and do not wait for the reply.

        Args:
            header: of the task that has ended.
            expired: whether its lease had ended.

        Returns:
            False if the store cannot do so. Nothing is sent then.

        Raises:
            BackendError: the release could not be sent.
        """
        store = self._store()
        if not (isinstance(store, RedisStore) and store.defers and self._has_thread()):
            return False
        on_reply = partial(self._on_reply, header, expired, store.clock.monotonic())
        sent = store.send_release(
            header.name, header.token, header.worker, self._done_for, on_reply
        )
        if sent and self._wakes.empty():
            self._wakes.put(None)
        return sent

    def _has_thread(self) -> bool:
        """Start the thread unless it runs. Return False if none can be started."""
        if self._pid != os.getpid():
            self._prepare()
        if not self.thread.is_alive():
            try:
                self.thread.start()
            except RuntimeError:  # no more threads are allowed
                self._pid = 0  # it was never alive, so the next start is not a restart
                return False
        return True

    def _prepare(self) -> None:
        """Create the thread; a forked process has none yet.

        A soft time limit may interrupt this at any line, so the process id is set last. It may also
        interrupt ``Event.set``, and leave the event locked for ever, so a queue wakes the thread.
        """
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failed: queue.SimpleQueue[_Late] = queue.SimpleQueue()
        self._ending = threading.Event()
        self.thread: BackgroundThread = BackgroundThread("singleton-lock-late-replies", self._round)
        # Before Celery 5.7, a method of two instances is one receiver without dispatch_uid.
        worker_process_shutdown.connect(self._finish, dispatch_uid=f"late-releases-{id(self)}")
        self._pid = os.getpid()

    def _finish(self, **_: Any) -> None:
        """Wait until the thread has read all replies, and has reported what failed."""
        if self._pid == os.getpid():
            self._ending.set()
            self._wakes.put(None)
            self.thread.join(LAST)

    def _on_reply(
        self, header: LockHeader, expired: bool, sent_at: float, answer: bytes | Exception
    ) -> None:
        """Pass a reply on if it contains more than the release. Runs where the reply was read."""
        released = isinstance(answer, bytes) and answer.startswith(_RELEASED)
        if released and not any(part in answer for part in _FOR_A_TIME):  # type: ignore[operator]
            return
        self._failed.put(_Late(header, expired, sent_at, answer))
        self._wakes.put(None)

    def _round(self) -> bool:
        """Wait for a release, then read its reply unless another command has read it."""
        with self.thread.idle():
            self._wakes.get()
        ending = self._ending.wait(IDLE)
        store = self._store()
        if isinstance(store, RedisStore):
            before = math.inf if ending else store.clock.monotonic() - IDLE
            if store.read_unread_replies(before):
                self._wakes.put(None)
        while not self._failed.empty():
            self._repeat_release(self._failed.get())
        return not ending

    def _repeat_release(self, late: _Late) -> None:
        """Repeat a release that has failed, and report the result."""
        outcome: Reply | BackendError
        try:
            outcome = self._outcome(late)
        except BackendError as error:
            outcome = error
        if (
            isinstance(outcome, BackendError)
            or outcome.verdict is not Verdict.RELEASED
            or outcome.next_start
        ):
            self._report(late.header, outcome, expired=late.expired)

    def _outcome(self, late: _Late) -> Reply:
        if isinstance(late.answer, bytes):
            reply = replies.reply(late.answer)
            passed = self._store().clock.monotonic() - late.sent_at
            return reply._replace(next_look=max(0.0, reply.next_look - passed))
        name, token, worker = late.header.name, late.header.token, late.header.worker
        again = self._store().release(
            name, token, Ending.FINAL, worker=worker, done_for=self._done_for
        )
        return again if isinstance(late.answer, NoScriptError) else again._replace(repeated=True)

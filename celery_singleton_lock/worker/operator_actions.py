"""What an operator's change does outside of the locks' Redis: results, events, commands to workers.

The command line and Flower use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from celery.app.task import Context
from kombu.serialization import prepare_accept_content

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.store.operator.base import Operator, Waiting
from celery_singleton_lock.worker.extension import Extension
from celery_singleton_lock.worker.message_codec import unpack
from celery_singleton_lock.worker.request_class import read_as_celery

NAMED: Final = 20
"""Largest number of locks of one operation that have an event of their own."""

SLOW: Final = 5.0
"""If a failed write took this many seconds, the result backend counts as not answering."""


class BrokerError(SingletonLockError):
    """The broker did not accept a message."""


class OperatorActions:
    """Terminates tasks, stores results of dropped tasks, and sends events, for one operation.

    Args:
        app: the Celery app.
        extension: the app's settings and locks.

    Attributes:
        untold: number of results that could not be stored as REVOKED.
    """

    def __init__(self, app: Any, extension: Extension) -> None:
        """Create the object. Sends nothing."""
        self.app = app
        self.extension = extension
        self.untold: int = 0
        self._results_away = self._events_away = False

    @property
    def realm(self) -> str:
        """The realm of the app's broker."""
        return self.extension.realm

    @property
    def done_for(self) -> float:
        """Seconds for which copies of a dropped message do not run."""
        return self.extension.settings.done_for

    def terminate(self, task_id: str) -> None:
        """Tell the worker of a task to terminate it.

        Raises:
            BrokerError: the broker did not accept the command.
        """
        try:
            self.app.control.revoke(task_id, terminate=True, signal="SIGTERM")
        except Exception as error:
            msg = (
                f"The broker did not accept the command to the worker ({type(error).__name__}): "
                "nothing was terminated. Check broker_url, or kill the process that show names: "
                "in a prefork pool it runs this task only, in others it is the whole worker."
            )
            raise BrokerError(msg) from error

    def tell_dropped(self, each: Waiting, by: Operator) -> None:
        """Store REVOKED as the result of a dropped task, so that ``get()`` and chords end.

        If the result cannot be stored, :attr:`untold` is incremented. The task stays dropped. A
        result backend that does not answer is asked once: by Celery's defaults that takes two
        minutes.
        """
        if self._results_away:
            self.untold += 1
            return
        clock = SystemClock()
        began = clock.monotonic()
        try:
            self._revoke(each, f"dropped by {by.who} ({by.action or 'drop'})")
        except Exception:  # noqa: BLE001  # an error of any result backend, or an invalid body
            self.untold += 1
            self._results_away = clock.monotonic() - began > SLOW

    def _revoke(self, each: Waiting, reason: str) -> None:
        accept = prepare_accept_content(self.app.conf.accept_content)
        message = unpack(each.message, accept)
        read = read_as_celery(message, utc=self.app.uses_utc_timezone())
        headers = read["headers"]
        _, _, embed = read["body"] if read["decoded"] else message.payload
        request = Context({**headers, **(embed or {})})
        self.app.backend.mark_as_revoked(
            each.task_id, reason, request=request, store_result=not headers.get("ignore_result")
        )

    def announce(self, by: Operator, done: Mapping[str, int], action: str) -> None:
        """Send one event ``lock-admin`` for each lock. The audit entries are already in Redis.

        If there are more than twenty locks, only the first twenty are named, as in the audit. A
        broker that does not answer is asked once.

        Args:
            by: the operator.
            done: lock name -> number of tasks or steps.
            action: name of the operation.
        """
        named = dict(islice(done.items(), NAMED))
        rest = sum(done.values()) - sum(named.values())
        if rest:
            named[f"(and {len(done) - NAMED} more)"] = rest
        for name, number in named.items():
            if not self._events_away:
                self._events_away = not self.extension.tell(by.step(name, action, number))

"""What an app can say and do that a lock's Redis cannot: workers, queues, results, events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from celery import states
from celery.app.task import Context
from kombu.serialization import prepare_accept_content

from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.worker.extension import Extension
from celery_singleton_lock.worker.publisher import Publisher, unpack
from celery_singleton_lock.store.operator.base import Operator, Waiting
from celery_singleton_lock.message_text import natural, number_of
from celery_singleton_lock.worker.request_class import read_as_celery

ANSWER: Final = 1.0
"""Seconds for which workers are waited for."""


NAMED: Final = 20
"""Most queues that a sentence names."""


class AppSide:
    """An app, for operators.

    Args:
        app: the Celery app.
        extension: its locks.

    Attributes:
        untold: how many results could not be stored as REVOKED.
        consumed: returns the queues that live workers consume, as the locks' Redis knows them.
    """

    def __init__(self, app: Any, extension: Extension) -> None:
        """Ask nobody yet."""
        self.app = app
        self.extension = extension
        self.untold = 0
        self.consumed: Callable[[], Iterable[str]] = tuple

    @property
    def realm(self) -> str:
        """Which broker the app's messages come from."""
        return self.extension.realm

    # -- a witness --------------------------------------------------------------------------------

    def seen(self, task_id: str) -> tuple[str, str] | None:
        """Return what its result, or a worker, says of a task; see :class:`Witness`."""
        result = self._result(task_id)
        if result in states.READY_STATES:
            return "finished", f"ended with {result}"
        worker = self._worker_of(task_id)
        if worker is not None:
            return worker
        if result == states.RETRY:
            return "eta", "failed, and is to be retried: its next try is in the broker's queue"
        return None

    def _result(self, task_id: str) -> str:
        try:
            return str(self.app.backend.get_state(task_id))
        except Exception:  # noqa: BLE001  # no result backend, or one that is away
            return str(states.PENDING)

    def _worker_of(self, task_id: str) -> tuple[str, str] | None:
        inspect = self.app.control.inspect(timeout=ANSWER)
        for worker, tasks in (inspect.query_task([task_id]) or {}).items():
            for state, info in tasks.values():
                return self._received(worker, state, info or {})
        return None

    def _received(self, worker: str, state: str, info: Mapping[str, Any]) -> tuple[str, str]:
        if state == "active":
            return "running", f"runs on {worker}, without a lock of this Redis"
        eta = self._eta(worker, str(info.get("id", "")))
        if eta:
            return "eta", f"is in {worker}, which starts it not before {eta} (its ETA)"
        return "received", f"was received by {worker} and waits there for a pool slot"

    def _eta(self, worker: str, task_id: str) -> str:
        found = self.app.control.inspect([worker], timeout=ANSWER, limit=1).scheduled() or {}
        for each in found.get(worker, ()):
            if each.get("request", {}).get("id") == task_id:
                return str(each.get("eta") or "")
        return ""

    def queues(self) -> str:
        """Return how many messages the queues hold that are known; see :class:`Witness`."""
        with self.app.connection_for_read() as connection:
            held = {name: self._held(connection, name) for name in self._known_queues()}
        full = [f"{name} holds {number_of(held[name], 'message')}" for name in held if held[name]]
        empty = [name for name in held if not held[name]]
        told = _first(full, "hold messages")
        if empty:
            verb = "is" if len(empty) == 1 else "are"
            told += [f"{', '.join(_first(empty, ''))} {verb} empty, or not there"]
        return ", ".join(told)

    def _known_queues(self) -> list[str]:
        """Return the queues that the app declares or routes tasks to, and that workers consume."""
        found = {*self.app.amqp.queues, *map(self._queue_of, self.app.tasks.values())}
        found.update(self.consumed())
        active = self.app.control.inspect(timeout=ANSWER).active_queues() or {}
        found.update(str(queue.get("name", "")) for each in active.values() for queue in each)
        return sorted(found - {""}, key=natural)

    def _queue_of(self, task: Any) -> str:
        """Return the queue to which a task goes, unless its sender says otherwise; or nothing."""
        given = {"queue": queue} if (queue := getattr(task, "queue", None)) else {}
        try:
            return str(self.app.amqp.router.route(given, task.name)["queue"].name)
        except Exception:  # noqa: BLE001  # a router of the user's that wants a real call
            return ""

    @staticmethod
    def _held(connection: Any, name: str) -> int:
        try:
            with connection.channel() as channel:
                return int(channel.queue_declare(queue=name, passive=True).message_count)
        except Exception:  # noqa: BLE001  # any transport's: an empty queue of Redis is not there
            return 0

    # -- looking after ----------------------------------------------------------------------------

    def reports(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what each worker that answers tells of itself; see ``inspect locks``."""
        inspect: Any = self.app.control.inspect(timeout=ANSWER)
        try:
            return inspect._request("locks", most=0) or {}  # noqa: SLF001  # so a command is sent
        except Exception:  # noqa: BLE001  # any transport's: the broker is away
            return {}

    # -- stepping in ------------------------------------------------------------------------------

    def terminate(self, task_id: str) -> None:
        """Have the worker that runs a task end it."""
        self.app.control.revoke(task_id, terminate=True, signal="SIGTERM")

    @contextmanager
    def publisher(self) -> Iterator[Publisher]:
        """Give a way to the broker, closed at the end."""
        publisher = Publisher(self.app.connection_for_write)
        try:
            yield publisher
        finally:
            publisher.close()

    def tell_dropped(self, each: Waiting, by: Operator) -> None:
        """Store REVOKED as the result of a task that was dropped, so that who waits hears of it.

        A result that cannot be stored is counted, as :attr:`untold`: the task is gone already.
        """
        try:
            self._revoke(each, f"dropped by {by.who} ({by.action or 'drop'})")
        except Exception:  # noqa: BLE001  # whatever a result backend raises, or a body that is none
            self.untold += 1

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

    def announce(self, by: Operator, lock: str, action: str, count: int = 1) -> None:
        """Send the event of a step; the audit in Redis has it, whether that arrives or not."""
        self.extension.tell(by.step(lock, action, count))


def _first(names: list[str], what: str) -> list[str]:
    """Return the first of many, and how many more there are."""
    more = len(names) - NAMED
    return names if more <= 0 else [*names[:NAMED], f"{more:,} more {what}".rstrip()]


class BrokerError(SingletonLockError):
    """The broker did not take a message."""


def sent(send: Callable[..., None], *args: Any) -> None:
    """Send; whatever a transport raises becomes one sentence, without the broker's URL.

    Raises:
        BrokerError: it was not sent, or it is not known.
    """
    try:
        send(*args)
    except Exception as error:
        msg = (
            f"The broker did not take a message ({type(error).__name__}): what was not sent is "
            "still parked. See broker_url, and that the queue exists; then run this again."
        )
        raise BrokerError(msg) from error

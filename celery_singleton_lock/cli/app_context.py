"""A command's access to the app: workers, queues, results, events, the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from celery import states
from celery.app.task import Context
from kombu.serialization import prepare_accept_content

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import BackendError, SingletonLockError
from celery_singleton_lock.message_text import natural, number_of
from celery_singleton_lock.store.operator.base import Operator, Waiting
from celery_singleton_lock.worker.extension import Extension
from celery_singleton_lock.worker.message_codec import unpack
from celery_singleton_lock.worker.publisher import Publisher
from celery_singleton_lock.worker.request_class import read_as_celery

ANSWER: Final = 1.0
"""Seconds to wait for replies of workers."""

NAMED: Final = 20
"""Largest number of queues that a sentence names."""

SLOW: Final = 5.0
"""Seconds from which a failed write means that the result backend does not answer."""


class AppSide:
    """Gives commands access to the Celery app.

    Args:
        app: the Celery app.
        extension: the app's settings and locks.

    Attributes:
        untold: number of results that could not be stored as REVOKED.
        consumed: returns the broker queues that live workers consume, as recorded in the locks'
            Redis.
    """

    def __init__(self, app: Any, extension: Extension) -> None:
        """Create the object. Sends nothing."""
        self.app = app
        self.extension = extension
        self.untold = 0
        self._results_away = self._events_away = False
        self.consumed: Callable[[], Iterable[str]] = tuple

    @property
    def realm(self) -> str:
        """The realm of the app's broker."""
        return self.extension.realm

    # -- the protocol Witness ---------------------------------------------------------------------

    def seen(self, task_id: str) -> tuple[str, str] | None:
        """Return what the result backend or a worker knows about a task; see :class:`Witness`."""
        result = self._result(task_id)
        if result in states.READY_STATES:
            return "finished", f"ended with {result}"
        worker = self._worker_of(task_id)
        if worker is not None:
            return worker
        if result == states.RETRY:
            return "eta", "waits for its retry in the broker's queue"
        return None

    def _result(self, task_id: str) -> str:
        try:
            return str(self.app.backend.get_state(task_id))
        except Exception:  # noqa: BLE001  # no result backend, or it does not answer
            return str(states.PENDING)

    def _worker_of(self, task_id: str) -> tuple[str, str] | None:
        inspect = self.app.control.inspect(timeout=ANSWER)
        try:
            answers = inspect.query_task([task_id]) or {}
        except Exception:  # noqa: BLE001  # an error of any transport; Redis is searched instead
            return None
        for worker, tasks in answers.items():
            for state, info in tasks.values():
                return self._received(worker, state, info or {})
        return self._waits_for_redis(task_id)

    def _waits_for_redis(self, task_id: str) -> tuple[str, str] | None:
        """Return which worker has the message and waits for the locks' Redis with it."""
        for worker, report in self.reports(task_id).items():
            for each in report.get("waits_for_redis", ()):
                names = " or ".join(map(repr, each["locks"]))
                because = (
                    f"tries again at least once a minute, since Redis refuses {names}. Run locks "
                    "doctor, and see the worker's log"
                    if each["refused"]
                    else f"waits until the locks' Redis answers, to acquire {names}"
                )
                return "received", f"was received by {worker}, which {because}"
        return None

    def _received(self, worker: str, state: str, info: Mapping[str, Any]) -> tuple[str, str]:
        if state == "active":
            return "running", f"runs on {worker}, without a lock in this Redis"
        eta = self._eta(worker, str(info.get("id", "")))
        if eta:
            return "eta", f"was received by {worker}, which will not start it before {eta} (ETA)"
        return "received", f"was received by {worker} and waits there for a pool slot"

    def _eta(self, worker: str, task_id: str) -> str:
        found = self.app.control.inspect([worker], timeout=ANSWER, limit=1).scheduled() or {}
        for each in found.get(worker, ()):
            if each.get("request", {}).get("id") == task_id:
                return str(each.get("eta") or "")
        return ""

    def queues(self) -> str:
        """Return the lengths of the known queues; see :class:`Witness`."""
        try:
            with self.app.connection_for_read() as connection:
                connection.ensure_connection(max_retries=1, timeout=ANSWER)
                held = {name: self._held(connection, name) for name in self._known_queues()}
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001  # an error of any transport
            return f"not known, since the broker did not answer ({type(error).__name__})"
        full = [f"{name} holds {number_of(held[name], 'message')}" for name in held if held[name]]
        empty = [name for name in held if not held[name]]
        told = _first(full, "hold messages")
        if empty:
            verb = "is" if len(empty) == 1 else "are"
            told += [f"{', '.join(_first(empty, ''))} {verb} empty or does not exist"]
        return ", ".join(told)

    def _known_queues(self) -> list[str]:
        """Return the queues that the app declares, routes tasks to, or that workers consume."""
        found = {*self.app.amqp.queues, *map(self._queue_of, self.app.tasks.values())}
        found.update(self.consumed())
        active = self.app.control.inspect(timeout=ANSWER).active_queues() or {}
        found.update(str(queue.get("name", "")) for each in active.values() for queue in each)
        return sorted(found - {""}, key=natural)

    def _queue_of(self, task: Any) -> str:
        """Return the queue to which a task is routed by default; empty if that is not known."""
        given = {"queue": queue} if (queue := getattr(task, "queue", None)) else {}
        try:
            return str(self.app.amqp.router.route(given, task.name)["queue"].name)
        except Exception:  # noqa: BLE001  # a router function of the user that needs a real call
            return ""

    @staticmethod
    def _held(connection: Any, name: str) -> int:
        try:
            with connection.channel() as channel:
                return int(channel.queue_declare(queue=name, passive=True).message_count)
        except Exception:  # noqa: BLE001  # an error of any transport; in Redis, no empty queue exists
            return 0

    # -- for doctor -------------------------------------------------------------------------------

    def reports(self, task_id: str = "") -> Mapping[str, Mapping[str, Any]]:
        """Return the reply of each worker to ``inspect locks``.

        Args:
            task_id: the replies show the messages of this task that wait for Redis.
        """
        inspect: Any = self.app.control.inspect(timeout=ANSWER)
        try:
            return inspect._request("locks", most=0, id=task_id) or {}  # noqa: SLF001  # the only way to send it
        except Exception:  # noqa: BLE001  # any transport's error: the broker does not answer
            return {}

    # -- changes ----------------------------------------------------------------------------------

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
                "nothing was terminated. Check broker_url, or kill the process that show names."
            )
            raise BrokerError(msg) from error

    @contextmanager
    def publisher(self) -> Iterator[Publisher]:
        """Yield a publisher. It is closed at the end of the block."""
        publisher = Publisher(self.app.connection_for_write)
        try:
            yield publisher
        finally:
            publisher.close()

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

    def announce(self, by: Operator, lock: str, action: str, count: int = 1) -> None:
        """Send the event ``lock-admin``. The audit entry is already in Redis.

        A broker that is away is asked once.
        """
        if not self._events_away:
            self._events_away = not self.extension.tell(by.step(lock, action, count))


def _first(names: list[str], what: str) -> list[str]:
    """Return the first names, and the number of the others."""
    more = len(names) - NAMED
    return names if more <= 0 else [*names[:NAMED], f"{more:,} more {what}".rstrip()]


class BrokerError(SingletonLockError):
    """The broker did not accept a message."""


def sent(send: Callable[..., None], *args: Any) -> None:
    """Call ``send``. Replace any error by one that does not show the broker's URL.

    Raises:
        BrokerError: the message was not sent, or it is not known whether it was.
    """
    try:
        send(*args)
    except Exception as error:
        msg = (
            f"The broker did not accept a message ({type(error).__name__}). Tasks that were not "
            "sent are still parked. Check broker_url and that the queue exists, then run the "
            "command again."
        )
        raise BrokerError(msg) from error

"""A command's access to the app: workers, queues, results, events, the broker."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final
from weakref import WeakKeyDictionary

from celery import states
from click import ClickException

from celery_singleton_lock.admin.doctor import Consumer
from celery_singleton_lock.core.lock_mode import ENFORCE
from celery_singleton_lock.errors import BackendError, SingletonLockError
from celery_singleton_lock.message_text import named, natural, number_of
from celery_singleton_lock.worker.extension import Extension
from celery_singleton_lock.worker.operator_actions import BrokerError, OperatorActions
from celery_singleton_lock.worker.publisher import Publisher

ANSWER: Final = 1.0
"""Seconds to wait for replies of workers."""

BROKER_PATIENCE: Final = 5.0
"""Seconds to wait for a reply of the broker. By Celery's default that wait has no end."""

NAMED: Final = 20
"""Largest number of queues that a sentence names."""


_CANCELLED: Final = (
    "was cancelled by Celery, because its worker was shut down cold (SIGQUIT) or lost the broker. "
    "Celery stores RETRY for it, and sends no retry. It is lost if it is acknowledged early "
    "(Celery's default): send it again. Otherwise the broker redelivers it, a Redis broker after "
    "the visibility time-out"
)


@dataclass
class _Broker:
    """An app's options and pools of its broker, as they were before its commands.

    Attributes:
        commands: number of commands that run now. Threads of a web server may run several.
    """

    options: Any
    pool: Any
    producers: Any
    commands: int = 0


_brokers: Final = WeakKeyDictionary[Any, _Broker]()
_mutex: Final = Lock()


def _limit_waits(app: Any) -> None:
    """Limit how long connections to the broker wait that the app opens from now on."""
    with _mutex:
        if app not in _brokers:
            pool = app._pool  # noqa: SLF001  # app.pool would open one
            _brokers[app] = _Broker(app.conf.broker_transport_options, pool, _producers(app))
            with suppress(Exception):  # an unknown transport: a command that needs it says so
                app.conf.broker_transport_options = _limited(app)
        _brokers[app].commands += 1


def _limited(app: Any) -> Any:
    options = app.conf.broker_transport_options or {}
    kind = app.connection_for_write().get_transport_cls().driver_type
    if kind == "redis":
        return {"socket_timeout": BROKER_PATIENCE, **options}
    if kind == "amqp":
        # RabbitMQ confirms nothing while it has an alarm (memory, disk), and kombu waits for that
        # without end. A Publisher confirms nevertheless, with a time-out.
        return {"read_timeout": BROKER_PATIENCE, **options, "confirm_publish": False}
    return app.conf.broker_transport_options


def _restore_waits(app: Any) -> None:
    """Restore options and pools when the last command of the app has ended."""
    with _mutex:
        before = _brokers[app]
        before.commands -= 1
        if before.commands:
            return
        del _brokers[app]
        app.conf.broker_transport_options = before.options
        if before.pool is None:
            app._pool = None  # noqa: SLF001  # as Celery does after a fork
        if before.producers is None and "amqp" in vars(app):
            app.amqp._producer_pool = None  # noqa: SLF001


def _producers(app: Any) -> Any:
    """Return the app's pool of producers, which has connections of its own, or None."""
    return app.amqp._producer_pool if "amqp" in vars(app) else None  # noqa: SLF001


class AppSide(OperatorActions):
    """Gives commands access to the Celery app.

    Args:
        app: the Celery app.
        extension: the app's settings and locks.

    Attributes:
        consumed: returns the broker queues that live workers consume, as recorded in the locks'
            Redis.
    """

    def __init__(self, app: Any, extension: Extension) -> None:
        """Create the object. Sends nothing."""
        super().__init__(app, extension)
        self.consumed: Callable[[], Iterable[str]] = tuple
        _limit_waits(app)

    def close(self) -> None:
        """Restore the app's settings, unless another command of this process still needs them.

        Connections that commands have opened are not left to the senders of this process
        (``call_command``): they confirm nothing, and have the commands' time-outs.
        """
        _restore_waits(self.app)

    # -- the protocol Witness ---------------------------------------------------------------------

    def seen(self, task_id: str) -> tuple[str, str] | None:
        """Return what the result backend or a worker knows about a task; see :class:`Witness`."""
        meta = self._result(task_id)
        result = str(meta.get("status"))
        if result in states.READY_STATES:
            state = "revoked" if result == states.REVOKED else "finished"
            return state, f"ended with {result}"
        worker = self._worker_of(task_id)
        if worker is not None or result != states.RETRY:
            return worker
        if not meta.get("traceback"):  # a task that is retried has that of its Retry
            return "unseen", _CANCELLED
        return "retry", "waits for its retry in the broker's queue"

    def _result(self, task_id: str) -> Mapping[str, Any]:
        try:
            return dict(self.app.backend.get_task_meta(task_id))
        except Exception:  # noqa: BLE001  # no result backend, or it does not answer
            return {}

    def _worker_of(self, task_id: str) -> tuple[str, str] | None:
        inspect = self.app.control.inspect(timeout=ANSWER)
        try:
            answers = inspect.query_task([task_id]) or {}
        except Exception:  # noqa: BLE001  # an error of any transport; Redis is searched instead
            return None
        for worker, tasks in answers.items():
            for state, info in tasks.values():
                return self._received(worker, state, info or {})
        return self._waits_in_worker(task_id)

    def _waits_in_worker(self, task_id: str) -> tuple[str, str] | None:
        """Return which worker holds the message until Redis answers, or until it is requeued."""
        for worker, report in self.reports(task_id).items():
            for each in report.get("held_back", ()):
                names = " or ".join(map(repr, each["locks"]))
                return "received", (
                    f"was received by {worker} and did not get {names}: that worker holds it back, "
                    'then sends it to the end of its queue (lock_on_conflict="requeue"). It is not '
                    "lost"
                )
            for each in report.get("waits_for_redis", ()):
                names = " or ".join(map(repr, each["locks"]))
                because = (
                    f"tries again at least once a minute, since Redis refuses {names}. Run locks "
                    "doctor, and see the worker's log"
                    if each["refused"]
                    else "waits until the locks' Redis answers and is not full, to acquire "
                    f"{names}. Run locks doctor"
                )
                return "received", f"was received by {worker}, which {because}"
            for each in report.get("to_park", ()):
                names = " or ".join(map(repr, each["locks"]))
                return "received", (
                    f"was received by {worker} and did not get {names}: that worker waits until "
                    "the locks' Redis has stored its message. If it is full, or does not answer, "
                    "the worker's log says so. It is not lost"
                )
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
            verbs = "is empty or does not exist" if len(empty) == 1 else "are empty or do not exist"
            told += [f"{', '.join(_first(empty, ''))} {verbs}"]
        return ", ".join(told)

    def consumers(self, realm: str, queue: str) -> list[str]:
        """Return the workers that consume a queue of the app's broker; see :class:`Witness`."""
        if realm != self.realm:
            return []
        try:
            active = self.app.control.inspect(timeout=ANSWER).active_queues() or {}
        except Exception:  # noqa: BLE001  # an error of any transport: the broker does not answer
            return []
        return sorted(w for w, each in active.items() if queue in {q.get("name") for q in each})

    def _known_queues(self) -> list[str]:
        """Return the queues that the app declares, routes tasks to, or that workers consume."""
        found = {*self.app.amqp.queues, *map(self.queue_of, self.app.tasks.values())}
        found.update(self.consumed())
        active = self.app.control.inspect(timeout=ANSWER).active_queues() or {}
        found.update(str(queue.get("name", "")) for each in active.values() for queue in each)
        return sorted(found - {""}, key=natural)

    def load_tasks(self) -> None:
        """Import the modules of the app's tasks, as a worker does, and declare the tasks.

        Raises:
            ConfigurationError: an option of a task is invalid.
            AppNotLoaded: a module cannot be imported.
        """
        try:
            self.app.loader.import_default_modules()
            self.app.finalize(auto=True)
        except (SingletonLockError, ClickException):
            raise
        except Exception as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            msg = (
                f"The modules of the app's tasks cannot be imported: {named(type(error))}: {error} "
                f"({last.filename}, line {last.lineno})."
            )
            raise AppNotLoaded(msg) from error

    def queue_of(self, task: Any) -> str:
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
            task_id: the replies include the messages of this task that wait for Redis, or that are
                held back until they are requeued or stored.
        """
        inspect: Any = self.app.control.inspect(timeout=ANSWER)
        try:
            return inspect._request("locks", most=0, id=task_id) or {}  # noqa: SLF001  # the only way to send it
        except Exception:  # noqa: BLE001  # any transport's error: the broker does not answer
            return {}

    def broker(self) -> tuple[str, Exception | None]:
        """Return the URL of the broker without credentials, and why it does not answer, or None."""
        with self.app.connection_for_read() as connection:
            try:
                connection.ensure_connection(max_retries=1, timeout=ANSWER)
            except Exception as error:  # noqa: BLE001  # an error of any transport
                return str(connection.as_uri()), error
            return str(connection.as_uri()), None

    def consumers_by_worker(self) -> Mapping[str, Consumer]:
        """Return what each worker consumes, and which tasks it has; nothing if none answers."""
        inspect: Any = self.app.control.inspect(timeout=ANSWER)
        try:
            active, tasks = inspect.active_queues() or {}, inspect.registered() or {}
        except Exception:  # noqa: BLE001  # an error of any transport: the broker does not answer
            return {}
        return {
            worker: Consumer(
                frozenset(str(queue.get("name", "")) for queue in queues),
                _names(tasks[worker]) if worker in tasks else None,
            )
            for worker, queues in active.items()
        }

    def locked_tasks(self) -> Mapping[str, frozenset[str]]:
        """Return the tasks of the app that take locks, by the queue to which each is routed."""
        self.load_tasks()
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name, mode in self.extension.modes().items():
            queue = self.queue_of(self.app.tasks[name])
            if mode == ENFORCE and queue:
                found[queue].add(name)
        return {queue: frozenset(names) for queue, names in found.items()}

    # -- changes ----------------------------------------------------------------------------------

    @contextmanager
    def publisher(self) -> Iterator[Publisher]:
        """Yield a publisher. It is closed at the end of the block."""
        publisher = Publisher(self.app.connection_for_write)
        try:
            yield publisher
        finally:
            publisher.close()


def _first(names: list[str], what: str) -> list[str]:
    """Return the first names, and how many others there are."""
    more = len(names) - NAMED
    return names if more <= 0 else [*names[:NAMED], f"{more:,} more {what}".rstrip()]


class AppNotLoaded(SingletonLockError):
    """A module of the app's tasks cannot be imported."""


def sent(send: Callable[..., None], *args: Any) -> None:
    """Call ``send``. Replace any error by one that does not show the broker's URL.

    Raises:
        BrokerError: the message was not sent, or it is not known whether it was.
    """
    try:
        send(*args)
    except TimeoutError as error:
        msg = (
            "The broker did not confirm a message in time, and may still accept it: its task is "
            "parked, and may run twice. RabbitMQ confirms nothing while it has an alarm (memory, "
            "disk). Run the command again when that is over: all other tasks that were not sent "
            "are still parked."
        )
        raise BrokerError(msg) from error
    except Exception as error:
        msg = (
            f"The broker did not accept a message ({type(error).__name__}). Tasks that were not "
            "sent are still parked. Check broker_url and that the queue exists, then run the "
            "command again."
        )
        raise BrokerError(msg) from error


def _names(registered: Iterable[Any]) -> frozenset[str]:
    """Return the names in an answer to ``inspect registered``, which may be followed by options."""
    return frozenset(str(task).partition(" ")[0] for task in registered)

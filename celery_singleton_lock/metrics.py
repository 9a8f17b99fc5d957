"""Metrics for Prometheus: of a worker's tasks, of its agent, and of the queues of all workers.

A worker serves them (``singleton_lock_metrics_port``), or :func:`export` adds them to a registry of
the application. Everything is counted in the worker's main process, also with a prefork pool. Each
scrape asks Redis for the numbers of parked messages, in the thread of the scrape.

Needs ``prometheus_client``: ``pip install "celery-singleton-lock[prometheus]"``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from celery import bootsteps
from celery.exceptions import ImproperlyConfigured

from celery_singleton_lock.admin.sweep import requeue_expired
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.events import (
    CallNotSent,
    Event,
    LeaseLost,
    LockAcquired,
    LockClosed,
    LockRefused,
    LockReleased,
    ParkedLost,
    TaskBlocked,
    TaskDelivered,
    TaskDuplicate,
    TaskEvent,
    TaskFollowed,
    TaskPreempted,
    TaskReplaced,
    log_keys,
)
from celery_singleton_lock.store.factory import admin_of
from celery_singleton_lock.worker.extension import PATIENCE, Extension
from celery_singleton_lock.worker.install import install, refuse_other_than_app

if TYPE_CHECKING:
    from celery import Celery
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

logger: Final = logging.getLogger(__name__)

BUCKETS: Final = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
"""Upper bounds of the histograms' buckets, in seconds."""

COUNTERS: Final = {
    "celery_lock_acquired": "Tasks that got their lock.",
    "celery_lock_blocked": "Tasks that found their lock busy, by what they did and why.",
    "celery_lock_delivered": "Parked tasks that went to a pool, by verdict.",
    "celery_lock_replaced": "Parked tasks that a later one replaced.",
    "celery_lock_preempted": "Running tasks that had to end for a later one.",
    "celery_lock_not_sent": "Calls that were not sent, since one like it was sent before.",
    "celery_lock_followed": "Duplicates that ended with the result of the first task.",
    "celery_lock_duplicates": "Copies of a task, stored (twin) or dropped (done).",
    "celery_lock_lost": "Locks that were lost while their task ran.",
    "celery_lock_closed": "How often a task has closed its lock for a time.",
    "celery_lock_parked_lost": "Parked tasks that the locks' Redis has lost.",
}
"""Counters per task: name -> description."""

UNKNOWN: Final = "unknown"
"""Value of the label ``waits_for`` if the reason is not known."""

COUNTED: Final[dict[type[Event], str]] = {
    TaskDelivered: "delivered",
    TaskDuplicate: "duplicates",
    TaskReplaced: "replaced",
    TaskFollowed: "followed",
    TaskPreempted: "preempted",
    CallNotSent: "not_sent",
    LeaseLost: "lost",
    LockClosed: "closed",
    ParkedLost: "parked_lost",
}
"""Event -> its counter, if no other event has the same counter."""

HISTOGRAMS: Final = {
    "celery_lock_wait_seconds": "Time from a task's arrival at a worker until it has its lock.",
    "celery_lock_hold_seconds": "How long tasks held their lock.",
}
"""Histograms per task: name -> description."""

TOTALS: Final = {
    "parked": ("celery_lock_parked_messages", "Messages that this worker has parked."),
    "parked_untracked": (
        "celery_lock_parked_untracked",
        "Parked messages whose loss would not be noticed: too many are parked.",
    ),
    "swept": ("celery_lock_swept", "Locks that this worker has swept."),
    "published": ("celery_lock_copies_published", "Parked messages sent to the broker."),
    "requeued": ("celery_lock_requeued", "Blocked messages sent back to the broker."),
    "let_run": (
        "celery_lock_let_run",
        "Parked messages that were delivered to run without the lock.",
    ),
    "released_for_dead": (
        "celery_lock_released_for_dead",
        "Locks released for processes that had died.",
    ),
    "unclaimed": (
        "celery_lock_unclaimed_grants",
        "Messages that did not run here, since another worker had them.",
    ),
    "renewed": ("celery_lock_renewals", "Leases renewed."),
    "renewals_failed": ("celery_lock_renewals_failed", "Renewals that Redis did not answer."),
    "backend_errors": ("celery_lock_backend_errors", "Calls to the locks' Redis that failed."),
}
"""Counters of a worker: name in its report -> metric and description."""

GAUGES: Final = {
    "held": ("celery_lock_held", "Tasks of this worker that hold their lock."),
    "granted": ("celery_lock_granted", "Parked tasks that were granted and wait for a slot here."),
    "waiting": ("celery_lock_waiting", "Tasks that are in a slot and have no lock yet."),
    "parking": ("celery_lock_parking", "Messages that are being parked."),
    "suspended": (
        "celery_lock_suspended",
        "Messages held back until Redis answers, or accepts their lock.",
    ),
    "held_back": ("celery_lock_held_back", "Blocked messages held back until they are requeued."),
    "queues_stopped": (
        "celery_lock_queues_stopped",
        "Queues that this worker does not consume, because too much of them is parked.",
    ),
    "backend_down_for": ("celery_lock_backend_down_seconds", "How long Redis has not answered."),
}
"""Gauges of a worker: name in its report -> metric and description."""

THREADS: Final = {
    "celery_lock_thread_last_round_seconds": (
        "Time since the last round of a thread of the worker; 0 if it waits for work."
    ),
}
"""Gauges per thread: name -> description."""

FLEET: Final = {
    "celery_lock_parked": "Messages of all workers that are parked now, by queue.",
    "celery_lock_parked_bytes": "Their size, without the memory that Redis needs in addition.",
    "celery_lock_oldest_parked_seconds": "Age of the oldest of them.",
    "celery_lock_fleet_up": "Whether the locks' Redis answered this scrape.",
}
"""Gauges that each scrape reads from Redis; they have the same values in all workers."""


class TaskMetrics:
    """Counts the events of tasks.

    Args:
        by_lock: returns whether the lock's name is a label. The first event asks it: by then the
            app has its settings, which it may not have when it is given a registry.
    """

    def __init__(self, by_lock: Callable[[], bool]) -> None:
        self._by_lock = by_lock
        self._made: dict[str, _Counts] = {}

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values."""
        from prometheus_client.core import (  # noqa: PLC0415  # an extra
            CounterMetricFamily,
            HistogramMetricFamily,
        )

        for name, about in COUNTERS.items():
            yield CounterMetricFamily(name, about)
        for name, about in HISTOGRAMS.items():
            yield HistogramMetricFamily(name, about)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        counts = self._made.get("counts")
        if counts is None:
            yield from self.describe()
        else:
            for metric in counts.metrics.values():
                yield from metric.collect()

    def notify(self, event: Event) -> None:
        """Count an event."""
        counts = self._made.get("counts")
        if counts is None:  # of two threads the first sets it
            counts = self._made.setdefault("counts", _Counts(by_lock=self._by_lock()))
        counts.notify(event)


class _Counts:
    """The metrics of tasks, with their labels."""

    def __init__(self, *, by_lock: bool) -> None:
        from prometheus_client import Counter, Histogram  # noqa: PLC0415  # an extra

        self._by_lock = by_lock
        labels = ("task", "lock") if by_lock else ("task",)
        further = {
            "celery_lock_blocked": ("policy", "waits_for"),
            "celery_lock_delivered": ("verdict",),
            "celery_lock_duplicates": ("verdict",),
        }
        self.metrics: dict[str, Any] = {
            name: Counter(name, about, (*labels, *further.get(name, ())), registry=None)
            for name, about in COUNTERS.items()
        }
        self.metrics |= {
            name: Histogram(name, about, labels, registry=None, buckets=BUCKETS)
            for name, about in HISTOGRAMS.items()
        }

    def notify(self, event: Event) -> None:
        match event:
            case LockAcquired():
                self._count("acquired", event)
                self._observe("wait", event, event.waited)
                self._begin_losses(event)
            case LockReleased():
                self._observe("hold", event, event.held)
            case TaskBlocked() | LockRefused():
                self._count("blocked", event, event.policy, event.waits_for or UNKNOWN)
                self._begin_losses(event)
            case TaskDelivered() | TaskDuplicate():
                self._count(COUNTED[type(event)], event, event.verdict)
            case TaskReplaced() | TaskPreempted() | CallNotSent() | LeaseLost() | LockClosed():
                self._count(COUNTED[type(event)], event)
            case ParkedLost() | TaskFollowed():
                self._count(COUNTED[type(event)], event)
            case _:
                pass

    def _labels(self, event: TaskEvent) -> tuple[str, ...]:
        return (event.task, event.lock) if self._by_lock else (event.task,)

    def _count(self, what: str, event: TaskEvent, *further: str) -> None:
        self.metrics[f"celery_lock_{what}"].labels(*self._labels(event), *further).inc()

    def _begin_losses(self, event: TaskEvent) -> None:
        """Export counters of zero, since Prometheus does not count the first value of a series."""
        for what in ("lost", "parked_lost"):
            self.metrics[f"celery_lock_{what}"].labels(*self._labels(event))

    def _observe(self, what: str, event: TaskEvent, seconds: float) -> None:
        metric = self.metrics[f"celery_lock_{what}_seconds"]
        metric.labels(*self._labels(event)).observe(seconds)


class WorkerCollector:
    """Exports the counters and gauges of a worker.

    Args:
        report: returns their values; None if no worker runs in this process.
    """

    def __init__(self, report: Callable[[], Mapping[str, Any] | None]) -> None:
        self._report = report

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration needs no report."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        from prometheus_client.core import (  # noqa: PLC0415  # an extra
            CounterMetricFamily,
            GaugeMetricFamily,
        )

        report = self._report()
        if report is None:
            return
        for what, (name, about) in TOTALS.items():
            yield CounterMetricFamily(name, about, value=report[what])
        for what, (name, about) in GAUGES.items():
            yield GaugeMetricFamily(name, about, value=report[what])
        for name, about in THREADS.items():
            family = GaugeMetricFamily(name, about, labels=("thread",))
            for thread, seconds in report["threads"].items():
                family.add_metric((thread,), seconds or 0.0)
            yield family


SCRAPED_WITHIN: Final = 2 * PATIENCE
"""Seconds for which a scrape waits for Redis. Prometheus gives up a scrape after ten by default."""

SWEPT_WITHIN: Final = 1.0
"""Seconds of a scrape in which locks are swept: there may be more than it can sweep in time."""


class FleetCollector:
    """Exports the numbers of parked messages of all workers, which each scrape reads from Redis.

    Args:
        extension: the app's locks.
    """

    def __init__(self, extension: Extension) -> None:
        self._extension = extension
        self._store: Any = None
        self._query: _ParkedQuery | None = None

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not wait for Redis."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; without an answer only ``celery_lock_fleet_up`` has a value."""
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415  # an extra

        families = {
            name: GaugeMetricFamily(name, about, labels=() if name.endswith("_up") else ("queue",))
            for name, about in FLEET.items()
        }
        found = self._parked()
        for queue, parked in (found or {}).items():
            families["celery_lock_parked"].add_metric((queue,), parked.waiting)
            families["celery_lock_parked_bytes"].add_metric((queue,), parked.size)
            families["celery_lock_oldest_parked_seconds"].add_metric((queue,), parked.oldest)
        families["celery_lock_fleet_up"].add_metric((), found is not None)
        yield from families.values()

    def _parked(self) -> Mapping[str, Any] | None:
        """Return what is parked, by queue; None if Redis did not answer in time.

        A Cluster's masters are asked one after the other. While one of them stands still, that
        takes longer than a scrape may. So the query goes on in its thread, and scrapes that find it
        there start no other one.
        """
        if self._store is None:
            self._store = self._extension.new_store(PATIENCE, operator=True)
        query = self._query
        if query is None or not query.is_alive():
            sweeps = not self._extension.settings.is_quorum
            query = self._query = _ParkedQuery(self._store, self._extension.realm, sweeps=sweeps)
            query.start()
        query.join(SCRAPED_WITHIN)
        return None if query.is_alive() else query.found


class _ParkedQuery(threading.Thread):
    """One query for the numbers of parked messages. Sweeps before, if no worker lives to do that.

    Else an autoscaler would not see the tasks that a killed worker ran, or that start again later.
    """

    def __init__(self, store: Any, realm: str, *, sweeps: bool) -> None:
        super().__init__(name="singleton-lock-scrape", daemon=True)
        self._store = store
        self._realm = realm
        self._sweeps = sweeps
        self.found: Mapping[str, Any] | None = None

    def run(self) -> None:
        try:
            if self._sweeps:
                self._sweep_without_workers()
            self.found = self._store.parked(self._realm)
        except BackendError as error:
            logger.debug("celery-singleton-lock: %s No metrics of parked messages.", error)

    def _sweep_without_workers(self) -> None:
        try:
            admin = admin_of(self._store)
            if not admin.workers():
                requeue_expired(admin, within=SWEPT_WITHIN)
        except BackendError as error:  # of one lock, or Redis accepts no changes at present
            logger.debug("celery-singleton-lock: %s Not all locks were swept.", error)


class LogLines:
    """Logs a line for each event, with its fields also as ``extra`` of the record.

    Args:
        level: level of :mod:`logging`.
    """

    def __init__(self, level: int) -> None:
        self._level = level

    def notify(self, event: Event) -> None:
        """Log the event."""
        keys = log_keys(event)
        facts = {key: value for key, value in keys.items() if key != "lock_event"}
        sentence = " ".join(f"{key}={value!r}" for key, value in facts.items() if value != "")
        logger.log(self._level, "%s %s", keys["lock_event"], sentence, extra=keys)


def log_events(app: Celery, level: int = logging.INFO) -> None:
    """Log a line for each event of an app's locks, in its workers.

    Args:
        app: the Celery app.
        level: level of :mod:`logging`.

    Raises:
        TypeError: ``app`` is not a Celery app, or ``level`` is not a number.
    """
    refuse_other_than_app(app, "log_events")
    given: Any = level  # a caller may pass anything
    if not isinstance(given, int):
        msg = f"log_events() got the level {given!r:.200}: give a number, such as logging.INFO."
        raise TypeError(msg)
    install(app).observers.add(LogLines(level))


def export(app: Celery, registry: CollectorRegistry, *, fleet: bool = True) -> None:
    """Add an app's metrics to a registry of your own.

    Call this where the app is created, before the first task. The metrics of tasks and of the
    worker have values only in a worker. The metrics of all workers have values in each process, so
    a small process can report parked messages to an autoscaler when no worker runs.

    Args:
        app: the Celery app.
        registry: a registry of ``prometheus_client``.
        fleet: whether each scrape asks Redis for the numbers of parked messages.

    Raises:
        ImportError: ``prometheus_client`` is not installed.
        TypeError: ``app`` is not a Celery app.
    """
    refuse_other_than_app(app, "export")
    extension = install(app)
    tasks = TaskMetrics(lambda: extension.settings.metrics_by_lock)
    registry.register(tasks)
    extension.observers.add(tasks)
    registry.register(WorkerCollector(extension.worker_report))
    if fleet:
        registry.register(FleetCollector(extension))


class MetricsStep(bootsteps.StartStopStep):  # type: ignore[misc]  # celery is untyped
    """Serves a worker's metrics, if ``singleton_lock_metrics_port`` is set."""

    requires: tuple[str, ...] = ("celery_singleton_lock.worker.bootsteps:ConsumerStep",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._server: Any = None
        self._registry: Any = None

    def include_if(self, consumer: Any) -> bool:
        """Return whether the worker serves metrics."""
        extension = install(consumer.app)
        return extension.settings.metrics_port is not None and extension.active()

    def start(self, consumer: Any) -> None:
        """Start the server, unless it runs: Celery calls this after each reconnect.

        A port that is in use does not end the worker: two may run on this machine.
        """
        if self._server is not None:
            return
        prometheus = _prometheus()
        extension, runtime = install(consumer.app), consumer.singleton_lock_runtime
        if self._registry is None:
            self._registry = prometheus.CollectorRegistry()
            export(consumer.app, self._registry)
        port, address = extension.settings.metrics_port, extension.settings.metrics_address
        try:
            self._server = prometheus.start_http_server(port, address, self._registry)[0]
        except OSError as error:
            logger.error(  # noqa: TRY400  # a traceback would not help
                "celery-singleton-lock: no metrics are served on %s:%s: %s. Set another "
                "singleton_lock_metrics_port for each worker of a machine.",
                address,
                port,
                error,
            )
            return
        runtime.metrics_port = port
        logger.info("celery-singleton-lock: metrics on http://%s:%s/metrics", address, port)

    def terminate(self, consumer: Any) -> None:  # Celery's signature
        """Keep serving: Celery also calls this, as ``stop``, when it loses the connection."""

    stop = terminate


def _prometheus() -> Any:
    """Return ``prometheus_client``.

    Raises:
        ImproperlyConfigured: it is not installed.
    """
    try:
        import prometheus_client  # noqa: PLC0415  # an extra
    except ImportError as error:
        msg = (
            "singleton_lock_metrics_port is set, and prometheus_client is not installed. Run "
            'pip install "celery-singleton-lock[prometheus]", or remove the setting.'
        )
        raise ImproperlyConfigured(msg) from error
    return prometheus_client

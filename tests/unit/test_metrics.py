"""What each event counts, and that the example rules and dashboard use existing metrics."""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from celery import Celery

from celery_singleton_lock import metrics as metrics_module
from celery_singleton_lock.core.clock import MovableClock
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.errors import BackendRefused, BackendUnreachable
from celery_singleton_lock.events import (
    BackendDown,
    CallNotSent,
    LeaseLost,
    LockAcquired,
    LockClosed,
    LockRefused,
    LockReleased,
    TaskBlocked,
    TaskDelivered,
    TaskDuplicate,
    TaskFollowed,
    TaskPreempted,
    TaskReplaced,
    log_keys,
)
from celery_singleton_lock.metrics import (
    COUNTERS,
    FLEET,
    GAUGES,
    HISTOGRAMS,
    THREADS,
    TOTALS,
    TaskMetrics,
    export,
    log_events,
)
from celery_singleton_lock.worker.install import install
from support.waiting import eventually

prometheus = pytest.importorskip("prometheus_client")
ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"

SERIES = {
    *(f"{name}_total" for name in COUNTERS),
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")),
    *(f"{name}_total" for name, _ in TOTALS.values()),
    *(name for name, _ in GAUGES.values()),
    *THREADS,
    *FLEET,
}
"""All names under which Prometheus stores something of ours."""


NOT_KNOWN = {"waits_for": "unknown"}


def task_metrics(registry, *, by_lock=False):
    metrics = TaskMetrics(lambda: by_lock)
    registry.register(metrics)
    return metrics


@pytest.mark.parametrize(
    ("event", "series", "labels"),
    [
        (LockAcquired, "celery_lock_acquired_total", {}),
        (TaskBlocked, "celery_lock_blocked_total", {"policy": "park", **NOT_KNOWN}),
        (LockRefused, "celery_lock_blocked_total", {"policy": "fail", **NOT_KNOWN}),
        (TaskDelivered, "celery_lock_delivered_total", {"verdict": "granted"}),
        (TaskDuplicate, "celery_lock_duplicates_total", {"verdict": "twin"}),
        (TaskReplaced, "celery_lock_replaced_total", {}),
        (TaskPreempted, "celery_lock_preempted_total", {}),
        (TaskFollowed, "celery_lock_followed_total", {}),
        (LeaseLost, "celery_lock_lost_total", {}),
        (LockClosed, "celery_lock_closed_total", {}),
        (LockAcquired, "celery_lock_wait_seconds_count", {}),
        (LockReleased, "celery_lock_hold_seconds_count", {}),
    ],
)
@pytest.mark.parametrize("by_lock", [False, True])
def test_each_event_counts_by_task_and_by_lock_only_if_asked(event, series, labels, by_lock):
    """A lock per account would be a series per account."""
    registry = prometheus.CollectorRegistry()
    metrics = task_metrics(registry, by_lock=by_lock)
    for _ in range(2):
        metrics.notify(event("account:42", "settle", "id-1"))
    labels = {"task": "settle", **({"lock": "account:42"} if by_lock else {}), **labels}
    assert registry.get_sample_value(series, labels) == 2
    assert ("account:42" in prometheus.generate_latest(registry).decode()) is by_lock


@pytest.mark.parametrize("kind", [LockAcquired, TaskBlocked])
@pytest.mark.parametrize("by_lock", [False, True])
def test_the_first_loss_of_a_task_increases_a_counter_that_was_zero(kind, by_lock):
    """Otherwise Prometheus sees no increase, and the alert has to guess whether a series is new."""
    registry = prometheus.CollectorRegistry()
    task_metrics(registry, by_lock=by_lock).notify(kind("a:1", "settle", "id"))
    labels = {"task": "settle", **({"lock": "a:1"} if by_lock else {})}
    assert registry.get_sample_value("celery_lock_lost_total", labels) == 0
    assert registry.get_sample_value("celery_lock_parked_lost_total", labels) == 0


@pytest.mark.parametrize("kind", [TaskBlocked, LockRefused])
@pytest.mark.parametrize("reason", WaitsFor)
def test_blocked_tasks_are_counted_by_what_they_wait_for(kind, reason):
    """A closed list: the number of series does not grow with locks or tasks that are blocked."""
    registry = prometheus.CollectorRegistry()
    task_metrics(registry).notify(kind("a:1", "settle", "id", policy="x", waits_for=reason.value))
    labels = {"task": "settle", "policy": "x", "waits_for": reason.value}
    assert registry.get_sample_value("celery_lock_blocked_total", labels) == 1


def test_seconds_are_put_into_histograms():
    registry = prometheus.CollectorRegistry()
    metrics = task_metrics(registry)
    metrics.notify(LockAcquired("a:1", "settle", "id", waited=4.0))
    metrics.notify(LockReleased("a:1", "settle", "id", held=0.25))
    for name, value in (("wait", 4.0), ("hold", 0.25)):
        found = registry.get_sample_value(f"celery_lock_{name}_seconds_sum", {"task": "settle"})
        assert found == value


def test_an_outage_is_no_tasks_event():
    task_metrics(prometheus.CollectorRegistry()).notify(BackendDown("redis://host/0"))


def test_an_app_may_be_configured_after_it_is_given_a_registry():
    """Else its beat sends no periodic tasks, and its locks ignore their settings."""
    app = Celery("app", set_as_current=False)
    registry = prometheus.CollectorRegistry()
    export(app, registry)
    configured = []

    @app.on_after_configure.connect
    def set_up(sender, **_):
        configured.append(sender)

    app.conf.singleton_lock_metrics_by_lock = True
    app.conf.singleton_lock_mode = "observe"
    assert install(app).settings.mode == "observe"
    assert configured == [app]
    install(app).observers.notify(LockAcquired("a:1", "settle", "id"))
    labels = {"task": "settle", "lock": "a:1"}
    assert registry.get_sample_value("celery_lock_acquired_total", labels) == 1


def test_metrics_of_tasks_are_described_before_the_first_event():
    registry = prometheus.CollectorRegistry()
    metrics = task_metrics(registry)
    before = prometheus.generate_latest(registry).decode()
    metrics.notify(LockAcquired("a:1", "settle", "id"))
    after = prometheus.generate_latest(registry).decode().splitlines()
    about = {line for line in after if line.startswith("#") and "_created" not in line}
    assert about == set(before.splitlines())


def test_one_registry_does_not_take_the_metrics_twice():
    app = Celery("app", set_as_current=False)
    registry = prometheus.CollectorRegistry()
    export(app, registry)
    with pytest.raises(ValueError, match="celery_lock_acquired"):
        export(app, registry)


def test_to_register_asks_no_redis():
    """An app may be created without access to Redis; a scrape then reports that."""
    app = Celery("app", set_as_current=False)
    app.conf.singleton_lock_backend = "redis://127.0.0.1:1/0"
    registry = prometheus.CollectorRegistry()
    export(app, registry)
    assert registry.get_sample_value("celery_lock_fleet_up") == 0


def test_a_scrape_is_answered_while_the_query_of_parked_messages_takes_longer(monkeypatch):
    """Otherwise Prometheus gives up, and the worker's alerts are silent for the whole outage."""
    app = Celery("app", set_as_current=False)
    app.conf.singleton_lock_backend = "redis://127.0.0.1:1/0"
    registry = prometheus.CollectorRegistry()
    export(app, registry)
    answers = threading.Event()
    asked = []

    class Silent:
        def parked(self, realm):
            asked.append(realm)
            answers.wait(60)
            return {}

    monkeypatch.setattr(metrics_module, "SCRAPED_WITHIN", 0.05)
    monkeypatch.setattr(install(app), "new_store", lambda *_, **__: Silent())
    monkeypatch.setattr(metrics_module, "admin_of", lambda _: Mock(workers=lambda: {"w#1": {}}))
    try:
        for _ in range(3):
            assert registry.get_sample_value("celery_lock_fleet_up") == 0
        assert len(asked) == 1
    finally:
        answers.set()
    eventually(lambda: registry.get_sample_value("celery_lock_fleet_up") == 1)


def test_a_scrape_tells_what_is_parked_though_it_cannot_sweep_all_locks_that_are_due(monkeypatch):
    """Else an autoscaler that has scaled to zero sees nothing while 20,000 locks have waiters."""
    app = Celery("app", set_as_current=False)
    app.conf.singleton_lock_backend = "redis://127.0.0.1:1/0"
    registry = prometheus.CollectorRegistry()
    export(app, registry)
    names, clock = itertools.count(), MovableClock()

    def due():
        clock.advance(0.4)
        name = next(names)
        return [f"lock:{name}"] if name < 1000 else []

    admin = Mock(workers=dict, take_due_locks=due, clock=clock)
    monkeypatch.setattr(install(app), "new_store", lambda *_, **__: Mock(parked=lambda _: {}))
    monkeypatch.setattr(metrics_module, "admin_of", lambda _: admin)
    assert registry.get_sample_value("celery_lock_fleet_up") == 1
    assert admin.sweep_and_grant_many.call_count == 3


@pytest.mark.parametrize("error", [BackendRefused("NOPERM"), BackendUnreachable("NOREPLICAS")])
def test_a_scrape_that_may_not_sweep_reads_the_numbers_all_the_same(monkeypatch, error):
    """A Redis without its replica, a replica, or one with a full disk can still be read."""
    app = Celery("app", set_as_current=False)
    app.conf.singleton_lock_backend = "redis://127.0.0.1:1/0"
    registry = prometheus.CollectorRegistry()
    export(app, registry)
    monkeypatch.setattr(install(app), "new_store", lambda *_, **__: Mock(parked=lambda _: {}))
    monkeypatch.setattr(metrics_module, "admin_of", lambda _: Mock(workers=Mock(side_effect=error)))
    assert registry.get_sample_value("celery_lock_fleet_up") == 1


@pytest.mark.parametrize(
    "event",
    [
        TaskBlocked("account:42", "settle", "id-1", holder="x", rank=2),
        LeaseLost("account:42", "settle", "id-1", reason="lapsed"),
        BackendDown("redis://host/0"),
        CallNotSent("account:42", "settle", "id-1", of="id-0"),  # told by the sender
    ],
)
def test_each_event_can_be_logged_with_stable_keys(caplog, event):
    """Their names begin with ``lock_``, so that they are none of logging's, nor of Celery's."""
    app = Celery("app", set_as_current=False)
    log_events(app)
    with caplog.at_level(logging.INFO):
        install(app).observers.notify(event)
    (record,) = caplog.records
    keys = log_keys(event)
    assert all(key.startswith("lock_") for key in keys)
    assert {key: getattr(record, key) for key in keys} == keys
    assert record.getMessage().startswith(f"{keys['lock_event']} lock_")


def names_in(expression):
    return set(re.findall(r"\bcelery_lock_\w+", expression))


def test_alert_rules_ask_for_metrics_that_there_are():
    """And each says what it means."""
    yaml = pytest.importorskip("yaml")
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert names_in(rule["expr"])
        assert names_in(rule["expr"]) <= SERIES, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_dashboard_asks_for_metrics_that_there_are():
    """Its panels do not overlap, and each of its targets can be asked."""
    board = json.loads((MONITORING / "dashboard.json").read_text())
    places = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        places |= {(x, place["y"]) for x in range(place["x"], place["x"] + place["w"])}
        for target in panel["targets"]:
            assert names_in(target["expr"])
            assert names_in(target["expr"]) <= SERIES, panel["title"]
    assert len(places) == sum(panel["gridPos"]["w"] for panel in board["panels"])


def test_every_metric_is_in_the_docs():
    """And no other."""
    told = names_in((ROOT / "docs" / "metrics.md").read_text())
    assert SERIES - {f"{name}_{part}" for name in HISTOGRAMS for part in ("count", "sum")} <= (
        told | {f"{name}_bucket" for name in HISTOGRAMS}
    )
    assert told <= SERIES | set(HISTOGRAMS)

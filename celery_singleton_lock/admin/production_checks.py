"""Checks of ``doctor`` that need the app, and the names of those in the production checklist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery_singleton_lock.admin.doctor import NAMED, Check, Health
from celery_singleton_lock.message_text import number_of, printable

ALERTS: Final = "examples/monitoring/alerts.yml"
"""The alert rules, in the repository and the sdist."""

CHECKLIST: Final = (
    "eviction",
    "persistence",
    "database",
    "versions",
    "clock",
    "threads",
    "alerts",
)
"""Names of the checks in the production checklist, in the order in which they are shown."""


def versions_check(reports: Mapping[str, Mapping[str, Any]], here: str) -> Check:
    """Check that all workers have the same version of this library as this command.

    Args:
        reports: worker name -> report of the worker, as ``inspect locks`` shows it.
        here: the version of this command.
    """
    workers: dict[str, list[str]] = {}
    for worker, report in sorted(reports.items()):
        if "worker" in report:  # a worker without locks reports an error
            workers.setdefault(str(report.get("version") or "before 1.0"), []).append(worker)
    if not workers:
        told = "no worker answered; a worker with a busy solo pool does not answer"
        return Check("versions", Health.UNKNOWN, told)
    number = sum(map(len, workers.values()))
    if set(workers) == {here}:
        told = f"{number_of(number, 'worker')} and this command have {here}"
        return Check("versions", Health.OK, told)
    found = "; ".join(f"{', '.join(names[:NAMED])}: {each}" for each, names in workers.items())
    told = (
        f"this command: {here}; {found}. Versions may differ during an upgrade only: finish it "
        "(docs/upgrading.md)"
    )
    return Check("versions", Health.WARN, printable(told))


def alerts_check(metrics_port: int | None) -> Check:
    """Say where the alert rules are. This command cannot see whether Prometheus has them.

    Args:
        metrics_port: the setting.
    """
    served = f"workers serve metrics on port {metrics_port}"
    if metrics_port is None:
        served = "workers serve no metrics: set singleton_lock_metrics_port, or use an exporter"
    told = f"{served}; load {ALERTS} into Prometheus, which this command cannot check"
    return Check("alerts", Health.NOTE, told)

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


def alerts_check(reports: Mapping[str, Mapping[str, Any]]) -> Check:
    """Say which workers serve metrics, and where the alert rules are.

    This command cannot see whether Prometheus has the rules.

    Args:
        reports: as of :func:`versions_check`.
    """
    told = f"{_served(reports)}; load {ALERTS} into Prometheus, which this command cannot check"
    return Check("alerts", Health.NOTE, printable(told))


def _served(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return which workers serve metrics: each knows its own port, this command does not."""
    known = {name: each for name, each in sorted(reports.items()) if "metrics_port" in each}
    without = [name for name, each in known.items() if not each["metrics_port"]]
    if not known:
        return "no worker answered whether it serves metrics"
    if without:
        return (
            f"no metrics port is open in {', '.join(without[:NAMED])}: set "
            "singleton_lock_metrics_port, add the metrics to your own, or use an exporter"
        )
    ports = sorted({int(each["metrics_port"]) for each in known.values()})
    verb = "serves" if len(known) == 1 else "serve"
    shown = ", ".join(map(str, ports[:NAMED]))
    return f"{number_of(len(known), 'worker')} {verb} metrics, on port {shown}"

"""Commands for maintenance: sweep, doctor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import click
from redis.exceptions import RedisError

from celery_singleton_lock.admin.doctor import (
    Check,
    Health,
    broker_check,
    consumers_check,
    examine,
    threads_check,
    with_reports,
)
from celery_singleton_lock.admin.production_checks import CHECKLIST, alerts_check, versions_check
from celery_singleton_lock.admin.sweep import ALL_LOCKS, sweep_once
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.app_context import sent
from celery_singleton_lock.cli.options import as_json
from celery_singleton_lock.cli.target import REFUSED, UNREACHABLE, UNSURE, Target, with_target
from celery_singleton_lock.core.installed_version import installed_version
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.message_text import number_of


@click.command()
@as_json
@with_target
def sweep(target: Target, *, machine: bool) -> None:
    """Sweep all locks that are due: for cron, when an autoscaler stops all workers."""
    app, by = target.app, target.operator("sweep")
    if app is None:
        swept = sweep_once(target.store, by)
    else:
        with app.publisher() as publisher:
            swept = sweep_once(
                target.store,
                by,
                app.realm,
                lambda s: sent(publisher.send_back, s.body, s.queue, s.attempt, s.place, s.token),
            )
    target.announce(by, {ALL_LOCKS: 1}, "sweep")
    if machine:
        return render.as_json(swept)
    told = f"locks swept: {swept.locks:,}, messages sent to the broker: {swept.published:,}"
    if swept.adrift and app is None:
        told += (
            f"; {number_of(swept.adrift, 'message')} without a worker: run this command with the "
            "app to send them to the broker"
        )
    return render.say(told)


@click.command()
@click.option("--quick", is_flag=True, help="Do not search all locks.")
@as_json
@with_target
def doctor(target: Target, *, quick: bool, machine: bool) -> None:
    """Check that Redis is fit for locks and its data is consistent. Exit status 0, 1, 3 or 4."""
    found = list(examine(target.store, deep=not quick))
    if target.app is not None:
        reports, live = target.app.reports(), _live(target)
        found = [with_reports(check, reports) for check in found]
        found += [threads_check(reports, live), versions_check(reports, installed_version())]
        found.append(broker_check(*target.app.broker()))
        found += _consumers(target)
        found.append(alerts_check(reports))
    if machine:
        render.as_json(found)
    else:
        render.say(f"Redis of the locks: {target.settings.address()}")
        render.show(_doctor_lines(found, with_app=target.app is not None))
    worst = {check.health for check in found} - {Health.NOTE}
    status = UNSURE if worst != {Health.OK} else 0
    if Health.FAIL in worst:
        status = UNREACHABLE if found[0].health is Health.FAIL else REFUSED
    click.get_current_context().exit(status)


def _doctor_lines(found: Sequence[Check], *, with_app: bool) -> Iterator[str]:
    """Yield the checks as two tables: the state now, and the production checklist."""
    listed = sorted(
        (check for check in found if check.name in CHECKLIST),
        key=lambda check: CHECKLIST.index(check.name),
    )
    others = [check for check in found if check.name not in CHECKLIST]
    yield from _check_table(others)
    if not listed:  # there is no connection
        return
    yield from ("", "Production checklist")
    yield from _check_table(listed)
    missing = [name for name in CHECKLIST if name not in {check.name for check in listed}]
    if not missing:
        return
    names = ", ".join(missing)
    if with_app:
        yield f"Not examined, since the locks' Redis did not answer: {names}"
    else:
        yield f"For {names} give the app: celery -A YOUR_APP locks doctor"


def _check_table(checks: Sequence[Check]) -> list[str]:
    return render.table(
        ("CHECK", "IS", "FOUND"), ((c.name, c.health.value, c.told) for c in checks)
    )


def _consumers(target: Target) -> Iterator[Check]:
    """Yield the check of the workers that may get locked tasks, unless Redis does not answer."""
    app = target.need_app("doctor")
    consumers = app.consumers_by_worker()
    if not consumers:  # the check of the threads says so
        return
    with suppress(SingletonLockError, RedisError):
        yield consumers_check(target.store, app.realm, app.locked_tasks(), consumers)


def _live(target: Target) -> list[str]:
    """Return the ids of the live workers of the app's broker; none if Redis does not answer."""
    realm = target.need_app("doctor").realm
    with suppress(SingletonLockError, RedisError):
        found = target.store.workers()
        return [worker for worker, about in found.items() if about["realm"] == realm]
    return []

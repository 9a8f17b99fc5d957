"""Commands for maintenance: sweep, doctor."""

from __future__ import annotations

import sys

import click

from celery_singleton_lock.admin.doctor import Health, examine, threads_check
from celery_singleton_lock.admin.sweep import ALL_LOCKS, sweep_once
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.app_context import sent
from celery_singleton_lock.cli.options import as_json
from celery_singleton_lock.cli.target import REFUSED, UNREACHABLE, UNSURE, Target, with_target
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
        found.append(threads_check(target.app.reports()))
    if machine:
        render.as_json(found)
    else:
        render.say(f"Redis of the locks: {target.settings.address()}")
        render.show(
            render.table(
                ("CHECK", "IS", "FOUND"), ((c.name, c.health.value, c.told) for c in found)
            )
        )
    worst = {check.health for check in found}
    if Health.FAIL in worst:
        sys.exit(UNREACHABLE if found[0].health is Health.FAIL else REFUSED)
    sys.exit(UNSURE if worst != {Health.OK} else 0)

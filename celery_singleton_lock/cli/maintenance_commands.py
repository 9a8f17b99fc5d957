"""Commands that look after the store: sweep, doctor."""

from __future__ import annotations

import sys

import click

from celery_singleton_lock.admin.doctor import Health, examine, threads_check
from celery_singleton_lock.admin.sweep import ALL_LOCKS, sweep_once
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.options import as_json
from celery_singleton_lock.cli.target import REFUSED, UNREACHABLE, UNSURE, Place, with_place
from celery_singleton_lock.cli.app_context import sent
from celery_singleton_lock.message_text import number_of


@click.command()
@as_json
@with_place
def sweep(place: Place, *, machine: bool) -> None:
    """Look once at all locks that want it: for cron, where autoscalers go to zero."""
    app, by = place.app, place.operator("sweep")
    if app is None:
        swept = sweep_once(place.store, by)
    else:
        with app.publisher() as publisher:
            swept = sweep_once(
                place.store,
                by,
                app.realm,
                lambda s: sent(publisher.send_back, s.body, s.queue, s.attempt, s.place),
            )
    place.announce(by, {ALL_LOCKS: 1}, "sweep")
    if machine:
        return render.as_json(swept)
    told = f"locks looked at: {swept.locks:,}, messages sent to the broker: {swept.published:,}"
    if swept.adrift and app is None:
        told += (
            f"; {number_of(swept.adrift, 'message')} without a worker: with an app, they would be "
            "sent to the broker"
        )
    return render.say(told)


@click.command()
@click.option("--quick", is_flag=True, help="Do not look through all locks.")
@as_json
@with_place
def doctor(place: Place, *, quick: bool, machine: bool) -> None:
    """Is this Redis fit for locks, and does what lies in it agree? Exit status 0, 1, 3 or 4."""
    found = list(examine(place.store, deep=not quick))
    if place.app is not None:
        found.append(threads_check(place.app.reports()))
    if machine:
        render.as_json(found)
    else:
        render.say(f"locks live in {place.settings.address()}")
        render.show(
            render.table(
                ("CHECK", "IS", "FOUND"), ((c.name, c.health.value, c.told) for c in found)
            )
        )
    worst = {check.health for check in found}
    if Health.FAIL in worst:
        sys.exit(UNREACHABLE if found[0].health is Health.FAIL else REFUSED)
    sys.exit(UNSURE if worst != {Health.OK} else 0)

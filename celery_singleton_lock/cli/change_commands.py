"""Commands for one lock: release, drop, promote, pause, resume, limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from threading import Event
from typing import Any, Final

import click

from celery_singleton_lock.admin.multi_lock_views import give_back
from celery_singleton_lock.admin.lock_views import is_known
from celery_singleton_lock.admin.bulk_parked import Tally
from celery_singleton_lock.admin.force_release import (
    Refused,
    end_holder,
    force_release,
    forced_release_warning,
    why_not,
)
from celery_singleton_lock.admin.why import seconds, short
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.options import agreed, as_json, dry, lock_name, reason
from celery_singleton_lock.cli.bulk_commands import tell_dropped, tell_tally
from celery_singleton_lock.cli.target import Place, with_place
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.model import HELD_AFTER, Holder, Verdict
from celery_singleton_lock.store.operator.base import Operator, Waiting
from celery_singleton_lock.message_text import meant

ENDED_WITHIN: Final = 10.0
"""Seconds that a terminated task may need to give its lock back."""

LOOKED_THROUGH: Final = 1000
"""Names of locks at most among which one is looked for that was meant."""

LOOK: Final = 0.1
"""Seconds between two looks whether it has."""


@click.command()
@lock_name
@click.option("--token", help="Owner token of the holder, as show tells it.")
@click.option("--terminate", is_flag=True, help="End the holder's task first (revoke, terminate).")
@click.option("--force", is_flag=True, help="Take the lock although its holder may be running.")
@click.option("--drop", "dropped", is_flag=True, help="Drop its message; else it runs again, last.")
@reason
@agreed
@as_json
@with_place
def release(place: Place, name: str, token: str | None, **how: Any) -> None:
    """Take the lock NAME from the holder of a token, and grant it to who is next."""
    holder = _holder(place, name, token)
    by = place.operator(why=how["why_text"])
    ended = holder.state == HELD_AFTER
    if how["terminate"] and not ended and _terminated(place, name, holder, by):
        return _done(place, by, how["machine"], "terminate", name, f"{short(holder)} has ended.")
    if not how["force"] and not ended:
        raise Refused(_not_yet(name, holder, terminated=how["terminate"]), name)
    if not how["yes"]:
        render.say(forced_release_warning(name, short(holder), holder.state), err=True)
        render.ask("Take it?")
    force_release(place.store, name, holder.token, by, keep=not how["dropped"])
    return _done(place, by, how["machine"], "release", name, f"Taken from {short(holder)}.")


def _holder(place: Place, name: str, token: str | None) -> Holder:
    """Return who holds by that token."""
    holders = place.store.inspect(name, waiters=0).holders
    found = [holder for holder in holders if holder.token == token]
    if found:
        return found[0]
    if token is None:
        held = "; ".join(f"--token {h.token} ({short(h)})" for h in holders)
        msg = f"say from whom: {held}" if held else f"nobody holds {name!r}"
        raise Refused(msg, name)
    raise Refused(why_not(place.store, name, token), name)


def _terminated(place: Place, name: str, holder: Holder, by: Operator) -> bool:
    """Have the holder's task ended, and wait until it has given the lock back."""
    end_holder(place.store, name, holder.token, by, place.need_app("--terminate").terminate)
    clock = SystemClock()
    until = clock.monotonic() + ENDED_WITHIN
    while clock.monotonic() < until:
        if place.store.look(name, holder.token).expires_in <= 0:
            return True
        Event().wait(LOOK)
    return False


def _not_yet(name: str, holder: Holder, *, terminated: bool) -> str:
    left = seconds(holder.expires_in)
    if terminated:
        return (
            f"{short(holder)} was told to end, and still holds {name!r}: see its worker; a lease "
            f"that nobody renews ends in {left}. To take it nevertheless: --force"
        )
    return (
        f"{short(holder)} holds {name!r}, lease {left} left: if its worker is dead, the lock is "
        "free then. To end the task first: --terminate. To take the lock beside it: --force"
    )


def _done(  # noqa: PLR0917  # one line of all that is told
    place: Place,
    by: Operator,
    machine: bool,
    action: str,
    name: str,
    text: str,
    *,
    changed: bool = True,
) -> None:
    """Tell what was done: the person, the app's events."""
    if changed:
        place.announce(by, {name: 1}, action)
    holders = place.store.inspect(name, waiters=0).holders
    if machine:
        return render.as_json({"lock": name, "action": action, "holders": holders})
    now = f" Now it is held by {', '.join(map(short, holders))}." if holders else ""
    return render.say(text + now)


@click.command()
@lock_name
@click.argument("who", nargs=-1, required=True, metavar="TOKEN_OR_TASK_ID…")
@reason
@agreed
@dry
@as_json
@with_place
def drop(place: Place, name: str, who: tuple[str, ...], **how: Any) -> None:
    """Take waiters out of the line of NAME for good, with their messages."""
    found = [_waiter(place, name, each) for each in who]
    if how["dry_run"]:
        return tell_tally(_tally(found), "would be dropped", how["machine"])
    if not how["yes"]:
        told = ", ".join(f"{each.task}[{each.task_id}]" for each in found)
        render.ask(f"Drop {told}? It will not run.")
    by = place.operator(why=how["why_text"])
    gone = place.store.drop(name, [each.token for each in found], by, whole=True)
    for each in gone:
        give_back(place.store, each)
        if place.app is not None:
            place.app.tell_dropped(each, by)
    place.announce(by, {name: len(gone)} if gone else {}, "drop")
    return tell_dropped(place, _tally(gone), how["machine"])


def _tally(found: Sequence[Waiting]) -> Tally:
    return Tally(done=Counter(each.lock for each in found))


def _waiter(place: Place, name: str, who: str) -> Waiting:
    """Return who waits for a lock under a token, or with a task id."""
    tokens = [who, *(token for lock, token in place.store.find([who]) if lock == name)]
    for token in tokens:
        standing = place.store.look(name, token)
        if standing.waiting is not None and standing.expires_in <= 0:
            return standing.waiting
    if any(who in {holder.token, holder.task_id} for holder in place.store.inspect(name).holders):
        msg = f"{who} holds {name!r}, it does not wait for it: use release"
    else:
        msg = f"{who} does not wait for {name!r}: see show, which prints whole ids, or why"
    raise Refused(msg, name)


@click.command()
@lock_name
@click.argument("who", metavar="TOKEN_OR_TASK_ID")
@reason
@as_json
@with_place
def promote(place: Place, name: str, who: str, why_text: str, *, machine: bool) -> None:
    """Put one who waits for NAME at the head of the line."""
    waiter = _waiter(place, name, who)
    by = place.operator(why=why_text)
    if place.store.promote(name, waiter.token, by).verdict is Verdict.ABSENT:
        msg = f"{who} is not in line ({waiter.state})"
        raise Refused(msg, name)
    _done(place, by, machine, "promote", name, f"{waiter.task}[{waiter.task_id}] is next.")


def _refuse_unknown(place: Place, name: str, step: str) -> None:
    """Refuse a name that no lock has now: it may be a slip, and nothing would tell."""
    view = place.store.inspect(name, waiters=0)
    if is_known(view):
        return
    names = [lock.name for lock in islice(place.store.glances(), LOOKED_THROUGH)]
    msg = (
        f"no lock {name!r} is known: nobody holds it, waits for it, or has used it in the last "
        f"minute.{meant(name, names)} See list --idle. To {step} it nevertheless, before it is "
        "used: --force"
    )
    raise Refused(msg, name)


forced = click.option("--force", is_flag=True, help="Also if no lock of that name is known.")


@click.command()
@lock_name
@forced
@reason
@as_json
@with_place
def pause(place: Place, name: str, why_text: str, *, force: bool, machine: bool) -> None:
    """Grant NAME to nobody until resume; who holds it goes on."""
    if not force:
        _refuse_unknown(place, name, "pause")
    by = place.operator(why=why_text)
    new = place.store.pause(name, by)
    _done(
        place,
        by,
        machine,
        "pause",
        name,
        "Paused." if new else "It was paused already.",
        changed=new,
    )


@click.command()
@lock_name
@reason
@as_json
@with_place
def resume(place: Place, name: str, why_text: str, *, machine: bool) -> None:
    """Grant NAME as usual again."""
    by = place.operator(why=why_text)
    was = place.store.resume(name, by)
    _done(
        place,
        by,
        machine,
        "resume",
        name,
        "Granted as usual." if was else "It was not paused.",
        changed=was,
    )


@click.command()
@lock_name
@click.argument("permits", type=click.IntRange(1), required=False)
@click.option("--clear", is_flag=True, help="Let the limit that tasks declare count again.")
@forced
@reason
@as_json
@with_place
def limit(place: Place, name: str, permits: int | None, why_text: str, **how: Any) -> None:
    """Let PERMITS hold NAME at once, whatever its tasks declare."""
    if how["clear"] == (permits is not None):
        msg = "give a number of permits, or --clear"
        raise click.UsageError(msg)
    if not how["force"]:
        _refuse_unknown(place, name, "limit")
    by = place.operator(why=why_text)
    now = place.store.set_limit(name, permits, by)
    _done(place, by, how["machine"], "limit", name, f"The limit is {now}.")

"""Commands for one lock: release, drop, promote, pause, resume, limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from threading import Event
from typing import Any, Final

import click

from celery_singleton_lock.admin.force_release import (
    Refused,
    end_holder,
    force_release,
    forced_release_warning,
    why_not,
)
from celery_singleton_lock.admin.lock_views import is_known
from celery_singleton_lock.admin.multi_lock_views import give_back
from celery_singleton_lock.admin.select_parked import Tally
from celery_singleton_lock.admin.why_sentences import seconds, short
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.bulk_commands import tell_dropped, tell_tally
from celery_singleton_lock.cli.options import agreed, as_json, dry, lock_name, reason
from celery_singleton_lock.cli.target import Target, with_target
from celery_singleton_lock.config.limits import MAX_COUNT
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.lock_view import HELD_AFTER, Holder
from celery_singleton_lock.core.model import Verdict
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.message_text import meant
from celery_singleton_lock.store.operator.base import Operator, Waiting

ENDED_WITHIN: Final = 10.0
"""Seconds to wait until a terminated task has released its lock."""

LOOKED_THROUGH: Final = 1000
"""Largest number of lock names that are searched for a similar name."""

LOOK: Final = 0.1
"""Seconds between two checks whether the lock was released."""


@click.command()
@lock_name
@click.option("--token", help="Owner token of the holder; the command show prints it.")
@click.option("--terminate", is_flag=True, help="Terminate the holder's task (revoke, terminate).")
@click.option("--force", is_flag=True, help="Release the lock even if its holder may be running.")
@click.option(
    "--drop",
    "dropped",
    is_flag=True,
    help="Drop its message. Without this option a parked message goes to the end of the queue.",
)
@reason
@agreed
@as_json
@with_target
def release(target: Target, name: str, token: str | None, **how: Any) -> None:
    """Take the lock NAME from the holder with the given token, and grant it to the next waiter."""
    holder = _holder(target, name, token)
    by = target.operator(why=how["why_text"])
    ended = holder.state == HELD_AFTER
    if how["terminate"] and not ended and _terminated(target, name, holder, by):
        return _done(target, by, how["machine"], "terminate", name, f"{short(holder)} has ended.")
    if not how["force"] and not ended:
        raise Refused(_not_yet(name, holder, terminated=how["terminate"]), name)
    if not how["yes"]:
        render.say(forced_release_warning(name, short(holder), holder.state), err=True)
        render.ask("Release it?")
    force_release(target.store, name, holder.token, by, keep=not how["dropped"])
    return _done(target, by, how["machine"], "release", name, f"Released from {short(holder)}.")


def _holder(target: Target, name: str, token: str | None) -> Holder:
    """Return the holder with a token."""
    holders = target.store.inspect(name, waiters=0).holders
    found = [holder for holder in holders if holder.token == token]
    if found:
        return found[0]
    if token is None:
        held = "; ".join(f"--token {h.token} ({short(h)})" for h in holders)
        msg = f"give the holder's token: {held}" if held else f"nobody holds {name!r}"
        raise Refused(msg, name)
    raise Refused(why_not(target.store, name, token), name)


def _terminated(target: Target, name: str, holder: Holder, by: Operator) -> bool:
    """Terminate the holder's task. Return whether it released the lock in time.

    Raises:
        Refused: its lease has ended, which does not tell whether its process has.
    """
    end_holder(target.store, name, holder.token, by, target.need_app("--terminate").terminate)
    clock = SystemClock()
    until = clock.monotonic() + ENDED_WITHIN
    lease_ends = clock.monotonic() + holder.expires_in
    while (now := clock.monotonic()) < until:
        left = target.store.locate_token(name, holder.token).expires_in
        if left <= 0 and clock.monotonic() >= lease_ends:
            raise Refused(_lapsed(name, holder), name)
        if left <= 0:
            return True
        lease_ends = now + left
        Event().wait(LOOK)
    return False


def _process(holder: Holder) -> str:
    return f"process (pid {holder.pid} on {holder.host})" if holder.pid else "process"


def _lapsed(name: str, holder: Holder) -> str:
    return (
        f"The worker was told to terminate {short(holder)}, and did not answer: the lease of "
        f"{name!r} has ended, and the next task may have the lock. Whether its {_process(holder)} "
        "has ended is not known. If its machine still runs, kill the process"
    )


def _not_yet(name: str, holder: Holder, *, terminated: bool) -> str:
    if terminated:
        return (
            f"The worker was told to terminate {short(holder)}, which still holds {name!r}: its "
            f"{_process(holder)} has not ended. See the log of its worker, and kill the process. "
            "The lock is free when its lease ends, at the latest. To release the lock while the "
            "task may be running: --force"
        )
    left = seconds(holder.expires_in)
    return (
        f"{short(holder)} holds {name!r}, lease {left} left. If its worker is dead, the lock is "
        "free after that. To terminate the task: --terminate. To release the lock while the task "
        "may be running: --force"
    )


def _done(  # noqa: PLR0917  # the fields of one printed line
    target: Target,
    by: Operator,
    machine: bool,
    action: str,
    name: str,
    text: str,
    *,
    changed: bool = True,
) -> None:
    """Send the event of a change, and print the change."""
    if changed:
        target.announce(by, {name: 1}, action)
    holders = _held_now(target, name)
    if machine:
        return render.as_json({"lock": name, "action": action, "holders": holders})
    now = f" Now it is held by {', '.join(map(short, holders))}." if holders else ""
    return render.say(text + (now if holders is not None else f" {_UNKNOWN_NOW}"))


def _held_now(target: Target, name: str) -> Sequence[Holder] | None:
    """Return the holders after a change; None if Redis does not answer after it."""
    try:
        return target.store.inspect(name, waiters=0).holders
    except BackendError:
        return None


_UNKNOWN_NOW: Final = "Its present holders are not known: Redis did not answer after that."


@click.command()
@lock_name
@click.argument("who", nargs=-1, required=True, metavar="TOKEN_OR_TASK_ID…")
@reason
@agreed
@dry
@as_json
@with_target
def drop(target: Target, name: str, who: tuple[str, ...], **how: Any) -> None:
    """Drop waiters of NAME permanently, with their messages."""
    found = [_waiter(target, name, each) for each in who]
    if how["dry_run"]:
        return tell_tally(_tally(found), "would be dropped", how["machine"])
    if not how["yes"]:
        told = ", ".join(f"{each.task}[{each.task_id}]" for each in found)
        render.ask(f"Drop {told}? It will not run.")
    by = target.operator(why=how["why_text"])
    gone = target.store.drop_waiters(name, [each.token for each in found], by, whole=True)
    for each in gone:
        give_back(target.store, each)
        if target.app is not None:
            target.app.tell_dropped(each, by)
    target.announce(by, {name: len(gone)} if gone else {}, "drop")
    return tell_dropped(target, _tally(gone), how["machine"])


def _tally(found: Sequence[Waiting]) -> Tally:
    return Tally(done=Counter(each.lock for each in found))


def _waiter(target: Target, name: str, who: str) -> Waiting:
    """Return the waiter of a lock with an owner token or a task id."""
    tokens = [who, *(token for lock, token in target.store.locate_tasks([who]) if lock == name)]
    looks = [target.store.locate_token(name, token) for token in tokens]
    found = [each.waiting for each in looks if each.waiting and each.expires_in <= 0]
    if len(found) == 1:
        return found[0]
    if found:
        told = ", ".join(each.token for each in found)
        msg = (
            f"{len(found)} messages with the id {who} wait for {name!r}: give one of the tokens "
            f"{told}"
        )
        raise Refused(msg, name)
    if any(who in {holder.token, holder.task_id} for holder in target.store.inspect(name).holders):
        msg = f"{who} holds {name!r} and does not wait for it: use release"
    else:
        msg = f"{who} does not wait for {name!r}: give a whole id as show prints it, or use why"
    raise Refused(msg, name)


@click.command()
@lock_name
@click.argument("who", metavar="TOKEN_OR_TASK_ID")
@reason
@as_json
@with_target
def promote(target: Target, name: str, who: str, why_text: str, *, machine: bool) -> None:
    """Move a waiter of NAME to the head of the queue."""
    waiter = _waiter(target, name, who)
    by = target.operator(why=why_text)
    if target.store.promote(name, waiter.token, by).verdict is Verdict.ABSENT:
        msg = f"{who} is not in the queue: its state is {waiter.state}"
        raise Refused(msg, name)
    _done(target, by, machine, "promote", name, f"{waiter.task}[{waiter.task_id}] is next.")


def _refuse_unknown(target: Target, name: str, step: str) -> None:
    """Refuse a name that no known lock has, since a mistyped name would have no effect."""
    view = target.store.inspect(name, waiters=0)
    if is_known(view):
        return
    found = islice(target.store.summarise_locks(), LOOKED_THROUGH)
    names = [lock.name for lock in found if lock.name != name]
    msg = (
        f"no lock {name!r} is known: it has no holder and no waiter, and was not used in the last "
        f"minute.{meant(name, names)} See list --idle. To {step} it before its first use: --force"
    )
    raise Refused(msg, name)


forced = click.option("--force", is_flag=True, help="Accept a name that no known lock has.")


@click.command()
@lock_name
@forced
@reason
@as_json
@with_target
def pause(target: Target, name: str, why_text: str, *, force: bool, machine: bool) -> None:
    """Grant NAME to no waiter until it is resumed. Present holders keep it."""
    if not force:
        _refuse_unknown(target, name, "pause")
    by = target.operator(why=why_text)
    new = target.store.pause(name, by)
    _done(
        target,
        by,
        machine,
        "pause",
        name,
        "Paused." if new else "It was already paused.",
        changed=new,
    )


@click.command()
@lock_name
@reason
@as_json
@with_target
def resume(target: Target, name: str, why_text: str, *, machine: bool) -> None:
    """Grant NAME again after a pause."""
    by = target.operator(why=why_text)
    was = target.store.resume(name, by)
    _done(
        target,
        by,
        machine,
        "resume",
        name,
        "Resumed." if was else "It was not paused.",
        changed=was,
    )


@click.command()
@lock_name
@click.argument("permits", type=click.IntRange(1, MAX_COUNT), required=False)
@click.option("--clear", is_flag=True, help="Return to the limit that the tasks declare.")
@forced
@reason
@as_json
@with_target
def limit(target: Target, name: str, permits: int | None, why_text: str, **how: Any) -> None:
    """Set the number of PERMITS of NAME, whatever its tasks declare."""
    if how["clear"] == (permits is not None):
        msg = "give a number of permits, or --clear"
        raise click.UsageError(msg)
    if not how["force"]:
        _refuse_unknown(target, name, "limit")
    by = target.operator(why=why_text)
    now = target.store.set_limit(name, permits, by)
    _done(target, by, how["machine"], "limit", name, f"The limit is {now}.")

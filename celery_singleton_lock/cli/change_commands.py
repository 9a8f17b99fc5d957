"""Commands for one holder or waiter of a lock: release, drop, promote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from shlex import quote
from threading import Event
from typing import Any, Final

import click

from celery_singleton_lock.admin import change_lock
from celery_singleton_lock.admin.change_lock import (
    QUEUES_AGAIN,
    drop_warning,
    find_waiter,
    queues_again,
)
from celery_singleton_lock.admin.force_release import (
    Refused,
    end_holder,
    force_release,
    forced_release_warning,
    why_not,
)
from celery_singleton_lock.admin.multi_lock_views import (
    look_elsewhere,
    with_running_pid,
)
from celery_singleton_lock.admin.select_parked import Tally
from celery_singleton_lock.admin.why_sentences import seconds, short
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.bulk_commands import tell_dropped, tell_tally
from celery_singleton_lock.cli.options import agreed, as_json, dry, lock_name, reason
from celery_singleton_lock.cli.target import Target, with_target
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.lock_view import HELD_AFTER, Holder
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.store.operator.base import Operator, Waiting

ENDED_WITHIN: Final = 10.0
"""Seconds to wait until a terminated task has released its lock."""

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
        return done(target, by, how["machine"], "terminate", name, f"{short(holder)} has ended.")
    if not how["force"] and not ended:
        # It may have begun to wait for another lock since, or have ended that wait.
        elsewhere = look_elsewhere(target.store, name, [holder])
        other = elsewhere.waits.get(holder.token)
        holder = with_running_pid(holder, elsewhere)
        raise Refused(
            _not_yet(name, holder, terminated=how["terminate"])
            if other is None
            else _waits(name, holder, other),
            name,
        )
    if not how["yes"]:
        render.say(forced_release_warning(name, short(holder), holder.state), err=True)
        render.ask("Release it?")
    done_for = target.settings.done_for
    keep = not how["dropped"]
    force_release(target.store, name, holder.token, by, keep=keep, done_for=done_for)
    return done(target, by, how["machine"], "release", name, f"Released from {short(holder)}.")


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
        Refused: its lease has ended, but it is not known whether its process has.
    """
    app = target.need_app("--terminate")
    elsewhere = look_elsewhere(target.store, name, [holder])
    end_holder(target.store, name, holder.token, by, app.terminate)
    clock = SystemClock()
    until = clock.monotonic() + ENDED_WITHIN
    lease_ends = clock.monotonic() + holder.expires_in
    while (now := clock.monotonic()) < until:
        left = target.store.locate_token(name, holder.token).expires_in
        if left <= 0 and clock.monotonic() >= lease_ends:
            raise Refused(_lapsed(name, with_running_pid(holder, elsewhere)), name)
        if left <= 0:
            return True
        lease_ends = now + left
        Event().wait(LOOK)
    return False


WHOLE_WORKER: Final = (
    "In a prefork pool it runs this task only. In any other pool it is the whole worker, with all "
    "its tasks, and threads and solo cannot terminate a task"
)
"""The risk of killing the process of a holder."""


def _process(holder: Holder) -> str:
    return f"process (pid {holder.pid} on {holder.host})" if holder.pid else "process"


def _lapsed(name: str, holder: Holder) -> str:
    return (
        f"The worker was told to terminate {short(holder)}, and did not answer: the lease of "
        f"{name!r} has ended, and the next task may have the lock. Whether its {_process(holder)} "
        f"has ended is not known. If its machine still runs, kill the process. {WHOLE_WORKER}"
    )


def _waits(name: str, holder: Holder, other: str) -> str:
    return (
        f"{short(holder)} does not run: it waits for the lock {other!r}, and keeps {name!r} "
        "meanwhile, so there is no process to kill. To end the task, drop it there: locks drop "
        f"{quote(other)} {quote(holder.task_id)}. To release {name!r} nevertheless: --force"
    )


def _not_yet(name: str, holder: Holder, *, terminated: bool) -> str:
    if terminated:
        return (
            f"The worker was told to terminate {short(holder)}, which still holds {name!r}: its "
            f"{_process(holder)} has not ended. See the log of its worker, and kill the process. "
            f"{WHOLE_WORKER}. Its worker renews the lease until then; if that worker is dead, the "
            "lock is free when the lease ends. To release the lock while the task may be running: "
            "--force"
        )
    left = seconds(holder.expires_in)
    return (
        f"{short(holder)} holds {name!r}, lease {left} left. If its worker is dead, the lock is "
        "free after that. To terminate the task: --terminate. To release the lock while the task "
        "may be running: --force"
    )


def done(  # noqa: PLR0917  # the fields of one printed line
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
    found = [find_waiter(target.store, name, each) for each in who]
    if how["dry_run"]:
        return tell_tally(_tally(found), "would be dropped", how["machine"])
    if not how["yes"]:
        told = ", ".join(f"{each.task}[{each.task_id}]" for each in found)
        render.ask(f"Drop {told}? {drop_warning(found)}")
    by = target.operator(why=how["why_text"])
    app = target.app
    tell = (lambda each: app.tell_dropped(each, by)) if app else None
    done_for = target.settings.done_for
    gone = change_lock.drop(target.store, name, found, by, done_for=done_for, dropped=tell)
    target.announce(by, {name: len(gone)} if gone else {}, "drop")
    if any(map(queues_again, gone)):
        render.say(QUEUES_AGAIN, err=True)
    return tell_dropped(target, _tally(gone), how["machine"])


def _tally(found: Sequence[Waiting]) -> Tally:
    return Tally(done=Counter(each.lock for each in found))


@click.command()
@lock_name
@click.argument("who", metavar="TOKEN_OR_TASK_ID")
@reason
@as_json
@with_target
def promote(target: Target, name: str, who: str, why_text: str, *, machine: bool) -> None:
    """Move a waiter of NAME to the head of the queue."""
    by = target.operator(why=why_text)
    waiter = change_lock.promote(target.store, name, who, by)
    of_group = " of its group" if waiter.group else ""
    told = f"{waiter.task}[{waiter.task_id}] is next{of_group}."
    done(target, by, machine, "promote", name, told)

"""Why does this task not run? Answered in one sentence, whatever is known of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Final, Protocol

from celery_singleton_lock.admin.multi_lock_views import WAITS, kept_by, parked_elsewhere, standing_of
from celery_singleton_lock.admin.signs_of_life import in_view
from celery_singleton_lock.core.model import HELD_AFTER, Holder, LockView
from celery_singleton_lock.store.operator.base import AdminStore, Waiting
from celery_singleton_lock.message_text import nth, printable

NAMED: Final = 3
"""Most holders that are named."""

SHORTEST_START: Final = 6
"""Fewest characters of a task id by which a task is looked for."""

LENGTH: Final = 36
"""Characters of an id as Celery makes them: one of them is no beginning of another."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a task is.

    Args:
        task_id: its whole id.
        state: ``parked``, ``waiting``, ``adrift``, ``granted``, ``reserved``, ``running``,
            ``held_after`` (its lock stays taken), ``silent`` (it ran, and its worker shows no sign
            of life), ``eta``, ``received``, ``finished``, ``delayed``, ``leaving``, or a verdict
            (``overdue``, ``replaced``, ``revoked``, ``rejected``) that awaits a worker; ``lost``:
            it was parked, and Redis has
            lost it; ``ambiguous``: only longer ids are known; ``unseen``: no worker, no lock and no
            result knows it.
        sentence: for people; says what to do if something can be done.
        lock: name of its lock, if known.
        token: its owner token, if known.
        rank: place in the queue, 1 is next; 0 if it does not stand there.
        waited: seconds since it arrived; 0 if it does not wait.
        holders: who holds its lock.
        paused: why its lock is paused; empty if it is not.
        keeps: other locks that it keeps while it waits for this one.
    """

    task_id: str
    state: str
    sentence: str
    lock: str = ""
    token: str = ""
    rank: int = 0
    waited: float = 0.0
    holders: tuple[Holder, ...] = ()
    paused: str = ""
    keeps: tuple[str, ...] = ()


class Witness(Protocol):
    """What an app knows of tasks that no lock knows."""

    def seen(self, task_id: str) -> tuple[str, str] | None:
        """Return a state (``running``, ``eta``, ``received``, ``finished``) and a clause, or None.

        The clause follows "it", such as ``ended with SUCCESS`` or ``runs on worker-2``.
        """
        ...

    def queues(self) -> str:
        """Return how many messages the queues hold, as a clause; empty if that is not known."""
        ...


def why(store: AdminStore, task_id: str, witness: Witness | None = None) -> Answer:
    """Return where a task is, and what it waits for.

    The locks' index knows who waits, or waited. Who got its lock at once is looked for among all
    holders; for all others the witness is asked. If nobody knows the id, a task that waits for a
    lock or holds one is looked for by the beginning of its id.

    Args:
        store: where the locks are.
        task_id: the task's id, or at least six characters with which it begins.
        witness: what an app knows; without one, less can be said.

    Raises:
        BackendError: Redis did not answer, or refused.
    """
    answer = _answer(store, task_id, witness)
    return replace(answer, sentence=printable(answer.sentence))


def _answer(store: AdminStore, task_id: str, witness: Witness | None) -> Answer:
    known = _known(store, task_id, witness)
    return known or _by_start(store, task_id, witness) or _unseen(task_id, witness)


def _known(store: AdminStore, task_id: str, witness: Witness | None) -> Answer | None:
    found = standing_of(store, task_id)
    if found is not None:
        return _found(store, task_id, *found)
    seen = witness.seen(task_id) if witness else None
    if seen is None or seen[0] != "finished":
        held = _among_holders(store, task_id)
        if held is not None:
            return held
    if seen is not None:
        return _seen(task_id, seen)
    return _lost(store, task_id)


def _by_start(store: AdminStore, start: str, witness: Witness | None) -> Answer | None:
    """Answer for the task whose id begins so, as commands and logs shorten ids."""
    if not SHORTEST_START <= len(start) < LENGTH:
        return None
    holders = (h.task_id for lock in store.glances(holders=1000) for h in lock.holders)
    ids = {*store.task_ids(start), *(each for each in holders if each.startswith(start))} - {start}
    if len(ids) == 1 and _OF_CELERY.fullmatch(start):
        return _known(store, ids.pop(), witness)
    return _ambiguous(start, sorted(ids)) if ids else None


_OF_CELERY: Final = re.compile("[0-9a-f-]+")
"""The beginning of an id as Celery makes them. Another one may be the whole id of a user's own."""


def _ambiguous(start: str, ids: Sequence[str]) -> Answer:
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    told = (
        f"No task with the id {start!r} is known. Of those that begin so are known: "
        f"{', '.join(ids[:NAMED])}{more}. Give the whole id of the one that is meant."
    )
    return Answer(start, "ambiguous", told)


def _found(store: AdminStore, task_id: str, name: str, me: Waiting, rank: int) -> Answer:
    view = in_view(store, store.inspect(name, waiters=0))
    elsewhere = parked_elsewhere(store, name, view.holders[:NAMED])
    answer = _at_its_lock(task_id, view, me, rank, elsewhere)
    if me.state == "parked" and not (view.holders or view.paused or _is_consumed(store, me)):
        answer = replace(answer, sentence=_without_worker(view, me, rank))
    keeps = kept_by(store, name, me.token) if me.state in WAITS else ()
    if not keeps:
        return answer
    sentence = f"{answer.sentence}; keeps {', '.join(map(repr, keeps))} meanwhile"
    return replace(answer, sentence=sentence, keeps=keeps)


def _is_consumed(store: AdminStore, me: Waiting) -> bool:
    """Return whether a live worker consumes a message's queue."""
    live = store.workers().values()
    return any(each["realm"] == me.realm and me.queue in each["queues"] for each in live)


def _without_worker(view: LockView, me: Waiting, rank: int) -> str:
    return (
        f"waits for {seconds(me.age)}; {view.name!r} is free, {ordinal(rank)}: no live worker "
        f"consumes the queue {me.queue!r}, start one (celery worker -Q {me.queue})"
    )


def _among_holders(store: AdminStore, task_id: str) -> Answer | None:
    """Look through all locks: who never waited is in no index."""
    for lock in store.glances(holders=1000):
        for holder in lock.holders:
            if holder.task_id == task_id:
                view = in_view(store, store.inspect(lock.name, waiters=0))
                now = next((h for h in view.holders if h.token == holder.token), holder)
                return _holding(task_id, view, now)
    return None


def _seen(task_id: str, seen: tuple[str, str]) -> Answer:
    state, clause = seen
    return Answer(task_id, state, f"It {clause}.")


def _lost(store: AdminStore, task_id: str) -> Answer | None:
    """Tell of a parked task that a worker misses since the locks' Redis has lost data."""
    note = store.lost(task_id)
    if note is None:
        return None
    when = datetime.fromtimestamp(note["at"], timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    told = (
        f"Lost: {worker_name(note['worker'])} had parked it for {note['lock']!r}, and its message "
        f"was gone when the locks' Redis had lost data ({when}). It does not run unless it is sent "
        "again."
    )
    return Answer(task_id, "lost", told, note["lock"])


def _unseen(task_id: str, witness: Witness | None) -> Answer:
    if witness is None:
        told = (
            "No lock knows it: it is still in the broker's queue, or takes no lock, or has "
            "finished. Ask with the app (celery -A app locks why), which also knows workers, "
            "queues and results."
        )
    else:
        queues = witness.queues()
        told = (
            "No worker that answers, no lock and no result knows it: it never reached a worker "
            f"(see the queue{f': {queues}' if queues else ''}; was it sent to one that a worker "
            "consumes?), or its worker has died and the broker delivers it again (Redis after its "
            "visibility time-out), or it has finished and its result was not kept."
        )
    if len(task_id) < LENGTH:
        told += (
            f" If {task_id!r} is only the beginning of an id, give all of it: a shorter one is "
            f"looked for among tasks that wait for a lock or hold one, from {SHORTEST_START} "
            "characters on."
        )
    return Answer(task_id, "unseen", told)


def _at_its_lock(
    task_id: str, view: LockView, me: Waiting, rank: int, elsewhere: Mapping[str, str]
) -> Answer:
    if me.state not in WAITS:
        holder = next((h for h in view.holders if h.token == me.token), None)
        if holder is not None:
            return _holding(task_id, view, holder)
    return Answer(
        task_id,
        me.state,
        _clause(view, me, rank, elsewhere),
        view.name,
        me.token,
        rank,
        me.age,
        view.holders,
        view.paused,
    )


def _holding(task_id: str, view: LockView, holder: Holder) -> Answer:
    left = f"lease {seconds(holder.expires_in)} left"
    sentences = {
        "granted": f"granted, on its way to {worker_name(holder.worker) or 'its client'}, {left}",
        "reserved": f"between two tries: {view.name!r} is kept for its retry, {left}",
        HELD_AFTER: f"has succeeded; {view.name!r} stays taken {_for_another(holder)}",
        "running": f"runs{_on(holder)}, holds {view.name!r}, {left}",
        "silent": (
            f"ran{_on(holder)}, which has shown no sign of life for {seconds(holder.silent)}; if "
            f"it is dead, {view.name!r} is free in {seconds(holder.expires_in)} at the latest"
        ),
    }
    state = "silent" if holder.silent else holder.state
    state = state if state in sentences else "running"
    return Answer(
        task_id, state, sentences[state], view.name, holder.token, 0, 0.0, view.holders, view.paused
    )


def _clause(view: LockView, me: Waiting, rank: int, elsewhere: Mapping[str, str]) -> str:
    for_long = seconds(me.age)
    match me.state:
        case "delayed":
            times = "time" if me.returns == 1 else "times"
            again = "others pass, and it queues again within a minute"
            return f"has come back {me.returns} {times}: {again}"
        case "overdue" | "replaced" | "revoked" | "rejected":
            return (
                f"{_VERDICTS[me.state]} after {for_long}; a worker that consumes the queue "
                f"{me.queue!r} has to end it"
            )
        case "leaving":
            return f"on its way back to the broker's queue {me.queue!r}: it is being drained"
        case "adrift":
            return (
                f"waits for {for_long}; its turn has come, and no live worker consumes the queue "
                f"{me.queue!r}: start one (celery worker -Q {me.queue})"
            )
        case _:
            return _in_line(view, me, rank, elsewhere)


def _in_line(view: LockView, me: Waiting, rank: int, elsewhere: Mapping[str, str]) -> str:
    for_long = seconds(me.age)
    if view.paused:
        return f"waits for {for_long}; {view.name!r} is paused ({view.paused}), {ordinal(rank)}"
    if not view.holders:
        return f"waits for {for_long}; {view.name!r} is free, {ordinal(rank)}: a sweep grants it"
    return f"blocked {for_long} by {named(view.holders, elsewhere)}, {ordinal(rank)}"


_VERDICTS = {
    "overdue": "out of time (lock_wait_timeout)",
    "replaced": "replaced by a later task",
    "revoked": "revoked",
    "rejected": "rejected by its task",
}


def _for_another(holder: Holder) -> str:
    return f"for another {seconds(holder.expires_in)} (lock_hold_for)"


def _on(holder: Holder) -> str:
    return f" on {worker_name(holder.worker)}" if holder.worker else ""


def named(holders: tuple[Holder, ...], elsewhere: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return who holds, each with what is left of its lease.

    Args:
        holders: of a lock.
        elsewhere: for which other lock those wait that only keep this one: by token.
    """
    told = []
    for holder in holders[:NAMED]:
        other = elsewhere.get(holder.token)
        kept = "" if other is None else f" (which waits for {other!r})"
        told.append(f"{short(holder)}{kept}{_lease(holder)}")
    more = len(holders) - NAMED
    return "; ".join(told) + (f" and {more} more" if more > 0 else "")


def _lease(holder: Holder) -> str:
    left = seconds(holder.expires_in)
    if holder.state == HELD_AFTER:
        return f", which has succeeded; taken {_for_another(holder)}"
    if not holder.silent:
        return f", lease {left} left"
    silence = seconds(holder.silent)
    return f" (no sign of life for {silence}; if it is dead, free in {left} at the latest)"


def short(holder: Holder) -> str:
    """Return ``settle[3f2a91c0] on worker-2``, printable.

    Without the module, and without what makes ids unique.
    """
    if not holder.task_id:  # a client, or one that a test plays
        return str(holder)
    return printable(f"{holder.task.rpartition('.')[2]}[{holder.task_id[:8]}]{_on(holder)}")


def worker_name(worker: str) -> str:
    """Return a worker's node name, of its id."""
    return worker.rpartition("#")[0] or worker


def ordinal(rank: int) -> str:
    """Return ``you are 3rd``; 0 is not in line."""
    if rank < 1:
        return "not in line"
    return "you are next" if rank == 1 else f"you are {nth(rank)}"


def seconds(duration: float) -> str:
    """Return a duration as people say it: ``0.4 s``, ``41 s``, ``7 min 3 s``, ``5 h 2 min``."""
    if duration < 10:  # noqa: PLR2004  # tenths are told below it
        return f"{duration:.1f} s"
    whole = round(duration)
    for unit, name, below in ((86_400, "d", "h"), (3600, "h", "min"), (60, "min", "s")):
        if whole >= 2 * unit or (unit > 60 and whole >= unit):  # noqa: PLR2004
            return f"{whole // unit} {name} {whole % unit // _UNITS[below]} {below}"
    return f"{whole} s"


_UNITS = {"h": 3600, "min": 60, "s": 1}

"""Explain in one sentence why a task does not run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Final, Protocol

from celery_singleton_lock.admin.multi_lock_views import (
    WAITS,
    kept_by,
    parked_elsewhere,
    standings_of,
)
from celery_singleton_lock.admin.signs_of_life import in_view
from celery_singleton_lock.admin.why_sentences import (
    NAMED,
    of_holder,
    of_waiter,
    without_worker,
    worker_name,
)
from celery_singleton_lock.core.lock_view import Holder, LockView
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.store.operator.base import AdminStore, Waiting

SHORTEST_START: Final = 6
"""Smallest number of characters of a shortened task id."""

LENGTH: Final = 36
"""Number of characters of a task id from Celery. A shorter text may be a shortened id."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The position of a task.

    Args:
        task_id: its whole id.
        state: a record state (``parked``, ``waiting``, ``adrift``, ``granted``, ``reserved``,
            ``running``, ``held_after``, ``delayed``, ``leaving``, ``overdue``, ``replaced``,
            ``revoked``, ``rejected``), or one of: ``silent``: it ran, and its worker shows no sign
            of life; ``eta``, ``received``, ``finished``: as the app reports; ``lost``: it was
            parked, and Redis has lost its message; ``ambiguous``: several ids begin with the given
            text; ``unseen``: no worker, lock or result has the id.
        sentence: the explanation, with what to do if something can be done.
        lock: name of its lock, if known.
        token: its owner token, if known.
        rank: rank in the queue; 1 is next; 0 if it is not in the queue.
        waited: seconds since it arrived; 0 if it does not wait.
        holders: the holders of its lock.
        paused: why its lock is paused; empty if it is not paused.
        keeps: other locks that it holds while it waits for this one.
        others: the answers for further messages with the same id.
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
    others: tuple[Answer, ...] = ()


class Witness(Protocol):
    """What an app knows about tasks that have no record at a lock."""

    def seen(self, task_id: str) -> tuple[str, str] | None:
        """Return a state and a clause, or None if the app does not know the task.

        The state is ``running``, ``eta``, ``received`` or ``finished``. The clause follows "it",
        such as ``ended with SUCCESS`` or ``runs on worker-2``.
        """
        ...

    def queues(self) -> str:
        """Return the lengths of the broker's queues as a clause; empty if they are not known."""
        ...


def why(store: AdminStore, task_id: str, witness: Witness | None = None) -> Answer:
    """Return the position of a task, and what it waits for.

    The index in Redis has the tasks that wait or have waited. A task that got its lock at once is
    searched among the holders of all locks. If no lock has the task, the witness answers. If the
    witness does not know it either, tasks whose ids begin with ``task_id`` are searched.

    Args:
        store: the store of the locks.
        task_id: the task's id, or at least its first six characters.
        witness: the app; None if there is no app.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    answer = _answer(store, task_id, witness)
    others = tuple(replace(each, sentence=printable(each.sentence)) for each in answer.others)
    return replace(answer, sentence=printable(answer.sentence), others=others)


def _answer(store: AdminStore, task_id: str, witness: Witness | None) -> Answer:
    known = _known(store, task_id, witness)
    return known or _by_start(store, task_id, witness) or _unseen(task_id, witness)


def _known(store: AdminStore, task_id: str, witness: Witness | None) -> Answer | None:
    found = standings_of(store, task_id)
    if found:
        first, *others = [_found(store, task_id, *each) for each in found]
        return replace(first, others=(*others, *_not_in_index(store, task_id, found)))
    seen = witness.seen(task_id) if witness else None
    if seen is None or seen[0] != "finished":
        held = _among_holders(store, task_id)
        if held is not None:
            return held
    if seen is not None:
        return _seen(task_id, seen)
    return _lost(store, task_id)


def _not_in_index(
    store: AdminStore, task_id: str, found: Sequence[tuple[str, Waiting, int]]
) -> Iterator[Answer]:
    """Yield an answer for each message with this id that got one of these locks at once."""
    known = {me.token for _, me, _ in found}
    for name in dict.fromkeys(name for name, _, _ in found):
        view = in_view(store, store.inspect(name, waiters=0))
        own = [h for h in view.holders if h.task_id == task_id and h.token not in known]
        elsewhere = parked_elsewhere(store, name, own)
        for holder in own:
            if holder.token not in elsewhere:
                yield _holding(task_id, view, holder)


def _by_start(store: AdminStore, start: str, witness: Witness | None) -> Answer | None:
    """Return the answer for a shortened id, as commands and logs show it; None if none fits."""
    if not SHORTEST_START <= len(start) < LENGTH:
        return None
    holders = (h.task_id for lock in store.summarise_locks(holders=1000) for h in lock.holders)
    ids = {*store.task_ids(start), *(each for each in holders if each.startswith(start))} - {start}
    if len(ids) == 1 and _OF_CELERY.fullmatch(start):
        return _known(store, ids.pop(), witness)
    return _ambiguous(start, sorted(ids)) if ids else None


_OF_CELERY: Final = re.compile("[0-9a-f-]+")
"""Beginning of a task id from Celery. Any other text may be an id that the user chose."""


def _ambiguous(start: str, ids: Sequence[str]) -> Answer:
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    told = (
        f"No task has the id {start!r}. These ids begin with it: "
        f"{', '.join(ids[:NAMED])}{more}. Give one whole id."
    )
    return Answer(start, "ambiguous", told)


def _found(store: AdminStore, task_id: str, name: str, me: Waiting, rank: int) -> Answer:
    view = in_view(store, store.inspect(name, waiters=0))
    elsewhere = parked_elsewhere(store, name, view.holders[:NAMED])
    answer = _at_its_lock(task_id, view, me, rank, elsewhere)
    if me.state == "parked" and not (view.holders or view.paused or _is_consumed(store, me)):
        answer = replace(answer, sentence=without_worker(view, me, rank))
    keeps = kept_by(store, name, me.token) if me.state in WAITS else ()
    if not keeps:
        return answer
    sentence = f"{answer.sentence}; holds {', '.join(map(repr, keeps))} meanwhile"
    return replace(answer, sentence=sentence, keeps=keeps)


def _is_consumed(store: AdminStore, me: Waiting) -> bool:
    """Return whether a live worker consumes a message's queue."""
    live = store.workers().values()
    return any(each["realm"] == me.realm and me.queue in each["queues"] for each in live)


def _among_holders(store: AdminStore, task_id: str) -> Answer | None:
    """Search the holders of all locks. A task that never waited is not in the index."""
    for lock in store.summarise_locks(holders=1000):
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
    """Return the answer for a parked task whose message Redis has lost."""
    note = store.lost(task_id)
    if note is None:
        return None
    when = datetime.fromtimestamp(note["at"], timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    told = (
        f"Lost: {worker_name(note['worker'])} parked it for {note['lock']!r}, and the locks' Redis "
        f"lost its message (noticed {when}). It will not run unless you send it again."
    )
    return Answer(task_id, "lost", told, note["lock"])


_GONE: Final = (
    "or its worker died (if it is acknowledged early, it is lost with its worker: send it again; "
    "if late, the broker redelivers it, a Redis broker after the visibility timeout), or an "
    "operator has dropped it (locks audit)"
)


def _unseen(task_id: str, witness: Witness | None) -> Answer:
    if witness is None:
        told = (
            "No lock has a record of it: it is still in the broker's queue, takes no lock, has "
            f"finished, {_GONE}. Run the command with the app (celery -A app locks why), which "
            "also asks workers, queues and results."
        )
    else:
        queues = witness.queues()
        told = (
            "No worker, lock or result has a record of it. Either it has not reached a worker "
            f"(look at the queue{f': {queues}' if queues else ''}; does a worker consume it?), or "
            "it has finished and its result was not stored, "
            f"{_GONE}."
        )
    if len(task_id) < LENGTH:
        told += (
            f" If {task_id!r} is only the beginning of an id, give the whole id: a shortened one, "
            f"of {SHORTEST_START} characters or more, finds only tasks that wait for a lock or "
            "hold one."
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
        of_waiter(view, me, rank, elsewhere),
        view.name,
        me.token,
        rank,
        me.age,
        view.holders,
        view.paused,
    )


def _holding(task_id: str, view: LockView, holder: Holder) -> Answer:
    state, sentence = of_holder(view, holder)
    return Answer(
        task_id, state, sentence, view.name, holder.token, 0, 0.0, view.holders, view.paused
    )

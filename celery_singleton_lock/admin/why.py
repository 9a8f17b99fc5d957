"""Explain in one sentence why a task does not run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Final, Protocol

from celery_singleton_lock.admin.backlog import stopped_queues
from celery_singleton_lock.admin.lock_views import FEW_KEYS, call_of
from celery_singleton_lock.admin.multi_lock_views import (
    WAITS,
    kept_by,
    parked_elsewhere,
    standings_of,
)
from celery_singleton_lock.admin.silent_holders import with_silent_holders
from celery_singleton_lock.admin.why_sentences import (
    NAMED,
    Takers,
    of_holder,
    of_priority,
    of_uniqueness,
    of_waiter,
    without_worker,
    worker_name,
)
from celery_singleton_lock.core.lock_view import SETTLING, Holder, LockView, WaitsFor, reason_in
from celery_singleton_lock.message_text import printable
from celery_singleton_lock.store.operator.base import AdminStore, Glance, Waiting

SHORTEST_START: Final = 6
"""Smallest number of characters of a shortened task id."""

MOST_READ: Final = 100
"""Largest number of waiters that are read to count those that have passed a task."""

LENGTH: Final = 36
"""Number of characters of a task id from Celery. A shorter text may be a shortened id."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The position of a task.

    Args:
        task_id: its whole id.
        state: a record state (``parked``, ``waiting``, ``adrift``, ``granted``, ``reserved``,
            ``running``, ``preempted``, ``held_after``, ``delayed``, ``settling``, ``following``,
            ``leaving``, ``overdue``, ``replaced``, ``revoked``, ``rejected``, ``too_costly``,
            ``above_rate``), or one of: ``silent``: it ran, and its worker sends no heartbeat and
            renews no lease;
            ``eta``, ``received``, ``finished``: as the app reports; ``lost``: it was parked,
            and Redis has lost its message; ``ambiguous``: several ids begin with the given
            text; ``unseen``: no worker, lock or result has the id.
        sentence: the explanation, with what to do if something can be done.
        lock: name of its lock, if known.
        token: its owner token, if known.
        rank: rank in the queue; 1 is next; 0 if it is not in the queue.
        waited: seconds since it arrived; 0 if it does not wait.
        holders: the holders of its lock.
        paused: why its lock is paused; empty if it is not paused.
        closed: who has closed its lock for a time, and why; empty if it is not closed.
        keeps: other locks that it holds while it waits for this one.
        others: the answers for further messages with the same id.
        waits_for: what it waits for, as a value of ``WaitsFor``; empty if it does not wait, or if
            that is not known.
        unique: the key of its unique call, if it counts as sent (``lock_unique``).
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
    waits_for: str = ""
    closed: str = ""
    unique: str = ""


class Witness(Protocol):
    """What an app knows about tasks that have no record at a lock."""

    def seen(self, task_id: str) -> tuple[str, str] | None:
        """Return a state and a clause, or None if the app does not know the task.

        The state is ``running``, ``eta``, ``received`` or ``finished``. If only the result tells,
        it is ``retry`` for a task that has sent its retry, ``unseen`` for one that was cancelled
        and may be lost, or ``revoked`` for one that may run nevertheless: any worker stores that
        result. The clause follows "it", such as ``ended with SUCCESS`` or ``runs on
        worker-2``.
        """
        ...

    def queues(self) -> str:
        """Return the lengths of the broker's queues as a clause; empty if they are not known."""
        ...

    def consumers(self, realm: str, queue: str) -> Sequence[str]:
        """Return the names of the workers that consume a queue, with or without locks.

        Args:
            realm: the realm of the queue's broker. If it is not the app's, there is no answer.
            queue: name of the queue.
        """
        ...


SEARCH: Final = 0.01
"""Seconds for which holders in a large Redis are searched, unless all are to be searched."""


class _Holders:
    """All locks with their holders; of a large Redis, those that can be read in a short time.

    Args:
        store: the store of the locks.
        start: the id that is searched, or its first characters.
        every: read all locks, however long it takes.

    Attributes:
        keys: number of keys of a Redis whose locks were not all read; else 0.
    """

    def __init__(self, store: AdminStore, start: str, *, every: bool) -> None:
        self.keys = 0
        self._store = store
        self._start = start
        self._every = every
        self._large = 0
        self._until: float | None = None

    def __iter__(self) -> Iterator[Glance]:
        """Yield locks; several passes share the time."""
        clock = self._store.clock
        if self._until is None:
            keys = 0 if self._every else self._store.key_count()
            self._large = keys if keys > FEW_KEYS else 0
            self._until = clock.monotonic() + SEARCH if self._large else float("inf")
        if self.keys:
            return
        for lock in self._store.summarise_locks(holders=1000):
            if clock.monotonic() > self._until:
                self.keys = self._large
                return
            yield lock

    @cached_property
    def running(self) -> Sequence[tuple[str, str, str]]:
        """Tasks in the lists of workers whose ids begin with the given text."""
        return self._store.locate_running(self._start)


def why(
    store: AdminStore, task_id: str, witness: Witness | None = None, *, every: bool = False
) -> Answer:
    """Return the position of a task, and what it waits for.

    The index in Redis has the tasks that wait or have waited. A task that got its lock at once is
    in the list of its worker after two seconds; else it is searched among the holders of locks. If
    no lock has the task, the witness answers. If the witness does not know it either, tasks whose
    ids begin with ``task_id`` are searched.

    Args:
        store: the store of the locks.
        task_id: the task's id, or at least its first six characters.
        witness: the app; None if there is no app.
        every: search the holders of all locks, which takes seconds with 100,000 locks. Otherwise,
            if Redis has many keys, only some are searched, and the sentence says so.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    locks = _Holders(store, task_id, every=every)
    answer = _answer(store, task_id, witness, locks)
    if locks.keys and answer.state in {"unseen", "ambiguous"}:
        told = (
            f" Redis has {locks.keys:,} keys, so not all locks were searched for a task that has "
            "just begun, or whose worker is of an older version: --all searches them."
        )
        answer = replace(answer, sentence=answer.sentence + told)
    others = tuple(_completed(store, each) for each in answer.others)
    return replace(_completed(store, answer), others=others)


def _completed(store: AdminStore, answer: Answer) -> Answer:
    """Say also whether the task counts as sent (``lock_unique``), and escape the sentence."""
    unique = of_uniqueness(call_of(store, answer.lock, answer.task_id, answer.unique))
    return replace(answer, sentence=printable(f"{answer.sentence}{unique}"))


def why_at_lock(store: AdminStore, me: Waiting, rank: int) -> Answer:
    """Return what a waiter of a lock waits for. The app is not asked.

    Args:
        store: the store of the locks.
        me: the waiter, a task or a client, from :func:`show_lock`.
        rank: its rank in the queue; 0 if it is not in the queue.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    return _completed(store, _found(store, me.task_id, None, me.lock, me, rank))


def _answer(store: AdminStore, task_id: str, witness: Witness | None, locks: _Holders) -> Answer:
    known = _known(store, task_id, witness, locks)
    return known or _by_start(store, task_id, witness, locks) or _unseen(store, task_id, witness)


def _known(
    store: AdminStore, task_id: str, witness: Witness | None, locks: _Holders
) -> Answer | None:
    found = standings_of(store, task_id)
    if found:
        first, *others = [_found(store, task_id, witness, *each) for each in found]
        return replace(first, others=(*others, *_not_in_index(store, task_id, found)))
    seen = witness.seen(task_id) if witness else None
    if seen is None or seen[0] != "finished":
        held = _among_holders(store, task_id, locks)
        if held is not None:
            return held
    if seen is None or seen[0] in _BY_RESULT:
        lost = _lost(store, task_id)
        if lost is not None or seen is None:
            return lost
    return _seen(task_id, seen)


def _not_in_index(
    store: AdminStore, task_id: str, found: Sequence[tuple[str, Waiting, int]]
) -> Iterator[Answer]:
    """Yield an answer for each message with this id that got one of these locks at once."""
    known = {me.token for _, me, _ in found}
    for name in dict.fromkeys(name for name, _, _ in found):
        view = with_silent_holders(store, store.inspect(name, waiters=0))
        own = [h for h in view.holders if h.task_id == task_id and h.token not in known]
        elsewhere = parked_elsewhere(store, name, own)
        for holder in own:
            if holder.token not in elsewhere:
                yield _holding(task_id, view, holder)


def _by_start(
    store: AdminStore, start: str, witness: Witness | None, locks: _Holders
) -> Answer | None:
    """Return the answer for a shortened id, as commands and logs show it; None if none fits."""
    if not SHORTEST_START <= len(start) < LENGTH:
        return None
    holders = (h.task_id for lock in locks for h in lock.holders)
    ids = {*store.task_ids(start), *(task_id for task_id, *_ in locks.running)} - {start}
    if not (ids and locks.keys):  # else not all locks would be searched in any case
        ids |= {each for each in holders if each.startswith(start)} - {start}
    if len(ids) == 1 and _OF_CELERY.fullmatch(start):
        return _known(store, ids.pop(), witness, locks)
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


def _found(  # noqa: PLR0917  # a position of a task, and where to look
    store: AdminStore,
    task_id: str,
    witness: Witness | None,
    name: str,
    me: Waiting,
    rank: int,
) -> Answer:
    view = with_silent_holders(store, store.inspect(name, waiters=0))
    elsewhere = parked_elsewhere(store, name, view.holders[:NAMED])
    is_next = me.state == "parked" and not (view.holders or view.paused or view.closed)
    asked = is_next or me.state in _NEED_A_WORKER
    takers = takers_of(store, me, witness) if asked else Takers()
    answer = _at_its_lock(task_id, view, me, rank, elsewhere, takers)
    by_priority = of_priority(me, *_passed_by(store, me, rank))
    answer = replace(answer, sentence=f"{answer.sentence}{by_priority}")
    if is_next and not takers.lock:
        sentence = without_worker(view, me, rank, takers)
        answer = replace(answer, sentence=sentence, waits_for=WaitsFor.WORKER.value)
    keeps = kept_by(store, name, me.token) if me.state in WAITS else ()
    if not keeps:
        return answer
    sentence = f"{answer.sentence}; holds {', '.join(map(repr, keeps))} meanwhile"
    return replace(answer, sentence=sentence, keeps=keeps)


def _passed_by(store: AdminStore, me: Waiting, rank: int) -> tuple[int, bool]:
    """Return how many of the waiters before this one arrived later, and whether all were read."""
    if rank <= 1:
        return 0, True
    page, _ = store.list_waiters(me.lock, "queue", most=MOST_READ)
    before = [each for each in page[: rank - 1] if each.token != me.token]
    return sum(each.arrival > me.arrival for each in before), rank - 1 <= len(before)


_NEED_A_WORKER: Final = frozenset(
    {"adrift", "overdue", "replaced", "revoked", "rejected", "too_costly", "above_rate"}
)
"""Record states that only a worker which takes the message can change."""


def takers_of(store: AdminStore, me: Waiting, witness: Witness | None = None) -> Takers:
    """Return the live workers that consume a message's queue, by whether they lock its task.

    Args:
        store: the store of the locks.
        me: the message.
        witness: the app, which is asked if no worker with locks consumes the queue.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    found = store.consumers(me.realm, me.queue, me.task)
    lock = [worker for worker, locks in found.items() if locks]
    plain = [worker for worker, locks in found.items() if not locks]
    silent = () if found or witness is None else witness.consumers(me.realm, me.queue)
    return Takers(lock, plain, silent)


def _among_holders(store: AdminStore, task_id: str, locks: _Holders) -> Answer | None:
    """Search the lists of the workers, then the holders of all locks.

    A task that never waited is not in the index. It is in the list of its worker if it runs for
    seconds.
    """
    for found_id, name, token in locks.running:
        if found_id == task_id:
            view = with_silent_holders(store, store.inspect(name, waiters=0))
            for holder in view.holders:
                if holder.token == token:
                    return _holding(task_id, view, holder)
    for lock in locks:
        for holder in lock.holders:
            if holder.task_id == task_id:
                view = with_silent_holders(store, store.inspect(lock.name, waiters=0))
                now = next((h for h in view.holders if h.token == holder.token), holder)
                return _holding(task_id, view, now)
    return None


_RETRY: Final = "retry"
_BY_RESULT: Final = frozenset({_RETRY, "unseen"})
"""What a witness says if no worker knows the task. A retry may have been parked and lost."""


_SHOWN_AS: Final = {_RETRY: "eta", "revoked": "finished"}


def _seen(task_id: str, seen: tuple[str, str]) -> Answer:
    state, clause = seen
    return Answer(task_id, _SHOWN_AS.get(state, state), f"It {clause}.")


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
    'or a worker holds it back between two tries (lock_on_conflict="requeue"), or an operator has '
    "dropped it (locks audit), or it was parked and the locks' Redis has lost its data since (the "
    "workers' logs say so), or its worker died. Then it is lost only if it had begun and is "
    "acknowledged early (Celery's default). Otherwise the broker redelivers it, a Redis broker "
    "after the visibility time-out. Do not send it again unless you know that it had begun: it "
    "may run twice"
)


def _unseen(store: AdminStore, task_id: str, witness: Witness | None) -> Answer:
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
    if stopped := stopped_queues(store):
        told += (
            f" Workers have stopped consuming {', '.join(map(str, stopped[:NAMED]))}, because as "
            "many messages are parked as singleton_lock_max_parked or "
            "singleton_lock_max_parked_bytes allow: a task in that queue waits in the broker until "
            "parked ones have run."
        )
    if len(task_id) < LENGTH:
        told += (
            f" If {task_id!r} is only the beginning of an id, give the whole id: a shortened one, "
            f"of {SHORTEST_START} characters or more, finds only tasks that wait for a lock or "
            "hold one."
        )
    return Answer(task_id, "unseen", told)


def _at_its_lock(  # noqa: PLR0917  # the facts of one sentence
    task_id: str,
    view: LockView,
    me: Waiting,
    rank: int,
    elsewhere: Mapping[str, str],
    takers: Takers,
) -> Answer:
    if me.state not in WAITS:
        holder = next((h for h in view.holders if h.token == me.token), None)
        if holder is not None:
            return _holding(task_id, view, holder)
    return Answer(
        task_id,
        me.state,
        of_waiter(view, me, rank, elsewhere, takers),
        view.name,
        me.token,
        rank,
        me.age,
        view.holders,
        view.paused,
        waits_for=_reason(view, me, rank),
        closed=view.closed,
        unique=me.unique,
    )


def _reason(view: LockView, me: Waiting, rank: int) -> str:
    """Return what a waiter waits for."""
    if me.state == SETTLING:
        return WaitsFor.SETTLING.value
    if me.state == "following":
        return WaitsFor.FOLLOWING.value
    if me.state in _NEED_A_WORKER:
        return WaitsFor.WORKER.value
    if rank > 1 and view.waits_for is None:
        return WaitsFor.QUEUE.value
    return reason_in(view) if rank else ""


def _holding(task_id: str, view: LockView, holder: Holder) -> Answer:
    state, sentence = of_holder(view, holder)
    return Answer(
        task_id,
        state,
        sentence,
        view.name,
        holder.token,
        holders=view.holders,
        paused=view.paused,
        unique=holder.unique,
    )

"""Many parked tasks at once: purge, drain, export, import; a bounded number in memory at a time."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from threading import Event
from typing import Any, Final

from celery_singleton_lock.admin.multi_lock_views import give_back
from celery_singleton_lock.admin.lock_views import waiting_in
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import BackendError, ConfigurationError
from celery_singleton_lock.core.model import ANOTHER_RUN, Claim, Owner, Parcel, Verdict, new_token
from celery_singleton_lock.store.operator.base import AdminStore, Operator, Waiting
from celery_singleton_lock.store.message_operations import HOLD

STEP: Final = 20
"""Most tasks that one script takes out of a line: half a millisecond."""

READ: Final = 100
"""Most tasks that are read at a time."""

LOAD: Final = 8 * 2**20
"""Bytes of messages that are in memory at a time, unless one alone is longer."""

AHEAD: Final = 10.0
"""Seconds of work for which a drain takes messages at once."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which parked tasks are meant; what is empty does not matter.

    Args:
        lock: name of the lock, or a pattern, or a part of it (see :meth:`AdminStore.glances`).
        exact: ``lock`` is a whole name.
        task: name of the task; with one of ``*?[``, a pattern.
        older: seconds that it has waited at least.
        queue: queue from which its message came.
        state: ``parked``, ``adrift``, ``overdue``, ``replaced`` or ``revoked``.
    """

    lock: str = ""
    exact: bool = False
    task: str = ""
    older: float = 0.0
    queue: str = ""
    state: str = ""

    def fits(self, waiting: Waiting) -> bool:
        """Return whether this one is meant. Clients that wait without a message never are."""
        return (
            waiting.state != "waiting"
            and (not self.task or _fits(waiting.task, self.task))
            and waiting.age >= self.older
            and self.queue in {"", waiting.queue}
            and self.state in {"", waiting.state}
        )


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern)


@dataclass(slots=True)
class Tally:
    """What came of it.

    Args:
        done: how many, by lock.
        skipped: how many were left, by reason.
    """

    done: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How many in all."""
        return self.done.total()


def names_of(store: AdminStore, wanted: Filter) -> Iterator[str]:
    """Yield the names of the locks that are meant, and for which something may wait."""
    if wanted.exact:
        yield wanted.lock
        return
    for lock in store.glances(wanted.lock, holders=0):
        if not lock.broken and (lock.waiting or lock.adrift or lock.bodies):
            yield lock.name


def select(store: AdminStore, wanted: Filter) -> Iterator[Waiting]:
    """Yield the parked tasks that are meant: lock by lock, in their order."""
    for name in names_of(store, wanted):
        yield from filter(wanted.fits, waiting_in(store, name))


def count(store: AdminStore, wanted: Filter) -> Tally:
    """Count the parked tasks that are meant; changes nothing."""
    tally = Tally()
    for each in select(store, wanted):
        tally.done[each.lock] += 1
    return tally


def steps(found: Iterable[Waiting], most: int = STEP, load: int = LOAD) -> Iterator[list[Waiting]]:
    """Yield them in groups of one lock, of a bounded number and size."""
    group: list[Waiting] = []
    size = 0
    for each in found:
        full = len(group) == most or size + each.size > load
        if group and (full or each.lock != group[0].lock):
            yield group
            group, size = [], 0
        group.append(each)
        size += each.size
    if group:
        yield group


def purge(
    store: AdminStore,
    wanted: Filter,
    by: Operator,
    *,
    dropped: Callable[[Waiting], None] | None = None,
    done_for: float = 3600.0,
) -> Tally:
    """Drop parked tasks for good; audited, one entry per lock.

    Args:
        store: where.
        wanted: which.
        by: who does it; ``by.action`` is ``purge``.
        dropped: called with each, its message included, once it is gone: to tell its result.
        done_for: seconds for which copies of them end quietly.

    Raises:
        BackendError: Redis did not answer, or refused; what was dropped until then is gone.
    """
    tally = Tally()
    for group in steps(select(store, wanted)):
        tokens = [each.token for each in group]
        gone = store.drop(group[0].lock, tokens, by, done_for=done_for, whole=dropped is not None)
        tally.done[group[0].lock] += len(gone)
        tally.skipped["moved meanwhile"] += len(group) - len(gone)
        for each in gone if dropped else ():
            give_back(store, each)
            dropped(each)  # type: ignore[misc]  # there is one, or nothing to loop over
    return tally


class Pace:
    """Lets pass so many a second.

    Args:
        rate: how many a second; 0 for no bound.
        clock: what measures; a test has its own.
        sleep: waits for seconds.
    """

    def __init__(
        self, rate: float, clock: Clock | None = None, sleep: Callable[[float], Any] | None = None
    ) -> None:
        """Let the first one pass at once."""
        self._rate = rate
        self._clock = clock or SystemClock()
        self._sleep = sleep or Event().wait
        self._next = self._clock.monotonic()

    def wait(self) -> None:
        """Wait until the next one may pass."""
        if not self._rate:
            return
        now = self._clock.monotonic()
        if self._next > now:
            self._sleep(self._next - now)
        self._next = max(self._next, now) + 1 / self._rate

    @property
    def ahead(self) -> int:
        """How many may be taken at once."""
        return STEP if not self._rate else max(1, min(STEP, int(self._rate * AHEAD)))


def drain(
    store: AdminStore,
    wanted: Filter,
    by: Operator,
    *,
    realm: str,
    publish: Callable[[Waiting], None],
    pace: Pace,
) -> Tally:
    """Send parked tasks back to the broker, in their order, and forget them here.

    Each is taken out of its line, published, then dropped: who dies in between leaves it here (it
    queues again after :data:`HOLD` seconds), so it is never lost, and may run twice. A worker that
    locks, and receives it before it is dropped, keeps it here. What is parked after the drain began
    is left, and so is a task with a verdict, which a worker must end.

    Args:
        store: where.
        wanted: which.
        by: who does it; ``by.action`` is ``drain``.
        realm: of the broker; messages of others are left.
        publish: sends a message to its queue; raises if it cannot.
        pace: how many a second.

    Raises:
        BackendError: Redis did not answer, or refused.
        Exception: what ``publish`` raises; what was sent until then is dropped here.
    """
    tally = Tally()
    began = int(store.time() * 1_000_000)

    def leaves(each: Waiting) -> bool:
        reason = _stays(each, realm, began)
        tally.skipped[reason] += bool(reason)
        return not reason

    for group in steps(filter(leaves, select(store, wanted)), pace.ahead):
        _send_off(store, group, by, publish, pace, tally)
    return tally


def _stays(each: Waiting, realm: str, began: int) -> str:
    """Return why a task is not drained, or nothing."""
    if each.realm != realm:
        return "of another broker"
    if each.state in {"delayed", "leaving"}:
        return each.state
    if each.state in {"overdue", "replaced", "revoked", "rejected"}:
        return f"{each.state}: a worker has to end it"
    return "parked since" if each.place > began else ""


def _send_off(  # noqa: PLR0917  # the parts of one step
    store: AdminStore,
    group: list[Waiting],
    by: Operator,
    publish: Callable[[Waiting], None],
    pace: Pace,
    tally: Tally,
) -> None:
    lock, seal, sent = group[0].lock, new_token(), list[str]()
    sealed = store.seal(lock, [each.token for each in group], HOLD, seal)
    tally.skipped["granted meanwhile"] += len(group) - len(sealed)
    try:
        for each in sealed:
            pace.wait()
            publish(each)
            sent.append(each.token)
    finally:
        # Without a mark of their end: the message that was sent is to run.
        gone = store.drop(lock, sent, by, done_for=None, seal=seal)
        tally.done[lock] += len(gone)
        tally.skipped["parked again by a worker that locks"] += len(sent) - len(gone)
        unsent = [each.token for each in sealed[len(sent) :]]
        if unsent:
            store.left(lock, seal, unsent, sent=False)
        for each in sealed[: len(sent)]:
            give_back(store, each)


# -- out of one Redis, into another ----------------------------------------------------------------


def export(store: AdminStore, wanted: Filter, by: Operator) -> Iterator[str]:
    """Yield each parked task as a line of JSON, message and arguments included; takes none away.

    Args:
        store: where.
        wanted: which.
        by: who reads them: the audit has it before they do.

    Raises:
        BackendError: Redis did not answer, or refused.
    """
    limits: dict[str, int] = {}
    by = replace(by, action="export")
    for group in steps(select(store, wanted), READ):
        lock = group[0].lock
        store.remark(lock, by, steps=len(group))
        if lock not in limits:
            limits = {lock: max(1, store.inspect(lock, waiters=0).limit)}
        messages = store.messages(lock, [each.token for each in group])
        for each, message in zip(group, messages, strict=True):
            if message is not None:
                yield json.dumps(_line(each, limits[lock], message))


_KEPT: Final = ("lock", "token", "task", "attempt", "realm", "queue", "lease", "place", "wait")


def _line(each: Waiting, limit: int, message: bytes) -> dict[str, Any]:
    told = {name: getattr(each, name) for name in _KEPT}
    return {**told, "limit": limit, "message": base64.b64encode(message).decode()}


def restore(
    store: AdminStore,
    lines: Iterable[str],
    by: Operator,
    *,
    realm: str = "",
    again: bool = False,
) -> Tally:
    """Park what :func:`export` wrote, each at its place and under its token: twice is once.

    Args:
        store: where.
        lines: of the file.
        by: who does it, for the audit.
        realm: broker of the messages from now on; empty leaves them theirs.
        again: under new tokens: also those that were purged, or have run; not beside one that waits
            or runs.

    Raises:
        ConfigurationError: a line is none of ours; what came before it is parked.
        BackendError: Redis did not answer, or refused.
    """
    tally = Tally()
    by = replace(by, action="import")
    for group in _batches(_parcels(lines, realm, again=again)):
        parked = _park(store, group, tally)
        for name, number in parked.items():
            store.remark(name, by, steps=number)
        tally.done.update(parked)
    return tally


def _park(store: AdminStore, group: list[_Parked], tally: Tally) -> Counter[str]:
    """Park them, and return how many were, by lock; who has ended, or is here, is skipped."""
    parked = Counter[str]()
    for (_, claim, _), reply in zip(group, store.park_many(group), strict=True):
        if isinstance(reply, BackendError):
            raise reply
        if reply.verdict in {Verdict.DONE, Verdict.FULL}:
            tally.skipped["has ended already"] += 1
        elif reply.verdict is Verdict.TWIN:
            tally.skipped["waits or runs already"] += 1
        else:
            parked[claim.name] += 1
    return parked


_Parked = tuple[Owner, Claim, Parcel]


def _batches(parcels: Iterator[_Parked]) -> Iterator[list[_Parked]]:
    """Yield them in groups of a bounded number and size; before an error, those read until then."""
    group: list[_Parked] = []
    size = 0
    try:
        for each in parcels:
            if group and (len(group) == STEP or size + len(each[2].body) > LOAD):
                yield group
                group, size = [], 0
            group.append(each)
            size += len(each[2].body)
    except ConfigurationError:
        if group:
            yield group
        raise
    if group:
        yield group


def _parcels(lines: Iterable[str], realm: str, *, again: bool) -> Iterator[_Parked]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            token = new_token() if again else told["token"]
            owner = Owner(token, told["attempt"], told["task"])
            claim = Claim(
                told["lock"],
                told["lease"],
                told["limit"],
                told["place"],
                copy=ANOTHER_RUN if again else 0,
            )
            body = base64.b64decode(told["message"], validate=True)
            parcel = Parcel(body, realm or told["realm"], told["queue"], told["wait"])
        except (ValueError, KeyError, TypeError) as error:
            msg = f"line {number} is no parked task ({error!r:.80}): give a file that export wrote."
            raise ConfigurationError(msg) from None
        yield owner, claim, parcel

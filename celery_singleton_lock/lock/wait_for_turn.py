"""Acquires a lock, and waits for it, in a thread, an asyncio task or a Celery task.

:class:`LockWait` decides what to do next, without I/O. :func:`acquire_plan` is the plan from the
first request to the last reply. If the lock is busy, the caller joins its queue and blocks on a
list of its own in Redis. The script of a release makes the first waiter the holder, and wakes it
through that list. So the order of arrival is kept, and nobody polls. (python-redis-lock only wakes
a waiter, which then tries again. Another client may be faster.)
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lock_steps import Plan, carry_out
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reply, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.store.base import LockStore

T = TypeVar("T")

LIVENESS: Final = 10.0
"""Seconds for which a waiter counts as alive after a request."""

HEARTBEAT: Final = LIVENESS / 3
"""Seconds after which a waiter asks again; less than CLAIM_LEASE, so that no grant lapses."""

AFTER_LEASE: Final = 0.01
"""Seconds after the end of a holder's lease at which the first waiter asks again."""

AFTER_START: Final = 0.002
"""Seconds after the time of the next start at which the first waiter asks again."""

STAGGER: Final = 0.05
"""Seconds by which each waiter asks later than the waiter before it, so that only one sweeps."""

TICK: Final = 0.1
"""Seconds by which Redis may end a blocking read too late, with its default of hz 10."""

NAP: Final = 0.25
"""Seconds between two requests while there is no connection on which to block."""


class Step(enum.Enum):
    """What to do next to acquire a lock."""

    ASK = "ask"
    """Acquire the lock, or join or stay in its queue."""
    WAIT = "wait"
    """Block on the wake list, for at most :attr:`LockWait.pause` seconds."""
    CLAIM = "claim"
    """Claim a grant: begin to use it."""
    CANCEL = "cancel"
    """Leave the queue, because the wait has timed out."""
    HAVE = "have"
    """The lock is held."""
    STOP = "stop"
    """The lock is busy, and the caller does not wait any longer."""


class LockWait:
    """The state of one caller that acquires a lock.

    Args:
        clock: source of monotonic seconds.
        token: owner token; replaced if the waiter was removed because it did not ask in time.
        blocking: whether to join the queue.
        timeout: longest wait in seconds; None for no limit.
        rename: returns the token that replaces the first one.

    Attributes:
        asked: monotonic time of the last request.
        pause: seconds of the next wait.
        punctual: whether that wait ends at the time of the next start, which a rate gives.
        has_waited: whether it was in the queue. If it does not ask in time, it is removed, and a
            copy of its message may run.
    """

    def __init__(
        self,
        clock: Clock,
        token: str,
        *,
        blocking: bool,
        timeout: float | None,
        rename: Callable[[], str] = new_token,
    ) -> None:
        self.clock = clock
        self.token: str = token
        self.blocking = blocking
        self.deadline: float = math.inf if timeout is None else clock.monotonic() + timeout
        self.pause: float = 0.0
        self.punctual: bool = False
        self.asked: float = -math.inf
        self.has_waited: bool = False
        self._queued = False
        self._ask_by: float = math.inf
        self._rename = rename

    @property
    def liveness(self) -> float | None:
        """Seconds for which the waiter stays queued without a request; None: it never queues."""
        left = self.deadline - self.clock.monotonic()
        return min(LIVENESS, max(left, 0.0) + 1.0) if self.blocking else None

    def answered(self, step: Step, reply: Reply) -> Step:
        """Return what to do after the reply to ``step``."""
        match reply.verdict:
            case Verdict.GRANTED:
                return self._granted(step)
            case Verdict.WAITING:
                if step is Step.ASK:
                    self._ask_by = self.clock.monotonic() + HEARTBEAT
                return self._stay(reply)
            case Verdict.ABSENT:
                return self._begin_again()
            case Verdict.BLOCKED | Verdict.FULL | Verdict.RELEASED | Verdict.TWIN | Verdict.DONE:
                return Step.STOP
            case Verdict.TOO_COSTLY | Verdict.CHARGED:
                return Step.STOP

    def waited(self, *, woken: bool) -> Step:
        """Return what to do after a wait: claim the grant, ask again, or leave the queue.

        A claim without a grant does not keep the waiter queued. So one that is woken often, since
        it is the next and waits for a rate, asks in time nevertheless.
        """
        out_of_time = self._out_of_time()
        if woken and (out_of_time or self.clock.monotonic() < self._ask_by):
            return Step.CLAIM
        return Step.CANCEL if out_of_time else Step.ASK

    def _granted(self, step: Step) -> Step:
        """Claim a grant that another client's script made; a direct grant needs no claim."""
        granted_by_another = step is Step.CANCEL or (step is Step.ASK and self._queued)
        return Step.CLAIM if granted_by_another else Step.HAVE

    def _stay(self, reply: Reply) -> Step:
        """Wait until the deadline, the next end of a lease, or the next request to stay queued."""
        self._queued = self.has_waited = True
        left = self.deadline - self.clock.monotonic()
        self.pause = max(0.01, min(left, HEARTBEAT, _look_after(reply)))
        self.punctual = reply.next_start > 0
        return Step.CANCEL if left <= 0 else Step.WAIT

    def _begin_again(self) -> Step:
        """Ask with a new token: the waiter was removed because it had not asked in time."""
        if self._out_of_time():
            return Step.STOP
        self.token = self._rename()
        self._queued = False
        return Step.ASK

    def _out_of_time(self) -> bool:
        return self.clock.monotonic() >= self.deadline


def _look_after(reply: Reply) -> float:
    """Return the seconds until a waiter of this rank asks whether it may start by now."""
    if reply.next_look <= 0:
        return HEARTBEAT
    behind = max(0, reply.rank - 1)
    if reply.next_start:
        return reply.next_start + AFTER_START + min(STAGGER, reply.next_start) * behind
    return reply.next_look + AFTER_LEASE + STAGGER * behind


# --- the plan ---------------------------------------------------------------------------


class Do(NamedTuple):
    """A call of the store that changes or reads the lock. It must run to its end.

    Args:
        call: calls the store.
    """

    call: Callable[[Any], Any]


class Rest(NamedTuple):
    """A wait, which may be cancelled at any time.

    Args:
        seconds: longest wait.
        call: waits with the store, and returns whether it was woken; None: no connection.
    """

    seconds: float
    call: Callable[[Any], Any] | None = None


Request: TypeAlias = Do | Rest


def twice(plan: Callable[[], Plan[Request, T]]) -> Plan[Request, T]:
    """Run a plan; repeat it if there was no answer: operations are idempotent per token."""
    try:
        return (yield from plan())
    except BackendUnreachable:
        return (yield from plan())


def acquire_plan(wait: LockWait, owner: Owner, claim: Claim) -> Plan[Request, tuple[Step, Reply]]:
    """Acquire a lock: ask, wait and claim until the caller holds it or stops.

    Args:
        wait: the state of the caller; ``wait.asked`` becomes the time of the last request.
        owner: the caller; its token is replaced by that of ``wait``.
        claim: the request.

    Returns:
        ``Step.HAVE`` or ``Step.STOP``, and the store's last reply.

    Raises:
        BackendError: the store did not answer two attempts, or refused.
    """
    step = Step.ASK
    while True:
        if step is Step.WAIT:
            step = wait.waited(woken=(yield from _wake(wait, claim.name)))
            continue
        reply: Reply = yield from twice(partial(_ask, step, wait, owner, claim))
        step = wait.answered(step, reply)
        if step in {Step.HAVE, Step.STOP}:
            return step, reply


def _ask(step: Step, wait: LockWait, owner: Owner, claim: Claim) -> Plan[Request, Reply]:
    """Send a request. The clock is read before it is sent, so the lease is not overestimated."""
    wait.asked = wait.clock.monotonic()
    me, alive = owner._replace(token=wait.token), wait.liveness
    reply: Reply
    if step is Step.CANCEL:
        reply = yield Do(lambda store: store.release(claim.name, me.token, Ending.CANCEL))
    elif step is Step.CLAIM:
        later = claim.later
        reply = yield Do(lambda store: store.claim(me, claim.name, claim.lease, later=later))
    else:
        wanted = claim
        if wait.has_waited and owner.attempt and not claim.copy:
            wanted = claim._replace(copy=claim.place or 1)
        reply = yield Do(lambda store: store.acquire(me, wanted, wait=alive))
    return reply


def _wake(wait: LockWait, name: str) -> Plan[Request, bool]:
    """Block until woken, or until the pause is over; return whether it was woken.

    The last part of a punctual wait is spent outside Redis, which ends a blocking read too late.
    """
    token, until = wait.token, wait.clock.monotonic() + wait.pause
    block = wait.pause - TICK if wait.punctual else wait.pause
    try:
        if block > 0 and (yield Rest(block, lambda store: store.wait(name, token, block))):
            return True
    except BackendUnreachable:
        yield Rest(min(wait.pause, NAP))
        return False
    left = min(TICK, until - wait.clock.monotonic())
    if wait.punctual and left > 0:
        yield Rest(left)
    return False


def in_thread(store: LockStore) -> Callable[[Request], Any]:
    """Return a function that carries out a plan's requests in the calling thread."""

    def do(request: Request) -> Any:
        if request.call is None:
            return threading.Event().wait(request.seconds)
        return request.call(store)

    return do


def wait_in_slot(
    store: LockStore, clock: Clock, owner: Owner, claim: Claim, timeout: float
) -> tuple[Reply, float]:
    """Wait for a lock in a task's pool slot. ``claim.place`` is the place in the queue.

    The token stays the same, because the main process identifies the task by it.

    Args:
        store: the store.
        clock: source of monotonic seconds.
        owner: the caller.
        claim: the request.
        timeout: longest wait in seconds.

    Returns:
        The last reply (GRANTED, or why not; RELEASED or ABSENT after ``timeout``), and the
        monotonic time of its request.

    Raises:
        BackendError: Redis did not answer, or refused.
    """
    wait = LockWait(clock, owner.token, blocking=True, timeout=timeout, rename=lambda: owner.token)
    _, reply = carry_out(acquire_plan(wait, owner, claim), in_thread(store))
    return reply, wait.asked

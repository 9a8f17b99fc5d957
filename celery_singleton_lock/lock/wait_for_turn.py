"""The way to a lock: what to do next, for threads, tasks and coroutines alike.

:class:`Turn` decides and does nothing itself; :func:`way` is the plan of the whole way, which
threads and coroutines carry out each in their manner. A caller who finds the lock busy stands in
its queue and blocks on a list of its own until the releaser's script has written it in as holder: a
hand-over, not a signal. (python-redis-lock signals: the woken client tries again, and whoever is
quicker has the lock.) So the order of arrival holds, nobody polls, and what is popped from the list
decides nothing.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reply, Verdict, new_token
from celery_singleton_lock.core.lock_steps import Plan, carry_out
from celery_singleton_lock.store.base import Store

T = TypeVar("T")

LIVENESS: Final = 10.0
"""Seconds for which a waiter counts as alive after it has asked."""

HEARTBEAT: Final = LIVENESS / 3
"""Seconds after which a waiter asks again: below CLAIM_LEASE, so that no grant is slept through."""

AFTER_LEASE: Final = 0.01
"""Seconds behind the end of a holder's lease at which the first waiter looks."""

STAGGER: Final = 0.05
"""Seconds by which each further waiter looks later (invariant I12), so that one of them sweeps."""

NAP: Final = 0.25
"""Seconds between two questions while the connection to wait on cannot be had."""


class Step(enum.Enum):
    """What to do next on the way to a lock."""

    ASK = "ask"
    """Take the lock, or queue for it; or stay in the queue."""
    WAIT = "wait"
    """Block on the wake list, for :attr:`Turn.pause` seconds at most."""
    CLAIM = "claim"
    """Begin to use a grant."""
    CANCEL = "cancel"
    """Leave the queue, for the time allowed is up."""
    HAVE = "have"
    """Held. The end."""
    STOP = "stop"
    """Not to be had. The end."""


class Turn:
    """One caller's way to a lock: what to do next.

    Args:
        clock: source of monotonic seconds.
        token: owner token; replaced if the store has given us up for dead.
        blocking: whether to queue.
        timeout: most seconds to wait; None for as long as it takes.
        rename: returns the token under which to ask anew after the store has given us up for dead.
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
        """Stand before the lock; nothing was asked yet."""
        self.clock = clock
        self.token = token
        self.blocking = blocking
        self.deadline = math.inf if timeout is None else clock.monotonic() + timeout
        self.pause = 0.0
        self.asked = -math.inf
        self._queued = False
        self._rename = rename

    @property
    def liveness(self) -> float | None:
        """Seconds for which the store keeps our place without a word; None: do not queue."""
        left = self.deadline - self.clock.monotonic()
        return min(LIVENESS, max(left, 0.0) + 1.0) if self.blocking else None

    def answered(self, step: Step, reply: Reply) -> Step:
        """Return what to do after the store's reply to ``step``."""
        match reply.verdict:
            case Verdict.GRANTED:
                return self._granted(step)
            case Verdict.WAITING:
                return self._stay(reply)
            case Verdict.ABSENT:
                return self._begin_again()
            case Verdict.BLOCKED | Verdict.FULL | Verdict.RELEASED | Verdict.TWIN | Verdict.DONE:
                return Step.STOP

    def waited(self, *, woken: bool) -> Step:
        """Return what to do after a wait: claim the grant, or see what became of the holder."""
        if woken:
            return Step.CLAIM
        return Step.CANCEL if self._out_of_time() else Step.ASK

    def _granted(self, step: Step) -> Step:
        """A newcomer has its full lease at once; who has queued must claim it."""
        granted_by_another = step is Step.CANCEL or (step is Step.ASK and self._queued)
        return Step.CLAIM if granted_by_another else Step.HAVE

    def _stay(self, reply: Reply) -> Step:
        """Wait until the earliest of own deadline, next lease end, heartbeat."""
        self._queued = True
        left = self.deadline - self.clock.monotonic()
        self.pause = max(0.01, min(left, HEARTBEAT, _look_after(reply)))
        return Step.CANCEL if left <= 0 else Step.WAIT

    def _begin_again(self) -> Step:
        """We were silent for so long that our place, or our grant, was given away."""
        if self._out_of_time():
            return Step.STOP
        self.token = self._rename()
        self._queued = False
        return Step.ASK

    def _out_of_time(self) -> bool:
        return self.clock.monotonic() >= self.deadline


def _look_after(reply: Reply) -> float:
    """Return seconds until a waiter of this rank looks whether a holder's lease has ended."""
    if reply.next_look <= 0:
        return HEARTBEAT
    return reply.next_look + AFTER_LEASE + STAGGER * max(0, reply.rank - 1)


# --- the way, as a plan ---------------------------------------------------------------------------


class Do(NamedTuple):
    """Have the store do something, and answer with its answer.

    What was asked is done whether the answer is heard or not: so it is heard to its end.

    Args:
        call: asks a store.
    """

    call: Callable[[Any], Any]


class Rest(NamedTuple):
    """Let time pass; that may be broken off at any moment.

    Args:
        seconds: most that may pass.
        call: waits with a store, and tells whether we were woken; None: there is no connection.
    """

    seconds: float
    call: Callable[[Any], Any] | None = None


Wish: TypeAlias = Do | Rest


def twice(plan: Callable[[], Plan[Wish, T]]) -> Plan[Wish, T]:
    """Do something, and once more if no answer came: every verb is idempotent per token (I10)."""
    try:
        return (yield from plan())
    except BackendUnreachable:
        return (yield from plan())


def way(turn: Turn, owner: Owner, claim: Claim) -> Plan[Wish, tuple[Step, Reply]]:
    """Go the way to a lock to its end.

    Args:
        turn: the way; notes in ``turn.asked`` when the store was asked.
        owner: who goes it, under the token of the turn.
        claim: what is asked.

    Returns:
        HAVE or STOP, and the store's last reply.

    Raises:
        BackendError: the store did not answer (nor did it when asked once more), or refused.
    """
    step = Step.ASK
    while True:
        if step is Step.WAIT:
            step = turn.waited(woken=(yield from _wake(turn, claim.name)))
            continue
        reply: Reply = yield from twice(partial(_ask, step, turn, owner, claim))
        step = turn.answered(step, reply)
        if step in {Step.HAVE, Step.STOP}:
            return step, reply


def _ask(step: Step, turn: Turn, owner: Owner, claim: Claim) -> Plan[Wish, Reply]:
    """Ask the store. The clock is read before: we never believe in more than it keeps (I2)."""
    turn.asked = turn.clock.monotonic()
    me, alive = owner._replace(token=turn.token), turn.liveness
    reply: Reply
    if step is Step.CANCEL:
        reply = yield Do(lambda store: store.release(claim.name, me.token, Ending.CANCEL))
    elif step is Step.CLAIM:
        reply = yield Do(lambda store: store.claim(me, claim.name, claim.lease))
    else:
        reply = yield Do(lambda store: store.acquire(me, claim, wait=alive))
    return reply


def _wake(turn: Turn, name: str) -> Plan[Wish, bool]:
    """Block until woken or the pause is over; without a connection, nap and ask."""
    token, pause = turn.token, turn.pause
    try:
        return bool((yield Rest(pause, lambda store: store.wait(name, token, pause))))
    except BackendUnreachable:
        yield Rest(min(pause, NAP))
        return False


def in_thread(store: Store) -> Callable[[Wish], Any]:
    """Return what does as a plan wishes, in the thread that asks."""

    def do(wish: Wish) -> Any:
        if wish.call is None:
            return threading.Event().wait(wish.seconds)
        return wish.call(store)

    return do


def stand_in_line(
    store: Store, clock: Clock, owner: Owner, claim: Claim, timeout: float
) -> tuple[Reply, float]:
    """Wait for a lock as a task does in its slot: in the queue, at the place of its arrival.

    The token stays the same, since others know the task by it.

    Args:
        store: where the lock is.
        clock: source of monotonic seconds.
        owner: who asks.
        claim: what is asked.
        timeout: most seconds to wait.

    Returns:
        The last reply (GRANTED, or why not; RELEASED or ABSENT after ``timeout``), and the
        monotonic time at which was asked for it.

    Raises:
        BackendError: the store did not answer, or refused.
    """
    turn = Turn(clock, owner.token, blocking=True, timeout=timeout, rename=lambda: owner.token)
    _, reply = carry_out(way(turn, owner, claim), in_thread(store))
    return reply, turn.asked

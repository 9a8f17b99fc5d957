"""The way to a lock: what to do next, for threads, tasks and coroutines alike.

:class:`Turn` decides and does nothing itself; :func:`go` goes the way to its end, with whatever
asks the store and waits. A caller who finds the lock busy stands in its queue and blocks on a list
of its own until the releaser's script has written it in as holder: a hand-over, not a signal.
(python-redis-lock signals: the woken client tries again, and whoever is quicker has the lock.) So
the order of arrival holds, nobody polls, and what is popped from the list decides nothing.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from celery_singleton_lock.clock import Clock
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.model import Claim, Ending, Owner, Reply, Verdict, new_token
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
        self._clock = clock
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
        left = self.deadline - self._clock.monotonic()
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
        left = self.deadline - self._clock.monotonic()
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
        return self._clock.monotonic() >= self.deadline


def _look_after(reply: Reply) -> float:
    """Return seconds until a waiter of this rank looks whether a holder's lease has ended."""
    if reply.next_look <= 0:
        return HEARTBEAT
    return reply.next_look + AFTER_LEASE + STAGGER * max(0, reply.rank - 1)


Ask = Callable[[Step, Turn], Reply]
"""Asks the store what a step of a turn says."""


def go(turn: Turn, ask: Ask, wait: Callable[[Turn], bool]) -> tuple[Step, Reply]:
    """Go the way to a lock to its end.

    Args:
        turn: the way.
        ask: carries out a step, and notes in ``turn.asked`` when.
        wait: blocks until woken, for ``turn.pause`` seconds at most; returns whether it was.

    Returns:
        HAVE or STOP, and the store's last reply.

    Raises:
        BackendError: the store did not answer (nor did it when asked once more), or refused.
    """
    step = Step.ASK
    while True:
        if step is Step.WAIT:
            step = turn.waited(woken=wait(turn))
            continue
        reply = twice(partial(ask, step, turn))
        step = turn.answered(step, reply)
        if step in {Step.HAVE, Step.STOP}:
            return step, reply


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

    def ask(step: Step, turn: Turn) -> Reply:
        turn.asked = clock.monotonic()
        if step is Step.CANCEL:
            return store.release(claim.name, owner.token, Ending.CANCEL)
        if step is Step.CLAIM:
            return store.claim(owner, claim.name, claim.lease)
        return store.acquire(owner, claim, wait=turn.liveness)

    turn = Turn(clock, owner.token, blocking=True, timeout=timeout, rename=lambda: owner.token)
    _, reply = go(turn, ask, lambda turn: await_wake(store, claim.name, turn))
    return reply, turn.asked


def await_wake(store: Store, name: str, turn: Turn) -> bool:
    """Block until woken or the pause is over; without a connection, nap and ask."""
    try:
        return store.wait(name, turn.token, turn.pause)
    except BackendUnreachable:
        threading.Event().wait(min(turn.pause, NAP))
        return False


def twice(call: Callable[[], T]) -> T:
    """Call, and once more if no answer came: every verb is idempotent per token (I10)."""
    try:
        return call()
    except BackendUnreachable:
        return call()

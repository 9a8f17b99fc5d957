"""Clients that wait for a lock, step by step, by the library's own logic (:mod:`~.turn`)."""

from __future__ import annotations

from typing import NoReturn

from celery_singleton_lock.core.model import Ending, Reply
from celery_singleton_lock.lock.wait_for_turn import LockWait, Step
from support.script_model.world import Asker, World

AFTER_THE_END = 3
"""Most calls of a client after its time: it leaves, and takes a grant that was quicker."""


class WorldClock:
    """What a client's own clock shows; here it goes like the server's.

    Args:
        world: whose time.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def monotonic(self) -> float:
        return self.world.now_us / 1_000_000


class Patient:
    """A client that waits so many seconds for a lock; it acts only when it is called.

    Args:
        world: where.
        lock: for which.
        timeout: most seconds to wait; None for as long as it takes.
        lease: seconds.
        limit: permits that it declares.
    """

    def __init__(
        self, world: World, lock: str, timeout: float | None, lease: float, limit: int
    ) -> None:
        self.world, self.lock, self.lease, self.limit = world, lock, lease, limit
        self.asker = self._asker()
        self.turn = LockWait(
            WorldClock(world),
            self.asker.token,
            blocking=True,
            timeout=timeout,
            rename=self._ask_anew,
        )
        self.step, self.since, self.late = Step.ASK, 0.0, 0

    @property
    def over(self) -> bool:
        return self.step in {Step.HAVE, Step.STOP}

    def go_on(self) -> None:
        """Do what is next, if it is time for it."""
        if self.step is Step.WAIT:
            self._wait()
            return
        if self.turn.deadline <= self._now():
            self.late += 1
        reply = self._ask()
        if reply is None:  # refused: the caller is told so, and nothing may stay behind
            self.world.release(self.lock, self.turn.token)
            self.step = Step.STOP
        else:
            self.step, self.since = self.turn.answered(self.step, reply), self._now()
        self._look()

    def _wait(self) -> None:
        woken = self.world.hears(self.lock, self.turn.token)
        if woken or self._now() >= self.since + self.turn.pause:
            self.step = self.turn.waited(woken=woken)

    def _ask(self) -> Reply | None:
        self.turn.asked = self._now()
        token = self.turn.token
        if self.step is Step.CANCEL:
            return self.world.release(self.lock, token, Ending.CANCEL)
        if self.step is Step.CLAIM:
            return self.world.claim(self.lock, token, self.lease)
        return self.world.acquire(self.asker, self.turn.liveness)

    def _look(self) -> None:
        token, state = self.turn.token, self.world.state(self.lock)
        if self.late > AFTER_THE_END:
            self._broken(f"{token} is not done with {self.lock} after its time")
        if self.step is Step.STOP and token in state.standing:
            self._broken(f"{token} gave {self.lock} up, and stands there")
        if self.step is Step.HAVE and token not in state.valid(self.world.now):
            self._broken(f"{token} has {self.lock}, and does not hold it")

    def _broken(self, message: str) -> NoReturn:
        from support.script_model.invariants.facts import broken  # noqa: PLC0415  # they know the world

        broken("wait", message)

    def _asker(self) -> Asker:
        return self.world.new_asker(self.lock, attempt="", lease=self.lease, limit=self.limit)

    def _ask_anew(self) -> str:
        self.asker = self._asker()
        return self.asker.token

    def _now(self) -> float:
        return self.world.now_us / 1_000_000

"""The watchdog for asyncio: it renews leases in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from celery_singleton_lock.core import loop_tasks
from celery_singleton_lock.core.lock_steps import carry_out_async
from celery_singleton_lock.core.model import Renewal
from celery_singleton_lock.lock.lease import Lease
from celery_singleton_lock.lock.lease_watchdog import PATIENCE
from celery_singleton_lock.lock.renewals import Renewals


class AsyncWatchdog(Renewals):
    """Renews leases in the event loop of the locks, with a timer and one task for each round.

    Between rounds there is no task: ``asyncio.run`` would cancel it while locks are still held, and
    a loop that is closed without cancelling would leave it pending.

    Args:
        store: the store of the leases; its methods are coroutines.
    """

    def _begin(self) -> None:
        super()._begin()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def forget(self, token: str) -> None:
        """Stop renewing a lease. No renewal of it is sent after this returns.

        Wait for a renewal in flight, but not longer than :data:`PATIENCE`: a renewal that arrives
        after the release has no effect. The timer ends with the last lease.
        """
        self.drop(token)
        if self._loop is not asyncio.get_running_loop():
            return
        self._set_timer()
        if token in self._in_flight:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._renewals_ended.wait(), PATIENCE)

    def _start(self) -> None:
        """Use the running loop for renewals. The loops of a thread call this one after another."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._timer, self._task = loop, None, None
            self._renewals_ended = asyncio.Event()

    def _wake_for(self, lease: Lease) -> None:  # noqa: ARG002  # the timer depends on all leases
        self._set_timer()

    def _set_timer(self) -> None:
        """Start the timer for the next round. A running round does so when it ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is None or not self._leases or self._task is not None:
            return
        self._timer = self._loop.call_later(max(0.0, self._next_pause()), self._start_round)

    def _start_round(self) -> None:
        self._timer = None
        self._task = loop_tasks.start(self._run_safely(), "csl-watchdog")
        self._task.add_done_callback(self._round_ended)

    def _round_ended(self, task: asyncio.Task[None]) -> None:
        """Schedule the next round, also if this one was cancelled.

        A loop cancels all tasks at its end. Tasks with locks need renewals while they clean up.
        """
        if self._task is task:
            self._task = None
            if task.cancelled():
                self._back_off()
            self._set_timer()

    async def _run_safely(self) -> None:
        """Run one round. An error does not end the renewals (docs/traps.md, L12)."""
        try:
            self._count(await carry_out_async(self.round(), self._ask))
        except Exception as error:  # noqa: BLE001  # logged
            self._complain("the watchdog continues after an error", error=error)
            self._back_off()

    async def _ask(self, leases: Sequence[Lease]) -> Sequence[Renewal]:
        self._renewals_ended.clear()
        answers: Sequence[Renewal] = await self.store.extend([each.asked for each in leases])
        return answers

    def _end_renewals(self, batch: Iterable[tuple[Lease, bool]]) -> None:
        super()._end_renewals(batch)
        self._renewals_ended.set()

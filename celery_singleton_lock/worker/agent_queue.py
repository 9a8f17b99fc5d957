"""The queue of commands for a worker's agent. A command may have an earliest time."""

from __future__ import annotations

import math
import queue
from contextlib import suppress
from typing import Final, NamedTuple

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from celery_singleton_lock.worker.agent_commands import Command

RETRY: Final = 0.5
"""Seconds after which a command that Redis did not answer is repeated."""

REFUSED_RETRY: Final = 5.0
"""Seconds after which a command that Redis refused is repeated: an operator must act first."""

LONGEST_RETRY: Final = 60.0
"""Most seconds after which a command that failed because of a defect is repeated."""

BATCH: Final = 100
"""Most commands that one round takes."""


class Later(NamedTuple):
    """A command that is not due yet.

    Args:
        at: monotonic time before which it is not carried out.
        command: the command.
        tries: number of its failures.
    """

    at: float
    command: Command
    tries: int = 0


class AgentQueue:
    """Takes commands from any thread, and returns them to the agent's thread. ``put`` never blocks.

    Args:
        clock: source of monotonic seconds.

    Attributes:
        is_idle: whether all commands that were taken have been carried out, and the agent waits.
    """

    def __init__(self, clock: Clock) -> None:
        self.is_idle: bool = False
        self._clock = clock
        self._arrived: queue.SimpleQueue[Command | Later | None] = queue.SimpleQueue()
        self._later: list[Later] = []
        self._tries: dict[int, int] = {}

    def put(self, command: Command) -> None:
        """Append a command."""
        self._arrived.put(command)

    def put_off(self, command: Command, delay: float) -> None:
        """Append a command that is not carried out before ``delay`` seconds have passed."""
        self._arrived.put(Later(self._clock.monotonic() + delay, command))

    def try_again(self, command: Command, error: BaseException) -> None:
        """Append a failed command, to be repeated later. Call it in the agent's thread."""
        tries = self.tries(command)
        delay = (
            delay_after(error)
            if isinstance(error, BackendError)
            else min(RETRY * 2.0 ** min(tries, 10), LONGEST_RETRY)
        )
        self._arrived.put(Later(self._clock.monotonic() + delay, command, tries + 1))

    def tries(self, command: Command) -> int:
        """Return the number of earlier failures of a command of this round."""
        return self._tries.get(id(command), 0)

    def wake(self) -> None:
        """End the wait of :meth:`take`."""
        self._arrived.put(None)

    def take(self, pause: float) -> list[Command]:
        """Return the delayed commands that are due, then those that have arrived.

        Args:
            pause: most seconds to wait for a command to arrive.
        """
        arrived = self._take_arrived(pause)
        return [*self._due(), *arrived]

    def _take_arrived(self, pause: float) -> list[Command]:
        commands: list[Command] = []
        with suppress(queue.Empty):
            each = self._wait(pause) if pause > 0 else self._arrived.get_nowait()
            while True:
                if isinstance(each, Later):
                    self._later.append(each)
                elif each is not None:
                    commands.append(each)
                if len(commands) == BATCH:
                    break
                each = self._arrived.get_nowait()
        return commands

    def _wait(self, pause: float) -> Command | Later | None:
        self.is_idle = True
        try:
            return self._arrived.get(timeout=pause)
        finally:
            self.is_idle = False

    def _due(self) -> list[Command]:
        now = self._clock.monotonic()
        due = [each for each in self._later if each.at <= now]
        self._later = [each for each in self._later if each.at > now]
        self._tries = {id(each.command): each.tries for each in due if each.tries}
        return [each.command for each in due]

    def next_at(self) -> float:
        """Return the monotonic time at which the next delayed command is due; ``inf`` if none."""
        return min((each.at for each in self._later), default=math.inf)


def delay_after(error: BackendError) -> float:
    """Return the seconds after which a call that failed with this error is repeated."""
    return RETRY if isinstance(error, BackendUnreachable) else REFUSED_RETRY

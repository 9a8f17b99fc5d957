"""Start and end of each task: one slot per task in a file that driver and pool processes map.

To write its start and end costs a task less than a microsecond and no connection, so the
measurement does not change the result. ``time.monotonic`` is the same in all processes of a
machine.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_HEAD = 8  # the first byte opens the gate
_SLOT = struct.Struct("<ddII")
_POLL = 0.005


@dataclass(frozen=True)
class Ran:
    """One task: when, how often and in which process its body ran."""

    slot: int
    start: float
    end: float
    runs: int
    pid: int


class Board:
    """The slots.

    Args:
        path: the file; made and zeroed by :meth:`create`.
    """

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._complete = 0

    @classmethod
    def create(cls, path: str | Path, slots: int) -> Board:
        Path(path).write_bytes(bytes(_HEAD + slots * _SLOT.size))
        return cls(path)

    # -- in a task --------------------------------------------------------------------------------

    def begin(self, slot: int, pid: int) -> None:
        at = _HEAD + slot * _SLOT.size
        runs = _SLOT.unpack_from(self._map, at)[2]
        _SLOT.pack_into(self._map, at, time.monotonic(), 0.0, runs + 1, pid)

    def end(self, slot: int) -> None:
        struct.pack_into("<d", self._map, _HEAD + slot * _SLOT.size + 8, time.monotonic())

    def await_gate(self) -> None:
        while not self._map[0]:
            time.sleep(0.001)

    # -- in the driver ----------------------------------------------------------------------------

    def open_gate(self) -> None:
        self._map[0] = 1

    def clear(self) -> None:
        self._map[:] = bytes(len(self._map))
        self._complete = 0

    def ran(self, slot: int) -> Ran:
        return Ran(slot, *_SLOT.unpack_from(self._map, _HEAD + slot * _SLOT.size))

    def complete(self, count: int) -> int:
        """Return how many of the first ``count`` slots have ended without a gap before them."""
        while self._complete < count and self.ran(self._complete).end:
            self._complete += 1
        return self._complete

    def await_start(self, slot: int, timeout: float) -> Ran:
        deadline = time.monotonic() + timeout
        while not (ran := self.ran(slot)).start:
            if time.monotonic() > deadline:
                msg = f"task {slot} did not start within {timeout:g} s"
                raise TimeoutError(msg)
            time.sleep(_POLL)
        return ran

    def await_all(
        self, count: int, timeout: float, alive: Callable[[], bool] = lambda: True
    ) -> list[Ran]:
        """Wait until the first ``count`` tasks have ended, or the worker has."""
        began = time.monotonic()
        while self.complete(count) < count:
            waited = time.monotonic() - began
            if waited > timeout or not alive():
                msg = f"{self.complete(count)} of {count} tasks ended in {waited:.1f} s"
                raise TimeoutError(msg)
            time.sleep(_POLL)
        return [self.ran(slot) for slot in range(count)]

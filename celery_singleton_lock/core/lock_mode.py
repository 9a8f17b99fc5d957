"""The mode of each task: the declared one, or the one that an operator has switched to (pure).

There are three modes. In ``enforce`` tasks take their locks. In ``observe`` they run without locks,
and a report records which would have been blocked. In ``off`` they run without locks, and nothing
is sent to Redis.

Switches in Redis change the modes while workers run. The switch of a task replaces the mode that
the task declares. The switch for all tasks can only relax modes: it makes no task take its lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ENFORCE: Final = "enforce"
OBSERVE: Final = "observe"
OFF: Final = "off"

MODES: Final = (ENFORCE, OBSERVE, OFF)
"""From strict to lax."""

ALL: Final = "*"
"""Name of the switch that applies to all tasks."""


def laxer(one: str, other: str) -> str:
    """Return the laxer of two modes."""
    return max(one, other, key=MODES.index)


def relaxed_by(switches: Mapping[str, str]) -> str:
    """Return the tasks that run without their locks because of a switch, each with its mode.

    Args:
        switches: task, or ``*``, -> mode.

    Returns:
        Such as ``all tasks (off), shop.settle (observe)``; empty if no switch relaxes a mode.
    """
    return ", ".join(
        f"{'all tasks' if task == ALL else f'task {task}'} ({mode})"
        for task, mode in sorted(switches.items())
        if mode in {OBSERVE, OFF}
    )


class Modes:
    """The modes of one worker's tasks.

    An operator can also order a switch through the broker. The order takes effect at once, and ends
    when the switch in Redis has the same mode. So modes can be relaxed while the locks' Redis does
    not answer.

    Args:
        declared: task -> the mode that it declares, or the setting.
    """

    def __init__(self, declared: Mapping[str, str]) -> None:
        self._declared = dict(declared)
        self._switches: dict[str, str] = {}
        self._ordered: dict[str, str | None] = {}
        self._now = self._resolved()

    def of(self, task: str) -> str:
        """Return the mode of a task."""
        return self._now.get(task, ENFORCE)

    def relaxed(self) -> list[str]:
        """Return the tasks that do not take their locks now."""
        return sorted(task for task, mode in self._now.items() if mode != ENFORCE)

    def switches(self) -> dict[str, str]:
        """Return the switches now: task, or ``*``, -> mode."""
        ordered = self._ordered
        found = {**self._switches, **{task: mode for task, mode in ordered.items() if mode}}
        return {task: mode for task, mode in found.items() if ordered.get(task, mode) is not None}

    def apply(self, switches: Mapping[str, str]) -> list[str]:
        """Apply the switches in Redis.

        Args:
            switches: task, or ``*``, -> mode. An unknown mode, perhaps of a later version, is
                ignored.

        Returns:
            The tasks whose mode has changed.
        """
        self._switches = {task: mode for task, mode in switches.items() if mode in MODES}
        return self._resolve()

    def order(self, task: str, mode: str | None) -> list[str]:
        """Apply a switch in this worker, until :meth:`end_order`.

        Args:
            task: name, or ``*``.
            mode: None removes the switch.

        Returns:
            The tasks whose mode has changed.
        """
        self._ordered = {**self._ordered, task: mode}
        return self._resolve()

    def is_ordered(self, task: str, mode: str | None) -> bool:
        """Return whether this is still the last order for a task."""
        return task in self._ordered and self._ordered[task] == mode

    def end_order(self, task: str, mode: str | None) -> None:
        """End an order, because the switch in Redis now has the same mode."""
        if self.is_ordered(task, mode):
            self._ordered = {name: m for name, m in self._ordered.items() if name != task}
            kept = {name: m for name, m in self._switches.items() if name != task}
            self._switches = kept if mode is None else {**kept, task: mode}

    def _resolve(self) -> list[str]:
        before, self._now = self._now, self._resolved()
        return sorted(task for task, mode in self._now.items() if before[task] != mode)

    def _resolved(self) -> dict[str, str]:
        switches = self.switches()
        for_all = switches.get(ALL, ENFORCE)
        return {
            task: laxer(switches.get(task, mode), for_all) for task, mode in self._declared.items()
        }

"""Which tasks keep their locks now: as declared, and as switched for the whole fleet (pure).

There are three modes. ``enforce`` keeps locks. ``observe`` runs tasks without, and writes down what
would have blocked. ``off`` runs tasks without, and asks Redis nothing.

Two switches in Redis change them while workers run. The switch of a task replaces what the task
declares. The switch for all tasks only relaxes: it cannot have a lock kept that nobody asked for.
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
"""Stands for all tasks where a task's name is expected."""


def laxer(one: str, other: str) -> str:
    """Return which of two modes asks for less."""
    return max(one, other, key=MODES.index)


class Modes:
    """The modes of one worker's tasks.

    What an operator orders through the broker counts at once, and until the switch in Redis has it
    too: so it can be relaxed while the locks' Redis does not answer.

    Args:
        declared: task -> the mode that it declares, or that the settings say.
    """

    def __init__(self, declared: Mapping[str, str]) -> None:
        """Begin with what is declared."""
        self._declared = dict(declared)
        self._switches: dict[str, str] = {}
        self._ordered: dict[str, str | None] = {}
        self._now = self._resolved()

    def of(self, task: str) -> str:
        """Return the mode of a task."""
        return self._now.get(task, ENFORCE)

    def relaxed(self) -> list[str]:
        """Return the tasks that do not keep their locks now."""
        return sorted(task for task, mode in self._now.items() if mode != ENFORCE)

    def switches(self) -> dict[str, str]:
        """Return what is switched now: task, or ``*``, -> mode."""
        ordered = self._ordered
        found = {**self._switches, **{task: mode for task, mode in ordered.items() if mode}}
        return {task: mode for task, mode in found.items() if ordered.get(task, mode) is not None}

    def hear(self, switches: Mapping[str, str]) -> list[str]:
        """Take what the switches in Redis say.

        Args:
            switches: task, or ``*``, -> mode. What is no mode is left out: it may be a later one's.

        Returns:
            The tasks whose mode has changed.
        """
        self._switches = {task: mode for task, mode in switches.items() if mode in MODES}
        return self._resolve()

    def order(self, task: str, mode: str | None) -> list[str]:
        """Switch here, until :meth:`settle`.

        Args:
            task: name, or ``*``.
            mode: None takes the switch away.

        Returns:
            The tasks whose mode has changed.
        """
        self._ordered = {**self._ordered, task: mode}
        return self._resolve()

    def is_ordered(self, task: str, mode: str | None) -> bool:
        """Return whether this is still the last order for a task."""
        return task in self._ordered and self._ordered[task] == mode

    def settle(self, task: str, mode: str | None) -> None:
        """Note that the switch in Redis has what was ordered."""
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

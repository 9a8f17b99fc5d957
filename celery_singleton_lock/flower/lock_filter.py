"""Selects and sorts the locks of a list, and says what is wrong with each (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from celery_singleton_lock.admin import ORDERS, Glance
from celery_singleton_lock.admin.why_sentences import seconds, short
from celery_singleton_lock.core.lock_view import HELD_AFTER, Holder
from celery_singleton_lock.message_text import natural, number_of
from celery_singleton_lock.store.operator.listing import fits

SOON: Final = 5.0
"""Seconds within which a free lock is granted to its first waiter, unless something is wrong."""

STATES: Final = ("stuck", "dead", "unserved", "paused", "waiting", "held")
"""States by which a list can be filtered. A lock can have several."""

OF_WAITERS: Final = frozenset({"", "stuck", "unserved", "waiting"})
"""States (empty: no filter) for which locks without waiters can be omitted."""

STUCK: Final = 3
"""Level of a lock whose waiters wait for something that may not end by itself."""


class Trouble(NamedTuple):
    """The cause for which tasks wait for a lock, and whether it ends by itself.

    Args:
        level: 0: nothing waits; 1: its waiters wait for holders that are alive; 2: somebody should
            look at it, though nobody waits; 3 (:data:`STUCK`): its waiters are stuck.
        kind: ``paused``, ``dead``, ``unserved``, ``idle``, ``waiting`` or ``held``.
    """

    level: int
    kind: str


def trouble_of(lock: Glance) -> Trouble:
    """Return the trouble of a lock. Fast: it is called for each of 100,000 locks.

    Args:
        lock: the lock, with :attr:`Holder.silent` set for holders whose workers are silent.
    """
    waits = bool(lock.waiting or lock.adrift or lock.aside)
    if lock.paused:
        return _PAUSED[waits]
    for holder in lock.holders:
        if holder.silent:
            return _DEAD[waits]
    if lock.adrift:
        return _UNSERVED
    if not waits:
        return _HELD
    if lock.aside:
        return _WAITING
    held_back = lock.rated or lock.grouped or lock.closed_for
    is_free = lock.held < max(1, lock.limit) and not held_back
    return _IDLE if is_free and lock.oldest > SOON else _WAITING


_PAUSED: Final = (Trouble(2, "paused"), Trouble(STUCK, "paused"))
_DEAD: Final = (Trouble(2, "dead"), Trouble(STUCK, "dead"))
_UNSERVED: Final = Trouble(STUCK, "unserved")
_IDLE: Final = Trouble(STUCK, "idle")
_WAITING: Final = Trouble(1, "waiting")
_HELD: Final = Trouble(0, "held")


def sentence_of(lock: Glance) -> str:
    """Return as a sentence why tasks wait for a lock, and what to do; empty if none waits."""
    waiters = lock.waiting + lock.adrift + lock.aside
    match trouble_of(lock).kind:
        case "paused":
            ends = f" for another {seconds(lock.paused_for)}" if lock.paused_for else ""
            kept = f"{_wait(waiters)} until it is resumed" if waiters else "Nobody waits for it"
            return f"An operator has paused it{ends}. {kept}."
        case "dead":
            return _of_dead(next(holder for holder in lock.holders if holder.silent))
        case "unserved":
            return (
                "No live worker that locks the task consumes the queue of "
                f"{number_of(lock.adrift, 'task')}. Start such a worker."
            )
        case "idle":
            return (
                f"A permit is free, and the first task has waited {seconds(lock.oldest)}: its "
                "Redis may grant nothing yet, or no live worker grants it. See locks doctor."
            )
        case "waiting":
            return _of_aside(lock) if lock.aside else _of_waiting(lock)
        case _:
            return ""


def _of_dead(holder: Holder) -> str:
    return (
        f"{short(holder)} has shown no sign of life for {seconds(holder.silent)}. If it is dead, "
        f"its permit is free in {seconds(holder.expires_in)} at the latest."
    )


def _of_aside(lock: Glance) -> str:
    return (
        f"{number_of(lock.aside, 'task')} out of the queue: settling (lock_debounce), "
        "following another task (lock_on_duplicate), delayed, or leaving."
    )


def _of_waiting(lock: Glance) -> str:
    if lock.closed_for:
        return f"A task or client has closed it for another {seconds(lock.closed_for)}."
    if lock.rated:
        return "A permit is free. The rate of the lock says when the next task may start."
    if lock.grouped:
        return "A permit is free. The groups that wait may be at their limits (lock_fair_limit)."
    if not lock.holders:
        return "The next task starts at once."
    first, more = lock.holders[0], lock.held - 1
    others = f" and {number_of(more, 'other')}" if more else ""
    if first.state == HELD_AFTER:
        return f"Stays held for another {seconds(first.expires_in)} (lock_hold_for)."
    return f"Behind {short(first)}{others}."


def _wait(number: int) -> str:
    return f"{number_of(number, 'task')} {'waits' if number == 1 else 'wait'}"


def states_of(lock: Glance) -> list[str]:
    """Return the states that a lock has."""
    level, kind = trouble_of(lock)
    found = ["stuck"] if level == STUCK else []
    if kind == "dead" or (kind == "paused" and any(holder.silent for holder in lock.holders)):
        found.append("dead")
    if lock.adrift:
        found.append("unserved")
    if lock.paused:
        found.append("paused")
    if lock.waiting or lock.adrift or lock.aside:
        found.append("waiting")
    if lock.held:
        found.append("held")
    return found


PAGE_ORDERS: Final[Mapping[str, Callable[[Glance], Any]]] = {
    "trouble": lambda lock: (
        -trouble_of(lock).level,
        -(lock.waiting + lock.adrift),
        -lock.oldest,
        natural(lock.name),
    ),
    **ORDERS,
}
"""Sort orders: those of the commands, and ``trouble``: stuck locks first."""


class ListQuery(NamedTuple):
    """Selects and sorts locks.

    Args:
        text: part of the name, or a pattern with ``*?[`` for the whole name; or the same for the
            name of a holder's task; or the beginning of a task's id. Empty: all locks.
        order: one of :data:`PAGE_ORDERS`.
        state: one of :data:`STATES`; empty: any.
        longer: seconds for which the first waiter has waited at least. A lock with tasks that no
            worker takes is always selected: their age is not known.
    """

    text: str = ""
    order: str = "waiting"
    state: str = ""
    longer: float = 0.0

    @property
    def key(self) -> Callable[[Glance], Any]:
        """The sort key."""
        return PAGE_ORDERS[self.order]

    @property
    def can_omit_unwaited(self) -> bool:
        """Whether the list of a large Redis may be made without the locks that have no waiters."""
        return not self.text and (self.longer > 0 or self.state in OF_WAITERS)

    def check(self) -> None:
        """Refuse unknown names.

        Raises:
            ValueError: no order, or no state, has that name.
        """
        if self.order not in PAGE_ORDERS:
            msg = f"order is {self.order!r}: use one of {', '.join(PAGE_ORDERS)}."
            raise ValueError(msg)
        if self.state and self.state not in STATES:
            msg = f"state is {self.state!r}: use one of {', '.join(STATES)}."
            raise ValueError(msg)

    def finds(self, lock: Glance, named: Collection[str] = ()) -> bool:
        """Return whether a lock matches the text.

        Args:
            lock: the lock.
            named: names of locks for which a task waits whose id matches.
        """
        text = self.text
        return (
            not text
            or fits(lock.name, text)
            or lock.name in named
            or any(fits(h.task, text) or h.task_id.startswith(text) for h in lock.holders)
        )

    def selects(self, lock: Glance) -> bool:
        """Return whether a lock that matches the text has the state, and waits long enough."""
        if self.longer and not (lock.adrift or (lock.waiting and lock.oldest >= self.longer)):
            return False
        return not self.state or self.state in states_of(lock)

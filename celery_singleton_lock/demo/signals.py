# it waits in seconds of the real clock
"""How the demo ends when somebody wants it to: it unwinds, whatever it is at, and once."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Final, NoReturn

TICK: Final = 0.02
"""Seconds between two looks at what the demo waits for."""

ENDING: Final = [
    number for number in signal.Signals if number.name in {"SIGINT", "SIGTERM", "SIGHUP"}
]
"""Signals on which the demo cleans up and ends; all those of them that this system has."""

_heard: list[int] = []
"""The signal that is to be heeded."""


class Interrupted(BaseException):
    """Somebody wants the demo to end.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        """Keep the number, which the exit code tells."""
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Unwind on the first SIGINT, SIGTERM or SIGHUP, and ignore those that follow.

    The second Ctrl-C of an impatient person would otherwise strike while processes are being ended.
    A signal that was ignored before (``nohup``) stays so.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    heeded = [number for number in ENDING if before[number] != signal.SIG_IGN]

    def unwind(number: int, _frame: object) -> NoReturn:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        _heard.append(number)
        raise Interrupted(number)

    _heard.clear()
    for number in heeded:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep signals until the end of the block: a process that starts now must not get out of sight.

    ``subprocess.Popen`` that is interrupted has made a child that nobody knows. Masks would not do:
    the child inherits them.
    """
    kept: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDING}
    heeded = [number for number in ENDING if callable(before[number])]
    for each in heeded:
        signal.signal(each, lambda number, _frame: kept.append(number))
    try:
        yield
    finally:
        for each in heeded:
            signal.signal(each, before[each])
        for number in kept:
            signal.raise_signal(number)


def tick() -> None:
    """Pause between two looks.

    Raises:
        Interrupted: there was a signal, and its exception has got lost. A handler runs between any
            two steps of the main thread. If that is in a finalizer or a callback of a weak
            reference, Python prints what it raises, and goes on.
    """
    if _heard:
        raise Interrupted(_heard[0])
    time.sleep(TICK)

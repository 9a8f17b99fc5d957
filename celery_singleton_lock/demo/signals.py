"""Signals that end the demo. They raise an exception in the main thread, so that it cleans up."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

TICK: Final = 0.02
"""Seconds between two checks of a condition."""

ENDING: Final = [
    number for number in signal.Signals if number.name in {"SIGINT", "SIGTERM", "SIGHUP"}
]
"""Signals on which the demo cleans up and ends, as far as this system has them."""

_received: list[int] = []
"""The signal that ends the demo."""


class Interrupted(BaseException):
    """A signal has ended the demo.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        """Store the number, for the exit status."""
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise :class:`Interrupted` on the first SIGINT, SIGTERM or SIGHUP, and ignore further ones.

    Otherwise a second Ctrl-C would interrupt the clean-up. A signal that was ignored before
    (``nohup``) stays ignored.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    handled = [number for number in ENDING if before[number] != signal.SIG_IGN]

    def interrupt(number: int, _frame: object) -> NoReturn:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        _received.append(number)
        raise Interrupted(number)

    _received.clear()
    show = sys.unraisablehook
    sys.unraisablehook = lambda lost: _show_unless_interrupted(lost, show)
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
        sys.unraisablehook = show


def _show_unless_interrupted(
    lost: sys.UnraisableHookArgs, show: Callable[[sys.UnraisableHookArgs], object]
) -> None:
    """Print a lost exception, but not that of the handler: :func:`tick` raises it again."""
    if not isinstance(lost.exc_value, Interrupted):
        show(lost)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals until the end of the block, in which a process is started.

    If ``subprocess.Popen`` is interrupted, it may have started a child that is never ended. Signal
    masks do not help, since the child inherits them.
    """
    kept: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDING}
    handled = [number for number in ENDING if callable(before[number])]
    for each in handled:
        signal.signal(each, lambda number, _frame: kept.append(number))
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, before[each])
        for number in kept:
            signal.raise_signal(number)


def tick() -> None:
    """Pause between two checks.

    Raises:
        Interrupted: a signal was received, and its exception was lost. If the handler runs during
            a finalizer or a callback of a weak reference, such as those of an import, Python does
            not pass the exception on.
    """
    if _received:
        raise Interrupted(_received[0])
    time.sleep(TICK)

"""Signals that end the demo."""

from __future__ import annotations

import signal
import sys
import weakref

import pytest

from celery_singleton_lock.demo.signals import Interrupted, interruptible, tick, undisturbed


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request):
    before = signal.getsignal(request.param)
    signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, before)


def interrupted_by(act):
    """Call ``act`` where signals interrupt; return the number of the signal that did."""
    with pytest.raises(Interrupted) as caught, interruptible():
        act()
    return caught.value.number


def test_the_first_signal_interrupts_and_further_ones_are_ignored(number):
    """Afterwards the handlers are restored."""

    def signal_twice():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    assert interrupted_by(signal_twice) == number
    assert signal.getsignal(number) is before


def test_a_signal_during_a_finalizer_interrupts_at_the_next_tick(number, monkeypatch):
    """In a finalizer, Python would only print the exception of the handler: a traceback."""

    class Ended:
        def __del__(self):
            signal.raise_signal(number)

    def lose_the_exception():
        ended = Ended()
        del ended
        assert printed == []
        tick()

    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    assert interrupted_by(lose_the_exception) == number


def test_a_signal_during_a_callback_of_an_import_leaves_no_traceback(number, monkeypatch):
    """Imports watch their locks by weak references, and the demo imports until it ends."""

    class Watched:
        """Has a weak reference."""

    def lose_the_exception():
        watched = Watched()
        watch = weakref.ref(watched, lambda _: signal.raise_signal(number))
        del watched
        assert watch() is None
        assert printed == []
        tick()

    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    assert interrupted_by(lose_the_exception) == number
    assert sys.unraisablehook == printed.append


def test_errors_of_other_finalizers_are_still_printed(number, monkeypatch):
    class Ended:
        def __del__(self):
            raise ValueError

    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with interruptible():
        ended = Ended()
        del ended
    assert [type(each.exc_value) for each in printed] == [ValueError]


def test_a_signal_while_a_process_starts_is_delayed(number):
    """Afterwards the process is known, and can be ended."""
    steps = []

    def start():
        with undisturbed():
            signal.raise_signal(number)
            steps.append("started")

    assert interrupted_by(start) == number
    assert steps == ["started"]


def test_an_interrupted_run_does_not_affect_the_next(number):
    assert interrupted_by(lambda: signal.raise_signal(number)) == number
    with interruptible():
        tick()

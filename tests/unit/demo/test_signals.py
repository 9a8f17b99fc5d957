"""How the demo heeds a signal."""

from __future__ import annotations

import signal
import sys

import pytest

from celery_singleton_lock.demo.signals import Interrupted, interruptible, tick, undisturbed


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request):
    before = signal.getsignal(request.param)
    signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, before)


def played(act):
    """Act where signals interrupt; return the one that did."""
    with pytest.raises(Interrupted) as caught, interruptible():
        act()
    return caught.value.number


def test_a_signal_unwinds_once_and_those_that_follow_are_ignored(number):
    """And the handlers are as before."""

    def impatient():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    assert played(impatient) == number
    assert signal.getsignal(number) is before


def test_a_signal_that_strikes_in_a_finalizer_is_heeded_a_moment_later(number, monkeypatch):
    """There, Python prints what the handler raises, and goes on."""

    class Ended:
        def __del__(self):
            signal.raise_signal(number)

    def lose_it():
        ended = Ended()
        del ended
        assert [type(each.exc_value) for each in printed] == [Interrupted]
        tick()

    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    assert played(lose_it) == number


def test_a_signal_while_a_process_starts_waits_until_it_has(number):
    """What has been started is known by then, and can be ended."""
    steps = []

    def start():
        with undisturbed():
            signal.raise_signal(number)
            steps.append("started")

    assert played(start) == number
    assert steps == ["started"]


def test_a_play_that_was_interrupted_leaves_nothing_to_the_next(number):
    assert played(lambda: signal.raise_signal(number)) == number
    with interruptible():
        tick()

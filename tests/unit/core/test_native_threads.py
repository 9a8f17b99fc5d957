"""The system's threads, as the watchdog needs them."""

from __future__ import annotations

import sys
import threading

import pytest

from celery_singleton_lock.core import native_threads


@pytest.fixture
def go_on():
    """Lets a thread end; set at the end of each test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def thread(go_on):
    """A thread that waits to be told to go on."""
    return native_threads.Thread(target=lambda: go_on.wait(60), name="patient", daemon=True)


def test_a_thread_lives_from_its_start_to_its_end(thread, go_on):
    """And bears its name, for people."""
    assert thread.name == "patient"
    assert not thread.is_alive()
    thread.start()
    assert thread.is_alive()
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_join_waits_no_longer_than_its_timeout_and_may_be_repeated(thread, go_on):
    """A thread that does not end keeps nobody, and whoever waits again gets its end."""
    thread.start()
    thread.join(0.02)
    assert thread.is_alive()
    go_on.set()
    thread.join(60)
    thread.join(60)
    assert not thread.is_alive()


def test_a_thread_that_cannot_be_started_does_not_look_alive(thread, monkeypatch):
    """The system has none left; the next watch tries again."""

    def none_left(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(native_threads, "original", lambda _module, _name: none_left)
    with pytest.raises(RuntimeError):
        thread.start()
    assert not thread.is_alive()


def test_a_thread_whose_work_raises_has_ended():
    """Who waits for it goes on."""
    thread = native_threads.Thread(target=sys.exit, name="broken", daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_wait_without_a_time_ends_when_it_is_notified():
    """And not before."""
    changed, order = native_threads.Condition(native_threads.RLock()), []

    def wake():
        with changed:
            order.append("woken")
            changed.notify()

    with changed:
        thread = native_threads.Thread(target=wake, name="waker", daemon=True)
        thread.start()
        assert changed.wait() is True
        order.append("goes on")
    assert order == ["woken", "goes on"]


def test_a_waiter_that_is_late_and_notified_at_once_is_forgotten_once():
    """Between its time-out and its removal somebody may have taken it off the list."""
    changed = native_threads.Condition(native_threads.RLock())

    class Taken(list):
        def remove(self, _waiter):
            raise ValueError

    changed._waiters = Taken()
    with changed:
        assert changed.wait(0.01) is False


@pytest.mark.parametrize(("timeout", "told"), [(None, -1), (0.01, 0.01)])
def test_a_wait_without_a_time_has_none(timeout, told, monkeypatch):
    """The system's lock writes that as -1."""
    waits, real = [], native_threads.original

    class Lock:
        """A lock that is given at once, and notes for how long one would have waited."""

        def acquire(self, *wait):
            waits.append(wait)
            return True

    monkeypatch.setattr(
        native_threads,
        "original",
        lambda module, name: Lock if name == "allocate_lock" else real(module, name),
    )
    changed = native_threads.Condition(native_threads.RLock())
    with changed:
        assert changed.wait(timeout) is True
    assert waits == [(), (True, told)]

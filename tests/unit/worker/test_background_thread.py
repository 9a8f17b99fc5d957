"""Background threads: no error ends one unseen, and each tells when its last round began."""

from __future__ import annotations

import threading

import pytest

from celery_singleton_lock.worker import background_thread as background
from celery_singleton_lock.worker.background_thread import BackgroundThread, ThreadGroup
from celery_singleton_lock.worker.loop_channel import Mailbox
from celery_singleton_lock.worker.publisher import Outbox
from celery_singleton_lock.worker.pool_feeder import Usher
from support.waiting import eventually


class Killed(BaseException):
    """What no loop catches: an asynchronous exception, for example."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(background, "PAUSE", 0.01)


def break_once(monkeypatch, thing, step, error):
    """Have the next call of a step raise; return the list from which the error then is gone."""
    real, failures = getattr(thing, step), [error]

    def broken(*args, **kwargs):
        if failures:
            raise failures.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(thing, step, broken)
    return failures


@pytest.mark.parametrize("error", [KeyError("a bug"), SystemExit(1)], ids=["bug", "exit"])
def test_an_error_is_logged_and_the_next_round_follows(caplog, error):
    rounds, failures = [], [error]

    def one_round():
        rounds.append(threading.current_thread())
        if failures:
            raise failures.pop()
        return len(rounds) < 3

    ended = []
    thread = BackgroundThread("tested", one_round, at_end=lambda: ended.append(True))
    thread.start()
    thread.join(10)
    eventually(lambda: ended)
    assert len(rounds) == 3
    assert len(set(rounds)) == 1
    assert thread.errors == 1
    assert "the thread tested goes on after" in caplog.text
    thread.start()  # has ended by itself: that stays
    assert not thread.is_alive()
    assert thread.last_round() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_told_of_and_started_again(caplog, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    killing, goes_on, never = [Killed()], threading.Event(), threading.Event()

    def one_round():
        if killing:
            raise killing.pop()
        goes_on.set()
        return not never.wait(0.01)

    thread = BackgroundThread("tested", one_round)
    group = ThreadGroup(thread)
    group.look_after()
    assert not thread.was_started()  # nobody has needed it yet
    thread.start()
    eventually(lambda: not thread.is_alive())
    assert group.last_rounds()["tested"] >= 0
    group.look_after()
    group.look_after()
    assert goes_on.wait(10)
    never.set()
    thread.join(10)
    assert thread.restarts == 1
    told = [record for record in caplog.records if "has died" in record.message]
    assert [record.levelname for record in told] == ["ERROR"]


def test_a_thread_that_hangs_is_told_from_one_that_waits_for_work():
    hangs, works, goes_on, ends = (threading.Event() for _ in range(4))

    def one_round():
        with thread.idle():
            works.wait(10)
        hangs.set()
        goes_on.wait(10)
        return not ends.is_set()

    thread = BackgroundThread("tested", one_round)
    thread.start()
    eventually(lambda: thread.last_round() is None)
    works.set()
    assert hangs.wait(10)
    first = thread.last_round()
    eventually(lambda: thread.last_round() > first)
    ends.set()
    goes_on.set()
    thread.join(10)


def test_a_mailbox_of_which_the_wait_fails_makes_its_calls_all_the_same(monkeypatch, caplog):
    """Nobody was notified of anything in a worker without an event loop from then on."""
    mailbox, called = Mailbox(), threading.Event()
    failures = break_once(monkeypatch, mailbox, "_serve_next", ValueError("filedescriptor"))
    monkeypatch.setattr(mailbox.thread, "_one_round", mailbox._serve_next)
    mailbox.thread.start()
    mailbox.post(called.set)
    assert called.wait(10)
    assert failures == []
    mailbox.close()
    mailbox.thread.join(10)
    assert "singleton-lock-mailbox goes on" in caplog.text


class Room:
    """A pool that fails when it is asked for room."""

    @property
    def limit(self):
        raise KeyError("limit")


class Request:
    landed = False


def test_a_request_goes_to_a_pool_that_cannot_tell_its_room(caplog):
    """It was dropped, and with the thread all requests behind it."""
    sent, requests = [], [Request(), Request()]
    usher = Usher(Room(), sent.append)
    for request in requests:
        usher(request)
    usher.thread.start()
    eventually(lambda: len(sent) == 2)
    assert sent == requests
    usher.close()
    usher.thread.join(10)


def test_an_outbox_goes_on_after_a_listener_that_fails(caplog):
    """A failing answer to one message must not keep the next ones from the broker."""

    class Broker:
        def close(self):
            closed.set()

    def fail(error):
        raise KeyError("a bug of ours")

    outbox, sent, closed = Outbox(Broker()), [], threading.Event()
    outbox.put(lambda publisher: None, fail)
    outbox.put(sent.append, lambda error: None)
    eventually(lambda: sent)
    outbox.close(10)
    assert closed.wait(10)
    assert "singleton-lock-outbox goes on" in caplog.text

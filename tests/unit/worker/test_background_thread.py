"""Background threads: no error ends one unseen, and each tells when its last round began."""

from __future__ import annotations

import threading

import pytest

from celery_singleton_lock.worker import background_thread
from celery_singleton_lock.worker.background_thread import BackgroundThread, ThreadGroup
from celery_singleton_lock.worker.loop_channel import LoopChannel
from celery_singleton_lock.worker.message_stage import Stage
from celery_singleton_lock.worker.pool_feeder import PoolFeeder
from celery_singleton_lock.worker.publisher import Outbox
from support.waiting import eventually


class Killed(BaseException):
    """What no loop catches: an asynchronous exception, for example."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(background_thread, "PAUSE", 0.01)


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
    thread.join(60)
    eventually(lambda: ended)
    assert len(rounds) == 3
    assert len(set(rounds)) == 1
    assert thread.errors == 1
    assert "the thread tested continues after" in caplog.text
    thread.start()  # has ended by itself: that stays
    assert not thread.is_alive()
    assert thread.last_round() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_reported_and_started_again(caplog, monkeypatch):
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
    assert goes_on.wait(60)
    never.set()
    thread.join(60)
    assert thread.restarts == 1
    told = [record for record in caplog.records if "has died" in record.message]
    assert [record.levelname for record in told] == ["ERROR"]


def test_a_worker_without_room_for_a_thread_ends_all_the_same(monkeypatch):
    """To join a thread that could not be started is an error in Python; a later start works."""

    def full(_thread):
        raise RuntimeError("can't start new thread")

    rounds = []
    thread = BackgroundThread("tested", lambda: rounds.append(True))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.start()
    thread.join(1)
    thread.start()
    thread.join(60)
    assert rounds == [True]


def test_a_hanging_thread_is_distinguished_from_an_idle_one():
    hangs, works, goes_on, ends = (threading.Event() for _ in range(4))

    def one_round():
        with thread.idle():
            works.wait(60)
        hangs.set()
        goes_on.wait(60)
        return not ends.is_set()

    thread = BackgroundThread("tested", one_round)
    thread.start()
    eventually(lambda: thread.last_round() is None)
    works.set()
    assert hangs.wait(60)
    first = thread.last_round()
    eventually(lambda: thread.last_round() > first)
    ends.set()
    goes_on.set()
    thread.join(60)


def test_a_loop_channel_of_which_the_wait_fails_makes_its_calls_all_the_same(monkeypatch, caplog):
    """Nobody was notified of anything in a worker without an event loop from then on."""
    loop_channel, called = LoopChannel(), threading.Event()
    failures = break_once(monkeypatch, loop_channel, "_serve_next", ValueError("filedescriptor"))
    monkeypatch.setattr(loop_channel.thread, "_one_round", loop_channel._serve_next)
    loop_channel.thread.start()
    loop_channel.post(called.set)
    assert called.wait(60)
    assert failures == []
    loop_channel.close()
    loop_channel.thread.join(60)
    assert "singleton-lock-loop-channel continues" in caplog.text


class Room:
    """A pool that fails when it is asked for room."""

    @property
    def limit(self):
        raise KeyError("limit")


class Request:
    stage = Stage.DISPATCHED


def test_a_request_goes_to_a_pool_with_an_unknown_number_of_free_slots(caplog):
    """It was dropped, and with the thread all requests behind it."""
    sent, requests = [], [Request(), Request()]
    pool_feeder = PoolFeeder(Room(), sent.append, print)
    for request in requests:
        pool_feeder(request)
    pool_feeder.thread.start()
    eventually(lambda: len(sent) == 2)
    assert sent == requests
    pool_feeder.close()
    pool_feeder.thread.join(60)


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
    assert closed.wait(60)
    assert "singleton-lock-outbox continues" in caplog.text

"""The watchdog's decisions, on a clock that is turned by hand and a store that does as told."""

from __future__ import annotations

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.model import Preempted
from celery_singleton_lock.errors import BackendRefused, BackendUnreachable
from celery_singleton_lock.lock import lease, lease_watchdog, renewals
from celery_singleton_lock.lock.lease_watchdog import Watchdog
from celery_singleton_lock.lock.renewals import Round
from support.waiting import eventually

PATIENCE = 60.0
"""Seconds to wait for a thread on a busy machine."""


class HandClock:
    """A clock that is turned by hand."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def turn(self, seconds):
        self.now += seconds


class ScriptedStore:
    """Knows who holds; takes note of each call; fails as told."""

    clock = SystemClock()

    def __init__(self, *held):
        self.held = set(held)
        self.calls = []
        self.failures = []
        self.refused = set()
        self.during = lambda: None

    def extend(self, leases):
        leases = list(leases)
        self.calls.append([token for _, token, _ in leases])
        answers = [token in self.held for _, token, _ in leases]
        self.during()
        if self.failures:
            raise self.failures.pop(0)
        if self.refused.intersection(self.calls[-1]):
            raise BackendRefused
        return answers


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def store():
    return ScriptedStore("a", "b")


@pytest.fixture
def dog(store, clock, monkeypatch):
    """A watchdog without its thread: the tests look themselves."""
    monkeypatch.setattr(Watchdog, "_start", lambda self: None)
    return Watchdog(store, clock)


@pytest.fixture
def often(monkeypatch):
    """Leases are renewed after a hundredth of the usual age: on a busy machine none ends before."""
    monkeypatch.setattr(lease, "RENEW_AT", lease.RENEW_AT / 100)
    monkeypatch.setattr(lease, "JOIN_AT", lease.JOIN_AT / 100)


@pytest.fixture
def live_dog(store, often, monkeypatch):
    """A watchdog with its thread, on the real clock."""
    monkeypatch.setattr(lease_watchdog, "STOP_WAIT", PATIENCE)
    dog = Watchdog(store, linger=PATIENCE)
    yield dog
    dog.stop()


@pytest.fixture
def losses():
    return []


@pytest.fixture
def on_lost(losses):
    return lambda name, token: losses.append((name, token))


# --- when -----------------------------------------------------------------------------------------


def test_a_lease_is_renewed_once_it_is_older_than_a_third(dog, store, clock):
    dog.watch("lock", "a", 30)
    clock.turn(9.9)
    assert dog.run_once() == Round()
    clock.turn(0.2)
    assert dog.run_once() == Round(renewed=1)
    clock.turn(9.9)
    assert dog.run_once() == Round()
    assert store.calls == [["a"]]


def test_a_renewal_that_tells_of_a_preemption_is_passed_on_and_keeps_the_lease(dog, store, clock):
    told = []
    dog.on_preempted = lambda *what: told.append(what)
    dog.watch("lock", "a", 30)
    store.extend = lambda leases: [Preempted("newer/0/0") for _ in leases]
    for _ in range(2):
        clock.turn(10.1)
        assert dog.run_once() == Round(renewed=1)
    assert told == [("a", "newer/0/0")] * 2
    assert dog.watching() == ("a",)


def test_all_leases_go_in_one_call_also_those_that_are_due_soon(dog, store, clock):
    dog.watch("lock", "a", 30)
    clock.turn(4)
    dog.watch("other", "b", 30)
    clock.turn(3)
    dog.watch("young", "c", 30)
    clock.turn(3.1)
    assert dog.run_once() == Round(renewed=2)
    assert store.calls == [["a", "b"]]


def test_a_shorter_lease_goes_with_a_longer_one(dog, store, clock):
    """A store waits for a silent server for a part of the shortest lease that it is asked for."""
    dog.watch("long", "a", 30)
    clock.turn(10)
    dog.watch("short", "b", 2)
    dog.watch("young", "c", 30)
    assert dog.run_once() == Round(renewed=2)
    assert store.calls == [["a", "b"]]


def test_validity_counts_from_before_the_call(dog, store, clock):
    """A slow answer does not make the lease longer than the store keeps it."""
    lease = dog.watch("lock", "a", 30)
    clock.turn(10)
    store.during = lambda: clock.turn(4)
    dog.run_once()
    assert lease.valid_until == 1000 + 10 + 30


def test_a_lease_that_was_extended_by_hand_is_not_shortened(dog, store, clock):
    lease = dog.watch("lock", "a", 30)
    dog.confirm("a", clock.now + 300)
    clock.turn(275)
    assert dog.run_once() == Round()
    clock.turn(10)
    assert dog.run_once() == Round(renewed=1)
    assert lease.valid_until == 1000 + 285 + 30


# --- losses ---------------------------------------------------------------------------------------


def test_T10_a_holder_is_notified_of_its_loss_at_the_next_renewal(
    dog, store, clock, on_lost, losses
):
    """Lost is reported once, and the lock is forgotten; another is not touched."""
    lease = dog.watch("lock", "a", 30, on_lost=on_lost)
    dog.watch("other", "b", 30, on_lost=on_lost)
    store.held.discard("a")
    clock.turn(10)
    assert dog.run_once() == Round(renewed=1, lost=1)
    assert losses == [("lock", "a")]
    assert lease.lost
    clock.turn(10)
    assert dog.run_once() == Round(renewed=1)
    assert losses == [("lock", "a")]


def test_a_silent_store_is_a_loss_at_the_local_deadline_and_not_before(
    dog, store, clock, on_lost, losses
):
    dog.watch("lock", "a", 30, on_lost=on_lost)
    store.failures = [BackendUnreachable()] * 1000
    clock.turn(29.9)
    assert dog.run_once() == Round(failed=1)
    assert losses == []
    clock.turn(0.2)
    assert dog.run_once().lost == 1
    assert dog.run_once() == Round()
    assert losses == [("lock", "a")]
    assert dog.watching() == ()


def test_a_loss_is_noticed_at_the_deadline_although_no_call_is_due(
    dog, store, clock, on_lost, losses
):
    """While retries pause, the deadline does not."""
    dog.watch("lock", "a", 30, on_lost=on_lost)
    store.failures = [BackendUnreachable()]
    clock.turn(29.95)
    dog.run_once()
    assert dog._next_pause() == pytest.approx(0.05)
    clock.turn(0.06)
    assert dog.run_once() == Round(lost=1)


def test_a_token_that_was_never_seen_held_is_no_loss(dog, store, clock, on_lost, losses):
    """Handed to a pool and not acquired yet: looked at again and again, whatever the store says."""
    dog.watch("lock", "later", 30, held=False, on_lost=on_lost)
    for _ in range(10):
        clock.turn(10)
        assert dog.run_once() == Round(unknown=1)
    store.held.add("later")
    clock.turn(10)
    assert dog.run_once() == Round(renewed=1)
    store.held.discard("later")
    clock.turn(10)
    assert dog.run_once() == Round(lost=1)
    assert losses == [("lock", "later")]


def test_a_confirmed_token_is_held_from_then_on(dog, store, clock, on_lost, losses):
    dog.watch("lock", "later", 30, held=False, on_lost=on_lost)
    clock.turn(25)
    dog.confirm("later")
    assert dog.run_once() == Round()
    clock.turn(10)
    assert dog.run_once() == Round(lost=1)


def test_taking_the_lock_while_a_renewal_is_on_its_way_is_no_loss(
    dog, store, clock, on_lost, losses
):
    """The store was asked before the acquire, and the answer is read after it."""
    dog.watch("lock", "later", 30, held=False, on_lost=on_lost)
    clock.turn(10)
    store.during = lambda: dog.confirm("later")
    assert dog.run_once() == Round(unknown=1)
    assert losses == []
    assert dog.watching() == ("later",)


def test_an_answer_for_a_lease_that_was_forgotten_meanwhile_does_not_count(
    dog, store, clock, on_lost, losses
):
    dog.watch("lock", "gone", 30, on_lost=on_lost)
    clock.turn(10)
    store.during = lambda: dog.forget("gone", patience=0)
    assert dog.run_once() == Round()
    assert losses == []


def test_a_dropped_owner_is_not_renewed(dog, store, clock):
    """When the object whose method wants to hear of a loss is gone, nobody could ever release."""

    class Owner:
        def lose(self, name, token):
            pass

    owner = Owner()
    dog.watch("lock", "a", 30, on_lost=owner.lose)
    clock.turn(10)
    assert dog.run_once() == Round(renewed=1)
    del owner
    gc.collect()
    clock.turn(10)
    assert dog.run_once() == Round()
    assert dog.watching() == ()


# --- errors ---------------------------------------------------------------------------------------


def test_T8_one_store_error_ends_neither_the_lease_nor_the_watchdog(dog, store, clock, losses):
    """The lease survives by a quick retry, and later locks are renewed too."""
    dog.watch("lock", "a", 30)
    clock.turn(10)
    store.failures = [BackendUnreachable("connection dropped")]
    assert dog.run_once() == Round(failed=1)
    clock.turn(renewals.QUICK_RETRY)
    assert dog.run_once() == Round(renewed=1)
    dog.watch("other", "b", 30)
    clock.turn(10)
    assert dog.run_once() == Round(renewed=2)
    assert losses == []


def test_T8_retries_are_quick_and_become_rarer(dog, store, clock):
    dog.watch("lock", "a", 30)
    clock.turn(10)
    store.failures = [BackendUnreachable()] * 6
    pauses = []
    for _ in range(6):
        assert dog.run_once().failed == 1
        pauses.append(round(dog._next_pause(), 3))
        clock.turn(pauses[-1])
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5, 0.5]
    assert dog.run_once() == Round(renewed=1)
    store.failures = [BackendUnreachable()]
    clock.turn(10)
    dog.run_once()
    assert dog._next_pause() == pytest.approx(0.1)


def test_T8_a_lock_whose_keys_are_refused_does_not_take_the_others_along(
    dog, store, clock, on_lost, losses
):
    """Another program's key of another type below one lock's name fails that lock alone."""
    dog.watch("poisoned", "b", 30, on_lost=on_lost)
    dog.watch("lock", "a", 30, on_lost=on_lost)
    store.refused = {"b"}
    clock.turn(10)
    assert dog.run_once() == Round(renewed=1, failed=1)
    clock.turn(20.1)
    assert dog.run_once() == Round(renewed=1, lost=1, failed=1)
    assert losses == [("poisoned", "b")]


def test_a_refused_lock_does_not_delay_the_renewal_of_short_leases(
    dog, store, clock, on_lost, losses
):
    """The pause after a refusal may be longer than the lease of another lock."""
    dog.watch("poisoned", "b", 30, on_lost=on_lost)
    store.refused = {"b"}
    clock.turn(10)
    dog.watch("lock", "a", 0.4, on_lost=on_lost)
    for _ in range(100):
        dog.run_once()
        clock.turn(0.05)
    assert losses == []
    asked_for_b = [call for call in store.calls if call == ["b"]]
    assert len(asked_for_b) <= 11, "no more than one each half second"


@pytest.mark.parametrize("error", [BackendUnreachable("away"), BackendRefused("WRONGTYPE")])
def test_a_renewal_that_fails_is_logged_once_until_it_succeeds(dog, store, clock, caplog, error):
    dog.watch("lock", "a", 30)
    for told in (1, 2):
        clock.turn(10)
        store.failures = [error] * 10
        for _ in range(10):
            assert dog.run_once().failed == 1
            clock.turn(renewals.SLOW_RETRY)
        assert dog.run_once() == Round(renewed=1)
        assert caplog.text.count("could not be renewed") == told


def test_a_lock_that_is_refused_among_others_is_logged_with_the_reason(dog, store, clock, caplog):
    """A store returns None for one of several leases, and raises the reason for one alone."""
    dog.watch("poisoned", "b", 30)
    dog.watch("lock", "a", 30)
    whole, store.extend = store.extend, lambda _leases: [None, True]
    clock.turn(10)
    assert dog.run_once() == Round(renewed=1, failed=1)
    store.extend, store.refused = whole, {"b"}
    for _ in range(3):
        clock.turn(renewals.SLOW_RETRY)
        assert dog.run_once() == Round(failed=1)
    assert caplog.text.count("lock 'poisoned' could not be renewed") == 1


def test_a_store_that_answers_too_little_is_asked_again(dog, store, clock, caplog):
    dog.watch("lock", "a", 30)
    clock.turn(10)
    whole, store.extend = store.extend, lambda _leases: []
    assert dog.run_once() == Round(failed=1)
    store.extend = whole
    clock.turn(1)
    assert dog.run_once() == Round(renewed=1)
    assert "1 leases asked for, 0 answers" in caplog.text


KINDS = [
    BackendUnreachable(),
    BackendRefused(),
    ConnectionResetError(),
    TimeoutError(),
    ValueError("bad reply"),
    KeyError("x"),
    MemoryError(),
    RecursionError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    RuntimeError("cannot schedule new futures after shutdown"),
]


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_L12_no_exception_in_the_renewal_ends_the_thread(live_dog, store, error):
    """The same thread renews on, and the lease survives."""
    store.failures = [error]
    lease = live_dog.watch("lock", "a", 90)
    thread = live_dog._thread
    eventually(lambda: len(store.calls) >= 3)
    assert live_dog._thread is thread
    assert thread.is_alive()
    assert not lease.lost


def test_L12_an_exception_outside_the_call_does_not_end_the_thread_either(
    live_dog, store, monkeypatch, caplog
):
    real, failures = live_dog._collect_due, [ValueError("a bug of ours")]

    def collect(now):
        if failures:
            raise failures.pop()
        return real(now)

    monkeypatch.setattr(live_dog, "_collect_due", collect)
    live_dog.watch("lock", "a", 90)
    eventually(lambda: store.calls)
    assert "the watchdog continues" in caplog.text


def test_L12_an_exception_in_on_lost_does_not_keep_others_from_hearing(
    dog, clock, on_lost, losses, caplog
):
    def explode(name, token):
        raise ZeroDivisionError

    dog.watch("first", "x", 30, on_lost=explode)
    dog.watch("second", "y", 30, on_lost=on_lost)
    clock.turn(10)
    assert dog.run_once() == Round(lost=2)
    assert losses == [("second", "y")]
    assert "on_lost of lock 'first' raised" in caplog.text


def test_L12_a_note_that_is_forgotten_while_it_is_read_does_not_end_the_thread(
    live_dog, store, on_lost
):
    """The watchdog tested for a note, its task ended, and nothing was renewed from then on."""

    class Racing(dict):
        def popitem(self):
            self.clear()  # what a task does that ends at this moment
            return super().popitem()

    live_dog.watch("lock", "a", 30)
    thread = live_dog._thread
    live_dog._noted = Racing()
    live_dog.watch_later("lock", "b", 3000, held=True, on_lost=on_lost)
    calls = len(store.calls)
    eventually(lambda: len(store.calls) > calls + 1)
    assert live_dog._thread is thread
    assert thread.is_alive()


@pytest.mark.parametrize(
    "step",
    ["_rest", "_read_notes", "_next_pause", "run_once", "round", "_apply_answers", "_lapsed"],
)
@pytest.mark.parametrize("error", [KeyError("a bug of ours"), SystemExit(1)], ids=["bug", "exit"])
def test_L12_an_error_at_any_step_is_logged_and_the_lease_is_renewed(
    live_dog, store, monkeypatch, caplog, step, error
):
    real, failures = getattr(live_dog, step), [error]

    def broken(*args):
        if failures and threading.current_thread() is live_dog._thread:
            raise failures.pop()
        return real(*args)

    monkeypatch.setattr(live_dog, step, broken)
    lease = live_dog.watch("lock", "a", 90)
    eventually(lambda: len(store.calls) >= 2)
    assert failures == []
    assert not lease.lost
    assert "the watchdog continues after an error" in caplog.text


class Killed(BaseException):
    """What no loop catches: an asynchronous exception, for example."""


@pytest.fixture
def dead_dog(live_dog, monkeypatch):
    """A watchdog whose thread has died while it had a lease to watch."""
    monkeypatch.setattr(threading, "excepthook", lambda told: None)

    def die():
        monkeypatch.undo()
        raise Killed

    monkeypatch.setattr(live_dog, "_rest", die)
    lease = live_dog.watch("lock", "a", 3000)
    thread = live_dog._thread
    thread.join(PATIENCE)
    assert not thread.is_alive()
    lease.renew_at = 0.0
    return live_dog


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "need",
    [
        lambda dog: dog.watch("other", "b", 3000),
        lambda dog: dog.watch_later("other", "b", 3000, held=True, on_lost=print),
        lambda dog: dog.look_after(),
    ],
    ids=["watch", "watch later", "look after"],
)
def test_L12_a_dead_thread_is_reported_and_started_again_at_the_next_use(
    dead_dog, store, caplog, need
):
    assert dead_dog.last_round() > 0
    need(dead_dog)
    eventually(lambda: any("a" in call for call in store.calls))
    assert dead_dog.restarts == 1
    told = [record for record in caplog.records if "thread has died" in record.message]
    assert [record.levelname for record in told] == ["ERROR"]


# --- forgetting -----------------------------------------------------------------------------------


def test_T9_forget_waits_for_a_renewal_on_its_way(live_dog, store):
    """So the release that follows cannot be overtaken."""
    sent, answer = threading.Event(), threading.Event()
    store.during = lambda: (sent.set(), answer.wait(PATIENCE))
    live_dog.watch("lock", "a", 30)
    assert sent.wait(PATIENCE)
    with ThreadPoolExecutor() as pool:
        forgetting = pool.submit(live_dog.forget, "a", PATIENCE)
        live_dog.forget("other")  # is not on its way: at once
        assert not forgetting.done()
        answer.set()
        forgetting.result(PATIENCE)


@pytest.mark.parametrize("patience", [0, 0.05])
def test_T9_forget_does_not_wait_for_ever(live_dog, store, patience):
    """A release must not hang on a store that does not answer, nor an event loop wait at all."""
    sent, answer = threading.Event(), threading.Event()
    store.during = lambda: (sent.set(), answer.wait(PATIENCE))
    live_dog.watch("lock", "a", 30)
    assert sent.wait(PATIENCE)
    live_dog.forget("a", patience=patience)
    assert not answer.is_set()
    assert live_dog.watching() == ()
    answer.set()


def test_T9_no_renewal_is_sent_or_on_its_way_after_forget(store):
    """Thousands of watches with random delays, from many threads, beside a busy watchdog."""
    forgotten, late = set(), []

    class Checked:
        clock = SystemClock()

        def extend(self, leases):
            tokens = [token for _, token, _ in leases]
            late.extend(forgotten.intersection(tokens))
            pause.wait(random.random() * 0.001)
            late.extend(forgotten.intersection(tokens))
            return [True] * len(tokens)

    def work(seed):
        rng = random.Random(seed)
        for i in range(1500):
            token = f"{seed}-{i}"
            dog.watch("lock", token, 0.003 * rng.random(), held=False)
            if rng.random() < 0.5:
                pause.wait(0.002 * rng.random())
            dog.forget(token)
            forgotten.add(token)

    pause = threading.Event()
    dog = Watchdog(Checked())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    dog.stop()
    assert late == []
    assert len(forgotten) == 8 * 1500


# --- the thread -----------------------------------------------------------------------------------


def test_a_shorter_lease_wakes_the_thread_earlier(live_dog, store):
    live_dog.watch("lock", "a", 300000)
    live_dog.watch("other", "b", 15)
    eventually(lambda: store.calls.count(["b"]) >= 2)
    assert ["a"] not in store.calls


def test_the_thread_ends_when_idle_and_starts_again(live_dog, store):
    live_dog._linger = 0.05
    live_dog.watch("lock", "a", 15)
    first = live_dog._thread
    live_dog.forget("a")
    eventually(lambda: live_dog._thread is None)
    first.join(PATIENCE)
    calls = len(store.calls)
    live_dog.watch("lock", "b", 15)
    eventually(lambda: ["b"] in store.calls[calls:])


def test_turns_in_a_row_use_one_thread(live_dog):
    live_dog.watch("lock", "a", 3000)
    first = live_dog._thread
    for number in range(100):
        live_dog.forget("a")
        live_dog.watch("lock", "a", 3000 + number)
    assert live_dog._thread is first


def test_an_idle_thread_ends_at_once_when_no_lease_follows(live_dog):
    live_dog.watch("lock", "a", 3000)
    thread = live_dog._thread
    live_dog.end_if_idle()
    assert thread.is_alive()  # there is a lease
    assert live_dog.last_round() is not None
    live_dog.forget("a")
    live_dog.end_if_idle()
    assert not thread.is_alive()
    assert live_dog.last_round() is None
    live_dog.watch("lock", "b", 3000)
    assert live_dog._thread.is_alive()


def test_a_lease_that_starts_while_the_thread_ends_is_renewed(store):
    """From many threads: whoever sends the thread home must not take it from another's lease."""
    dog, turns = Watchdog(store), 200

    def work(name):
        for _ in range(turns):
            dog.watch("lock", name, 30)
            with dog._mutex:
                assert dog._thread is not None
                assert dog._thread.is_alive()
                assert not dog._stopping
            dog.forget(name)
            dog.end_if_idle()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, "abcd"))
    dog.stop()


def test_a_thousand_turns_in_quick_succession_start_few_threads(live_dog, monkeypatch):
    monkeypatch.setattr(lease_watchdog, "LINGER", PATIENCE)
    started, real = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda me: (started.append(me), real(me)))
    for _ in range(1000):
        live_dog.watch("lock", "a", 3000)
        live_dog.forget("a")
        live_dog.end_if_idle()
    assert len(started) <= 3 * lease_watchdog.STARTS


def test_stop_ends_the_thread_and_flush_renews_once_more(live_dog, store):
    live_dog.watch("lock", "a", 3000)
    thread = live_dog._thread
    live_dog.stop(flush=True, timeout=PATIENCE)
    assert not thread.is_alive()
    assert store.calls == [["a"]]


def test_stop_without_a_thread_does_nothing(store):
    Watchdog(store).stop()
    assert store.calls == []


def test_a_thread_that_cannot_be_started_is_started_by_the_next_lease(store, monkeypatch):
    """To join it is an error in Python; and it has not died."""

    def full(_thread):
        raise RuntimeError("can't start new thread")

    dog = Watchdog(store)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="can't start"):
            dog.watch("lock", "a", 30)
    dog.stop()
    dog.watch("lock", "b", 0.2)
    eventually(lambda: any("b" in call for call in store.calls))
    dog.stop()
    assert dog.restarts == 0


def test_on_lost_may_use_the_watchdog(live_dog, store):
    """The callback runs in the watchdog's thread without its locks."""
    heard = threading.Event()

    def on_lost(name, token):
        live_dog.forget(token)
        live_dog.watch("next", "b", 3000)
        heard.set()

    live_dog.watch("lock", "unknown", 15, on_lost=on_lost)
    assert heard.wait(PATIENCE)
    assert live_dog.watching() == ("b",)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_L21_a_forked_child_renews_nothing_and_can_start_its_own_watchdog(live_dog, store):
    """The parent's leases are the parent's; even if it forked in the middle of a renewal."""
    sent, answer = threading.Event(), threading.Event()
    store.during = lambda: (sent.set(), answer.wait(PATIENCE))
    live_dog.watch("lock", "a", 30)
    assert sent.wait(PATIENCE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.during, store.calls = lambda: None, []
            clean = live_dog.watching() == () and live_dog._thread is None
            live_dog.forget("a")  # does not wait for the parent's renewal
            live_dog.watch("lock", "b", 15)
            eventually(lambda: ["b"] in store.calls)
            code = 0 if clean and ["a"] not in store.calls else 2
        finally:
            os._exit(code)
    answer.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert live_dog.watching() == ("a",)


def test_a_long_lease_is_only_noted_and_renewed_all_the_same(live_dog, store, on_lost):
    """Most tasks end before; those that do not are watched like any other."""
    live_dog.watch_later("lock", "a", 3000, held=True, on_lost=on_lost)
    live_dog.watch_later("lock", "b", 3000, held=True, on_lost=on_lost)
    live_dog.forget("b")
    assert live_dog.watching() == ("a",)


def test_the_lease_of_a_grant_ends_with_its_task_although_the_lease_of_the_task_was_noted(
    dog, on_lost
):
    """A grant that waits for a slot has a short lease, and its task has the long one."""
    dog.watch_later("lock", "a", 5, held=True, on_lost=on_lost)
    dog.watch_later("lock", "a", 30, held=True, on_lost=on_lost)
    dog.forget("a", patience=0)
    assert dog.watching() == ()


def test_a_short_lease_is_watched_at_once(dog, on_lost):
    """A second without a look would be too much of it."""
    dog.watch_later("lock", "a", 1, held=True, on_lost=on_lost)
    assert dog._leases.keys() == {"a"}


def test_a_thread_that_ends_reads_the_last_notes(dog, on_lost):
    """Whoever notes a lease while the thread is ending need not start another."""
    dog._thread = threading.current_thread()
    dog._noted["a"] = ("lock", "a", 30.0, True, 30.0, on_lost)
    assert not dog._ends()
    assert dog._thread is threading.current_thread()
    dog._noted.clear()
    assert dog._ends()
    assert dog._thread is None


def test_what_was_renewed_is_counted_from_nothing_on(live_dog):
    """For metrics, which only grow."""
    assert (live_dog.renewed, live_dog.failed) == (0, 0)
    live_dog.watch("lock", "a", 20)
    eventually(lambda: live_dog.renewed > 1, message="renewals are counted")


def test_no_exit_waits_for_the_thread_of_a_watchdog_which_has_a_name(live_dog):
    """A client's process may end while it holds a lock: its lease ends, too."""
    live_dog.watch("lock", "a", 3000)
    (thread,) = [each for each in threading.enumerate() if each is live_dog._thread]
    assert (thread.daemon, thread.name) == (True, "csl-watchdog")

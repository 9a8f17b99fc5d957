"""The defects of known lock designs, reproduced on a real server behind a TCP proxy.

Each test runs with this library's lock, which must pass, and with a short model of a design that
has the defect, which must fail. So the test is known to detect the defect.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import redis

from celery_singleton_lock.errors import LockNotOwned
from celery_singleton_lock.lock import wait_for_turn as turn_module
from support.lock_designs import Baton, Heartbeat, OneOwnerPerHost, Ours, SetIfAbsent, Signal
from support.proxy import Proxy
from support.waiting import eventually, never

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("connections that are cut")]

LEASE = 4.0
"""Seconds; longer than any pause of a busy machine, and not too long to wait for its end."""

SOON = 2.0
"""Seconds in which a free lock must be had: a claim, or a lease, and then some."""

SLACK = 10
"""How much longer ours may take, beside whatever else runs on this machine."""


def played_by(*models):
    """Run a test with this library's lock, which passes, and with models, which fail."""
    return pytest.mark.parametrize("design", [Ours, *map(failing, models)])


def failing(model):
    """A model must fail at an assertion of the test, not at an error in the model."""
    why = f"{model.__name__} has this hole"
    return pytest.param(
        model, marks=pytest.mark.xfail(reason=why, strict=True, raises=AssertionError)
    )


@pytest.fixture(autouse=True)
def _brisk(monkeypatch):
    """Waiters of this library poll every 0.2 s instead of 3.3 s, to shorten the tests."""
    monkeypatch.setattr(turn_module, "HEARTBEAT", 0.2)


class Client:
    """A client of the lock, with a connection of its own that can be disturbed."""

    def __init__(self, stage, design, lease):
        self.proxy = stage.enter_context(Proxy(stage.port))
        self._redis = redis.Redis(
            port=self.proxy.port, single_connection_client=True, retry=None, socket_timeout=None
        )
        stage.callback(self._redis.close)
        self._stage = stage
        self._lock = design(self._redis, lease)
        self.inside = False

    @property
    def fence(self):
        return self._lock.fence

    def take(self):
        self.inside = self._lock.take()
        return self.inside

    def take_insistently(self):
        """Acquire the lock; repeat the call if the reply was lost."""
        try:
            return self.take()
        except redis.ConnectionError:
            return self.take()

    def wait(self, timeout=60.0) -> Future[bool]:
        """Wait for the lock in a thread, and record when it is held."""
        begun = threading.Event()

        def waits():
            begun.set()
            with suppress(redis.ConnectionError):  # of a scene that is over
                self.inside = self._lock.wait(timeout)
            return self.inside

        waiting = self._stage.pool.submit(waits)
        begun.wait()
        return waiting

    def give_back(self):
        self.inside = False
        self._lock.give_back()

    def give_back_insistently(self):
        try:
            self.give_back()
        except redis.ConnectionError:
            self.give_back()

    def give_back_in_thread(self):
        return self._stage.pool.submit(self.give_back)

    def renew(self):
        try:
            self.inside = self._lock.renew()
        except LockNotOwned:
            self.inside = False


class Stage(ExitStack):
    """The clients of a scene; all connections end with it, and so do their threads."""

    def __init__(self, port):
        super().__init__()
        self.port = port
        self.pool = ThreadPoolExecutor(8)
        self.callback(self.pool.shutdown, wait=False)
        self.clients = []

    def client(self, design, lease=LEASE):
        self.clients.append(Client(self, design, lease))
        return self.clients[-1]

    def comes(self, predicate, seconds):
        """Wait for what ours brings about so soon, and a model with the hole never, or much later.

        The leases of holders are longer.
        """
        eventually(predicate, seconds * (SLACK if self.ours else 1), exact=True)

    def inside(self):
        return sum(client.inside for client in self.clients)

    def excludes(self):
        """Check that no two come to be inside: models with the hole have all the time they need."""
        never(lambda: self.inside() > 1, during=0.5 if self.ours else 30)


@pytest.fixture
def stage(make_redis, design):
    """On a server of its own: clients of earlier tests may sleep on a list of the shared one."""
    server = make_redis()
    with server.client(decode_responses=False) as client, Stage(server.port) as stage:
        stage.ours = design is Ours
        stage.redis = client
        yield stage


def asleep(stage, number):
    """Wait until so many clients sleep on a list."""
    eventually(lambda: stage.redis.info("clients")["blocked_clients"] == number)


@played_by(Baton)
def test_L1_a_release_that_is_repeated_lets_one_in(stage, design):
    """The reply of the hand-over is lost, the woken waiter is slow, and the release is repeated."""
    holder, slow, behind = (stage.client(design, lease=30) for _ in range(3))
    assert holder.take()
    for number, waiter in enumerate((slow, behind), 1):
        waiter.wait()
        asleep(stage, number)
    slow.proxy.stall_after = 1
    lose_the_last_reply(holder)
    with suppress(LockNotOwned):  # which is what the repeated one says, if the first was too late
        holder.give_back_insistently()
    stage.comes(stage.inside, SOON)
    slow.proxy.stalled = False
    stage.excludes()


def lose_the_last_reply(holder):
    """Lose the reply to the command that grants: the model's third one, this library's only one."""
    holder.proxy.lose_reply = 3 if isinstance(holder._lock, Baton) else 1


@played_by(Baton)
def test_L2_a_release_after_a_pause_longer_than_the_lease_admits_nobody(stage, design):
    """It checks that it holds the lock, is paused, and then deletes the key of the next holder."""
    holder, waiter, other = (stage.client(design) for _ in range(3))
    assert holder.take()
    waiter.wait()
    asleep(stage, 1)
    holder.proxy.stall_after = 1
    release = holder.give_back_in_thread()
    eventually(lambda: stage.inside() or other.take())
    holder.proxy.stalled = False
    with suppress(LockNotOwned):  # its lease had ended before the release
        release.result(60)
    stage.excludes()


@played_by(Baton, Signal)
def test_L3_L9_a_waiter_that_dies_with_what_it_was_handed_delays_the_next_a_moment(stage, design):
    """A granted waiter dies: the next one soon gets the lock."""
    holder, dead, behind = (stage.client(design, lease=30) for _ in range(3))
    assert holder.take()
    dead.wait()
    asleep(stage, 1)
    behind.wait()
    asleep(stage, 2)
    dead.proxy.stalled = True
    holder.give_back()
    stage.comes(lambda: behind.inside, SOON)


@played_by(Baton)
def test_L4_a_slow_waiter_does_not_overwrite_the_new_owner(stage, design):
    """It was granted the lock and paused for longer than a lease: another client has it now."""
    holder, slow = (stage.client(design) for _ in range(2))
    other = stage.client(design, lease=30)
    assert holder.take()
    waiting = slow.wait()
    asleep(stage, 1)
    slow.proxy.stall_after = 1
    with suppress(LockNotOwned):  # its lease had ended before the release
        holder.give_back()
    eventually(other.take)
    slow.proxy.stalled = False
    stage.excludes()
    other.give_back()
    waiting.result(60)


@pytest.mark.full
@played_by(Baton)
def test_L7_a_waiter_that_gives_up_during_the_handover_leaves_no_stuck_lock(stage, design):
    """The wait ends at the moment of the grant: some client has the lock."""
    holder, late, other = (stage.client(design, lease=30) for _ in range(3))
    assert holder.take()
    waiting = late.wait(timeout=4)
    asleep(stage, 1)
    late.proxy.stall_after = 1
    eventually(lambda: late.proxy.stalled, message="its wait is over")
    holder.give_back()
    late.proxy.stalled = False
    waiting.result(60)
    stage.comes(lambda: late.inside or other.take(), SOON)


@pytest.mark.full
@played_by(Signal)
def test_L8_L11_the_crash_of_a_holder_costs_its_lease_and_not_the_whole_wait(stage, design):
    """Without a notification the waiter checks when the holder's lease has ended."""
    holder, waiter = (stage.client(design) for _ in range(2))
    assert holder.take()
    waiter.wait(timeout=SLACK * (LEASE + SOON))
    stage.comes(lambda: waiter.inside, LEASE + SOON)


@played_by(Signal)
def test_L10_a_wake_up_that_expired_before_it_was_waited_for_is_not_needed(stage, design):
    """Between "busy" and the wait the lock is released, and the signal is gone."""
    holder, slow = (stage.client(design, lease=30) for _ in range(2))
    assert holder.take()
    slow.proxy.stall_after = 1
    slow.wait()
    eventually(lambda: slow.proxy.stalled, message="it has heard that the lock is busy")
    holder.give_back()
    eventually(lambda: not stage.redis.exists("signal"), message="the signal is gone")
    slow.proxy.stalled = False
    stage.comes(lambda: slow.inside, SOON)


@played_by(SetIfAbsent)
def test_L13_an_acquire_with_a_lost_reply_succeeds(stage, design):
    """It was applied: a repeated call with the same token has the lock."""
    client = stage.client(design, lease=30)
    client.proxy.lose_reply = 1
    assert client.take_insistently()


@played_by(OneOwnerPerHost)
def test_L14_no_client_releases_the_lock_of_another_on_its_host(stage, design):
    """A release by who never had it changes nothing."""
    holder, clumsy, other = (stage.client(design, lease=30) for _ in range(3))
    assert holder.take()
    with suppress(LockNotOwned):
        clumsy.give_back()
    other.take()
    assert stage.inside() == 1


@played_by(Heartbeat)
def test_T12_L23_a_late_renewal_creates_nothing(stage, design):
    """The lease has ended and another one holds the lock: the renewal is refused."""
    late, successor = (stage.client(design, lease=0.3) for _ in range(2))
    assert late.take()
    eventually(successor.take)
    late.renew()
    assert stage.inside() == 1


@played_by(SetIfAbsent)
def test_L33_a_paused_holders_late_write_is_refused(stage, design):
    """The resource keeps the largest fence that it has seen, and refuses a lower one."""
    paused, successor = (stage.client(design, lease=0.3) for _ in range(2))
    assert paused.take()
    late = paused.fence
    eventually(successor.take)
    assert late < successor.fence, "nothing tells the late write from the other"

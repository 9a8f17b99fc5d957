"""Processes that take the same lock, and are paused or killed while they hold it."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import celery_singleton_lock
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.lock.sync import Lock
from celery_singleton_lock.store.redis.sync import RedisStore
from support.waiting import eventually, in_time

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="POSIX signals"),
]

# Obeys: one word on stdin, one line on stdout. What it hears about a loss it says unasked.
CLIENT = """
import sys
import redis
from celery_singleton_lock.errors import LockNotOwned
from celery_singleton_lock.lock.sync import Lock

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

def release():
    try:
        lock.release()
    except LockNotOwned:
        return "not-owned"
    return "released"

url, lease = sys.argv[1], float(sys.argv[2])
lock = Lock(redis.Redis.from_url(url), "lock", lease=lease, on_lost=lambda *about: say("lost"))
verbs = {"acquire": lambda: ("acquired", lock.acquire(), lock.fencing_token), "release": release}
say("ready")
for line in sys.stdin:
    answer = verbs[line.strip()]()
    say(*answer) if isinstance(answer, tuple) else say(answer)
"""

# Takes the lock again and again, and notes in Redis under which fence it was in.
WRITER = """
import sys
import redis
from celery_singleton_lock.errors import LockNotOwned
from celery_singleton_lock.lock.sync import Lock

client = redis.Redis.from_url(sys.argv[1])
lock = Lock(client, "lock", lease=float(sys.argv[2]))
print("ready", flush=True)
while not client.exists("stop"):
    lock.acquire()
    if lock.held:
        client.rpush("written", lock.fencing_token)
    try:
        lock.release()
    except LockNotOwned:
        pass
"""


class Client:
    """A process that takes the lock when told to."""

    def __init__(self, script, *args):
        path = str(Path(celery_singleton_lock.__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def say(self, verb):
        self.process.stdin.write(f"{verb}\n")
        self.process.stdin.flush()

    def hear(self, timeout=60):
        return self._lines.get(timeout=timeout)

    def ask(self, verb):
        self.say(verb)
        return self.hear()

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start(redis_url):
    """Start processes; at the end none is left."""
    started = []

    def start(lease=1.0, *, script=CLIENT):
        client = Client(script, redis_url, lease)
        started.append(client)
        assert client.hear() == "ready"
        return client

    yield start
    for client in started:
        client.end()


@pytest.fixture
def store(redis_client):
    store = RedisStore(redis_client)
    yield store
    store.close()


@pytest.fixture
def lock(store):
    """A lock of the test's own process."""
    lock = Lock(store, "lock", lease=10)
    yield lock
    lock._watchdog.stop()


def await_waiting(store, number):
    eventually(lambda: store.inspect("lock").waiting == number)


def holding_pids(store):
    return [holder.pid for holder in store.inspect("lock").holders]


@pytest.mark.full
def test_T7_a_killed_holder_blocks_the_next_for_no_longer_than_its_lease(start, store, lock):
    """SIGKILL in the middle; the waiter is in soon after the lease, and not before."""
    holder = start(lease=10)
    assert holder.ask("acquire").startswith("acquired True")
    holder.signal(signal.SIGKILL)
    holder.process.wait()
    began = time.monotonic()
    left = store.inspect("lock").holders[0].expires_in
    assert lock.acquire(blocking_timeout=60)
    took = time.monotonic() - began
    assert took >= left - 0.1
    in_time(took, left + 1)
    lock.release()


def test_T5_a_holder_that_was_paused_past_its_lease_frees_nothing(start, store, lock):
    """SIGSTOP, a successor comes in, SIGCONT: the late holder learns it, and frees nothing."""
    holder = start(lease=1)
    assert holder.ask("acquire").startswith("acquired True")
    holder.signal(signal.SIGSTOP)
    assert lock.acquire(blocking_timeout=60)
    third = start()
    third.say("acquire")
    await_waiting(store, 1)
    holder.signal(signal.SIGCONT)
    assert holder.hear() == "lost"
    assert holder.ask("release") == "not-owned"
    assert holding_pids(store) == [os.getpid()]
    assert store.inspect("lock").waiting == 1
    lock.release()
    assert third.hear().startswith("acquired True")


def test_T12_a_paused_holder_does_not_come_back_into_a_free_lock(start, store):
    """Its watchdog renews what it has; it never creates what has lapsed."""
    holder = start(lease=1)
    assert holder.ask("acquire").startswith("acquired True")
    holder.signal(signal.SIGSTOP)
    eventually(lambda: holding_pids(store) == [])
    holder.signal(signal.SIGCONT)
    assert holder.hear() == "lost"
    assert holding_pids(store) == []


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_L9_L17_a_dead_granted_waiter_delays_the_next_by_the_claim_lease(
    start, store, lock, number
):
    """The grant goes to it, for its death is not known yet; the next is in when that lapses."""
    assert lock.acquire()
    dead, alive = start(20), start(20)
    dead.say("acquire")
    await_waiting(store, 1)
    alive.say("acquire")
    await_waiting(store, 2)
    dead.signal(number)
    began = time.monotonic()
    lock.release()
    assert holding_pids(store) == [dead.process.pid]
    assert alive.hear().startswith("acquired True")
    took = time.monotonic() - began
    if number == signal.SIGSTOP:
        dead.signal(signal.SIGCONT)
        await_waiting(store, 1)  # it finds its grant gone, and queues again
        assert alive.ask("release") == "released"
        assert dead.hear().startswith("acquired True")
    in_time(took, CLAIM_LEASE + 1)


@pytest.mark.full
def test_L33_among_dying_and_pausing_writers_fences_only_grow(start, store, redis_client):
    """A resource that refuses lower fences sees every grant in order, whoever is hit meanwhile."""

    def more(number):
        wanted = redis_client.llen("written") + number
        eventually(lambda: redis_client.llen("written") >= wanted)

    rng = random.Random(7)
    writers = [start(1, script=WRITER) for _ in range(6)]
    for victim in writers[:4]:
        more(50)
        victim.signal(signal.SIGSTOP)
        more(20)
        victim.signal(rng.choice([signal.SIGKILL, signal.SIGCONT]))
    more(50)
    redis_client.set("stop", 1)
    for survivor in writers[4:]:
        assert survivor.process.wait(60) == 0
    written = [int(fence) for fence in redis_client.lrange("written", 0, -1)]
    assert len(set(written)) == len(written)
    # A writer stopped between its look and its write comes late: what a fence is for.
    late = [fence for i, fence in enumerate(written) if fence < max(written[:i], default=0)]
    assert len(late) < len(written) / 4  # the machine may stop some too

"""Outages of the locks' Redis and of the broker.

In each outage the worker keeps running, ``inspect ping`` answers within 2 s, unlocked tasks run,
``lock_on_backend_error`` is applied, no task that Redis kept is lost, and no two run at once. These
tests record the times in docs/redis.md (``record_property``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest
from celery import states

from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.errors import BackendError, BackendUnreachable
from integration.book import SAFE_LEASE, Book
from support.proxy import Proxy
from support.redelivery import redelivery_after
from support.waiting import eventually, in_time, never

pytestmark = [pytest.mark.chaos, pytest.mark.integration]

LEASE = 6.0
LONG_LEASE = 40.0
"""A lease that outlasts the outages here, so that no lock is lost in them."""
PING = 2.0
"""Most seconds that `inspect ping` may take."""
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
REAL = pytest.mark.needs_real_redis("signals, persistence, CLIENT commands")


@pytest.fixture(params=["prefork", "threads"])
def pool(request):
    return request.param


@pytest.fixture
def locks(make_redis):
    return make_redis()


@pytest.fixture
def durable(make_redis):
    """A Redis that keeps all that it has confirmed."""
    return make_redis(*DURABLE)


@pytest.fixture
def open_book(redis_url, tmp_path) -> Iterator[Callable[..., Book]]:
    """Open the task book on the shared broker, with its locks elsewhere."""
    books = []

    def open_on(locks: RedisServer, lease: float = LEASE, url: str = "", **conf) -> Book:
        backend = url or locks.url
        conf = {"singleton_lock_backend": backend, "singleton_lock_lease": lease, **conf}
        books.append(Book(redis_url, tmp_path, lock_url=locks.url, conf=conf))
        return books[-1]

    yield open_on
    for book in books:
        book.__exit__()


def ping(book: Book) -> None:
    """Ask the worker whether it lives; it must not take long."""
    began = time.monotonic()
    assert book.app.control.ping(timeout=20, limit=1)
    in_time(time.monotonic() - began, PING)


# --- away, for a while ----------------------------------------------------------------------------


@contextmanager
def stopped(server):
    """SIGSTOP: connections stay open, nothing is answered."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def paused(server):
    """CLIENT PAUSE: as in a failover of a managed service. Nobody can end it early."""
    with server.client() as admin:
        admin.client_pause(6_000)
        yield
        admin.ping()


@contextmanager
def restarted(server):
    """Killed; it comes back with what was on its disk."""
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def restarted_empty(server):
    """Killed; it comes back with nothing."""
    server.kill()
    try:
        yield
    finally:
        server.restart(keep_data=False)


@dataclass
class Scene:
    """One task runs, two are parked behind it; then the outage, with new tasks of all policies."""

    book: Book
    running: str = ""
    parked: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()

    def begin(self) -> None:
        """Have one run and two parked."""
        self.running = self.book.send("act", "held", 1, hold="held-1")
        self.book.started(self.running)
        self.parked = tuple(self.book.send("act", "held", n) for n in (2, 3))
        self.book.await_waiting("held", 2)
        eventually(lambda: self.book.unacked() == 0, 5, "the worker knows that they are parked")

    def endure(self, seconds: float) -> None:
        """See that all goes on that can, for so long."""
        deadline = time.monotonic() + seconds
        self.waiting = tuple(self.book.send("act", "new", n) for n in (1, 2))
        failing = self.book.send("act_failing", "failing", 1)
        unlocked = self.book.send("act_running", "running", 1)
        state, error = self.book.outcome(failing)
        assert (state, type(error)) == (states.FAILURE, BackendUnreachable)
        assert self.book.value(unlocked) == 1
        assert self.book.starts("running")[0]["held"] is False
        rounds = 0
        while time.monotonic() < deadline or not rounds:
            rounds += 1
            assert self.book.value(self.book.send("plain", "p", rounds)) == rounds
            ping(self.book)
            assert not self.book.starts("new"), "begun without its lock"
            never(lambda: False, during=0.3)

    def recover(self) -> float:
        """See that what waited runs, in order; return seconds until the first of it began."""
        began = time.monotonic()
        assert [self.book.value(r) for r in self.waiting] == [1, 2]
        assert self.book.order("new") == [1, 2]
        assert self.book.peak("new") == 1
        return float(self.book.starts("new")[0]["t"]) - began

    def end(self, *, kept: bool = True) -> None:
        """Let the first go on, and see that its followers run if their messages were kept."""
        self.book.open("held-1")
        assert self.book.value(self.running) == 1
        if kept:
            assert [self.book.value(r, 20) for r in self.parked] == [2, 3]
        assert self.book.order("held") == ([1, 2, 3] if kept else [1])
        for key in ("held", "new", "failing", "running"):
            self.book.await_free(key, LONG_LEASE + 2)
        eventually(lambda: self.book.unacked() == 0 and self.book.queued() == 0, 10, "all settled")


@pytest.mark.full("paused", "stopped")
@REAL
@pytest.mark.parametrize("outage", [stopped, paused, restarted])
def test_five_seconds_away_and_the_lease_lasts(open_book, durable, pool, outage, record_property):
    """Nobody loses a lock, nothing overlaps, all run in order as soon as Redis is back."""
    book = open_book(durable, LONG_LEASE)
    with book.worker(pool=pool, concurrency=3) as worker:
        scene = Scene(book)
        scene.begin()
        with outage(durable):
            scene.endure(5)
        record_property("first_after", scene.recover())
        scene.end()
        assert book.peak("held") == 1
        assert "was lost" not in worker.log()
        assert worker.is_running


@pytest.mark.full
@REAL
@pytest.mark.parametrize("outage", [stopped, restarted])
def test_longer_than_a_lease_away(open_book, durable, pool, outage, record_property):
    """The running task hears of its loss while Redis is away, and goes on; its fence is older.

    The next in line begins when Redis is back: two bodies, never two leases.
    """
    book = open_book(durable, LEASE)
    with book.worker(pool=pool, concurrency=3) as worker:
        scene = Scene(book)
        scene.begin()
        began = time.monotonic()
        with outage(durable):
            scene.endure(1.3 * LEASE)
            worker.await_log("The lock 'k:held' was lost")
            record_property("outage", time.monotonic() - began)
        record_property("first_after", scene.recover())
        assert [book.value(r) for r in scene.parked] == [2, 3]
        scene.end()
        fences = [start["fence"] for start in book.starts("held")]
        assert fences == sorted(set(fences))
        assert book.peak("held") == 2  # the first, and one of the others at a time
        assert worker.is_running


@pytest.mark.full
@REAL
def test_restarted_empty(open_book, locks, pool, record_property):
    """Parked tasks are lost, the holder learns it; new ones run; fences grow (T24)."""
    book = open_book(locks)
    with book.worker(pool=pool, concurrency=3) as worker:
        scene = Scene(book)
        scene.begin()
        before = book.starts("held")[0]["fence"]
        with restarted_empty(locks):
            scene.endure(1)
        record_property("first_after", scene.recover())
        worker.await_log("The lock 'k:held' was lost", LEASE + 2)
        scene.end(kept=False)
        assert book.value(book.send("act", "held", 9)) == 9
        assert book.starts("held", n=9)[0]["fence"] > before
        assert worker.is_running


@pytest.mark.full
@REAL
def test_t24_flushall_in_mid_run(open_book, locks, pool, record_property):
    """The holder is notified after a third of its lease at most; others go on; fences grow."""
    book = open_book(locks)
    with book.worker(pool=pool, concurrency=3) as worker:
        scene = Scene(book)
        scene.begin()
        before = book.starts("held")[0]["fence"]
        with locks.client() as admin:
            admin.flushall()
        flushed = time.monotonic()
        worker.await_log("The lock 'k:held' was lost")
        told_after = time.monotonic() - flushed
        record_property("told_after", told_after)
        assert book.value(book.send("act", "held", 9)) == 9
        assert book.starts("held", n=9)[0]["fence"] > before
        ping(book)
        book.open("held-1")
        assert book.value(scene.running) == 1
        book.await_free("held")
    in_time(told_after, LEASE / 3 + 2)


# --- disturbed, and never away --------------------------------------------------------------------


@contextmanager
def again_and_again(disturb: Callable[[], object], pause: float = 0.05):
    """Disturb from another thread, as long as the block lasts."""
    ended, failures = threading.Event(), []

    def run() -> None:
        try:
            while not ended.wait(pause):
                disturb()
        except Exception as error:  # noqa: BLE001  # told to the test
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failures


def all_run_in_order(book: Book, pool: str, disturbed) -> float:
    """Send tasks of two keys while ``disturbed``; see that each runs once; return the seconds."""
    with book.worker(pool=pool, concurrency=3) as worker:
        began = time.monotonic()
        with disturbed:
            sent = {key: [book.send("act", key, n, hold=0.05) for n in range(12)] for key in "ab"}
            ping(book)
            assert book.value(book.send("plain", "p", 1)) == 1
            for key, results in sent.items():
                assert [book.value(r, 25) for r in results] == list(range(12)), key
        took = time.monotonic() - began
        for key in sent:
            assert book.order(key) == list(range(12))
            assert book.peak(key) == 1
            book.await_free(key, LONG_LEASE + 2)
        eventually(lambda: book.unacked() == 0 and book.queued() == 0, 10, "all settled")
        assert worker.is_running
        assert "was lost" not in worker.log()
    return took


@pytest.mark.full
@REAL
def test_t8_connections_killed_all_the_time(open_book, locks, pool, record_property):
    """CLIENT KILL of everybody, ten times a second: each task runs once, in order; no lock lost."""
    book = open_book(locks, LONG_LEASE)
    with locks.client() as admin:
        kill = again_and_again(
            lambda: admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"), 0.1
        )
        record_property("took", all_run_in_order(book, pool, kill))


@REAL
def test_t24_scripts_flushed_all_the_time(open_book, locks, pool, record_property):
    """SCRIPT FLUSH, twenty times a second: nobody notices."""
    book = open_book(locks, LONG_LEASE)
    with locks.client() as admin:
        took = all_run_in_order(book, pool, again_and_again(admin.script_flush))
        record_property("took", took)


@pytest.mark.full
@REAL
def test_slow_by_fifty_milliseconds(open_book, locks, pool, record_property):
    """Every answer takes 50 ms more: slower, and nothing else."""
    with Proxy(locks.port) as proxy:
        proxy.delay = 0.025
        book = open_book(locks, LONG_LEASE, url=proxy.url)
        record_property("took", all_run_in_order(book, pool, again_and_again(lambda: None)))


# --- full -----------------------------------------------------------------------------------------


@pytest.mark.full
@REAL
def test_t39_full(open_book, make_redis, pool):
    """Held locks are renewed, claimed and released; what is new waits with the broker.

    The parked run meanwhile; the new ones when there is room again.
    """
    locks = make_redis("--maxmemory", "20mb", "--maxmemory-policy", "noeviction")
    book = open_book(locks, SAFE_LEASE)
    with book.worker(pool=pool, concurrency=3) as worker, locks.client() as admin:
        scene = Scene(book)
        scene.begin()
        used = int(admin.info("memory")["used_memory"])
        admin.set("ballast", b"x" * (4 << 20))
        admin.config_set("maxmemory", used)
        scene.waiting = tuple(book.send("act", "new", n) for n in (1, 2))
        state, error = book.outcome(book.send("act_failing", "failing", 1))
        assert (state, isinstance(error, BackendError)) == (states.FAILURE, True)
        assert book.value(book.send("plain", "p", 1)) == 1
        ping(book)
        never(lambda: book.starts("new"), during=SAFE_LEASE + 0.5)
        eventually(lambda: book.unacked() >= 2)
        assert book.view("held").holders, "renewed though Redis is full"
        book.open("held-1")
        assert [book.value(r) for r in (scene.running, *scene.parked)] == [1, 2, 3]
        ping(book)
        admin.config_set("maxmemory", "0")
        scene.recover()
        scene.end()
        assert book.peak("held") == 1
        assert "was lost" not in worker.log()
        assert worker.log().count("Locked tasks wait.") == 1
        assert worker.log().count("answers again") == 1


# --- the broker -----------------------------------------------------------------------------------


@pytest.mark.full
@REAL
@pytest.mark.slow
@pytest.mark.parametrize("outage", [stopped, restarted])
def test_t8_the_broker_is_away_for_longer_than_a_lease(
    make_redis, redis_url, locks, tmp_path, pool, outage
):
    """Twelve seconds without broker, a lease of nine: the holder keeps its lock and its fence."""
    broker = make_redis(*DURABLE)
    conf = {"singleton_lock_backend": locks.url, "singleton_lock_lease": SAFE_LEASE}
    with (
        Book(broker.url, tmp_path, backend=redis_url, lock_url=locks.url, conf=conf) as book,
        book.worker(pool=pool) as worker,
    ):
        first = book.send("act", "a", 1, hold="a-1")
        fence = book.started(first)["fence"]
        parked = book.send("act", "a", 2)
        book.await_waiting("a", 1)
        eventually(lambda: book.unacked() == 0, 5, "both acknowledged")
        with outage(broker):
            never(lambda: lost_by(book, fence), during=12)
        assert "was lost" not in worker.log()
        book.open("a-1")
        assert [book.value(first), book.value(parked, 20)] == [1, 2]
        third = book.send("act", "a", 3)
        assert book.value(third, 30) == 3
        assert book.order("a") == [1, 2, 3]
        assert book.peak("a") == 1
        assert worker.is_running


def lost_by(book: Book, fence: int) -> bool:
    """Whether another than the first holds the lock, or nobody."""
    view = book.view("a")
    return not view.holders or view.fencing_token != fence


IMPATIENT = redelivery_after(3)
"""A Redis broker that soon delivers again what was not acknowledged."""


@pytest.mark.full
@REAL
def test_nothing_is_lost_if_the_lost_broker_ends_the_worker(make_redis, redis_url, locks, tmp_path):
    """Celery 5.7 may end if a Redis broker is lost while a message is unacknowledged.

    Without locks it does the same (docs/redis.md). Started again, as a process manager would, the
    worker runs all; what ran with late ack and could not be acknowledged perhaps once more.
    """
    broker = make_redis(*DURABLE)
    conf = {
        "singleton_lock_backend": locks.url,
        "singleton_lock_lease": LEASE,
        "broker_transport_options": IMPATIENT,
    }
    with Book(broker.url, tmp_path, backend=redis_url, lock_url=locks.url, conf=conf) as book:
        one = book.worker(name="same", concurrency=2).start()
        first = book.start_holder("a", 1, task="act_late")
        parked = [book.send("act", "a", n) for n in (2, 3)]
        book.await_waiting("a", 2)
        broker.kill()
        broker.start()
        later = book.send("act", "a", 4)
        eventually(lambda: "Connection to broker lost" in one.log(), 10, "the loss is noticed")
        book.open("a-1")
        eventually(lambda: not one.is_running or book.state(later) == states.SUCCESS, 30)
        if not one.is_running:
            book.worker(name="same", concurrency=2).start()
        assert [book.value(r, 30) for r in (first, *parked, later)] == [1, 2, 3, 4]
        eventually(lambda: book.unacked() == 0 and book.queued() == 0, 20, "all settled")
        assert sorted(book.order("a")) in ([1, 2, 3, 4], [1, 1, 2, 3, 4])
        assert book.peak("a") == 1
        book.await_free("a", LEASE + 3)


# --- two applications -----------------------------------------------------------------------------


@pytest.mark.full
@REAL
def test_t38_two_brokers_on_one_redis_get_only_their_own_back(make_redis, locks, tmp_path):
    """Both park under the same names and die; restarted, each runs its own tasks and no other."""
    conf = {"singleton_lock_backend": locks.url, "singleton_lock_lease": LEASE}
    books = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        books.append(Book(make_redis().url, folder, lock_url=locks.url, conf=conf))
    one, two = books
    workers = [book.worker(concurrency=2).start() for book in books]
    holder = one.send("act", "a", 0, hold="never")
    one.started(holder)
    sent = {book: [book.send("act", "a", base + n) for n in range(3)]
            for book, base in ((one, 10), (two, 20))}  # fmt: skip
    one.await_waiting("a", 6)
    for book, worker in zip(books, workers, strict=True):
        book.kill_worker(worker)
    with one.worker(concurrency=2), two.worker(concurrency=2):
        assert [one.value(r) for r in sent[one]] == [10, 11, 12]
        assert [two.value(r) for r in sent[two]] == [20, 21, 22]
        one.await_free("a")
        assert one.order("a") == [0, 10, 11, 12]
        assert two.order("a") == [20, 21, 22]
        ends = sorted(run[:2] for book in books for run in book.runs("a"))
        assert all(before[1] <= after[0] for before, after in pairwise(ends))
        assert [book.queued() for book in books] == [0, 0]
    for book in books:
        book.__exit__()

"""The locks' Redis is away at worker start, at a call, or while a task runs, and returns."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest
from celery import states
from click.testing import CliRunner

from celery_singleton_lock import Lock
from celery_singleton_lock.admin.doctor import Health, examine
from celery_singleton_lock.admin.why import why
from celery_singleton_lock.cli import locks as locks_command
from celery_singleton_lock.core.model import SCHEMA
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from integration.book import LONG_LEASE, SAFE_LEASE, Book, needs_pool
from support.proxy import Proxy
from support.waiting import eventually, in_time, never

pytestmark = pytest.mark.chaos

LEASE = 3.0
SAFE = {"singleton_lock_lease": SAFE_LEASE}


@pytest.fixture
def locks(make_redis):
    return make_redis()


@pytest.fixture
def book(redis_url, locks, tmp_path):
    conf = {"singleton_lock_backend": locks.url, "singleton_lock_lease": LONG_LEASE}
    with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
        yield book


def ping(book) -> float:
    """Return how long the worker took to answer, in seconds."""
    began = time.monotonic()
    assert book.app.control.ping(timeout=20, limit=1)
    return time.monotonic() - began


@pytest.mark.full
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_one_lost_reply_to_a_release_is_no_lost_lock(redis_url, locks, tmp_path, pool):
    """The task was under its lock to its end, which the child alone cannot know: no false alarm."""
    with Proxy(locks.port) as proxy:
        conf = {"singleton_lock_backend": proxy.url, **SAFE}
        with Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book:
            with book.worker(pool=pool) as worker:
                first = book.start_holder("a", 1)
                time.sleep(SAFE_LEASE + 0.5)  # the child has not heard of any renewal
                proxy.lose_reply_to = b"\r\nfinal\r\n"
                book.open("a-1")
                assert book.value(first) == 1
                eventually(lambda: proxy.lose_reply_to is None)
                assert book.value(book.send("act", "a", 2)) == 2
            assert "lost while" not in worker.log()
            assert "no longer held" not in worker.log()


@pytest.mark.full
def test_the_last_task_of_a_process_leaves_its_lock_although_redis_is_silent(
    redis_url, locks, tmp_path
):
    """The release never arrives, and its process ends before it could be repeated."""
    with Proxy(locks.port) as proxy:
        conf = {"singleton_lock_backend": proxy.url, "singleton_lock_lease": 600.0}
        with (
            Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book,
            book.worker(concurrency=1, args=["--max-tasks-per-child=1"]) as worker,
        ):
            first = book.start_holder("a", 1)
            (child,) = worker.child_pids()
            proxy.stalled = True
            book.open("a-1")
            assert book.value(first) == 1
            eventually(lambda: child not in worker.child_pids(), 20)
            proxy.cut()
            proxy.stalled = False
            eventually(lambda: not book.view("a").holders, 20, worker.log_tail)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_an_outage_at_the_end_of_a_task_does_not_prolong_lock_hold_for(
    redis_url, locks, tmp_path, pool
):
    """It counts from the start of the task, however late Redis hears of the end."""
    with Proxy(locks.port) as proxy:
        conf = {"singleton_lock_backend": proxy.url, "singleton_lock_lease": 600.0}
        with (
            Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book,
            book.worker(pool=pool) as worker,
        ):
            task = book.start_holder("a", 1, task="act_hold_long")
            started = time.monotonic()
            proxy.stalled = True
            book.open("a-1")
            assert book.value(task) == 1
            worker.await_log("could not release", 30)
            proxy.cut()
            proxy.stalled = False
            eventually(
                lambda: [each.state for each in book.view("a").holders] == ["held_after"], 20
            )
            outage = time.monotonic() - started
            (holder,) = book.view("a").holders
            # Not exact: a busy machine delays the last command, too.
            assert holder.expires_in <= 60 - outage / 2


@pytest.mark.full
@pytest.mark.parametrize("how", ["restarted empty", "flushed"])
def test_parked_tasks_that_redis_has_lost_are_reported(book, locks, how):
    """By the log, the doctor and ``why``; a task that runs, or has ended, is not among them."""
    with book.worker(concurrency=2) as worker:
        assert book.value(book.send("act", "a", 0)) == 0
        running = book.start_holder("a", 1)
        parked = [book.send("act", "a", n) for n in (2, 3)]
        eventually(lambda: book.view("a").waiting == 2)
        for each in parked:
            worker.await_log(f"{each}] is parked: ")  # it has heard so, too
        if how == "flushed":
            with locks.client() as client:
                client.flushall()
        else:
            locks.kill()
            locks.restart(keep_data=False)
        worker.await_log("has lost data", 20)
        (told,) = [line for line in worker.log().splitlines() if "has lost data" in line]
        assert "ERROR" in told
        assert "2 of the " in told
        assert all(each in told for each in parked)
        with locks.client() as client:
            store = RedisAdminStore(client)
            assert {why(store, each).state for each in parked} == {"lost"}
            assert why(store, running).state != "lost"
            assert "lost" in {c.name for c in examine(store) if c.health is Health.FAIL}
        book.open("a-1")
        assert book.value(running) == 1


@pytest.mark.full
@pytest.mark.parametrize("task", ["act", "act_late", "pair"])
def test_a_granted_task_that_waits_for_a_slot_runs_though_redis_has_lost_it(book, locks, task):
    """Its worker has the message, and so does not report it as lost."""
    holder = Lock(book.client, "k:a", lease=LONG_LEASE)
    holder.acquire()
    with book.worker(concurrency=1) as worker:
        granted = book.send(task, "a", "z")
        worker.await_log(f"{granted}] is parked: ")
        book.start_holder("b", 1)  # takes the only slot
        holder.release()
        flush_when(locks, granted, "granted")
        worker.await_log("has lost data", 20)
        book.open("b-1")
        assert book.value(granted) == "z"
        assert len(book.starts("a")) == 1


@pytest.mark.full
def test_a_task_with_several_locks_that_begins_again_is_not_reported_as_lost(book, locks):
    """It has new tokens by the time at which its worker notices the loss."""
    with book.worker(concurrency=1) as worker:
        with locks.client() as client, Lock(client, "k:a"):
            granted = book.send("pair", "a", "z")
            worker.await_log(f"{granted}] is parked")
            book.start_holder("b", 1)  # it takes the only slot
        flush_when(locks, granted, "granted")
        book.open("b-1")
        assert book.value(granted) == "z"
        worker.await_log("has lost data", 20)
        assert "No message that this worker has parked is lost" in worker.log()


@pytest.mark.full
@pytest.mark.needs_real_redis("data over a restart")
def test_a_task_that_began_again_before_redis_restarted_is_not_reported_as_lost(book, locks):
    """The worker that held some of its locks has stopped, so the task ran under other tokens."""
    with book.worker(concurrency=1) as parker, locks.client() as client:
        first, second = Lock(client, "k:a"), Lock(client, "k:z")
        assert first.acquire()
        assert second.acquire()
        task = book.send("pair", "a", "z")
        parker.await_log(f"{task}] is parked")
        book.start_holder("b", 1)  # it takes the only slot
        parker.signal(signal.SIGSTOP)  # it looks at its messages after the restart only
        with book.worker() as worker:
            first.release()
            worker.await_log(f"{task}] is parked")
        second.release()
        with book.worker():
            assert book.value(task) == "z"
            client.save()
            locks.restart(keep_data=True)
            parker.signal(signal.SIGCONT)
            book.open("b-1")
            parker.await_log("lost data", 20)
        assert "No message that this worker has parked is lost" in parker.log()


@pytest.mark.full
@pytest.mark.parametrize("end", ["requeue", "later"])
@pytest.mark.parametrize("task", ["act_late", "pair_lost"])
def test_a_parked_task_that_runs_again_is_not_lost_with_the_data(book, locks, task, end):
    """Redis was emptied while it ran. Its worker has reported that no message is lost."""
    with book.worker() as worker:
        first = book.start_holder("a", 1)
        again = book.send(task, "a", 2, hold="a-2", end=end)
        book.await_waiting("a", 1)
        book.open("a-1")
        assert book.value(first) == 1
        book.started(again)
        with locks.client() as client:
            client.flushall()
        worker.await_log("has lost data", 20)
        book.open("a-2")
        assert book.value(again) == 2
        assert [start["n"] for start in book.starts("a")] == [1, 2, 2]
        book.await_free("a")


@pytest.mark.full
def test_a_task_whose_wait_is_over_fails_though_redis_has_lost_it(book, locks):
    """Its worker has the message, and no slot for its end yet."""
    with book.worker(concurrency=1) as worker:
        book.start_holder("a", 1)
        waiting = book.send("act_patient", "a", 2)
        flush_when(locks, waiting, "overdue")
        worker.await_log("has lost data", 20)
        book.open("a-1")
        assert book.outcome(waiting)[0] == states.FAILURE


def flush_when(locks, task_id, state):
    """Empty Redis as soon as a task has this state and its worker has received the delivery."""
    with locks.client() as client:
        store = RedisAdminStore(client)
        eventually(lambda: why(store, task_id).state == state)
        eventually(lambda: not list(client.scan_iter("*:inbox:*")))
        client.flushall()


@pytest.mark.full
@pytest.mark.parametrize("what", ["Redis starts after the worker", "Redis is emptied"])
def test_doctor_does_not_report_a_missing_schema_for_ever(book, locks, what):
    """A live worker writes the schema when it finds that it may be missing."""
    if what == "Redis starts after the worker":
        locks.kill()
    with book.worker(pool="threads"):
        if what == "Redis is emptied":
            with locks.client() as client:
                eventually(lambda: client.exists("csl:fleet:marker"))
                client.flushall()
        else:
            locks.restart(keep_data=False)
        eventually(lambda: told_of_schema(locks) == SCHEMA, 15)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_started_before_redis_does_not_use_data_of_another_schema(book, locks, pool):
    """It says why, writes nothing, and runs the tasks when the operator has corrected that."""
    with locks.client() as client:
        client.set("csl:schema", "99")
        client.save()
    locks.kill()
    with book.worker(pool=pool) as worker:
        waiting = book.send("act", "a", 0)
        assert book.value(book.send("plain", "p", 1)) == 1
        locks.restart(keep_data=True)
        eventually(lambda: "data of schema 99" in worker.log(), 20, worker.log_tail)
        waiting_too = book.send("act_running", "c", 1)
        assert book.value(book.send("plain", "p", 2)) == 2
        eventually(lambda: worker.log().count("CRITICAL") == 1, 20, worker.log_tail)
        with locks.client() as client:
            assert client.keys("*") == [b"csl:schema"]
            assert not book.starts("a")
            assert not book.starts("c")
            client.delete("csl:schema")
        assert [book.value(waiting), book.value(waiting_too)] == [0, 1]
        assert worker.log().count("CRITICAL") == 1


def told_of_schema(locks) -> str:
    with locks.client() as client:
        return next((c.told for c in examine(RedisAdminStore(client)) if c.name == "schema"), "")


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_unreachable_at_worker_start(book, locks, pool):
    """The worker starts, plain tasks run, and locked ones run as soon as Redis is there."""
    locks.kill()
    with book.worker(pool=pool):
        waiting = [book.send("act", "a", n) for n in range(5)]
        assert book.value(book.send("plain", "p", 1)) == 1
        failing = book.send("act_failing", "b", 1)
        running = book.send("act_running", "c", 1)
        state, error = book.outcome(failing)
        assert (state, type(error)) == (states.FAILURE, BackendUnreachable)
        assert book.value(running) == 1
        assert book.starts("c")[0]["held"] is False
        in_time(ping(book), 2)
        assert not book.starts("a")
        locks.restart(keep_data=False)
        assert [book.value(r) for r in waiting] == list(range(5))
        assert book.peak("a") == 1
        book.await_free("a", LEASE + 3)


@pytest.mark.parametrize(
    "keep_data",
    [False, pytest.param(True, marks=pytest.mark.needs_real_redis("data over a restart"))],
)
def test_killed_and_restarted_in_mid_task(book, locks, keep_data):
    """The running task ends, what was with the broker runs, and others are served meanwhile."""
    with book.worker(concurrency=4, conf=SAFE):
        first = book.start_holder("a", 1)
        with locks.client() as client:
            client.bgsave() if False else client.save()
        locks.kill()
        later = book.send("act", "a", 2)
        assert book.value(book.send("plain", "p", 1)) == 1
        assert isinstance(book.outcome(book.send("act_failing", "b", 1))[1], BackendUnreachable)
        assert book.value(book.send("act_running", "c", 1)) == 1
        in_time(ping(book), 2)
        never(lambda: book.starts("a", n=2), during=0.5)
        book.open("a-1")
        assert book.value(first) == 1
        locks.restart(keep_data=keep_data)
        assert book.value(later, LEASE + 12) == 2
        assert book.order("a") == [1, 2]
        book.await_free("a", LEASE + 3)
        assert book.value(book.send("act", "d", 3)) == 3


@pytest.mark.needs_real_redis("data over a restart")
def test_parked_tasks_survive_a_restart_with_data(book, locks):
    """What was parked before the restart runs after it, in order."""
    with book.worker():
        first = book.start_holder("a", 1)
        parked = [book.send("act", "a", n) for n in (2, 3, 4)]
        book.await_waiting("a", 3)
        with locks.client() as client:
            client.save()
        locks.restart(keep_data=True)
        book.open("a-1")
        assert book.value(first) == 1
        assert [book.value(r, LEASE + 15) for r in parked] == [2, 3, 4]
        assert book.order("a") == [1, 2, 3, 4]
        assert book.peak("a") == 1
        book.await_free("a", LEASE + 3)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_stalled_redis_stalls_nothing_else(book, locks, pool):
    """Redis hangs (it accepts, and does not answer): ping within 2 s, plain tasks run."""
    with book.worker(pool=pool, concurrency=3):
        book.value(book.send("act", "a", 0))
        locks.pause()
        try:
            waiting = [book.send("act", f"k{n}", n) for n in range(6)]
            for n in range(5):
                assert book.value(book.send("plain", "p", n)) == n
                in_time(ping(book), 2)
        finally:
            locks.resume()
        assert [book.value(r) for r in waiting] == list(range(6))
        eventually(lambda: book.unacked() == 0, 10)
        for n in range(6):
            assert len(book.starts(f"k{n}")) == 1
            book.await_free(f"k{n}", LEASE + 3)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_tasks_that_wait_since_redis_answers_too_late_are_counted_for_the_alert(
    redis_url, locks, tmp_path, pool
):
    """It never counts as down for long: the agent waits longer for an answer than a task does."""

    def errors() -> int:
        (told,) = book.app.control.inspect(timeout=20, limit=1)._request("locks").values()
        return told["backend_errors"]

    with Proxy(locks.port) as proxy:
        conf = {"singleton_lock_backend": proxy.url, "singleton_lock_lease": LONG_LEASE}
        with (
            Book(redis_url, tmp_path, lock_url=locks.url, conf=conf) as book,
            book.worker(pool=pool) as worker,
        ):
            book.value(book.send("act", "a", 0))
            proxy.delay = 0.6  # a task waits 0.5 s for an answer, the agent 2 s
            late = book.send("act", "b", 1)
            worker.await_log("Locked tasks wait", 10)
            eventually(lambda: errors() >= 3, 20, worker.log_tail)
            proxy.delay = 0.0
            assert book.value(late, 20) == 1


def test_many_greenlets_that_redis_answers_at_once_lose_no_task_and_run_none_twice(book, locks):
    """Each acknowledges as soon as it has its lock, and kombu has ten connections for that."""
    needs_pool("gevent")
    with book.worker(pool="gevent", concurrency=100) as worker:
        book.value(book.send("act", "a", 0))
        locks.pause()
        try:
            sent = [book.send("act", f"k{n}", n) for n in range(150)]
            eventually(lambda: book.unacked() >= 100)
        finally:
            locks.resume()
        assert [book.value(each) for each in sent] == list(range(150))
        eventually(lambda: book.unacked() == 0, 10)
        assert "Couldn't ack" not in worker.log()
        assert len(book.starts()) == 151


def left_parked(book):
    """Return two tasks that a worker has parked, which has stopped since; their lock is free."""
    with Lock(book.client, "k:a", lease=LONG_LEASE), book.worker():
        parked = [book.send("act", "a", n) for n in range(2)]
        eventually(lambda: book.view("a").waiting == 2)
    return parked


@pytest.mark.full
def test_a_worker_that_started_before_a_full_redis_runs_its_parked_tasks(book, locks):
    """Only they can make room in it."""
    parked = left_parked(book)
    book.client.config_set("maxmemory", 1)
    locks.pause()
    try:
        with book.worker() as worker:
            worker.await_log("did not answer", 20)
            locks.resume()
            assert [book.value(each) for each in parked] == [0, 1]
            assert "CRITICAL" not in worker.log()
    finally:
        locks.resume()
        book.client.config_set("maxmemory", 0)


@pytest.mark.full
def test_a_worker_that_starts_on_a_full_redis_runs_its_parked_tasks_and_plain_ones(book):
    """After a restart of all workers, only they can make room in it; others wait for that."""
    parked = left_parked(book)
    book.client.config_set("maxmemory", 1)
    try:
        with book.worker() as worker:
            assert [book.value(each) for each in parked] == [0, 1]
            assert book.value(book.send("plain", "p", 1)) == 1
            waiting = book.send("act", "b", 3)
            worker.await_log("Locked tasks wait.", 20)
            assert "has reached maxmemory; this was not stored. It is redis:" in worker.log()
            book.client.config_set("maxmemory", 0)
            assert book.value(waiting) == 3
    finally:
        book.client.config_set("maxmemory", 0)


@pytest.mark.full
@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("how", ["silent", "full"])
def test_a_burst_for_a_busy_lock_in_an_outage_stalls_no_other_task(book, locks, pool, how):
    """More messages than the prefetch count wait to be parked, and plain tasks still run."""
    conf = {"worker_prefetch_multiplier": 1}
    with book.worker(pool=pool, concurrency=2, conf=conf):
        holder = book.start_holder("a")
        if how == "full":
            book.client.config_set("maxmemory", 1)
        else:
            locks.pause()
        try:
            burst = [book.send("act", "a", n) for n in range(1, 7)]
            eventually(lambda: book.unacked() >= 2)
            assert book.value(book.send("plain", "p", 1)) == 1
        finally:
            if how == "full":
                book.client.config_set("maxmemory", 0)
            else:
                locks.resume()
        book.open("a-0")
        assert [book.value(each) for each in (holder, *burst)] == list(range(7))
        assert len(book.starts("a")) == 7
        eventually(lambda: book.unacked() == 0, 10)


def test_why_finds_a_task_that_a_full_redis_has_not_stored(book):
    """It is neither in a lock nor lost: its worker has it."""
    with book.worker(pool="threads", concurrency=2) as worker:
        holder = book.start_holder("a")
        book.client.config_set("maxmemory", 1)
        try:
            task = book.send("act", "a", 1)
            worker.await_log("stays with the broker", 20)
            asked = SimpleNamespace(app=book.app)
            ran = CliRunner().invoke(locks_command, ("why", task), obj=asked)
            assert ran.exit_code == 0, ran.output
            assert ran.output.startswith(f"received: It was received by {worker.name}@")
            assert "did not get 'k:a'" in ran.output
        finally:
            book.client.config_set("maxmemory", 0)
            book.open("a-0")
        assert [book.value(each) for each in (holder, task)] == [0, 1]


@pytest.mark.full
def test_a_short_outage_costs_no_lease(book, locks):
    """Redis hangs while a task runs: it keeps its lock, and renews it afterwards (T8)."""
    with book.worker(conf={"singleton_lock_lease": 30.0}):
        first = book.send("act", "a", 1, hold="a-1")
        fence = book.started(first)["fence"]
        locks.pause()
        never(lambda: False, during=4)
        locks.resume()
        second = book.send("act", "a", 2)
        book.await_waiting("a", 1)
        book.await_renewal("a")
        assert book.view("a").fencing_token == fence
        book.open("a-1")
        assert [book.value(first), book.value(second)] == [1, 2]
        assert book.order("a") == [1, 2]
        book.await_free("a")


@pytest.mark.full
@pytest.mark.needs_real_redis("data over a restart")
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_T17_a_release_that_redis_missed_is_repeated_when_it_answers_again(book, locks, pool):
    """The next one begins then, not when the lease of a minute ends; the task does not run again.

    It had been parked, and is acknowledged late: so Redis keeps its message until it hears. With
    one lock, and with several. Found by the storm (seed 302).
    """
    conf = {"singleton_lock_lease": 60.0}
    with book.worker(pool=pool, concurrency=2, conf=conf) as worker:
        for times, task in enumerate(("act_lost", "pair_lost"), 1):
            book.start_holder(task)
            ends_unheard = book.send(task, task, "second", hold=f"{task}-1")
            book.await_waiting(task, 1)
            book.open(f"{task}-0")
            book.started(ends_unheard)
            behind = book.send("act", task, 2)
            book.await_waiting(task, 1)
            with locks.client() as client:
                client.save()
            locks.kill()
            book.open(f"{task}-1")
            eventually(lambda times=times: worker.log().count("could not release") >= times, 10)
            locks.restart(keep_data=True)
            book.value(ends_unheard)
            assert book.value(behind) == 2
            book.await_free(task)
            book.await_free("second")
            assert len(book.starts(id=ends_unheard)) == 1


@pytest.mark.needs_real_redis("data over a restart")
def test_T17_a_worker_that_celery_ends_repeats_a_release_that_redis_missed(
    redis_provider, tmp_path
):
    """Broker and locks are in one Redis. If it restarts, Celery 5.7 ends its loop.

    The worker did not read that a process could not release its lock. So the next task waited
    for the rest of the lease, and the first one ran again.
    """
    conf = {"singleton_lock_lease": 60.0, "task_ignore_result": True}
    with (
        RedisServer(redis_provider) as redis,
        Book(redis.url, tmp_path, conf=conf) as book,
    ):
        with book.worker(concurrency=2) as worker:
            book.start_holder("act_lost")
            ends_unheard = book.send("act_lost", "act_lost", hold="act_lost-1")
            book.await_waiting("act_lost", 1)
            book.open("act_lost-0")
            book.started(ends_unheard)
            book.started(book.send("act_late", "other", hold="other-0"))  # is not acknowledged yet
            behind = book.send("act", "act_lost", 2)
            book.await_waiting("act_lost", 1)
            with redis.client() as client:
                client.save()
            redis.kill()
            outcomes = ("Unrecoverable error", "Trying again in")
            eventually(lambda: any(each in worker.log() for each in outcomes))
            if outcomes[0] not in worker.log():
                pytest.skip("this Celery connects again")
            book.open("other-0")
            book.open("act_lost-1")
            worker.await_log("could not release")
            redis.start()
            worker.wait()
        with book.worker(concurrency=2):
            book.started(behind)
            assert len(book.starts(id=ends_unheard)) == 1


@pytest.mark.needs_real_redis("data over a restart")
def test_T17_a_retry_of_which_redis_did_not_hear_keeps_its_permit(book, locks, pool):
    """Its lock is not held until the lease of a minute ends; its ended attempt does not run again.

    It had been parked, and is acknowledged late: so Redis keeps its message until it hears.
    """
    with book.worker(pool=pool, concurrency=2, conf={"singleton_lock_lease": 60.0}) as worker:
        book.start_holder("a")
        retried = book.send("act_keep_late", "a", 1, hold="a-1", end="retry", extra=0.1)
        book.await_waiting("a", 1)
        book.open("a-0")
        book.started(retried)
        behind = book.send("act", "a", 2)
        book.await_waiting("a", 1)
        with locks.client() as client:
            client.save()
        locks.kill()
        book.open("a-1")
        eventually(lambda: "could not release" in worker.log(), 10)
        locks.restart(keep_data=True)
        assert [book.value(retried), book.value(behind)] == [1, 2]
        attempts = [(start["n"], start["retries"]) for start in book.starts("a")]
        assert attempts == [(0, 0), (1, 0), (1, 1), (2, 0)]
        book.await_free("a")


@pytest.mark.full
@pytest.mark.needs_real_redis("replication")
def test_tasks_that_a_backup_lacks_are_reported_if_the_running_redis_loads_it(
    book, locks, make_redis
):
    """An operator restores without a restart, as docs/redis.md says."""
    with book.worker(concurrency=2) as worker:
        assert book.value(book.send("act", "a", 0)) == 0
        backup = make_redis(
            "--repl-diskless-sync-delay", "0", "--replicaof", f"127.0.0.1 {locks.port}"
        )
        with backup.client() as client:
            eventually(lambda: client.exists("csl:fleet:marker"), 20)
            client.replicaof("NO", "ONE")
            client.delete("csl:fleet:marker")
        book.start_holder("a", 1)
        try:
            parked = [book.send("act", "a", n) for n in (2, 3)]
            for each in parked:
                worker.await_log(f"{each}] is parked: ")
            with locks.client() as client:
                client.config_set("repl-diskless-sync-delay", 0)
                client.replicaof("127.0.0.1", backup.port)
                eventually(lambda: client.info("replication")["master_link_status"] == "up", 20)
                client.replicaof("NO", "ONE")
            worker.await_log("has lost data", 20)
            (told,) = [line for line in worker.log().splitlines() if "has lost data" in line]
            assert all(each in told for each in parked)
        finally:
            book.open("a-1")

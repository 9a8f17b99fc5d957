"""Locks in every pool: prefork, threads, solo, gevent, eventlet; also without event loop or fork.

Each test starts its own workers, with leases of :data:`LEASE` seconds unless it says otherwise.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from celery_singleton_lock.lock.lease_watchdog import LINGER
from celery_singleton_lock.store.operator.base import Operator
from integration.book import LONG_LEASE, Book, needs_pool
from support.waiting import eventually, in_time, never
from support.workers import TESTS

LEASE = 12.0
"""It does not end while a process stands still: a renewal is due every third of it."""
SHORT = 1.5
LONG = {"singleton_lock_lease": LONG_LEASE}
NEXT = LEASE + 2
"""Seconds within which the next one starts on another worker, after one was killed."""

LOST = "The lock 'k:{}' was"
"""How the worker's log begins to tell of a loss."""

GREEN = ("gevent", "eventlet")


@dataclass(frozen=True)
class Ground:
    """A pool, and how its workers are started.

    Args:
        pool: what ``--pool`` takes.
        start_method: how prefork makes its children.
        polling: use a broker for which Celery has no event loop.
    """

    pool: str
    start_method: str = "fork"
    polling: bool = False

    def __str__(self) -> str:
        return "-".join(filter(None, [self.pool, self._special()]))

    def _special(self) -> str:
        return "polling" if self.polling else self.start_method.replace("fork", "")

    @property
    def shares_interpreter(self) -> bool:
        """Whether tasks run in the process of the watchdog."""
        return self.pool != "prefork"


PREFORK, THREADS, SOLO = Ground("prefork"), Ground("threads"), Ground("solo")
GEVENT, EVENTLET = Ground("gevent"), Ground("eventlet")
POLLING, SPAWN = Ground("prefork", polling=True), Ground("prefork", start_method="spawn")
ALL = [PREFORK, THREADS, SOLO, GEVENT, EVENTLET, POLLING, SPAWN]
ONE_AT_A_TIME = [SOLO]


def on(*grounds: Ground) -> pytest.MarkDecorator:
    """Run a test on these pools."""
    return pytest.mark.parametrize("ground", grounds, ids=str)


class Scene(Book):
    """A book whose workers have the ground's pool."""

    ground: Ground
    outbox: Path | None = None

    def send(self, task, key, n=0, **options):
        """Send a task; a broker in files may read one while it is written, so it gets it whole."""
        result = super().send(task, key, n, **options)
        if self.outbox is not None:
            for letter in self.outbox.iterdir():
                letter.rename(self.outbox.with_name("messages") / letter.name)
        return result

    def start(self, **options):
        """Start a worker."""
        options.setdefault("concurrency", 4)
        if self.ground.start_method != "fork":
            options["args"] = ("--pool-start-method", self.ground.start_method)
        return self.worker(pool=self.ground.pool, **options).start()


@pytest.fixture
def scene(ground, redis_url, tmp_path):
    needs_pool(ground.pool)
    if ground.start_method != "fork" and not _can_choose_start_method():
        pytest.skip("this Celery cannot choose how children are made (5.7 can)")
    conf = {
        "singleton_lock_lease": LEASE,
        "include": ["integration.worker_app"],  # spawned children import their tasks
        "worker_proc_alive_timeout": 30.0,  # and that takes a while on a busy machine
    }
    broker = redis_url
    if ground.polling:
        broker = "filesystem://"
        conf |= {"singleton_lock_backend": redis_url, **_folders(tmp_path)}
    with Scene(broker, tmp_path, backend=redis_url, lock_url=redis_url, conf=conf) as scene:
        scene.ground = ground
        if ground.polling:
            scene.outbox = tmp_path / "outbox"
            options = scene.app.conf.broker_transport_options
            scene.app.conf.broker_transport_options = {
                **options,
                "data_folder_out": str(scene.outbox),
            }
        yield scene


def _can_choose_start_method() -> bool:
    found = importlib.util.find_spec("celery.worker.worker")
    return "pool_start_method" in Path(found.origin).read_text()


def _folders(folder: Path) -> dict[str, object]:
    """Return a worker's settings of a broker in files."""
    for name in ("messages", "control", "outbox"):
        (folder / name).mkdir()
    return {
        "broker_transport_options": {
            "data_folder_in": str(folder / "messages"),
            "data_folder_out": str(folder / "messages"),
            "control_folder": str(folder / "control"),
            "polling_interval": 0.05,
        }
    }


@on(*ALL)
def test_one_key_runs_in_its_order_and_never_twice_at_once(scene, ground):
    """20 tasks of one key on four slots: each once, in order of arrival, none beside another."""
    scene.start()
    sent = [scene.send("act", "a", n, hold=0.01) for n in range(20)]
    assert [scene.value(result, 30) for result in sent] == list(range(20))
    if not ground.polling:  # its broker reads a folder, in no order
        assert scene.order("a") == list(range(20))
    assert sorted(scene.order("a")) == list(range(20))
    assert scene.peak("a") == 1
    scene.await_free("a")


@on(*[ground for ground in ALL if ground not in ONE_AT_A_TIME])
def test_a_parked_task_holds_no_slot(scene):
    """Two slots, one holds a lock, ten wait for it: another key's task starts all the same.

    One more waits that has another lock already, and keeps that.
    """
    scene.start(concurrency=2)
    first = scene.start_holder("a")
    parked = [scene.send("act", "a", n) for n in range(1, 11)]
    scene.await_waiting("a", 10)
    pair = scene.send("pair", "0", "a")
    scene.await_waiting("a", 11)
    assert [holder.task_id for holder in scene.view("0").holders] == [pair]
    assert scene.value(scene.send("act", "b", 1)) == 1
    scene.open("a-0")
    assert sorted(scene.value(result, 20) for result in (first, *parked)) == list(range(11))
    assert scene.peak("a") == 1
    assert scene.started(pair)["t"] >= max(end for _, end, _ in scene.runs("a"))
    scene.value(pair)
    scene.await_free("a")
    scene.await_free("0")


@on(SOLO)
def test_a_solo_worker_parks_a_task_whose_lock_another_holds(scene):
    """While one holds the lock, the other one parks its task, runs other keys, and is granted."""
    scene.start(queues="one")
    scene.start(queues="two")
    first = scene.start_holder("a", queue="one")
    parked = [scene.send("act", "a", n, queue="two") for n in (1, 2, 3)]
    scene.await_waiting("a", 3)
    assert scene.value(scene.send("act", "b", 1, queue="two")) == 1
    scene.open("a-0")
    assert [scene.value(result) for result in (first, *parked)] == [0, 1, 2, 3]
    assert scene.order("a") == [0, 1, 2, 3]
    assert scene.peak("a") == 1
    scene.await_free("a")


@on(*[ground for ground in ALL if not ground.polling])
def test_an_early_ack_task_is_acknowledged_when_it_holds_its_lock(scene, ground):
    """Not at its end: for that its process must hear of the lock, also one that was spawned.

    Solo itself acknowledges after the task, since the task keeps its loop.
    """
    scene.start()
    first = scene.start_holder("a", 1)
    if ground.pool != "solo":
        eventually(lambda: scene.unacked() == 0, 5, "acknowledged while it runs")
    scene.open("a-1")
    assert scene.value(first) == 1
    eventually(lambda: scene.unacked() == 0, 5, "acknowledged")


@pytest.mark.full
@on(SPAWN)
def test_only_the_task_that_lost_its_lock_is_interrupted_in_spawned_children(scene):
    """``abort``: it fails with LockLost, as in a forked child; the signal once killed the child."""
    worker = scene.start()
    others = [scene.send("act_abort", f"other-{n}", n, hold="others") for n in range(2)]
    first = scene.send("act_abort", "a", 1, hold="a-1")
    for result in (*others, first):
        scene.started(result, 30)
    children = set(worker.child_pids())
    assert scene.store.reset("k:a") == 1
    state, error = scene.outcome(first, 30)
    assert (state, type(error).__name__) == ("FAILURE", "LockLost")
    scene.open("others")
    assert [scene.value(result) for result in others] == [0, 1]
    assert set(worker.child_pids()) == children


@pytest.mark.full("[prefork-hog]", "-hog")
@pytest.mark.parametrize("end", ["sleep", "hog"])
@on(*ALL)
def test_t11_a_lease_is_renewed_for_as_long_as_its_task_runs(scene, end):
    """More than a lease of sleeping, or of computing in Python: renewed without a loss."""
    worker = scene.start()
    span = 1.3 * LEASE
    how = {"hold": span} if end == "sleep" else {"end": end, "extra": span}
    first = scene.send("act", "a", 1, **how)
    scene.started(first)
    other = scene.start(name="other")
    second = scene.send("act", "a", 2)
    assert scene.value(second, 30) == 2
    assert scene.order("a") == [1, 2]
    assert scene.peak("a") == 1
    assert LOST.format("a") not in worker.log() + other.log()


@pytest.mark.full
@on(GEVENT, EVENTLET)
def test_leases_are_renewed_after_a_pause_without_errors_and_files_left_open(scene):
    """A thread's connection is of no use to the next thread under gevent, and stays open."""
    worker = scene.start(conf={"singleton_lock_lease": SHORT})
    process, files = psutil.Process(worker.pid), []
    for number in range(5):
        task = scene.send("act", "a", number, hold=0.8 * SHORT)
        scene.started(task)
        assert scene.value(task) == number
        never(lambda: "renewing 1 leases failed" in worker.log(), during=LINGER + 0.5)
        files.append(process.num_fds())
    # A leak grows with each pause. What a garbage collection closes grows and shrinks.
    assert files != sorted(set(files))


@pytest.mark.full
@on(*ALL)
def test_t11_c_code_that_blocks_the_interpreter_keeps_the_lock_or_its_loss_is_reported(
    scene, ground
):
    """C with the GIL, past the lease: prefork renews; elsewhere nobody can, and the worker says so.

    The successor has a higher fencing token in either case.
    """
    lease = SHORT if ground.shares_interpreter else LEASE
    conf = {"singleton_lock_lease": lease}
    worker = scene.start(queues="one", conf=conf)
    other = scene.start(queues="two", name="other", conf=conf)
    scene.value(scene.send("act", "b", 0, queue="two"), 30)  # its children are there
    first = scene.send("act", "a", 1, end="freeze", extra=max(3 * SHORT, 1.3 * lease), queue="one")
    fence = scene.started(first, 30)["fence"]
    second = scene.send("act", "a", 2, queue="two")
    assert scene.value(second, 30) == 2
    scene.outcome(first)
    assert scene.starts("a", n=2)[0]["fence"] > fence
    if ground.shares_interpreter:
        worker.await_log(LOST.format("a"), 5)
    else:
        assert scene.peak("a") == 1
        assert LOST.format("a") not in worker.log() + other.log()


@pytest.mark.full
@on(*ALL)
def test_t7_a_killed_workers_parked_tasks_go_to_another(scene):
    """Kill -9 of the worker that holds: the next one starts elsewhere within a lease plus 2 s."""
    one = scene.start(queues=["one", "both"])
    first = scene.send("act", "a", 1, hold="never", queue="one")
    scene.started(first)
    scene.start(queues=["two", "both"], name="other")
    parked = []
    for n in (2, 3):  # one by one: a broker of files may swap two messages of one millisecond
        parked.append(scene.send("act", "a", n, queue="two"))
        scene.await_waiting("a", n - 1)
    killed = scene.kill_worker(one)
    assert [scene.value(result) for result in parked] == [2, 3]
    assert scene.order("a") == [1, 2, 3]
    assert scene.peak("a") == 1
    scene.await_free("a")
    in_time(scene.starts("a", n=2)[0]["t"] - killed, NEXT)


@pytest.mark.full("[prefork]")
@on(*ALL)
def test_warm_shutdown_finishes_what_runs_and_loses_nothing(scene, ground):
    """TERM while one runs and two are parked: the one ends here, the others on the next worker."""
    one = scene.start()
    first = scene.start_holder("a", 1)
    rest = [scene.send("act", "a", n) for n in (2, 3)]
    if ground.pool != "solo":  # whose loop stands still
        scene.await_waiting("a", 2)
    one.terminate()
    if ground.pool != "solo":
        one.await_log("Warm shutdown")
    scene.open("a-1")
    assert one.wait() == 0
    assert scene.value(first) == 1
    scene.start(name="heir")
    assert [scene.value(result, 30) for result in rest] == [2, 3]
    assert sorted(scene.order("a")) == [1, 2, 3]
    assert scene.peak("a") == 1
    scene.await_free("a")


@pytest.mark.full
@pytest.mark.needs_real_redis("the speed of a server")
@on(THREADS, GEVENT, EVENTLET)
def test_100_blocked_tasks_keep_100_locks(scene):
    """All at once, for more than a lease; 100 more wait for them; each runs once, in order."""
    worker = scene.start(concurrency=100, args=("--prefetch-multiplier", "1"))
    held = [scene.send("act", f"k{n}", n, hold="go") for n in range(100)]
    for result in held:
        scene.started(result)
    waiting = [scene.send("act", f"k{n}", 100 + n) for n in range(100)]
    for n in range(100):
        scene.await_waiting(f"k{n}", 1)
    eventually(lambda: min(_lease_ends(scene)) > 0, 1)
    stays = scene.client.time()[0] + 1.3 * LEASE
    eventually(lambda: scene.client.time()[0] > stays)
    assert min(_lease_ends(scene)) > 0
    scene.open("go")
    assert sorted(scene.value(result, 30) for result in (*held, *waiting)) == list(range(200))
    for n in range(100):
        assert scene.order(f"k{n}") == [n, 100 + n]
        assert scene.peak(f"k{n}") == 1
    assert "was lost" not in worker.log()


def _lease_ends(scene) -> list[float]:
    return [
        min((holder.expires_in for holder in scene.view(f"k{n}").holders), default=0.0)
        for n in range(100)
    ]


@pytest.mark.full
@pytest.mark.needs_real_redis("INFO stats")
@on(THREADS, GEVENT, EVENTLET)
def test_tasks_one_after_another_open_no_connection_each(ground, redis_url, make_redis, tmp_path):
    """After ten tasks 100 more open none to the locks' Redis, though each has its own greenlet.

    That Redis is a server of its own: Celery itself opens one per greenlet to the result backend.
    """
    needs_pool(ground.pool)
    locks = make_redis()
    conf = {"singleton_lock_backend": locks.url}
    with Scene(redis_url, tmp_path, lock_url=locks.url, conf=conf) as scene:
        scene.ground = ground
        scene.start(concurrency=4)

        def opened_by(count: int) -> int:
            before = scene.client.info("stats")["total_connections_received"]
            for result in [scene.send("act", f"k{n}", n) for n in range(count)]:
                scene.value(result, 30)
            return int(scene.client.info("stats")["total_connections_received"] - before)

        opened_by(10)
        assert opened_by(100) <= 30


@pytest.mark.full
@on(GEVENT, EVENTLET)
@pytest.mark.parametrize("task", ["act", "act_late"])
def test_t17_a_terminated_greenlet_frees_its_lock(scene, task):
    """revoke(terminate=True) ends the greenlet; the next one starts within 2 s."""
    scene.start(conf=LONG)
    first = scene.send(task, "a", 1, hold="never")
    scene.started(first)
    second = scene.send(task, "a", 2)
    scene.await_waiting("a", 1)
    revoked = time.monotonic()
    scene.app.control.revoke(first, terminate=True)
    took = scene.started(second)["t"] - revoked
    assert scene.outcome(first)[0] == "REVOKED"
    assert scene.value(second) == 2
    assert scene.peak("a") == 1
    scene.await_free("a")
    in_time(took, 2)


@pytest.mark.full
@on(GEVENT)
@pytest.mark.parametrize("task", ["act", "act_late"])
def test_t17_a_greenlets_time_limit_frees_its_lock(scene, task):
    """Gevent knows a hard time limit; the next one starts soon after it."""
    scene.start(conf=LONG)
    first = scene.send(task, "a", 1, hold="never", time_limit=1)
    begun = scene.started(first)["t"]
    second = scene.send(task, "a", 2)
    took = scene.started(second)["t"] - begun
    assert scene.outcome(first)[0] == "FAILURE"
    assert scene.value(second) == 2
    assert scene.peak("a") == 1
    scene.await_free("a")
    in_time(took, 1 + 2)


@pytest.mark.full("polling")
@on(POLLING, SPAWN)
def test_a_killed_child_frees_its_lock(scene, ground):
    """Kill -9 of the child: within 2 s; without an event loop Celery itself looks after 10 s."""
    scene.start(concurrency=2, conf=LONG)
    first = scene.send("act", "a", 1, hold="never")
    child = scene.started(first)["pid"]
    second = scene.send("act", "a", 2)
    scene.await_waiting("a", 1)
    killed = scene.kill_child(child)
    took = scene.started(second, 20)["t"] - killed
    assert scene.outcome(first)[0] == "FAILURE"
    assert scene.value(second) == 2
    scene.await_free("a")
    in_time(took, 13 if ground.polling else 2)


def _refusal(redis_url, tmp_path, *args: str, **env: str) -> str:
    """Start a worker that must not start, and return what it says."""
    with Book(redis_url, tmp_path) as book:
        worker = book.worker(env=env)
        ended = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "integration.worker_app", "worker", *args],
            env=worker._env,
            cwd=TESTS,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode != 0
    return ended.stdout + ended.stderr


@pytest.mark.full
def test_an_unknown_pool_is_refused_by_name(redis_url, tmp_path):
    """Nobody knows where an unknown pool runs tasks: the worker names it, and the known ones."""
    said = _refusal(
        redis_url,
        tmp_path,
        *("--pool", "custom"),
        CELERY_CUSTOM_WORKER_POOL="integration.unknown_pool:OddPool",
    )
    assert "integration.unknown_pool.OddPool" in said
    assert "--pool prefork, threads, solo, gevent, eventlet" in said


@pytest.mark.full
@pytest.mark.parametrize("pool", GREEN)
def test_a_green_pool_without_green_threads_is_refused(redis_url, tmp_path, pool):
    """worker_pool instead of --pool leaves sockets and threads as they are: a lock blocks all."""
    needs_pool(pool)
    said = _refusal(redis_url, tmp_path, BOOK_CONF=f'{{"worker_pool": "{pool}"}}')
    assert f"--pool {pool} on the command line" in said


@on(THREADS)
def test_a_task_that_is_terminated_before_a_thread_begins_it_frees_its_lock(scene):
    """Celery cannot terminate it: its thread neither runs the task, nor reports an end."""
    scene.start(concurrency=1)
    by = Operator("jane")
    scene.store.pause("k:a", by)  # else the granted task takes the thread before the plain one
    terminated = scene.send("act", "a", 2)
    scene.await_waiting("a", 1)
    scene.started(scene.send("plain", "p", hold="slot"))
    scene.store.resume("k:a", by)
    eventually(
        lambda: [holder.task_id for holder in scene.view("a").holders] == [terminated],
        message="it is granted",
    )
    scene.app.control.revoke(terminated, terminate=True, reply=True)
    scene.open("slot")
    following = scene.send("act", "a", 3)
    assert scene.value(following) == 3
    assert scene.state(terminated) == "REVOKED"
    scene.await_free("a")


@on(GEVENT)
def test_a_hard_time_limit_frees_the_lock_though_the_tasks_hook_fails(scene):
    """Celery calls ``on_failure`` in the greenlet, before it reports the end."""
    scene.start()
    scene.started(scene.send("act_hook", "a", 1, hold="never"))
    assert scene.value(scene.send("act", "a", 2)) == 2
    scene.await_free("a")


@pytest.mark.full
@on(THREADS, GEVENT, EVENTLET)
def test_a_refused_task_ends_though_its_hook_fails(scene):
    """Neither its message stays unacknowledged, nor does it stay parked."""
    scene.start()
    scene.started(scene.send("act", "a", 1, hold="first"))
    refused = [scene.send("act_hook_fail", "a", 2), scene.send("act_hook_patient", "a", 3)]
    assert [scene.outcome(each)[0] for each in refused] == ["FAILURE", "FAILURE"]
    scene.open("first")
    scene.await_free("a")
    scene.await_drained("celery")


@pytest.mark.full
@on(THREADS, GEVENT, EVENTLET)
def test_a_failed_task_ends_though_its_hook_fails(scene):
    """No loss of its lock is reported."""
    worker = scene.start(conf={"singleton_lock_lease": SHORT})
    failed = scene.send("act_hook", "a", 1, end="raise")
    assert scene.outcome(failed)[0] == "FAILURE"
    assert scene.value(scene.send("act", "a", 2)) == 2

    def in_flight():
        (told,) = scene.app.control.inspect(timeout=20, limit=1).stats().values()
        return told["singleton_lock"]["in_flight"]

    eventually(lambda: in_flight() == {})
    assert LOST.format("a") not in worker.log()

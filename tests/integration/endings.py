"""Every way in which a task can end: how to cause it, and when its lock must be free.

Each ending has a scene: a first task that holds the lock and ends so, a next one that is parked
behind it, and, as far as the pool has a slot for it, a plain task that ends in the same way beside
them: what Celery makes of that one, it must make of the locked one.

The table is :data:`ENDINGS`. To add an ending, add a row; to add a pool, add it to :data:`POOLS`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import psutil
import pytest
from celery import states
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_singleton_lock.demo.redis_server import RedisServer
from integration.book import Book, alive
from support.redelivery import redelivery_after
from support.versions import TELLS_EXIT, TELLS_REJECTED
from support.waiting import eventually, in_time, never
from support.workers import CeleryWorker

POOLS: Final = ("prefork", "threads", "gevent", "eventlet", "solo")
LEASE: Final = 3.0
"""Seconds: ``singleton_lock_lease`` of a worker that is killed."""

SOON: Final = 2.0
"""Seconds: bound where a process that lives releases."""

LAPSE: Final = LEASE + 2
"""Seconds: bound where nobody is left to release."""

GREEN: Final = ("gevent", "eventlet")
THREADED: Final = ("threads", *GREEN, "solo")
MAIN_DIES: Final = "its process is the worker's: see *worker killed*"
NO_CHILD: Final = "there is no child process"
NO_LIMITS: Final = "Celery has no such time limit here: the task goes on, and keeps its lock"
NO_TERMINATE: Final = "Celery cannot terminate here: the task goes on, and keeps its lock"
DEAF: Final = "the worker hears nothing while a task runs, so it takes effect after the task's end"
NO_PREFETCH: Final = "the worker fetches nothing while a task runs"
ONE_SLOT: Final = "one slot, and no other"

IMPATIENT: Final = {"broker_transport_options": redelivery_after(1)}
"""A Redis broker that soon delivers again what was not acknowledged."""

DURABLE: Final = ("--appendonly", "yes", "--appendfsync", "always")
"""Arguments of a Redis that keeps all that it has confirmed."""

GREEDY: Final = {
    "worker_prefetch_multiplier": 4,
    "broker_transport_options": redelivery_after(2),
}
"""Workers that fetch more than they run, from a broker that soon delivers it again."""

PLAIN: Final = {
    "act": "plain",
    "act_late": "plain_kept",
    "act_lost": "plain_late",
    "act_auto": "plain_auto",
    "act_auto_late": "plain_auto_late",
    "act_keep": "plain",
    "act_keep_late": "plain_kept",
}
"""The same tasks without a lock."""


@dataclass
class Scene:
    """One ending, played on one worker.

    Args:
        book: its tasks, broker and locks.
        pool: of the worker.
        key: of the lock.
        late: late acknowledgement.
        keeper: another worker; it consumes the queue ``keeper``, and outlives all.
        worker: the one in which the first task runs, if it stands already.
        queue: which only that worker consumes.
        others: tasks of other keys, which are to run whatever happens.
        own: ends with the scene.
        make_redis: starts a Redis.
    """

    book: Book
    pool: str
    key: str
    late: bool
    keeper: CeleryWorker
    worker: CeleryWorker | None = None
    queue: str = "celery"
    locked: str = ""
    plain: str = ""
    next: str = ""
    mortal: bool = False
    others: dict[str, str] = field(default_factory=dict)
    own: ExitStack = field(default_factory=ExitStack)
    make_redis: Callable[..., RedisServer] = RedisServer
    _began: dict[str, Any] = field(default_factory=dict)

    # -- players ----------------------------------------------------------------------------------

    def victim(self, **options: Any) -> CeleryWorker:
        """Start a worker of this scene's own, which may die."""
        self.queue, self.mortal = f"q-{self.key}", True
        self.worker = self.book.worker(pool=self.pool, queues=self.queue, **options).start()
        return self.worker

    def first(self, end: str = "return", *, task: str = "", **options: Any) -> None:
        """Start the task that holds the lock, and a plain one beside it."""
        options.setdefault("hold", f"{self.key}-1")
        self.send_both(end=end, task=task, **options)
        for task_id in self.both():
            self._began[task_id] = self.book.started(task_id)
        if (
            not self.late and self.pool != "solo"
        ):  # whose loop stands still, and Celery's acks in it
            eventually(lambda: not set(self.both()) & set(self.with_broker()), 10, "acknowledged")

    def send_both(self, *, task: str = "", **options: Any) -> None:
        """Send the first, and a plain one, with an id of its own."""
        task = task or ("act_late" if self.late else "act")
        options.setdefault("queue", self.queue)
        self.locked = self.book.send(task, self.key, 1, **options)
        if self.pool != "solo":
            self.plain = self.book.send(PLAIN[task], f"{self.key}-plain", 1, **options)

    def both(self) -> list[str]:
        """Return the ids of the first and of the plain task, if there is one."""
        return [*filter(None, [self.locked, self.plain])]

    def ids(self) -> list[str]:
        """Return the ids of all tasks of this scene."""
        return [*filter(None, [self.locked, self.plain, self.next]), *self.others]

    def behind(self) -> None:
        """Park the next task."""
        away = self.mortal or self.pool == "solo"
        self.next = self.book.send("act", self.key, 2, queue="keeper" if away else self.queue)
        self.book.await_arrived(self.next, self.key)

    def both_begun(self, end: str = "return", **options: Any) -> None:
        """Start the first, and park the next."""
        self.first(end, **options)
        self.behind()

    def move(self, conf: Mapping[str, Any]) -> RedisServer:
        """Go on with a broker of the scene's own; locks and results stay where they are."""
        server, url = self.make_redis(*DURABLE), self.book.url
        conf = {"singleton_lock_backend": url, **conf}
        book = Book(server.url, self.book.journal.folder, backend=url, lock_url=url, conf=conf)
        self.book = self.own.enter_context(book)
        return server

    def overfill(self) -> None:
        """Have the worker fetch tasks of two other keys, for which it has no slot."""
        for other in (f"{self.key}-a", f"{self.key}-b"):
            for n in (1, 2):
                task_id = self.book.send(
                    "act_late" if self.late else "act", other, n, queue=self.queue, hold=0.05
                )
                self.others[task_id] = other
        # A green pool that is full keeps the consumer waiting, so no more than one is fetched.
        most = 1 if self.pool in GREEN else len(self.others)
        eventually(lambda: len(self.fetched()) >= most, 10, "fetched")

    def fetched(self) -> list[str]:
        """Return which of the others the worker has fetched, and not acknowledged."""
        messages = self.book.broker.hvals("unacked")
        return [i for i in self.others if any(i.encode() in message for message in messages)]

    def let(self) -> None:
        """Open the gate of the first."""
        self.book.open(f"{self.key}-1")

    def heir(self) -> None:
        """Have the keeper consume what the victim has left in its queue."""
        self.tell("add_consumer", self.queue)

    def tell(self, order: str, *args: Any, to: CeleryWorker | None = None, **options: Any) -> Any:
        """Send a remote control command, and return the answers."""
        name = f"{(to or self.keeper).name}@{os.uname().nodename}"
        control = getattr(self.book.app.control, order)
        return control(*args, destination=[name], reply=True, timeout=20, **options)

    def revoke(self, ids: list[str]) -> None:
        """Revoke tasks, and wait until the worker and the keeper know it."""
        # The loop of a solo worker stands still while it works, and so does its answer.
        most = {"timeout": 0.2} if self.pool == "solo" else {"timeout": 20, "limit": 2}
        self.book.app.control.revoke(ids, reply=True, **most)

    # -- facts ------------------------------------------------------------------------------------

    def pid(self, task_id: str) -> int:
        """Return the process in which a task runs."""
        return int(self._began[task_id]["pid"])

    def ended(self, times: int = 1) -> float:
        """Return when the task that ran first ended; in the n-th of its runs."""

        def end() -> float:
            runs = self.book.runs(self.key)
            ends = [end for _, end, start in runs if start["id"] == runs[0][2]["id"]]
            return min(ends[times - 1 :], default=float("inf"))

        return eventually(lambda: (t := end()) < float("inf") and t, 10, "an end")

    def passed(self) -> bool:
        """Return whether the next one has started though the first runs."""
        return self.runs(self.next) > 0 and self.book.runs(self.key)[0][1] == float("inf")

    def took(self, since: float | None = None, timeout: float = 15) -> float:
        """Return the seconds from an event (the end of the first) to the next one's start."""
        begun = self.book.started(self.next, timeout)["t"]
        return float(begun - (self.ended() if since is None else since))

    def runs(self, task_id: str) -> int:
        """Return how often a task has begun."""
        return len(self.book.starts(id=task_id))

    def await_reserved(self) -> None:
        """Wait until the lock is kept for the first's next attempt."""
        eventually(
            lambda: [h.state for h in self.book.view(self.key).holders] == ["reserved"],
            message=lambda: f"reserved: {self.book.view(self.key)}",
        )

    def with_broker(self) -> list[str]:
        """Return which of the scene's tasks the broker still knows."""
        broker = self.book.broker
        messages = [m for q in ("celery", self.queue, "keeper") for m in broker.lrange(q, 0, -1)]
        messages += broker.hvals("unacked")
        return [i for i in self.ids() if any(i.encode() in message for message in messages)]

    def name(self, task_id: str) -> str:
        """Return which of the scene's tasks this is."""
        names = ("locked", "plain", "next")
        return next((n for n in names if getattr(self, n) == task_id), self.others.get(task_id, ""))

    def facts(self) -> dict[str, Any]:
        """Return state and runs of each task, for the message of a failure."""
        return {self.name(i): (self.book.state(i), self.runs(i)) for i in self.ids()}

    def leftovers(self) -> dict[str, Any]:
        """Return what Redis still keeps of the lock's holders and waiters: nothing, at the end."""
        keys, client = self.book.store.keyspace.lock(f"k:{self.key}"), self.book.client
        parts = ("holders", "queue", "record", "bodies", "deadlines", "adrift")
        found: dict[str, Any] = {
            part: client.type(getattr(keys, part))
            for part in parts
            if client.exists(getattr(keys, part))
        }
        index = [k for k, v in client.hgetall(keys.index).items() if self.key.encode() in v]
        if index:
            found["index"] = index
        if client.zscore(keys.due, f"k:{self.key}") is not None:
            found["due"] = True
        return found


Play = Callable[[Scene], float]
"""Plays a scene up to the next one's start, and returns the seconds that its start took."""


@dataclass(frozen=True)
class Ending:
    """A row of the matrix.

    Args:
        name: in the docs.
        play: brings it about.
        state: what Celery says of the task in the end, with early acknowledgement.
        late: the same with late acknowledgement; None if that makes no difference.
        runs: how often its body begins; (early, late).
        bound: seconds, from the ending to the start of the next task.
        cannot: pool -> why there is no such ending in it.
        part: of the table.
        own: the worker does not survive it, or needs options of its own.
        full: played for the matrix only; other tests show the promise in less time.
        again: the broker delivers once more what was not acknowledged: a plain task may run twice.
        but: pool -> states and runs, where Celery makes something else of it; more than one state
            where that is left to chance.
    """

    name: str
    play: Play
    state: str = states.SUCCESS
    late: str | None = None
    runs: tuple[int, int] = (1, 1)
    bound: float = SOON
    cannot: Mapping[str, str] = field(default_factory=dict)
    part: str = ""
    own: bool = False
    full: bool = False
    again: bool = False
    but: Mapping[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)

    def acks(self) -> tuple[bool, ...]:
        """Return with which acknowledgement it is played: early, and late where that matters."""
        return (False,) if self.late is None else (False, True)

    def expected(self, scene: Scene) -> tuple[str, ...]:
        """Return the task's state in the end; all that it may be, where that is left to chance."""
        if scene.pool in self.but:
            return self.but[scene.pool][0]
        return (self.late if scene.late and self.late is not None else self.state,)


# -- the task ends itself --------------------------------------------------------------------------


def itself(end: str, **options: Any) -> Play:
    """Return a scene in which the first task ends in the given way when its gate opens."""

    def play(scene: Scene) -> float:
        scene.both_begun(end, **options)
        scene.let()
        return scene.took()

    return play


def keeps(scene: Scene, end: str, **options: Any) -> None:
    """Let the first end so that its permit is reserved for its next attempt."""
    scene.both_begun(end, task="act_keep_late" if scene.late else "act_keep", **options)
    scene.let()


def retried_and_kept(end: str, extra: Any) -> Play:
    """Return a scene in which the next attempt runs before others. Measured from its end."""

    def play(scene: Scene) -> float:
        keeps(scene, end, extra=extra)
        took = scene.took(scene.ended(times=2))
        assert scene.book.order(scene.key) == [1, 1, 2]
        return took

    return play


def revoked_before_its_retry(scene: Scene) -> float:
    """The reservation ends with the revoke, not with the ETA."""
    keeps(scene, "retry", extra=5)
    scene.await_reserved()
    asked = time.monotonic()
    scene.revoke(scene.both())
    return scene.took(asked)


def retry_that_never_comes(scene: Scene) -> float:
    """Its message is purged from its queue, so the reservation expires after the ETA."""
    astray, countdown = f"astray-{scene.key}", 0.5
    keeps(scene, "retry-elsewhere", extra=[countdown, astray])
    for task_id in scene.both():
        eventually(lambda i=task_id: scene.book.state(i) == states.RETRY, 10, "retried")
    never(lambda: scene.runs(scene.next), during=countdown, message="the next one started early")
    assert scene.book.broker.delete(astray) == 1
    return scene.took(scene.ended() + countdown)


def out_of_memory(scene: Scene) -> float:
    """Celery raises it again in the main process, which ends a prefork worker."""
    scene.victim()
    return itself("memory")(scene)


def autoretry(scene: Scene) -> float:
    """Raise what the task retries by declaration."""
    scene.both_begun("raise", task="act_auto_late" if scene.late else "act_auto")
    scene.let()
    return scene.took()


def keeps_running(then: Callable[[Scene], None]) -> Play:
    """Return a play in which something happens that does not end the task."""

    def play(scene: Scene) -> float:
        scene.both_begun()
        then(scene)
        never(lambda: scene.runs(scene.next), during=0.5, message="the next one started early")
        scene.let()
        return scene.took()

    return play


# -- it is ended -----------------------------------------------------------------------------------


def soft_limit(scene: Scene) -> float:
    scene.first("soft", hold=None, extra="raise", soft_time_limit=1)
    scene.behind()
    return scene.took()


def hard_limit(scene: Scene) -> float:
    """Measure from the limit, which is when Celery kills the process."""
    scene.both_begun(hold="never", time_limit=1)
    return scene.took(scene.book.started(scene.locked)["t"] + 1)


def killed_child(scene: Scene) -> float:
    scene.both_begun(hold="never")
    killed = [scene.book.kill_child(scene.pid(task_id)) for task_id in scene.both()]
    return scene.took(killed[0])


def revoked_before(scene: Scene) -> float:
    """Nothing is held: measure how long the next one needs from its sending."""
    ids = {"act": str(uuid4()), "plain": str(uuid4())}
    scene.tell("revoke", list(ids.values()), to=scene.worker)
    scene.locked = scene.book.send("act", scene.key, 1, task_id=ids["act"])
    scene.plain = scene.book.send("plain", scene.key, 1, task_id=ids["plain"])
    return follow(scene)


def expired_before(scene: Scene) -> float:
    scene.send_both(expires=-1)
    return follow(scene)


def follow(scene: Scene) -> float:
    """Send the next one, and return the seconds up to its start."""
    for task_id in scene.both():
        eventually(lambda i=task_id: scene.book.state(i) in states.READY_STATES, 10)
    return send_next(scene)


def send_next(scene: Scene) -> float:
    """Send the next task to a free lock; return the seconds until its start."""
    sent = time.monotonic()
    scene.next = scene.book.send("act", scene.key, 2, queue=scene.queue)
    return scene.took(sent)


def waiting_behind_another(scene: Scene, **options: Any) -> None:
    """Let a third task hold the lock; the first is parked behind it, the next behind that."""
    away = {"queue": "keeper"} if scene.pool == "solo" else {}
    holder = scene.book.send("act", scene.key, 0, hold=f"{scene.key}-1")
    scene.book.started(holder)
    scene.locked = scene.book.send("act", scene.key, 1, **away, **options)
    scene.next = scene.book.send("act", scene.key, 2, **away)
    for task_id in (scene.locked, scene.next):
        scene.book.await_arrived(task_id, scene.key)


def revoked_while_parked(scene: Scene) -> float:
    """Measure from the revoke to the end of the revoked; the holder runs on."""
    waiting_behind_another(scene)
    asked = time.monotonic()
    scene.revoke([scene.locked])
    scene.book.await_waiting(scene.key, 1)
    took = time.monotonic() - asked
    assert scene.book.order(scene.key) == [0]
    scene.let()
    assert scene.book.value(scene.next) == 2
    return took


def expired_while_parked(scene: Scene) -> float:
    waiting_behind_another(scene, expires=1)
    never(lambda: scene.runs(scene.next), during=1.0)
    scene.let()
    begun = scene.book.started(scene.next)["t"]
    return float(begun - scene.ended())


def revoke_running(scene: Scene) -> None:
    scene.revoke(scene.both())


def terminated(number: str) -> Play:
    """Return a play in which the first is terminated with a signal."""

    def play(scene: Scene) -> float:
        scene.both_begun(hold="never")
        asked = time.monotonic()
        if scene.pool == "prefork":  # a greenlet lives until its task's last block has run
            for task_id in scene.both():
                scene.book.journal.note("killed", victim=scene.pid(task_id))
        scene.book.app.control.revoke(scene.both(), terminate=True, signal=number)
        return scene.took(asked)

    return play


# -- its worker ends, or is changed ----------------------------------------------------------------


def shutdown(
    *signals: str,
    within: bool = True,
    conf: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Play:
    """Return a play in which the worker gets signals while its task runs.

    Args:
        signals: one after the other.
        within: the task ends after the last signal, by itself.
        conf: settings of the worker.
        env: its environment.
    """

    def play(scene: Scene) -> float:
        worker = scene.victim(conf=dict(conf or {}), env=env)
        scene.both_begun()
        for name in signals[:-1]:
            worker.signal(getattr(signal, name))
            worker.await_log("Warm shutdown")
        asked = time.monotonic()
        worker.signal(getattr(signal, signals[-1]))
        if scene.pool == "solo" and not within:
            took = scene.took()  # Celery's handler fails in the task's own frame, and so ends it
        elif within or scene.pool != "prefork":
            worker.await_log("hutdown")
            hold = 0.3 if within or scene.late else LEASE + 2
            never(scene.passed, during=hold, message="the next one started early")
            scene.let()
            took = scene.took()
        else:
            took = gone(scene, asked)
        worker.wait()
        scene.heir()
        return took

    return play


def gone(scene: Scene, asked: float) -> float:
    """The worker ends the processes of its tasks: their runs end with them."""
    for pid in {scene.pid(task_id) for task_id in scene.both()}:
        died = asked
        while alive(pid) and time.monotonic() < asked + 90:
            died = time.monotonic()
            time.sleep(0.002)
        scene.book.journal.note("killed", victim=pid, t=died)
    scene.let()
    return scene.took()


def killed_worker(scene: Scene) -> float:
    worker = scene.victim(conf={"singleton_lock_lease": LEASE})
    scene.both_begun()
    killed = scene.book.kill_worker(worker)
    took = scene.took(killed)
    scene.let()
    if scene.late or scene.pool == "solo":  # only a visibility time-out brings the message back
        scene.book.worker(queues=scene.queue, conf=IMPATIENT).start()
    return took


def connection_lost(scene: Scene) -> float:
    """Redis cuts every connection of the worker: to the broker, and to the locks too."""
    worker = scene.victim()
    scene.mortal = False
    scene.both_begun()
    main = psutil.Process(worker.pid)
    for process in [main, *main.children()]:
        for connection in process.net_connections("tcp4"):
            scene.book.broker.client_kill_filter(addr="{}:{}".format(*connection.laddr))
    if scene.pool != "solo":
        worker.await_log("Connection to broker lost")
    never(lambda: scene.runs(scene.next), during=0.5, message="the next one started early")
    scene.let()
    return scene.took()


def cut(scene: Scene, broker: RedisServer) -> None:
    """Cut every connection to the broker."""
    with broker.client() as admin:
        me = admin.client_id()
        for client in admin.client_list():
            if int(client["id"]) != me:
                admin.client_kill_filter(_id=client["id"])
    if scene.pool not in GREEN:  # whose consumer waits for a slot
        scene.worker.await_log("Connection to broker lost")


def restart(scene: Scene, broker: RedisServer) -> None:
    """Kill the broker, and start it again with its data, on its port."""
    broker.kill()
    if scene.pool not in GREEN:
        scene.worker.await_log("Connection to broker lost")
    never(scene.passed, during=1, message="the next one started early")
    broker.start()


def connected_again(scene: Scene, worker: CeleryWorker) -> None:
    """Wait until the worker has its broker again; if Celery ends it instead, start another one.

    Celery 5.7 ends a worker that finds its Redis gone while it has messages to acknowledge.
    """
    ended = "Unrecoverable error"
    eventually(
        lambda: ended in worker.log() or worker.log().count("Connected to redis") > 1,
        15,
        "connected again",
    )
    if ended in worker.log():
        scene.book.worker(pool=scene.pool, queues=scene.queue).start()


def prefetched(lose: Callable[[Scene, RedisServer], None]) -> Play:
    """Return a play in which a worker with more messages than slots loses its broker.

    One runs, one of its key is parked, and of other keys there are two each, of which one has been
    sent to the pool, but has no slot.
    """

    def play(scene: Scene) -> float:
        broker = scene.move(GREEDY)
        worker = scene.victim()
        scene.mortal = False
        scene.both_begun()
        scene.overfill()
        lose(scene, broker)
        if scene.pool in GREEN:
            scene.let()
        connected_again(scene, worker)
        never(scene.passed, during=0.5, message="the next one started early")
        scene.let()
        took = scene.took()
        for task_id in scene.others:
            scene.book.value(task_id)
        return took

    return play


def last_task_of_child(scene: Scene) -> float:
    scene.victim(conf={"worker_max_tasks_per_child": 1}, concurrency=3)
    pid = play_here(scene)
    eventually(lambda: pid not in scene.worker.child_pids(), 10, "the child is replaced")
    return scene.took()


def swollen_child(scene: Scene) -> float:
    scene.victim(conf={"worker_max_memory_per_child": 120_000}, concurrency=3)
    pid = play_here(scene, "swell", extra=150_000_000)
    eventually(lambda: pid not in scene.worker.child_pids(), 10, "the child is replaced")
    return scene.took()


def play_here(scene: Scene, end: str = "return", **options: Any) -> int:
    """Let the first end; the next one is parked by the same worker. Return the first's process."""
    scene.mortal = False
    scene.both_begun(end, **options)
    scene.let()
    return scene.pid(scene.locked)


def restarted_pool(scene: Scene) -> float:
    """Running tasks go on; their processes are replaced after that."""
    worker = scene.victim(conf={"worker_pool_restarts": True})
    scene.mortal = False
    scene.both_begun()
    assert "ok" in str(scene.tell("pool_restart", to=worker))
    never(lambda: scene.runs(scene.next), during=0.3, message="the next one started early")
    scene.let()
    eventually(lambda: scene.pid(scene.locked) not in worker.child_pids(), 10, "replaced")
    return scene.took()


def resized(scene: Scene) -> None:
    """Grow and shrink the pool beside the running task."""
    assert "ok" in str(scene.tell("pool_grow", 2, to=scene.worker))
    assert "ok" in str(scene.tell("pool_shrink", 2, to=scene.worker))


def autoscaled(scene: Scene) -> float:
    scene.victim(args=("--autoscale", "4,2"), env={"AUTOSCALE_KEEPALIVE": "1"})
    play_here(scene)
    return scene.took()


# -- it never runs ---------------------------------------------------------------------------------


def publish_raw(scene: Scene, task: str, task_id: str, body: bytes) -> None:
    """Send a message as another program might."""
    with Connection(scene.book.url) as connection, connection.Producer() as producer:
        producer.publish(
            body,
            routing_key=scene.queue,
            content_type="application/json",
            content_encoding="utf-8",
            headers={"id": task_id, "task": task, "lang": "py", "root_id": task_id},
        )


def unknown(scene: Scene) -> float:
    scene.locked = str(scene.book.app.send_task("there_is_none", (scene.key, 1)).id)
    scene.worker.await_log("there_is_none")
    return send_next(scene)


def undecodable(scene: Scene) -> float:
    scene.locked, scene.plain = str(uuid4()), str(uuid4())
    for name, task_id in (("act", scene.locked), ("plain", scene.plain)):
        publish_raw(scene, name, task_id, b"{ this is no JSON")
    eventually(lambda: not scene.with_broker(), 10, "both taken")
    return send_next(scene)


def wrong_arguments(scene: Scene) -> float:
    for name in ("locked", "plain"):
        task = "act" if name == "locked" else "plain"
        sent = scene.book.app.send_task(task, (scene.key, 1), {"nonsense": 1})
        setattr(scene, name, str(sent.id))
    return follow(scene)


def unpublished(scene: Scene) -> float:
    """The caller's broker is away: the call raises, and no lock is held."""
    before = set(scene.book.client.keys("csl:*"))
    nowhere = Connection("redis://127.0.0.1:1/0", transport_options={"max_retries": 0})
    with nowhere, pytest.raises(OperationalError):
        scene.book.app.tasks["act"].apply_async((scene.key, 1), connection=nowhere, retry=False)
    new = {key for key in scene.book.client.keys("csl:*") if scene.key.encode() in key}
    assert not new - before
    return send_next(scene)


ITSELF, ENDED, WORKER, NEVER = (
    "The task ends itself", "It is ended", "Its worker ends, or is changed", "It never runs",
)  # fmt: skip
_FAILED, _GONE = states.FAILURE, states.REVOKED
_REJECTED = states.FAILURE if TELLS_REJECTED else states.PENDING
_RUNS_ON = {"threads": ((states.SUCCESS,), 1), "solo": ((_FAILED,), 1)}
_CHANCE = dict.fromkeys(GREEN, ((states.PENDING, states.RETRY, states.SUCCESS), 1))
_STOPS_HALFWAY = _RUNS_ON | _CHANCE
_COLD = (states.RETRY, states.SUCCESS, (1, 2))
_NO_CHILD = dict.fromkeys(THREADED, MAIN_DIES)
_PREFORK_ONLY = dict.fromkeys(THREADED, NO_CHILD)

ENDINGS: Final = (
    Ending("success", itself("return"), late=states.SUCCESS, part=ITSELF),
    Ending("failure", itself("raise"), _FAILED, late=_FAILED, part=ITSELF),
    Ending("`MemoryError`, which ends a prefork worker", out_of_memory, _FAILED, own=True,
           part=ITSELF),
    Ending("import that fails in the task", itself("import"), _FAILED, part=ITSELF),
    Ending('`retry`, `lock_on_retry="release"`', itself("retry", extra=0.3), late=states.SUCCESS,
           runs=(2, 2), part=ITSELF),
    Ending("retries used up", itself("retry-always", extra=1), _FAILED, runs=(2, 2), part=ITSELF),
    Ending('`retry`, `lock_on_retry="keep"`', retried_and_kept("retry", 0.3), late=states.SUCCESS,
           runs=(2, 2), part=ITSELF),
    Ending('retries used up, `lock_on_retry="keep"`', retried_and_kept("retry-always", 1), _FAILED,
           late=_FAILED, runs=(2, 2), full=True, part=ITSELF),
    Ending('`lock_on_retry="keep"`, the retry is revoked', revoked_before_its_retry, _GONE,
           late=_GONE, full=True, part=ITSELF),
    Ending('`lock_on_retry="keep"`, the retry never comes', retry_that_never_comes, states.RETRY,
           late=states.RETRY, bound=LAPSE, full=True, part=ITSELF),
    Ending("`autoretry_for`", autoretry, _FAILED, late=_FAILED, runs=(2, 2), part=ITSELF),
    Ending("`Ignore`", itself("ignore"), states.PENDING, late=states.PENDING, part=ITSELF),
    Ending("`Reject`", itself("reject"), _REJECTED, late=_REJECTED, part=ITSELF),
    Ending("`Reject(requeue=True)`", itself("requeue"), states.PENDING, late=states.SUCCESS,
           runs=(1, 2), part=ITSELF),
    Ending("`sys.exit`", itself("exit"), _FAILED if TELLS_EXIT else states.PENDING, part=ITSELF,
           but=dict.fromkeys(THREADED, ((states.PENDING,), 1))),
    Ending("`os._exit`", itself("os-exit"), _FAILED, late=_FAILED, cannot=_NO_CHILD, part=ITSELF),
    Ending("soft time limit", soft_limit, _FAILED, late=_FAILED, part=ENDED,
           cannot=dict.fromkeys(THREADED, NO_LIMITS)),
    Ending("hard time limit", hard_limit, _FAILED, late=_FAILED, part=ENDED,
           cannot=dict.fromkeys(("threads", "eventlet", "solo"), NO_LIMITS)),
    Ending("its process killed (SIGKILL, out of memory)", killed_child, _FAILED, late=_FAILED,
           cannot=_NO_CHILD, part=ENDED),
    Ending("revoked before it arrives", revoked_before, _GONE, runs=(0, 0), part=ENDED),
    Ending("revoked while parked", revoked_while_parked, _GONE, runs=(0, 0), part=ENDED,
           cannot={"solo": DEAF}),
    Ending("revoked while it runs", keeps_running(revoke_running), part=ENDED,
           cannot={"solo": DEAF}),
    Ending("`terminate=True`, SIGTERM", terminated("SIGTERM"), _GONE, late=_GONE, part=ENDED,
           cannot=dict.fromkeys(("threads", "solo"), NO_TERMINATE)),
    Ending("`terminate=True`, SIGKILL", terminated("SIGKILL"), _GONE, late=_GONE, part=ENDED,
           cannot=dict.fromkeys(("threads", "solo"), NO_TERMINATE)),
    Ending("`expires` before it arrives", expired_before, _GONE, runs=(0, 0), part=ENDED),
    Ending("`expires` while parked", expired_while_parked, _GONE, runs=(0, 0), part=ENDED),
    Ending("warm shutdown (SIGTERM)", shutdown("SIGTERM"), late=states.SUCCESS, own=True,
           part=WORKER),
    Ending("soft shutdown, the task ends in time", shutdown("SIGQUIT",
           conf={"worker_soft_shutdown_timeout": 60}), own=True, part=WORKER,
           cannot={"solo": "Celery waits in the task's own thread, so that it cannot end in time"}),
    Ending("soft shutdown, it does not", shutdown("SIGQUIT", within=False,
           conf={"worker_soft_shutdown_timeout": 1}), *_COLD, but=_STOPS_HALFWAY, own=True,
           part=WORKER),
    Ending("cold shutdown (SIGQUIT)", shutdown("SIGQUIT", within=False), *_COLD, but=_STOPS_HALFWAY,
           own=True, part=WORKER),
    Ending("cold after warm (SIGTERM, SIGQUIT)", shutdown("SIGTERM", "SIGQUIT", within=False),
           *_COLD, but=_STOPS_HALFWAY, own=True, part=WORKER),
    Ending("cold after warm (SIGINT twice)", shutdown("SIGINT", "SIGINT", within=False),
           *_COLD, but=_STOPS_HALFWAY, own=True, part=WORKER),
    Ending("cold shutdown (`REMAP_SIGTERM=SIGQUIT`)", shutdown("SIGTERM", within=False,
           env={"REMAP_SIGTERM": "SIGQUIT"}), *_COLD, but=_STOPS_HALFWAY, own=True, full=True,
           part=WORKER),
    Ending("worker killed (kill -9)", killed_worker, states.PENDING, late=states.SUCCESS,
           runs=(1, 2), bound=LAPSE, own=True,
           but={"solo": ((states.SUCCESS,), 2)}, part=WORKER),
    Ending("broker connection lost, while it runs", connection_lost, own=True, bound=LAPSE,
           part=WORKER),
    Ending("broker connections cut, more fetched than run", prefetched(cut), late=states.SUCCESS,
           own=True, full=True, again=True, bound=LAPSE, part=WORKER, cannot={"solo": NO_PREFETCH}),
    Ending("broker restarted, more fetched than run", prefetched(restart), late=states.SUCCESS,
           own=True, again=True, bound=LAPSE, part=WORKER, cannot={"solo": NO_PREFETCH}),
    Ending("`worker_max_tasks_per_child`", last_task_of_child, own=True, part=WORKER,
           cannot=_PREFORK_ONLY),
    Ending("`worker_max_memory_per_child`", swollen_child, own=True, part=WORKER,
           cannot=_PREFORK_ONLY),
    Ending("`pool_restart`", restarted_pool, own=True, part=WORKER,
           cannot=dict.fromkeys(THREADED, "Celery restarts prefork pools only")),
    Ending("`pool_grow`, `pool_shrink`", keeps_running(resized), part=WORKER,
           cannot={"solo": ONE_SLOT, "threads": "Celery's thread pool does not change its size"}),
    Ending("autoscale", autoscaled, own=True, part=WORKER,
           cannot={"solo": ONE_SLOT, "threads": "Celery's thread pool does not change its size"}),
    Ending("unknown task", unknown, _FAILED, runs=(0, 0), part=NEVER),
    Ending("body that cannot be decoded", undecodable, states.PENDING, runs=(0, 0), part=NEVER),
    Ending("wrong arguments", wrong_arguments, _FAILED, runs=(0, 0), part=NEVER),
    Ending("publish that fails, at the caller", unpublished, "none: the caller raises",
           runs=(0, 0), part=NEVER),
)  # fmt: skip


def check(ending: Ending, scene: Scene) -> float:
    """Play a scene, and see that it ended as it must.

    Returns:
        Seconds from the ending to the start of the next task.
    """
    took = ending.play(scene)
    book = scene.book
    assert book.value(scene.next) == 2
    expected = ending.expected(scene)
    for task_id in scene.both():
        eventually(
            lambda i=task_id: book.state(i) in expected,
            10,
            lambda i=task_id: f"{scene.name(i)} {' or '.join(expected)}: {scene.facts()}",
        )
    _, alone = ending.but.get(scene.pool, ((), ending.runs[scene.late]))
    runs = scene.runs(scene.plain) if scene.plain and not ending.again else alone
    if ending.but is _STOPS_HALFWAY and scene.late and scene.pool in GREEN:
        # Celery acknowledges a plain task that it has cancelled. A locked one runs again.
        eventually(lambda: book.state(scene.locked) == states.SUCCESS, 20, scene.facts)
        assert scene.runs(scene.locked) in {1, 2}, scene.facts()
    else:
        assert scene.runs(scene.locked) == runs, scene.facts()
    assert book.peak(scene.key) <= 1
    for key in set(scene.others.values()):
        assert sorted(book.order(key)) == [1, 2], scene.facts()
        assert book.peak(key) == 1
        book.await_free(key, LAPSE)
    eventually(lambda: not scene.leftovers(), LAPSE, lambda: f"nothing left: {scene.leftovers()}")
    eventually(lambda: not scene.with_broker(), 10, lambda: f"settled: {scene.with_broker()}")
    if ending.bound == SOON:
        assert book.lapses(scene.key) == 0, "its lock is released, and not left to its lease"
    in_time(took, ending.bound)
    return took

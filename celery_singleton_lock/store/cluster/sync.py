"""The store on a Redis Cluster, for threads.

All keys of a lock lie in one slot, that of its bucket: so each verb is one script here too, on the
master that has it. What concerns all locks at once is asked of every bucket, and put together.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from random import randrange
from typing import Any, Final

import redis
from redis import exceptions as failures

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.core.redis_keys import BUCKETS, Keyspace
from celery_singleton_lock.core.model import CLAIM_LEASE, Claim, Delivery, Ending, Owner, new_token
from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import FAILED, explain
from celery_singleton_lock.store.cluster_routing import Nodes
from celery_singleton_lock.store.redis.sync import BLOCKS, RedisStore, confirmed, explained
from celery_singleton_lock.store.scripts import Script
from celery_singleton_lock.store.message_operations import (
    LONGEST_BLOCK,
    NO_REPLICAS,
    SHORTEST_BLOCK,
    SLACK,
    Batch,
    Command,
    Confirm,
    Counted,
    Pop,
    Receive,
    Replicas,
    Sign,
    Verb,
    Verbs,
    Wish,
)
from celery_singleton_lock.store.redis.fast_path import demoted

LOOK: Final = 5.0
"""Seconds after which all inboxes of a worker are looked into, whether a bell rang or not.

A bell is lost if the node that a worker listens to is cut off, or if the ACL user has no right to
the channel; and a grant is renewed by nobody until its worker hears of it.
"""

PATIENCE: Final = 1 / 6
"""Part of the shortest lease after which a renewal waits for a silent master no more.

A lease is renewed at a third of its age, and again half a second after a renewal that failed. So
what is renewed beside a silent master is told so in time, over and over.
"""


class ClusterVerbs(Verbs):
    """The verbs of a store on Redis Cluster: those that concern more than one lock differ."""

    def extend(self, leases: Iterable[tuple[str, str, float]]) -> Verb[Sequence[bool | None]]:
        """Renew many leases; see :meth:`Store.extend`. One dead master does not end the others'.

        Nor does one that stands still: it is given a part of the shortest lease to answer, whatever
        the client's time-outs are.

        Raises:
            BackendError: the first, if none could be renewed.
        """
        asked = list(leases)
        calls = [self._extend_call([each]) for each in asked]
        shortest = min((seconds for _, _, seconds in asked), default=0.0)
        found = yield from self.run_many(calls, patience=shortest * PATIENCE)
        answers = [_kept(answer) for answer in found]
        failed = [answer for answer in answers if isinstance(answer, BackendError)]
        if asked and len(failed) == len(asked):
            raise failed[0]
        return [None if isinstance(answer, BackendError) else answer for answer in answers]

    def take_due(self, limit: int = 100) -> Verb[Sequence[str]]:
        """Return locks that want a look; see :meth:`Store.take_due`.

        Of each bucket its share, rounded up: so up to one lock per bucket more than ``limit``.
        """
        most = -(-limit // BUCKETS)
        keys = [self.keyspace.due(bucket) for bucket in range(BUCKETS)]
        answers = yield from self.run_many([self._due_call([key], most) for key in keys])
        lists = [answer for answer in answers if not isinstance(answer, BackendError)]
        if not any(lists):
            raise_first(answers)
        return [replies.text(name) for names in lists for name in names]

    def beat(
        self,
        worker: str,
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int = 0,
        *,
        tasks: Collection[str] | None = None,
    ) -> Verb[Mapping[str, str]]:
        """Tell in every bucket that a worker lives; return the switches."""
        sign = Sign.of(worker, realm, queues, ttl, free, tasks)
        fleets = self.keyspace.fleets
        answers = yield from self.run_many([self._beat_call(fleet, sign) for fleet in fleets])
        whole = [
            self._beat_call(fleet, sign, whole=True)
            for fleet, answer in zip(fleets, answers, strict=True)
            if not isinstance(answer, BackendError) and not int(answer[0])
        ]
        raise_first([*answers, *(yield from self.run_many(whole))])  # all have been sent
        return (yield from self.switches())

    def receive(self, worker: str, timeout: float) -> Verb[Delivery | None]:
        """Wait up to ``timeout`` seconds for a grant."""
        raw = yield Receive(worker, timeout)
        return None if raw is None else replies.delivery(raw)

    def be_whole(self) -> Verb[None]:
        """Ask nobody: all nodes are looked at."""
        yield from ()

    def probe_each(self, names: Iterable[str]) -> Verb[None]:
        """Take and give back locks nobody else wants, on each master one."""
        for name in names:
            owner = Owner(new_token())
            yield from self.acquire(owner, Claim(name, lease=1.0, limit=2**31 - 1))
            yield from self.release(name, owner.token, Ending.FINAL)


def _kept(answer: Any) -> bool | BackendError:
    """Return whether a lease was renewed, or why its master does not say."""
    if isinstance(answer, BackendError):
        return answer
    if isinstance(answer[0], int):
        return answer[0] == 1
    return explain(failures.ResponseError(replies.text(answer[0])))


def raise_first(answers: Iterable[Any]) -> None:
    """Raise the first error among answers."""
    for answer in answers:
        if isinstance(answer, BackendError):
            raise answer


class ClusterStore(RedisStore):
    """Locks on a Redis Cluster. Arguments as of :class:`RedisStore`, but for these.

    Args:
        client: redis-py's client of a Cluster, or what makes it; that is used when it is needed.
    """

    def __init__(
        self,
        client: redis.RedisCluster | Nodes,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
        quarantine: bool = False,
        replicas: Replicas = NO_REPLICAS,
    ) -> None:
        """Prepare; nothing is sent yet."""
        keyspace = Keyspace((keyspace or Keyspace()).prefix, spread=True)
        verbs = ClusterVerbs(
            keyspace, scripts, claim_lease, quarantine=quarantine, replicas=replicas
        )
        self.verbs, self.keyspace, self._probe = verbs, verbs.keyspace, verbs.probe_each
        self.nodes = client if isinstance(client, Nodes) else Nodes.of(client)
        self.clock = SystemClock()
        self._wire = None
        self._twins: dict[float, Nodes] = {}
        self._inboxes: dict[str, Inboxes] = {}
        # At exit the system closes them: a thread may still be busy, and would fail.
        weakref.finalize(self, _close_all, self._twins, self._inboxes).atexit = False

    # -- calls ------------------------------------------------------------------------------------

    def do(self, wish: Wish) -> Any:
        """Do what a verb wishes for; errors as of :meth:`RedisStore.do`."""
        try:
            return self._done(wish)
        except failures.NoScriptError:
            raise
        except FAILED as error:
            if demoted(error):
                self.reconnect()
            raise explain(error) from error

    def _done(self, wish: Wish) -> Any:
        if isinstance(wish, Command):
            return self._command(wish)
        if isinstance(wish, Counted):
            return self.nodes.send(wish.command, wish.attempts)
        if isinstance(wish, Batch):
            return self.nodes.send_many(wish.commands, wish.patience)
        if isinstance(wish, Pop):
            return self._pop(wish)
        if isinstance(wish, Confirm):
            return self._confirm(wish)
        return self._inboxes_of(wish.worker).receive(wish.seconds)

    def _command(self, command: Command) -> Any:
        """Send a command; one without a key, such as TIME, to the same master each time."""
        if command.words[0] in {"TIME", "INFO", "CONFIG GET"}:
            return _at(self.nodes.masters()[0], command)
        return self.nodes.send(command)

    def _confirm(self, wish: Confirm) -> list[bool]:
        """Ask each master that has one of the keys; one that does not answer confirms nothing."""
        told = self.nodes.ask_each(wish.keys, wish.replicas.confirming)
        return [
            not any(isinstance(answer, Exception) for answer in answers)
            and confirmed(answers, wish)
            for answers in told
        ]

    def probe(self) -> None:
        """Take and give back a lock nobody else wants, on each master."""
        names = [f"celery-singleton-lock probe {number}" for number in range(8 * BUCKETS)]
        with explained(self.reconnect):
            chosen = list(self.nodes.each(names, lambda name: self.keyspace.lock(name).meta))
        carry_out(self._probe(chosen), self.do)

    def describe(self) -> Mapping[str, str]:
        """Return what the weakest of the masters guarantees."""
        plans = [(self.verbs.describe(), _asking(each)) for each in self.servers()]
        return weakest([carry_out(plan, do) for plan, do in plans])

    def servers(self) -> Sequence[redis.Redis]:
        """Return a client of each server that has keys: the masters."""
        with explained(self.reconnect):
            return self.nodes.masters()

    # -- blocking ---------------------------------------------------------------------------------

    def _pop(self, pop: Pop) -> bytes | str | None:
        """BLPOP, on connections for calls of about this length; it follows a slot that moves."""
        block = min(max(pop.seconds, SHORTEST_BLOCK), LONGEST_BLOCK)
        longest = next(most for most in BLOCKS if block <= most)
        twin = self._twins.get(longest) or self._twins.setdefault(
            longest, self.nodes.twin(longest + SLACK)
        )
        found = twin.send_once(Command(("BLPOP", pop.key, block)))
        return None if found is None else found[1]

    def _inboxes_of(self, worker: str) -> Inboxes:
        found = self._inboxes.get(worker)
        return found or self._inboxes.setdefault(worker, Inboxes(self.nodes, self.keyspace, worker))

    def reconnect(self) -> None:
        """Ask for the layout anew: a master said that it is none any more."""
        for nodes in (self.nodes, *self._twins.values()):
            nodes.look_anew()

    def hang_up(self) -> None:
        """Close the client as well: for who made it for this store alone."""
        self.close()
        self.nodes.close()

    def close(self) -> None:
        """Close the connections that this store opened; the caller's client stays open."""
        _close_all(self._twins, self._inboxes)


def _close_all(twins: dict[float, Nodes], inboxes: dict[str, Inboxes]) -> None:
    while twins:
        twins.popitem()[1].close()
    while inboxes:
        inboxes.popitem()[1].close()


def _at(client: redis.Redis, command: Command) -> Any:
    master: Any = client  # redis-py has not annotated this one
    return master.execute_command(*command.words, **command.options)


def _asking(client: redis.Redis) -> Callable[[Wish], Any]:
    """Return what carries out single commands at one master."""

    def do(wish: Wish) -> Any:
        try:
            return _at(client, wish)  # type: ignore[arg-type]  # describe() wishes for nothing else
        except FAILED as error:
            raise explain(error) from error

    return do


_WEAKEST: Final = ("none", "unknown", "snapshots", "append-only file")


def weakest(facts: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """Return what all masters guarantee: of each fact the worst."""
    evictions = [each["eviction"] for each in facts]
    return {
        "version": min(each["version"] for each in facts),
        "eviction": next((e for e in evictions if e != "noeviction"), "noeviction"),
        "persistence": min((each["persistence"] for each in facts), key=_WEAKEST.index),
        "replicas": min(each["replicas"] for each in facts),
    }


class Inboxes:
    """The inboxes of a worker, one per bucket, and the bell that tells which to open.

    Nobody can block on lists in several slots, so the scripts also publish the bucket, which every
    node of a Cluster hears. A bell that is not heard is made up for every :data:`LOOK` seconds.

    Args:
        nodes: the Cluster.
        keyspace: where the keys are.
        worker: whose.
    """

    def __init__(self, nodes: Nodes, keyspace: Keyspace, worker: str) -> None:
        """Listen with the first wait."""
        self._nodes, self._keyspace, self._worker = nodes, keyspace, worker
        self._clock = SystemClock()
        self._full: deque[int] = deque()
        self._next_look, self._listened = 0.0, randrange(1000)  # noqa: S311  # spread over masters
        self._ear: Any = None
        self._mutex = threading.Lock()

    def receive(self, seconds: float) -> bytes | str | None:
        """Return an element of one of them, or None after ``seconds``."""
        until = self._clock.monotonic() + seconds
        with self._mutex:
            while True:
                self._listen()
                if (found := self._open()) is not None:
                    return found
                left = until - self._clock.monotonic()
                if left <= 0:
                    return None
                self._hear(min(left, self._next_look - self._clock.monotonic()))

    def _listen(self) -> None:
        """Hear the bell; what came before is found by a look into all."""
        if self._ear is None:
            masters: Sequence[Any] = self._nodes.masters()
            self._listened += 1  # to another one each time: this may be the one that has died
            ear = masters[self._listened % len(masters)].pubsub()
            ear.subscribe(self._keyspace.bell(self._worker))
            self._ear, self._next_look = ear, 0.0

    def _open(self) -> bytes | str | None:
        """Take an element out of an inbox that may have one."""
        if self._clock.monotonic() >= self._next_look:
            self._look_into_all()
        while self._full:
            words = ("LPOP", self._keyspace.inbox(self._worker, self._full[0]))
            found: bytes | str | None = self._nodes.send(Command(words))
            if found is not None:
                return found  # there may be more in it
            self._full.popleft()
        return None

    def _look_into_all(self) -> None:
        keys = [self._keyspace.inbox(self._worker, bucket) for bucket in range(BUCKETS)]
        answers = self._nodes.send_many([Command(("LLEN", key)) for key in keys])
        if all(isinstance(answer, Exception) for answer in answers):
            raise answers[0]
        found = [b for b, length in enumerate(answers) if isinstance(length, int) and length]
        if found and self._next_look:
            self._hang_up()  # a bell was not heard here
        self._full.extend(found)
        self._next_look = self._clock.monotonic() + LOOK

    def _hear(self, seconds: float) -> None:
        """Wait for the bell."""
        try:
            message = self._ear.get_message(
                ignore_subscribe_messages=True, timeout=max(0.0, seconds)
            )
        except BaseException:
            self._hang_up()
            raise
        if message is not None and message["type"] == "message":
            self._full.append(int(message["data"]))

    def _hang_up(self) -> None:
        ear, self._ear = self._ear, None
        if ear is not None:
            with suppress(*FAILED):
                ear.close()

    def close(self) -> None:
        """Listen no more."""
        with self._mutex:
            self._hang_up()

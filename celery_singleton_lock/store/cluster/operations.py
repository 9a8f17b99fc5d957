"""Operations on a Redis Cluster that differ from those on one server (no I/O).

All keys of a lock are in one slot, that of its bucket. So an operation on one lock is one script
here too. Operations on all locks ask every bucket, and combine the answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from redis import exceptions as failures

from celery_singleton_lock.core.model import Claim, Ending, Identity, Owner, Renewal
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.core.redis_keys import BUCKETS
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import explain
from celery_singleton_lock.store.operations import Operations
from celery_singleton_lock.store.requests import Batch, Receive, Steps, by_digest
from celery_singleton_lock.store.scripts import Call
from celery_singleton_lock.store.worker_operations import Heartbeat

PATIENCE: Final = 1 / 6
"""Fraction of the shortest lease after which a renewal stops waiting for a silent master.

A lease is renewed after a third of its length, and again at most half a second after a failed
renewal. So leases on other masters are renewed in time while one master is silent.
"""


class ClusterOperations(Operations):
    """All operations on a Redis Cluster; arguments as of :class:`ScriptRunner`."""

    def extend(self, leases: Iterable[tuple[str, str, float]]) -> Steps[Sequence[Renewal]]:
        """Renew many leases; see :meth:`LockStore.extend`.

        A dead or silent master does not prevent the renewal of leases on other masters: it must
        answer within :data:`PATIENCE` of the shortest lease, whatever the client's time-outs are.

        Raises:
            BackendError: no lease could be renewed; the first error.
        """
        asked = list(leases)
        calls = [self.extend_call([each]) for each in asked]
        shortest = min((seconds for _, _, seconds in asked), default=0.0)
        found = yield from self.run_many(calls, patience=shortest * PATIENCE)
        answers = [_renewed(answer) for answer in found]
        failed = [answer for answer in answers if isinstance(answer, BackendError)]
        if asked and len(failed) == len(asked):
            raise failed[0]
        return [None if isinstance(answer, BackendError) else answer for answer in answers]

    def take_due_locks(self, limit: int = 100) -> Steps[Sequence[str]]:
        """Return locks that are due for a sweep; see :meth:`WorkerStore.take_due_locks`.

        The limit is divided by the number of buckets and rounded up, so the result may have up to
        one lock more per bucket.
        """
        most = -(-limit // BUCKETS)
        keys = [self.keyspace.due(bucket) for bucket in range(BUCKETS)]
        answers = yield from self.run_many([self.due_call([key], most) for key in keys])
        lists = [answer for answer in answers if not isinstance(answer, BackendError)]
        if not any(lists):
            raise_first(answers)
        return [replies.text(name) for names in lists for name in names]

    def worker_heartbeat(
        self,
        worker: str,
        realm: str,
        queues: Iterable[str],
        ttl: float,
        free: int = 0,
        *,
        tasks: Collection[str] | None = None,
        stopped: Mapping[str, float] | None = None,
        light: bool = False,
    ) -> Steps[Mapping[str, str]]:
        """Record in every bucket that a worker is alive; return the modes that were switched."""
        heartbeat = Heartbeat.of(worker, realm, queues, ttl, free, tasks, stopped)
        fleets = self.keyspace.fleets
        answers = yield from self._run_unless_moving(
            [self.heartbeat_call(fleet, heartbeat, light=light) for fleet in fleets]
        )
        whole = [
            self.heartbeat_call(fleet, heartbeat, whole=True)
            for fleet, answer in zip(fleets, answers, strict=True)
            if answer is not None and not isinstance(answer, BackendError) and not int(answer[0])
        ]
        repeated = yield from self._run_unless_moving(whole)
        raise_first([*answers, *repeated])  # after all were sent
        return (yield from self.switches())

    def identify(self) -> Steps[Identity]:
        """Return which servers these are; see :meth:`WorkerStore.identify`."""
        calls = [self.identify_call(fleet) for fleet in self.keyspace.fleets]
        return replies.identity((yield from self._run_unless_moving(calls)))

    def _run_unless_moving(self, calls: Sequence[Call]) -> Steps[list[Any]]:
        """Run scripts as :meth:`run_many` does; the answer is None for a slot that moves.

        A worker goes on without it: the locks of other slots can be used.
        """
        if not calls:
            return []
        answers = yield Batch([by_digest(call) for call in calls])
        told = [None if isinstance(each, failures.TryAgainError) else each for each in answers]
        return (yield from self.answers_to(calls, told))

    def receive(self, worker: str, timeout: float) -> Steps[Delivery | None]:
        """Wait up to ``timeout`` seconds for a grant in the inboxes of ``worker``."""
        raw = yield Receive(worker, timeout)
        return None if raw is None else replies.delivery(raw)

    def refuse_cluster_node(self) -> Steps[None]:
        """Refuse nothing: on a Cluster all masters are scanned."""
        yield from ()

    def probe_each(self, names: Iterable[str]) -> Steps[None]:
        """Acquire and release these locks, one on each master, which nobody else uses."""
        for name in names:
            owner = Owner(new_token())
            yield from self.acquire(owner, Claim(name, lease=1.0, limit=2**31 - 1))
            yield from self.release(name, owner.token, Ending.FINAL)


def _renewed(answer: Any) -> Renewal | BackendError:
    """Return whether a lease was renewed, or the error of its master."""
    if isinstance(answer, BackendError):
        return answer
    if isinstance(answer[0], (int, list)):
        return replies.renewal(answer[0])
    return explain(failures.ResponseError(replies.text(answer[0])))


def raise_first(answers: Iterable[Any]) -> None:
    """Raise the first error among answers."""
    for answer in answers:
        if isinstance(answer, BackendError):
            raise answer


_WEAKEST: Final = ("none", "unknown", "snapshots", "append-only file")


def weakest(facts: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """Return what all masters guarantee: for each fact the worst value."""
    evictions = [each["eviction"] for each in facts]
    return {
        "version": min(each["version"] for each in facts),
        "eviction": next((e for e in evictions if e != "noeviction"), "noeviction"),
        "persistence": min((each["persistence"] for each in facts), key=_WEAKEST.index),
        "replicas": min(each["replicas"] for each in facts),
    }

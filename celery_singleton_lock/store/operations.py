"""All operations of a store on Redis (no I/O).

Each operation is a plan (see :mod:`celery_singleton_lock.core.lock_steps`).
:mod:`celery_singleton_lock.store.redis.sync` carries it out in a thread, and
:mod:`celery_singleton_lock.store.redis.aio` in an asyncio task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from celery_singleton_lock.core.lock_view import Observations
from celery_singleton_lock.core.model import FLOW_SCHEMA, SCHEMA, Claim, Ending, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.redis_keys import BUCKETS
from celery_singleton_lock.errors import BackendRefused
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import one_node
from celery_singleton_lock.store.lock_operations import LockOperations
from celery_singleton_lock.store.message_operations import MessageOperations
from celery_singleton_lock.store.requests import Command, Steps
from celery_singleton_lock.store.unique_operations import UniqueOperations
from celery_singleton_lock.store.worker_operations import WorkerOperations

PROBE: Final = "celery-singleton-lock probe"
"""Name of the lock of :meth:`Operations.probe`. On several servers, names begin with it."""


class Operations(LockOperations, UniqueOperations, MessageOperations, WorkerOperations):
    """All operations; arguments as of :class:`ScriptRunner`."""

    def probe(self) -> Steps[None]:
        """Acquire and release a lock that nobody else uses; see :meth:`WorkerStore.probe`."""
        owner, name = Owner(new_token()), PROBE
        yield from self.acquire(owner, Claim(name, lease=1.0, limit=2**31 - 1))
        yield from self.release(name, owner.token, Ending.FINAL)

    def schema(self, needed: str = SCHEMA) -> Steps[str]:
        """Return the version of the data model on this server; see :meth:`WorkerStore.schema`."""
        found = yield Command(("GET", self.keyspace.schema))
        if found is None:  # a full server refuses the write, even if it would change nothing
            yield Command(("SET", self.keyspace.schema, needed, "NX"))
            found = yield Command(("GET", self.keyspace.schema))
        if needed == FLOW_SCHEMA and replies.text(found) == SCHEMA:
            yield Command(("SET", self.keyspace.schema, needed))
            return needed
        return replies.text(found)

    # -- for operators ----------------------------------------------------------------------------

    def switches(self) -> Steps[Mapping[str, str]]:
        """Return the modes that were switched; see :meth:`AdminStore.switches`."""
        found = yield Command(("HGETALL", self.keyspace.mode))
        return {replies.text(task): replies.text(mode) for task, mode in found.items()}

    def observations(self) -> Steps[Observations]:
        """Return the report of what was observed; see :meth:`AdminStore.observations`."""
        found = yield from self.send_each(
            Command(("HGETALL", self.keyspace.observed(bucket, part)))
            for bucket in range(BUCKETS)
            for part in ("tasks", "locks")
        )
        return Observations(replies.observed(found[::2]), replies.observed(found[1::2]))

    def clear_observations(self) -> Steps[None]:
        """Delete the report; see :meth:`AdminStore.clear_observations`."""
        yield from self.send_each(
            Command(("DEL", self.keyspace.observed(bucket, part)))
            for bucket in range(BUCKETS)
            for part in ("tasks", "locks", "ranks")
        )

    def lost(self, task_id: str) -> Steps[Mapping[str, Any] | None]:
        """Return what is recorded of a lost parked task; see :meth:`AdminStore.lost`."""
        found = yield Command(("HGET", self.keyspace.lost, task_id))
        return None if found is None else json.loads(found)

    def losses(self, most: int) -> Steps[tuple[int, Sequence[str]]]:
        """Return how many parked tasks were lost, and some ids; see :meth:`AdminStore.losses`."""
        key = self.keyspace.lost
        count, some = yield from self.send_each(
            [Command(("HLEN", key)), Command(("HRANDFIELD", key, most))]
        )
        return int(count), sorted(map(replies.text, some or ()))

    def forget_losses(self, task_ids: Sequence[str]) -> Steps[None]:
        """Forget that tasks were lost; see :meth:`AdminStore.forget_losses`."""
        if task_ids:
            yield Command(("HDEL", self.keyspace.lost, *task_ids))

    def refuse_cluster_node(self) -> Steps[None]:
        """Refuse to list locks with SCAN on one node of a Cluster, which has only a part of them.

        Operations on one lock need no check: such a node refuses them. If the ACL user may not run
        INFO, nothing is refused.

        Raises:
            BackendRefused: the server is such a node.
        """
        try:
            info = yield Command(("INFO", "cluster"))
        except BackendRefused:
            return
        if int(info.get("cluster_enabled", 0)):
            raise one_node()

"""Fills a Redis with many locks, or with many parked messages, by the product's own operations."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Final

from celery import Celery

from celery_singleton_lock.core.model import Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.worker.message_codec import pack

TASK: Final = "bank.settle"
REALM: Final = "R"
QUEUE: Final = "q"
WORKER: Final = "w1@bench#crowd"
LEASE: Final = 3600.0
BATCH: Final = 500
"""Messages that are parked in one round trip."""


def task_ids(seed: int) -> Iterator[str]:
    """Yield task ids like Celery's, the same for each run."""
    numbers = random.Random(seed)
    while True:
        yield str(uuid.UUID(int=numbers.getrandbits(128), version=4))


def join_fleet(store: RedisStore) -> None:
    """Record a worker that takes the grants, with free slots."""
    store.worker_heartbeat(WORKER, REALM, [QUEUE], LEASE, 8)


def hold(store: RedisStore, name: str, task_id: str, limit: int = 1) -> Owner:
    """Let a running task hold a lock; return its owner.

    Raises:
        RuntimeError: somebody else holds it.
    """
    owner = Owner(new_token(), f"{task_id}/0/0", TASK, WORKER, "host", 7)
    reply = store.acquire(owner, Claim(name, LEASE, limit))
    if reply.verdict is not Verdict.GRANTED:
        msg = f"lock {name!r} was not granted: {reply.verdict.value}"
        raise RuntimeError(msg)
    return owner


def message(task_id: str) -> bytes:
    """Return a task's message as a worker parks it."""
    with (
        Celery("crowd", broker="memory://", set_as_current=False) as app,
        app.connection_for_read() as connection,
        connection.SimpleQueue(QUEUE) as queue,
    ):
        given = ["account", 42]
        app.send_task(TASK, given, task_id=task_id, queue=QUEUE, connection=connection)
        received = queue.get(timeout=10)
        received.ack()
        return pack(received)


def park(
    store: RedisStore,
    names: Iterator[str],
    ids: Iterator[str],
    count: int,
    flows: Iterable[str] = ("",),
) -> int:
    """Park messages, each for the next name; return the length of one.

    Args:
        store: where.
        names: of the locks.
        ids: of the tasks.
        count: how many.
        flows: flow options of the messages, in turn.

    Raises:
        BackendError: Redis refused a message.
    """
    template_id = str(uuid.UUID(int=0, version=4))
    template = message(template_id)
    old = template_id.encode()
    left, options = iter(range(count)), cycle(flows)
    while batch := list(islice(left, BATCH)):
        messages = []
        for _ in batch:
            task_id = next(ids)
            owner = Owner(new_token(), f"{task_id}/0/0", TASK, WORKER, "host", 7)
            body = template.replace(old, task_id.encode())
            messages.append(
                (owner, Claim(next(names), flow=next(options)), MessageToPark(body, REALM, QUEUE))
            )
        refused(store.park_many(messages))
    return len(template)


def refused(answers: Sequence[object]) -> None:
    """Raise the first error among answers."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer

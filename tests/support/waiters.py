"""Hold locks and park messages through a store, as workers do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from celery_singleton_lock.core.lock_steps import carry_out
from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark


def hold(store: Any, name: str, **claim: Any) -> Owner:
    """Acquire a lock as a task; return the owner.

    Args:
        store: the store.
        name: name of the lock.
        claim: further fields of :class:`Claim`, such as ``limit``.
    """
    token = new_token()
    owner = Owner(token, f"{token[:4]}/0/0", "app.task")
    store.acquire(owner, Claim(name, **claim))
    return owner


def park(
    store: Any,
    name: str,
    task_id: str = "",
    *,
    realm: str = "R",
    queue: str = "q",
    body: bytes = b"body",
    timeout: float | None = None,
    **claim: Any,
) -> str:
    """Park a message for a lock; return its owner token.

    Args:
        store: the store.
        name: name of the lock.
        task_id: id of the task; empty: a new one.
        realm: realm of the broker.
        queue: name of the message's queue.
        body: the message.
        timeout: wait timeout in seconds.
        claim: further fields of :class:`Claim`, such as ``limit``.
    """
    owner = Owner(new_token(), f"{task_id or new_token()}/0/0", "app.task")
    store.park(owner, Claim(name, **claim), MessageToPark(body, realm, queue, timeout))
    return owner.token


def in_batches(store: Any, number: int, call: Callable[[int], Any]) -> None:
    """Run a script for each number, 500 in one round trip."""
    for start in range(0, number, 500):
        calls = [call(n) for n in range(start, min(start + 500, number))]
        carry_out(store.operations.run_many(calls), store.do)


def hold_many(store: Any, number: int) -> None:
    """Acquire the locks ``account:0`` to ``account:N-1`` as tasks, for ten minutes."""

    def call(n: int) -> Any:
        about = json.dumps({"task": "bank.settle", "worker": "w1#ab", "host": "h", "pid": "7"})
        arguments = {
            "token": new_token(), "attempt": f"id{n}/0/0", "place_us": 0, "copy": 0,
            "lease_ms": 600_000, "limit_arg": 1, "max_waiting": "", "wait_ms": "",
            "worker": "w1#ab", "claim_ms": 5000, "about": about,
        }  # fmt: skip
        return store.operations.lock_call("acquire", f"account:{n}", **arguments)

    in_batches(store, number, call)

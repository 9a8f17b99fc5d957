"""Hold locks and park messages through a store, as workers do."""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.core.model import Claim, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import Parcel


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
    store.park(owner, Claim(name, **claim), Parcel(body, realm, queue, timeout))
    return owner.token

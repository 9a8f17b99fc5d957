"""Watchdogs and stores that locks share, by client; checks of a lock's client."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from celery_singleton_lock.config.argument_checks import is_pipeline
from celery_singleton_lock.core.redis_keys import Keyspace, keyspace_with
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import named
from celery_singleton_lock.store.redis.valkey import is_valkey

# A module global that apps do not share: an entry belongs to the client object in its key, and ends
# when neither a lock nor the watchdog's thread needs it. So `with Lock(client, name)` in a loop
# starts only one thread. The id() in a key is not used again, because the watchdog's store refers
# to the client.
_watchdogs: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


def watchdog_for(
    kind: type[Any], backend: object, prefix: str | None, make: Callable[[], Any]
) -> Any:
    """Return the watchdog of this client or store in this process, with its store.

    Args:
        kind: class of the watchdog.
        backend: the client, or the store.
        prefix: first part of the keys.
        make: returns a new watchdog, or raises an error if the backend is not usable.
    """
    key = (kind, id(backend), prefix or "")
    found = _watchdogs.get(key)
    return found or _watchdogs.setdefault(key, make())


def checked_client(caller: str, client: object, *kinds: type[Any]) -> None:
    """Check the type of a client.

    Args:
        caller: the function that got it, for the error.
        client: the client.
        kinds: classes of redis-py; valkey-py's client is accepted for the first of them.

    Raises:
        ConfigurationError: it has none of these types.
    """
    asyncio = "asyncio" in kinds[0].__module__
    fits = isinstance(client, kinds) or is_valkey(client, asyncio=asyncio)
    if not fits or is_pipeline(client):
        msg = f"{caller} needs a {named(kinds[0])} client, not {named(type(client))}."
        raise ConfigurationError(msg)


def keyspace_for(prefix: str | None, *, client: bool) -> Keyspace | None:
    """Return the keyspace of a client; None for a store, which has its own.

    Raises:
        ConfigurationError: a store was given a prefix, or the prefix is invalid.
    """
    if client:
        return keyspace_with(None, prefix)
    if prefix is not None:
        msg = (
            "prefix is for a Redis client, and this is a store, which has a keyspace. Leave it out."
        )
        raise ConfigurationError(msg)
    return None


# The same list of servers is one store, with one watchdog.
_quorums: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


def quorum_for(make: Callable[..., Any], servers: Sequence[Any], prefix: str | None) -> Any:
    """Return the store of a quorum: one for each list of servers.

    Args:
        make: the class of the store.
        servers: URLs or clients.
        prefix: first part of the keys; None for the default.

    Raises:
        ConfigurationError: the servers are not a quorum, or the prefix is invalid.
    """
    each = tuple(server if isinstance(server, str) else id(server) for server in servers)
    key = (make, prefix or "", *each)
    found = _quorums.get(key)
    return found or _quorums.setdefault(key, make(servers, prefix=prefix))

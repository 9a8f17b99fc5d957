"""What a worker asks the locks' Redis before it takes a message."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.errors import (
    BackendError,
    BackendRefused,
    BackendUnreachable,
    SchemaMismatch,
)
from celery_singleton_lock.worker.extension import PATIENCE, Extension
from celery_singleton_lock.core.model import SCHEMA
from celery_singleton_lock.core.lock_mode import ENFORCE
from celery_singleton_lock.store.error_mapping import UNRESOLVED
from celery_singleton_lock.store.quorum.worker_store import TaskQuorum
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.message_text import number_of

logger = logging.getLogger(__name__)

_UNTIL_IT_ANSWERS: Final = (
    "Locked tasks wait until it answers, or do what their lock_on_backend_error says; other tasks "
    "run."
)
_UNTIL_MOST_VOTE: Final = (
    "Locked tasks wait until a majority of these servers votes, or do what their "
    "lock_on_backend_error says; other tasks run."
)


def check_backend(extension: Extension, place: ServerClock) -> None:
    """Ask the lock's Redis whether it can keep locks; say what it guarantees.

    Unreachable is no reason not to start: other tasks run, and locked ones do what
    ``lock_on_backend_error`` says.

    Raises:
        BackendRefused: it forbids what every lock needs.
        SchemaMismatch: its data is of another version.
    """
    store = extension.new_store(PATIENCE)
    if isinstance(store, TaskQuorum):
        check_quorum(extension, store, place)
        return
    try:
        check_schema(store)  # first: what another version wrote is not to be touched
        store.probe()
        place.sync(store.time(), store.clock.monotonic())
        facts = store.describe()
    except BackendUnreachable as error:
        tell_of_silence(extension, error, _UNTIL_IT_ANSWERS)
        return
    except BackendRefused as error:
        raise _at(error, extension) from None  # Celery would print redis-py's traceback above
    finally:
        store.hang_up()
    if extension.settings.in_memory:
        logger.warning(
            "celery-singleton-lock: locks live in the memory of this process (%s), for tests. No "
            "other process sees them, and they end with it.",
            extension.settings.address(),
        )
        return
    logger.info(
        "celery-singleton-lock: locks live in Redis %s: eviction %s, persistence %s, replicas %s",
        *(facts[fact] for fact in ("version", "eviction", "persistence", "replicas")),
    )
    if ENFORCE in extension.modes().values():
        refuse_eviction(extension, facts["eviction"])
        warn_of_few_replicas(extension, facts["replicas"])


def tell_of_silence(extension: Extension, error: BackendUnreachable, until: str) -> None:
    """Say which Redis does not answer, why, and by which setting it is asked.

    A host name that nobody knows does not pass by itself: that is told as an error.
    """
    slip = UNRESOLVED in str(error)
    logger.log(
        logging.ERROR if slip else logging.WARNING,
        "celery-singleton-lock: %s %s %s%s",
        error,
        extension.settings.named(),
        "If the host name is a slip, correct it and start the worker again. " * slip,
        until,
    )


def check_quorum(extension: Extension, store: TaskQuorum, place: ServerClock) -> None:
    """Ask several servers whether they can keep locks together.

    Raises:
        BackendRefused: too many of them forbid what every lock needs, or one may forget its votes.
        ConfigurationError: two of them are one.
        SchemaMismatch: the data of one is of another version.
    """
    try:
        lacking = store.check()
        for number in set(range(len(store.nodes))) - set(lacking):
            with suppress(BackendUnreachable), _named(store.verbs.addresses[number]):
                check_schema(store.nodes[number])
        place.sync(store.time(), store.clock.monotonic())
        facts = store.describe()
    except BackendUnreachable as error:
        tell_of_silence(extension, error, _UNTIL_MOST_VOTE)
        return
    except BackendRefused as error:
        raise _at(error, extension) from None  # Celery would print redis-py's traceback above
    finally:
        store.hang_up()
    logger.info(
        "celery-singleton-lock: locks live on %d servers, Redis %s, of which a majority decides",
        len(store.nodes),
        facts.get("version", "unknown"),
    )
    if lacking:
        warn_of_lacking(store, lacking)
    if ENFORCE in extension.modes().values():
        for policy in facts.get("eviction", "unknown").split(", "):
            refuse_eviction(extension, policy)


def warn_of_lacking(store: TaskQuorum, lacking: Mapping[int, BackendError]) -> None:
    """Name servers of a quorum without which it works now, since nothing else would tell."""
    whys = [f"{store.verbs.addresses[number]}: {error}" for number, error in lacking.items()]
    spare = len(store.nodes) - len(lacking) - store.ballot.majority
    logger.warning(
        "celery-singleton-lock: %d of the lock's %d servers %s out (%s). The others keep the "
        "locks; with %s more out, nothing is granted.",
        len(lacking),
        len(store.nodes),
        "is" if len(lacking) == 1 else "are",
        " ".join(whys),
        "one" if spare == 0 else spare + 1,
    )


@contextmanager
def _named(server: str) -> Iterator[None]:
    """Say which of several servers refuses."""
    try:
        yield
    except BackendRefused as error:
        msg = f"{server}: {error}"
        raise BackendRefused(msg) from error


def _at(error: BackendRefused, extension: Extension) -> BackendRefused:
    """Say where a refusal came from, without passwords, and which setting names that server."""
    return BackendRefused(f"{error} {extension.settings.named()}")


def check_schema(store: RedisStore) -> None:
    """Refuse data that another schema of this library wrote."""
    found = store.schema()
    if found != SCHEMA:
        msg = (
            f"The lock's Redis holds data of schema {found} (key {store.keyspace.schema}); this "
            f"version works with {SCHEMA}. Upgrade all workers together: let those of the other "
            "version run what is parked, stop them, and delete that key. Or give this worker a "
            "singleton_lock_prefix of its own; tasks under two prefixes do not exclude each other."
        )
        raise SchemaMismatch(msg)


def warn_of_few_replicas(extension: Extension, found: str) -> None:
    """Say at once what every parked task would say: that the replicas are not there."""
    wanted = extension.settings.replicas_wait
    if found.isdecimal() and int(found) < wanted:
        logger.warning(
            "celery-singleton-lock: singleton_lock_replicas_wait is %d, and the lock's Redis has "
            "%s. Until it has as many, messages that are parked stay unacknowledged with the "
            "broker, too. Connect replicas, or lower the setting.",
            wanted,
            number_of(int(found), "replica"),
        )


def refuse_eviction(extension: Extension, policy: str) -> None:
    """Refuse to park where Redis may throw messages away, unless the user said so."""
    if policy in ("noeviction", "unknown") or extension.settings.backend_options.get(
        "allow_eviction"
    ):
        return
    msg = (
        f"The lock's Redis evicts keys when it is full (maxmemory-policy {policy}), so a parked "
        "task could be lost and a lock taken twice. Set maxmemory-policy noeviction, use another "
        "Redis (singleton_lock_backend), or accept it: singleton_lock_backend_options = "
        '{"allow_eviction": True}.'
    )
    raise BackendRefused(msg)

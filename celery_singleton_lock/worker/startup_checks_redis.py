"""Checks the locks' Redis before a worker takes a message."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.core.lock_mode import ENFORCE
from celery_singleton_lock.core.model import SCHEMA, SCHEMAS
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.errors import (
    BackendError,
    BackendRefused,
    BackendUnreachable,
)
from celery_singleton_lock.message_text import number_of
from celery_singleton_lock.store.error_mapping import FULL, UNRESOLVED, UNTRUSTED, wrong_schema
from celery_singleton_lock.store.operations import PROBE
from celery_singleton_lock.store.quorum.worker_store import TaskQuorum
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.worker.extension import PATIENCE, Extension

logger: Final = logging.getLogger(__name__)

_LIKELY_MISTAKES: Final = {
    UNRESOLVED: "If the host name is misspelt, correct it and restart the worker. ",
    UNTRUSTED: "Correct the TLS options and restart the worker. ",
}
"""Part of an error that is likely caused by the settings -> what to do."""

_UNTIL_IT_ANSWERS: Final = (
    "Locked tasks wait until it answers, or do what their lock_on_backend_error says. Other tasks "
    "run."
)
_UNTIL_MOST_VOTE: Final = (
    "Locked tasks wait until a majority of these servers votes, or do what their "
    "lock_on_backend_error says. Other tasks run."
)
_UNTIL_ROOM: Final = (
    "Parked tasks run. Other locked tasks wait until it has room, or do what their "
    "lock_on_backend_error says. Tasks without locks run."
)


def check_backend(extension: Extension, place: ServerClock) -> bool:
    """Check that the locks' Redis is usable; log its version and guarantees.

    If Redis does not answer, or is full, the worker starts nevertheless: other tasks run, and
    locked ones do what ``lock_on_backend_error`` says.

    Returns:
        Whether Redis has answered.

    Raises:
        BackendRefused: Redis refuses a command that locks need, or may evict keys.
        SchemaMismatch: another version has written its data.
    """
    try:
        check_answering(extension, place)
    except BackendUnreachable as error:
        until = _UNTIL_MOST_VOTE if extension.settings.is_quorum else _UNTIL_IT_ANSWERS
        tell_of_silence(extension, error, until)
        return False
    return True


def check_answering(extension: Extension, place: ServerClock) -> None:
    """Check that the locks' Redis answers and is usable; log its version and guarantees.

    Args:
        extension: of the app.
        place: is set to the server's time.

    Raises:
        BackendUnreachable: Redis does not answer.
        BackendRefused: Redis refuses a command that locks need, or may evict keys.
        SchemaMismatch: another version has written its data.
    """
    store = extension.new_store(PATIENCE)
    if isinstance(store, TaskQuorum):
        check_quorum(extension, store, place)
        return
    try:
        check_schema(
            store, extension.schema()
        )  # first: data of another version must not be changed
        _check_writes(extension, store)
        store.wait(PROBE, new_token(), 0.0)  # with BLPOP, as for grants
        place.measure(store.time)
        facts = store.describe()
    except BackendRefused as error:
        raise _at(error, extension) from None  # else Celery prints redis-py's traceback
    finally:
        store.hang_up()
    if extension.settings.in_memory:
        logger.warning(
            "celery-singleton-lock: locks live in the memory of this process (%s), for tests. No "
            "other process sees them, and they end with it.",
            extension.settings.address(),
        )
        return
    enforced = ENFORCE in extension.modes().values()
    if enforced:
        refuse_eviction(extension, facts["eviction"])
    logger.info(
        "celery-singleton-lock: locks live in Redis %s: eviction %s, persistence %s, replicas %s",
        *(facts[fact] for fact in ("version", "eviction", "persistence", "replicas")),
    )
    if enforced:
        warn_of_few_replicas(extension, facts["replicas"])


def _check_writes(extension: Extension, store: RedisStore) -> None:
    """Try a write. A full Redis refuses it: only parked tasks, which run, can make room there.

    Raises:
        BackendError: Redis does not answer, or refuses for another reason.
    """
    try:
        store.probe()
    except BackendRefused as error:
        if FULL not in str(error):
            raise
        named = extension.settings.named()
        logger.warning("celery-singleton-lock: %s %s %s", error, named, _UNTIL_ROOM)


def tell_of_silence(extension: Extension, error: BackendUnreachable, until: str) -> None:
    """Log which Redis does not answer, why, and in which setting it is configured.

    An unknown host name and an invalid certificate are errors, since waiting does not help.
    """
    remedy = next((what for sign, what in _LIKELY_MISTAKES.items() if sign in str(error)), "")
    logger.log(
        logging.ERROR if remedy else logging.WARNING,
        "celery-singleton-lock: %s %s %s%s",
        error,
        extension.settings.named(),
        remedy,
        until,
    )


def check_quorum(extension: Extension, store: TaskQuorum, place: ServerClock) -> None:
    """Check that the servers of a quorum are usable.

    Raises:
        BackendUnreachable: no majority answers.
        BackendRefused: too many of them refuse a command that locks need, or one may evict keys.
        ConfigurationError: two addresses are those of one server.
        SchemaMismatch: another version has written the data of a server.
    """
    try:
        lacking = store.check()
        for number in set(range(len(store.nodes))) - set(lacking):
            with suppress(BackendUnreachable), _named(store.operations.addresses[number]):
                check_schema(store.nodes[number])
        place.measure(store.time)
        facts = store.describe()
    except BackendRefused as error:
        raise _at(error, extension) from None  # else Celery prints redis-py's traceback
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
    """Log the servers of a quorum that do not answer; the quorum works without them."""
    whys = [f"{store.operations.addresses[number]}: {error}" for number, error in lacking.items()]
    spare = len(store.nodes) - len(lacking) - store.votes.majority
    logger.warning(
        "celery-singleton-lock: %d of the lock's %d servers %s unavailable (%s). The others "
        "keep the locks. With %s more unavailable, nothing is granted.",
        len(lacking),
        len(store.nodes),
        "is" if len(lacking) == 1 else "are",
        " ".join(whys),
        "one" if spare == 0 else spare + 1,
    )


@contextmanager
def _named(server: str) -> Iterator[None]:
    """Add the server's address to the error."""
    try:
        yield
    except BackendRefused as error:
        msg = f"{server}: {error}"
        raise BackendRefused(msg) from error


def _at(error: BackendRefused, extension: Extension) -> BackendRefused:
    """Return the error with the address of the server, without password, and the setting."""
    return BackendRefused(f"{error} {extension.settings.named()}")


def check_schema(store: RedisStore, needed: str = SCHEMA) -> None:
    """Refuse data of another schema.

    Args:
        store: of the server.
        needed: schema that the tasks of this worker need; a lower one is raised.

    Raises:
        SchemaMismatch: another version has written it.
    """
    found = store.schema(needed)
    if found not in SCHEMAS:
        raise wrong_schema(found, store.keyspace.schema)


def warn_of_few_replicas(extension: Extension, found: str) -> None:
    """Log at the start that there are too few replicas."""
    wanted = extension.settings.replicas_wait
    if found.isdecimal() and int(found) < wanted:
        logger.warning(
            "celery-singleton-lock: singleton_lock_replicas_wait is %d, and the locks' Redis has "
            "%s. Until it has that many, parked messages are not acknowledged to the broker. "
            "Connect replicas, or lower the setting.",
            wanted,
            number_of(int(found), "replica"),
        )


def refuse_eviction(extension: Extension, policy: str) -> None:
    """Refuse a Redis that may evict parked messages, unless a setting allows it.

    Raises:
        BackendRefused: Redis may evict keys.
    """
    if policy in ("noeviction", "unknown") or extension.settings.backend_options.get(
        "allow_eviction"
    ):
        return
    msg = (
        f"The locks' Redis evicts keys when it is full (maxmemory-policy {policy}), so a parked "
        "task could be lost and a lock taken twice. Set maxmemory-policy noeviction, use another "
        "Redis (singleton_lock_backend), or accept it: singleton_lock_backend_options = "
        '{"allow_eviction": True}.'
    )
    raise BackendRefused(msg)

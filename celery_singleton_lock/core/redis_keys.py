"""Lock name -> every Redis key (pure).

``<prefix>:{bNN}:<name>:<part>`` - the hash tag puts all keys of a lock, and of its bucket, in one
Cluster slot, so that each verb stays one script. A name of over :data:`LONGEST_NAME` bytes is shown
in full and keyed by its digest.

=============  ======  =====================================================================
part           type    content
=============  ======  =====================================================================
``holders``    ZSET    token -> end of the lease, ms
``queue``      ZSET    token -> place in line (server microseconds of arrival)
``record``     HASH    token -> JSON: state, attempt, lease, fence, worker, host, pid, since …
``meta``       HASH    name, schema, last fence, limit, counters
``bodies``     HASH    base of the token -> parked message, raw
``deadlines``  ZSET    token -> when a waiter is looked at again, ms
``adrift``     ZSET    parked messages that no live worker consumes: route, place and token, sorted
``done``       ZSET    attempt -> until when later copies of it end quietly, ms
``wake:<t>``   LIST    one element, for a waiting thread; expires
``vote``       HASH    on each server of a quorum: token, round, till, ms, and last fence
``gone:<t>``   string  on each server of a quorum, for seconds: round up to which votes are refused
=============  ======  =====================================================================

Per bucket: ``due`` (ZSET, lock -> when a sweeper looks, ms; only of locks that somebody waits for)
and ``index`` (HASH, attempt, and ``@`` with the task id -> lock and token of a task that waits or
waited), and ``waited`` (string, for a second: written before replicas are waited for). For the
whole installation: ``fleet:route:<realm>:<queue>`` (ZSET, worker -> heartbeat deadline, ms),
``fleet:inbox:<worker>`` (LIST of grants), ``fleet:worker:<worker>`` (string, JSON),
``fleet:free:<worker>`` (string, free slots of its pool),
``fleet:parked:<realm>:<queue>`` (ZSET, token of a parked message -> place in line) with
``fleet:parked`` (SET of these routes), ``fleet:audit`` (LIST of what operators did, the last
thousand), ``fleet:mode`` (HASH, task or ``*`` -> mode), ``fleet:marker`` (string, random: who finds
another one knows that data was lost), ``fleet:lost`` (HASH, task id -> JSON of a parked task that
was lost) and ``fleet:vouched`` (SET of tokens that are not), which expire as the marker does,
``schema``, and on each server of a quorum ``fleet:quorum`` (HASH: run id of the server that wrote
it, and since when it is known, ms).

Of tasks that run without their locks and are observed: ``observed`` of a lock (HASH, run -> JSON),
and per bucket ``observed:tasks`` and ``observed:locks`` (HASH, name -> JSON: runs, blocked, waited
and longest, ms) with ``observed:ranks`` (ZSET, lock -> blocked). All are bounded and expire.

On Cluster a script may touch one slot only, so there what the scripts of locks use of ``fleet`` is
in each bucket (``{bNN}:fleet:…``; ``fleet:mode``, ``fleet:lost``, ``fleet:vouched`` and ``schema``
are not among it): a worker beats
in all buckets and has an inbox in each; a channel, ``fleet:bell:<worker>``, tells it which to open.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from celery_singleton_lock.errors import ConfigurationError

BUCKETS: Final = 64
LONGEST_NAME: Final = 200


def bucket_of(name: str) -> int:
    """Return the bucket, 0 to 63, in which the lock ``name`` lives."""
    return zlib.crc32(name.encode()) % BUCKETS


def key_name(name: str) -> str:
    """Return ``name``, or its digest if it is too long for a key."""
    encoded = name.encode()
    if len(encoded) <= LONGEST_NAME:
        return name
    return "sha256-" + hashlib.sha256(encoded).hexdigest()


@dataclass(frozen=True, slots=True)
class LockKeys:
    """The keys of one lock, in the order in which every script takes them."""

    holders: str
    queue: str
    record: str
    meta: str
    bodies: str
    deadlines: str
    adrift: str
    done: str
    due: str
    index: str
    fleet: str

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in the scripts' order."""
        return (getattr(self, part) for part in self.__slots__)


@functools.lru_cache(maxsize=4096)
def encoded(prefix: str, name: str, *, spread: bool = False) -> tuple[bytes, ...]:
    """Return the keys of a lock as they are sent, in the scripts' order; a name comes often."""
    keys = encoded_in(prefix, bucket_of(name), key_name(name).encode())
    return (*keys[:-1], Keyspace(prefix, spread).fleet_of(name).encode()) if spread else keys


def encoded_in(prefix: str, number: int, shown: bytes) -> tuple[bytes, ...]:
    """Likewise, for a name as keys show it (:func:`key_name`), of which the bucket is known."""
    bucket = f"{prefix}:{{b{number:02d}}}:".encode()
    base = bucket + shown + b":"
    own = [base + part for part in _PARTS_OF_A_LOCK]
    return (*own, bucket + b"due", bucket + b"index", f"{prefix}:fleet".encode())


_PARTS_OF_A_LOCK: Final = tuple(part.encode() for part in LockKeys.__slots__[:8])


@dataclass(frozen=True, slots=True)
class Keyspace:
    """All keys below one prefix.

    Args:
        prefix: first part of every key; may hold no brace, since the hash tag comes after it.
        spread: whether each bucket has a fleet of its own: on Cluster, where it may live anywhere.

    Raises:
        ConfigurationError: the prefix is empty, or holds a brace or NUL.
    """

    prefix: str = "csl"
    spread: bool = False

    def __post_init__(self) -> None:
        """Refuse a prefix that would move the hash tag."""
        if not self.prefix or any(sign in self.prefix for sign in "{}\0"):
            msg = (
                f"singleton_lock_prefix is {self.prefix!r}: it must not be empty nor hold a brace, "
                "because the Cluster hash tag comes after it (and no NUL). Use letters, digits and "
                "colons."
            )
            raise ConfigurationError(msg)

    def bucket(self, number: int) -> str:
        """Return the common start of the keys of a bucket."""
        return f"{self.prefix}:{{b{number:02d}}}"

    def lock(self, name: str) -> LockKeys:
        """Return the keys of the lock ``name``."""
        bucket = self.bucket(bucket_of(name))
        base = f"{bucket}:{key_name(name)}"
        return LockKeys(
            holders=f"{base}:holders",
            queue=f"{base}:queue",
            record=f"{base}:record",
            meta=f"{base}:meta",
            bodies=f"{base}:bodies",
            deadlines=f"{base}:deadlines",
            adrift=f"{base}:adrift",
            done=f"{base}:done",
            due=f"{bucket}:due",
            index=f"{bucket}:index",
            fleet=self.fleet_of(name),
        )

    def sent(self, name: str) -> tuple[bytes, ...]:
        """Return the keys of the lock ``name`` as they are sent."""
        return (
            encoded(self.prefix, name, spread=True) if self.spread else encoded(self.prefix, name)
        )

    def wake(self, name: str, token: str) -> str:
        """Return the wake list of a waiting client."""
        return f"{self.bucket(bucket_of(name))}:{key_name(name)}:wake:{token}"

    def vote(self, name: str) -> str:
        """Return who has the vote of one server of a quorum."""
        return f"{self.bucket(bucket_of(name))}:{key_name(name)}:vote"

    def gone(self, name: str, token: str) -> str:
        """Return up to which round one server of a quorum refuses the votes of a token."""
        return f"{self.bucket(bucket_of(name))}:{key_name(name)}:gone:{token}"

    @property
    def quorum(self) -> str:
        """Return our mark on a server of a quorum."""
        return f"{self.fleet}:quorum"

    def waited(self, name: str) -> str:
        """Return what is written before replicas are waited for, where the lock ``name`` is."""
        return f"{self.bucket(bucket_of(name))}:waited"

    def due(self, bucket: int) -> str:
        """Return the index of locks to look at, of one bucket."""
        return f"{self.bucket(bucket)}:due"

    def index(self, bucket: int) -> str:
        """Return the index of parked attempts, of one bucket."""
        return f"{self.bucket(bucket)}:index"

    @property
    def fleet(self) -> str:
        """Common start of what workers share."""
        return f"{self.prefix}:fleet"

    def fleet_of(self, name: str) -> str:
        """Likewise, as the scripts of the lock ``name`` see it."""
        return f"{self.bucket(bucket_of(name))}:fleet" if self.spread else self.fleet

    @property
    def fleets(self) -> Sequence[str]:
        """All of them: one, or one for each bucket."""
        if not self.spread:
            return (self.fleet,)
        return tuple(f"{self.bucket(number)}:fleet" for number in range(BUCKETS))

    @property
    def audit(self) -> str:
        """Return the list of what operators did; a fleet of a bucket has its own."""
        return f"{self.fleet}:audit"

    def inbox(self, worker: str, bucket: int = 0) -> str:
        """Return the list in which a worker receives its grants: of a bucket, if it has several."""
        return f"{self.fleets[bucket]}:inbox:{worker}"

    def bell(self, worker: str) -> str:
        """Return the channel that tells a worker with several inboxes which to open."""
        return f"{self.fleet}:bell:{worker}"

    @property
    def lost(self) -> str:
        """Return the hash of parked tasks that were lost: task id -> JSON. It expires."""
        return f"{self.fleet}:lost"

    @property
    def vouched(self) -> str:
        """Return the set of tokens of which workers know what became, after a loss; expires."""
        return f"{self.fleet}:vouched"

    @property
    def mode(self) -> str:
        """Return the hash of the switches: task, or ``*``, -> mode."""
        return f"{self.fleet}:mode"

    def observed(self, bucket: int, part: str) -> str:
        """Return a part of the report of ``observe``, of one bucket.

        Args:
            bucket: its number.
            part: ``tasks``, ``locks``, or ``ranks``, which bounds the locks.
        """
        return f"{self.bucket(bucket)}:observed:{part}"

    @property
    def schema(self) -> str:
        """Key that says which version of this data model lives here."""
        return f"{self.prefix}:schema"


def keyspace_with(keyspace: Keyspace | None, prefix: str | None) -> Keyspace:
    """Return where a store's keys are, which was told in one of two ways, or not at all.

    Args:
        keyspace: what the store was given.
        prefix: first part of every key, likewise.

    Raises:
        ConfigurationError: both were given, or the first is no keyspace, or the prefix not usable.
    """
    given: object = keyspace  # may be anything, whatever the annotation says
    if given is None:
        return Keyspace() if prefix is None else Keyspace(prefix)
    if prefix is not None:
        msg = "prefix is the first part of the keys, and so is that of keyspace: give one of them."
        raise ConfigurationError(msg)
    if not isinstance(given, Keyspace):
        msg = f"keyspace is {given!r}, and no Keyspace: the first part of the keys is prefix."
        raise ConfigurationError(msg)
    return given

"""All keys in Redis (pure).

The keys of a lock are ``<prefix>:{bNN}:<name>:<part>``. The hash tag puts all keys of a bucket of
locks into one slot of a Cluster, so that each operation is one script. In the keys, a digest
replaces a name of more than :data:`LONGEST_NAME` bytes.

=============  ======  =====================================================================
part           type    content
=============  ======  =====================================================================
``holders``    ZSET    token -> end of the lease, ms
``queue``      ZSET    token -> place (server microseconds of arrival, minus head start)
``record``     HASH    token -> JSON: state, attempt, lease, fence, worker, host, pid, since …
``meta``       HASH    name, schema, last fence, limit, counters
``bodies``     HASH    base of the token -> parked message, raw
``deadlines``  ZSET    token -> when a sweep examines a waiter, ms
``adrift``     ZSET    parked messages that no live worker takes: route, place and token, sorted
``done``       ZSET    attempt -> until when its copies are dropped, ms; ``dropped:<base>``,
                       ``dropped:<attempt>``: it was dropped and has not run;
                       ``sent:<base>``: the broker has its message; ``returned:<token>``: its
                       message returned to the queue before that delivery began
``flow``       HASH    rates in force, and what they remember; only if a caller declared a rate
``flow:log``   ZSET    token -> its start, microseconds; 9e15 while its grant is not claimed
``flow:groups``, ``flow:heads``, ``flow:full``, ``flow:idle``, ``flow:line:<group>`` and
                       ``flow:running:<group>``: see docs/flow-design.md; only with groups
``unique:<key>:call`` string, JSON: the unique call that counts as sent; expires. If
                       ``:<key>`` contains ``:unique:``: ``unique:<key>:<its bytes>:long-call``
``unique:<id>:followers`` ZSET, token of a duplicate that follows a task -> place; expires
``unique:<id>:instead``   string, id of the task that its followers follow instead; an hour
``attempts``   ZSET    token -> digest of its attempt, of many holders: a cache; expires
``wake:<t>``   LIST    one element, for a waiting thread; expires
``vote``       HASH    on each server of a quorum: token, round, end in ms, and last fence
``gone:<t>``   string  on each server of a quorum, for seconds: round up to which votes are refused
=============  ======  =====================================================================

Of each bucket: ``due`` (ZSET, lock with waiters -> when a sweep examines it, ms), ``index`` (HASH,
attempt -> lock and token of a task that waits or has waited; an attempt after the first also has
the field ``@`` with the task id), and
``waited`` (string, for a second: written before waiting for replicas). Of all workers together:
``fleet:route:<realm>:<queue>`` (ZSET, worker -> heartbeat deadline, ms),
``fleet:routes`` (ZSET, ``<realm>:<queue>`` -> latest of these deadlines),
``fleet:inbox:<worker>`` (LIST of grants), ``fleet:worker:<worker>`` (string, JSON),
``fleet:free:<worker>`` (string, free slots of its pool),
``fleet:tasks:<worker>`` (SET, names of the tasks that it locks), ``fleet:server`` (HASH, run id of
the server and its quarantine),
``fleet:parked:<realm>:<queue>`` (ZSET, token of a parked message -> place) with ``fleet:parked``
(SET of these routes) and ``fleet:parked_bytes`` (HASH, route -> bytes of these messages),
``fleet:audit`` (LIST of changes by operators, the last thousand),
``fleet:drained`` (HASH, ``<realm>:<queue>`` -> when a drain last removed a message of it, ms;
expires a year after the last drain),
``fleet:running:<worker>`` (ZSET of task id, lock and token, one a line: tasks that the worker has
had for seconds) with ``fleet:running`` (ZSET, worker -> until when its list is read, ms),
``fleet:mode`` (HASH, task or ``*`` -> mode), ``fleet:marker`` (string, random: if it changes, data
was lost), ``fleet:lost`` (HASH, task id -> JSON of a parked task that was lost; expires after a
week), ``fleet:vouched`` (SET of tokens that were not lost; expires after minutes), ``schema``, and
on each server of a quorum ``fleet:quorum`` (HASH: run id of the server that wrote it, and since
when it is known, ms).

Of observe mode: ``observed`` of a lock (HASH, run -> JSON), and of each bucket ``observed:tasks``
and ``observed:locks`` (HASH, name -> JSON: runs, blocked, waited and longest, ms) with
``observed:ranks`` (ZSET, lock -> blocked). All are bounded and expire.

On a Cluster a script can use one slot only. There each bucket has its own ``{bNN}:fleet:…``, except
for ``fleet:mode``, ``fleet:running``, ``fleet:lost``, ``fleet:vouched`` and ``schema``. A worker
sends heartbeats to all buckets and has an inbox in each; the channel ``fleet:bell:<worker>`` tells
it which inbox has a grant.
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
    """Return the bucket, 0 to 63, of the lock ``name``."""
    return zlib.crc32(name.encode()) % BUCKETS


def key_name(name: str) -> str:
    """Return ``name``, or its digest if it is too long for a key."""
    encoded = name.encode()
    if len(encoded) <= LONGEST_NAME:
        return name
    return "sha256-" + hashlib.sha256(encoded).hexdigest()


def unique_key_of(ending: str) -> str | None:
    """Return the key of a unique call, given what follows ``<name>:unique:`` in the key in Redis.

    Return None if that key does not belong to an entry of this lock; see ``unique_part`` in
    unique.lua.
    """
    if not ending.endswith(":long-call"):
        key = ending.removesuffix(":call")
        return None if key == ending or ":unique:" in f":{key}" else key
    key, _, length = ending.removesuffix(":long-call").rpartition(":")
    return key if length == str(len(key.encode())) and ":unique:" in f":{key}" else None


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
    flow: str
    due: str
    index: str
    fleet: str

    def __iter__(self) -> Iterator[str]:
        """Yield the keys in the scripts' order."""
        return (getattr(self, part) for part in self.__slots__)


@functools.lru_cache(maxsize=4096)
def encoded(prefix: str, name: str, *, spread: bool = False) -> tuple[bytes, ...]:
    """Return the keys of a lock as bytes, in the scripts' order. Cached: names recur."""
    keys = encoded_in(prefix, bucket_of(name), key_name(name).encode())
    return (*keys[:-1], Keyspace(prefix, spread).fleet_of(name).encode()) if spread else keys


def encoded_in(prefix: str, number: int, shown: bytes) -> tuple[bytes, ...]:
    """Return the keys of a lock as bytes, given its bucket and the result of :func:`key_name`."""
    bucket = f"{prefix}:{{b{number:02d}}}:".encode()
    base = bucket + shown + b":"
    own = [base + part for part in _PARTS_OF_A_LOCK]
    return (*own, bucket + b"due", bucket + b"index", f"{prefix}:fleet".encode())


_PARTS_OF_A_LOCK: Final = tuple(part.encode() for part in LockKeys.__slots__[:9])


@dataclass(frozen=True, slots=True)
class Keyspace:
    """All keys with one prefix.

    Args:
        prefix: first part of every key; without braces, because the hash tag follows it.
        spread: whether each bucket has its own fleet keys, as on a Cluster.

    Raises:
        ConfigurationError: the prefix is empty, or holds a brace or NUL.
    """

    prefix: str = "csl"
    spread: bool = False

    def __post_init__(self) -> None:
        if not self.prefix or any(sign in self.prefix for sign in "{}\0"):
            msg = (
                f"singleton_lock_prefix is {self.prefix!r}: it must not be empty, nor contain a "
                "brace (the hash tag of a Cluster follows it) or NUL. Use letters, digits and "
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
            flow=f"{base}:flow",
            due=f"{bucket}:due",
            index=f"{bucket}:index",
            fleet=self.fleet_of(name),
        )

    def sent(self, name: str) -> tuple[bytes, ...]:
        """Return the keys of the lock ``name`` as bytes."""
        return (
            encoded(self.prefix, name, spread=True) if self.spread else encoded(self.prefix, name)
        )

    def wake(self, name: str, token: str) -> str:
        """Return the wake list of a waiting client."""
        return f"{self.bucket(bucket_of(name))}:{key_name(name)}:wake:{token}"

    def unique(self, name: str) -> str:
        """Return the start of the entries of a lock's unique calls; see :func:`unique_key_of`."""
        return f"{self.bucket(bucket_of(name))}:{key_name(name)}:unique:"

    def attempts(self, name: str) -> str:
        """Return the cache of the attempts of a lock's many holders; search.lua makes it."""
        return f"{self.bucket(bucket_of(name))}:{key_name(name)}:attempts"

    def vote(self, name: str) -> str:
        """Return the hash with the vote of one server of a quorum."""
        return f"{self.bucket(bucket_of(name))}:{key_name(name)}:vote"

    def gone(self, name: str, token: str) -> str:
        """Return the key with the round up to which a quorum's server refuses a token's votes."""
        return f"{self.bucket(bucket_of(name))}:{key_name(name)}:gone:{token}"

    @property
    def quorum(self) -> str:
        """The hash that identifies a server of a quorum."""
        return f"{self.fleet}:quorum"

    def waited(self, name: str) -> str:
        """Return the key that is written before waiting for the replicas of a lock's server."""
        return f"{self.bucket(bucket_of(name))}:waited"

    def due(self, bucket: int) -> str:
        """Return the sorted set of the locks of one bucket that a sweep must examine."""
        return f"{self.bucket(bucket)}:due"

    def index(self, bucket: int) -> str:
        """Return the index of parked attempts, of one bucket."""
        return f"{self.bucket(bucket)}:index"

    @property
    def fleet(self) -> str:
        """Common start of the keys that workers share."""
        return f"{self.prefix}:fleet"

    def fleet_of(self, name: str) -> str:
        """Return the common start of the shared keys that scripts of the lock ``name`` use."""
        return f"{self.bucket(bucket_of(name))}:fleet" if self.spread else self.fleet

    @property
    def fleets(self) -> Sequence[str]:
        """The common starts of the shared keys: one for all buckets, or one for each."""
        if not self.spread:
            return (self.fleet,)
        return tuple(f"{self.bucket(number)}:fleet" for number in range(BUCKETS))

    @property
    def audit(self) -> str:
        """The list of changes by operators; each bucket's fleet has its own."""
        return f"{self.fleet}:audit"

    @property
    def drained(self) -> Sequence[str]:
        """The hashes of the last drain of each route; each bucket's fleet has its own."""
        return tuple(f"{fleet}:drained" for fleet in self.fleets)

    @staticmethod
    def of_fleet(fleet: str) -> tuple[str, str]:
        """Return the keys of a script about workers; ``fleet`` is one of :attr:`fleets`.

        There are two, so that a Cluster refuses the script while the slot moves (TRYAGAIN). With
        one key the new master would execute it, and MIGRATE would then refuse the keys (BUSYKEY).
        """
        return fleet, f"{fleet}:routes"

    def inbox(self, worker: str, bucket: int = 0) -> str:
        """Return the list in which a worker receives its grants, in one bucket on a Cluster."""
        return f"{self.fleets[bucket]}:inbox:{worker}"

    def bell(self, worker: str) -> str:
        """Return the channel on which a worker is notified of the inbox that has a grant."""
        return f"{self.fleet}:bell:{worker}"

    @property
    def running(self) -> str:
        """The sorted set of workers with a list of running tasks. It expires."""
        return f"{self.fleet}:running"

    def running_of(self, worker: str) -> str:
        """Return the sorted set of the tasks that a worker has had for seconds. It expires."""
        return f"{self.running}:{worker}"

    @property
    def lost(self) -> str:
        """The hash of lost parked tasks: task id -> JSON. It expires."""
        return f"{self.fleet}:lost"

    @property
    def vouched(self) -> str:
        """The set of tokens of messages that a loss of data has spared. It expires."""
        return f"{self.fleet}:vouched"

    @property
    def mode(self) -> str:
        """The hash of the switches: task, or ``*``, -> mode."""
        return f"{self.fleet}:mode"

    def observed(self, bucket: int, part: str) -> str:
        """Return a part of the report of observe mode, in one bucket.

        Args:
            bucket: its number.
            part: ``tasks``, ``locks``, or ``ranks``, which bounds the locks.
        """
        return f"{self.bucket(bucket)}:observed:{part}"

    @property
    def schema(self) -> str:
        """The key that holds the version of the data model."""
        return f"{self.prefix}:schema"


def keyspace_with(keyspace: Keyspace | None, prefix: str | None) -> Keyspace:
    """Return the keyspace of a store, from one of two arguments or the default.

    Args:
        keyspace: the store's argument.
        prefix: the store's other argument: the first part of every key.

    Raises:
        ConfigurationError: both were given, or one of them is invalid.
    """
    given: object = keyspace  # may be anything, whatever the annotation says
    if given is None:
        return Keyspace() if prefix is None else Keyspace(prefix)
    if prefix is not None:
        msg = "prefix and keyspace are both given, and each sets the keys. Leave one out."
        raise ConfigurationError(msg)
    if not isinstance(given, Keyspace):
        msg = f"keyspace is {given!r}, not a Keyspace. To set the first part of keys, use prefix."
        raise ConfigurationError(msg)
    return given

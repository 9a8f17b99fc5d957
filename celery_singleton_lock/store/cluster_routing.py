"""The masters of a Redis Cluster, through redis-py's client.

redis-py knows which master has which slot, follows MOVED and ASK, and asks for the layout again
after a failover. This module does two things differently. redis-py's client connects when it is
created, so :class:`Nodes` creates it at its first use. redis-py's pipeline fails as a whole if one
master is dead, so :class:`Nodes` groups commands by master, and each command gets its own answer or
error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from inspect import signature
from typing import Any, Final, NamedTuple, TypeAlias

import redis
from redis import exceptions as failures
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, NodesManager
from redis.retry import Retry

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.native_threads import patched_by
from celery_singleton_lock.store.error_mapping import FAILED
from celery_singleton_lock.store.redis.blocking import MANY
from celery_singleton_lock.store.redis.counted import closing_if_interrupted
from celery_singleton_lock.store.requests import Attempts

ELSEWHERE: Final = (
    failures.MovedError,
    failures.AskError,
    failures.TryAgainError,
    failures.ClusterDownError,
)
"""Errors after which a command of a batch is sent again alone, so that redis-py follows it."""

_CHANGED: Final = (
    failures.ConnectionError,
    failures.ClusterDownError,
    failures.RedisClusterException,
)
"""Errors of a command that may succeed with a new layout."""

_DOWN: Final = (failures.ClusterDownError, failures.SlotNotCoveredError)
"""Errors that concern more slots than that of the command."""

_NO_MASTER: Final = failures.ClusterDownError("no master has that slot")
"""The answer of a slot that no master has in the known layout."""

Words: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""A command, and how redis-py parses its answer."""


class _Share(NamedTuple):
    """The keys of one master, by their indices; None for slots without a master."""

    node: ClusterNode | None
    places: list[int]


class _Asked(NamedTuple):
    """The requests to one master."""

    node: ClusterNode | None
    commands: Sequence[Words]


STILL_SILENT: Final = 0.25
"""Longest wait in seconds for a master that did not answer the last request in time."""

_OWN: Final = frozenset({"db", "redis_connect_func", "maint_notifications_config", "retry"})
"""Options of connections that a client sets itself."""


_CLOSES: Final = (
    "disconnect_startup_nodes_pools" not in signature(NodesManager.initialize).parameters
)
"""Whether redis-py may close connections in use when it asks for the layout: 5.1 to 6.4 do."""


class Nodes:
    """The masters of a Cluster.

    Args:
        make: creates the client, which at once asks the Cluster for its layout.
        given: the client is the caller's, who also closes it.
    """

    def __init__(self, make: Callable[[], redis.RedisCluster], *, given: bool = False) -> None:
        self._make, self._given = make, given
        self._made: redis.RedisCluster | None = None
        self._making = threading.Lock()
        self._silent: dict[str, threading.Thread] = {}
        self._late: set[str] = set()
        self._clock = SystemClock()

    @classmethod
    def of(cls, client: redis.RedisCluster) -> Nodes:
        """Return the masters of a client."""
        return cls(lambda: client, given=True)

    @property
    def cluster(self) -> redis.RedisCluster:
        """The client; created at its first use.

        Raises:
            redis.RedisError: no node answers; or a :data:`FAILED` of another kind.
        """
        if self._made is None:
            with self._making:
                if self._made is None:
                    made = self._make()
                    if not self._given:
                        _look_up_apart(made)
                    self._made = made
        return self._made

    @property
    def _client(self) -> Any:
        return self.cluster  # redis-py has not annotated most of it

    # -- commands ---------------------------------------------------------------------------------

    def send(self, command: Words, attempts: Attempts | None = None) -> Any:
        """Send a command to the master that has its keys; repeat it if that may have changed.

        With a client of the caller it is not repeated here, since locks in code repeat it
        themselves. Otherwise a release whose first answer was lost would look like the release of a
        lost lock.

        Args:
            command: what to send.
            attempts: records whether it was repeated.
        """
        try:
            return self.send_once(command)
        except failures.TimeoutError:
            raise  # the time for an answer is used up
        except _CHANGED:
            self.refresh_layout()
            if self._given:
                raise
            if attempts is not None:
                attempts.repeated = True
            return self.send_once(command)

    def send_once(self, command: Words) -> Any:
        """Send a command to the master that has its keys in the known layout.

        With ``target_nodes`` redis-py follows redirections and does not retry. Without it, redis-py
        would try up to eleven times with growing pauses: for a minute, if a master is silent.
        """
        words, options = command
        node = self._client.get_node_from_key(key_of(words))
        with closing_if_interrupted(self.cluster), as_redis_errors():
            return self._client.execute_command(*words, target_nodes=node, **options)

    def send_many(self, commands: Sequence[Words], patience: float | None = None) -> list[Any]:
        """Send commands, in one round trip per master; an answer may be an error.

        Args:
            commands: each with a key.
            patience: seconds after which a master without an answer counts as silent; all masters
                are asked at once. None: one after the other, each until its socket time-out.
                A worker under gevent or eventlet always asks one after the other: its watchdog is
                a thread of the system, and threads that it starts would be greenlets.
        """
        answers: list[Any] = [None] * len(commands)
        shares = self._sorted([key_of(words) for words, _ in commands])
        asked = [_Asked(node, [commands[place] for place in places]) for node, places in shares]
        if patience is None or (patched_by() and not self._given):
            told = [self._batch(node, mine) for node, mine in asked]
        else:
            told = self._at_once(asked, patience)
        for share, found in zip(shares, told, strict=True):
            for place, answer in zip(share.places, found, strict=True):
                answers[place] = answer
        return answers

    def _at_once(self, asked: Sequence[_Asked], patience: float) -> list[list[Any]]:
        """Ask each master in a separate thread, and wait for all answers together.

        A thread whose time is over continues until its sockets time out. Its master is asked again
        only when it has ended, so that threads do not accumulate. After a fork, the parent's
        threads count as ended. A silent master is waited for only :data:`STILL_SILENT` until it has
        answered a request, in time or late.
        """
        told: dict[str, list[Any]] = {}
        failed: list[BaseException] = []
        began, late = self._clock.monotonic(), frozenset(self._late)
        threads = {
            _name(each.node): self._thread(
                _name(each.node), partial(self._hear, each, told, failed)
            )
            for each in asked
        }
        for name, thread in threads.items():
            wait = min(patience, STILL_SILENT) if name in late else patience
            if thread is not None:
                thread.join(max(0.0, began + wait - self._clock.monotonic()))
                if thread.is_alive():
                    self._silent[name] = thread
                    self._late.add(name)
        if failed:
            raise failed[0]
        error = failures.TimeoutError(f"no answer within {patience:.3g} s")
        return [told.get(_name(node)) or [error] * len(mine) for node, mine in asked]

    def _thread(self, name: str, ask: Callable[[], None]) -> threading.Thread | None:
        """Return the thread that asks a master, or the earlier one that still waits for it.

        None if the interpreter shuts down and starts no thread: then this thread asks the master.
        """
        waits = self._silent.pop(name, None)
        if waits is not None and waits.is_alive():
            return waits
        thread = threading.Thread(target=ask, name="csl-master", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            ask()
            return None
        return thread

    def _hear(self, asked: _Asked, told: dict[str, list[Any]], failed: list[BaseException]) -> None:
        """Store what a master answers."""
        name = _name(asked.node)
        try:
            answers = told[name] = self._batch(asked.node, asked.commands)
            silent = isinstance(answers[0], failures.TimeoutError)
            (self._late.add if silent else self._late.discard)(name)
        except Exception as error:  # noqa: BLE001  # raised in the waiting thread
            failed.append(error)

    def ask_each(
        self, keys: Sequence[str], asking: Callable[[str], Sequence[Words]]
    ) -> list[list[Any]]:
        """Ask each master that has some of the keys, all at the same time.

        Args:
            keys: of any masters.
            asking: returns the commands for a master, given the first of its keys.

        Returns:
            For each key the answers of its master.
        """
        answers: list[list[Any]] = [[] for _ in keys]
        shares = self._sorted(keys)
        asked = [_Asked(node, asking(keys[places[0]])) for node, places in shares]
        with ThreadPoolExecutor(max(1, len(asked)), "csl-master") as threads:
            told = list(threads.map(self._tried, asked))
        for share, found in zip(shares, told, strict=True):
            for place in share.places:
                answers[place] = found
        return answers

    def _tried(self, asked: _Asked) -> list[Any]:
        if asked.node is None:
            return [_NO_MASTER]
        try:
            answers = _sent(self.cluster.get_redis_connection(asked.node), asked.commands)
        except FAILED as error:
            answers = [error]
        if any(isinstance(answer, FAILED) for answer in answers):  # MOVED is an answer, too
            self.refresh_layout()
        return answers

    def _sorted(self, keys: Sequence[Any]) -> list[_Share]:
        """Return the share of each master, by name: in older redis-py a node cannot be a key."""
        shares: dict[str, _Share] = {}
        for place, key in enumerate(keys):
            node = self._node(key)
            shares.setdefault(_name(node), _Share(node, [])).places.append(place)
        return list(shares.values())

    def _node(self, key: str | bytes) -> ClusterNode | None:
        client, found = self._client, None
        with suppress(failures.SlotNotCoveredError):
            found = client.get_node_from_key(key)
        return found

    def _batch(self, node: ClusterNode | None, commands: Sequence[Words]) -> list[Any]:
        """Send commands to one master; send those whose keys have moved again, one by one."""
        if node is None:
            return self._followed(commands, [_NO_MASTER] * len(commands))
        try:
            answers = _sent(self.cluster.get_redis_connection(node), commands)
        except failures.TimeoutError as error:
            self.refresh_layout()
            return [error] * len(commands)
        except FAILED:  # an idle connection was closed, or there is a new master
            self.refresh_layout()
            answers = self._once_more(commands)
        if any(isinstance(answer, failures.ReadOnlyError) for answer in answers):
            self.refresh_layout()
        return self._followed(commands, answers)

    def _followed(self, commands: Sequence[Words], answers: Sequence[Any]) -> list[Any]:
        """Send the commands again whose keys have moved: of a slot that still moves, only one.

        redis-py repeats a command of such a slot for 0.4 s. The other commands would wait for it.
        While the Cluster is down, only one command is sent again: each asks for the layout, which
        takes a time-out for each node that stands still.
        """
        final: list[Any] = []
        moving: dict[int | None, Any] = {}
        for command, answer in zip(commands, answers, strict=True):
            if not isinstance(answer, ELSEWHERE):
                final.append(answer)
                continue
            down = isinstance(answer, _DOWN)
            slot = None if down else self._client.keyslot(key_of(command[0]))
            told = moving[slot] if slot in moving else self._alone(command)
            if isinstance(told, (failures.TryAgainError, *_DOWN)):
                moving[slot] = told
            final.append(told)
        return final

    def _once_more(self, commands: Sequence[Words]) -> list[Any]:
        """Send commands of one master again, to the master that has the first key now."""
        now = self._node(key_of(commands[0][0]))
        try:
            if now is not None:
                return _sent(self.cluster.get_redis_connection(now), commands)
        except FAILED as error:
            return [error] * len(commands)
        return self._followed(commands, [_NO_MASTER] * len(commands))

    def _alone(self, command: Words) -> Any:
        try:
            return self.send(command)
        except FAILED as error:
            return error

    # -- masters ----------------------------------------------------------------------------------

    def masters(self) -> list[redis.Redis]:
        """Return a client for each master that has slots."""
        nodes = sorted(self._client.get_primaries(), key=lambda node: str(node.name))
        return [self.cluster.get_redis_connection(node) for node in nodes]

    def each(self, names: Sequence[str], key: Callable[[str], str]) -> Iterator[str]:
        """Yield one of these names for each master: one whose key is on that master."""
        seen: set[str] = set()
        for name in names:
            master = _name(self._node(key(name)))
            if master not in seen:
                seen.add(master)
                yield name

    def refresh_layout(self) -> None:
        """Ask for the layout of the Cluster; if no node answers, the next command asks again."""
        if self._made is not None:
            _look_up_apart(self._made)
            with suppress(*FAILED), as_redis_errors():
                self._made.nodes_manager.initialize()
            _look_up_apart(self._made)

    def for_blocking(self, longest: float) -> Nodes:
        """Return the same masters with other connections, for calls that block.

        Args:
            longest: most seconds until an answer arrives.
        """
        return Nodes(lambda: _blocking(self.cluster, longest))

    def close(self) -> None:
        """Close the connections, unless the client is the caller's."""
        if self._made is not None and not self._given:
            self._made.close()
            self._made = None


def _look_up_apart(client: Any) -> None:
    """Let the next look-up of the layout use connections of its own.

    redis-py 5.1 to 6.4 closes all connections of the node that it has asked, those of other threads
    too.
    """
    if _CLOSES:
        make: Any = ClusterNode
        manager = client.nodes_manager
        nodes = list(manager.startup_nodes.values())
        manager.startup_nodes = {node.name: make(node.host, node.port) for node in nodes}


_OF_A_NODE: Final = frozenset({"redis_connection", "execute_command"})
"""Attributes of a node that redis-py reads before it sends the command."""


@contextmanager
def as_redis_errors() -> Iterator[None]:
    """Convert errors of other classes that redis-py's Cluster clients raise.

    A new node is not in the layout until it has its first slot. Until then, redis-py follows ASK to
    None. redis-py repeats a command whose slot moves, and then gives up with an error of another
    class. redis-py 5.1 to 6.4 closes connections on which other threads wait for an answer; then
    their buffer is closed, or None. And redis-py before 6.2 asks one node after another for the
    layout, while other threads remove nodes that do not answer.

    Raises:
        redis.exceptions.TryAgainError: the slot moves; the command was not executed.
        redis.exceptions.ConnectionError: the connection was closed; the command may have been
            executed.
    """
    try:
        yield
    except (failures.ClusterError, AttributeError, ValueError, RuntimeError) as error:
        meant = _meant_by(error)
        if meant is None:
            raise
        raise meant from error


def _meant_by(error: Exception) -> failures.RedisError | None:
    """Return the error that a Cluster client should have raised; None: it is another error."""
    text = str(error)
    match error:
        case failures.ClusterError() if "TTL exhausted" in text:
            return failures.TryAgainError("the lock's slot is moving")
        case AttributeError() if "NoneType" in text:
            # redis-py 8 reads further attributes of None when it counts the first error.
            names = {getattr(each, "name", None) for each in (error, error.__context__)}
            return failures.TryAgainError(_NEW) if names & _OF_A_NODE else _closed()
        case ValueError() if "closed file" in text:
            return _closed()
        case RuntimeError() if "changed size during iteration" in text:
            return failures.ConnectionError("the layout of the Cluster is not known")
        case _:
            return None


def _closed() -> failures.ConnectionError:
    return failures.ConnectionError("the client closed the connection before the answer")


_NEW: Final = "the lock's slot is moving to a node that is new in the Cluster"


def _name(node: ClusterNode | None) -> str:
    return "" if node is None else str(node.name)


def key_of(words: Sequence[Any]) -> Any:
    """Return the (first) key of a command that has one."""
    return words[3] if words[0] in {"EVALSHA", "EVAL"} else words[1]


def _sent(client: redis.Redis, commands: Sequence[Words]) -> list[Any]:
    pipe: Any = client.pipeline(transaction=False)
    for words, options in commands:
        pipe.execute_command(*words, **options)
    with closing_if_interrupted(client), as_redis_errors():
        return list(pipe.execute(raise_on_error=False))


def _blocking(cluster: Any, longest: float) -> redis.RedisCluster:
    """Return a client with the same options, no retries, and this socket time-out."""
    found = cluster.get_connection_kwargs()
    options = {name: value for name, value in found.items() if name not in _OWN}
    remap = cluster.nodes_manager.address_remap
    options.update(socket_timeout=longest, address_remap=remap, max_connections=MANY)
    kind = options.pop("connection_class", redis.Connection)  # of a client made from a URL
    if issubclass(kind, redis.SSLConnection):
        options["ssl"] = True
    make: Any = ClusterNode
    nodes = [make(node.host, node.port) for node in cluster.get_nodes()]
    return redis.RedisCluster(
        startup_nodes=nodes,
        retry=Retry(NoBackoff(), 0),
        require_full_coverage=False,
        **options,
    )

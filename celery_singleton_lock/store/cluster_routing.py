"""The masters of a Redis Cluster, through redis-py's client.

redis-py knows which master has which slot, follows MOVED and ASK, and looks anew where a master has
failed over. What it does not do well for locks is done here: it connects when it is made, so it is
made when it is first needed; and its pipelines fail as a whole with one dead master, so commands
are sorted by master here, and each gets its own answer or error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import redis
from redis import exceptions as failures
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.store.error_mapping import FAILED
from celery_singleton_lock.store.message_operations import Attempts

ELSEWHERE: Final = (
    failures.MovedError,
    failures.AskError,
    failures.TryAgainError,
    failures.ClusterDownError,
)
"""Answers to a command of a batch that is asked again alone: redis-py follows these then."""

_CHANGED: Final = (
    failures.ConnectionError,
    failures.ClusterDownError,
    failures.RedisClusterException,
)
"""Errors of a command that may succeed once the layout was asked for anew."""

Words: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""A command, and how redis-py is to read its answer."""

_Asked: TypeAlias = Mapping[ClusterNode | None, Sequence[Words]]

_OWN: Final = frozenset({"redis_connect_func", "maint_notifications_config", "retry"})
"""Options of a client's connections that a client gives them itself."""


class Nodes:
    """The masters of a Cluster.

    Args:
        make: makes the client; that asks the Cluster for its layout at once.
        given: whether the client is the caller's, who closes it.
    """

    def __init__(self, make: Callable[[], redis.RedisCluster], *, given: bool = False) -> None:
        """Prepare; nothing is sent yet."""
        self._make, self._given = make, given
        self._made: redis.RedisCluster | None = None
        self._making = threading.Lock()
        self._silent: dict[str, threading.Thread] = {}
        self._clock = SystemClock()

    @classmethod
    def of(cls, client: redis.RedisCluster) -> Nodes:
        """Return those of a client that is there."""
        return cls(lambda: client, given=True)

    @property
    def cluster(self) -> redis.RedisCluster:
        """The client; made when it is first used.

        Raises:
            redis.RedisError: no node answers; or a :data:`FAILED` of another kind.
        """
        if self._made is None:
            with self._making:
                if self._made is None:
                    self._made = self._make()
        return self._made

    @property
    def _client(self) -> Any:
        return self.cluster  # redis-py has not annotated most of it

    # -- commands ---------------------------------------------------------------------------------

    def send(self, command: Words, attempts: Attempts | None = None) -> Any:
        """Send a command to the master that has its keys; once more, if that may be another now.

        ``attempts`` notes whether it was sent again.

        Not with a client of the caller's, on which locks in code work: they ask again by
        themselves, and would take a release of which the answer was lost for one of another's lock.
        """
        try:
            return self.send_once(command)
        except failures.TimeoutError:
            raise  # it has cost the patience already
        except _CHANGED:
            self.look_anew()
            if self._given:
                raise
            if attempts is not None:
                attempts.repeated = True
            return self.send_once(command)

    def send_once(self, command: Words) -> Any:
        """Send a command to the master that has its keys, as far as is known here.

        Where the node is named, redis-py follows redirections and leaves it at that. By itself it
        would try up to eleven times, with growing pauses: a minute, if a master stands still.
        """
        words, options = command
        node = self._client.get_node_from_key(key_of(words))
        return self._client.execute_command(*words, target_nodes=node, **options)

    def send_many(self, commands: Sequence[Words], patience: float | None = None) -> list[Any]:
        """Send commands, in one round trip per master; an answer may be an error.

        Args:
            commands: with their keys.
            patience: seconds after which who has not answered counts as silent; all are asked at
                once then. None: one after the other, each for as long as its sockets wait. So are
                those of a worker, whose sockets wait for a short time, and which may have threads
                of more than one kind.
        """
        answers: list[Any] = [None] * len(commands)
        places = self._sorted([key_of(words) for words, _ in commands])
        asked = {node: [commands[place] for place in found] for node, found in places.items()}
        if patience is None or not self._given:
            told = {node: self._batch(node, mine) for node, mine in asked.items()}
        else:
            told = self._at_once(asked, patience)
        for node, found in places.items():
            for place, answer in zip(found, told[node], strict=True):
                answers[place] = answer
        return answers

    def _at_once(self, asked: _Asked, patience: float) -> dict[ClusterNode | None, list[Any]]:
        """Ask each master in a thread of its own, and wait for their answers together.

        A thread goes on when it is not waited for any more, until its sockets time out. That master
        is asked anew once the thread has ended, so there are not more and more of them; those of a
        parent process have all ended.
        """
        told: dict[ClusterNode | None, list[Any]] = {}
        failed: list[BaseException] = []
        until = self._clock.monotonic() + patience
        threads = {
            node: self._thread(node, partial(self._hear, node, mine, told, failed))
            for node, mine in asked.items()
        }
        for node, thread in threads.items():
            if thread is not None:
                thread.join(max(0.0, until - self._clock.monotonic()))
                if thread.is_alive():
                    self._silent[_name(node)] = thread
        if failed:
            raise failed[0]
        late = failures.TimeoutError(f"no answer within {patience:.3g} s")
        return {node: told.get(node) or [late] * len(mine) for node, mine in asked.items()}

    def _thread(self, node: ClusterNode | None, ask: Callable[[], None]) -> threading.Thread | None:
        """Return the thread that asks a master, or the one that still waits for it.

        None if there are no more threads, since the interpreter ends: it was asked here.
        """
        waits = self._silent.pop(_name(node), None)
        if waits is not None and waits.is_alive():
            return waits
        thread = threading.Thread(target=ask, name="csl-master", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            ask()
            return None
        return thread

    def _hear(
        self,
        node: ClusterNode | None,
        commands: Sequence[Words],
        told: dict[ClusterNode | None, list[Any]],
        failed: list[BaseException],
    ) -> None:
        """Note what a master answers."""
        try:
            told[node] = self._batch(node, commands)
        except Exception as error:  # noqa: BLE001  # raised by who waits for this
            failed.append(error)

    def ask_each(
        self, keys: Sequence[str], asking: Callable[[str], Sequence[Words]]
    ) -> list[list[Any]]:
        """Ask each master once that has some of the keys, all at the same time.

        Return its answers for each key.

        Args:
            keys: they tell which masters.
            asking: returns the commands for a master, of which this is the first key.
        """
        answers: list[list[Any]] = [[] for _ in keys]
        asked = self._sorted(keys)
        wanted = [asking(keys[places[0]]) for places in asked.values()]
        with ThreadPoolExecutor(max(1, len(asked)), "csl-master") as threads:
            told = list(threads.map(self._tried, asked, wanted))
        for places, found in zip(asked.values(), told, strict=True):
            for place in places:
                answers[place] = found
        return answers

    def _tried(self, node: ClusterNode | None, commands: Sequence[Words]) -> list[Any]:
        if node is None:
            return [failures.ClusterDownError("no master has that slot")]
        try:
            return _sent(self.cluster.get_redis_connection(node), commands)
        except FAILED as error:
            self.look_anew()
            return [error]

    def _sorted(self, keys: Sequence[Any]) -> dict[ClusterNode | None, list[int]]:
        """Return the places of those of each master; None for slots that nobody has."""
        places: dict[ClusterNode | None, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._node(key), []).append(place)
        return places

    def _node(self, key: str | bytes) -> ClusterNode | None:
        client, found = self._client, None
        with suppress(failures.SlotNotCoveredError):
            found = client.get_node_from_key(key)
        return found

    def _batch(self, node: ClusterNode | None, commands: Sequence[Words]) -> list[Any]:
        """Send commands to one master; those whose keys have moved again, one by one."""
        if node is None:
            return [self._alone(command) for command in commands]
        try:
            answers = _sent(self.cluster.get_redis_connection(node), commands)
        except failures.TimeoutError as error:
            self.look_anew()
            return [error] * len(commands)
        except FAILED:  # closed while it was idle, or another is the master now
            self.look_anew()
            answers = self._once_more(commands)
        if any(isinstance(answer, failures.ReadOnlyError) for answer in answers):
            self.look_anew()
        return [
            self._alone(command) if isinstance(answer, ELSEWHERE) else answer
            for command, answer in zip(commands, answers, strict=True)
        ]

    def _once_more(self, commands: Sequence[Words]) -> list[Any]:
        """Send again what one master had, to who has its first key now; each may be asked again."""
        now = self._node(key_of(commands[0][0]))
        try:
            if now is not None:
                return _sent(self.cluster.get_redis_connection(now), commands)
        except FAILED as error:
            return [error] * len(commands)
        return [self._alone(command) for command in commands]

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
        """Yield one of these names for each master, of which that has the key."""
        seen: set[ClusterNode | None] = set()
        for name in names:
            node = self._node(key(name))
            if node not in seen:
                seen.add(node)
                yield name

    def look_anew(self) -> None:
        """Ask for the layout; if nobody answers now, the next command asks again."""
        if self._made is not None:
            with suppress(*FAILED):
                self._made.nodes_manager.initialize()

    def twin(self, longest: float) -> Nodes:
        """Return the same masters, for calls that block.

        Args:
            longest: most seconds until an answer comes.
        """
        return Nodes(lambda: _blocking(self.cluster, longest))

    def close(self) -> None:
        """Close the connections, unless the client is the caller's."""
        if self._made is not None and not self._given:
            self._made.close()
            self._made = None


def _name(node: ClusterNode | None) -> str:
    return "" if node is None else str(node.name)


def key_of(words: Sequence[Any]) -> Any:
    """Return the (first) key of a command that has one."""
    return words[3] if words[0] in {"EVALSHA", "EVAL"} else words[1]


def _sent(client: redis.Redis, commands: Sequence[Words]) -> list[Any]:
    pipe: Any = client.pipeline(transaction=False)
    for words, options in commands:
        pipe.execute_command(*words, **options)
    return list(pipe.execute(raise_on_error=False))


def _blocking(cluster: Any, longest: float) -> redis.RedisCluster:
    """Return a client with the same options, no retries, and a socket time-out above the block."""
    found = cluster.get_connection_kwargs()
    options = {name: value for name, value in found.items() if name not in _OWN}
    options.update(socket_timeout=longest)
    make: Any = ClusterNode
    nodes = [make(node.host, node.port) for node in cluster.get_nodes()]
    return redis.RedisCluster(
        startup_nodes=nodes,
        retry=Retry(NoBackoff(), 0),
        require_full_coverage=False,
        **options,
    )

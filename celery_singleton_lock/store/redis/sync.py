"""The store on a Redis or Valkey server, for threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import redis
from redis import exceptions as failures
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.core.clock import Clock, clock_for
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.model import CLAIM_LEASE, Claim, Ending, Owner, Reply, Reservation
from celery_singleton_lock.core.lock_steps import by_thread, carry_out
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import FAILED, explain
from celery_singleton_lock.store.scripts import Argument, Call, Script
from celery_singleton_lock.store.message_operations import (
    LONGEST_BLOCK,
    NO_REPLICAS,
    SHORTEST_BLOCK,
    SLACK,
    Ask,
    Attempts,
    Batch,
    Command,
    Confirm,
    Counted,
    Pop,
    Replicas,
    Verbs,
    Wish,
    released,
)
from celery_singleton_lock.store.redis.fast_path import Wire, demoted, packed, send_counted

BLOCKS: Final = (1.0, 3.0, 10.0, LONGEST_BLOCK)
"""Lengths of blocking calls, in seconds, that have a client each; who wants longer asks again."""


def confirmed(answers: Sequence[Any], wish: Confirm) -> bool:
    """Return whether enough replicas of a server have what was written.

    Raises:
        redis.RedisError: the server did not say.
    """
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return bool(answers[-1] >= wish.replicas.number)


@contextmanager
def explained(reconnect: Callable[[], None]) -> Iterator[None]:
    """Turn redis-py's errors into ours; have a demoted master's connections closed."""
    try:
        yield
    except FAILED as error:
        if demoted(error):
            reconnect()
        raise explain(error) from error


class RedisStore:
    """Locks on one Redis server.

    Args:
        client: redis-py client, used for all verbs; replies may be decoded or not.
        keyspace: where the keys are.
        scripts: the verbs; test builds pass their own.
        claim_lease: seconds in which a waiter must claim its grant.
        direct: run single scripts past redis-py's client, see :class:`Wire`.
        quarantine: grant nothing for one longest lease after the server's run id has changed: it
            was promoted, or restarted, and may have lost grants. All clients must say the same.
        replicas: how many must have a parked message before it counts as kept.

    Raises (all verbs):
        BackendUnreachable: no answer. The verb may or may not have run; asking again with the same
            token is safe.
        BackendRefused: the server answered with a refusal.
    """

    def __init__(
        self,
        client: redis.Redis,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
        direct: bool = False,
        quarantine: bool = False,
        replicas: Replicas = NO_REPLICAS,
    ) -> None:
        """Prepare; nothing is sent yet."""
        self.client = client
        self.clock: Clock = clock_for(client)
        self.verbs = Verbs(keyspace, scripts, claim_lease, quarantine=quarantine, replicas=replicas)
        self.keyspace = self.verbs.keyspace
        self._wire = Wire(client) if direct else None
        self._blocking: dict[float, redis.Redis] = {}
        # At exit the system closes them: a thread may still be busy, and would fail.
        weakref.finalize(self, _close_all, self._blocking, self._wire).atexit = False

    # -- verbs ------------------------------------------------------------------------------------

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Reply:
        """Take the lock, or queue for it; see :meth:`Store.acquire`."""
        return replies.reply(self._ask(self.verbs.to_acquire(owner, claim, wait)))

    def release(
        self,
        name: str,
        token: str,
        ending: Ending,
        *,
        worker: str = "",
        done_for: float = 3600.0,
        mark: bool = False,
        reserve: Reservation | None = None,
    ) -> Reply:
        """Give the lock back; see :meth:`Store.release`."""
        ask = self.verbs.to_release(name, token, ending, worker, done_for, mark, reserve)
        attempts = Attempts()
        return released(self._ask(ask, attempts), attempts)

    park = by_thread(Verbs.park)
    park_many = by_thread(Verbs.park_many)
    confirm = by_thread(Verbs.confirm)
    claim = by_thread(Verbs.claim)
    extend = by_thread(Verbs.extend)
    kick = by_thread(Verbs.kick)
    kick_many = by_thread(Verbs.kick_many)
    left = by_thread(Verbs.left)
    take_due = by_thread(Verbs.take_due)
    neglected = by_thread(Verbs.neglected)
    inspect = by_thread(Verbs.inspect)
    reset = by_thread(Verbs.reset)
    revoke = by_thread(Verbs.revoke)
    find = by_thread(Verbs.find)
    body = by_thread(Verbs.body)
    parked = by_thread(Verbs.parked)
    switches = by_thread(Verbs.switches)
    switch = by_thread(Verbs.switch)
    waited_for = by_thread(Verbs.waited_for)
    let_run = by_thread(Verbs.let_run)
    observe = by_thread(Verbs.observe)
    observed = by_thread(Verbs.observed)
    forget_observed = by_thread(Verbs.forget_observed)
    beat = by_thread(Verbs.beat)
    leave = by_thread(Verbs.leave)
    identify = by_thread(Verbs.identify)
    kept = by_thread(Verbs.kept)
    traced = by_thread(Verbs.traced)
    vouch = by_thread(Verbs.vouch)
    note_lost = by_thread(Verbs.note_lost)
    lost = by_thread(Verbs.lost)
    losses = by_thread(Verbs.losses)
    receive = by_thread(Verbs.receive)
    wait = by_thread(Verbs.wait)
    time = by_thread(Verbs.time)
    probe = by_thread(Verbs.probe)
    schema = by_thread(Verbs.schema)
    describe = by_thread(Verbs.describe)

    # -- calls ------------------------------------------------------------------------------------

    def do(self, wish: Wish) -> Any:
        """Do what a verb wishes for.

        Raises:
            NoScriptError: the server does not know that script.
            BackendError: no answer, or refused.
        """
        try:
            return self._done(wish)
        except failures.NoScriptError:
            raise
        except (failures.RedisError, OSError) as error:
            if demoted(error):
                self.reconnect()
            raise explain(error) from error

    def _done(self, wish: Wish) -> Any:
        if isinstance(wish, Command):
            return self._command(wish)
        if isinstance(wish, Counted):
            return self._counted(wish)
        if isinstance(wish, Batch):
            return self._sent(wish.commands)
        if isinstance(wish, Confirm):
            answers = self._sent(wish.replicas.confirming(wish.keys[0]))
            return [confirmed(answers, wish)] * len(wish.keys)
        return self._pop(wish)  # type: ignore[arg-type]  # Receive is for Cluster

    def _command(self, command: Command) -> Any:
        client: Any = self.client  # redis-py has not annotated this one
        return client.execute_command(*command.words, **command.options)

    def _counted(self, wish: Counted) -> Any:
        if self.client.connection is not None:  # a client with a single connection guards it itself
            return self._command(wish.command)
        return send_counted(self.client.connection_pool, wish.command.words, wish.attempts)

    def _sent(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip; an answer may be an error."""
        pipe: Any = self.client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command.words, **command.options)
        answers: list[Any] = pipe.execute(raise_on_error=False)
        if any(isinstance(answer, Exception) and demoted(answer) for answer in answers):
            self.reconnect()
        return answers

    def _ask(self, ask: Ask, attempts: Attempts | None = None) -> Any:
        """Run a lock's script the short way, if that is open; see :func:`packed`."""
        if self._wire is not None:
            command = packed(ask.script, self.keyspace.prefix, ask.name, ask.own, ask.usual)
            try:
                return self._wire.ask(command, attempts)
            except failures.NoScriptError:
                pass  # as below, with its text
            except (failures.RedisError, OSError) as error:
                raise explain(error) from error
        call = ask.call(self.keyspace)
        if attempts is None:
            return self._run(call)
        return carry_out(self.verbs.run_counted(call, attempts), self.do)

    def _lock_call(self, verb: str, name: str, **arguments: Argument) -> Call:
        return self.verbs.lock_call(verb, name, **arguments)

    def _run(self, call: Call) -> Any:
        return carry_out(self.verbs.run(call), self.do)

    def _run_many(self, calls: Sequence[Call]) -> list[Any]:
        return carry_out(self.verbs.run_many(calls), self.do)

    def _settled(self, call: Call, answer: Any) -> Any:
        return carry_out(self.verbs.settled(call, answer), self.do)

    # -- blocking ---------------------------------------------------------------------------------

    def _pop(self, pop: Pop) -> bytes | str | None:
        """BLPOP on connections of their own, whose socket time-out lies above the block.

        redis-py 8's defaults (a 5 s socket time-out and ten retries) turned ``blpop(key, 7)`` into
        an error after 58.9 s; a retried BLPOP would also swallow an element.
        """
        block = min(max(pop.seconds, SHORTEST_BLOCK), LONGEST_BLOCK)
        found: Any = self._blocking_client(block).blpop([pop.key], timeout=block)
        return None if found is None else found[1]

    def _blocking_client(self, block: float) -> redis.Redis:
        """Return the client for blocks of about this length, so that a stalled server is noticed.

        Threads that come together may each make one; the dictionary keeps the first, and the others
        have not connected yet.
        """
        longest = next(most for most in BLOCKS if block <= most)
        found = self._blocking.get(longest)
        return found or self._blocking.setdefault(longest, self._twin(longest))

    def _twin(self, longest: float) -> redis.Redis:
        return blocking_twin(self.client, longest)

    def too_few(self) -> str:
        """Return what is said when too few replicas confirm."""
        return self.verbs.too_few()

    def servers(self) -> Sequence[redis.Redis]:
        """Return a client of each server that has keys."""
        return [self.client]

    def reconnect(self) -> None:
        """Close what is idle, so that the next call asks anew where the server is."""
        for client in (self.client, *self._blocking.values()):
            client.connection_pool.disconnect(inuse_connections=False)

    def hang_up(self) -> None:
        """Close the client as well: for who made it for this store alone."""
        self.close()
        self.client.close()

    def close(self) -> None:
        """Close the connections that this store opened; the caller's client stays open.

        Those of a store that nobody uses any more are closed likewise.
        """
        _close_all(self._blocking, self._wire)


def _close_all(blocking: dict[float, redis.Redis], wire: Wire | None) -> None:
    while blocking:
        # redis-py leaves a pool open that it was given
        blocking.popitem()[1].connection_pool.disconnect()
    if wire:
        wire.close()


def blocking_twin(
    client: redis.Redis,
    longest: float,
    kind: type[Any] = redis.Redis,
    pool_kind: type[Any] = redis.ConnectionPool,
) -> redis.Redis:
    """Return a client to the same server for calls that block: no retries, a socket time-out above.

    Args:
        client: the client to copy.
        longest: most seconds for which a call blocks.
        kind: of the client.
        pool_kind: of its pool.
    """
    pool = client.connection_pool
    options = dict(pool.connection_kwargs)
    options.update(socket_timeout=longest + SLACK, retry=Retry(NoBackoff(), 0), retry_on_error=[])
    options.pop("retry_on_timeout", None)
    made: redis.Redis = kind(
        connection_pool=pool_kind(connection_class=pool.connection_class, **options)
    )
    return made

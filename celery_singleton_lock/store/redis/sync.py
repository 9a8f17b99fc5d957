"""The store on a Redis or Valkey server, for threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import redis
from redis import exceptions as failures

from celery_singleton_lock.core.clock import Clock, clock_for
from celery_singleton_lock.core.lock_steps import by_thread, carry_out
from celery_singleton_lock.core.model import CLAIM_LEASE, Claim, Ending, Owner, Reply, Reservation
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import FAILED, demoted, explain
from celery_singleton_lock.store.lock_operations import released
from celery_singleton_lock.store.operations import Operations
from celery_singleton_lock.store.redis.blocking import BlockingClients, blocking_client
from celery_singleton_lock.store.redis.counted import (
    close_idle,
    closing_if_interrupted,
    send_counted,
    send_counted_alone,
)
from celery_singleton_lock.store.redis.fast_path import FastPath, packed
from celery_singleton_lock.store.requests import (
    NO_REPLICAS,
    Attempts,
    Batch,
    Command,
    Confirm,
    Counted,
    Replicas,
    Request,
    SplitCall,
)
from celery_singleton_lock.store.scripts import Argument, Call, Script


def confirmed(answers: Sequence[Any], request: Confirm) -> bool:
    """Return whether enough replicas of a server have what was written.

    Raises:
        redis.RedisError: the server did not answer, or refused.
    """
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return bool(answers[-1] >= request.replicas.number)


@contextmanager
def explained(reconnect: Callable[[], None]) -> Iterator[None]:
    """Convert errors of redis-py; reconnect if a server is no longer the master."""
    try:
        yield
    except FAILED as error:
        if demoted(error):
            reconnect()
        raise explain(error) from error


class RedisStore:
    """Locks on one Redis server.

    Args:
        client: redis-py client, used for all operations; replies may be decoded or not.
        keyspace: names of the keys.
        scripts: the scripts; tests pass their own.
        claim_lease: seconds in which a waiter must claim its grant.
        direct: send acquire and release without redis-py's client, see :class:`FastPath`.
        quarantine: grant nothing for one longest lease after the server's run id has changed: it
            was promoted, or restarted, and may have lost grants. All clients must agree. None: do
            so if another client does.
        replicas: how many must have a message before it counts as parked.

    Raises (all operations):
        BackendUnreachable: no answer. The operation may have run; a further call with the same
            token is safe.
        BackendRefused: the server refused.
    """

    def __init__(
        self,
        client: redis.Redis,
        keyspace: Keyspace | None = None,
        *,
        scripts: Mapping[str, Script] | None = None,
        claim_lease: float = CLAIM_LEASE,
        direct: bool = False,
        quarantine: bool | None = False,
        replicas: Replicas = NO_REPLICAS,
    ) -> None:
        self.client = client
        self.clock: Clock = clock_for(client)
        self.operations = Operations(
            keyspace, scripts, claim_lease, quarantine=quarantine, replicas=replicas
        )
        self.keyspace = self.operations.keyspace
        self._fast_path = FastPath(client) if direct else None
        self._blocking = BlockingClients(self._copier())
        # Not at exit: a thread may still use a connection, and would fail.
        weakref.finalize(self, _close_all, self._blocking, self._fast_path).atexit = False

    # -- operations -------------------------------------------------------------------------------

    # These two run once per task, so they call the server without a generator.

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Reply:
        """Acquire the lock, or queue for it; see :meth:`LockStore.acquire`."""
        return replies.reply(self._run_split(self.operations.acquire_call(owner, claim, wait)))

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
        """Release the lock; see :meth:`LockStore.release`."""
        call = self.operations.release_call(name, token, ending, worker, done_for, mark, reserve)
        attempts = Attempts()
        return released(self._run_split(call, attempts), attempts)

    park = by_thread(Operations.park)
    park_many = by_thread(Operations.park_many)
    confirm = by_thread(Operations.confirm)
    claim = by_thread(Operations.claim)
    extend = by_thread(Operations.extend)
    sweep_and_grant = by_thread(Operations.sweep_and_grant)
    sweep_and_grant_many = by_thread(Operations.sweep_and_grant_many)
    record_publish_result = by_thread(Operations.record_publish_result)
    take_due_locks = by_thread(Operations.take_due_locks)
    unswept_locks = by_thread(Operations.unswept_locks)
    inspect = by_thread(Operations.inspect)
    reset = by_thread(Operations.reset)
    deliver_revoked = by_thread(Operations.deliver_revoked)
    locate_tasks = by_thread(Operations.locate_tasks)
    body = by_thread(Operations.body)
    parked = by_thread(Operations.parked)
    switches = by_thread(Operations.switches)
    switch = by_thread(Operations.switch)
    waited_for = by_thread(Operations.waited_for)
    deliver_unlocked = by_thread(Operations.deliver_unlocked)
    record_observation = by_thread(Operations.record_observation)
    observations = by_thread(Operations.observations)
    clear_observations = by_thread(Operations.clear_observations)
    worker_heartbeat = by_thread(Operations.worker_heartbeat)
    leave = by_thread(Operations.leave)
    identify = by_thread(Operations.identify)
    has_messages = by_thread(Operations.has_messages)
    has_traces = by_thread(Operations.has_traces)
    vouch = by_thread(Operations.vouch)
    note_lost = by_thread(Operations.note_lost)
    lost = by_thread(Operations.lost)
    losses = by_thread(Operations.losses)
    receive = by_thread(Operations.receive)
    wait = by_thread(Operations.wait)
    time = by_thread(Operations.time)
    probe = by_thread(Operations.probe)
    schema = by_thread(Operations.schema)
    describe = by_thread(Operations.describe)

    def too_few(self) -> str:
        """Return the error text for locks that too few replicas confirm."""
        return self.operations.too_few()

    # -- requests ---------------------------------------------------------------------------------

    def do(self, request: Request) -> Any:
        """Carry out a request of an operation.

        Raises:
            NoScriptError: the server does not know the script.
            BackendError: no answer, or refused.
        """
        try:
            return self._done(request)
        except failures.NoScriptError:
            raise
        except FAILED as error:
            if demoted(error):
                self.reconnect()
            raise explain(error) from error

    def _done(self, request: Request) -> Any:
        if isinstance(request, Command):
            return self._command(request)
        if isinstance(request, Counted):
            return self._counted(request)
        if isinstance(request, Batch):
            return self._sent(request.commands)
        if isinstance(request, Confirm):
            answers = self._sent(request.replicas.confirming(request.keys[0]))
            return [confirmed(answers, request)] * len(request.keys)
        return self._blocking.pop(request)  # type: ignore[arg-type]  # Receive is for Cluster

    def _command(self, command: Command) -> Any:
        """Send a command; a script without redis-py's client.

        A soft time limit can interrupt the client after it has sent a command. It then uses the
        connection again, and takes the late answer for that of the next command.
        """
        if command.words[0] in {"EVALSHA", "EVAL"}:
            return self._counted(Counted(command, Attempts()))
        client: Any = self.client  # redis-py has not annotated this method
        with closing_if_interrupted(client):
            return client.execute_command(*command.words, **command.options)

    def _counted(self, request: Counted) -> Any:
        words, attempts = request.command.words, request.attempts
        if self.client.connection is not None:
            return send_counted_alone(self.client, words, attempts)
        return send_counted(self.client.connection_pool, words, attempts)

    def _sent(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip; an answer may be an error."""
        pipe: Any = self.client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command.words, **command.options)
        with closing_if_interrupted(self.client):
            answers: list[Any] = pipe.execute(raise_on_error=False)
        if any(isinstance(answer, Exception) and demoted(answer) for answer in answers):
            self.reconnect()
        return answers

    def _run_split(self, split: SplitCall, attempts: Attempts | None = None) -> Any:
        """Run a lock's script, on the fast path if there is one; see :func:`packed`."""
        if self._fast_path is not None:
            command = packed(split.script, self.keyspace.prefix, split.name, split.own, split.usual)
            try:
                return self._fast_path.ask(command, attempts)
            except failures.NoScriptError:
                pass  # run below, with its text
            except (failures.RedisError, OSError) as error:
                raise explain(error) from error
        call = split.call(self.keyspace)
        if attempts is None:
            return self._run(call)
        return carry_out(self.operations.run_counted(call, attempts), self.do)

    def _lock_call(self, verb: str, name: str, **arguments: Argument) -> Call:
        return self.operations.lock_call(verb, name, **arguments)

    def _run(self, call: Call) -> Any:
        return carry_out(self.operations.run(call), self.do)

    def _settled(self, call: Call, answer: Any) -> Any:
        return carry_out(self.operations.settled(call, answer), self.do)

    # -- connections ------------------------------------------------------------------------------

    def _copier(self) -> Callable[[float], redis.Redis]:
        """Return a function that makes clients for blocking calls, without a reference to self."""
        return partial(blocking_client, self.client)

    def servers(self) -> Sequence[redis.Redis]:
        """Return a client of each server that has keys."""
        return [self.client]

    def reconnect(self) -> None:
        """Close idle connections, so that the next call looks up the master's address again."""
        close_idle(self.client.connection_pool)
        self._blocking.reconnect()

    def hang_up(self) -> None:
        """Close the client as well, if it was made for this store alone."""
        self.close()
        self.client.close()

    def close(self) -> None:
        """Close the connections that this store opened; the caller's client stays open.

        They are also closed when nobody refers to the store any more.
        """
        _close_all(self._blocking, self._fast_path)


def _close_all(blocking: BlockingClients, fast_path: FastPath | None) -> None:
    blocking.close()
    if fast_path:
        fast_path.close()

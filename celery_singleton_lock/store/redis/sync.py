"""The store on a Redis or Valkey server, for threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import redis
from redis import exceptions as failures

from celery_singleton_lock.core.clock import Clock, clock_for
from celery_singleton_lock.core.lock_steps import by_thread, carry_out
from celery_singleton_lock.core.model import (
    CLAIM_LEASE,
    DONE_FOR,
    Claim,
    Ending,
    Owner,
    Reply,
    Reservation,
)
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.core.unique import Announced
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.error_mapping import FAILED, demoted, explain
from celery_singleton_lock.store.lock_operations import released
from celery_singleton_lock.store.operations import Operations
from celery_singleton_lock.store.redis.blocking import (
    BLOCKS,
    BlockingClients,
    InboxReader,
    block_of,
    blocking_client,
)
from celery_singleton_lock.store.redis.counted import (
    close_idle,
    closing_if_interrupted,
    send_counted,
    without_single_connection,
)
from celery_singleton_lock.store.redis.fast_path import FastPath, OnReply, is_plain, packed
from celery_singleton_lock.store.requests import (
    NO_REPLICAS,
    Attempts,
    Batch,
    Command,
    Confirm,
    Counted,
    Pop,
    Replicas,
    Request,
    SplitCall,
)
from celery_singleton_lock.store.script_arguments import delete_message_of
from celery_singleton_lock.store.scripts import Argument, Call, Script
from celery_singleton_lock.store.unique_operations import announced


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
        direct: send acquire, claim and release without redis-py's client, see :class:`FastPath`.
        quarantine: grant nothing for one longest lease after the server's run id has changed: it
            was promoted, or restarted, and may have lost grants. All clients must agree. None: do
            so if another client does.
        replicas: how many must have a message before it counts as parked.

    Raises (all operations):
        BackendUnreachable: no answer. The operation may have run; a further call with the same
            token is safe.
        BackendRefused: the server refused.
    """

    has_rates = True

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
        self.client: redis.Redis = without_single_connection(client)
        self._given = client
        self.clock: Clock = clock_for(client)
        self.operations: Operations = Operations(
            keyspace, scripts, claim_lease, quarantine=quarantine, replicas=replicas
        )
        self.keyspace: Keyspace = self.operations.keyspace
        self._fast_path = FastPath(client) if direct else None
        self._blocking = BlockingClients(self._copier())
        self._inbox: FastPath | None = None
        self._readers: dict[str, InboxReader] = {}
        self._has_confirmed = False
        # Not at exit: a thread may still use a connection, and would fail.
        weakref.finalize(self, _close_all, self._blocking, self._fast_path).atexit = False

    # -- operations -------------------------------------------------------------------------------

    # These run once per task, so they call the server without a generator.

    def acquire(self, owner: Owner, claim: Claim, *, wait: float | None = None) -> Reply:
        """Acquire the lock, or queue for it; see :meth:`LockStore.acquire`."""
        return replies.reply(self._run_split(self.operations.acquire_call(owner, claim, wait)))

    def claim(
        self,
        owner: Owner,
        name: str,
        lease: float,
        *,
        acks_early: bool = False,
        kept_elsewhere: bool = False,
        later: bool = False,
        limit: int = 0,
    ) -> Reply:
        """Start to use a grant; see :meth:`LockStore.claim`."""
        delete_message = delete_message_of(
            acks_early=acks_early, kept_elsewhere=kept_elsewhere, later=later
        )
        call = self.operations.claim_call(owner, name, lease, delete_message, limit)
        return replies.reply(self._run_split(call))

    def release(
        self,
        name: str,
        token: str,
        ending: Ending,
        *,
        worker: str = "",
        done_for: float = DONE_FOR,
        mark: bool = False,
        reserve: Reservation | None = None,
    ) -> Reply:
        """Release the lock; see :meth:`LockStore.release`."""
        call = self.operations.release_call(name, token, ending, worker, done_for, mark, reserve)
        attempts = Attempts()
        return released(self._run_split(call, attempts), attempts)

    @property
    def defers(self) -> bool:
        """Whether :meth:`send_release` can be used."""
        return self._fast_path is not None and self._fast_path.defers

    def send_release(
        self, name: str, token: str, worker: str, done_for: float, on_reply: OnReply
    ) -> bool:
        """Release the lock of a task that has ended, and do not wait for the reply.

        Args:
            name: of the lock.
            token: of its holder.
            worker: id of the worker to which the lock may be granted next.
            done_for: seconds for which the end is remembered if the message has copies.
            on_reply: called once with the reply, which :func:`replies.reply` reads, or with the
                error of redis-py. It must neither wait nor raise.

        Returns:
            False if the connection does not allow that. Nothing is sent then.

        Raises:
            BackendUnreachable: it could not be sent. ``on_reply`` is not called.
            BackendRefused: likewise.
        """
        if self._fast_path is None or not self.defers:
            return False
        split = self.operations.release_call(
            name, token, Ending.FINAL, worker, done_for, mark=False, reserve=None
        )
        command = packed(split.script, self.keyspace.prefix, split.name, split.own, split.usual)
        try:
            self._fast_path.send(command, on_reply, self.clock.monotonic())
        except (failures.RedisError, OSError) as error:
            raise explain(error) from error
        return True

    def read_unread_replies(self, sent_before: float) -> bool:
        """Read the replies to releases that were sent before a monotonic time, and not read yet.

        Returns:
            Whether replies to later releases are unread.
        """
        return self._fast_path is not None and self._fast_path.read_unread_replies(sent_before)

    park: Final = by_thread(Operations.park)
    park_many: Final = by_thread(Operations.park_many)
    confirm: Final = by_thread(Operations.confirm)
    extend: Final = by_thread(Operations.extend)
    charge: Final = by_thread(Operations.charge)
    confirm_sent: Final = by_thread(Operations.confirm_sent)
    withdraw: Final = by_thread(Operations.withdraw)

    def announce(self, name: str, key: str, task_id: str, *, instead_of: str = "") -> Announced:
        """Announce a unique call; see :meth:`UniqueStore.announce`."""
        call = self.operations.announce_call(name, key, task_id, instead_of)
        return announced(self._run_split(call))

    def confirm_soon(self, name: str, key: str, task_id: str, retries: int, seconds: float) -> None:
        """Note that a unique call was sent, as ``confirm_sent`` does; do not wait for the reply.

        The first call waits, so that the server knows the script. If a later request does not
        arrive, the call is only announced: the next call like it is sent after a second.
        """
        if self._fast_path is None or not (self.defers and self._has_confirmed):
            self.confirm_sent(name, key, task_id, retries, seconds)
            self._has_confirmed = True
            return
        split = self.operations.confirm_call(name, key, task_id, retries, seconds)
        command = packed(split.script, self.keyspace.prefix, split.name, split.own, split.usual)
        try:
            self._fast_path.send(command, lambda _reply: None, self.clock.monotonic())
        except (failures.RedisError, OSError) as error:
            raise explain(error) from error

    sweep_and_grant: Final = by_thread(Operations.sweep_and_grant)
    sweep_and_grant_many: Final = by_thread(Operations.sweep_and_grant_many)
    record_publish_result: Final = by_thread(Operations.record_publish_result)
    take_due_locks: Final = by_thread(Operations.take_due_locks)
    unswept_locks: Final = by_thread(Operations.unswept_locks)
    inspect: Final = by_thread(Operations.inspect)
    reset: Final = by_thread(Operations.reset)
    close_for: Final = by_thread(Operations.close_for)
    deliver_revoked: Final = by_thread(Operations.deliver_revoked)
    locate_tasks: Final = by_thread(Operations.locate_tasks)
    body: Final = by_thread(Operations.body)
    bodies_of: Final = by_thread(Operations.bodies_of)
    parked: Final = by_thread(Operations.parked)
    switches: Final = by_thread(Operations.switches)
    switch: Final = by_thread(Operations.switch)
    waited_for: Final = by_thread(Operations.waited_for)
    deliver_unlocked: Final = by_thread(Operations.deliver_unlocked)
    record_observation: Final = by_thread(Operations.record_observation)
    observations: Final = by_thread(Operations.observations)
    clear_observations: Final = by_thread(Operations.clear_observations)
    worker_heartbeat: Final = by_thread(Operations.worker_heartbeat)
    list_running: Final = by_thread(Operations.list_running)
    fleet_size: Final = by_thread(Operations.fleet_size)
    inbox_size: Final = by_thread(Operations.inbox_size)
    leave: Final = by_thread(Operations.leave)
    identify: Final = by_thread(Operations.identify)
    has_messages: Final = by_thread(Operations.has_messages)
    has_traces: Final = by_thread(Operations.has_traces)
    vouch: Final = by_thread(Operations.vouch)
    note_lost: Final = by_thread(Operations.note_lost)
    lost: Final = by_thread(Operations.lost)
    losses: Final = by_thread(Operations.losses)
    forget_losses: Final = by_thread(Operations.forget_losses)
    receive: Final = by_thread(Operations.receive)
    wait: Final = by_thread(Operations.wait)
    time: Final = by_thread(Operations.time)
    schema: Final = by_thread(Operations.schema)

    def probe(self) -> None:
        """Acquire and release a lock that nobody else uses."""
        carry_out(self.operations.probe(), self.do)

    def describe(self) -> Mapping[str, str]:
        """Return facts about the server; ``unknown`` for those that it does not report."""
        return carry_out(self.operations.describe(), self.do)

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
        return self._pop(request)  # type: ignore[arg-type]  # Receive is for Cluster

    def _pop(self, pop: Pop) -> bytes | str | None:
        """Wait for an element. Those of an inbox, which is read often, may be read together."""
        if not pop.often:
            return self._blocking.pop(pop)
        reader = self._readers.get(pop.key)
        reader = reader or self._readers.setdefault(pop.key, InboxReader(self.clock))
        return reader.read(
            lambda: self._pop_often(pop),
            lambda most: self._command(Command(("LPOP", pop.key, most))),
        )

    def _pop_often(self, pop: Pop) -> bytes | str | None:
        """Wait for an element on a connection of its own.

        With redis-py's client, the thread that receives grants would hold the interpreter lock for
        as long as the main loop needs to begin the granted task.
        """
        block, longest = block_of(pop)
        if longest > BLOCKS[0]:
            return self._blocking.pop(pop)
        if self._inbox is None:
            client = self._blocking.client(longest)
            if not is_plain(client.connection_pool):
                return self._blocking.pop(pop)
            self._inbox = FastPath(client)
        return self._inbox.pop(pop.key, block)

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

    def _answer_to(self, call: Call, answer: Any) -> Any:
        return carry_out(self.operations.answer_to(call, answer), self.do)

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
        if self._inbox is not None:
            self._inbox.close()

    def hang_up(self) -> None:
        """Close the client as well, if it was made for this store alone."""
        self.close()
        self._given.close()

    def close(self) -> None:
        """Close the connections that this store opened; the caller's client stays open.

        They are also closed when the store is garbage-collected.
        """
        _close_all(self._blocking, self._fast_path)
        if self._inbox is not None:
            self._inbox.close()


def _close_all(blocking: BlockingClients, fast_path: FastPath | None) -> None:
    blocking.close()
    if fast_path:
        fast_path.close()

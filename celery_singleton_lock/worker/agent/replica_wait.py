"""Waits in its own thread until replicas have a parked message, so that the agent does not."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.model import Claim, Owner, Reply, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark, ParkedMessage
from celery_singleton_lock.errors import BackendError
from celery_singleton_lock.store.base import ReplicaStore
from celery_singleton_lock.worker.agent_commands import Call, Park
from celery_singleton_lock.worker.agent_queue import RETRY, AgentQueue
from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.worker.lock_set_header import held_before

logger: Final = logging.getLogger(__name__)

WAIT: Final = 1.0
"""Most seconds that one round waits for a parked message."""


class ParkedAnswer(NamedTuple):
    """The reply of Redis for one message to park.

    Args:
        park: the command.
        arguments: the arguments of the call to Redis.
        reply: the reply.
        asked_at: monotonic time of the call.
    """

    park: Park
    arguments: tuple[Owner, Claim, MessageToPark]
    reply: Reply
    asked_at: float

    @property
    def lock(self) -> str:
        """Name of the lock at which it is parked."""
        return self.arguments[1].name

    @property
    def message(self) -> ParkedMessage:
        """The message that was parked."""
        (owner, claim, _), request = self.arguments, self.park.request
        header = request.lock_header
        ended = ((self.lock, owner.token), *held_before(header)) if claim.unanswered else ()
        return ParkedMessage(
            self.lock,
            owner.token,
            owner.task,
            request.id,
            header.moved,
            former=ended,
            worker=owner.worker,
        )


class ReplicaWait:
    """Confirms that enough replicas have a parked message, so that it may be acknowledged.

    Until enough replicas confirm, the servers are asked every half second. A message that had to
    wait is parked once more after that. This has an effect only if a failover has lost it. So is a
    message of which the server that confirms has no trace: it was parked on a former master.

    Args:
        store: a store with its own connections.
        commands: the queue of the agent.
        confirmed: receives each message that enough replicas have, in the agent's thread.

    Attributes:
        thread: waits for the replicas; started with the first message.
    """

    def __init__(
        self,
        store: ReplicaStore,
        *,
        commands: AgentQueue,
        confirmed: Callable[[ParkedAnswer], None],
    ) -> None:
        self._store = store
        self._commands = commands
        self._confirmed = confirmed
        self._clock: Clock = store.clock
        self._asked: queue.SimpleQueue[ParkedAnswer | None] = queue.SimpleQueue()
        self._late: list[ParkedAnswer] = []
        self._missing = False
        self._stopped = False
        self.thread: BackgroundThread = BackgroundThread("singleton-lock-replicas", self._round)

    def ask(self, answer: ParkedAnswer) -> None:
        """Check whether enough replicas have a message; else park it again later. Does not wait."""
        self._asked.put(answer)
        self.thread.start()

    def close(self, timeout: float) -> None:
        """End the thread; messages that are not confirmed stay with the broker."""
        self._stopped = True
        self._asked.put(None)
        self.thread.join(timeout)

    def _round(self) -> bool:
        new = self._take()
        if new or self._late:
            self._ask_for(new)
        return not self._stopped

    def _take(self) -> list[ParkedAnswer]:
        """Wait for messages, and return them."""
        taken: list[ParkedAnswer | None] = []
        with self.thread.idle(), suppress(queue.Empty):
            taken.append(self._asked.get(timeout=RETRY if self._late else WAIT))
            while True:
                taken.append(self._asked.get_nowait())
        return [answer for answer in taken if answer is not None]

    def _ask_for(self, new: list[ParkedAnswer]) -> None:
        names = sorted({answer.lock for answer in (*new, *self._late)})
        try:
            safe = {name for name, ok in zip(names, self._store.confirm(names), strict=True) if ok}
            lost = self._lost([answer for answer in new if answer.lock in safe])
        except BackendError:
            safe, lost = set(), set()
        for answer in self._late:
            if answer.lock in safe:
                self._commands.put(answer.park)
        self._late = [answer for answer in self._late if answer.lock not in safe]
        for answer in new:
            if answer.lock not in safe:
                self._late.append(answer)
            elif answer.message.token in lost:
                pause = RETRY if answer.park.again else 0.0
                self._commands.put_off(replace(answer.park, again=True), pause)
            else:
                self._commands.put(Call(partial(self._confirmed, answer)))
        self._tell()

    def _lost(self, answers: Sequence[ParkedAnswer]) -> set[str]:
        """Return the tokens of messages of which the server has no trace.

        A copy leaves none if an earlier copy is stored instead, so it is parked again only once.
        """
        copies = [each for each in answers if each.reply.verdict is Verdict.TWIN]
        accepted = {each.message.token for each in copies if each.park.again}
        messages = [each.message for each in answers if each.message.token not in accepted]
        traced = self._store.has_traces(messages)
        return {each.token for each, known in zip(messages, traced, strict=True) if not known}

    def _tell(self) -> None:
        """Log when too few replicas confirm for the first time, and when enough confirm again."""
        if bool(self._late) == self._missing:
            return
        self._missing = bool(self._late)
        if self._missing:
            logger.warning(
                "celery-singleton-lock: parked messages, such as %s, are not acknowledged to the "
                "broker until enough replicas have them. %s",
                self._late[0].park.request,
                self._store.too_few(),
            )
        else:
            logger.warning("celery-singleton-lock: the replicas have all parked messages again.")

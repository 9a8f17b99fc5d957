"""Which servers of a quorum answer, and the errors if too few do."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from celery_singleton_lock.errors import (
    BackendError,
    BackendRefused,
    BackendUnreachable,
    LockUnusable,
)
from celery_singleton_lock.store.quorum.values import Answers, NotElected
from celery_singleton_lock.store.quorum.votes import Votes

logger: Final = logging.getLogger(__name__)


class Availability:
    """Logs which servers stop voting and vote again, and creates the errors.

    Args:
        addresses: of the servers, without passwords.
        votes: the votes of these servers.
    """

    def __init__(self, addresses: Sequence[str], votes: Votes) -> None:
        self._addresses, self._votes = addresses, votes
        self._missed: set[int] = set()

    def log_changes(self, answers: Mapping[int, Any]) -> None:
        """Warn once of each server that does not answer, or refuses; log when it votes again.

        Args:
            answers: to a request to every server, after the time-out.
        """
        for server, address in enumerate(self._addresses):
            answer = answers.get(server)
            fails = server not in answers or isinstance(answer, BackendError)
            if fails and server not in self._missed:
                self._missed.add(server)
                why = answer or self._silence()
                logger.warning(
                    "celery-singleton-lock: server %d of the quorum (%s) does not vote. Locks work "
                    "as long as %d of %d servers do. %s",
                    server + 1,
                    address,
                    self._votes.majority,
                    self._votes.count,
                    why,
                )
            elif not fails and server in self._missed:
                self._missed.discard(server)
                logger.warning(
                    "celery-singleton-lock: server %d of the quorum (%s) votes again",
                    server + 1,
                    address,
                )

    def silent(self) -> BackendUnreachable:
        """Return the error for a server that did not answer in time."""
        return BackendUnreachable(self._silence())

    def _silence(self) -> str:
        return f"It did not answer within {self._votes.timeout:g} s."

    def too_few(self, answers: Answers) -> BackendError:
        """Return the error if fewer than a majority answered."""
        return self.error_for(self._votes.too_few(answers))

    def no_coordinator(self, answers: Mapping[int, BackendError]) -> BackendError:
        """Return the error if so many servers failed that the others are not a majority."""
        others = self._votes.count - len(answers)  # they may answer, but are too few
        result = self._votes.too_few(answers)
        return self.error_for(result._replace(answered=others, lacking=sorted(answers)))

    def error_for(self, result: NotElected) -> BackendError:
        """Return the error for a missing majority."""
        count = self._votes.count
        if result.reason == "new":
            msg = (
                f"Too many of the lock's {count} servers were restarted, or lost their data: "
                f"nothing is granted for {result.left:.1f} s, the longest lease that they may have "
                "forgotten. If no lock can be held, QuorumStore.admit() ends the wait."
            )
            return BackendUnreachable(msg)
        needed = f"{self._votes.majority} are needed"
        some = f"{count - result.answered} of the lock's {count} servers {self._lacking(result)}"
        if result.reason == "refused":
            kind = LockUnusable if isinstance(result.error, LockUnusable) else BackendRefused
            return kind(f"{some}, and {needed}: {result.error}")
        first = "refusal" if result.refusing else "error"
        reason = f" The first {first}: {result.error}" if result.error else ""
        return BackendUnreachable(f"{some}, and {needed}.{reason}")

    def _lacking(self, result: NotElected) -> str:
        """Return which servers did not answer, and which refused: the remedies differ."""
        silent = [server for server in result.lacking if server not in result.refusing]
        how = {
            f"did not answer within {self._votes.timeout:g} s": silent,
            "refused": result.refusing,
        }
        return " or ".join(
            f"{what} ({', '.join(self._addresses[server] for server in servers)})"
            for what, servers in how.items()
            if servers
        )

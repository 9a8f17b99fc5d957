"""One lease, as the process that holds it sees it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Final

logger: Final = logging.getLogger(__name__)

RENEW_AT: Final = 1 / 3
"""Age at which a lease is renewed, as a fraction of the length of the lease."""

JOIN_AT: Final = 1 / 6
"""Least age, as a fraction of its length, at which a lease is renewed together with a due one."""

SLOW_RETRY: Final = 0.5
"""Longest time in seconds between two attempts of a failed renewal."""

OnLost = Callable[[str, str], None]
"""Called with the lock's name and the token that has lost it."""


class Lease:
    """One lease of this process.

    Args:
        name: the lock's name.
        token: owner token.
        seconds: length of the lease.
        valid_until: monotonic time until which the lease is certainly valid in Redis.
        held: whether a reply has confirmed it.
        on_lost: called once if the lease is lost. A bound method is referenced weakly: when
            its object is gone, nobody can release the lock, and the lease is no longer renewed.

    Attributes:
        ended: returns why nobody can release the lock now; empty if somebody can.
        failed: whether Redis answered the last renewal for other leases, but not for this one.
        warned: whether a refusal was logged since the last renewal.
    """

    __slots__ = (
        "_listener",
        "ended",
        "failed",
        "held",
        "lost",
        "name",
        "renew_at",
        "seconds",
        "token",
        "valid_until",
        "warned",
    )

    def __init__(
        self,
        name: str,
        token: str,
        seconds: float,
        *,
        valid_until: float,
        held: bool = True,
        on_lost: OnLost | None = None,
    ) -> None:
        self.name: str = name
        self.token: str = token
        self.seconds: float = seconds
        self.held: bool = held
        self.lost: bool = False
        self.failed: bool = False
        self.warned: bool = False
        self.renew_at: float
        self.valid_until: float = valid_until
        self.ended: Callable[[], str] = str
        self._listener = _listener(on_lost)
        self.confirm(valid_until)

    @property
    def asked(self) -> tuple[str, str, float]:
        """Arguments of a renewal: name, token and seconds."""
        return self.name, self.token, self.seconds

    def confirm(self, valid_until: float) -> None:
        """Set until when the lease is valid, and when it is renewed.

        A renewal never shortens a lease, so the latest end of all replies is used.
        """
        self.valid_until = max(self.valid_until, valid_until)
        self.renew_at = self.valid_until - self.seconds * (1 - RENEW_AT)

    def renewed(self, asked: float) -> None:
        """Note that a renewal sent at the time ``asked`` succeeded."""
        self.held = True
        self.failed = self.warned = False
        self.confirm(asked + self.seconds)

    def not_answered(self, now: float) -> None:
        """Note that Redis answered for other leases, but not for this one; ask again soon."""
        self.failed = True
        self.renew_at = now + min(SLOW_RETRY, self.seconds / 10)

    def unknown(self, asked: float) -> None:
        """Note that the token was unknown at ``asked``; ask again after a third of the lease."""
        self.failed = False
        self.renew_at = asked + self.seconds * RENEW_AT

    def may_join(self, now: float) -> bool:
        """Return whether the lease is old enough to be renewed together with another one."""
        early = 0.0 if self.failed else self.seconds * (RENEW_AT - JOIN_AT)
        return self.renew_at - early <= now

    def overdue(self, now: float) -> bool:
        """Return whether the lease was held, and has ended by the local clock."""
        return self.held and now >= self.valid_until

    def next_look(self, retry_at: float) -> float:
        """Return when to check this lease again, if no renewal is sent before ``retry_at``."""
        renewal = max(self.renew_at, retry_at)
        return min(renewal, self.valid_until) if self.held else renewal

    def abandoned(self) -> bool:
        """Return whether nobody is left who can release the lock."""
        return self._listener() is None or bool(self.ended())

    def report(self) -> None:
        """Call ``on_lost``. Never raises."""
        listener = self._listener()
        try:
            if listener is not None:
                listener(self.name, self.token)
        except Exception:
            logger.exception("on_lost of lock %r raised", self.name)


def _listener(on_lost: OnLost | None) -> Callable[[], OnLost | None]:
    """Return a reference to ``on_lost``, weak for a bound method."""
    if isinstance(on_lost, MethodType):
        return weakref.WeakMethod(on_lost)
    strong = on_lost or _ignore
    return lambda: strong


def _ignore(_name: str, _token: str) -> None:
    """Do nothing: no ``on_lost`` was given."""

"""A lock that somebody else holds, as far as the tasks under test can see."""

from __future__ import annotations

import os
import platform
from types import TracebackType
from typing import TYPE_CHECKING, Final

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict, new_token
from celery_singleton_lock.store.base import Store

if TYPE_CHECKING:
    from typing_extensions import Self

SOMEBODY: Final = "the test's hold()"
"""What holders are called that a test plays."""

ANY: Final = 2**31 - 1
"""A limit that leaves that of the tasks in force."""


class Hold:
    """A permit of a lock, until :meth:`release`; a context manager.

    Args:
        store: where.
        name: the lock's name.
        lease: seconds after which it ends if it is not released. Nobody renews it.
        limit: permits of the lock; :data:`ANY` leaves that to others.

    Attributes:
        fencing_token: number of the grant.

    Raises:
        AssertionError: the lock is not free.
    """

    def __init__(self, store: Store, name: str, lease: float, limit: int = ANY) -> None:
        """Take a permit."""
        self.name: Final = name
        self._store = store
        self._token = new_token()
        owner = Owner(self._token, task=SOMEBODY, host=platform.node(), pid=os.getpid())
        reply = store.acquire(owner, Claim(name, lease, limit))
        if reply.verdict is not Verdict.GRANTED:
            holder = reply.holder or "another client"
            msg = f"hold({name!r}) found the lock busy: it is held by {holder}."
            raise AssertionError(msg)
        self.fencing_token = reply.fencing_token

    @property
    def held(self) -> bool:
        """Whether it is held: not released, nor has its lease ended, nor was it taken away."""
        return self._token in {each.token for each in self._store.inspect(self.name).holders}

    def release(self) -> bool:
        """Give the permit back, and hand it to who is next. Twice is once.

        Returns:
            Whether it was held until now; False if its lease had ended, or it was taken away.
        """
        reply = self._store.release(self.name, self._token, Ending.FINAL)
        return reply.verdict is not Verdict.ABSENT

    def __enter__(self) -> Self:
        """Return this; the permit is held already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release."""
        self.release()

"""A holder that the test controls. The tasks under test see it as another client."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Final

from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.store.base import LockStore

if TYPE_CHECKING:
    from typing_extensions import Self

SOMEBODY: Final = "the test's hold()"
"""Name that the holder has in messages."""

ANY: Final = 2**31 - 1
"""A limit so high that the lower limit of the tasks applies."""


class Hold:
    """A permit of a lock, held until :meth:`release`; a context manager.

    Args:
        store: the store of the locks.
        name: the lock's name.
        lease: seconds until it expires if it is not released. It is not renewed.
        limit: number of permits of the lock; the default is that of the tasks.

    Attributes:
        fencing_token: the fencing token.

    Raises:
        AssertionError: the lock is not free.
    """

    def __init__(self, store: LockStore, name: str, lease: float, limit: int = ANY) -> None:
        """Acquire a permit."""
        self.name: Final = name
        self._store = store
        self._token = new_token()
        owner = Owner(self._token, task=SOMEBODY, host=platform.node(), pid=os.getpid())
        reply = store.acquire(owner, Claim(name, lease, limit))
        if reply.verdict is not Verdict.GRANTED:
            holder = reply.holder or "another client"
            msg = f"hold({name!r}) could not acquire the lock: it is held by {holder}."
            raise AssertionError(msg)
        self.fencing_token: int = reply.fencing_token

    @property
    def held(self) -> bool:
        """Whether it is still held, so not released, expired or taken away."""
        return self._token in {each.token for each in self._store.inspect(self.name).holders}

    def release(self) -> bool:
        """Release the permit, and grant it to the next waiter. A second call has no effect.

        Returns:
            True if it was held until now; False if it had expired or was taken away.
        """
        reply = self._store.release(self.name, self._token, Ending.FINAL)
        return reply.verdict is not Verdict.ABSENT

    def __enter__(self) -> Self:
        """Return this object. The permit is held since its creation."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the permit."""
        self.release()

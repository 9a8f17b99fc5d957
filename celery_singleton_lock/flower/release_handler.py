"""``POST /api/locks/release``: take a lock from its holder, or terminate the holder's task."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tornado.web import authenticated

from celery_singleton_lock.admin import Operator
from celery_singleton_lock.flower.operator_handler import OperatorHandler
from celery_singleton_lock.flower.rows import LockRows


class ReleaseRequest(NamedTuple):
    """The JSON object of a request.

    Args:
        lock_id: id of the lock.
        token: owner token of the holder.
        sure: False: only return the risk.
        terminate: terminate the holder's task instead of taking the lock.
        why: reason, for the audit.
    """

    lock_id: str
    token: str
    sure: bool
    terminate: bool
    why: str


class ReleaseApi(OperatorHandler):
    """Releases a lock by force, or (``"terminate": true``) terminates the holder's task."""

    @authenticated
    async def post(self) -> None:
        """Send the risk; with ``"sure": true``, release the lock or terminate the task."""
        if self.is_refused():
            return None
        wanted = self._parsed()
        if wanted is None:
            return self.refuse(400, 'Send a JSON object with "id", "token" and "sure".')
        by = self.operator(wanted.why)
        found = await self.ask(lambda rows: self._carry_out(rows, wanted, by))
        if found is not None:
            self.finish(found)
        return None

    def _parsed(self) -> ReleaseRequest | None:
        try:
            given = json.loads(self.request.body)
            return ReleaseRequest(
                str(given["id"]),
                str(given["token"]),
                sure=given["sure"] is True,
                terminate=given.get("terminate") is True,
                why=str(given.get("why", "")),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def _carry_out(self, rows: LockRows, wanted: ReleaseRequest, by: Operator) -> dict[str, Any]:
        """Return the answer. Runs in a thread."""
        if not wanted.sure:
            return {"risk": rows.risk(wanted.lock_id, wanted.token)}
        actions = self.locks.actions()
        if wanted.terminate:
            name = rows.end(wanted.lock_id, wanted.token, by, actions.terminate)
        else:
            name = rows.release(wanted.lock_id, wanted.token, by)
        actions.announce(by, {name: 1}, "terminate" if wanted.terminate else "release")
        return {"terminated" if wanted.terminate else "released": True}

"""``POST /api/locks/release``: take a lock from its holder, or terminate the holder's task."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any, NamedTuple

from flower.api import BaseApiHandler
from tornado.web import HTTPError, RequestHandler, authenticated

from celery_singleton_lock.admin import Operator
from celery_singleton_lock.flower.handler_base import LocksHandler, is_read_only
from celery_singleton_lock.flower.rows import LockRows
from celery_singleton_lock.flower.values import SHORT, visible


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


class ReleaseApi(LocksHandler, BaseApiHandler):
    """Releases a lock by force, or (``"terminate": true``) terminates the holder's task.

    Like Flower's API, it is refused without a login unless Flower is configured otherwise. It
    always needs the page's XSRF token, even if this version of Flower does not check one.
    """

    def check_xsrf_cookie(self) -> None:
        """Refuse cross-site requests."""
        if self.request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise HTTPError(403, "Cross-site request forbidden")
        RequestHandler.check_xsrf_cookie(self)

    @authenticated
    async def post(self) -> None:
        """Send the risk; with ``"sure": true``, release the lock or terminate the task."""
        self.check_xsrf_cookie()  # older versions of Flower do not call it
        if is_read_only(self.application.options):
            return self.refuse(403, "This Flower is read only.")
        wanted = self._parsed()
        if wanted is None:
            return self.refuse(400, 'Send a JSON object with "id", "token" and "sure".')
        by = self._operator(wanted.why)
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
        if wanted.terminate:
            step = rows.end(wanted.lock_id, wanted.token, by, self.locks.terminate)
        else:
            step = rows.release(wanted.lock_id, wanted.token, by)
        self.locks.announce(step)
        return {"terminated" if wanted.terminate else "released": True}

    def _operator(self, reason: str) -> Operator:
        who = self.current_user
        if who is True:
            who = basic_user(self.request.headers.get("Authorization", "")) or "no login"
        elif isinstance(who, bytes):
            who = who.decode("utf-8", "replace")
        return Operator(visible(str(who), SHORT), str(self.request.remote_ip), "flower", reason)


def basic_user(header: str) -> str:
    """Return the user name in an ``Authorization`` header that Flower has checked."""
    scheme, _, credentials = header.partition(" ")
    if scheme != "Basic":
        return ""
    return b64decode(credentials).decode("utf-8", "replace").partition(":")[0]

"""The pages and the read-only API. The handlers derive from Flower's, which check the login."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tornado.web import RequestHandler, StaticFileHandler, authenticated

from celery_singleton_lock.flower.handler_base import LocksHandler
from celery_singleton_lock.flower.history import history_of
from celery_singleton_lock.flower.operator_handler import why_no_changes
from celery_singleton_lock.flower.rows import ROWS, LockRows, UnknownLock
from celery_singleton_lock.flower.values import locks_in

if TYPE_CHECKING:  # Flower has no types; its handlers derive from tornado's
    from tornado.web import RequestHandler as BaseApiHandler
    from tornado.web import RequestHandler as BaseHandler
else:
    from flower.api import BaseApiHandler
    from flower.views import BaseHandler

HERE: Final = Path(__file__).parent

LONGEST_ARGUMENT: Final = 1000
"""Largest number of characters of an argument of a request."""


POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; "  # Bootstrap's style contains icons
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
"""Content security policy of the page: nothing inline, and nothing from elsewhere."""

LARGEST: Final = 10**9
"""Largest number in an argument."""


class LocksPage(LocksHandler, BaseHandler):
    """The page. Its data comes from :class:`PageData`."""

    def set_default_headers(self) -> None:
        """Forbid scripts, styles and requests that are not of this Flower."""
        super().set_default_headers()
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("Referrer-Policy", "same-origin")

    @authenticated
    def get(self) -> None:
        """Send the page."""
        self.render(
            str(HERE / "templates" / "locks.html"),
            forbidden=why_no_changes(self),
            token=self.xsrf_token.decode("ascii"),
        )


class _Query(LocksHandler):
    """The list, one lock in full (``open``) and the audit (``audit``); or a task; or a worker."""

    get_query_argument: Callable[..., Any]

    async def answer(self) -> None:
        """Send the data that the request's arguments select."""
        task, worker = self._argument("task"), self._argument("worker")
        if task:
            found = await self._of_task(task)
        elif worker:
            found = await self._of_worker(worker)
        else:
            found = await self._list()
        if found is not None:
            self.finish(found)

    def _argument(self, name: str, default: str = "") -> str:
        """Return an argument as it was sent. Flower's own method escapes it for HTML."""
        found: str = RequestHandler.get_argument(self, name, default)
        return found[:LONGEST_ARGUMENT]

    def _number(self, name: str, default: int) -> int:
        given = self._argument(name)
        return min(int(given), LARGEST) if given.isdecimal() else default

    async def _list(self) -> Any:
        search, order = self._argument("search"), self._argument("order", "waiting")
        offset, limit = self._number("offset", 0), self._number("limit", ROWS)
        state, longer = self._argument("state"), float(self._number("longer", 0))
        lock_id, audit = self._argument("open"), self._number("audit", 0)
        history = history_of(self.application.events)

        def question(rows: LockRows) -> dict[str, Any]:
            found = rows.page(search, order, offset, limit, state, longer)
            if lock_id:
                try:
                    found["open"] = {**rows.details(lock_id), "history": history.of(lock_id)}
                except UnknownLock:
                    found["open"] = None
            if audit:
                found["audit"] = rows.audit(audit)
            return found

        return await self.ask(question)

    async def _of_task(self, task_id: str) -> Any:
        known = self.application.events.state.tasks.get(task_id)
        hint = str(getattr(known, "lock", "") or "")
        lock = await self.ask(lambda rows: {"lock": rows.of_task(task_id, hint)})
        if lock is None:
            return None
        return {**lock, "state": str(getattr(known, "state", ""))}

    async def _of_worker(self, name: str) -> Any:
        names = locks_of_worker(self.application, name)
        return await self.ask(lambda rows: {"locks": rows.of_worker(names)})


class PageData(_Query, BaseHandler):
    """The data of the pages. It needs the same login."""

    @authenticated
    async def get(self) -> None:
        """Send the data."""
        await self.answer()


class LocksApi(_Query, BaseApiHandler):
    """``GET /api/locks``: the same data for programs, by the rules of Flower's API."""

    @authenticated
    async def get(self) -> None:
        """Send the data."""
        await self.answer()


class Assets(StaticFileHandler):
    """Script and style of the pages. They need no login, since they contain no data."""

    def set_extra_headers(self, path: str) -> None:  # noqa: ARG002  # tornado's
        """Make browsers check for a newer version."""
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")


def locks_of_worker(application: Any, name: str) -> list[str]:
    """Return the locks of tasks that run on a worker: from events, and from its last statistics."""
    running = [
        str(task.lock)
        for task in list(application.events.state.tasks.values())
        if task.state == "STARTED"
        and getattr(task, "lock", "")
        and getattr(task.worker, "hostname", "") == name
    ]
    stats = application.workers.get(name, {}).get("stats") or {}
    return list(dict.fromkeys([*running, *locks_in(stats)]))

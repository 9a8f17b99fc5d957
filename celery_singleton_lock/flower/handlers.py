"""The pages and their API, behind Flower's login: Flower's own handlers, derived."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from flower.api import BaseApiHandler
from flower.views import BaseHandler
from tornado.web import HTTPError, RequestHandler, StaticFileHandler, authenticated

from celery_singleton_lock.admin import Operator, Refused
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.events import LockAdmin
from celery_singleton_lock.worker.extension import PATIENCE, install
from celery_singleton_lock.flower.rows import ROWS, Feed, UnknownLock, locks_in, visible
from celery_singleton_lock.store.factory import admin_of

HERE: Final = Path(__file__).parent
THREADS: Final = 4
"""Requests that wait for the locks' Redis at once; more wait for these, and Flower for none."""

LONGEST_FILTER: Final = 1000
_ATTRIBUTE: Final = "_celery_singleton_lock"


class Office:
    """What the handlers of one Flower share.

    Args:
        capp: the Celery app that Flower looks at.
    """

    def __init__(self, capp: Any) -> None:
        """Connect to nothing yet."""
        self._capp = capp
        self._feed: Feed | None = None
        self.executor = ThreadPoolExecutor(THREADS, thread_name_prefix="singleton-lock-flower")

    def feed(self) -> Feed:
        """Return the feed of the app's locks. Runs in a thread: a key callable may not be cheap.

        Raises:
            ConfigurationError: there is no usable URL.
        """
        if self._feed is None:
            extension = install(self._capp)
            self._feed = Feed(admin_of(extension.new_store(PATIENCE)))
        return self._feed

    def terminate(self, task_id: str) -> None:
        """Have the worker that runs a task end it; as Flower's own button does."""
        self._capp.control.revoke(task_id, terminate=True, signal="SIGTERM")

    def tell(self, step: LockAdmin) -> None:
        """Tell who listens to events what was done; the audit has it."""
        install(self._capp).tell(step)


class _Locks:
    """What all handlers of ours do: no other site may read them, and errors are sentences."""

    application: Any

    def set_default_headers(self) -> None:
        """Let no other site read this, and no browser guess what it is."""
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-store")

    @property
    def office(self) -> Office:
        """What the handlers share."""
        found: Office | None = getattr(self.application, _ATTRIBUTE, None)
        if found is None:
            found = Office(self.application.capp)
            setattr(self.application, _ATTRIBUTE, found)
        return found

    async def ask(self, question: Callable[[Feed], Any]) -> Any:
        """Have a thread ask the locks' Redis; errors become answers with a status of their own."""
        office = self.office
        try:
            return await asyncio.get_running_loop().run_in_executor(
                office.executor, lambda: question(office.feed())
            )
        except UnknownLock as error:
            return self.refuse(404, str(error))
        except Refused as error:
            return self.refuse(409, str(error))
        except ValueError as error:
            return self.refuse(400, str(error))
        except SingletonLockError as error:
            return self.refuse(503, str(error))

    def refuse(self, status: int, sentence: str) -> None:
        """Answer with a status and a sentence, as JSON."""
        self.set_status(status)
        self.finish({"error": visible(sentence, 1000)})

    set_header: Callable[..., None]
    set_status: Callable[..., None]
    finish: Callable[..., Any]


class LocksPage(_Locks, BaseHandler):
    """The page itself; what is on it comes from :class:`PageData`."""

    @authenticated
    def get(self) -> None:
        """Render it."""
        self.render(
            str(HERE / "templates" / "locks.html"),
            read_only=is_read_only(self.application.options),
            token=self.xsrf_token.decode("ascii"),
        )


class _Questions(_Locks):
    """``?search=&order=&offset=&limit=`` and ``open=ID``; or ``task=ID``; or ``worker=NAME``."""

    get_query_argument: Callable[..., Any]

    async def answer(self) -> None:
        """Answer what is asked for."""
        task, worker = self._given("task"), self._given("worker")
        if task:
            found = await self._of_task(task)
        elif worker:
            found = await self._of_worker(worker)
        else:
            found = await self._list()
        if found is not None:
            self.finish(found)

    def _given(self, name: str, default: str = "") -> str:
        """Return an argument as it was sent: Flower's own way would escape it for HTML."""
        found: str = RequestHandler.get_argument(self, name, default)
        return found[:LONGEST_FILTER]

    def _number(self, name: str, default: int) -> int:
        given = self._given(name)
        return int(given) if given.isdecimal() else default

    async def _list(self) -> Any:
        search, order = self._given("search"), self._given("order", "waiting")
        offset, limit, opened = self._number("offset", 0), self._number("limit", ROWS), "open"
        lock_id = self._given(opened)

        def question(feed: Feed) -> dict[str, Any]:
            found = feed.page(search, order, offset, limit)
            if lock_id:
                try:
                    found[opened] = feed.details(lock_id)
                except UnknownLock:
                    found[opened] = None
            return found

        return await self.ask(question)

    async def _of_task(self, task_id: str) -> Any:
        known = self.application.events.state.tasks.get(task_id)
        hint = str(getattr(known, "lock", "") or "")
        lock = await self.ask(lambda feed: {"lock": feed.of_task(task_id, hint)})
        if lock is None:
            return None
        return {**lock, "state": str(getattr(known, "state", ""))}

    async def _of_worker(self, name: str) -> Any:
        names = locks_of_worker(self.application, name)
        return await self.ask(lambda feed: {"locks": feed.of_worker(names)})


class PageData(_Questions, BaseHandler):
    """What the pages ask for, as themselves: behind the login, if there is one."""

    @authenticated
    async def get(self) -> None:
        """Answer."""
        await self.answer()


class LocksApi(_Questions, BaseApiHandler):
    """``GET /api/locks``: the same for programs, under the conditions of Flower's API."""

    @authenticated
    async def get(self) -> None:
        """Answer."""
        await self.answer()


class Order(NamedTuple):
    """What is to be done to a holder.

    Args:
        lock_id: id of the lock.
        token: owner token of the holder.
        sure: do it; else tell what it risks.
        end: end its task, instead of taking the lock from it.
        why: reason, for the audit.
    """

    lock_id: str
    token: str
    sure: bool
    end: bool
    why: str


class ReleaseApi(_Locks, BaseApiHandler):
    """``POST /api/locks/release``: a forced release, by id of the lock and token of the holder.

    Or (``"terminate": true``) the end of the task that holds it, which then gives it back.

    Under the conditions of Flower's API: refused without a login, unless the installation says
    otherwise. And always with the page's XSRF token, whatever this Flower does by itself.
    """

    def check_xsrf_cookie(self) -> None:
        """Refuse what another site may have had the browser send."""
        if self.request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise HTTPError(403, "Cross-site request forbidden")
        RequestHandler.check_xsrf_cookie(self)

    @authenticated
    async def post(self) -> None:
        """Tell the risk, or (``"sure": true``) do it."""
        self.check_xsrf_cookie()  # an older Flower does not
        if is_read_only(self.application.options):
            return self.refuse(403, "This Flower is read only.")
        order = self._order()
        if order is None:
            return self.refuse(400, 'Send a JSON object with "id", "token" and "sure".')
        by = self._operator(order.why)
        found = await self.ask(lambda feed: self._carried_out(feed, order, by))
        if found is not None:
            self.finish(found)
        return None

    def _carried_out(self, feed: Feed, order: Order, by: Operator) -> dict[str, Any]:
        """Return the answer; runs in a thread."""
        if not order.sure:
            return {"risk": feed.risk(order.lock_id, order.token)}
        if order.end:
            step = feed.end(order.lock_id, order.token, by, self.office.terminate)
        else:
            step = feed.release(order.lock_id, order.token, by)
        self.office.tell(step)
        return {"terminated" if order.end else "released": True}

    def _order(self) -> Order | None:
        try:
            given = json.loads(self.request.body)
            return Order(
                str(given["id"]),
                str(given["token"]),
                sure=given["sure"] is True,
                end=given.get("terminate") is True,
                why=str(given.get("why", "")),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def _operator(self, reason: str) -> Operator:
        who = self.current_user
        if who is True:
            who = basic_user(self.request.headers.get("Authorization", "")) or "no login"
        elif isinstance(who, bytes):
            who = who.decode("utf-8", "replace")
        return Operator(visible(str(who), 200), str(self.request.remote_ip), "flower", reason)


class Assets(StaticFileHandler):
    """Script and style of the pages; they tell nothing of any lock."""

    def set_extra_headers(self, path: str) -> None:  # noqa: ARG002  # tornado's
        """Have browsers ask whether they are the newest."""
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")


def basic_user(header: str) -> str:
    """Return the name in an ``Authorization`` header that Flower has checked."""
    scheme, _, credentials = header.partition(" ")
    if scheme != "Basic":
        return ""
    return b64decode(credentials).decode("utf-8", "replace").partition(":")[0]


def is_read_only(options: Any) -> bool:
    """Return whether this Flower changes nothing; an older one has no such option."""
    return bool(getattr(options, "read_only", False))


def locks_of_worker(application: Any, name: str) -> list[str]:
    """Return the locks of tasks that run on a worker: of its events, and of its last statistics."""
    running = [
        str(task.lock)
        for task in list(application.events.state.tasks.values())
        if task.state == "STARTED"
        and getattr(task, "lock", "")
        and getattr(task.worker, "hostname", "") == name
    ]
    stats = application.workers.get(name, {}).get("stats") or {}
    return list(dict.fromkeys([*running, *locks_in(stats)]))

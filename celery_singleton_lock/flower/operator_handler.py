"""The base of the handlers that change something: XSRF token, ``--read_only``, the operator."""

from __future__ import annotations

import os
from base64 import b64decode
from typing import TYPE_CHECKING, Any

from flower.utils import strtobool
from tornado.web import HTTPError, RequestHandler

from celery_singleton_lock.admin import Operator
from celery_singleton_lock.flower.handler_base import LocksHandler, is_read_only
from celery_singleton_lock.flower.values import SHORT, visible

if TYPE_CHECKING:  # Flower has no types; its handlers derive from tornado's
    from tornado.web import RequestHandler as BaseApiHandler
else:
    from flower.api import BaseApiHandler


class OperatorHandler(LocksHandler, BaseApiHandler):
    """Changes locks for an operator.

    Like Flower's API, it is refused without a login unless Flower is configured otherwise. It
    always needs the page's XSRF token, even if this version of Flower does not check one.
    """

    def check_xsrf_cookie(self) -> None:
        """Refuse cross-site requests."""
        if self.request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise HTTPError(403, "Cross-site request forbidden")
        RequestHandler.check_xsrf_cookie(self)

    def is_refused(self) -> bool:
        """Return whether this request may not change anything. If so, the answer is sent."""
        self.check_xsrf_cookie()  # older versions of Flower do not call it
        if is_read_only(self.application.options):
            self.refuse(403, "This Flower is read only.")
            return True
        return False

    def operator(self, reason: str) -> Operator:
        """Return the operator who sends this request, for the audit.

        Args:
            reason: the reason that was given.
        """
        who = self.current_user
        if who is True:
            who = basic_user(self.request.headers.get("Authorization", "")) or "no login"
        elif isinstance(who, bytes):
            who = who.decode("utf-8", "replace")
        return Operator(visible(str(who), SHORT), str(self.request.remote_ip), "flower", reason)


def why_no_changes(handler: Any) -> str:
    """Return why Flower's settings forbid changes from the page; empty if they do not."""
    options = handler.application.options
    if is_read_only(options):
        return "This Flower runs with --read_only: locks can be seen here, and not changed."
    if not (options.basic_auth or options.auth) and not is_open_api():
        return (
            "This Flower has no login (--basic_auth or --auth): locks can be seen here, and not "
            "changed."
        )
    return ""


def is_open_api() -> bool:
    """Return whether Flower's API may be used without a login, as Flower reads its variable."""
    return bool(strtobool(os.environ.get("FLOWER_UNAUTHENTICATED_API") or "false"))


def basic_user(header: str) -> str:
    """Return the user name in an ``Authorization`` header that Flower has checked."""
    scheme, _, credentials = header.partition(" ")
    if scheme != "Basic":
        return ""
    return b64decode(credentials).decode("utf-8", "replace").partition(":")[0]

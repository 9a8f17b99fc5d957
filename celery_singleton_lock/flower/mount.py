"""Adds our pages to Flower: its list of handlers, and one hook of its templates."""

from __future__ import annotations

import logging
from html import escape
from pathlib import Path
from typing import Any, Final

import flower
from flower import urls
from tornado.web import TemplateModule, url

from celery_singleton_lock.flower.handlers import Assets, LocksApi, LocksPage, PageData, ReleaseApi

logger = logging.getLogger(__name__)

TESTED: Final = ("2.0", "2.1", "2.2")
"""Versions of Flower with which the tests are run."""

STATIC: Final = Path(__file__).parent / "static"
SCRIPT: Final = "locks.js"
STYLE: Final = "locks.css"
PAGE: Final = "locks"
"""Name of our page's URL."""

_SECTION: Final = '<li class="nav-item"><a class="nav-link{active}" href="{href}">Locks</a></li>'


class Template(TemplateModule):
    """Flower's navigation bar, with a link to our page; and our script and style on every page.

    Flower's templates draw the bar with ``{% module Template(…) %}``, for which tornado lets an
    application name a class of its own. No template of Flower's is replaced.
    """

    handler: Any

    def render(self, path: str, **kwargs: Any) -> bytes:
        """Render a part of a page; the bar gets one entry more, after Flower's own."""
        drawn = super().render(path, **kwargs)
        text = drawn.decode() if isinstance(drawn, bytes) else str(drawn)
        if path != "navbar.html" or "</ul>" not in text:
            return drawn
        active = " active" if kwargs.get("active_tab") == PAGE else ""
        entry = _SECTION.format(active=active, href=escape(self.handler.reverse_url(PAGE)))
        return text.replace("</ul>", entry + "</ul>", 1).encode()

    def javascript_files(self) -> list[str]:
        """Return our script, after those that templates ask for."""
        return [*super().javascript_files(), self._asset(SCRIPT)]

    def css_files(self) -> list[str]:
        """Return our style, likewise."""
        return [*super().css_files(), self._asset(STYLE)]

    def _asset(self, name: str) -> str:
        changed = int((STATIC / name).stat().st_mtime)
        return f"{self.handler.reverse_url('locks_static', name)}?v={changed}"


def handlers() -> list[url]:
    """Return what is added to Flower's handlers."""
    return [
        url(r"/locks", LocksPage, name=PAGE),
        url(r"/locks/data", PageData, name="locks_data"),
        url(r"/locks/static/(.*)", Assets, {"path": str(STATIC)}, name="locks_static"),
        url(r"/api/locks", LocksApi),
        url(r"/api/locks/release", ReleaseApi),
    ]


def mount() -> None:
    """Add the pages to this process' Flower, before it is made. Harmless if they are there."""
    version = str(flower.__version__)
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        logger.warning(
            "celery_singleton_lock.flower is tested with Flower %s, and this is %s: its pages are "
            "offered, and may look wrong, or miss the lock of a task or worker. If they do not "
            "work, remove the import from flowerconfig.py, or use one of these versions.",
            ", ".join(TESTED),
            version,
        )
    if any(getattr(rule, "name", None) == PAGE for rule in urls.handlers):
        return
    # In front of all, since the last of Flower's takes whatever nobody else has.
    urls.handlers[:0] = handlers()
    given = urls.settings.get("ui_modules")
    urls.settings["ui_modules"] = [*([given] if given else []), {"Template": Template}]

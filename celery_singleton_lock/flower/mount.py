"""Add the pages to Flower: to its list of handlers and, as a template module, to its navigation."""

from __future__ import annotations

import logging
from html import escape
from pathlib import Path
from typing import Any, Final

import flower
from flower import urls
from flower.events import Events
from tornado.web import TemplateModule, url

from celery_singleton_lock.flower.change_handler import ChangeApi
from celery_singleton_lock.flower.handlers import Assets, LocksApi, LocksPage, PageData
from celery_singleton_lock.flower.history import listen
from celery_singleton_lock.flower.release_handler import ReleaseApi

logger: Final = logging.getLogger(__name__)

TESTED: Final = ("2.0", "2.1", "2.2")
"""Versions of Flower with which this package is tested."""

STATIC: Final = Path(__file__).parent / "static"
SCRIPT: Final = "locks.js"
CONSOLE: Final = "console.js"
STYLE: Final = "locks.css"
PAGE: Final = "locks"
"""Name of the page's URL."""

_SECTION: Final = '<li class="nav-item"><a class="nav-link{active}" href="{href}">Locks</a></li>'


class Template(TemplateModule):
    """Adds a link to Flower's navigation bar, and the script and style to each page.

    Flower's templates render the bar with ``{% module Template(…) %}``. Tornado lets an application
    replace that class (``ui_modules``), so no template of Flower is replaced.
    """

    handler: Any

    def render(self, path: str, **kwargs: Any) -> bytes:
        """Render a template. The navigation bar gets one more entry after Flower's."""
        rendered = super().render(path, **kwargs)
        text = rendered.decode() if isinstance(rendered, bytes) else str(rendered)
        if path != "navbar.html" or "</ul>" not in text:
            return rendered
        active = " active" if kwargs.get("active_tab") == PAGE else ""
        entry = _SECTION.format(active=active, href=escape(self.handler.reverse_url(PAGE)))
        return text.replace("</ul>", entry + "</ul>", 1).encode()

    def javascript_files(self) -> list[str]:
        """Return the scripts of the template, then those of the pages."""
        own = [SCRIPT, CONSOLE] if isinstance(self.handler, LocksPage) else [SCRIPT]
        return [*super().javascript_files(), *map(self._asset, own)]

    def css_files(self) -> list[str]:
        """Return the styles of the template, then the style of the pages."""
        return [*super().css_files(), self._asset(STYLE)]

    def _asset(self, name: str) -> str:
        changed = int((STATIC / name).stat().st_mtime)
        return f"{self.handler.reverse_url('locks_static', name)}?v={changed}"


def handlers() -> list[url]:
    """Return the handlers that are added to Flower's."""
    return [
        url(r"/locks", LocksPage, name=PAGE),
        url(r"/locks/data", PageData, name="locks_data"),
        url(r"/locks/static/(.*)", Assets, {"path": str(STATIC)}, name="locks_static"),
        url(r"/api/locks", LocksApi),
        url(r"/api/locks/release", ReleaseApi),
        url(r"/api/locks/change", ChangeApi),
    ]


def mount() -> None:
    """Add the pages to Flower in this process, before its app is created. May be called again."""
    version = str(flower.__version__)
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        logger.warning(
            "celery_singleton_lock.flower is tested with Flower %s; this is Flower %s. The Locks "
            "page may look wrong, or the pages of tasks and workers may not show their locks. If "
            "so, use one of the tested versions, or remove the import from flowerconfig.py.",
            ", ".join(TESTED),
            version,
        )
    if any(getattr(rule, "name", None) == PAGE for rule in urls.handlers):
        return
    listen(Events)
    # First in the list: the last handler of Flower matches every path.
    urls.handlers[:0] = handlers()
    given = urls.settings.get("ui_modules")
    urls.settings["ui_modules"] = [*([given] if given else []), {"Template": Template}]

"""Sphinx extension: pages use files of the repository outside ``docs/``.

A page links to ``../tests/…``, so that the link also works where the repository shows the page. The
site does not contain these files: the links lead to the repository. A page may include a section of
``../README.md``, whose links to ``docs/`` then lead to the pages of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx

LINK = re.compile(r"\]\((?P<path>\.\./[^)\s#\"]+)(?P<rest>[^)]*)\)")
INCLUDE = re.compile(
    r"^```\{include\} (?P<path>\S+)\n:(?P<how>start-at|start-after): \"(?P<start>.*)\"\n"
    r":end-before: \"(?P<end>.*)\"\n```$",
    re.MULTILINE,
)
log = logging.getLogger(__name__)


def address(app: Sphinx, kind: str) -> str:
    """Return where the repository shows its files (``blob``) or folders (``tree``)."""
    return f"{app.config.source}/{kind}/{app.config.source_branch}/"


def with_sections(app: Sphinx, page: Path, text: str) -> str:
    """Replace each ``{include}`` by the section that it names."""

    def section(found: re.Match[str]) -> str:
        whole = (page.parent / found["path"]).read_text(encoding="utf-8")
        start = whole.index(found["start"])
        start += len(found["start"]) if found["how"] == "start-after" else 0
        part = whole[start : whole.index(found["end"], start)]
        return part.replace(f"]({address(app, 'blob')}docs/", "](")

    return INCLUDE.sub(section, text)


def with_addresses(app: Sphinx, page: Path, text: str) -> str:
    """Replace each relative link that leaves ``docs/`` by the address of the file."""
    docs = Path(app.srcdir).resolve()

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found["path"]).resolve()
        if target.is_relative_to(docs):
            return found[0]
        if not target.exists():
            log.warning("no such file: %s", found["path"], location=str(page))
        path = target.relative_to(docs.parent).as_posix()
        return f"]({address(app, 'tree' if target.is_dir() else 'blob')}{path}{found['rest']})"

    return LINK.sub(link, text)


def prepared(app: Sphinx, page: Path, text: str) -> str:
    """Return the text of a page as the site has it."""
    return with_addresses(app, page, with_sections(app, page, text))


def read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Prepare a page before it is parsed."""
    page = Path(app.env.doc2path(docname)).resolve()
    if INCLUDE.search(content[0]):
        app.env.note_dependency(str(Path(app.srcdir).parent / "README.md"))
    content[0] = prepared(app, page, content[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_config_value("source", "", "env", str)
    app.add_config_value("source_branch", "main", "env", str)
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Sphinx extension: write ``llms.txt`` and ``llms-full.txt`` beside the pages.

``llms.txt`` lists all pages by section, with the first sentence of each (https://llmstxt.org).
``llms-full.txt`` contains their text, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from repository_files import prepared
from sphinx.addnodes import toctree
from sphinx.builders.text import TextBuilder
from sphinx.writers.text import TextTranslator

if TYPE_CHECKING:
    from sphinx.application import Sphinx

FENCED_DIRECTIVE = re.compile(r"^```\{(toctree|raw|eval-rst)\}.*?^```\n", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


def sections(app: Sphinx) -> Iterator[tuple[str, list[str]]]:
    """Yield the caption and the pages of each table of contents of the start page."""
    for tree in app.env.get_doctree(app.config.root_doc).findall(toctree):
        yield tree["caption"], [name for _, name in tree["entries"]]


def first_sentence(app: Sphinx, page: str) -> str:
    """Return the first sentence of the first paragraph of a page."""
    paragraphs = app.env.get_doctree(page).findall(nodes.paragraph)
    texts = (node.astext() for node in paragraphs if isinstance(node.parent, nodes.section))
    return re.split(r"(?<=[.?])\s", " ".join(next(texts, "").split()))[0].rstrip(":")


def text_of(app: Sphinx, page: str) -> str:
    """Return the text of a page: its source, or for docstrings what they render to."""
    path = Path(app.env.doc2path(page)).resolve()
    source = prepared(app, path, path.read_text(encoding="utf-8"))
    if "{eval-rst}" not in source:
        return COMMENT.sub("", FENCED_DIRECTIVE.sub("", source)).strip()
    builder = TextBuilder(app, app.env)
    builder.init()
    doctree = app.env.get_and_resolve_doctree(page, app.builder)
    translator = TextTranslator(doctree, builder)
    doctree.walkabout(translator)
    return translator.body.strip()


def write(app: Sphinx, error: Exception | None) -> None:
    """Write both files after the pages."""
    if error or app.builder.format != "html":
        return
    start = app.config.root_doc
    index = [f"# {app.config.project}", "", f"> {first_sentence(app, start)}", ""]
    full = [text_of(app, start)]
    for caption, pages in sections(app):
        index += [f"## {caption}", ""]
        for page in pages:
            title = app.env.titles[page].astext()
            about = first_sentence(app, page)
            index.append(f"- [{title}]({app.builder.get_target_uri(page)}): {about}")
            full.append(text_of(app, page))
        index.append("")
    out = Path(app.outdir)
    (out / "llms.txt").write_text("\n".join(index), encoding="utf-8")
    (out / "llms-full.txt").write_text("\n\n---\n\n".join(full) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

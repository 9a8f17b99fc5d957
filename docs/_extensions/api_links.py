"""Sphinx extension: a name in a docstring or a signature links to the one object with that name.

The package imports its public names from internal modules, and Python names a class by the module
that defines it. The reference documents it under its public name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sphinx.util.nodes import make_refnode

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment


KINDS = {"class", "data", "exception", "function"}


def by_last_part(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Element
) -> Element | None:
    """Return a link to the only top-level object that has the last part of the name."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    found = [
        entry
        for full, entry in env.domains.python_domain.objects.items()
        if full.rpartition(".")[2] == name and entry.objtype in KINDS
    ]
    if len(found) != 1:
        return None
    (entry,) = found
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("missing-reference", by_last_part)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

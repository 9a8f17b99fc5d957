"""The documentation site: ``sphinx-build -W -n docs docs/_build/html``."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "celery-singleton-lock"
author = "The celery-singleton-lock developers"
project_copyright = author  # without a year: the same sources give the same bytes in every year
release = version_of(project)
version = ".".join(release.split(".")[:2])

source = "https://github.com/celery-singleton-lock/celery-singleton-lock"
source_branch = "main"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
    "api_links",
    "repository_files",
    "llms_txt",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_extensions", "_static", "_templates"]
templates_path = ["_templates"]
nitpicky = True

# --- Markdown -------------------------------------------------------------------------------------

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
myst_enable_extensions = ["attrs_block", "colon_fence"]

# --- docstrings -----------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Raises by the decorated function", "params_style")]
# Types of other packages have no page here, and their sites are not asked: the site builds without
# a network. Neither have internal names, which appear in signatures.
OTHERS = "asyncio|celery|collections|contextlib|logging|prometheus_client|redis|typing"
INTERNAL = (
    r"Backend|Celery|CollectorRegistry|Event|Group|Holder|MemoryServer"
    r"|Never|OnLost|RateOption|RedisStore"
)
nitpick_ignore_regex = [
    ("py:.*", rf"({OTHERS})(\..*)?"),
    ("py:.*", r"celery_singleton_lock\.(config|core|lock|store|worker)\..*"),
    ("py:.*", r"celery_singleton_lock\.(errors\._LockBusy|pytest_plugin|django\.cache_lock\.T)"),
    ("py:class", rf"_\w+|[A-Z]|{INTERNAL}"),
]

# --- HTML -----------------------------------------------------------------------------------------

html_theme = "furo"
pygments_style = "default"
pygments_dark_style = "github-dark"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("versions.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": f"{source}/",
    "source_branch": source_branch,
    "source_directory": "docs/",
}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

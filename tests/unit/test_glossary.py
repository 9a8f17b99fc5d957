"""docs/glossary.md: texts use its terms, and every key in Redis is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from celery_singleton_lock.core.redis_keys import Keyspace, LockKeys

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "celery_singleton_lock"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
KEYS_PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")

RETIRED = frozenset(
    {
        "bundle",
        "clerk",
        "courier",
        "crew",
        "desk",
        "flight",
        "flights",
        "herald",
        "lookout",
        "mailbox",
        "parker",
        "stamp",
        "tray",
        "turn",
        "usher",
        "wish",
    }
)
ALLOWED = {}
"""Part of a text -> why it may use a retired word."""


def texts():
    """Yield each text of the package that people may see: log lines, errors, headings, help."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        hidden = set() if path.parent.name == "cli" else docstrings(tree)
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and " " in node.value and node not in hidden:
                yield path, node.lineno, node.value


def docstrings(tree):
    """Return the constants that are docstrings; click shows those of commands as help."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def test_no_error_log_line_or_heading_uses_a_retired_word():
    words = re.compile(rf"\b({'|'.join(sorted(RETIRED))})(?:s|es|ed)?\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} in {text!r}"
        for path, line, text in texts()
        for match in words.finditer(text)
        if not any(part in text for part in ALLOWED)
    ]
    assert not found


def test_the_glossary_lists_each_retired_word():
    section = GLOSSARY.split("## Retired words")[1]
    listed = {
        word
        for cell in re.findall(r"^\| ([a-z][a-z, ()]*) \|", section, re.MULTILINE)
        for word in re.sub(r"\(.*?\)", "", cell).replace(",", " ").split()
    }
    assert listed - {"retired", "kept"} == RETIRED


KEYS = {
    **{part: part for part in LockKeys.__slots__[:9]},
    "due": "csl:{bNN}:due",
    "index": "csl:{bNN}:index",
    "attempts": "attempts",
    "wake": "wake:<token>",
    "unique": "<lock>:unique:<key>:call",
    "vote": "vote",
    "gone": "gone:<token>",
    "quorum": "csl:fleet:quorum",
    "waited": "csl:{bNN}:waited",
    "fleet": "csl:fleet:",
    "audit": "csl:fleet:audit",
    "drained": "csl:fleet:drained",
    "inbox": "csl:fleet:inbox:<worker>",
    "bell": "csl:fleet:bell:<worker>",
    "lost": "csl:fleet:lost",
    "running": "csl:fleet:running",
    "running_of": "csl:fleet:running:<worker>",
    "vouched": "csl:fleet:vouched",
    "mode": "csl:fleet:mode",
    "observed": "csl:{bNN}:observed:…",
    "schema": "csl:schema",
}
"""Method or field that makes a key -> how the pages write it."""

NO_KEYS = {"prefix", "spread", "bucket", "lock", "sent", "fleet_of", "fleets", "of_fleet"}
"""Settings, parts of keys, and methods that return several."""


def test_each_key_of_redis_keys_is_listed_here():
    made = {name for name in vars(Keyspace) if not name.startswith("_")} - NO_KEYS
    assert made | set(LockKeys.__slots__) == set(KEYS)


@pytest.mark.parametrize("key", KEYS.values())
def test_a_key_is_named_in_the_glossary_or_on_the_page_of_keys(key):
    assert f"`{key}" in GLOSSARY or f"`{key}" in KEYS_PAGE


STATES = re.search(r"## States of a record(.*?)\n## ", GLOSSARY, re.DOTALL)[1]


def test_the_glossary_explains_each_state_of_a_record():
    """The states are those that the scripts write."""
    lua = "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted((PACKAGE / "store" / "lua").rglob("*"))
        if path.suffix == ".lua"
    )
    waits = re.search(r"local WAITS = \{(.*?)\n\}", lua, re.DOTALL)[1]
    written = set(re.findall(r"(\w+) = '", waits)) | set(re.findall(r"become\(\w+, '(\w+)'\)", lua))
    assert written <= set(re.findall(r"^\| `(\w+)` \|", STATES, re.MULTILINE))


def test_readme_and_the_page_on_keys_link_the_glossary():
    assert "docs/glossary.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(glossary.md)" in KEYS_PAGE

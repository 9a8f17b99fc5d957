"""Assembles the Lua scripts, and calls them by argument name.

A script's header is its contract and is read by this module: ``-- KEYS:`` says which keys it takes,
``-- ARGV:`` names its arguments in order. The names become the script's local variables and the
caller's keywords, so header, body and call site cannot drift apart.

Redis runs a script from its first line at each call, and makes each function in it anew. So a verb
gets only those blocks (set apart by blank lines) of ``_lock.lua`` that it uses; and what comes
behind its line ``-- REST`` gets its own only there, so that the usual case, which returns before,
is spared the others. A function costs as much as it takes variables from outside, so what is done
most often is written without any.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib import resources
from typing import Final, NamedTuple

from celery_singleton_lock.core.redis_keys import LockKeys, bucket_of, encoded_in, key_name

VERBS: Final = (
    "acquire",
    "park",
    "claim",
    "release",
    "extend",
    "kick",
    "left",
    "take_due",
    "inspect",
    "reset",
    "revoke",
    "beat",
    "identify",
    "let_run",
    "observe",
)
ADMIN_VERBS: Final = (
    "glance",
    "page",
    "look",
    "force_release",
    "drop",
    "seal",
    "promote",
    "pause",
    "set_limit",
    "remark",
    "drift",
)
"""Those of operators, which no worker loads."""
QUORUM_VERBS: Final = ("vote", "withdraw", "renew", "greet", "admit")
"""Those of one server among several; see :mod:`celery_singleton_lock.store.quorum.server`."""

_HEADER: Final = re.compile(r"^-- (KEYS|ARGV): *(.*?) *$", re.MULTILINE)

_OF_LOCKS: Final = ("lock", "lock*")
"""Keys of the verbs that use ``_lock.lua``."""

_FIRST: Final = "lock = name\n"
"""First line of a verb about one lock."""

_DEFINED: Final = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_WORD: Final = re.compile(r"\w+")
_COMMENT: Final = re.compile(r"\s*--.*")

Argument = str | int | bytes


@dataclass(frozen=True)
class Script:
    """One verb.

    Args:
        verb: its name.
        text: what Redis runs.
        keys: ``lock`` (the keys of one lock), ``lock*``, ``meta*``, ``due*`` or ``fleet``; or their
            names, on a server of a quorum.
        arguments: names of its arguments; empty if it takes a list.
    """

    verb: str
    text: str
    keys: str
    arguments: tuple[str, ...]

    @cached_property
    def sha(self) -> str:
        """Digest by which Redis knows the script."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def head(self) -> bytes:
        """How the EVALSHA of a lock's verb begins on the wire: all that comes before its keys."""
        keys = len(LockKeys.__slots__)
        count = 3 + keys + len(self.arguments)
        return b"*%d\r\n" % count + words(["EVALSHA", self.sha, keys])

    def pack(self, arguments: Mapping[str, Argument]) -> list[Argument]:
        """Put the arguments in the header's order.

        Raises:
            TypeError: a name is missing, or is not in the header.
        """
        try:
            packed = [arguments[name] for name in self.arguments]
        except KeyError:
            packed = []
        if len(packed) != len(arguments):
            wrong = sorted(arguments.keys() ^ set(self.arguments))
            msg = f"{self.verb}.lua takes {', '.join(self.arguments)}; differs in {wrong}"
            raise TypeError(msg)
        return packed

    def taking(self, arguments: str) -> Script:
        """Return this script, for callers that give its arguments by place.

        Raises:
            TypeError: those are not the header's.
        """
        if tuple(arguments.split()) != self.arguments:
            msg = f"{self.verb}.lua takes {' '.join(self.arguments)}; not {arguments}"
            raise TypeError(msg)
        return self


def words(values: Iterable[Argument]) -> bytes:
    """Return the words of a command as the server reads them."""
    raw = [
        value.encode()
        if isinstance(value, str)
        else b"%d" % value
        if isinstance(value, int)
        else value
        for value in values
    ]
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in raw])


@lru_cache(maxsize=4096)
def packed_keys(prefix: str, name: str) -> bytes:
    """Return the keys of a lock as the words of a command; a name comes at least twice.

    A new name comes with most tasks: so what is the same for all names of a bucket and of a length
    is there already, and the name is put between.
    """
    shown = key_name(name).encode()
    return shown.join(_around(prefix, bucket_of(name), len(shown)))


@lru_cache(maxsize=4096)
def _around(prefix: str, bucket: int, length: int) -> list[bytes]:
    """Return the parts between which a name of this length stands; no prefix holds a NUL."""
    gap = b"\0" * length
    return words(encoded_in(prefix, bucket, gap)).split(gap)


def read(file: str) -> str:
    """Return the text of a file in ``scripts/``."""
    return (resources.files(__package__) / "scripts" / file).read_text(encoding="utf-8")


def assemble(verb: str, clock: str, shared: str, body: str) -> Script:
    """Join a verb with what it shares; its named arguments become local variables."""
    header = dict(_HEADER.findall(body))
    said = header["ARGV"]
    names = () if said.startswith("(") else tuple(n for n in said.split() if not n.endswith("*"))
    values = ", ".join(f"ARGV[{i}]" for i in range(1, len(names) + 1))
    unpack = f"local {', '.join(names)} = {values}\n" if names else ""
    keys = header["KEYS"].strip()
    linked = link(shared, body) if keys in _OF_LOCKS else body
    text = f"{unpack}{clock}\n{linked}"
    return Script(verb, text, keys, () if said.endswith("*") else names)


def link(shared: str, body: str) -> str:
    """Put before each part of ``body`` those blocks of ``shared`` that it is the first to use.

    The last part is a function, called at once: for what the functions in it take from outside of
    it, Lua need not search the stack each time that it makes them.
    """
    blocks, linked = [_code(block) for block in shared.split("\n\n")], []
    for part in _parts(body):
        needed = used(blocks, _code(part))
        blocks = [block for block in blocks if block not in needed]
        linked.append("\n".join([*needed, part]))
    *before, last = linked
    return "\n".join([*before, f"return (function()\n{last}\nend)()"])


def _parts(body: str) -> Sequence[str]:
    """Cut a verb into its usual case, or else its first line, and the rest."""
    usual, found, rest = body.partition("-- REST\n")
    if found:
        return usual, rest
    before, first, rest = body.partition(_FIRST)
    return (before + first, rest) if first else (body,)


def used(blocks: Sequence[str], code: str) -> list[str]:
    """Return the blocks that ``code`` uses, itself or by another, in their order."""
    kept: list[str] = []
    known = _words_of(code)
    for block in reversed(blocks):
        if _defined_in(block) & known:
            kept.insert(0, block)
            known |= _words_of(block)
    return kept


@cache
def _defined_in(block: str) -> frozenset[str]:
    names = (each for found in _DEFINED.findall(block) for each in re.split(r",\s*", found))
    return frozenset(names)


@cache
def _words_of(code: str) -> frozenset[str]:
    return frozenset(_WORD.findall(code))


@cache
def _code(text: str) -> str:
    return "\n".join(line for line in _COMMENT.sub("", text).splitlines() if line.strip())


def read_shared(*, quarantine: bool) -> str:
    """Return what the verbs share: with ``quarantine``, another gate stands before the grants."""
    shared = read("_lock.lua")
    if not quarantine:
        return shared
    before, _, rest = shared.partition("-- GATE\n")
    _, _, behind = rest.partition("-- END OF GATE\n")
    return f"{before}{read('_quarantine.lua')}{behind}"


@cache
def load_scripts(clock: str | None = None, *, quarantine: bool = False) -> Mapping[str, Script]:
    """Return all verbs. They are put together once per process, and forks inherit them.

    Args:
        clock: Lua text that replaces ``_clock.lua``; for test builds.
        quarantine: grant nothing for one longest lease after the server's run id has changed.
    """
    clock = read("_clock.lua") if clock is None else clock
    shared = read_shared(quarantine=quarantine)
    return {verb: assemble(verb, clock, shared, read(f"{verb}.lua")) for verb in VERBS}


@cache
def load_admin_scripts(
    clock: str | None = None, *, quarantine: bool = False
) -> Mapping[str, Script]:
    """Return the verbs of operators; they share what the others share, and ``_admin.lua``.

    Args:
        clock: Lua text that replaces ``_clock.lua``; for test builds.
        quarantine: as of :func:`load_scripts`.
    """
    clock = read("_clock.lua") if clock is None else clock
    shared = f"{read_shared(quarantine=quarantine)}\n\n{read('_admin.lua')}"
    return {verb: assemble(verb, clock, shared, read(f"{verb}.lua")) for verb in ADMIN_VERBS}


@cache
def load_quorum_scripts(clock: str | None = None) -> Mapping[str, Script]:
    """Return the verbs of one server of a quorum.

    Args:
        clock: Lua text that replaces ``_clock.lua``; for test builds.
    """
    before = f"{read('_clock.lua') if clock is None else clock}\n{read('_node.lua')}"
    return {verb: assemble(verb, before, "", read(f"{verb}.lua")) for verb in QUORUM_VERBS}


class Call(NamedTuple):
    """A script with its keys and packed arguments, ready to be sent alone or in a batch."""

    script: Script
    keys: Sequence[str | bytes]
    arguments: Sequence[Argument]

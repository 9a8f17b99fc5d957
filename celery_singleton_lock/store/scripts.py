"""Assembles the Lua scripts, and calls them by argument name.

The header of a script is its contract, and this module reads it: ``-- KEYS:`` says which keys the
script takes, ``-- ARGV:`` names its arguments in order. The names become local variables of the
script and keywords of its callers, so that header, body and callers agree.

In each call Redis runs a script from its first line, and creates each function in it again. So a
script gets only those blocks of ``shared/`` (separated by blank lines) that it uses. Blocks that
only the part after its line ``-- REST`` uses are inserted there: the usual case returns before that
line, and does not create their functions. A function costs more the more outer variables it uses,
so the usual cases are written without functions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Final, NamedTuple

from celery_singleton_lock.core.redis_keys import LockKeys, bucket_of, encoded_in, key_name
from celery_singleton_lock.core.shared_attribute import SharedAttribute

VERBS: Final = {
    "acquire": "lock/acquire.lua",
    "park": "lock/park.lua",
    "claim": "lock/claim.lua",
    "release": "lock/release_and_grant_next.lua",
    "close_for": "lock/close_for.lua",
    "extend": "lock/extend_leases.lua",
    "charge": "lock/charge.lua",
    "announce": "lock/announce.lua",
    "confirm_sent": "lock/confirm_sent.lua",
    "withdraw": "lock/withdraw.lua",
    "sweep_and_grant": "lock/sweep_and_grant.lua",
    "record_publish_result": "lock/record_publish_result.lua",
    "take_due_locks": "fleet/take_due_locks.lua",
    "inspect": "view/inspect.lua",
    "reset": "operator/reset.lua",
    "deliver_revoked": "lock/deliver_revoked.lua",
    "worker_heartbeat": "fleet/worker_heartbeat.lua",
    "identify": "fleet/identify_server.lua",
    "deliver_unlocked": "operator/deliver_unlocked.lua",
    "record_observation": "fleet/record_observation.lua",
}
"""Operation -> its script below ``lua/``."""
FLOW_VERBS: Final = ("acquire", "park")
"""Operations with a second script, ``<verb>_with_flow``, for callers with flow options."""
ADMIN_VERBS: Final = {
    "summarise_locks": "view/summarise_locks.lua",
    "count_waiters": "view/count_waiters.lua",
    "list_waiters": "view/list_waiters.lua",
    "locate_token": "view/locate_token.lua",
    "find_call": "view/find_call.lua",
    "list_calls": "view/list_calls.lua",
    "force_release": "operator/force_release.lua",
    "drop_waiters": "operator/drop_waiters.lua",
    "adopt_messages": "operator/adopt_messages.lua",
    "forget_drops": "operator/forget_drops.lua",
    "take_out_messages": "operator/take_out_messages.lua",
    "promote": "operator/promote.lua",
    "forget_call": "operator/forget_call.lua",
    "pause": "operator/pause.lua",
    "reopen": "operator/reopen.lua",
    "set_limit": "operator/set_limit.lua",
    "set_rates": "operator/set_rates.lua",
    "write_audit_entry": "operator/write_audit_entry.lua",
    "find_contradictions": "view/find_contradictions.lua",
}
"""Operations of operators; workers do not load their scripts."""
QUORUM_VERBS: Final = {
    "vote": "quorum/vote.lua",
    "withdraw_vote": "quorum/withdraw_vote.lua",
    "renew_votes": "quorum/renew_votes.lua",
    "server_state": "quorum/server_state.lua",
    "admit_voter": "quorum/admit_voter.lua",
}
"""Operations of one server of a quorum: :mod:`celery_singleton_lock.store.quorum.server`."""

SHARED: Final = "shared"
"""Folder with the blocks that the scripts about locks share."""
_SHARED_FILES: Final = (
    "state",
    "rates",
    "groups",
    "lock",
    "records",
    "admission",
    "places",
    "routes",
    "queue",
    "workers",
    "index",
    "unique",
    "holders",
    "stored",
    "ends",
    "search",
    "deadlines",
    "preempt",
    "sweep",
    "finish",
    "replies",
    "reservations",
    "observed_report",
    "observed_rates",
    "observed_permits",
    "observed_settling",
)
"""Its files. A block uses only what stands before it."""

_FILES: Final = {**VERBS, **ADMIN_VERBS, **QUORUM_VERBS}

_HEADER: Final = re.compile(r"^-- (KEYS|ARGV): *(.*?) *$", re.MULTILINE)

_OF_LOCKS: Final = ("lock", "lock*")
"""Keys of the scripts that use ``shared/``."""

_FIRST: Final = "lock = name\n"
"""First line of a script about one lock."""

_DEFINED: Final = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_WORD: Final = re.compile(r"\w+")
_COMMENT: Final = re.compile(r"\s*--.*")

Argument = str | int | bytes


@dataclass(frozen=True)
class Script:
    """A script.

    Args:
        verb: name of its operation.
        text: what Redis runs.
        keys: ``lock`` (the keys of one lock), ``lock*``, ``meta*``, ``due*`` or ``fleet``; on a
            server of a quorum, the names of the keys.
        arguments: names of its arguments; empty if it takes a list.
    """

    verb: str
    text: str
    keys: str
    arguments: tuple[str, ...]

    @SharedAttribute  # no lock, which a process that is forked meanwhile would find taken
    def sha(self) -> str:
        """Digest by which Redis knows the script."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    @SharedAttribute  # no lock, which a process that is forked meanwhile would find taken
    def head(self) -> bytes:
        """Start of the EVALSHA of a lock's script in the Redis protocol, up to its keys."""
        keys = len(LockKeys.__slots__)
        count = 3 + keys + len(self.arguments)
        return b"*%d\r\n" % count + words(["EVALSHA", self.sha, keys])

    def pack(self, arguments: Mapping[str, Argument]) -> list[Argument]:
        """Return the arguments in the order of the header.

        Raises:
            TypeError: a name is missing, or is not in the header.
        """
        try:
            packed = [arguments[name] for name in self.arguments]
        except KeyError:
            packed = []
        if len(packed) != len(arguments):
            wrong = sorted(arguments.keys() ^ set(self.arguments))
            msg = f"{self.verb} takes {', '.join(self.arguments)}; differs in {wrong}"
            raise TypeError(msg)
        return packed

    def taking(self, arguments: str) -> Script:
        """Return this script, for callers that pass its arguments by position.

        Args:
            arguments: the names of the arguments that they pass.

        Raises:
            TypeError: the header has other names.
        """
        if tuple(arguments.split()) != self.arguments:
            msg = f"{self.verb} takes {' '.join(self.arguments)}; not {arguments}"
            raise TypeError(msg)
        return self


def words(values: Iterable[Argument]) -> bytes:
    """Return the words of a command in the Redis protocol."""
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
    """Return the keys of a lock in the Redis protocol; they are cached, since each is used twice.

    Most tasks have a new name. So the text around a name is cached as well: it is the same for all
    names of one bucket and one length.
    """
    shown = key_name(name).encode()
    return shown.join(_around(prefix, bucket_of(name), len(shown)))


@lru_cache(maxsize=4096)
def _around(prefix: str, bucket: int, length: int) -> list[bytes]:
    """Return the parts around a name of this length; no prefix contains a NUL."""
    gap = b"\0" * length
    return words(encoded_in(prefix, bucket, gap)).split(gap)


def file_of(verb: str) -> str:
    """Return the path of a script below ``lua/``."""
    return _FILES[verb]


def read(file: str) -> str:
    """Return the text of a file in ``lua/``, or of all files in ``shared/``."""
    if file == SHARED:
        return "\n\n".join(read(f"shared/{each}.lua").strip() for each in _SHARED_FILES)
    return (resources.files(__package__) / "lua" / file).read_text(encoding="utf-8")


def assemble(verb: str, clock: str, shared: str, body: str) -> Script:
    """Join a script with the shared text; its named arguments become local variables."""
    header = dict(_HEADER.findall(body))
    said = header["ARGV"]
    names = () if said.startswith("(") else tuple(n for n in said.split() if not n.endswith("*"))
    values = ", ".join(f"ARGV[{i}]" for i in range(1, len(names) + 1))
    unpack = f"local {', '.join(names)} = {values}\n" if names else ""
    keys = header["KEYS"].strip()
    linked = link(shared, body) if keys in _OF_LOCKS else body
    text = f"{unpack}{clock}\n{linked}"
    return Script(verb, text, keys, () if said.endswith("*") else names)


def with_flow(body: str) -> str:
    """Return the variant of a script for callers with flow options: it takes them as well.

    It has no usual case. So calls without flow options do not become slower for those that have
    them.
    """
    head, found, rest = body.partition(_FIRST)
    head = re.sub(r"^(-- ARGV: .*)$", r"\1 flow_options", head, count=1, flags=re.MULTILINE)
    _, usual, general = rest.partition("-- REST\n")
    first = "note_lease(lease_ms)\n" if usual else ""
    wanted = "wanted_flow = cjson.decode(flow_options)\nstarts_later = wanted_flow.later\n"
    return f"{head}{found}{wanted}{first}{general if usual else rest}"


def link(shared: str, body: str) -> str:
    """Insert each block of ``shared`` before the first part of ``body`` that uses the block.

    The last part is wrapped in a function that is called at once: Lua then need not search the
    stack for outer variables each time that it creates an inner function.
    """
    blocks, linked = [_code(block) for block in shared.split("\n\n")], []
    for part in _parts(body):
        needed = used(blocks, _code(part))
        blocks = [block for block in blocks if block not in needed]
        linked.append("\n".join([*needed, part]))
    *before, last = linked
    return "\n".join([*before, f"return (function()\n{last}\nend)()"])


def _parts(body: str) -> Sequence[str]:
    """Split a script into its usual case, or else its first line, and the rest."""
    usual, found, rest = body.partition("-- REST\n")
    if found:
        return usual, rest
    before, first, rest = body.partition(_FIRST)
    return (before + first, rest) if first else (body,)


def used(blocks: Sequence[str], code: str) -> list[str]:
    """Return the blocks that ``code`` uses, directly or through others, in their order."""
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


def read_shared(*, quarantine: bool | None) -> str:
    """Return the shared text; unless ``quarantine`` is False, with ``quarantine.lua``."""
    shared = read(SHARED)
    if quarantine is False:
        return shared
    guard = read("shared/quarantine.lua")
    if quarantine is None:
        guard = guard.replace("local ALWAYS = true", "local ALWAYS = false")
    before, _, rest = shared.partition("-- QUARANTINE\n")
    _, _, behind = rest.partition("-- END OF QUARANTINE\n")
    return f"{before}{guard}{behind}"


@cache
def load_scripts(
    clock: str | None = None, *, quarantine: bool | None = False
) -> Mapping[str, Script]:
    """Return all scripts. They are assembled once per process, and forks inherit them.

    Args:
        clock: Lua text that replaces ``_clock.lua``; for tests.
        quarantine: grant nothing for one longest lease after the server's run id has changed. None:
            only if other clients do so.
    """
    clock = read("_clock.lua") if clock is None else clock
    shared = read_shared(quarantine=quarantine)
    bodies = {verb: read(file_of(verb)) for verb in VERBS}
    bodies |= {f"{verb}_with_flow": with_flow(bodies[verb]) for verb in FLOW_VERBS}
    return {verb: assemble(verb, clock, shared, body) for verb, body in bodies.items()}


@cache
def load_admin_scripts(
    clock: str | None = None, *, quarantine: bool | None = False
) -> Mapping[str, Script]:
    """Return the scripts of operators; they also use ``operator.lua``.

    Args:
        clock: Lua text that replaces ``_clock.lua``; for tests.
        quarantine: as of :func:`load_scripts`.
    """
    clock = read("_clock.lua") if clock is None else clock
    shared = f"{read_shared(quarantine=quarantine)}\n\n{read('shared/operator.lua')}"
    return {verb: assemble(verb, clock, shared, read(file_of(verb))) for verb in ADMIN_VERBS}


@cache
def load_quorum_scripts(clock: str | None = None) -> Mapping[str, Script]:
    """Return the scripts of one server of a quorum.

    Args:
        clock: Lua text that replaces ``_clock.lua``; for tests.
    """
    before = f"{read('_clock.lua') if clock is None else clock}\n{read('quorum/_server.lua')}"
    return {verb: assemble(verb, before, "", read(file_of(verb))) for verb in QUORUM_VERBS}


class Call(NamedTuple):
    """A script with its keys and packed arguments, ready to be sent alone or in a batch."""

    script: Script
    keys: Sequence[str | bytes]
    arguments: Sequence[Argument]

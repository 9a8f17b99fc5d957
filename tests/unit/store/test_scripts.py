"""A script's header is its contract: header, body and call site agree; the body is clean Lua."""

from __future__ import annotations

import inspect
import re

import pytest

from celery_singleton_lock.core.model import Verdict
from celery_singleton_lock.core.redis_keys import Keyspace, encoded
from celery_singleton_lock.store.base import Store
from celery_singleton_lock.store.operator.base import AdminStore
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import (
    ADMIN_VERBS,
    VERBS,
    file_of,
    link,
    load_admin_scripts,
    load_scripts,
    packed_keys,
    read,
    read_shared,
    used,
    words,
)

ALL = (*VERBS, *ADMIN_VERBS)
FILES = [file_of(verb) for verb in ALL]
LIBRARY = read("shared")
ADMIN_LIBRARY = f"{LIBRARY}\n\n{read('shared/operator.lua')}"
SCRIPTS = {**load_scripts(), **load_admin_scripts()}
KEYS_OF = {"lock": 12, "lock*": None, "meta*": None, "due*": None, "fleet": 1}
LOOKS = {
    "announce",
    "confirm_sent",
    "find_call",
    "list_calls",
    "withdraw",
    "inspect",
    "worker_heartbeat",
    "identify",
    "take_due_locks",
    "record_observation",
    "summarise_locks",
    "count_waiters",
    "list_waiters",
    "locate_token",
    "find_contradictions",
}
"""Verbs that change no lock."""
ALLOWED = {
    # what Redis offers to scripts
    "redis",
    "cjson",
    "KEYS",
    "ARGV",
    "tonumber",
    "tostring",
    "type",
    "ipairs",
    "math",
    "string",
    "pcall",
    "table",
    "unpack",
    "string.format",
}


def header(verb, field):
    found = re.search(rf"^-- {field}: *(.*)$", read(file_of(verb)), re.MULTILINE)
    assert found, f"{verb}.lua has no {field} line"
    return found[1].split()


def code(text):
    """The text without comments and strings."""
    return re.sub(r"'[^']*'", "''", re.sub(r"--.*", "", text))


def shared(verb):
    body = read(file_of(verb))
    library = ADMIN_LIBRARY if verb in ADMIN_VERBS else LIBRARY
    about_a_lock = header(verb, "KEYS")[0] in {"lock", "lock*"}
    return "\n".join(used(code(library).split("\n\n"), code(body))) if about_a_lock else ""


@pytest.mark.parametrize("verb", ALL)
def test_the_first_line_names_the_verb_and_what_it_does(verb):
    first = read(file_of(verb)).splitlines()[0]
    assert re.match(rf"-- {verb}: \w.*\.$", first), first


@pytest.mark.parametrize("verb", ALL)
def test_keys_are_declared(verb):
    (keys,) = header(verb, "KEYS")
    assert keys in KEYS_OF
    used = {int(n) for n in re.findall(r"KEYS\[(\d+)\]", code(read(file_of(verb))))}
    assert used <= {1}, "the library names a lock's keys"


def test_the_library_takes_the_keys_in_the_order_of_keyspace():
    names = ", ".join(key.rsplit(":", 1)[1] for key in Keyspace().lock("a"))
    count = names.count(",") + 1
    assert f"local {names} = unpack(KEYS, 1, {count})\n" in LIBRARY
    assert f"  {names} = unpack(KEYS, offset + 1, offset + {count})\n" in LIBRARY


@pytest.mark.parametrize("verb", ALL)
def test_arguments_are_named_used_and_hidden_by_nothing(verb):
    """Found by the state machine: a function of the library hid an argument of park."""
    script = SCRIPTS[verb]
    text = code(read(file_of(verb))) + "\n" + shared(verb)
    declared = re.findall(r"^local (?:function )?([\w, ]+)", text, re.MULTILINE)
    hiding = set(re.findall(r"\w+", " ".join(declared)))
    for name in script.arguments:
        assert re.search(rf"\b{name}\b", text), f"{verb}.lua does not use {name}"
        assert name not in hiding, f"{verb}.lua: a local {name} hides the argument"
    if not script.arguments:
        assert "*" in " ".join(header(verb, "ARGV"))


@pytest.mark.parametrize("verb", ALL)
def test_replies_are_documented_and_known(verb):
    words = header(verb, "REPLY")
    if words[0] == "answer":
        assert {word.lower() for word in words[1:]} <= {verdict.value for verdict in Verdict}
        said = set(re.findall(r"'(\w+)'", read(file_of(verb)))) & {v.value for v in Verdict}
        assert said <= {word.lower() for word in words[1:]} | {"granted", "running"}, said


@pytest.mark.parametrize("verb", ALL)
def test_every_script_has_a_method_of_the_store(verb):
    store, protocol = (RedisAdminStore, AdminStore) if verb in ADMIN_VERBS else (RedisStore, Store)
    assert inspect.getdoc(getattr(store, verb))
    assert hasattr(protocol, verb), f"{protocol} does not know {verb}"


@pytest.mark.parametrize("file", [*FILES, "shared", "shared/operator.lua", "_clock.lua"])
def test_no_script_looks_through_all_keys(file):
    text = read(file)
    for command in ("KEYS", "SCAN", "FLUSHALL", "FLUSHDB"):
        assert f"'{command}'" not in text


@pytest.mark.parametrize("verb", [v for v in ALL if v not in LOOKS])
def test_everything_is_checked_before_anything_is_written(verb):
    """The usual case may look at less, since it touches less; what comes after it checks all."""
    for part in read(file_of(verb)).split("-- REST\n"):
        writes = re.search(
            r"redis\.call\('(HSET|HDEL|ZADD|ZREM|DEL|PERSIST|PEXPIRE|RPUSH)'"
            r"|(refuse_if_full|write_though_full)\(\)",
            part,
        )
        checked = re.search(r"^ *check\(\)|'EXISTS', (holders, )?queue,", part, re.MULTILINE)
        assert checked is not None
        assert writes is None or checked.start() < writes.start()
    assert "check()" in part, "the last part is the general case"


@pytest.mark.parametrize("verb", ALL)
def test_each_verb_begins_to_write_as_a_full_redis_demands(verb):
    """What takes memory is refused as a whole; what gives it back, or renews, is not refused."""
    body = read(file_of(verb))
    refused, through = "refuse_if_full()" in body, "write_though_full()" in body
    expected = dict.fromkeys(("acquire", "park", "charge"), (True, False))
    other = (False, verb not in LOOKS)
    assert (refused, through) == expected.get(verb, other)


@pytest.mark.parametrize("verb", ALL)
def test_a_script_is_lua_and_uses_no_undeclared_global(verb):
    """A global is an error in Redis, but only on the day when that line runs."""
    lupa = pytest.importorskip("lupa.lua51", reason="lupa with Lua 5.1, which Redis speaks")
    lua = lupa.LuaRuntime()
    check = lua.eval("""
      function(text, name)
        local f, err = loadstring(text, name)
        return f ~= nil, err
      end
    """)
    fine, error = check(SCRIPTS[verb].text, verb)
    assert fine, error
    assert globals_of(SCRIPTS[verb].text) <= ALLOWED


SPARE = 10


@pytest.mark.parametrize("verb", SCRIPTS)
def test_a_script_has_room_for_further_upvalues_and_locals(verb):
    """Lua allows 60 upvalues and 200 locals of a function: a later option must not hit that."""
    lupa = pytest.importorskip("lupa.lua51", reason="lupa with Lua 5.1, which Redis speaks")
    names = ", ".join(f"spare_{number}" for number in range(SPARE))
    text, body = SCRIPTS[verb].text, "return (function()\n"
    before, found, rest = text.rpartition(body)  # without such a body, all of it is `rest`
    larger = f"local {names}\n{before}{found}local all_spare = {{{names}}}\n{rest}"
    load = lupa.LuaRuntime().eval("function(text) return loadstring(text) end")
    assert load(text)
    assert load(larger), f"{verb} has no {SPARE} spare"


def globals_of(text):
    """Names that are neither local, nor a parameter, nor a field, nor a keyword."""
    text = code(text)
    local = set()
    for names in re.findall(r"\blocal ([\w, ]+?)(?: =|\n| in\b|$)", text):
        local |= {name.strip() for name in names.split(",")}
    local |= set(re.findall(r"\blocal function (\w+)", text))
    for names in re.findall(r"\bfor ([\w, ]+?) (?:in|=)", text):
        local |= {name.strip() for name in names.split(",")}
    for names in re.findall(r"\bfunction \w*\(([\w, .]*)\)", text):
        local |= {name.strip() for name in names.split(",")}
    keywords = set(
        "and break do else elseif end false for function if in local nil not or repeat return "  # noqa: SIM905
        "then true until while".split()
    )
    used = set()
    for match in re.finditer(r"(?<![\w.])([A-Za-z_]\w*)(?!\w)(?!\s*=[^=])", text):
        used.add(match[1])
    assigned = set(re.findall(r"^\s*([A-Za-z_]\w*) = ", text, re.MULTILINE))
    fields = set(re.findall(r"[{,]\s*([A-Za-z_]\w*) =", text))
    return (used | (assigned - fields)) - local - keywords


def test_the_search_for_globals_finds_them():
    assert "oops" in globals_of("local a = 1\noops = a\n")
    assert "oops" in globals_of("local a = oops + 1\n")
    assert globals_of("local a = {b = 1}\nreturn a.b\n") == set()


def test_a_script_takes_of_the_library_what_it_uses():
    library = (
        "local A = 1\n\n-- b\nlocal function b() return A end\n\nlocal function c() return b() end"
    )
    blocks = library.replace("-- b\n", "").split("\n\n")
    assert used(blocks, "return b()") == ["local A = 1", "local function b() return A end"]
    assert used(blocks, "return 1") == []
    assert used(["local A = 1", "local d = 2"], "return d + A") == ["local A = 1", "local d = 2"]


@pytest.mark.parametrize(
    ("body", "before"),
    [
        ("return A\n-- REST\nreturn b()", ["local A = 1", "return A"]),
        ("lock = name\nreturn b()", ["local lock", "lock = name"]),
        ("return b()", []),
    ],
    ids=["a-usual-case", "of-one-lock", "of-many-locks"],
)
def test_each_part_of_a_script_gets_what_it_is_the_first_to_use(body, before):
    """The last part is a function."""
    library = "local lock\n\nlocal A = 1\n\nlocal function b() return A end\n\nlocal d = 2"
    used_there = [] if "local A = 1" in before else ["local A = 1"]
    assert [line for line in link(library, body).splitlines() if line] == [
        *before,
        "return (function()",
        *used_there,
        "local function b() return A end",
        "return b()",
        "end)()",
    ]


def uncalled(library, usual):
    """Functions of the library that a usual case names, and so gets built, but does not call."""
    functions = set(re.findall(r"^local function (\w+)", library, re.MULTILINE))
    usual = re.sub(r"--.*", "", usual)
    return sorted(functions & set(re.findall(r"\w+", usual)) - set(re.findall(r"(\w+)\(", usual)))


@pytest.mark.parametrize(
    "shared", [LIBRARY, read_shared(quarantine=True)], ids=["plain", "guarded"]
)
@pytest.mark.parametrize("verb", ["acquire", "release"])
def test_no_word_of_a_usual_case_is_the_name_of_a_function_that_it_does_not_call(verb, shared):
    """Redis would make that function at each call, and all functions that it uses."""
    usual, found, _ = read(file_of(verb)).partition("-- REST\n")
    assert found
    assert uncalled(shared, usual) == []


def test_the_search_for_uncalled_functions_finds_them():
    library = "local function final() end\n\nlocal function used() end"
    assert uncalled(library, "used() -- final\n") == []
    assert uncalled(library, "if ending == 'final' then used() end") == ["final"]


@pytest.mark.parametrize("prefix", ["csl", "b12", "a:b"])
@pytest.mark.parametrize("name", ["a", ":", "b12", "{b12}", "\0", "é" * 100, "x" * 201, "$1\r\n"])
def test_keys_are_packed_as_they_are(prefix, name):
    """However they are put together: twice, since the second time most is there already."""
    for each in (name, name[::-1]):
        assert packed_keys(prefix, each) == words(encoded(prefix, each))


def test_arguments_are_packed_in_the_order_of_the_header():
    script = SCRIPTS["reset"]
    assert script.pack({"claim_ms": 5, "name": "a", "call": "b"}) == ["a", "b", 5]
    with pytest.raises(TypeError) as caught:
        script.pack({"name": "a", "call": "b", "other": 1})
    told = "reset takes name, call, claim_ms; differs in ['claim_ms', 'other']"
    assert str(caught.value) == told


def test_positional_script_arguments_must_name_their_fields():
    """A changed header raises when the store is made, not when a lock is lost."""
    script = SCRIPTS["reset"]
    assert script.taking("name call claim_ms") is script
    with pytest.raises(TypeError) as caught:
        script.taking("name token")
    assert str(caught.value) == "reset takes name call claim_ms; not name token"


GUARDED = {**load_scripts(quarantine=True), **load_admin_scripts(quarantine=True)}


@pytest.mark.parametrize("scripts", [SCRIPTS, GUARDED], ids=["plain", "quarantine"])
def test_redis_takes_each_script_and_knows_it_by_its_digest(redis_client, scripts):
    """Lua refuses a function that takes more than sixty variables from outside."""
    for script in scripts.values():
        assert redis_client.script_load(script.text) in {script.sha, script.sha.encode()}

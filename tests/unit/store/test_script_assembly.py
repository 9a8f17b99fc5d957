"""How a script is put together of its header, the clock, and what it shares with others."""

from __future__ import annotations

import pytest

from celery_singleton_lock.store.scripts import assemble, load_scripts

CLOCK = "local function server_time() return 7 end"
SHARED = "local holders = KEYS[1]"


def body(arguments, keys="lock", code="return holders"):
    return f"-- say: something.\n-- KEYS: {keys}\n-- ARGV: {arguments}\n{code}\n"


@pytest.mark.parametrize(
    ("arguments", "names", "unpacked"),
    [
        ("name", ("name",), "local name = ARGV[1]\n"),
        ("name lease_ms", ("name", "lease_ms"), "local name, lease_ms = ARGV[1], ARGV[2]\n"),
        ("", (), ""),
        ("(name token lease_ms)*", (), ""),
        ("worker ttl_ms queues*", (), "local worker, ttl_ms = ARGV[1], ARGV[2]\n"),
    ],
)
def test_named_arguments_become_local_variables(arguments, names, unpacked):
    """A list has no names, but for what comes before it; a caller packs it by itself."""
    script = assemble("say", CLOCK, SHARED, body(arguments, " lock "))
    assert script.verb == "say"
    assert script.keys == "lock"
    assert script.arguments == names
    assert script.text.startswith(f"{unpacked}{CLOCK}\n")
    assert "return holders\n" in script.text
    assert SHARED in script.text


@pytest.mark.parametrize("keys", ["fleet", "meta*"])
def test_what_is_no_lock_s_verb_gets_nothing_of_what_these_share(keys):
    assert SHARED not in assemble("say", CLOCK, SHARED, body("name", keys)).text


def test_every_verb_takes_the_arguments_of_its_header():
    """Made anew, and the same as those that are kept."""
    load_scripts.cache_clear()
    kept = load_scripts()
    assert load_scripts() is kept
    assert {verb: script.verb for verb, script in kept.items()} == {verb: verb for verb in kept}

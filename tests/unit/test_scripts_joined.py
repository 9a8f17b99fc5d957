"""How a script is put together: arguments become local variables, shared blocks come first."""

from __future__ import annotations

from celery_singleton_lock.store.scripts import Script, assemble

BODY = "-- v: does.\n-- KEYS: {keys}\n-- ARGV: {arguments}\nreturn 1\n"


def made(arguments, keys="lock"):
    return assemble("v", "CLOCK", "SHARED", BODY.format(arguments=arguments, keys=keys))


def test_named_arguments_become_local_variables_in_their_order():
    script = made("name token lease_ms")
    assert script.text.startswith(
        "local name, token, lease_ms = ARGV[1], ARGV[2], ARGV[3]\nCLOCK\n"
    )
    assert script == Script("v", script.text, "lock", ("name", "token", "lease_ms"))


def test_a_list_behind_named_arguments_leaves_them_their_names():
    script = made("name whole token*")
    assert script.text.startswith("local name, whole = ARGV[1], ARGV[2]\nCLOCK\n")
    assert script.arguments == (), "who calls it gives a list"


def test_groups_that_are_repeated_have_no_names():
    script = made("(name token lease_ms)*")
    assert script.text.startswith("CLOCK\n")
    assert script.arguments == ()


def test_the_keys_are_the_headers():
    assert made("name", keys="meta*").keys == "meta*"

"""How error texts show values."""

from __future__ import annotations

import pytest
import redis.asyncio

from celery_singleton_lock.message_text import a_kind, an, named, natural, nth, number_of, printable


class Unit:
    """A class that is none of redis-py's."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("account:42 für שלום", "account:42 für שלום"),
        ("\x1b[2J\x07\x7f\x9b", "\\x1b[2J\\x07\\x7f\\x9b"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("x\u202ey\u2066\u2028", "x\\u202ey\\u2066\\u2028"),
        ("\ud83d", "\\ud83d"),
    ],
)
def test_foreign_text_cannot_control_a_terminal(text, shown):
    """Nor be refused by a stream that is UTF-8; and shown twice it is the same."""
    assert printable(text) == shown
    assert printable(shown) == shown


@pytest.mark.parametrize(("most", "shown"), [(None, "abcde"), (5, "abcde"), (4, "abc…")])
def test_a_text_is_cut_where_there_is_no_room(most, shown):
    assert printable("abcde", most) == shown


@pytest.mark.parametrize(
    ("number", "told"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (21, "21st"), (1113, "1,113th")],
)
def test_ordinal_numbers_are_readable(number, told):
    assert nth(number) == told


def test_a_value_is_called_by_its_type_with_an_article():
    """Never alone: it may be a password."""
    assert [a_kind(value) for value in (5, "secret", [], object(), None)] == [
        "an int",
        "a str",
        "a list",
        "an object",
        "a NoneType",
    ]


def test_nouns_go_with_their_number_and_article():
    assert [number_of(count, "message") for count in (0, 1, 2, 4000)] == [
        "0 messages",
        "1 message",
        "2 messages",
        "4,000 messages",
    ]
    assert [an(noun) for noun in ("os.path", "Unit", "str", "")] == [
        "an os.path",
        "a Unit",
        "a str",
        "a ",
    ]


def test_a_class_is_named_as_people_import_it():
    """redis-py has two classes of each name, in modules that users do not import."""
    assert named(redis.Redis) == "redis.Redis"
    assert named(redis.asyncio.Redis) == "redis.asyncio.Redis"
    assert named(redis.asyncio.RedisCluster) == "redis.asyncio.RedisCluster"
    assert named(int) == "int"
    assert named(Unit) == f"{__name__}.Unit"


def test_names_are_sorted_as_people_do():
    """Numbers of any length, also with zeros before them."""
    names = ["a", "a:1", "a:2", "a:2:3", "a:10", "a:0010x", "a:11", "b", f"b:{'9' * 5000}"]
    assert sorted(names, key=natural) == names

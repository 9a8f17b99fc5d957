"""The checks behind the table of options, each made for the test: the table is made at import."""

from __future__ import annotations

import pytest

from celery_singleton_lock.config.option_checks import (
    MOST_PORT,
    Place,
    _address,
    _backend,
    _choice,
    _count,
    _port,
)
from celery_singleton_lock.errors import ConfigurationError

HERE = Place("lock_colour", "shop.paint")


def said(check, value, place=HERE):
    with pytest.raises(ConfigurationError) as caught:
        check(place, value)
    return str(caught.value)


def test_a_choice_is_one_of_what_there_is():
    """Written as it is."""
    check = _choice("red", "green")
    assert [check(HERE, colour) for colour in ("red", "green")] == ["red", "green"]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("gren", '\'gren\': it must be "red" or "green". Did you mean "green"?'),
        ("GREEN", '\'GREEN\': it must be "red" or "green". Did you mean "green"?'),
        ("qqqq", '\'qqqq\': it must be "red" or "green".'),
        (None, 'None: it must be "red" or "green".'),
        (["red"], '[\'red\']: it must be "red" or "green". Did you mean "red"?'),
    ],
)
def test_what_is_no_choice_is_refused_with_what_there_is(value, sentence):
    """With the one that was perhaps meant."""
    check = _choice("red", "green")
    assert said(check, value) == f"task shop.paint: lock_colour is {sentence}"


def test_a_count_is_a_whole_number_from_the_least_on():
    """No bool, though Python takes it for a number."""
    check = _count(2, "two make a crowd")
    assert [check(HERE, number) for number in (2, 3, 2**31 - 1)] == [2, 3, 2**31 - 1]
    bounds = "it must be from 2 to 2147483647; two make a crowd."
    assert said(check, 1) == f"task shop.paint: lock_colour is 1: {bounds}"
    assert said(check, 2**31) == f"task shop.paint: lock_colour is 2147483648: {bounds}"
    for value in (2.0, "2", True, None):
        kind = {2.0: "float: use 2", "2": "str: use 2", None: "NoneType"}.get(value, "bool")
        assert said(check, value) == (
            f"task shop.paint: lock_colour is {value!r}: it must be a whole number, not {kind}."
        )


def test_a_url_is_blamed_on_the_setting_that_holds_it():
    """By the name under which it was written."""
    place = Place("other_backend")
    assert said(_backend, "redis://h/x", place).startswith("other_backend is 'redis://h/x': ")
    assert (
        said(_backend, 5, place) == "other_backend is an int: it must be a URL, or a list of URLs."
    )
    assert _backend(place, None) is None
    assert _backend(place, "redis://h/1") == "redis://h/1"


def test_a_port_is_one_that_there_is_or_none():
    assert [_port(HERE, port) for port in (None, 1, 9808, MOST_PORT)] == [None, 1, 9808, 65535]
    for port in (0, -1, 65536, 9808.0, "9808", True):
        assert said(_port, port) == (
            f"task shop.paint: lock_colour is {port!r}: it must be a port from 1 to 65535, or None."
        )


def test_an_address_is_a_text():
    """Which of this machine's it is, the system knows when it is bound."""
    assert _address(HERE, "127.0.0.1") == "127.0.0.1"
    for address in ("", None, 1, b"127.0.0.1"):
        assert said(_address, address) == (
            f"task shop.paint: lock_colour is {address!r}: it must be an address of this machine, "
            'such as "127.0.0.1".'
        )

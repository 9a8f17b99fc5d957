"""The checks behind the table of options, each made for the test: the table is made at import."""

from __future__ import annotations

import pytest

from celery_singleton_lock.checks import Place, _backend, _choice, _count
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
        kind = type(value).__name__
        assert said(check, value) == (
            f"task shop.paint: lock_colour is {value!r}: it must be a whole number, not {kind}."
        )


def test_a_url_is_blamed_on_the_setting_that_holds_it():
    """By the name under which it was written."""
    place = Place("other_backend")
    assert said(_backend, "redis://h/x", place).startswith("other_backend is 'redis://h/x': ")
    assert said(_backend, 5, place) == "other_backend is a int: it must be a URL."
    assert _backend(place, None) is None
    assert _backend(place, "redis://h/1") == "redis://h/1"

"""Head starts of tasks with priority."""

from __future__ import annotations

import json
import math

import pytest

from celery_singleton_lock.core.priority import HeadStart, head_start_of, microseconds
from celery_singleton_lock.core.rate import packed, rates_of


@pytest.mark.parametrize(
    ("value", "seconds"), [(30, 30), (-1.5, -1.5), ("7", 7), (" 2.5 ", 2.5), (0, 0)]
)
def test_a_number_and_its_text_are_seconds(value, seconds):
    assert head_start_of(value) == HeadStart(seconds)
    assert microseconds(seconds) == seconds * 1_000_000


@pytest.mark.parametrize("value", [86_401, "1e9", math.inf, -1e300])
def test_a_head_start_out_of_range_is_clamped(value):
    start = head_start_of(value)
    assert start.given == float(value)
    assert abs(start.seconds) == 86_400


@pytest.mark.parametrize("value", [None, True, "urgent", "", math.nan, [30], b"30"])
def test_what_is_no_number_is_none(value):
    assert head_start_of(value) is None


def test_an_int_that_no_float_can_hold_is_clamped():
    assert head_start_of(-(10**400)) == HeadStart(-86_400, -(10**400))


def test_a_head_start_is_a_flow_option_of_its_own():
    assert json.loads(packed((), 5)) == {"head_start": 5}
    assert set(json.loads(packed(rates_of("1/s"), -5))) == {"rates", "head_start"}
    assert not packed((), 0)

"""Rates: what a text means, and which rates are refused."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock import ConfigurationError, Rate
from celery_singleton_lock.core.rate import MAX_SLIDING, packed, rates_of


@pytest.mark.parametrize(
    ("text", "number", "period", "shown"),
    [
        ("100/m", 100, 60, "100/m"),
        ("1/s", 1, 1, "1/s"),
        (" 5 / 15 s ", 5, 15, "5/15s"),
        ("10/h", 10, 3600, "10/h"),
        ("10/2d", 10, 172_800, "10/2d"),
        ("3/60s", 3, 60, "3/m"),
        ("3/90m", 3, 5400, "3/90m"),
    ],
)
def test_a_rate_is_read_and_shown(text, number, period, shown):
    rate = Rate(text)
    assert (rate.number, rate.period, rate.kind, rate.burst) == (number, period, "sliding", 0)
    assert str(rate) == shown
    assert Rate(shown) == rate


def test_a_smooth_rate_shows_its_burst():
    rate = Rate("500/m", kind="smooth", burst=20)
    assert str(rate) == "500/m smooth, burst 20"
    assert repr(rate) == 'Rate("500/m", kind="smooth", burst=20)'
    assert eval(repr(rate)) == rate
    assert Rate("500/m", kind="smooth").burst == 1
    assert repr(Rate("2/s")) == 'Rate("2/s")'


def test_rates_are_values():
    assert {Rate("60/m"), Rate("60/60s")} == {Rate("60/m")}
    assert Rate("60/m") != Rate("60/m", kind="smooth")
    assert Rate("60/m") != "60/m"


WRONG = (
    (lambda: Rate("fast"), "Rate 'fast' cannot be read"),
    (lambda: Rate("100"), 'Write "100/m"'),
    (lambda: Rate(100), "Rate 100 cannot be read"),
    (lambda: Rate("-1/m"), "cannot be read"),
    (lambda: Rate("1.5/m"), "cannot be read"),
    (lambda: Rate("100/w"), "cannot be read"),
    (lambda: Rate("0/m"), "allows no start"),
    (lambda: Rate("1/0s"), "The period of rate '1/0s' is 0 s"),
    (lambda: Rate("1/367d"), "use 1 s to 366 d"),
    (lambda: Rate(f"{MAX_SLIDING + 1}/d"), 'Use kind="smooth"'),
    (lambda: Rate("1/m", kind="fixed"), "Rate kind is 'fixed'"),
    (lambda: Rate("1/m", burst=2), "Leave burst out"),
    (lambda: Rate("5/m", kind="smooth", burst=6), "from 1 to 5"),
    (lambda: Rate("5/m", kind="smooth", burst=0), "is 0"),
    (lambda: Rate("5/m", kind="smooth", burst=True), "is True"),
    (lambda: Rate("1000001/s", kind="smooth"), "above 1000000 a second"),
    (lambda: rates_of([]), "give 1 to 4 rates"),
    (lambda: rates_of(["1/s", "2/m", "3/h", "4/d", "5/2d"]), "give 1 to 4 rates"),
    (lambda: rates_of(["1/m", "2/60s"]), "two sliding rates have a period of 60 seconds"),
    (lambda: rates_of(b"1/m"), "cannot be read"),
    (lambda: rates_of({"1/m": 2}.values()), "Rate 2 cannot be read"),
    (lambda: rates_of(3), "Rate 3 cannot be read"),
    (lambda: Rate("100/min"), 'Did you mean "100/m"?'),
    (lambda: Rate("5 per 10 Seconds"), 'Did you mean "5/10s"?'),
    (lambda: Rate("1/month"), "Rate '1/month' cannot be read. Write"),
    (lambda: rates_of({"1/s": 1}), "rate is {'1/s': 1}: give a text"),
)


@pytest.mark.parametrize(("make", "told"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_rate_is_refused_with_its_value_and_a_remedy(make, told):
    with pytest.raises(ConfigurationError) as error:
        make()
    assert told in str(error.value)


def test_a_text_stands_for_a_rate():
    rates = rates_of(["10/s", Rate("500/m", kind="smooth")])
    assert rates == (Rate("10/s"), Rate("500/m", kind="smooth"))
    assert rates_of("10/s") == (Rate("10/s"),)
    assert rates_of(None) == ()


def test_the_scripts_get_rates_in_microseconds():
    assert packed(()) == ""
    sent = json.loads(packed(rates_of(["10/s", Rate("500/m", kind="smooth", burst=3)])))
    assert sent == {"rates": [["sliding 1", 10, 1_000_000, 0], ["smooth 60", 500, 60_000_000, 3]]}

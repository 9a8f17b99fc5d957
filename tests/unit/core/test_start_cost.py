"""What the start of a task costs: numbers, templates and callables."""

from __future__ import annotations

import pickle

import pytest

from celery_singleton_lock import ConfigurationError, LockCostError, Rate
from celery_singleton_lock.core.charge import charged_rates, checked_amount, checked_id, one_named
from celery_singleton_lock.core.lock_name_template import ArgumentsDoNotBind, Sent
from celery_singleton_lock.core.rate import packed, rates_of, why_never
from celery_singleton_lock.core.start_cost import compile_costs


def ask(tokens, order=None, model="small"):
    """A task."""


def cost_of(cost, *args, sent=None, **kwargs):
    (rate,) = compile_costs("shop.ask", ask, (Rate("1000/m", cost=cost),))(args, kwargs, sent)
    return rate.cost


@pytest.mark.parametrize(
    ("cost", "args", "number"),
    [
        (7, (1,), 7),
        (0, (1,), 0),
        ("{tokens}", (12,), 12),
        ("{tokens}", ("12",), 12),
        ("{tokens}0", (12,), 120),
        ("{order[size]}", (1, {"size": 30}), 30),
        (
            lambda tokens, order=None, model="small": tokens * (2 if model == "small" else 9),
            (8,),
            16,
        ),
    ],
)
def test_a_cost_is_a_number_a_template_or_a_callable(cost, args, number):
    assert cost_of(cost, *args) == number


def test_a_template_may_read_the_headers_of_the_message():
    sent = Sent(lambda: ("q", {"tokens": 40}))
    assert cost_of("{__headers__[tokens]}", 1, sent=sent) == 40


@pytest.mark.parametrize(
    ("cost", "args", "told"),
    [
        ("{tokens}", (None,), "argument 'tokens' is None, so cost of rate '1000/m' is not known"),
        ("{tokens}", ("many",), "cost of rate '1000/m' is 'many': give a whole number, from 0 to"),
        ("{tokens}", (-1,), "is '-1': give a whole number"),
        ("{tokens}", (True,), "give a whole number"),
        ("{tokens}", (1001,), "is 1001, and above the rate, 1000: such a start would never"),
        ("{order[size]}", (1, {}), r"argument 'order\[size\]' is missing"),
        (lambda tokens, order=None, model="small": 1.5, (1,), "is 1.5: .* Round it"),
        (lambda tokens, order=None, model="small": True, (1,), "is True: give a whole number"),
        (lambda tokens, order=None, model="small": tokens / 0, (1,), "raised ZeroDivisionError"),
    ],
)
def test_a_cost_that_is_no_number_fails_that_call(cost, args, told):
    with pytest.raises(LockCostError, match=told) as error:
        cost_of(cost, *args)
    assert str(error.value).startswith("task shop.ask: ")
    assert pickle.loads(pickle.dumps(error.value)).args == error.value.args


def test_a_call_that_does_not_bind_is_left_to_the_task():
    with pytest.raises(ArgumentsDoNotBind):
        cost_of("{tokens}", 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        (-1, "is -1: give a whole number, from 0 to 1000"),
        (True, "is True: give a whole number"),
        (1.5, "is 1.5: give a whole number, from 0 to 1000. Round it"),
        ([1], r"is \[1\]: give a whole number"),
        (1001, "is 1001, and above the rate, 1000"),
        ("5", "names no argument. Write a number"),
    ],
)
def test_a_static_cost_is_checked_at_declaration(cost, told):
    with pytest.raises(ConfigurationError, match=told):
        Rate("1000/m", cost=cost)


@pytest.mark.parametrize("cost", ["{tokens}", 2])
def test_a_smooth_rate_with_a_cost_needs_a_burst(cost):
    with pytest.raises(ConfigurationError, match="Give burst, the highest cost of one start"):
        Rate("1000/m", kind="smooth", cost=cost)
    assert Rate("1000/m", kind="smooth", cost=cost, burst=2).most == 2
    with pytest.raises(ConfigurationError, match="is 3, and above the burst, 2"):
        Rate("1000/m", kind="smooth", burst=2, cost=3)


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        ("{token}", "names the argument 'token', which the task does not have"),
        ("{tokens", "expected '}'"),
        (lambda nothing: 1, "Give it the task's signature"),
    ],
)
def test_a_cost_that_does_not_fit_the_task_is_refused(cost, told):
    with pytest.raises(ConfigurationError, match=told):
        compile_costs("shop.ask", ask, (Rate("1000/m", cost=cost),))


def test_a_rate_with_a_cost_is_another_rate():
    rates = rates_of([Rate("100/m"), Rate("50/m", cost=2)])
    assert [rate.key for rate in rates] == ["sliding 60", "sliding 60 cost"]
    assert packed(rates) == (
        '{"rates":[["sliding 60",100,60000000,0],["sliding 60 cost",50,60000000,0,2]]}'
    )
    assert repr(rates[1]) == 'Rate("50/m", cost=2)'
    assert pickle.loads(pickle.dumps(rates)) == rates
    assert why_never("9 50 60000000 0") == (
        "it costs 9, and the rate in force, 50/m, allows at most 50"
    )


def test_a_charge_checks_what_it_gets():
    rates = rates_of(["9/s", Rate("5/m", cost=1), Rate("7/h", kind="smooth", cost=1)])
    assert charged_rates("k", rates, None) == ["sliding 60 cost", "smooth 3600 cost"]
    assert charged_rates("k", rates, "5/m") == ["sliding 60 cost"]
    assert charged_rates("k", rates, "7/h smooth, burst 1") == ["smooth 3600 cost"]
    assert charged_rates("k", rates, rates[2]) == ["smooth 3600 cost"]
    with pytest.raises(ConfigurationError, match="lock 'k' has no such rate with a cost"):
        charged_rates("k", rates, "9/s")
    with pytest.raises(ConfigurationError, match="lock 'k' has no rate"):
        charged_rates("k", (), None)
    assert (checked_amount(-3), checked_id(None), checked_id("a")) == (-3, "", "a")
    for wrong in (1.0, True, "1", 10**13):
        with pytest.raises(ConfigurationError, match="give a whole number"):
            checked_amount(wrong)
    for wrong in ("", 7):
        with pytest.raises(ConfigurationError, match="give a text that is not empty"):
            checked_id(wrong)


def test_a_charge_finds_its_lock_by_name():
    class Named:
        def __init__(self, name):
            self.name = name

    a, b = Named("a"), Named("b")
    assert one_named("b", (a, b)) is b
    assert one_named("", (a,)) is a
    for name, told in (("", "got no name. Give name=, one of 'a', 'b'"), ("c", "not a lock of")):
        with pytest.raises(ConfigurationError, match=told):
            one_named(name, (a, b))

"""lock_limit and lock_rate as templates and callables."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from celery_singleton_lock import ConfigurationError, LockNameError, Rate
from celery_singleton_lock.config.computed_options import Computed, compile_options
from celery_singleton_lock.config.limits import NO_LIMIT
from celery_singleton_lock.config.settings import LockOptions, Settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.core.lock_name_template import Sent


def run(tenant, plan_limit=2, plan_rate="100/m"):
    """A task's function."""


def of_plan(tenant, plan_limit=2, plan_rate="100/m"):
    return {"free": 1, "gold": 8}[tenant]


def computed(*args, sent=None, **declared):
    return compile_options("shop.sync", run, declared).of(args, {}, sent)


def test_a_template_means_the_argument():
    assert computed("a", 7, lock_limit="{plan_limit}") == Computed(7, None)
    assert computed("a", "7", lock_limit="{plan_limit}") == Computed(7, None)
    assert computed("a", lock_limit="{plan_limit}") == Computed(2, None)
    assert computed("a", 7, "5/s", lock_rate="{plan_rate}") == Computed(None, (Rate("5/s"),))
    assert computed("a", 7, lock_rate="{plan_limit}/h") == Computed(None, (Rate("7/h"),))


def test_a_part_of_an_argument_and_of_the_message_can_be_used():
    assert computed({"limit": 3}, lock_limit="{tenant[limit]}").limit == 3
    sent = Sent(lambda: ("q", {"limit": "4"}))
    assert computed("a", sent=sent, lock_limit="{__headers__[limit]}").limit == 4


def test_a_callable_gets_the_arguments():
    assert computed("gold", lock_limit=of_plan).limit == 8
    rates = computed("a", lock_rate=lambda tenant, plan_limit, plan_rate: ["9/s", Rate("5/m")])
    assert rates.rate == (Rate("9/s"), Rate("5/m"))
    assert computed("a", lock_rate=lambda tenant, plan_limit, plan_rate: None).rate == ()


def test_a_task_without_templates_computes_nothing():
    assert compile_options("t", run, {"lock_limit": 3, "lock_rate": "100/m"}) is None
    assert compile_options("t", run, {"lock_rate": ["1/s", Rate("9/m")]}) is None


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "many", "", "0", 2**31], ids=repr)
def test_a_limit_that_cannot_be_used_fails_the_call(value):
    with pytest.raises(ConfigurationError) as error:
        computed("a", value, lock_limit="{plan_limit}")
    told = str(error.value)
    assert re.match(r"task shop.sync: lock_limit is '.*': it was computed from", told)
    assert "a whole number from 1 to" in told


@pytest.mark.parametrize("value", [0, True, 1.5, None, [3]], ids=repr)
def test_a_limit_of_a_callable_that_cannot_be_used_fails_the_call(value):
    with pytest.raises(ConfigurationError) as error:
        computed("a", lock_limit=lambda tenant, plan_limit, plan_rate: value)
    assert str(error.value).startswith(f"task shop.sync: lock_limit is {value!r}: it was computed")


def test_an_argument_that_is_none_fails_the_call():
    with pytest.raises(ConfigurationError, match="'plan_limit' is None, so lock_limit is not kno"):
        computed("a", None, lock_limit="{plan_limit}")


def test_a_rate_that_cannot_be_used_fails_the_call():
    with pytest.raises(ConfigurationError) as error:
        computed("a", 1, "fast", lock_rate="{plan_rate}")
    assert str(error.value).startswith(
        "task shop.sync: lock_rate, computed from the arguments of this call: "
        "Rate 'fast' cannot be read."
    )


def test_a_callable_that_raises_fails_the_call():
    with pytest.raises(ConfigurationError, match=r"lock_limit raised KeyError: 'lead'") as error:
        computed("lead", lock_limit=of_plan)
    assert isinstance(error.value.__cause__, KeyError)


def test_an_argument_that_is_missing_fails_the_call():
    with pytest.raises(ConfigurationError, match=r"argument 'tenant\[limit\]' is missing"):
        computed({}, lock_limit="{tenant[limit]}")


def test_a_call_that_does_not_bind_is_left_to_the_task():
    with pytest.raises(LockNameError):
        computed(lock_limit="{plan_limit}")


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ("{plan}", "task shop.sync: lock_limit is '{plan}': it names the argument 'plan'"),
        ("{plan_limit", "expected '}' before end of string"),
        (lambda tenant: 1, "it cannot take the task's arguments"),
    ],
    ids=["name", "brace", "callable"],
)
def test_a_wrong_declaration_is_refused(declared, told):
    with pytest.raises(ConfigurationError) as error:
        compile_options("shop.sync", run, {"lock_limit": declared})
    assert told in str(error.value)


def test_the_options_of_a_call_have_its_values():
    task = resolve_options("t", {"lock_limit": "{a}", "lock_rate": "{b}"}, Settings())
    assert (task.limit, task.rate, task.flow) == (NO_LIMIT, (), "")
    options = Computed(5, (Rate("9/s"),)).applied(task)
    assert (options.limit, options.rate, options.declared_limit) == (5, (Rate("9/s"),), NO_LIMIT)
    assert json.loads(options.flow) == {
        "newest": {"limit": 5, "rates": [["sliding 1", 9, 1_000_000, 0]]}
    }
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_declared_rate_beside_a_computed_limit_stays_a_declared_one():
    task = resolve_options("t", {"lock_limit": "{a}", "lock_rate": "9/s"}, Settings())
    told = json.loads(Computed(5).applied(task).flow)
    assert told == {"newest": {"limit": 5}, "rates": [["sliding 1", 9, 1_000_000, 0]]}


def test_a_declared_limit_beside_a_computed_rate_stays_a_declared_one():
    options = Computed(None, ()).applied(LockOptions(limit=3))
    assert (options.declared_limit, json.loads(options.flow)) == (3, {"newest": {"rates": []}})


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"lock_limit": "{a}", "lock_keys": ["a", "b"]}, "Use lock_key"),
        ({"lock_rate": "{a}", "lock_keys": ["a", "b"]}, "Use lock_key"),
        ({"lock_rate": "{a}", "lock_on_conflict": "requeue"}, "lock_rate is '{a}': with"),
        ({"lock_limit": "3"}, "lock_limit is '3': it must be a whole number"),
    ],
    ids=range(4),
)
def test_what_contradicts_a_computed_value_is_refused(declared, told):
    with pytest.raises(ConfigurationError) as error:
        resolve_options("shop.sync", declared, None)
    assert told in str(error.value)


def test_a_computed_rate_needs_no_limit():
    assert resolve_options("t", {"lock_limit": None, "lock_rate": "{b}"}, None).limit == NO_LIMIT


@pytest.mark.parametrize("option", ["lock_limit", "lock_rate"])
def test_a_quorum_refuses_computed_values(option):
    settings = Settings(backend=("redis://a", "redis://b", "redis://c"), on_conflict="requeue")
    with pytest.raises(ConfigurationError, match=f"{option} is '{{a}}': with several servers"):
        resolve_options("t", {option: "{a}", "lock_on_conflict": "skip"}, settings)

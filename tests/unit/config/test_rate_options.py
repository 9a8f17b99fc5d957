"""lock_rate and lock_on_rate: what they mean, and what contradicts them."""

from __future__ import annotations

import json
import pickle

import pytest

from celery_singleton_lock import ConfigurationError, Rate
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.settings import LockOptions, Settings
from celery_singleton_lock.config.task_options import resolve_options


def resolved(settings=None, **declared):
    return resolve_options("shop.settle", declared, settings)


def test_a_rate_becomes_the_flow_options_of_the_claims():
    options = resolved(lock_rate=["100/m", Rate("9/s", kind="smooth")], lock_on_rate="skip")
    assert options.rate == (Rate("100/m"), Rate("9/s", kind="smooth"))
    assert options.on_rate == "skip"
    assert len(json.loads(options.flow)["rates"]) == 2
    assert pickle.loads(pickle.dumps(options)) == options


def test_without_a_rate_there_are_no_flow_options():
    assert (resolved().rate, resolved().flow, resolved().on_rate) == ((), "", "park")
    assert resolved(lock_rate=None) == LockOptions()


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"lock_rate": "fast"}, "task shop.settle: lock_rate: Rate 'fast' cannot be read."),
        ({"lock_rate": "0/m"}, "task shop.settle: lock_rate: Rate '0/m' allows no start."),
        ({"lock_rate": "1/m", "lock_on_rate": "wait"}, "task shop.settle: lock_on_rate is 'wait'"),
        (
            {"lock_rate": "1/m", "lock_on_conflict": "requeue"},
            "task shop.settle: lock_rate is ['1/m']: with lock_on_conflict=\"requeue\"",
        ),
        (
            {"lock_rate": "1/m", "lock_on_conflict": "wait", "lock_wait_timeout": 5},
            "task shop.settle: lock_rate is ['1/m']: with lock_on_conflict=\"wait\"",
        ),
        ({"lock_rate": "1/m", "lock_keys": ["a", "b"]}, '{"…": Limit(1, rate="1/m")}.'),
    ],
    ids=range(6),
)
def test_a_rate_that_cannot_be_kept_is_refused_at_the_declaration(declared, told):
    with pytest.raises(ConfigurationError) as error:
        resolved(**declared)
    assert told in str(error.value)


def test_a_task_with_a_rate_needs_no_limit():
    assert resolved(lock_limit=None, lock_rate="1/m").limit == 2**31 - 1
    with pytest.raises(ConfigurationError, match='Add lock_rate="100/m", or use 1'):
        resolved(lock_limit=None)


def test_a_quorum_refuses_a_rate():
    settings = Settings(backend=("redis://a", "redis://b", "redis://c"), on_conflict="skip")
    with pytest.raises(ConfigurationError, match="no server has a log of all starts"):
        resolved(settings, lock_rate="1/m")


def test_an_option_for_a_rate_without_a_rate_is_reported():
    with pytest.warns(ConfigurationWarning, match='Add lock_rate="100/m"'):
        resolved(Settings(), lock_on_rate="skip")

"""lock_fair_by, lock_fair_limit and lock_fair_weight: what they mean, and what contradicts them."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.core.fair_group import Group, group_in
from celery_singleton_lock.core.fair_option import Share, compile_group
from celery_singleton_lock.core.rate import packed, rates_of


def resolved(settings=None, **declared):
    return resolve_options("shop.settle", declared, settings)


def settle(tenant, plan=None):
    pass


def group_of(by, limit=None, weight=1.0, **arguments):
    return compile_group("shop.settle", settle, Share(by, limit, weight))((), arguments, None)


def test_a_group_with_a_fixed_name_becomes_a_flow_option_of_the_claims():
    options = resolved(lock_fair_by="imports", lock_fair_limit=2, lock_fair_weight=0.5)
    assert options.group == Group("imports", 2, 0.5)
    assert not options.is_computed
    assert json.loads(options.flow) == {"group": ["imports", 2, 0.5]}


def test_a_group_from_arguments_is_known_with_a_call():
    options = resolved(lock_fair_by="{tenant}")
    assert (options.is_computed, options.group, options.flow) == (True, None, "")
    assert group_of("{tenant}", tenant="acme") == Group("acme")
    assert group_of("{tenant}", 2, "{plan}", tenant=7, plan="2.5") == Group("7", 2, 2.5)
    assert group_of(lambda tenant, plan: tenant, "{plan}", tenant="a", plan=3) == Group("a", 3)
    assert group_of("t", None, lambda tenant, plan: 2, tenant="a") == Group("t", None, 2.0)


def test_a_long_name_of_a_group_ends_with_a_digest():
    one, other = (group_of("{tenant}", tenant="é" * 99 + end).name for end in "ab")
    assert one != other
    assert one.startswith("é" * 16 + "-sha256-")
    assert len(one.encode()) <= 100


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"lock_fair_by": ""}, "lock_fair_by is '': it must be a template such as"),
        ({"lock_fair_by": 3}, "lock_fair_by is 3: it must be a template such as"),
        ({"lock_fair_by": "a", "lock_fair_limit": 0}, "lock_fair_limit is 0: it must be a whole"),
        ({"lock_fair_by": "a", "lock_fair_weight": 0}, "lock_fair_weight is 0: it must be a numb"),
        ({"lock_fair_by": "a", "lock_fair_weight": "x"}, "lock_fair_weight is 'x': it must be"),
        ({"lock_fair_by": "a", "lock_keys": ["a", "b"]}, "Use lock_key, or leave lock_fair_by out"),
        ({"lock_fair_by": "a", "lock_on_conflict": "requeue"}, "which knows no groups"),
        ({"lock_fair_by": "a", "lock_on_full": "replace"}, "may be of another group"),
    ],
    ids=range(8),
)
def test_fairness_that_cannot_be_kept_is_refused_at_the_declaration(declared, told):
    with pytest.raises(ConfigurationError) as error:
        resolved(**declared)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (("{tenant}",), "argument 'tenant' is None, so lock_fair_by is not known"),
        ((lambda tenant, plan: plan,), "lock_fair_by is None, a NoneType, from its callable"),
        (("a", "{plan}"), "argument 'plan' is None"),
        (("a", lambda tenant, plan: 0), "lock_fair_limit is 0, from its callable: it must be a wh"),
        (("a", None, lambda tenant, plan: -1), "lock_fair_weight is -1, from its callable: it mus"),
        (("a", None, lambda tenant, plan: float("nan")), "lock_fair_weight is nan, from its calla"),
        (("a", None, "w{tenant}"), "argument 'tenant' is None"),
    ],
    ids=range(7),
)
def test_a_value_that_cannot_be_used_fails_that_call(share, told):
    with pytest.raises(ConfigurationError) as error:
        group_of(*share, tenant=None)
    assert str(error.value).startswith("task shop.settle")
    assert told in str(error.value)


def test_a_text_that_is_no_number_fails_that_call():
    with pytest.raises(ConfigurationError, match=r"is 'gold', from the template '.plan.': it must"):
        group_of("{tenant}", None, "{plan}", tenant="a", plan="gold")


def test_a_quorum_refuses_groups():
    settings = Settings(backend=("redis://a", "redis://b", "redis://c"), on_conflict="skip")
    with pytest.raises(ConfigurationError, match="no server has the queue of all groups"):
        resolved(settings, lock_fair_by="{tenant}")


def test_an_option_for_groups_without_groups_is_reported():
    with pytest.warns(ConfigurationWarning, match='Add lock_fair_by="{tenant}"'):
        resolved(Settings(), lock_fair_limit=2)


def test_the_group_is_read_from_the_flow_options():
    """``inspect locks`` shows it."""
    assert group_in(packed((), group=Group("é" * 3, 2, 0.5))) == "ééé"
    assert group_in(packed(rates_of("5/m"))) == ""
    assert group_in("") == ""

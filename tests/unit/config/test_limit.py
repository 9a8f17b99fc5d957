"""Limit: the limits and rates of several locks, and what contradicts them."""

from __future__ import annotations

import pickle

import pytest

from celery_singleton_lock import ConfigurationError, Limit, Rate
from celery_singleton_lock.config.limits import NO_LIMIT
from celery_singleton_lock.config.multi_lock_option import compile_names
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.config.task_options import resolve_options
from celery_singleton_lock.core.lock_set import Key, LockSet, Part, in_order, part_of, read
from celery_singleton_lock.core.rate import packed, unpacked

SMOOTH = Rate("60/m", kind="smooth", burst=5)


def sync(tenant, user=None):
    """A task."""


def resolved(keys, **declared):
    return resolve_options("shop.sync", {"lock_keys": keys, **declared}, Settings())


def named(keys, *args):
    return compile_names("shop.sync", sync, keys).name(args)


def test_a_limit_has_a_number_and_rates():
    assert (Limit(2).number, Limit(2).rates) == (2, ())
    limit = Limit(None, rate=["100/m", SMOOTH])
    assert (limit.number, limit.rates) == (NO_LIMIT, (Rate("100/m"), SMOOTH))
    same = pickle.loads(pickle.dumps(limit))
    assert (same == limit, hash(same) == hash(limit), limit == Limit(2)) == (True, True, False)
    assert eval(repr(limit)) == limit
    assert repr(Limit(3, rate="9/s")) == 'Limit(3, rate="9/s")'
    assert repr(Limit(3)) == "Limit(3)"
    assert Limit(3) != 3


@pytest.mark.parametrize(
    ("number", "rate", "told"),
    [
        (0, None, "Limit is 0: it must be from 1"),
        ("2", None, "Limit is '2': it must be a whole number"),
        (
            None,
            None,
            'Limit is None: without a rate, the lock would bound nothing. Add rate="100/m',
        ),
        (1, "fast", "rate of Limit: Rate 'fast' cannot be read."),
        (
            1,
            Rate("9/m", cost="{tokens}"),
            "cost of a rate of Limit is '{tokens}': with several locks a cost is a number.",
        ),
    ],
)
def test_a_wrong_limit_is_refused_with_a_remedy(number, rate, told):
    with pytest.raises(ConfigurationError) as error:
        Limit(number, rate=rate)
    assert told in str(error.value)


def test_numbers_and_limits_may_be_mixed():
    keys = {"tenant:{tenant}": Limit(2, rate="100/m"), "crm": Limit(20), "llm": 3, "z": None}
    assert named(keys, 7).keys == (
        Key("crm", 20),
        Key("llm", 3),
        Key("tenant:7", 2, (Rate("100/m"),)),
        Key("z", None),
    )


def test_one_lock_with_a_rate_is_a_lock_set():
    assert named({"tenant:{tenant}": Limit(1, rate="1/s")}, 7).keys[0].rate == (Rate("1/s"),)


def test_of_equal_names_the_lowest_rates_count():
    found = in_order(
        [Key("a", 3, (Rate("5/s"), SMOOTH)), Key("a", None, (Rate("2/s"), Rate("9/h")))], 2
    )
    assert found.keys == (Key("a", 2, (Rate("2/s"), SMOOTH, Rate("9/h"))),)


@pytest.mark.parametrize(
    ("keys", "declared", "told"),
    [
        (
            {"a": "100/m"},
            {},
            "lock_keys['a'] is '100/m': a rate belongs into a limit: Limit(1, rate='100/m')",
        ),
        (
            {"a": Limit(1, rate="1/s")},
            {"lock_on_conflict": "requeue"},
            'lock_keys is {\'a\': Limit(1, rate="1/s")}: with lock_on_conflict="requeue"',
        ),
        (
            {"a": Limit(1, rate="1/s")},
            {"lock_on_conflict": "wait", "lock_wait_timeout": 5},
            'with lock_on_conflict="wait"',
        ),
        ({"a": Limit(1)}, {"lock_limit": 2}, "each of lock_keys has a limit of its own"),
    ],
)
def test_what_contradicts_a_rate_is_refused(keys, declared, told):
    def declare():
        resolved(keys, **declared)
        compile_names("shop.sync", sync, keys)

    with pytest.raises(ConfigurationError) as error:
        declare()
    assert told in str(error.value)


# --- the warning ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "held", "other"),
    [
        ({"crm": Limit(2), "tenant:{tenant}": Limit(1, rate="1/h")}, "crm", "tenant:{tenant}"),
        ({"llm": Limit(None, rate="9/m"), "tenant:{tenant}": 1}, "llm", "tenant:{tenant}"),
        (
            {"user:{user}": Limit(1, rate="1/h"), "tenant:{tenant}": 1},
            "tenant:{tenant}",
            "user:{user}",
        ),
    ],
)
def test_a_lock_that_many_calls_share_is_not_held_unnoticed_while_a_rate_makes_a_task_wait(
    keys, held, other
):
    with pytest.warns(ConfigurationWarning) as warned:
        resolved(keys)
    assert len(warned) == 1
    assert f"may hold {held!r} while it waits for {other!r}" in str(warned[0].message)


@pytest.mark.parametrize(
    ("keys", "declared"),
    [
        ({"1:tenant:{tenant}": Limit(2, rate="9/m"), "2:crm": 20, "3:llm": Limit(9)}, {}),
        ({"t:{tenant}:{user}": 1, "z:{tenant}": Limit(None, rate="9/m")}, {}),
        ({"a": Limit(1, rate="9/m"), "b": 1}, {}),
        ({"crm": 2, "tenant:{tenant}": 1}, {}),
        ({"crm": 2, "tenant:{tenant}": Limit(1, rate="1/h")}, {"lock_on_rate": "skip"}),
    ],
)
def test_nobody_is_warned_if_no_other_call_waits_without_need(keys, declared, recwarn):
    resolved(keys, **declared)
    assert not recwarn.list


def test_lock_on_rate_has_an_effect_with_a_rate_of_one_of_several_locks(recwarn):
    assert resolved({"a": Limit(1, rate="1/s")}, lock_on_rate="skip").on_rate == "skip"
    assert not recwarn.list


# --- messages -------------------------------------------------------------------------------------


def test_a_message_keeps_the_rates_of_its_locks():
    parts = (part_of(Key("a", 2, (Rate("9/s"), SMOOTH)), "t.0"), part_of(Key("b"), "u.0"))
    again = read(LockSet(parts, at=1, place=5).header()["csl-kept"])
    assert again.parts == parts
    assert unpacked(again.parts[0].flow) == (Rate("9/s"), SMOOTH)
    assert unpacked(again.parts[1].flow) == ()


def test_a_worker_of_an_older_version_reads_a_lock_set_without_rates():
    parts = (Part("a", "t.0", 2), Part("b", "u.0", 1, 0, packed((Rate("9/s"),))))
    written = LockSet(parts).header()["csl-kept"]["parts"]
    assert [len(part) for part in written] == [4, 5]

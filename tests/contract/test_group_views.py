"""Which groups wait for a lock: in its view, in lists, in ``locks show`` and in Flower."""

from __future__ import annotations

import dataclasses

import pytest

from celery_singleton_lock.admin import show_lock
from celery_singleton_lock.cli import render
from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_view import WaitingGroup
from celery_singleton_lock.core.model import Ending
from celery_singleton_lock.core.rate import packed, rates_of
from celery_singleton_lock.flower.rows import LockRows
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.waiters import hold, park

pytestmark = pytest.mark.contract

on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)
HOSTILE = "\x1b[2J<b>\u202e"


@pytest.fixture
def store(make_store):
    made = make_store(claim_lease=60.0)
    made.worker_heartbeat("w1", "R", ["q"], 600.0, 9)
    return made


def of(group, limit=None):
    return packed((), group=Group(group, limit))


def share(store):
    """Group a holds its only permit and waits twice, b once, and one waiter has no group."""
    hold(store, "k", limit=2, flow=of("a", 1))
    hold(store, "k", limit=2, flow=of("b"))
    for group in "aab":
        park(store, "k", limit=2, flow=of(group, 1 if group == "a" else None))
    park(store, "k", limit=2)


@on_all_stores
def test_a_view_names_the_groups_that_wait_and_those_of_the_holders(store):
    share(store)
    view = store.inspect("k")
    assert view.groups_waiting == 3
    assert view.groups == (
        WaitingGroup("a", 2, 1, is_at_limit=True),
        WaitingGroup("", 1),
        WaitingGroup("b", 1, 1),
    )
    assert sorted(holder.group for holder in view.holders) == ["a", "b"]
    assert [waiter.group for waiter in view.waiters] == ["a", "a", "b", ""]


@on_all_stores
def test_a_view_changes_with_the_last_waiter_of_a_group(store):
    first = hold(store, "k", flow=of("a"))
    park(store, "k", flow=of("b"))
    assert store.inspect("k").groups == (WaitingGroup("b", 1),)
    store.release("k", first.token, Ending.FINAL)
    assert store.inspect("k").groups == ()
    assert store.inspect("k").groups_waiting == 0


@on_all_stores
def test_a_view_has_the_ten_largest_of_many_groups(store):
    """And the number of all."""
    hold(store, "k", flow=of("holder"))
    for number in range(30):
        park(store, "k", flow=of(f"g{number:02}"))
    for number in (29, 29, 17):
        park(store, "k", flow=of(f"g{number:02}"))
    view = store.inspect("k")
    assert view.groups_waiting == 30
    assert [(group.name, group.waiting) for group in view.groups[:3]] == [
        ("g29", 3),
        ("g17", 2),
        ("g00", 1),
    ]
    assert len(view.groups) == 10


@on_all_stores
def test_a_list_has_the_number_of_groups_that_wait(store):
    """Also while no permit is free; a lock without groups has none."""
    share(store)
    hold(store, "plain", flow=packed(rates_of("5/m")))
    park(store, "plain")
    found = {each.name: each.groups for each in store.summarise_locks()}
    assert found == {"k": 3, "plain": 0}


@pytest.fixture
def admin(redis_client):
    store = RedisAdminStore(redis_client, claim_lease=60.0)
    store.worker_heartbeat("w1", "R", ["q"], 600.0, 9)
    yield store
    store.close()


def test_show_names_the_groups_that_wait(admin):
    share(admin)
    lines = render.detail(show_lock(admin, "k"))
    assert [line for line in lines if line.startswith("group")] == [
        "groups   3 waiting",
        "group    a: 2 waiting, 1 held, at its limit",
        "group    (tasks without a group): 1 waiting, 0 held",
        "group    b: 1 waiting, 1 held",
    ]
    assert sorted(line[-9:] for line in lines if line.startswith("holder")) == [
        ", group a",
        ", group b",
    ]
    (row,) = render.lock_rows(admin.summarise_locks())
    assert row[-1].endswith("3 groups waiting")


def test_show_says_how_many_groups_it_leaves_out(admin):
    hold(admin, "k", flow=of("holder"))
    for number in range(12):
        park(admin, "k", flow=of(f"g{number:02}"))
    lines = render.detail(show_lock(admin, "k"))
    assert "groups   12 waiting; 2 are not shown" in lines


def test_a_lock_without_groups_is_shown_as_before(admin):
    hold(admin, "k")
    park(admin, "k")
    assert not [line for line in render.detail(show_lock(admin, "k")) if "group" in line]
    (row,) = render.lock_rows(admin.summarise_locks())
    assert "group" not in row[-1]


def test_the_name_of_a_group_controls_no_terminal_and_no_page(admin, capsys):
    """It comes from the arguments of a call."""
    hold(admin, "k", flow=of(HOSTILE))
    park(admin, "k", flow=of(HOSTILE))
    render.show(render.detail(show_lock(admin, "k")))
    shown = capsys.readouterr().out
    assert "<b>" in shown
    assert not {"\x1b", "\u202e"} & set(shown)
    rows = LockRows(admin)
    (row,) = rows.page()["locks"]
    assert row["groups"] == 1
    found = rows.details(row["id"])
    names = [
        found["groups"][0]["name"], found["holders"][0]["group"], found["queue"][0]["group"],
        row["holders"][0]["group"],
    ]  # fmt: skip
    assert len(set(names)) == 1
    assert names[0].isprintable()
    assert "<b>" in names[0]  # the page shows it as text


MUTANTS = {
    "groups at their limits are left out": ("do add(group, 1) end", "do break end"),
    "groups below their limits are left out": (
        "do add(string.sub(member, 18), 0) end",
        "do break end",
    ),
    "no group is at its limit": ("do add(group, 1) end", "do add(group, 0) end"),
    "only groups below their limits count": ("+ call('ZCARD', full)}", "}"),
    "the smallest are first": ("return one[2] > other[2]", "return one[2] < other[2]"),
    "another number of waiters": ("call('ZCARD', line_of(group)), is", "1, is"),
    "a list counts no groups at their limits": ("+ redis.call('ZCARD', base .. 'flow:full')", ""),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_line_of_the_views_is_noticed(admin, name):
    old, new = MUTANTS[name]
    scripts = admin.operations.scripts
    changed = {
        verb: dataclasses.replace(each, text=each.text.replace(old, new))
        for verb, each in scripts.items()
        if verb in {"inspect", "summarise_locks"} and old in each.text
    }
    assert changed
    scripts |= changed
    with pytest.raises(AssertionError):
        play(admin)


def play(store):
    test_a_view_names_the_groups_that_wait_and_those_of_the_holders(store)
    (found,) = store.summarise_locks()
    assert found.groups == 3

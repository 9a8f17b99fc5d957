"""How many parked tasks are taken at a time, and how fast they are sent."""

from __future__ import annotations

from itertools import pairwise

import pytest

from celery_singleton_lock.admin.bulk_parked import Pace
from celery_singleton_lock.admin.select_parked import STEP, Filter, steps
from celery_singleton_lock.store.operator.base import Waiting


def waiting(lock="a", size=1, **more):
    return Waiting(lock, "token", more.pop("state", "parked"), size=size, **more)


def test_a_group_is_of_one_lock_and_bounded_in_number_and_size():
    found = [waiting("a"), *[waiting("b")] * 5, waiting("b", 900), waiting("b", 900), waiting("b")]
    groups = list(steps(found, most=3, load=1000))
    assert [len(group) for group in groups] == [1, 3, 3, 2]
    assert [each for group in groups for each in group] == found
    assert all(len({each.lock for each in group}) == 1 for group in groups)


def test_every_group_may_be_as_large_as_the_bound():
    """The second one, too."""
    groups = list(steps([waiting(size=500)] * 4, load=1000))
    assert [len(group) for group in groups] == [2, 2]


def test_a_message_larger_than_the_bound_goes_alone():
    groups = list(steps([waiting(size=1), waiting(size=5000), waiting(size=1)], load=1000))
    assert [[each.size for each in group] for group in groups] == [[1], [5000], [1]]


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (Filter(), True),
        (Filter(task="app.settle"), True),
        (Filter(task="settle"), False),
        (Filter(task="*.settle"), True),
        (Filter(older=60.5), True),
        (Filter(older=61), False),
        (Filter(queue="q"), True),
        (Filter(queue="other"), False),
        (Filter(state="adrift"), False),
    ],
)
def test_what_a_filter_leaves_out_does_not_matter(wanted, fits):
    each = waiting(task="app.settle", age=60.5, queue="q")
    assert wanted.fits(each) is fits


def test_a_client_that_waits_without_a_message_is_never_meant():
    assert not Filter().fits(waiting(state="waiting"))


class Time:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("rate", [0.5, 10, 1000])
def test_so_many_pass_a_second(rate):
    time = Time()
    pace = Pace(rate, time, time.sleep)
    passed = []
    for _ in range(5):
        pace.wait()
        passed.append(time.now)
    assert all(later - earlier == pytest.approx(1 / rate) for earlier, later in pairwise(passed))


def test_after_a_rest_there_is_no_burst():
    time = Time()
    pace = Pace(10, time, time.sleep)
    pace.wait()
    time.sleep(60)
    pace.wait()
    before = time.now
    pace.wait()
    assert time.now - before == pytest.approx(0.1)


@pytest.mark.parametrize(("rate", "ahead"), [(0, STEP), (0.05, 1), (2, 20), (1000, STEP)])
def test_no_more_are_taken_at_once_than_are_sent_in_ten_seconds(rate, ahead):
    """Those that are taken, and not sent within a minute, would queue again."""
    assert Pace(rate).ahead == ahead

"""The sentences that say why a task does not run."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin.lock_views import Detail
from celery_singleton_lock.admin.silent_holders import silent_for
from celery_singleton_lock.admin.why_sentences import named, ordinal, seconds, short, worker_name
from celery_singleton_lock.cli.render import detail, lock_rows
from celery_singleton_lock.core.lock_view import Holder, LockView, WaitsFor
from celery_singleton_lock.core.model import ALIVE
from celery_singleton_lock.store.operator.base import Glance

INF = float("inf")
SETTLE = Holder("token", "shop.orders.settle", "3f2a91c0-58ab", "w2@host#1#7f3a", expires_in=41.0)


def test_a_holder_is_shown_by_its_short_task_name_short_id_and_worker():
    """What follows the last ``#`` of a worker's id is no part of its name."""
    assert short(SETTLE) == "settle[3f2a91c0] on w2@host#1"
    assert short(SETTLE._replace(worker="")) == "settle[3f2a91c0]"
    assert short(SETTLE._replace(task_id="", worker="")) == "shop.orders.settle"
    assert short(SETTLE._replace(task="settle")) == "settle[3f2a91c0] on w2@host#1"
    assert worker_name("w2@host") == "w2@host"


@pytest.mark.parametrize(
    ("bodies", "told"), [(0, "0 messages"), (1, "1 message"), (4_000, "4,000 messages")]
)
def test_messages_that_are_kept_are_counted(bodies, told):
    view = LockView("account:42", waiting=bodies, bodies=bodies)
    assert f"waiting  {bodies:,} in the queue; {told} stored" in detail(Detail(view, ()))


def test_a_lock_on_a_server_in_quarantine_is_not_shown_as_granted_as_usual():
    view = LockView("a", waiting=1, waits_for=WaitsFor.REDIS, next_look=7.25)
    (state,) = [line for line in detail(Detail(view, ())) if line.startswith("state")]
    assert state == (
        "state    granted to nobody for 7.2 s: Redis was replaced or restarted (quarantine)"
    )


def test_three_holders_are_named_and_the_others_counted():
    """A lock of many permits does not fill the screen."""
    one = "settle[3f2a91c0] on w2@host#1, lease 41 s left"
    assert named((SETTLE,)) == one
    assert named((SETTLE,) * 3) == "; ".join([one] * 3)
    assert named((SETTLE,) * 4) == f"{'; '.join([one] * 3)} and 1 more"
    assert named((SETTLE,) * 9) == f"{'; '.join([one] * 3)} and 6 more"


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        (0, "not in the queue"),
        (1, "you are next"),
        *((rank, f"you are {rank}nd") for rank in (2, 22, 102)),
        *((rank, f"you are {rank}rd") for rank in (3, 23, 103)),
        *((rank, f"you are {rank}st") for rank in (21, 101)),
        *((rank, f"you are {rank}th") for rank in (4, 11, 12, 13, 14, 20, 111, 112, 113, 114)),
        (1_001, "you are 1,001st"),
        (1_212, "you are 1,212th"),
    ],
)
def test_a_rank_is_an_ordinal_number(rank, told):
    """Also from 11 to 13, and beyond a hundred."""
    assert ordinal(rank) == told


@pytest.mark.parametrize(
    ("duration", "told"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (10, "10 s"),
        (119, "119 s"),
        (120, "2 min 0 s"),
        (423, "7 min 3 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (18_120, "5 h 2 min"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d 0 h"),
        (180_000, "2 d 2 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(duration, told):
    """Tenths below ten seconds; minutes from two on."""
    assert seconds(duration) == told


RUNS = SETTLE._replace(state="running", lease=30.0, expires_in=20.0)


@pytest.mark.parametrize(
    ("holder", "beat", "silent"),
    [
        (RUNS, 0.9, 0.0),
        (RUNS, ALIVE, 0.0),
        (RUNS, 9.0, 9.0),  # renewed ten seconds ago
        (RUNS._replace(expires_in=28.0), 9.0, 0.0),  # renewed after its heartbeat
        (RUNS._replace(expires_in=16.0), 25.0, 14.0),
        (RUNS._replace(lease=0.0), 9.0, 9.0),
        (RUNS, INF, 0.0),  # it has been told to end, and renews what it still runs
        (RUNS._replace(expires_in=16.0), INF, 14.0),
        (RUNS._replace(state="granted"), INF, 0.0),
    ],
)
def test_a_sign_of_life_is_a_heartbeat_or_a_renewal(holder, beat, silent):
    """A warm shutdown ends heartbeats, and not the tasks."""
    assert silent_for(holder, {holder.worker: beat}) == pytest.approx(silent)


def test_a_client_gives_no_signs_of_life():
    assert silent_for(RUNS._replace(worker=""), {}) == 0


def test_a_silent_holder_is_shown_with_the_time_until_the_lock_is_free():
    """Not as one that runs."""
    silent = RUNS._replace(silent=14.2, expires_in=16.0)
    told = "no sign of life for 14 s; if it is dead, free in 16 s at the latest"
    assert named((silent,)) == f"settle[3f2a91c0] on w2@host#1 ({told})"
    view = LockView("account:42", (silent,), fencing_token=1)
    assert f"holder   {named((silent,))}, silent" in detail(Detail(view, ()))
    (row,) = lock_rows([Glance("account:42", 1, holders=(silent,))])
    assert row[-1] == "settle[3f2a91c0] on w2@host#1, silent for 14 s"


def test_the_list_tells_a_granted_task_from_one_that_runs():
    """It waits for a free pool slot; who reads the list would search for it in the worker's log."""
    granted = RUNS._replace(state="granted")
    rows = list(lock_rows([Glance("a", 1, holders=(each,)) for each in (RUNS, granted)]))
    (several,) = lock_rows([Glance("a", 3, limit=3, holders=(RUNS,))])
    assert several[-1] == f"{rows[0][-1]}, and 2 more"
    assert [row[-1].partition("#1")[2] for row in rows] == ["", ", granted"]

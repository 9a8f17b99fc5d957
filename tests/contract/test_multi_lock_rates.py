"""A task with several locks, some with a rate, in the process of a worker."""

from __future__ import annotations

import pytest

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.conflict_policy import Outcome
from celery_singleton_lock.core.lock_set import Key, Names, in_order
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import (
    Claim,
    Ending,
    Owner,
    Reply,
    Verdict,
)
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import Rate, packed
from celery_singleton_lock.errors import LockConflict
from celery_singleton_lock.worker.execution.interrupt import Interrupts
from celery_singleton_lock.worker.execution.multi_lock_tracer import MultiLockTracer
from celery_singleton_lock.worker.execution.task_lock import in_place
from celery_singleton_lock.worker.execution.tracer import LockTracer
from celery_singleton_lock.worker.lock_header import LockHeader, options_of, singles
from celery_singleton_lock.worker.lock_set_header import onward, with_lock_set
from celery_singleton_lock.worker.not_started import NotStarted
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets
from support.passing_time import let_pass

pytestmark = pytest.mark.contract

TO_PARK = MessageToPark(b"body", "R", "q")
HOURLY = (Rate("1/h"),)
BOTH = in_order([Key("a", 9, HOURLY), Key("b", 1)])


@pytest.fixture
def store(make_store):
    """A store with a live worker that takes the messages."""
    store = make_store()
    store.worker_heartbeat("w", "R", ["q"], 600)
    return store


@pytest.fixture
def told():
    return []


@pytest.fixture
def tracer(store, told):
    tracer = LockTracer(lambda: store, told.append, 3600.0, lambda *_: "a", Interrupts)
    tracer.multi_lock_tracer = MultiLockTracer(tracer, lambda: store, told.append, 3600.0)
    return tracer


@pytest.fixture
def enter(tracer):
    """A function that has the process of a worker enter the locks of a delivery."""
    return lambda header, **options: tracer.multi_lock_tracer.enter(
        header, LockOptions(lease=30.0, **options)
    )


def arrives(names=BOTH, **more):
    assert isinstance(names, Names)
    header = LockHeader(str(names), new_token(), f"{new_token()}/0/0", "task", "w", place=1, **more)
    return with_lock_set(header, names)


def holds(store, name):
    who = Owner(new_token())
    assert store.acquire(who, Claim(name, lease=600.0)).verdict is Verdict.GRANTED
    return who


def started(store, name="a"):
    """Return the starts that count, and the holders that have started."""
    view = store.inspect(name)
    return view.rates[0].started, [holder.state for holder in view.holders]


def turned(enter, header, **options):
    with pytest.raises(NotStarted) as error:
        enter(header, **options)
    return error.value


def test_a_start_counts_when_all_locks_are_held(store, enter):
    lock = enter(arrives())
    assert lock.held
    assert started(store) == (1, ["running"])
    assert turned(enter, arrives()).waits_for == "rate"


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_a_task_that_does_not_get_its_next_lock_gives_its_start_back(store, enter, policy):
    other = holds(store, "b")
    with pytest.raises((NotStarted, LockConflict)):
        enter(arrives(), on_conflict=policy)
    assert started(store) == (0, [])
    store.release("b", other.token, Ending.FINAL)
    assert enter(arrives()).held


def test_a_task_that_waits_for_its_next_lock_has_not_started(store, enter):
    """Its start counts as unclaimed, for as long as it waits; others wait for that."""
    holds(store, "b")
    away = turned(enter, arrives())
    assert (away.outcome, away.waits_for) == (Outcome.PARK, "holder")
    assert started(store) == (1, ["granted"])
    assert turned(enter, arrives()).waits_for == "rate"


def parks(store, header):
    """Park the message of a header at the lock for which it waits, as the agent does."""
    at = header.lock_set.at
    one, options = singles(header)[at], options_of(header, at, LockOptions(lease=30.0))
    claim = Claim(one.name, 30.0, options.limit, one.place, copy=int(one.copy), flow=options.flow)
    claim = claim._replace(unanswered=header.granted and header.copy and header.acks_early)
    owner = Owner(one.token, one.attempt, "task", "w")
    assert store.park(owner, claim, TO_PARK).verdict in {Verdict.WAITING, Verdict.TWIN}
    PartialLockSets(store, Watched(), "w", lambda *_: None).leave_previous_queue(header, 30.0)


class Watched:
    """A watchdog that renews nothing."""

    def watch_later(self, *_, **__):
        """Renew nothing."""

    def forget(self, *_, **__):
        """Forget nothing."""


def delivered(store, header):
    """Return the header of the next delivery of a parked message."""
    grant = store.receive("w", 5.0)
    assert (grant.name, grant.verdict) == (header.name, "granted")
    own = header.lock_set.granted(grant.fencing_token)
    return header._replace(granted=True, lock_set=own, announce=True)


@pytest.mark.parametrize("acks_early", [True, False], ids=["early", "late"])
def test_a_task_that_is_parked_at_each_of_its_locks_starts_once(store, enter, acks_early):
    """It keeps the first one, unclaimed, while it waits for the second one."""
    names = in_order([Key("a", 1, (Rate("2/h"),)), Key("b", 1)])
    before, busy = holds(store, "a"), holds(store, "b")
    header = arrives(names, acks_early=acks_early)
    assert turned(enter, header).waits_for == "holder"
    parks(store, header)
    store.release("a", before.token, Ending.FINAL)
    header = delivered(store, header)
    away = turned(enter, header)
    header = onward(header, header.lock_set, away.lock_set)
    assert header.name == "b"
    parks(store, header)
    assert started(store) == (1, ["granted"])
    assert store.inspect("a").bodies == 0
    assert store.inspect("a").holders[0].expires_in > 20
    store.release("b", busy.token, Ending.FINAL)
    lock = enter(delivered(store, header))
    assert lock.held
    assert started(store) == (1, ["running"])


def test_a_task_whose_first_lock_was_lost_while_it_was_parked_starts_over(store, enter):
    """It was taken away, or its worker has died: its start is given back with it."""
    busy, header = holds(store, "b"), arrives()
    away = turned(enter, header)
    header = onward(header, header.lock_set, away.lock_set)
    parks(store, header)
    store.reset("a")
    assert started(store) == (0, [])
    store.release("b", busy.token, Ending.FINAL)
    assert turned(enter, delivered(store, header)).outcome is Outcome.AGAIN


@pytest.mark.parametrize("acks_early", [True, False], ids=["early", "late"])
def test_a_task_whose_process_asks_a_former_master_is_not_lost(
    store, enter, monkeypatch, acks_early
):
    """That one has no trace of the message. The worker itself has reached the new master."""
    names = in_order([Key("a", 1), Key("b", 1)])
    first, header = holds(store, "a"), arrives(names, acks_early=acks_early)
    turned(enter, header)
    parks(store, header)
    store.release("a", first.token, Ending.FINAL)
    header = delivered(store, header)
    with monkeypatch.context() as patch:
        patch.setattr(store, "claim", lambda *_, **__: Reply(Verdict.ABSENT, lost=True))
        assert turned(enter, header).outcome is Outcome.AGAIN
    parks(store, onward(header, header.lock_set, None))
    let_pass(store, 31)  # the grant ends, if it was kept
    store.sweep_and_grant("a", worker="w", realm="R")
    grant = store.receive("w", 1.0)
    assert (grant.name, store.body(grant.name, grant.token)) == ("a", TO_PARK.body)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_lock_that_is_lost_while_the_others_are_acquired_is_noticed_before_the_start(
    store, enter, monkeypatch, lost
):
    """The claim, with which the start counts, finds no lock: no lock stays held."""
    names = in_order([Key("a", 9, HOURLY), Key("b", 9, HOURLY), Key("c", 1)])
    acquire = store.acquire

    def acquired(owner, claim, **more):
        reply = acquire(owner, claim, **more)
        if claim.name == "c":
            store.reset(lost)
        return reply

    monkeypatch.setattr(store, "acquire", acquired)
    assert turned(enter, arrives(names)).outcome is Outcome.PARK
    held = [name for name in "abc" if store.inspect(name).holders]
    assert held == (["a"] if lost == "b" else [])


def test_the_last_lock_counts_its_start_at_once(store, enter):
    """With it, all are held; so a rate costs no further call there."""
    names = in_order([Key("a", 9), Key("b", 1, HOURLY)])
    assert enter(arrives(names)).held
    assert started(store, "b") == (1, ["running"])


def test_a_message_above_the_rate_of_its_second_lock_keeps_the_first(store, enter):
    names = in_order([Key("a", 1), Key("b", 9, HOURLY)])
    lock = enter(arrives(names))
    for each in reversed(lock.locks):
        store.release(each.name, each.token, Ending.FINAL)
    away = turned(enter, arrives(names))
    assert (away.outcome, away.waits_for, away.lock_set.at) == (Outcome.PARK, "rate", 1)
    assert len(store.inspect("a").holders) == 1


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_lock_on_rate_applies_to_each_of_several_locks(store, enter, policy):
    """What was acquired before is released."""
    names = in_order([Key("a", 9), Key("b", 9, HOURLY)])
    assert enter(arrives(names)).held
    with pytest.raises((NotStarted, LockConflict), match="'b' has reached its rate"):
        enter(arrives(names), on_rate=policy)
    assert len(store.inspect("a").holders) == 1


def test_the_process_of_a_task_tells_when_the_next_one_may_start(store, enter, told):
    """Its worker sets a timer: the others need not wait for a sweep."""
    names = in_order([Key("a", 9, (Rate("1/m"),)), Key("b", 9)])
    waiting = arrives(names)
    lock = enter(arrives(names))
    parks(store, waiting)
    assert [each.rates for each in lock.locks] == [(Rate("1/m"),), ()]
    reply = store.release("a", lock.locks[0].token, Ending.FINAL)
    assert reply.waits_for is WaitsFor.RATE


def test_a_cost_counts_when_all_locks_are_held_and_is_given_back_if_they_are_not(store, enter):
    names = in_order([Key("a", 9, (Rate("5/h", cost=3),)), Key("b", 1)])
    other = holds(store, "b")
    with pytest.raises(NotStarted):
        enter(arrives(names), on_conflict="skip")
    assert started(store) == (0, [])
    turned(enter, arrives(names))
    assert started(store) == (3, ["granted"])
    store.reset("a")
    assert started(store) == (0, [])
    store.release("b", other.token, Ending.FINAL)
    assert enter(arrives(names)).held
    assert started(store) == (3, ["running"])
    assert turned(enter, arrives(names)).waits_for == "rate"


# --- without a dispatcher -------------------------------------------------------------------------


def test_locks_that_are_acquired_where_the_task_runs_start_together(store):
    """An eager task, a batch, or a task whose message passed no dispatcher."""
    locks = in_place(store, BOTH, LockOptions(lease=30.0))
    busy = holds(store, "b")
    assert not locks.acquire(blocking_timeout=0.05)
    assert started(store) == (0, [])
    store.release("b", busy.token, Ending.FINAL)
    assert locks.acquire(blocking=False)
    assert started(store) == (1, ["running"])
    locks.release()
    again = in_place(store, BOTH, LockOptions(lease=30.0))
    assert not again.acquire(blocking=False)
    assert again.name == "a"


def test_a_single_lock_that_is_acquired_where_the_task_runs_starts_at_once(store):
    lock = in_place(store, "a", LockOptions(lease=30.0, rate=HOURLY, limit=9))
    assert lock.acquire(blocking=False)
    assert started(store) == (1, ["running"])
    lock.release()


def test_the_rate_of_a_lock_set_is_that_of_its_claims(store):
    """Also for one lock that has a limit and a rate of its own."""
    header = arrives(in_order([Key("a", 9, HOURLY)]))
    assert not singles(header)[0].later
    assert options_of(header, 0, LockOptions()).flow == packed(HOURLY)

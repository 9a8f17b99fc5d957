"""What becomes of a task that asked for its lock: the whole decision as tables."""

from __future__ import annotations

import pickle
from itertools import product
from types import SimpleNamespace

import pytest

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.conflict_policy import (
    Asker,
    Facts,
    Outcome,
    assert_never,
    outcome_of,
    unexpected,
    waits_if_blocked,
)
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Reply, Verdict
from celery_singleton_lock.errors import (
    BackendRefused,
    BackendUnreachable,
    LockUnusable,
    SchemaMismatch,
)
from celery_singleton_lock.worker.not_started import NotStarted, refusal

POOL = Facts(Asker.POOL)
WAITED = Facts(Asker.POOL, waited=True)
GRANTED = Facts(Asker.POOL, granted=True)
FURTHER = Facts(Asker.POOL, further=True)
SENDER_ENDS = Facts(Asker.POOL, sender_ends=True)
QUORUM = Facts(Asker.POOL, keeps_messages=False)
SLOT = Facts(Asker.SLOT)
SLOT_WAITED = Facts(Asker.SLOT, waited=True)
CALLER = Facts(Asker.CALLER)
CALLER_WAITED = Facts(Asker.CALLER, waited=True)
PARKING = Facts(Asker.PARKING)
POLICIES = ("park", "wait", "requeue", "skip", "fail")
BUSY = (Verdict.BLOCKED, Verdict.WAITING, Verdict.RELEASED, Verdict.ABSENT)
"""Answers that mean: not now."""

BLOCKED = {
    # facts:         park           wait                  requeue               skip     fail
    POOL: ("PARK", "WAIT", "REQUEUE", "SKIP", "FAIL"),
    WAITED: ("PARK", "FAIL_TIMEOUT", "REQUEUE", "SKIP", "FAIL"),
    FURTHER: ("PARK", "WAIT", "REQUEUE", "SKIP", "FAIL"),
    SENDER_ENDS: ("PARK", "WAIT", "REQUEUE", "PARK", "PARK"),
    QUORUM: ("REQUEUE", "WAIT", "REQUEUE", "SKIP", "FAIL"),
    GRANTED: ("GONE", "GONE", "GONE", "GONE", "GONE"),
    SLOT: ("WAIT", "WAIT", "WAIT", "SKIP", "FAIL"),
    SLOT_WAITED: ("FAIL_TIMEOUT", "FAIL_TIMEOUT", "FAIL_TIMEOUT", "SKIP", "FAIL"),
    CALLER: ("WAIT", "WAIT", "WAIT", "SKIP", "FAIL"),
    CALLER_WAITED: ("FAIL_TIMEOUT", "FAIL_TIMEOUT", "FAIL_TIMEOUT", "SKIP", "FAIL"),
    PARKING: ("PARK", "PARK", "PARK", "PARK", "PARK"),
}

TWIN = {
    POOL: ("TWIN", "TWIN", "REQUEUE_TWIN", "TWIN", "TWIN"),
    WAITED: ("TWIN", "TWIN", "REQUEUE_TWIN", "TWIN", "TWIN"),
    FURTHER: ("PARK", "TWIN", "REQUEUE_TWIN", "TWIN", "TWIN"),
    QUORUM: ("REQUEUE_TWIN",) * 5,
    GRANTED: ("TWIN",) * 5,
    PARKING: ("TWIN",) * 5,
}

DONE = {
    POOL: ("DONE",) * 5,
    FURTHER: ("PARK", "DONE", "DONE", "DONE", "DONE"),
    QUORUM: ("DONE",) * 5,
    PARKING: ("DONE",) * 5,
}


def rows():
    """Yield policy, verdict, facts and outcome, from the tables above."""
    for verdict, table in [
        *((verdict, BLOCKED) for verdict in BUSY),
        (Verdict.TWIN, TWIN),
        (Verdict.DONE, DONE),
    ]:
        for facts, outcomes in table.items():
            for policy, outcome in zip(POLICIES, outcomes, strict=True):
                yield policy, verdict, facts, Outcome[outcome]
    for policy, facts in product(POLICIES, BLOCKED):
        yield policy, Verdict.GRANTED, facts, Outcome.RUN


@pytest.mark.parametrize(("policy", "verdict", "facts", "outcome"), list(rows()))
def test_what_becomes_of_a_task_follows_from_policy_answer_and_facts(
    policy, verdict, facts, outcome
):
    assert outcome_of(LockOptions(on_conflict=policy), Reply(verdict), facts) is outcome


@pytest.mark.parametrize("facts", [POOL, SLOT, CALLER, PARKING])
@pytest.mark.parametrize(
    ("on_full", "outcome"),
    [
        ("fail", Outcome.FAIL_FULL),
        ("skip", Outcome.SKIP_FULL),
        ("replace", Outcome.FAIL_FULL),
    ],
)
def test_a_task_that_finds_the_queue_full_is_handled_by_lock_on_full(facts, on_full, outcome):
    full = Reply(Verdict.FULL)
    assert outcome_of(LockOptions(on_full=on_full), full, facts) is outcome
    assert outcome_of(LockOptions(on_full=on_full), full, GRANTED) is Outcome.GONE


def test_a_task_that_lost_a_kept_lock_starts_again():
    assert outcome_of(LockOptions(), None, GRANTED) is Outcome.AGAIN


UNREACHABLE, REFUSED, UNUSABLE = BackendUnreachable("away"), BackendRefused("full"), LockUnusable()
WITHOUT_REDIS = [
    # policy, error, facts, outcome
    ("retry", UNREACHABLE, POOL, "UNAVAILABLE"),
    ("retry", REFUSED, POOL, "UNAVAILABLE"),
    ("retry", SchemaMismatch(), POOL, "UNAVAILABLE"),
    ("retry", UNUSABLE, POOL, "REFUSED"),
    ("retry", UNUSABLE, GRANTED, "REFUSED"),
    ("retry", UNREACHABLE, SLOT, "WAIT"),
    ("retry", UNREACHABLE, SLOT_WAITED, "FAIL_BACKEND"),
    ("retry", REFUSED, SLOT, "FAIL_BACKEND"),
    ("retry", UNUSABLE, SLOT, "FAIL_BACKEND"),
    ("retry", UNREACHABLE, CALLER, "FAIL_BACKEND"),
    *(
        (policy, error, facts, outcome)
        for policy, outcome in [("run", "RUN_UNLOCKED"), ("fail", "FAIL_BACKEND")]
        for error in (UNREACHABLE, UNUSABLE)
        for facts in (POOL, SLOT, SLOT_WAITED, CALLER)
    ),
    *(
        (policy, error, facts, outcome)
        for policy in ("retry", "run", "fail")
        for facts in (PARKING, GRANTED)
        for error, outcome in [(UNREACHABLE, "UNAVAILABLE"), (UNUSABLE, "REFUSED")]
    ),
]


@pytest.mark.parametrize(("policy", "error", "facts", "outcome"), WITHOUT_REDIS)
def test_without_redis_a_task_is_handled_by_lock_on_backend_error(policy, error, facts, outcome):
    """A message that is parked, or is to be, stays with its worker, whatever the policy is."""
    options = LockOptions(on_backend_error=policy)
    assert outcome_of(options, error, facts) is Outcome[outcome]


def test_a_blocked_task_waits_unless_it_is_skipped_or_fails():
    waiting = [policy for policy in POLICIES if waits_if_blocked(LockOptions(on_conflict=policy))]
    assert waiting == ["park", "wait", "requeue"]


@pytest.mark.parametrize("verdict", [Verdict.BLOCKED, Verdict.FULL, Verdict.TWIN, Verdict.DONE])
def test_a_task_that_preempts_is_parked_as_any_other(verdict):
    """The script that parks it decides what it replaces."""
    for facts in (POOL, GRANTED, SLOT, CALLER, PARKING):
        policies = (LockOptions(on_conflict=each) for each in ("park", "preempt"))
        park, preempt = (outcome_of(each, Reply(verdict), facts) for each in policies)
        assert park is preempt


RUNS_OR_WAITS = [
    Outcome.RUN,
    Outcome.RUN_UNLOCKED,
    Outcome.WAIT,
    Outcome.FAIL_BACKEND,
    Outcome.UNAVAILABLE,
    Outcome.REFUSED,
    Outcome.LATER,
    Outcome.SKIP_DEBOUNCED,
    Outcome.SKIP_PREEMPTED,
    Outcome.SKIP_FOLLOWING,
    Outcome.FOLLOW,
]


@pytest.mark.parametrize("outcome", [each for each in Outcome if each not in RUNS_OR_WAITS])
def test_each_refusal_reaches_the_main_process_as_it_was_made(outcome):
    """A pool child sends it by pickle."""
    made = refusal(
        outcome,
        "k:1",
        LockOptions(wait_timeout=2.0),
        Reply(Verdict.BLOCKED, rank=3, excess="9 5 60000000 0"),
    )
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), again.args) == (type(made), made.args)
    if isinstance(again, NotStarted):
        assert again.outcome is outcome


@pytest.mark.parametrize("outcome", RUNS_OR_WAITS)
def test_an_outcome_that_is_no_refusal_makes_none(outcome):
    with pytest.raises(ValueError, match="cannot arise"):
        refusal(outcome, "k:1", LockOptions())


def test_an_unhandled_outcome_is_named():
    """Where the type checker was not asked."""
    with pytest.raises(AssertionError, match="unhandled: 7"):
        assert_never(7)
    assert "Outcome.RUN" in str(unexpected(Outcome.RUN))
    assert outcome_of(SimpleNamespace(on_conflict="skip"), Reply(Verdict.BLOCKED), POOL) is (
        Outcome.SKIP
    )


ABOVE_RATE = {
    # facts:         park           skip     fail
    POOL: ("PARK", "SKIP", "FAIL"),
    SLOT: ("WAIT", "SKIP", "FAIL"),
    CALLER: ("WAIT", "SKIP", "FAIL"),
    CALLER_WAITED: ("FAIL_TIMEOUT", "SKIP", "FAIL"),
    GRANTED: ("GONE", "GONE", "GONE"),
    PARKING: ("PARK", "PARK", "PARK"),
}


@pytest.mark.parametrize("on_conflict", ["park", "skip", "fail"])
@pytest.mark.parametrize("facts", ABOVE_RATE, ids=str)
def test_above_its_rate_a_task_does_what_lock_on_rate_says(facts, on_conflict):
    """Whatever it does if the lock is held."""
    reply = Reply(Verdict.BLOCKED, waits_for=WaitsFor.RATE)
    outcomes = [
        outcome_of(LockOptions(on_conflict=on_conflict, on_rate=on_rate), reply, facts).name
        for on_rate in ("park", "skip", "fail")
    ]
    assert tuple(outcomes) == ABOVE_RATE[facts]


def test_below_its_rate_lock_on_rate_does_not_count():
    policy = LockOptions(on_conflict="park", on_rate="skip")
    reply = Reply(Verdict.BLOCKED, waits_for=WaitsFor.HOLDER)
    assert outcome_of(policy, reply, POOL) is Outcome.PARK

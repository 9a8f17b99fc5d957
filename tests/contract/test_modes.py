"""Records of tasks that run without their locks, and the delivery of parked ones."""

from __future__ import annotations

import dataclasses
import random

import pytest

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_view import WaitsFor
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import packed
from celery_singleton_lock.core.settle import Settle
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.store.redis.sync import RedisStore
from celery_singleton_lock.store.scripts import load_scripts

pytestmark = pytest.mark.contract

NAME = "account:42"

CLOCK = "local function server_time() return redis.call('GET', 'test:clock') end\n"
"""Replaces the server's clock by one that the test turns."""


class Line:
    """Tasks that run without their lock, on a clock that is turned by hand; seconds."""

    def __init__(self, client):
        self.client = client
        self.store = RedisStore(client, scripts=load_scripts(CLOCK))
        self.begun = {}
        self.at(0.0)

    def at(self, seconds):
        self.now = seconds
        self.client.set("test:clock", 1_700_000_000_000_500 + round(seconds * 1000) * 1000)

    def begin(  # the options of a call
        self, who, *, at, limit=1, waits=True, name=NAME, group=None, settle=None, retries=0
    ):
        """Start a run; return the tasks that would have held the lock."""
        self.at(at)
        owner = Owner(new_token(), f"{who}/{retries}/0", "settle", "w#1")
        flow = packed((), group=group, settle=settle)
        self.begun[who] = (at, owner, Claim(name, limit=limit, flow=flow), waits)
        blocked = self.store.record_observation(owner, self.begun[who][2], waits=waits)
        self.waits_for = blocked and blocked.waits_for
        return blocked and blocked.holder

    def end(self, who, *, at):
        self.at(at)
        began, owner, claim, waits = self.begun.pop(who)
        assert self.store.record_observation(owner, claim, waits=waits, took=at - began) is None

    def replaced(self):
        """Return how many runs a later one would have replaced, by the task, and by the lock."""
        (task,), locks = self.store.observations().tasks, self.store.observations().locks
        return task.replaced, sum(lock.replaced for lock in locks)

    def sums(self):
        """Return (runs, blocked, seconds waited, longest) of the task."""
        (task,) = self.store.observations().tasks
        assert task.name == "settle"
        return task.runs, task.blocked, round(task.waited, 3), round(task.longest, 3)


@pytest.fixture
def line(lock_client):
    return Line(lock_client)


def test_what_a_paused_lock_would_have_held_back_is_counted(line):
    """The end is unknown: until an operator resumes it. Later tasks are not blocked."""
    operators = RedisAdminStore(line.client, scripts=load_scripts(CLOCK))
    operators.pause(NAME, Operator("jane"))
    assert line.begin("a", at=0) is not None
    assert line.waits_for is WaitsFor.PAUSE
    line.end("a", at=1)
    operators.resume(NAME, Operator("jane"))
    assert line.begin("b", at=2) is None
    line.end("b", at=3)
    (task,), (lock,) = line.store.observations().tasks, line.store.observations().locks
    assert (task.runs, task.blocked, task.paused, task.waited) == (2, 1, 1, 0.0)
    assert (lock.blocked, lock.paused) == (1, 1)


def test_an_operators_limit_counts_for_who_is_observed(line):
    """Another task holds the lock: with two permits the observed task has no conflict."""
    operators = RedisAdminStore(line.client, scripts=load_scripts(CLOCK))
    held = Owner(new_token(), "", "app.task")
    assert operators.acquire(held, Claim(NAME)).verdict is Verdict.GRANTED
    assert line.begin("a", at=0) is not None
    assert line.waits_for is WaitsFor.HOLDER
    line.end("a", at=0.1)
    operators.set_limit(NAME, 2, Operator("jane"))
    assert line.begin("b", at=1) is None


def test_a_run_without_overlap_would_not_have_waited(line):
    """Only its digest is stored."""
    for at in (0, 5):
        assert line.begin("a", at=at) is None
        line.end("a", at=at + 5)
    assert line.sums() == (2, 0, 0.0, 0.0)
    assert line.store.observations().locks == ()
    keys = {key.decode() for key in line.client.scan_iter("csl:*")}
    assert len(keys) == 1, keys


def test_a_short_run_would_have_waited_for_the_long_one_before_it(line):
    """Although it ended first: the order of the starts decides."""
    line.begin("long", at=0)
    holder = line.begin("short", at=10)
    assert (holder.task, holder.task_id, holder.worker) == ("settle", "long", "w#1")
    line.end("short", at=11)
    assert line.sums() == (2, 0, 0.0, 0.0), "not decided: the long one may end at any time"
    line.end("long", at=100)
    assert line.sums() == (2, 1, 90.0, 90.0)


def test_waits_add_up_behind_those_that_would_have_waited_too(line):
    """Three tasks of 10 s that start at once would have ended at 10, 20 and 30 s."""
    for who in "abc":
        line.begin(who, at=0)
    for who in "abc":
        line.end(who, at=10)
    assert line.sums() == (3, 2, 30.0, 20.0)
    assert line.begin("d", at=12) is not None, "c would still wait for its turn"
    line.end("d", at=13)
    assert line.sums() == (4, 3, 48.0, 20.0)


def test_permits_are_as_many_as_the_limit(line):
    """With two, the third waits for the first that ends."""
    assert line.begin("a", at=0, limit=2) is None
    assert line.begin("b", at=1, limit=2) is None
    assert line.begin("c", at=2, limit=2) is not None
    line.end("b", at=5)
    assert line.sums() == (3, 1, 3.0, 3.0)
    line.end("c", at=6)
    line.end("a", at=50)
    assert line.sums() == (3, 1, 3.0, 3.0)


A, B = Group("a", 1), Group("b", 2)


def test_a_run_would_have_waited_while_its_group_is_at_its_limit(line):
    """The other groups would not have waited for it."""
    assert line.begin("a1", at=0, limit=3, group=A) is None
    assert line.begin("a2", at=1, limit=3, group=A) is not None
    assert line.waits_for is WaitsFor.GROUP
    for who in ("b1", "b2"):
        assert line.begin(who, at=2, limit=3, group=B) is None
    assert line.begin("b3", at=3, limit=3, group=B) is not None
    assert line.waits_for is WaitsFor.HOLDER, "two of b and one of a hold it"
    assert line.sums() == (5, 0, 0.0, 0.0), "not decided"
    line.end("a1", at=5)
    assert line.sums() == (5, 1, 4.0, 4.0), "a2 would have started, and then b3 waits for its group"
    line.end("b1", at=8)
    assert line.sums() == (5, 2, 9.0, 5.0)
    for who in ("a2", "b2", "b3"):
        line.end(who, at=9)
    assert line.sums() == (5, 2, 9.0, 5.0)


def test_a_group_would_wait_for_its_runs_that_would_have_waited(line):
    """Three runs of 10 s that start at once; another group has the other permits."""
    for who in ("a1", "a2", "a3"):
        line.begin(who, at=0, limit=3, group=A)
    for who in ("a1", "a2", "a3"):
        line.end(who, at=10)
    assert line.sums() == (3, 2, 30.0, 20.0)
    assert line.begin("b1", at=12, limit=3, group=B) is None
    assert line.begin("a4", at=12, limit=3, group=A) is not None
    assert line.waits_for is WaitsFor.GROUP
    assert line.sums() == (5, 3, 48.0, 20.0), "though b1 has not ended"
    line.end("b1", at=13)
    line.end("a4", at=13)
    assert line.begin("a5", at=40, limit=3, group=A) is None


def test_a_run_that_its_group_would_have_skipped_makes_no_other_wait(line):
    line.begin("a1", at=0, limit=2, group=A)
    assert line.begin("a2", at=1, limit=2, group=A, waits=False) is not None
    assert line.waits_for is WaitsFor.GROUP
    assert line.begin("b1", at=2, limit=2, group=B) is None
    assert line.sums() == (3, 1, 0.0, 0.0)
    line.end("a1", at=3)
    assert line.begin("a3", at=3, limit=2, group=A) is None


def test_a_run_that_would_be_skipped_waits_for_what_its_lock_waits_for(line):
    """The lock is held, and the group has room."""
    line.begin("a1", at=0, group=A)
    assert line.begin("b1", at=1, group=B, waits=False) is not None
    assert line.waits_for is WaitsFor.HOLDER
    line.end("a1", at=2)
    assert line.sums() == (2, 1, 0.0, 0.0)


def test_a_task_that_would_be_skipped_makes_no_other_wait(line):
    """A task that skips or fails is counted as blocked, and not put into the line."""
    line.begin("a", at=0)
    assert line.begin("b", at=1, waits=False) is not None
    line.end("a", at=2)
    assert line.begin("c", at=3) is None
    line.end("c", at=4)
    line.end("b", at=60)
    assert line.sums() == (3, 1, 0.0, 0.0)


def test_an_actual_holder_counts_as_an_overlap(line):
    """Tasks with the same lock may have different modes; the holder is not affected."""
    line.at(0)
    holder = Owner(new_token(), "id/0/0", "keeper", "w#2")
    assert line.store.acquire(holder, Claim(NAME)).verdict is Verdict.GRANTED
    met = line.begin("a", at=1)
    assert (met.task, met.task_id) == ("keeper", "id")
    line.end("a", at=2)
    assert line.sums() == (1, 1, 0.0, 0.0)
    line.at(3)
    assert [each.token for each in line.store.inspect(NAME).holders] == [holder.token]


def test_a_run_without_an_end_counts_as_dead_after_an_hour(line):
    """It was killed; its waiters are decided then."""
    line.begin("killed", at=0)
    line.begin("b", at=10)
    line.end("b", at=11)
    assert line.sums()[1] == 0
    line.begin("c", at=3700)
    assert line.sums()[:2] == (3, 1)


@pytest.mark.parametrize("limit", [1, 3])
def test_the_waits_are_those_of_a_queue_in_order_of_arrival(line, limit):
    """Against a plain calculation, over runs of random starts and lengths."""
    dice = random.Random(limit)
    runs, at = [], 0.0
    for number in range(60):
        at += dice.randrange(1, 2000) / 1000
        runs.append((at, at + dice.randrange(1, 5000) / 1000, str(number)))
    steps = sorted([(b, "begin", w) for b, _, w in runs] + [(e, "end", w) for _, e, w in runs])
    for when, what, who in steps:
        line.begin(who, at=when, limit=limit) if what == "begin" else line.end(who, at=when)
    free, waits = [0.0] * limit, []
    for begin, end, _ in runs:
        free.sort()
        begins = max(begin, free[0])
        free[0] = begins + end - begin
        waits.append(begins - begin)
    total, blocked, waited, longest = line.sums()
    assert (total, blocked) == (60, sum(wait > 1e-6 for wait in waits))
    assert waited == pytest.approx(sum(waits), abs=0.2)  # a millisecond each
    assert longest == pytest.approx(max(waits), abs=0.05)


# -- debounce --------------------------------------------------------------------------------------

QUIET = Settle(5.0)


def burst(line, *calls, settle=QUIET, took=1):
    """Run calls that begin at these seconds; return whom each would have replaced."""
    found = []
    for who, at in calls:
        replaced = line.begin(who, at=at, settle=settle)
        found.append(replaced and replaced.task_id)
        assert line.waits_for is (WaitsFor.SETTLING if replaced else None)
        line.end(who, at=at + took)
    return found


def test_runs_that_a_later_call_would_have_replaced_are_counted(line):
    """They would not have run, so they would have blocked nobody."""
    assert burst(line, ("a", 0), ("b", 3), ("c", 6), ("d", 20)) == [None, "a", "b", None]
    assert line.sums() == (4, 0, 0, 0)
    assert line.replaced() == (2, 2)


def test_runs_that_overlap_are_not_blocked_by_those_that_would_have_been_replaced(line):
    assert burst(line, ("a", 0), ("b", 1), ("c", 2), took=0) == [None, "a", "b"]
    line.begin("d", at=3, settle=QUIET)
    line.begin("e", at=4, settle=QUIET)
    line.end("d", at=50)
    line.end("e", at=60)
    assert line.sums() == (5, 0, 0, 0)
    assert line.replaced() == (4, 4)


def test_a_run_takes_its_place_when_it_would_have_settled(line):
    line.begin("a", at=0, settle=QUIET)
    assert line.begin("plain", at=4) is None, "it would have come first"
    line.end("a", at=3)
    line.end("plain", at=8)
    assert line.begin("later", at=9) is not None, "a would have begun at 8"
    line.end("later", at=10)
    assert line.sums() == (3, 2, 3 + 2, 3)


def test_the_newest_of_a_steady_stream_would_have_run_after_the_maximum(line):
    calls = [(str(at), at) for at in range(0, 20, 2)]
    found = burst(line, *calls, settle=Settle(5.0, most=9.0), took=0)
    assert found == [None, "0", "2", "4", "6", None, "10", "12", "14", "16"]


def test_the_first_call_after_a_quiet_period_would_have_run_at_once(line):
    run_first = Settle(5.0, run_first=True)
    assert burst(line, ("a", 0), ("b", 2), ("c", 4), settle=run_first) == [None, None, "b"]
    assert burst(line, ("d", 20), ("e", 21), settle=run_first) == [None, None]
    assert line.replaced() == (1, 1)


def test_a_retry_would_have_replaced_nothing(line):
    burst(line, ("a", 0))
    assert line.begin("a", at=2, settle=QUIET, retries=1) is None
    assert line.replaced() == (0, 0)


def test_calls_of_different_tasks_and_locks_would_have_settled_apart(line):
    burst(line, ("a", 0))
    assert line.begin("b", at=1, settle=QUIET, name="other") is None
    other = Owner(new_token(), "c/0/0", "other", "w#1")
    claim = Claim(NAME, flow=packed((), settle=QUIET))
    assert line.store.record_observation(other, claim, waits=True) is None


DEBOUNCE_MUTANTS = {
    "replaced runs stay": ("  last.entry = entry\n", "  last.entry = older or entry\n"),
    "replaced runs are not counted": ("    report.replaced(older)\n", ""),
    "it takes its place at once": ("entry.start, last.entry = entry.till, nil", "last.entry = nil"),
    "the end of a settling run is not noted": (
        "if entry and entry.token == token and took then",
        "if false then",
    ),
    "the maximum is ignored": ("if most_ms > 0 then entry.till", "if false then entry.till"),
    "the maximum counts from the last call": ("older and older.from or now", "now"),
    "the first one settles": ("run_first == 1 and was_quiet", "false"),
    "the first one runs always": ("run_first == 1 and was_quiet", "run_first == 1"),
    "a retry settles": ("string.find(entry.attempt, '/0/%d+$')", "true"),
}


@pytest.mark.parametrize("name", DEBOUNCE_MUTANTS)
def test_a_wrong_line_about_debounce_is_noticed(lock_client, name):
    old, new = DEBOUNCE_MUTANTS[name]
    line = Line(lock_client)
    scripts = line.store.operations.scripts
    script = scripts["record_observation"]
    assert old in script.text
    scripts["record_observation"] = dataclasses.replace(script, text=script.text.replace(old, new))
    with pytest.raises(AssertionError):
        play_bursts(line)


def play_bursts(line):
    for play in (
        test_runs_that_a_later_call_would_have_replaced_are_counted,
        test_a_run_takes_its_place_when_it_would_have_settled,
        test_the_newest_of_a_steady_stream_would_have_run_after_the_maximum,
        test_the_first_call_after_a_quiet_period_would_have_run_at_once,
        test_a_retry_would_have_replaced_nothing,
    ):
        line.client.flushall()
        play(line)


# -- the report ------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.not_in_memory("ten thousand calls take minutes there")
def test_the_report_is_bounded_and_expires(line):
    """Of very many locks those are kept that would have blocked most often; all keys expire."""
    for name in ("hot", "x" * 5000, *(f"cold{n}" for n in range(2500))):
        for _ in range(3 if name == "hot" else 1):
            line.begin("a", at=line.now, name=name)
            line.begin("b", at=line.now + 0.001, name=name)
            line.end("a", at=line.now + 0.001)
            line.end("b", at=line.now + 0.001)
    report = line.store.observations()
    assert 1000 < len(report.locks) <= 64 * 32
    assert {lock.name: lock.blocked for lock in report.locks}["hot"] >= 3
    assert max(len(lock.name) for lock in report.locks) <= 200
    assert report.tasks[0].blocked > 2500
    keys = list(line.client.scan_iter("csl:*"))
    assert all(line.client.ttl(key) > 0 for key in keys)
    line.store.clear_observations()
    assert line.store.observations().tasks == ()


# -- parked messages of tasks that do not keep their locks any more --------------------------------


def parked(line, who, task="settle", realm="R", name=NAME):
    owner = Owner(new_token(), f"{who}/0/0", task, "w")
    kept = line.store.park(owner, Claim(name), MessageToPark(who.encode(), realm, "q"))
    assert kept.verdict is Verdict.WAITING
    return owner


def let_run(line, *tasks, most=10, realm="R", worker="w"):
    return line.store.deliver_unlocked([NAME], tasks, most, worker=worker, realm=realm)


@pytest.fixture
def held(line):
    """A held lock, and a live worker."""
    holder = Owner(new_token(), "holder/0/0", "settle", "w")
    line.store.acquire(holder, Claim(NAME, lease=3000))
    line.store.worker_heartbeat("w", "R", ["q"], 3000.0)
    return holder


def received(line, worker="w"):
    bodies = []
    while (delivery := line.store.receive(worker, 0.01)) is not None:
        bodies.append(delivery.body.decode())
    return bodies


def test_parked_messages_of_a_task_are_delivered_beside_the_holder(line, held):
    """In their order, at most as many as asked; each holds, so that it is not lost."""
    owners = [parked(line, who) for who in "abc"]
    assert let_run(line, "settle", most=2) == 2
    assert received(line) == ["a", "b"]
    view = line.store.inspect(NAME)
    assert {each.token for each in view.holders} == {
        held.token,
        owners[0].token,
        owners[1].token,
    }
    assert (view.waiting, view.bodies) == (1, 3)
    for owner in owners[:2]:
        claimed = line.store.claim(owner, NAME, 30.0, acks_early=True)
        assert claimed.verdict is Verdict.GRANTED
        line.store.release(NAME, owner.token, Ending.FINAL)
    assert line.store.inspect(NAME).waiting == 1, "the lock is kept for all others"


def test_one_that_is_let_run_and_dies_with_its_worker_is_not_lost(line, held):
    """Its grant expires, and its message returns to its old place."""
    parked(line, "a")
    assert let_run(line, "settle") == 1
    line.at(10)
    line.store.sweep_and_grant(NAME)
    view = line.store.inspect(NAME)
    assert (view.waiting, view.bodies, len(view.holders)) == (1, 1, 1)


@pytest.mark.parametrize(
    "case", [{"tasks": ["other"]}, {"tasks": ["settle"], "realm": "S"}, {"tasks": []}]
)
def test_others_stay_parked(line, held, case):
    """Of another task, which keeps its lock, or of another broker."""
    parked(line, "a")
    assert (
        line.store.deliver_unlocked(
            [NAME], case["tasks"], 5, worker="w", realm=case.get("realm", "R")
        )
        == 0
    )
    assert line.store.inspect(NAME).waiting == 1


def test_a_message_without_a_consumer_stays_parked(line):
    """Until a live worker consumes the queue."""
    line.store.acquire(Owner(new_token(), "h/0/0"), Claim(NAME, lease=3000))
    parked(line, "a")
    assert let_run(line, "settle") == 0
    view = line.store.inspect(NAME)
    assert view.waiting + view.adrift == 1


def test_locks_with_waiters_are_found(line, held):
    """And none without waiters."""
    assert list(line.store.waited_for()) == []
    parked(line, "a")
    assert list(line.store.waited_for()) == [NAME]


def test_mode_switches_are_sent_with_each_heartbeat(line):
    """So that it costs no command of its own."""
    assert line.store.worker_heartbeat("w", "R", ["q"], 3.0) == {}
    line.store.switch("*", "off")
    line.store.switch("settle", "observe")
    assert line.store.worker_heartbeat("w", "R", ["q"], 3.0) == {"*": "off", "settle": "observe"}
    line.store.switch("*", None)
    assert line.store.switches() == {"settle": "observe"}

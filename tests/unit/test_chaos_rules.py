"""The rules of the storm find what is wrong, and nothing else, in histories made by hand."""

from __future__ import annotations

import pytest

from celery_singleton_lock.store.worker_operations import DEFER
from celery_singleton_lock.worker.agent.loop import BEAT
from chaos.__main__ import excerpts
from chaos.fault_plan import KILLS_AND_STOPS, plan
from chaos.fenced_register import Register
from chaos.history import History
from chaos.rules import FAULT_OF_CELERY, RULES, SAFETY, unsettled, violations_of
from chaos.rules import IDLE as LONGEST_IDLE
from chaos.storm import Report

LIMIT = "at most the limit believe that they hold a lock"
TWINS = "no attempt runs beside itself"
FENCES = "fencing tokens grow"
LOSS = "a lock is lost only for a cause"
LATE_WRITE = "the register refuses whoever was succeeded"
REFUSED = "no holder is refused"
UNFINISHED = "every published task reaches a final state"
NEVER_RUN = "a task that succeeded has run to its end"
AGAIN = "what has ended runs again only for a cause"
IDLE = "nothing waits beside a free lock"
DIED = "no worker dies of itself"
KEYS = "no key is left"
COMPLAINT = "the library logs no failure of its own"

RATE = "no period has more starts than the rate"
GROUP = "at most the limit of a group hold its lock"
NEWEST = "only older calls are replaced"
DUPLICATE = "what a call was a duplicate of had not ended"

MAIN = 1


class Story:
    """Events in order; times are in seconds."""

    def __init__(self):
        self.events = []

    def note(self, t, event, pid=0, **facts):
        self.events.append({"e": event, "t": t, "pid": pid, **facts})
        return self

    def run(self, run, begin, end=None, *, fence=0, pid=10, key="a", until=None, limit=1, **facts):
        """A body, in a child of the worker whose main process is ``MAIN``; of ``locks``, or one."""
        facts = {"id": f"task-{run}", "attempt": 0, "main": MAIN, "worker": "w", **facts}
        facts.setdefault("locks", {key: [fence, limit]})
        until = begin + 3 if until is None else until
        self.note(begin - 0.01, "asks", pid, id=facts["id"])
        self.note(begin, "start", pid, run=run, until=until, **facts)
        if end is not None:
            self.note(end, "end", pid, run=run)
            self.note(end + 0.01, "left", pid, id=facts["id"])
        return self

    def published(self, t, task_id, *, received=True, **facts):
        facts = {"task": "early", "key": "a", "late": False, "after": None, **facts}
        if received:
            self.note(t + 0.01, "received", 1, id=task_id, attempt=0)
        return self.note(t, "published", id=task_id, **facts)

    def looks(self, begin, end, **free):
        """A look at the locks each tenth of a second."""
        for n in range(round((end - begin) * 10) + 1):
            self.note(begin + n / 10, "look", free=free)
        return self

    def broken(self):
        return [violation.rule for violation in violations_of(History(self.events))]


@pytest.fixture
def story():
    return Story()


def test_an_empty_history_is_a_good_one(story):
    assert story.broken() == []


# --- at most the limit ----------------------------------------------------------------------------


def test_one_after_the_other_is_fine(story):
    story.run("one", 1, 2, fence=1).run("two", 2.001, 3, fence=2, pid=11)
    assert story.broken() == []


def test_two_at_once_are_one_too_many(story):
    story.run("one", 1, 2, fence=1).run("two", 1.5, 3, fence=2, pid=11)
    assert story.broken() == [LIMIT]


def test_locks_do_not_exclude_each_other(story):
    story.run("one", 1, 2, fence=1).run("two", 1.5, 3, fence=2, pid=11, key="b")
    assert story.broken() == []


def test_three_may_share_a_lock_of_three_and_four_may_not(story):
    for n in range(3):
        story.run(f"r{n}", 1 + n / 10, 2, fence=n + 1, pid=10 + n, limit=3)
    assert story.broken() == []
    story.run("r4", 1.5, 2, fence=9, pid=20, limit=3)
    assert story.broken() == [LIMIT]


def test_a_long_body_holds_its_lock_beyond_the_first_lease(story):
    """Nothing had stood still, so its worker should have renewed it."""
    story.run("one", 1, 9, fence=1, until=4).run("two", 5, 6, fence=2, pid=11)
    assert story.broken() == [LIMIT]


@pytest.mark.parametrize("stopped", [10, MAIN], ids=["its process", "its worker"])
def test_a_paused_holder_believes_until_its_lease_ends(story, stopped):
    story.note(1.5, "stop", victims=[stopped]).note(7, "cont", victims=[stopped])
    story.run("one", 1, 9, fence=1, until=4).run("two", 4.1, 5, fence=2, pid=11, main=2)
    assert story.broken() == []


def test_a_paused_holder_that_is_succeeded_too_early_is_an_overlap(story):
    story.note(1.5, "stop", victims=[10]).note(7, "cont", victims=[10])
    story.run("one", 1, 9, fence=1, until=4).run("two", 3.5, 3.9, fence=2, pid=11, main=2)
    assert story.broken() == [LIMIT]


def test_a_paused_holder_that_renewed_believes_again(story):
    story.note(1.5, "stop", victims=[10]).note(2, "cont", victims=[10])
    story.note(2.1, "held", 10, run="one", until=5.1)
    story.run("one", 1, 9, fence=1, until=4).run("two", 5, 5.05, fence=2, pid=11, main=2)
    assert story.broken() == [LIMIT]


def test_a_pause_of_another_worker_is_no_excuse(story):
    story.note(1.5, "stop", victims=[99]).note(7, "cont", victims=[99])
    story.run("one", 1, 9, fence=1, until=4).run("two", 4.1, 5, fence=2, pid=11)
    assert story.broken() == [LIMIT]


def test_leases_end_while_redis_is_away(story):
    story.note(1.5, "away").note(6, "back")
    story.run("one", 1, 9, fence=1, until=4).run("two", 6.1, 7, fence=2, pid=11)
    assert story.broken() == []


def test_a_reported_loss_ends_the_belief(story):
    story.note(1.5, "away").note(6, "back").note(6.05, "lost", 10, run="one")
    story.run("one", 1, 9, fence=1, until=8).run("two", 6.1, 7, fence=2, pid=11)
    assert story.broken() == []


def test_the_dead_believe_nothing(story):
    story.run("one", 1, fence=1).note(1.5, "kill", victim=10)
    story.run("two", 1.6, 2, fence=2, pid=11)
    assert story.broken() == []


def test_what_a_dying_process_still_noted_it_did(story):
    story.run("one", 1, fence=1).note(1.5, "kill", victim=10).note(
        1.7, "held", 10, run="one", until=4
    )
    story.run("two", 1.6, 2, fence=2, pid=11)
    assert LIMIT in story.broken()


def test_one_that_was_last_seen_alive_is_dead_after_that(story):
    story.run("one", 1, fence=1).note(1.9, "gone", victim=10, seen=1.5)
    story.run("two", 1.6, 2, fence=2, pid=11)
    assert story.broken() == []


def test_who_runs_still_believes(story):
    story.run("one", 1, fence=1).run("two", 1.6, 2, fence=2, pid=11)
    assert story.broken() == [LIMIT]


# --- several locks --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a", "b"])
def test_a_task_of_several_locks_excludes_who_has_one_of_them(story, key):
    story.run("both", 1, 2, locks={"a": [1, 1], "b": [2, 1]})
    story.run("one", 1.5, 3, fence=9, key=key, pid=11)
    assert story.broken() == [LIMIT]


def test_tasks_that_share_one_of_several_locks_exclude_each_other_once(story):
    story.run("ab", 1, 2, locks={"a": [1, 1], "b": [2, 1]})
    story.run("bc", 1.5, 3, locks={"b": [3, 1], "c": [4, 1]}, pid=11)
    assert story.broken() == [LIMIT]


def test_tasks_that_share_none_of_several_locks_do_not_exclude_each_other(story):
    story.run("ab", 1, 2, locks={"a": [1, 1], "b": [2, 1]})
    story.run("cd", 1.5, 3, locks={"c": [3, 1], "d": [4, 1]}, pid=11)
    assert story.broken() == []


def test_each_of_several_locks_has_its_own_limit(story):
    for n, key in enumerate("abc"):
        story.run(key, 1 + n / 10, 2, locks={key: [n, 1], "t": [n + 1, 3]}, pid=10 + n)
    assert story.broken() == []
    story.run("single", 1.5, 2, fence=9, key="t", limit=3, pid=20)
    assert story.broken() == [LIMIT]


def test_who_was_passed_at_a_lock_that_it_kept_is_seen(story):
    """It had a before the other, and ran after it: so a was not kept while it waited for b."""
    story.run("passed by", 1, 2, fence=6).run("kept", 3, 4, locks={"a": [5, 1], "b": [9, 1]})
    assert story.broken() == [FENCES]


def test_a_loss_of_one_of_several_locks_without_a_cause_is_seen(story):
    story.run("ab", 1, 2, locks={"a": [1, 1], "b": [2, 1]}).note(1.5, "lost", 10, run="ab")
    assert story.broken() == [LOSS]


# --- twins, fences, losses ------------------------------------------------------------------------


def test_two_copies_of_an_attempt_may_not_share_a_lock_of_three(story):
    story.run("one", 1, 2, fence=1, limit=3, id="same")
    story.run("two", 1.5, 2, fence=2, limit=3, id="same", pid=11)
    assert story.broken() == [TWINS]


def test_a_retry_is_another_attempt(story):
    story.run("one", 1, 2, fence=1, limit=3, id="same")
    story.run("two", 1.5, 2, fence=2, limit=3, id="same", attempt=1, pid=11)
    assert story.broken() == []


def test_a_fence_that_falls_is_seen(story):
    story.run("one", 1, 2, fence=7).run("two", 3, 4, fence=6)
    assert story.broken() == [FENCES]


def test_a_fence_that_comes_twice_is_seen(story):
    story.run("one", 1, 2, fence=7, limit=3).run("two", 3, 4, fence=7, limit=3)
    assert story.broken() == [FENCES]


def test_a_fence_that_falls_is_seen_where_three_share_a_lock(story):
    story.published(2.5, "later")
    story.run("one", 1, 2, fence=7, limit=3).run("two", 3, 4, fence=6, limit=3, id="later")
    story.note(4, "final", id="later", state="SUCCESS")
    assert story.broken() == [FENCES]


def test_who_was_paused_between_its_grant_and_its_start_has_an_old_fence(story):
    story.note(0.5, "stop", victims=[10]).note(4.9, "cont", victims=[10])
    story.run("one", 5, 6, fence=3, until=4).run("two", 4.1, 4.5, fence=7, pid=11, main=2)
    assert story.broken() == []


def test_a_loss_without_a_cause_is_seen(story):
    story.run("one", 1, 2, fence=1).note(1.5, "lost", 10, run="one")
    assert story.broken() == [LOSS]


def test_a_loss_may_follow_a_pause(story):
    story.note(1.1, "stop", victims=[MAIN]).note(4.5, "cont", victims=[MAIN])
    story.run("one", 1, 5, fence=1).note(4.6, "lost", 10, run="one")
    assert story.broken() == []


def test_a_pause_that_is_long_past_causes_nothing(story):
    story.note(1.1, "stop", victims=[MAIN]).note(1.5, "cont", victims=[MAIN])
    story.run("one", 9, 12, fence=1).note(11, "lost", 10, run="one")
    assert story.broken() == [LOSS]


# --- the register ---------------------------------------------------------------------------------


def write(story, seq, fence, run, at, *, accepted=True):
    row = {"seq": seq, "fence": fence, "run": run, "at": at, "accepted": int(accepted)}
    return story.note(100, "register", key="a", kind="write", **row)


def test_a_late_write_that_was_accepted_is_seen(story):
    write(story, 1, 5, "one", 1)
    write(story, 2, 6, "two", 2)
    write(story, 3, 5, "one", 3)
    assert story.broken() == [LATE_WRITE]


def test_a_late_write_that_was_refused_is_fine(story):
    write(story, 1, 5, "one", 1)
    write(story, 2, 6, "two", 2)
    write(story, 3, 5, "one", 3, accepted=False)
    assert story.broken() == []


def test_a_holder_that_was_refused_is_seen(story):
    story.run("one", 1, 5, fence=5)
    write(story, 1, 5, "one", 3, accepted=False)
    assert story.broken() == [REFUSED]


def test_the_register_refuses_a_lower_fence(tmp_path):
    register = Register(tmp_path)
    fences, told = (5, 5, 7, 5, 7), (True, True, True, False, True)
    assert tuple(register.write("a", fence, "run") for fence in fences) == told
    assert register.write("b", 1, "run")
    rows = [(row["key"], row["fence"], row["accepted"]) for row in register.rows()]
    assert rows == [*zip("aaaaa", fences, told, strict=True), ("b", 1, 1)]


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_a_task_without_an_end_is_seen(story, late):
    story.published(1, "lost", late=late).note(2, "final", id="lost", state="RETRY")
    assert story.broken() == [UNFINISHED]


@pytest.mark.parametrize("state", ["FAILURE", "REVOKED"])
def test_a_final_state_is_an_end(story, state):
    story.published(1, "x").note(2, "final", id="x", state=state)
    assert story.broken() == []


def test_celery_may_store_retry_over_revoked(story):
    """The retry was sent, another worker threw it away, and only then its sender stored RETRY."""
    story.published(1, "x").run("one", 2, 3, fence=1, id="x")
    assert story.broken() == [UNFINISHED]
    story.note(3.005, "discarded", id="x")
    assert not story.broken()


def test_a_retry_that_is_thrown_away_later_has_a_final_state(story):
    story.published(1, "x").run("one", 2, 3, fence=1, id="x").note(3.5, "discarded", id="x")
    assert story.broken() == [UNFINISHED]


def test_celery_may_store_retry_over_success(story):
    """The next attempt was quicker than the process that had sent it."""
    story.published(1, "x").run("one", 2, 3, fence=1, id="x", limit=2)
    assert story.broken() == [UNFINISHED]
    story.run("two", 2.9, 2.95, fence=2, id="x", attempt=1, pid=11, limit=2)
    assert not story.broken()


BOTH = {"locks": {"a": [1, 1], "b": [2, 1]}}, {"locks": {"a": [3, 1], "b": [4, 1]}}
ONE = {"fence": 1}, {"fence": 3}
twice = pytest.mark.parametrize("locks", [ONE, BOTH], ids=["one lock", "several"])
"""What a task has at its first and at its second run."""


def ran_twice(story, locks):
    """Two runs of one attempt, in two workers."""
    story.run("one", 1, 2, id="x", **locks[0])
    return story.run("two", 9, 10, id="x", pid=21, main=2, **locks[1])


@twice
def test_what_runs_again_though_it_had_ended_is_seen(story, locks):
    assert ran_twice(story, locks).broken() == [AGAIN]


@twice
@pytest.mark.parametrize(
    "cause",
    [
        [("kill", {"victim": 10})],
        [("gone", {"victim": 10, "seen": 2.005})],
        [("kill", {"victim": MAIN})],
        [("stop", {"victims": [MAIN]})],
        [("stood", {"victim": MAIN, "since": 0.9})],
        [("away", {})],
        [("slow", {"since": 1.9})],
    ],
    ids=[
        "process killed",
        "process gone",
        "worker killed",
        "worker stopped",
        "worker stood",
        "away",
        "slow",
    ],
)
def test_an_end_of_which_nobody_has_heard_is_a_cause(story, locks, cause):
    for event, facts in cause:
        story.note(2.005, event, **facts)
    assert ran_twice(story, locks).broken() == []


@twice
@pytest.mark.parametrize("asked", [1.5, 6])
def test_a_shutdown_that_hung_over_an_end_is_a_cause(story, locks, asked):
    """Not one that was asked for long after it, nor one that came to its end."""
    story.note(asked, "retire", victim=MAIN)
    assert ran_twice(story, locks).broken() == [AGAIN]
    story.note(8, "hung", victim=MAIN).note(8, "kill", victim=MAIN)
    assert story.broken() == ([] if asked < 2 else [AGAIN])


@pytest.mark.parametrize(("pid", "verdict"), [(MAIN, []), (10, [AGAIN])], ids=["thread", "child"])
@pytest.mark.parametrize("asked", [1.5, 6])
def test_a_shutdown_of_threads_over_an_end_is_a_cause(story, pid, verdict, asked):
    """Celery then acknowledges late; a pool of processes does not wait with that."""
    story.run("one", 1, 2, id="x", pid=pid).note(asked, "retire", victim=MAIN)
    story.run("two", 9, 10, id="x", pid=21, main=2, fence=2)
    assert story.broken() == (verdict if asked < 2 else [AGAIN])


@twice
def test_what_happens_long_after_an_end_is_no_cause(story, locks):
    story.note(6, "kill", victim=MAIN).note(6, "kill", victim=10)
    story.note(7, "away").note(7.5, "back")
    assert ran_twice(story, locks).broken() == [AGAIN]


def test_a_cut_makes_a_copy_of_what_was_sent_before(story):
    """The copy may end before another worker sees what it has read from the lost connection."""
    ran_twice(story.published(0.5, "x", key="a").note(8, "cut"), ONE)
    story.note(10, "final", id="x", state="SUCCESS")
    assert story.broken() == []


def test_a_cut_makes_no_copy_of_what_is_sent_later(story):
    ran_twice(story.published(0.5, "x", key="a").note(0.4, "cut"), ONE)
    story.note(10, "final", id="x", state="SUCCESS")
    assert story.broken() == [AGAIN]


def test_whoever_runs_again_sends_its_retry_again(story):
    for n in range(2):
        story.run(f"retry{n}", 20 + 2 * n, 21 + 2 * n, fence=5 + n, id="x", attempt=1, pid=30 + n)
    assert story.broken() == [AGAIN]
    ran_twice(story.note(2.005, "away").note(2.1, "back"), ONE)
    assert story.broken() == []


def test_an_early_task_may_die_with_a_process_that_knows_nothing_of_its_grant(story):
    """Redis gave it the lock in its silence: that worker would have asked again."""
    story.published(1, "x").note(2, "asks", 10, id="x").note(3, "left", 10, id="x", to=MAIN)
    assert story.broken() == [UNFINISHED]
    story.note(4, "kill", victim=MAIN)
    assert not story.broken()


def test_who_asks_again_has_it_in_hands(story):
    story.published(1, "x").note(2, "asks", 10, id="x").note(3, "left", 10, id="x", to=MAIN)
    story.note(3.5, "asks", 11, id="x").note(3.6, "left", 11, id="x", to=None)
    story.note(4, "kill", victim=MAIN)
    assert story.broken() == [UNFINISHED]


def test_an_early_task_may_die_with_its_process(story):
    story.published(1, "task-one").run("one", 2, fence=1).note(3, "kill", victim=10)
    assert story.broken() == []


def test_a_process_goes_on_for_a_moment_after_its_kill_was_noted(story):
    story.published(1, "task-one").note(1.97, "kill", victim=10).run("one", 2, fence=1)
    story.run("two", 2.1, 3, fence=2, pid=11)
    assert story.broken() == []


def test_a_late_task_may_not(story):
    story.published(1, "task-one", late=True).run("one", 2, fence=1).note(3, "kill", victim=10)
    assert story.broken() == [UNFINISHED]


def test_a_process_that_gives_one_of_two_deliveries_back_still_has_the_other(story):
    story.published(1, "task-one").note(1.5, "asks", 10, id="task-one")
    story.note(1.95, "asks", 10, id="task-one").note(1.97, "left", 10, id="task-one", to=None)
    story.note(2, "start", 10, run="one", id="task-one", attempt=0, main=MAIN, worker="w",
               locks={"a": [1, 1]}, until=5).note(3, "kill", victim=10)  # fmt: skip
    assert story.broken() == []


def test_an_early_task_may_not_be_lost_by_a_process_that_lives(story):
    story.published(1, "task-one").run("one", 2, 3, fence=1)
    assert story.broken() == [UNFINISHED]


def test_an_early_task_that_nobody_had_in_hands_may_not_be_lost(story):
    story.published(1, "parked").run("one", 2, fence=1).note(3, "kill", victim=10)
    assert story.broken() == [UNFINISHED]


@pytest.mark.parametrize("cause", ["cut", "kill"])
def test_the_broker_may_lose_what_nobody_has_received(story, cause):
    """Kombu pops a message, and notes later that it has: not a matter of locks."""
    story.published(1, "x", received=False, late=True)
    assert story.broken() == [UNFINISHED]
    assert story.note(1.1, cause, victim=MAIN).broken() == []


def test_the_broker_may_lose_a_retry_too_that_nobody_has_received(story):
    story.published(1, "x").note(1.5, "again", id="x", attempt=1).note(2, "cut")
    assert story.broken() == []
    assert story.note(3, "received", id="x", attempt=1).broken() == [UNFINISHED]


def test_the_broker_may_lose_what_it_has_taken_back_and_nobody_has_received_again(story):
    """A blocked task of policy ``requeue``; RabbitMQ loses none."""
    story.published(1, "x").note(1.5, "returned", id="x").note(2, "kill", victim=MAIN)
    assert story.broken() == []
    assert story.note(3, "received", id="x", attempt=0).broken() == [UNFINISHED]
    story.note(3.5, "returned", id="x")
    assert story.broken() == []
    assert story.note(0, "storm", broker="rabbitmq").broken() == [UNFINISHED]


def test_a_link_of_a_chain_is_sent_by_the_success_of_the_one_before(story):
    story.published(1, "a").published(1, "b", after="a")
    story.note(2, "final", id="a", state="FAILURE")
    assert story.broken() == []
    story.note(2, "final", id="a", state="SUCCESS").run("r", 1.5, 1.9, fence=1, id="a")
    assert [task["id"] for task in unsettled(History(story.events))] == ["b"]


def test_a_success_without_a_run_is_seen(story):
    story.published(1, "x").note(2, "final", id="x", state="SUCCESS")
    assert story.broken() == [NEVER_RUN]


# --- the fleet ------------------------------------------------------------------------------------


def test_a_free_lock_beside_waiters_is_seen(story):
    story.note(0, "ready", worker="w", victim=MAIN).looks(1, 3.5, a=2)
    assert story.broken() == [IDLE]


def test_a_free_lock_is_taken_within_a_while(story):
    story.note(0, "ready", worker="w", victim=MAIN)
    story.looks(1, 2.5, a=2).looks(2.6, 2.8).looks(2.9, 4.5, a=1)
    assert story.broken() == []


def test_no_task_is_expected_to_run_without_a_live_worker(story):
    story.note(0, "ready", worker="w", victim=MAIN).looks(1, 9, a=2)
    story.note(1.5, "stop", victims=[MAIN]).note(5, "cont", victims=[MAIN])
    story.note(6.5, "kill", victim=MAIN)
    assert story.broken() == []


def test_no_task_is_expected_to_run_while_redis_is_away(story):
    story.note(0, "ready", worker="w", victim=MAIN)
    story.looks(1, 2.5, a=2).note(2.55, "away").note(4.5, "back").looks(4.6, 6, a=2)
    assert story.broken() == []


def test_a_silence_of_redis_lets_nobody_wait_behind_it(story):
    story.note(0, "ready", worker="w", victim=MAIN)
    story.note(1, "away").note(4.5, "back").looks(4.6, 6.4, a=2)
    assert story.broken() == []
    story.looks(6.5, 7, a=2)
    assert story.broken() == [IDLE]


def test_a_worker_that_dies_of_itself_is_seen(story):
    story.note(1, "died", worker="w", victim=MAIN, code=1, last="KeyError: 'of ours'")
    assert story.broken() == [DIED]


def test_a_worker_that_dies_of_a_fault_of_celery_is_not_ours(story):
    story.note(1, "died", worker="w", victim=MAIN, code=1, last=f"… {FAULT_OF_CELERY}")
    assert story.broken() == []


def key(story, name, ttl, live="", tasks=()):
    return story.note(9, "key", name=name, type="hash", ttl=ttl, live=live, tasks=list(tasks))


@pytest.mark.parametrize(
    ("name", "ttl"),
    [
        ("csl:{b01}:k:a:meta", 50),
        ("csl:{b01}:k:a:done", 50),
        ("csl:{b01}:k:a:holders", 50),
        ("csl:fleet:route:r:celery", 9),
        ("csl:schema", -1),
    ],
)
def test_markers_may_be_left_for_a_while(story, name, ttl):
    assert key(story, name, ttl).broken() == []


@pytest.mark.parametrize("name", ["bodies", "queue", "record", "meta", "adrift"])
def test_keys_that_never_expire_are_seen(story, name):
    assert key(story, f"csl:{{b01}}:k:a:{name}", -1).broken() == [KEYS]


@pytest.mark.parametrize("name", ["csl:{b01}:due", "csl:{b01}:index"])
def test_entries_of_an_index_are_seen(story, name):
    assert key(story, name, -1).broken() == [KEYS]


def test_a_holder_that_is_left_is_seen(story):
    assert key(story, "csl:{b01}:k:a:holders", 50, live="one").broken() == [KEYS]


def test_a_failure_that_the_library_logged_is_seen(story):
    assert story.note(1, "complaint", worker="w", text="oh").broken() == [COMPLAINT]


# --- the plan -------------------------------------------------------------------------------------


def test_one_seed_is_one_plan():
    assert plan(7, 60) == plan(7, 60)
    assert plan(7, 60) != plan(8, 60)


def test_a_plan_of_half_an_hour_has_hundreds_of_kills_and_stops():
    assert sum(fault.kind in KILLS_AND_STOPS for fault in plan(1, 1800)) > 300


def test_the_rules_of_a_moment_are_some_of_all():
    assert SAFETY.items() < RULES.items()


def test_a_violation_is_shown_with_what_happened_around_it(story):
    """Not the whole history, and of the looks at the locks those that saw something."""
    story.run("before", 1, 2, fence=1).run("one", 19, 22, fence=2).run("two", 20, fence=3)
    history = History(story.looks(21, 21).looks(21.5, 21.5, a=2).events)
    shown = excerpts(Report(history, violations_of(history, SAFETY)))
    assert f"20.000, {LIMIT}: a: two (fence 3" in shown
    assert "-1.000 start" in shown
    assert "'run': 'before'" not in shown
    assert [line for line in shown.splitlines() if " look " in line] == [
        "  +1.500 look      {'pid': 0, 'free': {'a': 2}}"
    ]


def test_a_free_lock_is_looked_at_in_time_though_the_first_sweeper_stands_still():
    """It keeps the lock from others for a while; the round of the next one is the slowest."""
    slowest_round = 1.2 * BEAT
    assert DEFER + slowest_round < LONGEST_IDLE


def test_what_an_ending_worker_gives_back_may_be_lost_with_one_that_is_killed_just_then():
    """It is a gap of the broker's transport; at any other time it is no excuse."""

    def given_back(killed_at, victim):
        story = Story().published(0, "t", received=False)
        story.note(1, "received", MAIN, id="t", attempt=0)
        story.note(5, "gone", victim=MAIN, seen=5)
        return story.note(killed_at, "kill", victim=victim)

    assert UNFINISHED not in given_back(5.2, 2).broken()
    assert UNFINISHED in given_back(9, 2).broken()
    assert UNFINISHED in given_back(5, MAIN).broken()


def test_duplicates_may_wait_for_a_call_that_the_broker_has_lost():
    """It counts for an hour. If a call of this task runs later, the lost one is over."""
    name = "csl:{b57}:k:follows0:bodies"

    def story(killed_at=1.1):
        facts = {"task": "follows", "key": "follows0", "late": True}
        story = Story().published(1, "lost", received=False, **facts).published(1.2, "dup", **facts)
        story.note(killed_at, "kill", victim=2)
        for each in (name, "csl:{b57}:index", "csl:{b57}:due"):
            story.note(9, "key", name=each, type="hash", ttl=-1, live="dup")
        return story

    assert story().broken() == []
    assert UNFINISHED in story(killed_at=-9).broken(), "nothing can have lost the message"
    other = story().note(9, "key", name="csl:{b57}:k:a:bodies", type="hash", ttl=-1, live="")
    assert other.broken() == [KEYS]
    later = story().run("r", 2, 3, fence=1, key="follows0", task="follows")
    assert {UNFINISHED, KEYS} <= set(later.broken())


# --- flow control ---------------------------------------------------------------------------------


def rated(*fences, task="rated", key="rate0"):
    story = Story()
    for n, fence in enumerate(fences):
        story.run(f"r{n}", n, n + 0.5, fence=round(fence * 1e6), key=key, limit=9, task=task)
    return story


def test_one_start_too_many_in_a_period_is_found():
    """Twelve in five seconds, by the times of the grants, whenever the bodies began."""
    twelve = [n / 10 for n in range(12)]
    assert rated(*twelve, 5.0, 5.1).broken() == []
    assert rated(*twelve, 4.9).broken() == [RATE]
    assert rated(0, 0.1, 0.26, task="smooth", key="smooth0").broken() == []
    assert rated(0, 0.1, 0.2, task="smooth", key="smooth0").broken() == [RATE]


def test_a_group_above_its_limit_is_found():
    def two_of_a(end):
        story = Story()
        for n, group in enumerate("aab"):
            about = {"key": "fair0", "limit": 3, "group": group, "task": "fair", "id": f"t{n}"}
            story.run(f"g{n}", n / 10, end, fence=n + 1, **about)
        return story

    assert two_of_a(2.0).broken() == []
    third = {"key": "fair0", "limit": 4, "group": "a", "task": "fair", "fence": 9}
    assert two_of_a(2.0).run("g9", 2.1, 2.2, **third).broken() == []
    story = Story()
    for n in range(3):
        about = {"key": "fair0", "limit": 4, "group": "a", "task": "fair", "fence": n + 1}
        story.run(f"g{n}", n / 10, 2.0, **about)
    assert story.broken() == [GROUP]


def test_a_burst_of_which_none_ran_is_found():
    def burst(*states):
        story = Story()
        for n, state in enumerate(states):
            story.published(n, f"t{n}", task="settles", key="settles0", late=True)
            if state == "SUCCESS":
                story.run(f"r{n}", 10, 11, key="settles0", task="settles", id=f"t{n}")
            story.note(20 + n, "final", id=f"t{n}", state=state)
        return story

    assert burst("REVOKED", "REVOKED", "SUCCESS").broken() == []
    assert burst("REVOKED", "REVOKED").broken() == [NEWEST]
    assert burst("REVOKED", "REVOKED").note(1.5, "revoke", id="t1").broken() == []


def test_a_task_that_runs_later_by_itself_is_no_repetition():
    story = Story().run("one", 0, 1, id="t").run("two", 2, 3, id="t", fence=5)
    assert AGAIN in story.broken()
    story = Story().run("one", 0, 1, id="t").run("two", 2, 3, id="t", fence=5)
    assert AGAIN not in story.note(0.5, "later", run="one").broken()


def unique_call(at, **facts):
    story = Story().published(0, "t", task="once").run("one", 1, 2, id="t")
    return story.note(2.3, "final", id="t", state="SUCCESS").note(at, "duplicate", id="t", **facts)


def test_a_call_is_a_duplicate_only_of_one_that_has_not_ended():
    assert unique_call(3, since=2.9).broken() == []
    assert unique_call(9, since=8.9).broken() == [DUPLICATE]
    assert unique_call(9, since=8.9).note(2.1, "kill", victim=MAIN).broken() == []
    story = Story().published(0, "t", task="once").note(9, "duplicate", id="t", since=9)
    assert story.broken() == [UNFINISHED]


def test_a_duplicate_may_have_the_result_of_a_task_that_ended_before_it():
    def followed(task, at):
        story = Story().published(0, "t1", task=task).run("one", 1, 2, id="t1")
        story.note(2.3, "final", id="t1", state="SUCCESS").published(0.5, "t2", task=task)
        return story.note(at, "final", id="t2", state="SUCCESS")

    assert followed("follows", 2.5).broken() == []
    assert followed("follows", 1.5).broken() == [NEVER_RUN]
    assert followed("once", 2.5).broken() == [NEVER_RUN]


def test_what_a_killed_worker_held_back_may_be_lost_when_it_is_restored():
    def story(task="requeue", second=9.5):
        story = Story().published(1, "t", task=task).note(1.2, "asks", 10, id="t")
        story.note(1.3, "left", 10, id="t", to=None)
        return story.note(1.5, "kill", victim=1).note(second, "kill", victim=2)

    assert story().broken() == []
    assert story("early").broken() == [UNFINISHED], "parked, so it is in Redis"
    assert story(second=8.0).broken() == [UNFINISHED], "nothing is restored so early"
    begun = story().run("r", 1.25, 1.28, id="t")
    assert begun.broken() == [UNFINISHED], "it had its lock"


def test_what_is_restored_when_another_worker_dies_may_be_lost():
    def story(*, asks=False, second=9.5):
        story = Story().published(1, "t", late=True).note(1.5, "kill", victim=1)
        if asks:
            story.note(1.2, "asks", 10, id="t")
        return story.note(second, "kill", victim=2)

    assert story().broken() == []
    assert story(asks=True).broken() == [UNFINISHED]
    assert story(second=8.0).broken() == [UNFINISHED], "nothing is restored so early"
    assert Story().published(1, "t", late=True).note(9.5, "kill", victim=2).broken() == [UNFINISHED]

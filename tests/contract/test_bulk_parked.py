"""Operations on many parked tasks: which are selected, what is done, and that none is lost."""

from __future__ import annotations

import io
import json
import re
import time

import pytest

from celery_singleton_lock.admin import export_parked
from celery_singleton_lock.admin.bulk_parked import Pace, drain, purge
from celery_singleton_lock.admin.export_parked import (
    SERVED,
    PurgedFile,
    export,
    refuse_drained,
    restore,
    served_realms,
    would_restore,
)
from celery_singleton_lock.admin.force_release import Refused
from celery_singleton_lock.admin.lock_views import show_lock
from celery_singleton_lock.admin.select_parked import Filter, count, names_of, select, steps
from celery_singleton_lock.cli.render import detail
from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.model import Claim, Ending, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.rate import Rate, packed
from celery_singleton_lock.errors import BackendError, ConfigurationError
from celery_singleton_lock.store.operator.base import Operator, Waiting
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.passing_time import let_pass
from support.waiters import hold, park

pytestmark = pytest.mark.contract


@pytest.fixture
def store(redis_client):
    store = RedisAdminStore(redis_client, claim_lease=60.0)
    store.worker_heartbeat("w", "R", ["q"], 600)
    yield store
    store.close()


def by(action):
    return Operator("jane", action=action)


def ids(found):
    return [each.task_id for each in found]


# -- how many, and for how long --------------------------------------------------------------------


def test_messages_are_counted_by_queue_with_the_age_of_the_oldest_in_seconds(store):
    """Of one broker; a queue in which none is left does not count."""
    hold(store, "a")
    began = time.monotonic()
    for number, queue in enumerate(["q", "q", "other"]):
        park(store, "a", f"t{number}", queue=queue)
    park(store, "a", "elsewhere", realm="S", queue="far")
    told = store.parked("R")
    took = time.monotonic() - began
    assert {queue: each.waiting for queue, each in told.items()} == {"q": 2, "other": 1}
    assert 0 < told["other"].oldest < told["q"].oldest <= took
    assert set(store.parked("S")) == {"far"}
    assert store.parked("T") == {}


# -- which are meant -------------------------------------------------------------------------------


def test_locks_without_waiters_are_skipped(store):
    """A lock that is only held, idle, or whose keys are another program's, has nothing to give."""
    for name in ("held", "waited", "adrift"):
        hold(store, name)
    park(store, "waited", "a")
    park(store, "adrift", "b", queue="nobody")
    store.release("idle", new_token(), Ending.FINAL)
    store.client.set(store.keyspace.lock("other").meta, "x")
    store.client.set(store.keyspace.lock("other").holders, "x")
    assert set(names_of(store, Filter())) == {"waited", "adrift"}
    assert list(names_of(store, Filter(lock="adri"))) == ["adrift"]


def test_a_whole_name_is_taken_as_it_is(store):
    """Also one that looks like a pattern, or has others that begin like it."""
    for name in ("a", "ab", "a*"):
        hold(store, name)
        park(store, name, name)
    assert ids(select(store, Filter(lock="a", exact=True))) == ["a"]
    assert ids(select(store, Filter(lock="a*", exact=True))) == ["a*"]


def test_they_are_counted_by_lock(store):
    hold(store, "a")
    hold(store, "b")
    for name, number in (("a", 2), ("b", 3)):
        for each in range(number):
            park(store, name, f"t{each}")
    tally = count(store, Filter())
    assert tally.done == {"a": 2, "b": 3}
    assert tally.total == 5
    assert count(store, Filter(state="adrift")).total == 0


def test_a_group_holds_twenty_and_eight_mebibytes_at_most():
    small = [Waiting("a", "t", "parked", size=1)] * 41
    assert [len(group) for group in steps(small)] == [20, 20, 1]
    large = [Waiting("a", "t", "parked", size=4 * 2**20)] * 3
    assert [len(group) for group in steps(large)] == [2, 1]


# -- purge -----------------------------------------------------------------------------------------


def test_purged_tasks_are_reported_and_audited_once_per_lock(store):
    hold(store, "a")
    for number in range(45):
        park(store, "a", f"t{number}", body=b"message %d" % number)
    who, told = by("purge"), []
    tally = purge(store, Filter(), who, dropped=told.append)
    assert tally.done == {"a": 45}
    assert not +tally.skipped
    assert [each.message for each in told] == [b"message %d" % number for number in range(45)]
    assert count(store, Filter()).total == 0
    (entry,) = store.audit()
    assert (entry["action"], entry["who"], entry["count"]) == ("purge", "jane", 45)


def test_duplicates_of_purged_tasks_are_discarded_for_two_hours_or_as_configured(store):
    hold(store, "a")
    park(store, "a", "usual")
    purge(store, Filter(), by("purge"))
    assert seconds_remembered(store, "usual") == pytest.approx(7200, abs=30)
    park(store, "a", "short")
    purge(store, Filter(), by("purge"), done_for=60.0)
    assert seconds_remembered(store, "short") == pytest.approx(60, abs=30)


def seconds_remembered(store, task_id):
    until = store.client.zscore(store.keyspace.lock("a").done, f"{task_id}/0/0")
    return until / 1000 - store.time()


def test_a_task_that_was_granted_the_lock_meanwhile_is_not_purged(store):
    holder = hold(store, "a")
    token, other = park(store, "a", "first"), park(store, "a", "second")
    found = list(select(store, Filter()))
    store.release("a", holder.token, Ending.FINAL)
    assert [each.token for each in found] == [token, other]

    class Late(RedisAdminStore):
        """The lock is released between the read of the queue and the operation."""

        def list_waiters(self, name, part, after="", most=100):
            page = super().list_waiters(name, part, after, most)
            self.release("b", held.token, Ending.FINAL)
            return page

    held = hold(store, "b")
    park(store, "b", "first")
    park(store, "b", "second")
    late = Late(store.client)
    tally = purge(late, Filter(lock="b", exact=True), by("purge"))
    assert tally.done == {"b": 1}
    assert tally.skipped == {"moved meanwhile": 1}
    assert [h.task_id for h in store.inspect("b").holders] == ["first"]


def test_purged_tasks_are_reported_although_the_reply_was_lost(store):
    """The client repeats the call, and gets what the first call has dropped."""
    hold(store, "a")
    for number in range(3):
        park(store, "a", f"t{number}", body=b"message %d" % number)

    class Deaf(RedisAdminStore):
        def _run(self, call):
            super()._run(call)
            return super()._run(call)

    told = []
    tally = purge(Deaf(store.client), Filter(), by("purge"), dropped=told.append)
    assert tally.done == {"a": 3}
    assert not +tally.skipped
    assert [each.message for each in told] == [b"message %d" % number for number in range(3)]
    (entry,) = store.audit()
    assert entry["count"] == 3


def test_a_purge_and_an_export_find_the_tasks_of_killed_workers_too(store):
    """No worker sweeps any more: an export before a change of Redis would lose what had begun."""
    held = hold(store, "a")
    park(store, "a", "began")
    store.release("a", held.token, Ending.FINAL)
    park(store, "a", "waits")
    let_pass(store, 700)  # the heartbeat and the lease have ended
    lines = list(export(store, Filter(), by("export")))
    assert [json.loads(line)["attempt"] for line in lines] == ["began/0/0", "waits/0/0"]

    store.worker_heartbeat("w", "R", ["q"], 600)
    store.sweep_and_grant("a")  # the first one is granted again
    let_pass(store, 700)
    assert purge(store, Filter(), by("purge")).total == 2
    assert store.inspect("a").bodies == 0


def test_an_export_has_what_a_killed_worker_ran_only_after_its_lease(store):
    """Two pages say so: a move to another Redis before that would lose the task."""
    held = hold(store, "a")
    park(store, "a", "runs")
    store.release("a", held.token, Ending.FINAL)
    assert list(export(store, Filter(), by("export"))) == []
    let_pass(store, 700)  # the heartbeat and the lease have ended
    (line,) = export(store, Filter(), by("export"))
    assert json.loads(line)["attempt"] == "runs/0/0"


# -- drain -----------------------------------------------------------------------------------------


def test_drained_messages_are_published_in_order_and_dropped(store):
    hold(store, "a")
    for number in range(45):
        park(store, "a", f"t{number}", body=b"message %d" % number)
    sent, who = [], by("drain")
    tally = drain(store, Filter(), who, realm="R", publish=sent.append, pace=Pace(0))
    assert [each.message for each in sent] == [b"message %d" % number for number in range(45)]
    assert tally.done == {"a": 45}
    assert not +tally.skipped
    assert count(store, Filter()).total == 0
    (entry,) = store.audit()
    assert (entry["action"], entry["who"], entry["count"]) == ("drain", "jane", 45)
    copies = [Owner(new_token(), f"t{number}/0/0") for number in (0, 44)]
    answers = {store.acquire(copy, Claim("a", copy=True)).verdict for copy in copies}
    assert answers == {Verdict.BLOCKED}, "the message is to run"


def test_a_drain_sends_the_tasks_of_all_groups_in_the_order_of_arrival(store, redis_client):
    groups = ["a", "a", "a", "b", "a", "b"]
    held = hold(store, "k", flow=packed((), group=Group("a", 1)))
    for number, group in enumerate(groups):
        park(store, "k", f"t{number}", flow=packed((), group=Group(group, 1)))
    sent = []
    tally = drain(store, Filter(), by("drain"), realm="R", publish=sent.append, pace=Pace(0))
    assert ids(sent) == [f"t{number}" for number in range(len(groups))]
    assert tally.done == {"k": len(groups)}
    store.release("k", held.token, Ending.FINAL)
    assert not redis_client.keys("*:flow:line:*"), "no group has a waiter"
    next_one = hold(store, "k", flow=packed((), group=Group("b", 1)))
    assert [each.token for each in store.inspect("k").holders] == [next_one.token]


def test_a_drain_sends_the_tasks_of_killed_workers_too(store):
    """No worker sweeps any more; their stored messages would stay in Redis after an uninstall."""
    for name in ("a", "b"):
        held = hold(store, name)
        park(store, name, f"ran-{name}")
        store.release(name, held.token, Ending.FINAL)
    park(store, "a", "waits")
    let_pass(store, 700)  # the heartbeat and both leases have ended
    sent = []
    drain(store, Filter(), by("drain"), realm="R", publish=sent.append, pace=Pace(0))
    assert sorted(ids(sent)) == ["ran-a", "ran-b", "waits"]
    assert [store.inspect(name).bodies for name in ("a", "b")] == [0, 0]


def test_what_stays_in_a_drain_is_counted_by_reason(store):
    """Of another broker; with a verdict, that a worker has to end; taken by another drain."""
    hold(store, "a", limit=2)
    hold(store, "a", limit=2)
    park(store, "a", "other", realm="S", limit=2)
    store.deliver_revoked("a", park(store, "a", "revoked", limit=2), realm="R")
    store.take_out_messages("a", [park(store, "a", "leaving", limit=2)], 60, "s")
    park(store, "a", "goes", limit=2)
    sent = []
    tally = drain(store, Filter(), by("drain"), realm="R", publish=sent.append, pace=Pace(0))
    assert ids(sent) == ["goes"]
    assert +tally.skipped == {
        "of another broker": 1,
        "revoked: a worker has to end it": 1,
        "leaving": 1,
    }


def test_what_is_parked_after_the_drain_began_is_left(store):
    """Otherwise a worker that parks sent messages again would keep the drain running for ever."""
    hold(store, "a")
    park(store, "a", "goes")

    class Late(RedisAdminStore):
        def list_waiters(self, name, part, after="", most=100):
            park(store, "a", "later")
            return super().list_waiters(name, part, after, most)

    sent, late = [], Late(store.client)
    tally = drain(late, Filter(), by("drain"), realm="R", publish=sent.append, pace=Pace(0))
    assert ids(sent) == ["goes"]
    assert set(+tally.skipped) == {"parked since"}


def test_a_task_that_was_granted_the_lock_meanwhile_is_not_drained(store):
    held = hold(store, "a")
    park(store, "a", "first")
    park(store, "a", "second")

    class Late(RedisAdminStore):
        def take_out_messages(self, name, tokens, seconds, seal):
            self.release("a", held.token, Ending.FINAL)
            return super().take_out_messages(name, tokens, seconds, seal)

    sent = []
    late = Late(store.client)
    tally = drain(late, Filter(), by("drain"), realm="R", publish=sent.append, pace=Pace(0))
    assert ids(sent) == ["second"]
    assert +tally.skipped == {"granted meanwhile": 1}


def test_a_drain_that_the_broker_refuses_keeps_what_was_not_sent(store):
    """It is in the queue again, at its place."""
    hold(store, "a")
    tokens = [park(store, "a", f"t{number}") for number in range(3)]
    sent = []

    def publish(each):
        if len(sent) == 1:
            raise ConnectionError("the broker is away")
        sent.append(each)

    with pytest.raises(ConnectionError):
        drain(store, Filter(), by("drain"), realm="R", publish=publish, pace=Pace(0))
    assert ids(sent) == ["t0"]
    assert [each.token for each in select(store, Filter())] == tokens[1:]
    assert {each.state for each in select(store, Filter())} == {"parked"}
    assert store.locate_token("a", tokens[0]).waiting is None


def test_a_worker_that_locks_and_receives_a_drained_message_keeps_it(store):
    """It learns that the message is parked, and acknowledges it: then the drain drops nothing."""
    hold(store, "a")
    tokens = [park(store, "a", f"t{number}") for number in range(3)]

    def publish(each):
        again = Owner(new_token(), each.attempt, each.task)
        claim = Claim("a", place=each.place, copy=True)
        assert store.acquire(again, claim).verdict is Verdict.TWIN
        assert store.park(again, claim, MessageToPark(b"body", "R", "q")).verdict is Verdict.TWIN

    tally = drain(store, Filter(), by("drain"), realm="R", publish=publish, pace=Pace(0))
    assert tally.total == 0
    assert +tally.skipped == {"parked again by a worker that locks": 3}
    assert [each.token for each in select(store, Filter())] == tokens
    assert store.messages("a", tokens) == [b"body"] * 3


def test_a_drain_whose_redis_loses_its_data_counts_what_it_has_sent(store):
    """No worker has parked them again, and what was lost before it was sent was not granted."""
    hold(store, "a")
    for number in range(4):
        park(store, "a", f"t{number}")
    sent = []

    def publish(each):
        sent.append(each)
        if len(sent) == 2:
            store.client.flushall()

    pace = Pace(0.2, sleep=lambda _seconds: None)  # two messages in a step
    tally = drain(store, Filter(), by("drain"), realm="R", publish=publish, pace=pace)
    assert ids(sent) == ["t0", "t1"]
    assert tally.total == 2
    assert +tally.skipped == {"ended, dropped or lost by Redis meanwhile": 2}


def test_a_drain_that_dies_before_it_drops_leaves_the_messages_in_line(store):
    """They are out of the queue for a minute at most, and may then run a second time."""
    hold(store, "a")
    tokens = [park(store, "a", f"t{number}") for number in range(2)]

    class Dying(RedisAdminStore):
        def drop_waiters(self, *_args, **_how):
            raise BackendError("killed")

    with pytest.raises(BackendError):
        drain(
            Dying(store.client),
            Filter(),
            by("drain"),
            realm="R",
            publish=lambda _: None,
            pace=Pace(0),
        )
    assert [each.state for each in select(store, Filter())] == ["leaving", "leaving"]
    again = store.client.zscore(store.keyspace.lock("a").deadlines, tokens[1])
    assert 50 < again / 1000 - store.time() <= 60


def test_a_slow_drain_takes_no_more_at_once_than_it_sends_in_ten_seconds(store):
    hold(store, "a")
    for number in range(3):
        park(store, "a", f"t{number}")
    sealed = []

    class Counting(RedisAdminStore):
        def take_out_messages(self, name, tokens, seconds, seal):
            sealed.append(len(tokens))
            return super().take_out_messages(name, tokens, seconds, seal)

    class Time:
        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    time = Time()
    pace = Pace(0.2, time, time.sleep)
    drain(
        Counting(store.client), Filter(), by("drain"), realm="R", publish=lambda _: None, pace=pace
    )
    assert sealed == [2, 1]
    assert time.now == pytest.approx(10.0), "one at once, then one each five seconds"


# -- export and import -----------------------------------------------------------------------------


def test_what_is_exported_is_parked_again_as_it_was(store):
    """With its place, token, broker and queue; only the age changes."""
    for name, limit in (("a", 1), ("b", 2)):
        for _ in range(limit):
            hold(store, name, limit=limit)
        for number in range(3):
            park(
                store,
                name,
                f"{name}{number}",
                body=b"\0\xff %d" % number,
                timeout=900.0,
                limit=limit,
            )
    before = sorted(each._replace(age=0.0, since=0.0) for each in select(store, Filter()))
    lines = list(export(store, Filter(), by("export")))
    assert count(store, Filter()).total == 6, "an export changes nothing"
    store.client.flushall()
    store.worker_heartbeat("w", "R", ["q"], 30)
    told = {json.loads(line)["lock"]: json.loads(line)["limit"] for line in lines}
    assert told == {"a": 1, "b": 2}
    for name, limit in told.items():
        for _ in range(limit):
            hold(store, name, limit=limit)
    tally = restore(store, [*lines, "", "  \n"], by("import"))
    assert tally.done == {"a": 3, "b": 3}
    assert not +tally.skipped
    after = sorted(each._replace(age=0.0, since=0.0) for each in select(store, Filter()))
    assert after == before
    tokens = [each.token for each in select(store, Filter(lock="a"))]
    assert store.messages("a", tokens) == [b"\0\xff 0", b"\0\xff 1", b"\0\xff 2"]


def test_a_second_import_parks_nothing_unless_again_is_given(store):
    hold(store, "a")
    park(store, "a", "t")
    lines = list(export(store, Filter(), by("export")))
    still = restore(store, lines, by("import"))
    assert (still.total, still.skipped) == (0, {"waits or runs already": 1})
    assert "import" not in [entry["action"] for entry in store.audit()]
    assert count(store, Filter()).total == 1
    purge(store, Filter(), by("purge"))
    assert restore(store, lines, by("import")).skipped == {"has ended already": 1}
    assert count(store, Filter()).total == 0
    assert restore(store, lines, by("import"), again=True).done == {"a": 1}
    assert ids(select(store, Filter())) == ["t"]
    for again in (True, False):
        beside = restore(store, lines, by("import"), again=again)
        assert (beside.total, beside.skipped) == (0, {"waits or runs already": 1})
    assert count(store, Filter()).total == 1


def run_next(store, holder, task_id):
    """Release the lock, and start the task that is next. Return its owner."""
    store.release("a", holder.token, Ending.FINAL)
    owner = Owner(store.inspect("a").holders[0].token, f"{task_id}/0/0", "app.task", "w")
    assert store.claim(owner, "a", 30.0, acks_early=True).verdict is Verdict.GRANTED
    return owner


@pytest.mark.parametrize(
    "rate",
    [Rate("1/h"), Rate("1/h", kind="smooth", burst=1), Rate("1/h", cost=1)],
    ids=["sliding", "smooth", "cost"],
)
def test_imported_tasks_start_no_faster_than_the_rate_of_their_lock(store, redis_client, rate):
    """In another Redis nothing else knows the rate, until the next task is parked there."""
    claim = Claim("a", 60.0, 300, flow=packed((rate,)))
    held = Owner(new_token(), "first/0/0", "app.task")
    store.acquire(held, claim)
    for number in range(3):
        owner = Owner(new_token(), f"t{number}/0/0", "app.task")
        store.park(owner, claim, MessageToPark(b"body", "R", "q", None))
    lines = list(export(store, Filter(), by("export")))
    redis_client.flushdb()
    store.worker_heartbeat("w", "R", ["q"], 600)
    assert restore(store, lines, by("import")).total == 3
    view = store.inspect("a")
    assert (len(view.holders), view.waiting) == (1, 2)
    (found,) = view.rates
    assert (found.rate, found.by_cost) == (str(rate), rate.cost is not None)


def test_imported_tasks_keep_their_groups_and_costs(store, redis_client):
    """The order of the groups, their limits, and what each start costs."""
    hold(store, "a", limit=9)
    rate = Rate("100/h", cost=1)
    for number, (group, cost) in enumerate((("x", 60), ("x", 50), ("y", 7))):
        flow = packed((rate.costing(cost),), group=Group(group, 1, 0.5))
        claim = Claim("a", 60.0, 1, flow=flow)
        owner = Owner(new_token(), f"t{number}/0/0", "app.task")
        store.park(owner, claim, MessageToPark(b"body", "R", "q", None))
    lines = list(export(store, Filter(), by("export")))
    redis_client.flushdb()
    store.worker_heartbeat("w", "R", ["q"], 600)
    hold(store, "a", limit=9)
    assert restore(store, lines, by("import")).total == 3
    found = {each.task_id: (each.group, each.costs) for each in select(store, Filter())}
    assert found == {
        "t0": (Group("x", 1, 0.5), {rate.key: 60}),
        "t1": (Group("x", 1, 0.5), {rate.key: 50}),
        "t2": (Group("y", 1, 0.5), {rate.key: 7}),
    }
    shown = "\n".join(detail(show_lock(store, "a")))
    assert re.search(r"TOKEN +GROUP\n", shown)
    assert len(re.findall(r" x$", shown, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    "group", [["x"], ["", None, 1], ["x", 0, 1], ["x", True, 1], ["x", 1, 0], ["é" * 60, 1, 1], 3]
)
def test_an_import_refuses_a_group_that_is_none(store, group):
    hold(store, "a")
    park(store, "a", "t")
    (line,) = export(store, Filter(), by("export"))
    line = json.dumps({**json.loads(line), "group": group})
    with pytest.raises(ConfigurationError, match="line 1 is not a parked task"):
        restore(store, [line], by("import"))


def test_an_import_after_a_purge_does_not_run_what_ran_between_export_and_purge(store):
    """Only what was purged or dropped is parked again, at its place, and once."""
    holder = hold(store, "a")
    for task_id in ("runs", "purged", "dropped"):
        park(store, "a", task_id)
    lines = list(export(store, Filter(), by("export")))
    before = [each.place for each in select(store, Filter())]
    holder = run_next(store, holder, "runs")
    store.pause("a", by("pause"))
    store.release("a", holder.token, Ending.FINAL)
    store.drop_waiters("a", [list(select(store, Filter()))[-1].token], by("drop"))
    purge(store, Filter(), by("purge"))
    tally = restore(store, lines, by("import"), again=True)
    assert (tally.done, tally.skipped) == ({"a": 2}, {"has ended already": 1})
    assert ids(select(store, Filter())) == ["purged", "dropped"]
    assert [each.place for each in select(store, Filter())] == before[1:]
    store.resume("a", by("resume"))
    for task_id in ("purged", "dropped"):
        holder = run_next(store, holder, task_id)
    store.release("a", holder.token, Ending.FINAL)
    assert restore(store, lines, by("import"), again=True).skipped == {"has ended already": 3}


def test_a_task_that_was_imported_again_is_not_lost_when_its_message_is_published(store):
    """Workers dropped the published message as a copy of a task that has ended."""
    hold(store, "a")
    for task_id in ("once", "twice"):
        park(store, "a", task_id)
    lines = list(export(store, Filter(), by("export")))
    for _ in range(2):
        purge(store, Filter(), by("purge"))
        assert restore(store, lines, by("import"), again=True).done == {"a": 2}
    published = []

    def publish(each):
        published.append(each.task_id)
        again = Owner(new_token(), each.attempt, each.task)
        claim = Claim("a", place=each.place, copy=True)
        assert store.acquire(again, claim).verdict is Verdict.TWIN

    drain(store, Filter(), by("drain"), realm="R", publish=publish, pace=Pace(0))
    assert published == ["once", "twice"]
    assert count(store, Filter()).total == 2


def test_a_copy_of_a_task_that_ran_before_a_drop_does_not_run_after_an_import_again(store):
    """Another message of this attempt has run; its copies are dropped as before."""
    holder = hold(store, "a")
    park(store, "a", "t")
    run_next(store, holder, "t")
    store.release("a", store.inspect("a").holders[0].token, Ending.FINAL)
    hold(store, "a")
    park(store, "a", "t")
    lines = list(export(store, Filter(), by("export")))
    purge(store, Filter(), by("purge"))
    store.forget_drops("a", [(json.loads(lines[0])["token"], "t/0/0")])
    copy = Owner(new_token(), "t/0/0", "app.task")
    assert store.acquire(copy, Claim("a", copy=True)).verdict is Verdict.DONE


def test_a_purge_writes_what_it_drops_and_not_what_starts_meanwhile(store):
    """So an import of its file runs nothing twice, however long Redis remembers what has run."""
    holder = hold(store, "a")
    for number in range(25):
        park(store, "a", f"t{number}", body=b"%d" % number)

    class Late(RedisAdminStore):
        """The lock is released between the read of the messages and the drop."""

        def drop_waiters(self, name, tokens, by, **how):
            self.release("a", holder.token, Ending.FINAL)
            return super().drop_waiters(name, tokens, by, **how)

    late, kept = Late(store.client), io.StringIO()
    tally = purge(late, Filter(), by("purge"), file=PurgedFile(late, kept))
    assert (tally.total, tally.skipped) == (24, {"moved meanwhile": 1})
    lines = kept.getvalue().splitlines()
    assert [json.loads(line)["attempt"] for line in lines] == [f"t{n}/0/0" for n in range(1, 25)]
    assert restore(store, lines, by("import"), again=True).total == 24
    assert ids(select(store, Filter())) == [f"t{number}" for number in range(1, 25)]
    late.close()


def test_an_import_of_a_running_task_says_that_it_has_parked_nothing(store):
    """It has begun under its old token, and its message was deleted: it is acknowledged early."""
    store.worker_heartbeat("w", "R", ["q"], 30)
    holder = hold(store, "a")
    token = park(store, "a", "t")
    lines = list(export(store, Filter(), by("export")))
    store.release("a", holder.token, Ending.FINAL)
    owner = Owner(token, "t/0/0", "app.task", "w")
    assert store.claim(owner, "a", 30.0, acks_early=True).verdict is Verdict.GRANTED
    tally = restore(store, lines, by("import"))
    assert (tally.total, tally.skipped) == (0, {"waits or runs already": 1})
    assert count(store, Filter()).total == 0


def test_an_import_may_move_messages_to_another_broker(store):
    hold(store, "a")
    park(store, "a", "t")
    lines = list(export(store, Filter(), by("export")))
    store.client.flushall()
    hold(store, "a")
    restore(store, lines, by("import"), realm="S")
    assert [each.realm for each in select(store, Filter())] == ["S"]


def test_an_import_moves_waiting_tasks_to_another_broker(store):
    """They went on waiting for workers of the former broker."""
    holder = hold(store, "a")
    for task_id in ("t", "u", "v"):
        park(store, "a", task_id)
    lines = list(export(store, Filter(), by("export")))
    before = [each._replace(age=0.0, since=0.0) for each in select(store, Filter())]
    store.leave("w", "R", ["q"])
    tally = restore(store, lines, by("import"), realm="S")
    assert (tally.done, +tally.skipped) == ({"a": 3}, {})
    after = [each._replace(age=0.0, since=0.0) for each in select(store, Filter())]
    assert after == [each._replace(realm="S") for each in before]
    for realm in ("S", ""):  # the file itself does not move them back
        again = restore(store, lines, by("import"), realm=realm)
        assert (again.total, again.skipped) == (0, {"waits or runs already": 3})
    store.worker_heartbeat("other", "S", ["q"], 600)
    store.worker_heartbeat("w", "R", ["q"], 600)
    store.release("a", holder.token, Ending.FINAL)
    granted = store.receive("other", 1)
    assert granted.token == before[0].token
    assert store.receive("w", 0.01) is None
    assert store.parked("R") == {}
    assert store.parked("S")["q"].waiting == 2
    assert [entry["count"] for entry in store.audit() if entry["action"] == "import"] == [3]


def test_an_import_moves_no_task_to_another_broker_that_runs(store):
    holder = hold(store, "a")
    runs = park(store, "a", "t")
    lines = list(export(store, Filter(), by("export")))
    store.release("a", holder.token, Ending.FINAL)
    store.leave("w", "R", ["q"])
    assert restore(store, lines, by("import"), realm="S").total == 0
    assert [each.token for each in store.inspect("a").holders] == [runs]
    assert {each.realm for each in select(store, Filter())} <= {"R"}


def test_an_import_moves_tasks_to_another_broker_that_a_worker_must_end(store):
    """The workers of the former broker are gone: nobody else would store their results."""
    hold(store, "a")
    revoked, late = park(store, "a", "u"), park(store, "a", "v", timeout=5.0)
    store.leave("w", "R", ["q"])
    let_pass(store, 6)
    store.deliver_revoked("a", revoked, realm="R")
    store.sweep_and_grant("a")
    lines = list(export(store, Filter(), by("export")))
    assert {each.state for each in select(store, Filter())} == {"revoked", "overdue"}
    store.worker_heartbeat("other", "S", ["q"], 600)
    tally = restore(store, lines, by("import"), realm="S")
    assert (tally.done, +tally.skipped) == ({"a": 2}, {})
    ends = [store.receive("other", 1) for _ in range(2)]
    assert {(each.token, each.verdict) for each in ends} == {
        (revoked, "revoked"),
        (late, "overdue"),
    }
    assert {each.realm for each in select(store, Filter())} == {"S"}
    assert list(store.find_contradictions("a")) == []
    assert restore(store, lines, by("import"), realm="S").total == 0


def test_an_import_leaves_the_tasks_of_another_application_with_live_workers(store):
    """Workers of the app do not know these tasks, and would drop them as unregistered."""
    hold(store, "a")
    for realm in ("R", "gone", "S"):
        park(store, "a", f"of {realm}", realm=realm)
    park(store, "a", "purged", realm="R")
    lines = list(export(store, Filter(), by("export")))
    store.drop_waiters("a", [list(select(store, Filter()))[-1].token], by("drop"))
    assert served_realms(store, "S") == {"R"}
    assert served_realms(store, "") == set()
    tally = would_restore(lines, served_realms(store, "S"))
    assert (tally.done, tally.skipped) == ({"a": 2}, {SERVED: 2})
    tally = restore(store, lines, by("import"), realm="S", again=True)
    assert tally.done == {"a": 1}
    assert tally.skipped == {SERVED: 2, "waits or runs already": 1}
    assert [(each.task_id, each.realm) for each in select(store, Filter())] == [
        ("of R", "R"),
        ("of gone", "S"),
        ("of S", "S"),
    ]
    assert restore(store, lines, by("import"), again=True).done == {"a": 1}, "the purged one"


def test_a_worker_that_starts_while_tasks_are_adopted_keeps_its_tasks(store):
    """The script looks again whether a live worker consumes their queue."""
    hold(store, "a")
    token = park(store, "a", "t")
    assert store.adopt_messages("a", [token], "S", by("import")) == []
    assert [each.realm for each in select(store, Filter())] == ["R"]
    assert store.audit() == []


def test_an_adopted_task_that_was_returned_waits_for_the_end_of_its_delay(store):
    token = park(store, "a", "t")
    for _ in range(2):
        owner = Owner(store.inspect("a").holders[0].token, "t/0/0", "app.task", "w")
        store.claim(owner, "a", 30.0)
        store.release("a", owner.token, Ending.AGAIN)
    (delayed,) = select(store, Filter())
    assert (delayed.state, delayed.token.partition(".")[0]) == ("delayed", token.partition(".")[0])
    store.leave("w", "R", ["q"])
    assert store.adopt_messages("a", [delayed.token], "S", by("import")) == [delayed.token]
    assert store.adopt_messages("a", [delayed.token], "S", by("import")) == [delayed.token]
    (after,) = select(store, Filter())
    assert (after.state, after.realm) == ("delayed", "S")
    assert list(store.find_contradictions("a")) == []
    assert [entry["count"] for entry in store.audit()] == [1]


def drained(store, wanted=None, realm="R"):
    """Drain the tasks; return their ids."""
    sent = []
    drain(store, wanted or Filter(), by("drain"), realm=realm, publish=sent.append, pace=Pace(0))
    return ids(sent)


def without_time(line):
    """Return a line as earlier versions wrote it."""
    return json.dumps({name: v for name, v in json.loads(line).items() if name != "exported"})


def test_tasks_that_were_drained_after_their_export_are_refused_by_an_import(store):
    """They run from the broker, without a lock, and would run a second time."""
    hold(store, "a")
    for task_id in ("t", "u"):
        park(store, "a", task_id)
    lines = list(export(store, Filter(), by("export")))
    refuse_drained(store, lines)
    began = store.time()
    assert drained(store) == ["t", "u"]
    (at,) = store.drains().values()
    assert began - 0.001 <= at <= store.time()
    for given in (lines, map(without_time, lines), [*lines, "{"]):
        with pytest.raises(Refused, match=r"^2 tasks of this file .* UTC\..* --force$"):
            refuse_drained(store, given)
    with pytest.raises(Refused, match=r"^1 task of this file"):
        refuse_drained(store, ["{}"[:0], lines[0], "{", lines[1]])
    refuse_drained(store, ["{", *lines])  # the import parks nothing


def test_the_time_of_a_drain_is_forgotten_after_a_year(store):
    """The key stayed for ever."""
    hold(store, "a")
    park(store, "a", "t")
    assert drained(store) == ["t"]
    (key,) = store.client.keys("csl:*fleet:drained")
    assert 364 * 86_400 < store.client.ttl(key) <= 365 * 86_400


def test_an_export_that_begins_while_a_drain_runs_is_refused_too(store):
    """It has tasks that the drain sends later."""
    hold(store, "a")
    for number in range(3):
        park(store, "a", f"t{number}")
    lines = []

    def publish(each):
        if each.task_id == "t1":
            lines.extend(export(store, Filter(), by("export")))

    pace = Pace(0.2, sleep=lambda _seconds: None)  # two messages in a step
    drain(store, Filter(), by("drain"), realm="R", publish=publish, pace=pace)
    with pytest.raises(Refused, match=r"^3 tasks"):
        refuse_drained(store, lines)


def test_tasks_that_were_not_drained_since_their_export_are_imported(store):
    """No false alarm: after a drain of another queue or broker, or before the export."""
    hold(store, "a")
    park(store, "a", "early")
    assert drained(store) == ["early"]
    park(store, "a", "t")
    park(store, "a", "u", queue="other")
    park(store, "a", "v", realm="S")
    since = store.time() * 1000
    while store.time() * 1000 < since + 2:  # times are whole milliseconds
        pass
    lines = list(export(store, Filter(), by("export")))
    refuse_drained(store, lines)
    assert drained(store, Filter(queue="other")) == ["u"]
    kept = [line for line in lines if json.loads(line)["queue"] == "q"]
    refuse_drained(store, kept)
    with pytest.raises(Refused, match=r"^1 task "):
        refuse_drained(store, lines)
    store.client.flushall()
    refuse_drained(store, map(without_time, lines))  # as in another Redis


def test_a_message_that_a_drain_leaves_is_not_recorded_as_drained(store):
    """A worker with locks has parked it again."""
    hold(store, "a")
    park(store, "a", "t")

    def publish(each):
        again = Owner(new_token(), each.attempt, each.task)
        store.park(again, Claim("a", place=each.place, copy=True), MessageToPark(b"body", "R", "q"))

    drain(store, Filter(), by("drain"), realm="R", publish=publish, pace=Pace(0))
    purge(store, Filter(), by("purge"))
    assert store.drains() == {}


def test_tasks_that_were_adopted_and_then_drained_are_refused(store):
    """The file has their former broker, the drain their new one."""
    hold(store, "a")
    park(store, "a", "t")
    lines = list(export(store, Filter(), by("export")))
    store.leave("w", "R", ["q"])
    restore(store, lines, by("import"), realm="S")
    assert drained(store, realm="S") == ["t"]
    refuse_drained(store, lines)
    with pytest.raises(Refused):
        refuse_drained(store, lines, realm="S")


GOOD = {
    "lock": "a", "token": "abc.0", "task": "t", "attempt": "t/0/0", "realm": "R", "queue": "q",
    "lease": 30.0, "place": 1, "wait": None, "limit": 1, "message": "Ym9keQ==",
}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "7", json.dumps({**GOOD, "message": "*"}), *(
        json.dumps({key: value for key, value in GOOD.items() if key != left}) for left in GOOD
    )],
)  # fmt: skip
def test_an_invalid_line_is_named_and_the_lines_before_it_are_parked(store, line):
    hold(store, "a")
    with pytest.raises(
        ConfigurationError, match=r"^line 3 is not a parked task .* export wrote\.$"
    ):
        restore(
            store,
            [
                "",
                json.dumps(GOOD),
                line,
                json.dumps({**GOOD, "token": "later.0", "attempt": "u/0/0"}),
            ],
            by("import"),
        )
    assert [each.token for each in select(store, Filter())] == ["abc.0"]


def test_all_that_came_before_a_bad_line_is_parked(store):
    """Also those in the same group: an import that continues after the line must lose nothing."""
    hold(store, "a")
    good = [
        json.dumps({**GOOD, "token": f"{number:032x}.0", "attempt": f"{number}/0/0"})
        for number in range(25)
    ]
    with pytest.raises(ConfigurationError, match=r"^line 26 "):
        restore(store, [*good, "{"], by("import"))
    assert count(store, Filter()).total == 25


def test_an_import_goes_in_steps_of_twenty_and_of_eight_mebibytes():
    def groups(*sizes):
        to_park = [(Owner(""), Claim(""), MessageToPark(b"x" * size, "", "")) for size in sizes]
        return [len(group) for group in export_parked._batches(iter(to_park))]

    assert groups(*[1] * 41) == [20, 20, 1]
    assert groups(4 * 2**20, 4 * 2**20, 1, 9 * 2**20, 1) == [2, 1, 1, 1]
    assert groups() == []


def test_an_import_that_redis_refuses_raises_the_error(make_redis):
    """A full Redis keeps what it has, and takes no more."""
    server = make_redis("--maxmemory", "3mb")
    with server.client(decode_responses=False) as client:
        store = RedisAdminStore(client)
        line = json.dumps({**GOOD, "message": "YWFh" * 50_000})
        hold(store, "a")
        lines = [
            line.replace("abc.0", f"{number:032x}.0").replace("t/0/0", f"{number}/0/0")
            for number in range(40)
        ]
        with pytest.raises(BackendError) as raised:
            restore(store, lines, by("import"))
        parked = store.inspect("a").bodies
        assert 0 < parked < 40
        assert f"{parked} tasks of the file were parked before." in str(raised.value)
        assert sum(entry["count"] for entry in store.audit()) == parked
        store.close()


def test_a_full_redis_keeps_the_waiting_tasks_that_an_import_adopts(make_redis):
    """They were dropped, and could not be parked again."""
    with make_redis().client(decode_responses=False) as client:
        store = RedisAdminStore(client)
        hold(store, "a")
        for number in range(25):
            park(store, "a", f"t{number}")
        lines = list(export(store, Filter(), by("export")))
        client.config_set("maxmemory", 1)
        tally = restore(store, lines, by("import"), realm="S")
        assert tally.done == {"a": 25}
        assert {each.realm for each in select(store, Filter())} == {"S"}
        assert store.inspect("a").bodies == 25
        store.close()

"""The agent's rounds, on a clock that is turned by hand: what it asks of the store, and when again.

Store, desk, publisher and watchdog are of paper; each notes what it is told, and fails as told.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from kombu.message import Message

from celery_singleton_lock.worker.agent import data_loss
from celery_singleton_lock.worker import background_thread as background
from celery_singleton_lock.worker.agent.loop import (
    BEAT,
    SLOT_WAIT,
    SYNC,
    Agent,
)
from celery_singleton_lock.core.clock import ServerClock
from celery_singleton_lock.errors import BackendRefused, BackendUnreachable
from celery_singleton_lock.events import BackendDown, BackendUp, LeaseLost, Observers, ParkedLost
from celery_singleton_lock.worker.dispatch.notifier import Herald
from celery_singleton_lock.worker.agent.lost_leases import LANDING
from celery_singleton_lock.core.model import Delivery, Ending, Identity, Reply, Stray, Verdict
from celery_singleton_lock.core.lock_mode import Modes
from celery_singleton_lock.worker.dispatch.recently_ended import REMEMBERED, RecentEnds
from celery_singleton_lock.worker.agent.release_after_process_death import GONE, gone
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.worker.lock_header import Stamp
from celery_singleton_lock.worker.agent_queue import REFUSED_RETRY, RETRY
from support.waiting import eventually

CAPACITY = 2
MAX_BODY = 1000


class HandClock:
    """A clock that is turned by hand."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Leases:
    """A watchdog that renews nothing, and knows when each lease ends."""

    def __init__(self, clock, forgotten):
        self.clock = clock
        self.ends = {}
        self.forget = lambda token, patience: forgotten.append(token)
        self.watch = self.look_after = self.last_round = lambda *about, **more: None

    def valid_until(self, token):
        return self.ends.get(token)


class PaperStore:
    """Notes what it is asked; answers as told, or raises."""

    def __init__(self, clock):
        self.clock = clock
        self.calls = []
        self.fails = {}
        self.replies = {}
        self.bodies = {}
        self.inbox = []
        self.due = []
        self.strays = []
        self.switched = {}
        self.waited = []
        self.identities = [Identity(("marker",), frozenset({"run"}))]
        self.gone = set()

    def asked(self, *verbs):
        return [call for call in self.calls if call[0] in verbs]

    def _note(self, verb, *details):
        self.calls.append((verb, *details))
        if self.fails.get(verb):
            raise self.fails[verb]

    def park_many(self, parcels):
        tokens = [owner.token for owner, _, _ in parcels]
        self._note("park_many", *tokens)
        return [self.replies.get(token, Reply(Verdict.WAITING, rank=1)) for token in tokens]

    def release(self, name, token, ending, **_):
        self._note("release", token, ending)
        return self.replies.get(token, Reply(Verdict.RELEASED))

    def kick_many(self, names, **_):
        self._note("kick_many", *names)
        return self.strays

    def take_due(self, limit):
        self._note("take_due", limit)
        return self.due[:limit]

    def body(self, name, token):
        self._note("body", token)
        return self.bodies.get(token)

    def receive(self, worker, timeout):
        self._note("receive")
        return self.inbox.pop(0) if self.inbox else None

    def left(self, name, seal, tokens, *, sent, **_):
        self._note("left", seal, *tokens, sent)
        return len(tokens)

    def beat(self, worker, realm, queues, ttl, free, *, tasks):
        self._note("beat", *queues)
        self.free = free
        return self.switched

    def switch(self, task, mode):
        self._note("switch", task, mode)

    def waited_for(self):
        self._note("waited_for")
        return self.waited

    def let_run(self, names, tasks, most, **_):
        self._note("let_run", sorted(names), tasks, most)
        return len(names)

    def leave(self, worker, realm, queues):
        self._note("leave", *queues)

    def time(self):
        self._note("time")
        return 5000.0

    def probe(self):
        self._note("probe")

    def identify(self):
        return self.identities[-1]

    def kept(self, messages):
        self._note("kept", *(message.task_id for message in messages))
        return [message.task_id not in self.gone for message in messages]

    def traced(self, messages):
        self._note("traced", *(message.task_id for message in messages))
        return [message.task_id not in self.gone for message in messages]

    def vouch(self, tokens):
        self._note("vouch", *tokens)

    def note_lost(self, notes):
        self._note("note_lost", *notes)


class PaperFlights:
    """Knows what it was given."""

    def __init__(self):
        self.tokens = set()
        self.by_token = {}
        self.waiting = 0
        self.slotless = []
        self.begun = None

    def has(self, token):
        return token in self.tokens

    def has_begun(self, token):
        return token in (self.tokens if self.begun is None else self.begun)

    def waiting_since(self, until):
        return [request for request in self.slotless if request.received_at <= until]

    def who(self, token):
        return "app.task", token

    def backlog(self):
        return self.waiting

    def busy(self):
        return False


class PaperDesk:
    """Notes what it is told."""

    def __init__(self, clock):
        self.told = []
        self.children = True
        self.flights = PaperFlights()
        self.ends = RecentEnds(clock)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self.told.append((name, *args))

    def heard(self, *verbs):
        return [call for call in self.told if call[0] in verbs]


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def store(clock):
    return PaperStore(clock)


@pytest.fixture
def desk(clock):
    return PaperDesk(clock)


@pytest.fixture
def seen():
    """What observers, Celery's side and the publisher were given; whether the main loop turns."""
    return SimpleNamespace(
        events=[], received=[], published=[], refuse=None, still=False, later=[], forgotten=[]
    )


@pytest.fixture
def agent(clock, store, desk, seen):
    """An agent without its threads: the tests call its rounds."""

    def send_back(body, queue, attempt, place):
        if seen.refuse:
            raise seen.refuse
        seen.published.append((attempt, queue))

    def post(call, *args):
        if seen.still:
            seen.later.append((call, args))
        else:
            call(*args)

    return Agent(
        store,
        worker="w#1",
        realm="r",
        place=ServerClock(clock),
        queues=SimpleNamespace(consumed=lambda: ["q"], queue_of=lambda request: "q"),
        declared=lambda: {"task"},
        rules=lambda task: LockOptions(),
        receive=seen.received.append,
        post=post,
        reap=lambda: None,
        abort=lambda _token: None,
        publisher=SimpleNamespace(send_back=send_back, close=lambda: None),
        watchdog=Leases(clock, seen.forgotten),
        modes=Modes({"task": "enforce"}),
        herald=Herald(Observers([SimpleNamespace(notify=seen.events.append)])),
        address="redis://localhost",
        done_for=60.0,
        max_body=MAX_BODY,
        capacity=CAPACITY,
        free=lambda: 2,
        stands_still=lambda: seen.still,
        desk=lambda clerk: desk,
    )


def stamp(token):
    return Stamp(f"k:{token}", token, f"{token}/0/0", "task", "w#1")


def request(token, body=b"[[], {}, {}]"):
    """Return a message that has passed the desk."""
    headers = {"id": token, "task": "task"}
    message = Message(
        body=body, content_type="application/json", content_encoding="utf-8", headers=headers
    )
    told = {"message": message, "body": body, "options": lambda of_task: of_task("task")}
    return SimpleNamespace(id=token, stamp=stamp(token), task="task", returns=0, **told)


def delivery(token, body=b"{}"):
    return Delivery(f"k:{token}", token, 7, body)


# -- grants that others could begin sooner --------------------------------------------------------


def slotless(token, task="task", received_at=0.0):
    """Return a granted message that waits for a slot."""
    named = SimpleNamespace(name=task)
    of_call = {"options": lambda of_task: of_task(named)}
    return SimpleNamespace(
        id=token, stamp=stamp(token), task=named, received_at=received_at, **of_call
    )


def test_a_heartbeat_tells_how_many_slots_are_free(agent, store):
    agent.run_once()
    assert store.free == 2


def test_a_grant_that_has_waited_two_seconds_for_a_slot_is_offered_to_others(
    agent, store, desk, seen
):
    """One after the other, as long as somebody takes them; of another task in any case."""
    waiting = [slotless("a"), slotless("b"), slotless("c"), slotless("d", task="other")]
    desk.flights.slotless = waiting
    store.replies["b"] = Reply(Verdict.GRANTED)
    agent.run_once()
    assert store.asked("release") == [("release", token, Ending.OFFER) for token in "abd"]
    assert desk.heard("withdraw") == [("withdraw", waiting[0]), ("withdraw", waiting[3])]
    assert seen.forgotten == ["a", "d"]


def test_a_grant_is_not_offered_before_it_has_waited_two_seconds(agent, store, desk, clock):
    desk.flights.slotless = [slotless("a", received_at=clock.now - SLOT_WAIT + 0.1)]
    agent.run_once()
    assert store.asked("release") == []


def test_a_grant_goes_on_to_another_worker_while_the_main_loop_stands_still(agent, store, seen):
    seen.still = True
    store.inbox.append(delivery("a"))
    agent.inbox.receive()
    agent.run_once()
    assert store.asked("release") == [("release", "a", Ending.OFFER)]
    seen.still = False
    for call, args in seen.later:
        call(*args)
    assert seen.received == []


def test_a_grant_that_nobody_else_takes_waits_for_the_main_loop_and_is_delivered_once(
    agent, store, seen
):
    """If it lapses meanwhile, the next delivery of the message takes its place."""
    seen.still = True
    for token in ("a.0", "a.1"):
        store.replies[token] = Reply(Verdict.GRANTED)
        store.inbox.append(delivery(token))
        agent.inbox.receive()
    agent.run_once()
    seen.still = False
    for call, args in seen.later:
        call(*args)
    assert [each.token for each in seen.received] == ["a.1"]


# -- orders ----------------------------------------------------------------------------------------


def test_like_orders_that_pile_up_go_together_and_none_passes_another(agent, store):
    """Two parks in one call, then the release between them and the third, then that."""
    agent.park(request("a"))
    agent.park(request("b"))
    agent.end(stamp("c"), Ending.FINAL, None)
    agent.park(request("d"))
    assert agent.run_once() == 4
    assert store.asked("park_many", "release") == [
        ("park_many", "a", "b"),
        ("release", "c", Ending.FINAL),
        ("park_many", "d"),
    ]


def test_the_desk_hears_what_became_of_each_message(agent, store, desk):
    """Kept, refused by a full queue, or ended already: each by its own word."""
    store.replies["full"] = Reply(Verdict.FULL)
    store.replies["done"] = Reply(Verdict.DONE)
    messages = {token: request(token) for token in ("kept", "full", "done")}
    for message in messages.values():
        agent.park(message)
    agent.run_once()
    assert [call[:4] for call in desk.heard("parked", "refused", "dropped")] == [
        ("parked", messages["kept"], "", 1),
        ("refused", messages["full"], "as many wait as lock_max_waiting allows"),
        ("dropped", messages["done"]),
    ]


def test_a_message_that_is_too_long_is_refused_and_never_sent(agent, store, desk):
    """The reason names the setting; the messages beside it are kept."""
    agent.park(request("long", b"x" * MAX_BODY))
    agent.park(request("short"))
    agent.run_once()
    assert store.asked("park_many") == [("park_many", "short")]
    [(_, refused, reason)] = desk.heard("refused")
    assert refused.stamp.token == "long"
    assert "singleton_lock_max_body_bytes" in reason


def test_an_error_of_ours_ends_neither_the_round_nor_the_orders_behind_it(agent, store, caplog):
    """A bug in one order is logged; the next order is carried out."""
    store.fails["body"] = KeyError("a bug")
    agent.look_up(request("a"), "k:a", "a")
    agent.park(request("b"))
    with caplog.at_level(logging.ERROR):
        agent.run_once()
    assert store.asked("park_many") == [("park_many", "b")]
    assert "the agent failed" in caplog.text


# -- data of Redis is lost -------------------------------------------------------------------------


def rounds(agent, clock, seconds):
    """Let time pass, round by round."""
    for _ in range(int(seconds)):
        clock.now += 2 * BEAT
        agent.run_once()


def park_two(agent, clock):
    """Park "a" and "b"; a look knows them."""
    for token in "ab":
        agent.park(request(token))
    rounds(agent, clock, 4)


def emptied(store):
    """Return how a Redis is known that has lost its data."""
    store.identities.append(Identity(("new marker",), frozenset({"run"})))


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_parked_messages_that_redis_has_lost_are_reported_once(agent, store, clock, seen, caplog):
    park_two(agent, clock)
    emptied(store)
    store.gone = {"a", "b"}
    rounds(agent, clock, 20)
    (told,) = errors(caplog)
    assert "2 of the 2 messages that this worker has parked are not there any more" in told
    assert "task[a], task[b]" in told
    assert "marker is gone" in told
    assert store.asked("note_lost") == [("note_lost", "a", "b")]
    assert seen.events == [ParkedLost(f"k:{token}", "task", token) for token in "ab"]
    assert agent.counts()["parked_lost"] == 2


def test_messages_that_have_ended_before_the_loss_are_not_reported(agent, store, clock, caplog):
    park_two(agent, clock)
    store.gone = {"a"}
    rounds(agent, clock, 4)
    emptied(store)
    store.gone = {"a", "b"}
    rounds(agent, clock, 20)
    assert store.asked("note_lost") == [("note_lost", "b")]


def test_a_promoted_replica_that_has_all_messages_is_no_loss(agent, store, clock, seen, caplog):
    caplog.set_level(logging.INFO)
    park_two(agent, clock)
    store.identities.append(Identity(("marker",), frozenset({"another run"})))
    rounds(agent, clock, 20)
    assert errors(caplog) == []
    assert seen.events == []
    (told,) = [text for text in caplog.messages if "may have lost data" in text]
    assert "No message that this worker has parked is lost (2 had not ended)" in told


def test_a_lost_end_is_told_again_and_vouched_for(agent, store, desk, clock):
    """The other workers then do not take what has ended here for lost."""
    rounds(agent, clock, 1)
    desk.ends.note(stamp("ended.0"))
    desk.flights.by_token["running.3"] = None
    assert not desk.ends.forgotten("ended.1")
    store.identities.append(Identity(("marker",), frozenset({"another run"})))
    rounds(agent, clock, 5)
    assert ("release", "ended.0", Ending.FINAL) in store.calls
    assert store.asked("vouch") == [("vouch", "ended", "running")]
    assert desk.ends.forgotten("ended.1")
    desk.ends.note(stamp("later.0"))
    clock.now += 1
    assert not desk.ends.forgotten("later.1")
    clock.now += REMEMBERED
    assert desk.ends.stamps() == []


def test_a_worker_that_ends_reports_a_loss_that_it_has_not_noticed_yet(agent, store, clock, caplog):
    park_two(agent, clock)
    emptied(store)
    store.gone = {"a", "b"}
    agent._farewell()
    assert len(errors(caplog)) == 1


def test_the_oldest_messages_are_given_up_and_counted_where_too_many_are_parked(
    agent, store, clock, monkeypatch, caplog
):
    monkeypatch.setattr(data_loss, "MOST", 1)
    park_two(agent, clock)
    assert agent.counts()["parked_untracked"] == 1
    emptied(store)
    store.gone = {"a", "b"}
    rounds(agent, clock, 20)
    assert store.asked("note_lost") == [("note_lost", "b")]
    assert "1 older ones were not tracked" in errors(caplog)[0]


# -- Redis away and back ---------------------------------------------------------------------------


def test_what_redis_did_not_answer_is_tried_again_until_it_does(agent, store, desk, seen, clock):
    """Down and up are told once each; the message is parked, and told so, once."""
    store.fails = dict.fromkeys(("park_many", "time", "beat"), BackendUnreachable())
    agent.park(request("a"))
    for _ in range(3):
        agent.run_once()
        clock.now += RETRY
    assert len(store.asked("park_many")) == 3
    assert desk.told == [("backend_down",)]
    store.fails = {}
    agent.run_once()
    clock.now += 2 * BEAT
    agent.run_once()
    assert len(store.asked("park_many")) == 4
    assert [call[0] for call in desk.told] == ["backend_down", "parked", "backend_up"]
    down, up = seen.events
    assert isinstance(down, BackendDown)
    assert isinstance(up, BackendUp)
    assert 3 * RETRY <= up.down_for <= 3 * RETRY + 2 * BEAT  # with the next beat, which has jitter


def test_a_redis_that_is_full_is_away_until_it_takes_a_lock_again(agent, store, desk, clock):
    """It answers all that takes no memory, so only a lock that it takes tells that it is back."""
    agent.backend_failed()
    store.fails = {"probe": BackendRefused("OOM")}
    for _ in range(5):
        clock.now += 2 * BEAT
        agent.run_once()
    assert desk.told == [("backend_down",)]
    store.fails = {}
    clock.now += 2 * BEAT
    agent.run_once()
    assert desk.told == [("backend_down",), ("backend_up",)]
    probed = len(store.asked("probe"))
    clock.now += 2 * BEAT
    agent.run_once()
    assert len(store.asked("probe")) == probed


def test_it_is_not_tried_again_before_its_time(agent, store, clock):
    """An order that failed waits; the round in between asks nothing for it."""
    store.fails["park_many"] = BackendUnreachable()
    agent.park(request("a"))
    agent.run_once()
    clock.now += RETRY * 0.9
    agent.run_once()
    assert len(store.asked("park_many")) == 1


def test_a_refusal_of_one_message_holds_up_no_other(agent, store, desk, clock):
    """It stays with the broker, and is tried again later than after an outage would be."""
    store.replies["a"] = BackendRefused("full")
    agent.park(request("a"))
    agent.park(request("b"))
    agent.run_once()
    assert [call[0] for call in desk.told] == ["parked"]
    del store.replies["a"]
    clock.now += RETRY
    agent.run_once()
    assert len(store.asked("park_many")) == 1
    clock.now += REFUSED_RETRY
    agent.run_once()
    assert store.asked("park_many")[1:] == [("park_many", "a")]
    assert len(desk.heard("parked")) == 2


def test_a_delivery_that_failed_is_left_to_its_claim_lease(agent, store, seen, clock):
    """Its grant lapses and is made again: trying twice could deliver it twice."""
    store.fails["body"] = BackendUnreachable()
    agent._orders.put(delivery("a", body=None))
    agent.run_once()
    store.fails, store.bodies = {}, {"a": b"{}"}
    clock.now += REFUSED_RETRY
    agent.run_once()
    assert seen.received == []


# -- delivering ------------------------------------------------------------------------------------


def test_a_delivery_without_its_message_fetches_it(agent, store, seen):
    """A message too long for the inbox is asked for; one that is settled meanwhile is no work."""
    store.bodies["a"] = b"long"
    agent._orders.put(delivery("a", body=None))
    agent._orders.put(delivery("settled", body=None))
    agent.run_once()
    assert [(found.token, found.body) for found in seen.received] == [("a", b"long")]
    assert agent.counts()["delivered"] == 1


def test_a_copy_goes_to_the_pool_only_if_its_message_is_not_kept(agent, store, desk):
    """Kept in Redis, the copy is dropped; unknown, it is all that is left and runs."""
    store.bodies["kept"] = b"{}"
    kept, unknown = request("kept"), request("unknown")
    agent.look_up(kept, "k:kept", "kept")
    agent.look_up(unknown, "k:unknown", "unknown")
    agent.run_once()
    assert desk.heard("dropped", "redispatch") == [("dropped", kept), ("redispatch", unknown)]


# -- releasing -------------------------------------------------------------------------------------


def test_a_lock_is_not_released_before_its_process_is_gone(agent, store, clock, caplog):
    """Neither while it lives, nor for ever if it does not go: its lease decides, and it is told."""
    agent._watchdog.ends["a"] = clock.now + 30.0
    agent.end(stamp("a"), Ending.FINAL, os.getpid())
    agent.run_once()
    for _ in range(5):
        clock.now += GONE
        agent.run_once()
        assert store.asked("release") == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"the process {os.getpid()} of task" in caplog.text
    assert "in 25 s, when its lease ends" in caplog.text
    clock.now += GONE
    agent.run_once()
    assert store.asked("release") == [("release", "a", Ending.FINAL)]


def test_a_process_that_goes_late_is_heard_of_before_its_lease_ends(agent, store, clock):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        agent._watchdog.ends["a"] = clock.now + 30.0
        agent.end(stamp("a"), Ending.AGAIN, child.pid)
        agent.run_once()
        clock.now += 2 * GONE
        agent.run_once()
        assert store.asked("release") == []
        child.kill()
        eventually(lambda: gone(child.pid), 10)
        clock.now += 0.6
        agent.run_once()
    assert store.asked("release") == [("release", "a", Ending.AGAIN)]


def test_a_lock_of_a_process_that_is_gone_is_released_at_once(agent, store):
    """A zombie counts as gone: it runs nothing."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        eventually(lambda: gone(child.pid), 10)  # not reaped yet
        agent.end(stamp("a"), Ending.AGAIN, child.pid)
        agent.run_once()
    assert store.asked("release") == [("release", "a", Ending.AGAIN)]


# -- sweeping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backlog", "asked"), [(0, [8]), (3, [5]), (8, []), (50, [])], ids="backlog-{}".format
)
def test_a_sweep_takes_no_more_than_the_pool_can_soon_run(agent, store, desk, backlog, asked):
    """Four per slot, less those that wait for one already."""
    desk.flights.waiting = backlog
    agent.run_once()
    assert [call[1] for call in store.asked("take_due")] == asked


def test_a_sweep_looks_at_each_lock_that_it_has_taken_from_the_list(agent, store):
    """Nobody else sees them for a while: one passed by would be free, and wait."""
    store.due = ["k:a", "k:b"]
    agent.run_once()
    assert store.asked("kick_many") == [("kick_many", "k:a", "k:b")]


def test_a_stray_is_published_and_a_broker_that_refuses_stops_nothing(agent, store, seen, caplog):
    """It goes to its queue, and Redis is told; if that fails, Redis is told that too."""
    store.due = ["k:a"]
    store.strays = [
        Stray("k:a", f"t{n}", "far", b"{}", "seal", f"{n}/0/0", 10 + n) for n in range(2)
    ]
    agent.run_once()
    store.strays = store.due = []
    eventually(lambda: agent.counts()["published"] == 2, 5, "both published")
    assert seen.published == [("0/0/0", "far"), ("1/0/0", "far")]
    eventually(lambda: (agent.run_once(), store.asked("left"))[1], 5, "told")
    assert store.asked("left") == [("left", "seal", "t0", "t1", True)]
    seen.refuse = OSError("no broker")
    store.strays, store.due = [Stray("k:a", "t2", "far", b"{}", "seal2")], ["k:a"]
    agent._next_beat = 0.0
    agent.run_once()
    store.strays = store.due = []
    eventually(lambda: "could not be sent to the broker" in caplog.text, 5, "a warning")
    eventually(lambda: (agent.run_once(), store.asked("left")[1:])[1], 5, "told")
    assert store.asked("left")[1:] == [("left", "seal2", "t2", False)]
    assert agent.counts()["published"] == 2


def test_the_servers_clock_is_asked_rarely(agent, store, clock):
    """Once per SYNC seconds, whatever the number of beats."""
    for _ in range(10):
        agent.run_once()
        clock.now += SYNC / 6
    assert len(store.asked("time")) == 2
    assert len(store.asked("beat")) == 10


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [True, False])
def test_a_loss_is_reported_unless_the_task_has_just_ended(agent, desk, seen, clock, ended, caplog):
    """Its end may be on its way from the pool: a second is given to it."""
    desk.flights.tokens = {"a"}
    agent._losses.noticed("k:a", "a")
    agent.run_once()
    assert seen.events == []
    if ended:
        desk.flights.tokens = set()
    clock.now += LANDING + 0.01
    agent.run_once()
    assert [type(event) for event in seen.events] == ([] if ended else [LeaseLost])
    assert ("was lost" in caplog.text) is not ended


def test_a_grant_that_is_gone_before_its_task_begins_is_no_loss(agent, desk, seen, clock, caplog):
    """It waited for a slot: it lapsed, went to another worker, or its queue was deleted."""
    desk.flights.tokens, desk.flights.begun = {"a"}, set()
    agent._losses.noticed("k:a", "a")
    agent.run_once()
    clock.now += LANDING + 0.01
    agent.run_once()
    assert seen.events == []
    assert "was lost" not in caplog.text


def test_a_loss_waits_for_the_main_loop_which_may_have_an_end_to_hear_of(agent, desk, seen, clock):
    seen.still, desk.flights.tokens = True, {"a"}
    agent._losses.noticed("k:a", "a")
    for _ in range(10):
        clock.now += LANDING
        agent.run_once()
    assert seen.events == []
    seen.still = False
    for call, args in seen.later:
        call(*args)
    clock.now += LANDING + 0.01
    agent.run_once()
    agent.run_once()
    assert [type(event) for event in seen.events] == [LeaseLost]


# -- the end ---------------------------------------------------------------------------------------


def test_a_worker_that_retires_gives_back_what_is_in_its_inbox(agent, store, seen):
    """It leaves the fleet first, so that nothing new is pushed; then each grant returns."""
    store.inbox = [delivery("a"), delivery("b")]
    agent.retire()
    agent.run_once()
    verbs = [call for call in store.calls if call[0] in ("leave", "release")]
    assert verbs == [
        ("leave", "q"),
        ("release", "a", Ending.AGAIN),
        ("release", "b", Ending.AGAIN),
    ]
    assert seen.received == []


def test_a_delivery_that_arrives_after_retirement_is_given_back(agent, store, seen):
    """Nobody would run it here; the next worker does, in its old place."""
    agent.retire()
    agent.run_once()
    agent._orders.put(delivery("late"))
    agent.run_once()
    assert store.asked("release") == [("release", "late", Ending.AGAIN)]
    assert seen.received == []


def test_a_retired_worker_neither_beats_nor_sweeps(agent, store, clock):
    """A beat would put it back into the fleet."""
    agent.retire()
    agent.run_once()
    clock.now += 10
    agent.run_once()
    assert store.asked("beat", "take_due") == []


def test_stop_carries_out_what_was_ordered_and_ends_both_threads(agent, store, desk):
    """The threads run, an order is given and the agent stopped: done, told, and gone."""
    store.receive = lambda worker, timeout: agent.inbox._retired.wait(timeout) and None
    agent.start()
    agent.start()  # twice is once
    threads = [agent._agent_thread, agent._inbox_thread]
    assert all(thread.is_alive() for thread in threads)
    message = request("a")
    agent.park(message)
    agent.stop(timeout=60)
    assert [call[:4] for call in desk.heard("parked")] == [("parked", message, "", 1)]
    assert store.asked("leave")
    assert not any(thread.is_alive() for thread in threads)


def test_stop_ends_though_redis_is_away(agent, store, caplog):
    """Leases are left to end; the worker's exit does not wait for Redis."""
    store.fails = dict.fromkeys(("park_many", "leave", "time", "beat"), BackendUnreachable())
    store.receive = lambda worker, timeout: agent.inbox._retired.wait(timeout) and None
    agent.start()
    agent.park(request("a"))
    agent.stop(timeout=60)
    assert "leases are left to end" in caplog.text
    assert not any(thread.is_alive() for thread in (agent._agent_thread, agent._inbox_thread))


@pytest.mark.parametrize(
    "step", ["_round", "run_once", "_pause", "_tick", "_look_after_children", "_carry_out"]
)
@pytest.mark.parametrize("error", [KeyError("a bug of ours"), SystemExit(1)], ids=["bug", "exit"])
def test_no_error_of_a_round_ends_the_agents_thread(agent, store, monkeypatch, caplog, step, error):
    """It beats and takes orders afterwards; else nothing of this worker was delivered any more."""
    monkeypatch.setattr(background, "PAUSE", 0.01)
    store.receive = lambda worker, timeout: agent.inbox._retired.wait(timeout) and None
    real, failures = getattr(agent, step), [error]

    def broken(*args):
        if failures:
            raise failures.pop()
        return real(*args)

    monkeypatch.setattr(agent, step, broken)
    monkeypatch.setattr(agent._agent_thread, "_one_round", agent._round)
    agent.start()
    agent.run_errand(lambda: None)
    eventually(lambda: failures == [])
    done = threading.Event()
    agent.run_errand(done.set)
    assert done.wait(10)
    agent.stop(timeout=60)
    assert "Traceback" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dead", ["agent", "inbox"])
def test_of_the_agents_threads_each_starts_the_other_again(
    agent, store, clock, monkeypatch, caplog, dead
):
    class Killed(BaseException):
        pass

    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    thread = {"agent": agent._agent_thread, "inbox": agent._inbox_thread}[dead]
    real, killing = thread._one_round, [Killed()]

    def one_round():
        if killing:
            raise killing.pop()
        return real()

    def receive(worker, timeout):
        clock.now += 0.5
        agent.inbox._retired.wait(0.01)

    monkeypatch.setattr(thread, "_one_round", one_round)
    store.receive = receive
    agent.start()
    if dead == "inbox":
        clock.now += 10
    eventually(lambda: thread.restarts == 1 and thread.is_alive())
    assert f"singleton-lock-{dead} has died" in caplog.text
    assert set(agent.last_rounds()) == {
        "singleton-lock-agent",
        "singleton-lock-inbox",
        "singleton-lock-outbox",
        "csl-watchdog",
    }
    agent.stop(timeout=60)

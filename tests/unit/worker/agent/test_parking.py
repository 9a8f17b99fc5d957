"""Messages are parked, and parked again until Redis answers."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.lock_set import LockSet, Part
from celery_singleton_lock.core.lock_view import Holder, WaitsFor
from celery_singleton_lock.core.model import Ending, Reply, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.errors import BackendRefused, BackendUnreachable, LockUnusable
from celery_singleton_lock.events import BackendDown, BackendUp
from celery_singleton_lock.worker.agent.loop import (
    BEAT,
)
from celery_singleton_lock.worker.agent_commands import Park, Release
from celery_singleton_lock.worker.agent_queue import REFUSED_RETRY, RETRY
from support.agent_fakes import (
    MAX_BODY,
    header,
    request,
)


def test_the_dispatcher_learns_the_result_for_each_message(agent, store, dispatcher):
    """Kept, refused by a full queue, or ended already: each by its own word."""
    store.replies["kept"] = Reply(Verdict.WAITING, rank=1, waits_for=WaitsFor.PAUSE)
    store.replies["full"] = Reply(Verdict.FULL, waits_for=WaitsFor.HOLDER)
    store.replies["done"] = Reply(Verdict.DONE)
    messages = {token: request(token) for token in ("kept", "full", "done")}
    for message in messages.values():
        agent._commands.put(Park(message))
    agent.run_once()
    assert [call[:5] for call in dispatcher.heard("parked", "refused", "dropped")] == [
        ("parked", messages["kept"], "", 1, "pause"),
        ("refused", messages["full"], "as many wait as lock_max_waiting allows", "holder"),
        ("dropped", messages["done"]),
    ]


def test_a_message_that_is_granted_at_once_is_behind_nobody(agent, store, dispatcher):
    """The lock became free meanwhile, so the holder in the reply is the message itself."""
    store.replies["a"] = Reply(Verdict.WAITING, holder=Holder("a", "t", "id"))
    agent._commands.put(Park(request("a")))
    agent.run_once()
    assert [call[2:5] for call in dispatcher.heard("parked")] == [("", 0, "")]


def test_a_message_with_an_unanswered_claim_ends_that_delivery_and_finds_room(agent, store):
    """Its queue has admitted it before, with its size."""
    message = request("a", b"x" * MAX_BODY)
    message.is_unanswered = True
    agent._commands.put(Park(message))
    agent.run_once()
    [claim] = store.claims
    assert (claim.unanswered, claim.max_waiting) == (True, None)


def test_a_message_that_is_too_long_is_refused_and_never_sent(agent, store, dispatcher):
    """The reason names the setting; the messages beside it are kept."""
    agent._commands.put(Park(request("long", b"x" * MAX_BODY)))
    agent._commands.put(Park(request("short")))
    agent.run_once()
    assert store.asked("park_many") == [("park_many", "short")]
    [(_, refused, reason)] = dispatcher.heard("refused")
    assert refused.lock_header.token == "long"
    assert "singleton_lock_max_body_bytes" in reason


def test_what_redis_did_not_answer_is_tried_again_until_it_does(
    agent, store, dispatcher, seen, clock
):
    """Down and up are logged once each; the message is parked once, with one event."""
    store.fails = dict.fromkeys(("park_many", "time", "worker_heartbeat"), BackendUnreachable())
    agent._commands.put(Park(request("a")))
    for _ in range(3):
        agent.run_once()
        clock.now += RETRY
    assert len(store.asked("park_many")) == 3
    assert dispatcher.told == [("backend_down",)]
    store.fails = {}
    agent.run_once()
    clock.now += 2 * BEAT
    agent.run_once()
    assert len(store.asked("park_many")) == 4
    assert [call[0] for call in dispatcher.told] == ["backend_down", "parked", "backend_up"]
    down, up = seen.events
    assert isinstance(down, BackendDown)
    assert isinstance(up, BackendUp)
    assert 3 * RETRY <= up.down_for <= 3 * RETRY + 2 * BEAT  # with the next beat, which has jitter


def test_a_redis_that_is_full_is_away_until_it_takes_a_lock_again(agent, store, dispatcher, clock):
    """It answers all that takes no memory, so only a lock that it takes tells that it is back."""
    agent.health.not_answered()
    store.fails = {"probe": BackendRefused("OOM")}
    for _ in range(5):
        clock.now += 2 * BEAT
        agent.run_once()
    assert dispatcher.told == [("backend_down",)]
    store.fails = {}
    clock.now += 2 * BEAT
    agent.run_once()
    assert dispatcher.told == [("backend_down",), ("backend_up",)]
    probed = len(store.asked("probe"))
    clock.now += 2 * BEAT
    agent.run_once()
    assert len(store.asked("probe")) == probed


def test_it_is_not_tried_again_before_its_time(agent, store, clock):
    """An order that failed waits; the round in between asks nothing for it."""
    store.fails["park_many"] = BackendUnreachable()
    agent._commands.put(Park(request("a")))
    agent.run_once()
    clock.now += RETRY * 0.9
    agent.run_once()
    assert len(store.asked("park_many")) == 1


def test_a_refusal_of_one_message_holds_up_no_other(agent, store, dispatcher, clock):
    """It stays with the broker, and is tried again later than after an outage would be."""
    store.replies["a"] = BackendRefused("full")
    agent._commands.put(Park(request("a")))
    agent._commands.put(Park(request("b")))
    agent.run_once()
    assert [call[0] for call in dispatcher.told] == ["parked"]
    del store.replies["a"]
    clock.now += RETRY
    agent.run_once()
    assert len(store.asked("park_many")) == 1
    clock.now += REFUSED_RETRY
    agent.run_once()
    assert store.asked("park_many")[1:] == [("park_many", "a")]
    assert len(dispatcher.heard("parked")) == 2


def test_a_refused_message_is_logged_once_not_with_each_try(agent, store, clock, caplog):
    """A Redis that is full for an hour would get 720 lines for each message that waits for it."""
    store.replies["a"] = BackendRefused("full")
    agent._commands.put(Park(request("a")))
    for _ in range(5):
        agent.run_once()
        clock.now += 2 * REFUSED_RETRY
    assert len(store.asked("park_many")) == 5
    assert caplog.text.count("stays with the broker") == 1


def test_the_line_about_a_refused_message_says_that_no_one_else_has_it(agent, store, caplog):
    """An early acknowledged task has raised RetryLater: the broker has no message of it."""
    store.replies["a"] = BackendRefused("full")
    message = request("a")
    message.is_here_only = True
    agent._commands.put(Park(message))
    agent.run_once()
    assert "is in this worker only, until Redis stores it: full" in caplog.text
    assert "stays with the broker" not in caplog.text


@pytest.mark.parametrize("error", [BackendUnreachable("away"), BackendRefused("NOPERM")])
def test_a_release_that_fails_is_logged_once_not_with_each_try(agent, store, clock, caplog, error):
    store.fails["release"] = error
    if isinstance(error, BackendUnreachable):
        store.fails["worker_heartbeat"] = error
    agent._commands.put(Release(header("a"), Ending.FINAL))
    for _ in range(5):
        agent.run_once()
        clock.now += 2 * REFUSED_RETRY
    assert len(store.asked("release")) == 5
    assert caplog.text.count("Trying again") == 1


def test_a_lock_that_redis_refuses_keeps_no_other_message_from_being_parked(agent, store):
    """A task with several locks starts over, and Redis refuses one that it still holds."""
    begins_again, other = request("a"), request("b")
    frees = (Part("k:wrong", "wrong"),)
    locks = LockSet((Part("k:a", "a"), Part("k:z", new_token())), frees=frees)
    begins_again.lock_header = begins_again.lock_header._replace(lock_set=locks)
    store.fails["release"] = LockUnusable("wrong type")
    agent._commands.put(Park(begins_again))
    agent._commands.put(Park(other))
    agent.run_once()
    assert store.asked("park_many") == [("park_many", "b")]

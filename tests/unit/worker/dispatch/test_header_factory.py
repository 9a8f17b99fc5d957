"""The lock header: tokens, places, and arguments that are not decoded twice."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock.config.call_options import HEADER as OPTIONS
from celery_singleton_lock.core.owner_token import base_of
from celery_singleton_lock.worker.agent_commands import LookUp
from celery_singleton_lock.worker.dispatch.dispatcher import worker_id
from celery_singleton_lock.worker.lock_header import (
    COPY,
    FIRST,
    HEADER_KEY,
    MOVED,
    REQUEUED,
    UNANSWERED,
    LockHeader,
    may_be_copied,
)


def test_a_message_of_a_free_lock_goes_to_the_pool_with_a_header(parts):
    """Its header has lock, token and attempt; nobody is asked."""
    request = parts.message("early", "a")
    parts.dispatcher(request)
    assert parts.sent == [request]
    header = LockHeader(*request.request_dict[HEADER_KEY])
    assert (header.name, header.attempt, header.worker) == ("k:a", f"{request.id}/0/0", "w#1")
    assert parts.agent.calls == []


@pytest.mark.parametrize("canvas", [{}, {"chain": None, "callbacks": None}, {"chain": []}])
def test_a_child_need_not_decode_the_arguments_again(parts, canvas):
    """The main process has, for the lock's name, and Celery sends them along anyway."""
    request = parts.message("early", "a", canvas=canvas)
    parts.dispatcher(request)
    assert (request.body, request.content_type) == ([["a"], {}, canvas], None)
    assert request.content_encoding is None


def test_a_canvas_travels_as_it_came(parts):
    """Celery does not pickle it, and there may be in it what cannot be."""
    request = parts.message("early", "a", canvas={"chain": [{"task": "next"}]})
    before = request.body
    parts.dispatcher(request)
    assert (request.body, request.content_type) == (before, "application/json")


def test_where_tasks_share_a_process_each_decodes_its_arguments(parts):
    """They would share them with the message, and a task may change its own."""
    parts.dispatcher.children = False
    request = parts.message("early", ["a"])
    before = request.body
    parts.dispatcher(request)
    assert (request.body, request.content_type) == (before, "application/json")


def test_tokens_are_never_the_task_id(parts):
    """L14: two deliveries of one task have two tokens."""
    one, two = (parts.message("early", "a", request_id="same") for _ in range(2))
    parts.dispatcher(one)
    parts.dispatcher(two)
    assert one.lock_header.token != two.lock_header.token
    assert "same" not in one.lock_header.token


def test_places_grow_with_the_order_of_arrival(parts):
    """A message that arrived later never has the smaller place."""
    parts.place.sync(1000.0, 0.0, 0.0)
    requests = [parts.message("early", key) for key in "abc"]
    for request in requests:
        parts.dispatcher(request)
    places = [request.lock_header.place for request in requests]
    assert places == sorted(set(places))


def test_a_redelivered_message_is_marked_as_a_copy(parts):
    """Only then the script looks for its twin."""
    request = parts.message("late", "a", redelivered=True)
    parts.dispatcher(request)
    assert request.lock_header.copy


@pytest.mark.parametrize(
    ("known", "sent"),
    [
        (True, {}),
        (True, {REQUEUED: [1, 12], FIRST: "x/0/0"}),
        (True, {REQUEUED: [1, 12], FIRST: "x/0/0", "redelivered": True}),
        (False, {"redelivered": True}),
        (False, {REQUEUED: [1, 12]}),
        (False, {REQUEUED: [1, 12], FIRST: "y/0/0"}),
        (False, {MOVED: ["x/0/0", 12, "base"]}),
        (False, {"x-death": [{"queue": "q", "reason": "rejected", "count": 1}]}),
    ],
)
def test_the_first_arrival_is_known_unless_the_broker_may_have_delivered_it_before(
    parts, known, sent
):
    """Else the end of its own first delivery would be taken for that of another call."""
    parts.place.sync(1000.0, 0.0, 0.0)
    request = parts.message("late", "a", request_id="x", **sent)
    parts.dispatcher(request)
    header = request.lock_header
    expected = sent.get(REQUEUED, [1, header.place])[1] if known else 0
    assert header.first_place == pytest.approx(expected, abs=1e6)  # microseconds


def test_a_message_that_waits_for_its_eta_has_arrived_first_before_that(parts):
    """Its copy ran in another worker meanwhile, and it would run again."""
    parts.place.sync(1000.0, 0.0, 0.0)
    request = parts.message("late", "a")
    request.received_at -= 30.0
    parts.dispatcher(request)
    header = request.lock_header
    assert header.place - header.first_place == pytest.approx(30e6, abs=1e6)


def test_the_first_arrival_is_not_known_where_the_broker_marks_no_redelivery(parts):
    parts.place.sync(1000.0, 0.0, 0.0)
    parts.dispatcher._header_factory._identify = lambda _message: "identity"
    request = parts.message("late", "a")
    parts.dispatcher(request)
    assert request.lock_header.first_place == 0


def test_a_copy_that_we_published_is_looked_up(parts):
    """It says of what it is a copy, and that header does not reach the task."""
    request = parts.message("early", "a", **{COPY: ["k:a", "token.0"]})
    parts.dispatcher(request)
    assert parts.agent.calls == [("put", (LookUp(request, "k:a", "token.0"),), {})]
    assert COPY not in request.request_dict
    parts.dispatcher.redispatch(request)
    assert parts.sent == [request]


def test_a_message_that_was_parked_before_keeps_its_place_and_the_base_of_its_token(parts):
    """It is no copy: a task that was sent with its id is another one. Its end is remembered."""
    request = parts.message("early", "a", request_id="x", **{MOVED: ["x/0/0", 12, "t"]})
    parts.dispatcher(request)
    header = LockHeader(*request.request_dict[HEADER_KEY])
    assert (header.place, base_of(header.token), header.copy) == (12, "t", False)
    assert may_be_copied(header, header.created_at, 3600)


def test_a_message_with_priority_that_was_sent_to_the_broker_keeps_its_place(parts):
    """Its place has the head start, which the scripts subtract from the arrival."""
    headers = {MOVED: ["x/0/0", 12_000_000, "t"], OPTIONS: {"lock_priority": 30}}
    request = parts.message("early", "a", request_id="x", **headers)
    parts.dispatcher(request)
    header = LockHeader(*request.request_dict[HEADER_KEY])
    assert header.place == 42_000_000
    assert json.loads(header.flow) == {"head_start": 30_000_000}


CLAIM = {REQUEUED: [1, 12], UNANSWERED: ["x/0/0", "t.4", [["k:9", "u.0"], ["k:b", "v.0"]]]}


def test_a_message_with_an_unanswered_claim_is_parked_in_the_name_of_that_claim(parts):
    """Redis may have it as running: with a token of its own it would be a copy, and be dropped."""
    request = parts.message("early", "a", request_id="x", **CLAIM)
    parts.dispatcher(request)
    assert parts.sent == []
    assert parts.agent.parked() == [request]
    assert (request.lock_header.token, request.lock_header.place) == ("t.4", 12)
    assert request.is_unanswered
    assert not {REQUEUED, UNANSWERED} & request.request_dict.keys()


def test_a_message_with_an_unanswered_claim_frees_the_other_locks_of_that_claim(parts):
    request = parts.message("pair", "a", "b", request_id="x", **CLAIM)
    parts.dispatcher(request)
    locks = request.lock_header.lock_set
    assert (locks.parts[0].name, locks.parts[0].token) == ("k:a", "t.4")
    assert [(part.name, part.token) for part in locks.frees] == [("k:9", "u.0"), ("k:b", "v.0")]


def test_a_retry_with_the_header_of_another_attempt_goes_to_the_pool(parts):
    """A worker without locks has run the task, and has copied the header into the retry."""
    request = parts.message("early", "a", request_id="x", retries=1, **CLAIM)
    parts.dispatcher(request)
    assert parts.sent == [request]
    assert request.lock_header.token != "t.4"
    assert UNANSWERED not in request.request_dict


def test_a_message_with_an_unanswered_claim_goes_to_the_pool_of_a_worker_that_cannot_park(parts):
    """Its locks are on several servers by now. They have no record of the claim."""
    parts.header_factory._keeps_messages = False
    request = parts.message("early", "a", request_id="x", **CLAIM)
    parts.dispatcher(request)
    assert (parts.sent, parts.agent.parked()) == ([request], [])
    assert request.lock_header.copy
    assert UNANSWERED not in request.request_dict


def test_a_message_with_an_unanswered_claim_stays_with_the_broker_in_an_outage(parts):
    """The connection to the broker is lost meanwhile: it delivers the message again."""
    parts.dispatcher.backend_down()
    request = parts.message("early", "a", request_id="x", **CLAIM)
    parts.dispatcher(request)
    parts.dispatcher.abandon(unless_dispatched=False)
    assert (parts.sent, parts.agent.parked(), parts.acked) == ([], [], [])


def test_a_key_that_cannot_be_made_travels_to_the_child_as_an_error(parts):
    """T40: nothing is raised into the main loop; the task fails in its slot."""
    request = parts.message("early", None)
    parts.dispatcher(request)
    assert parts.sent == [request]
    assert request.lock_header.error is not None


def test_arguments_that_do_not_bind_go_unlocked(parts):
    """The call itself fails, and needs no lock for that."""
    request = parts.message("early")
    parts.dispatcher(request)
    assert parts.sent == [request]
    assert (request.lock_header.name, request.lock_header.error) == ("", None)


def test_a_worker_id_is_never_given_twice():
    """T16: a namesake is another worker."""
    assert len({worker_id("w@host") for _ in range(100)}) == 100

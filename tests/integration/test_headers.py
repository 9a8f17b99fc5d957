"""A parked message arrives unchanged: headers, stamps, options, in each protocol."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery, group, states
from celery.canvas import StampingVisitor
from celery.result import AsyncResult

from celery_singleton_lock import Lock, LockConflict
from integration.book import Book
from support.waiting import eventually

CONF = {
    "task_inherit_parent_priority": True,
    "task_send_sent_event": True,
    "task_track_started": True,
    "result_extended": True,
}

OF_ITS_OWN = {"id", "task_id", "root_id", "correlation_id", "delivery_tag", "task"}
"""What differs between any two messages, and the name of the task."""


@pytest.fixture(scope="module")
def book_conf():
    """Its app sends and stores as much as Celery can."""
    return CONF


@pytest.fixture(scope="module")
def worker_options():
    """Its worker knows the tasks that mirror their request."""
    return {"app": "integration.call_paths_app:app", "args": ["-E"], "concurrency": 2}


class Stamp(StampingVisitor):
    """Stamps each signature, as tracing and tenancy libraries do."""

    def on_signature(self, sig, **headers):
        return {"tenant": "acme", "stamped_headers": ["tenant"]}


def stamped(book, task, key):
    """Return a group of two, stamped, whose members try twice."""
    members = group(book.app.signature(task, (key, n, "retry")) for n in (1, 2))
    members.stamp(Stamp())
    return members


def stamps(seen):
    """Return the names and values of a request's stamps."""
    return seen["stamped_headers"], seen["stamps"]


def mirrored(book, result, timeout=15, times=1):
    """Return what a task saw of its request, the last of so many runs."""
    found = eventually(
        lambda: len(f := book.events("mirror", id=result)) >= times and f,
        timeout,
        lambda: f"{result} ran; {book._meta(result)}",
    )
    return found[times - 1]


def comparable(seen, options):
    """Hide the values that no two messages share, unless given; that they are there counts."""
    return {
        name: comparable(value, options)
        if isinstance(value, dict)
        else "its own"
        if name in OF_ITS_OWN - set(options)
        else value
        for name, value in seen.items()
    }


OPTIONS = {
    "nothing": {},
    "headers": {"headers": {"x-tenant": "acme", "traceparent": "00-4bf9-01", "deep": {"a": [1]}}},
    "priority": {"priority": 6},
    "pickle": {"serializer": "pickle"},
    "zlib": {"compression": "zlib"},
    "pickle and zlib": {"serializer": "pickle", "compression": "zlib", "headers": {"x-a": "b"}},
    "limits": {"time_limit": 30, "soft_time_limit": 20},
    "shadow": {"shadow": "another-name"},
    "ignore_result": {"ignore_result": True},
    "retries": {"retries": 2},
    "parents": {"root_id": "root", "parent_id": "parent", "group_id": "g", "group_index": 3},
    "properties": {"app_id": "billing", "user_id": "guest", "content_encoding": "utf-8"},
    "reply_to": {"reply_to": "somewhere"},
    "replaced": {"replaced_task_nesting": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_parked_task_sees_the_request_that_an_unlocked_one_sees(book, locked, key, options):
    """Every attribute of ``self.request``, and what a retry would carry, is as without a lock."""
    plain = mirrored(book, book.app.send_task("mirror_plain", (key,), **options).id)
    parked = book.app.send_task("mirror", (key,), **options).id
    book.await_waiting(key, 1)
    locked.release()
    seen = mirrored(book, parked)
    assert comparable(seen["seen"], options) == comparable(plain["seen"], options)
    assert comparable(seen["options"], options) == comparable(plain["options"], options)
    assert (seen["seen"]["id"], seen["seen"]["correlation_id"]) == (parked, parked)
    book.await_free(key)


TRACING = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": "vendor=t61rcWkgMzE",
    "baggage": "sentry-trace_id=771a43a4192642f0b136d5159a501700,user=42",
    "sentry-trace": "771a43a4192642f0b136d5159a501700-00f067aa0ba902b7-1",
}
"""What OpenTelemetry and Sentry put into a message; Sentry also into a header of its own name."""


def test_tracing_headers_survive_parking_and_a_retry(book, locked, key):
    """So that the spans of a parked task, and of its retry, belong to who sent it."""
    headers = {**TRACING, "headers": {"sentry-monitor-start-timestamp-s": "1.5", **TRACING}}
    result = book.app.send_task("mirror", (key, 1, "retry"), headers=headers).id
    book.await_waiting(key, 1)
    locked.release()
    for times in (1, 2):
        seen = mirrored(book, result, times=times)["seen"]
        assert {name: seen["headers"].get(name, seen.get(name)) for name in TRACING} == TRACING
        assert seen["retries"] == times - 1
    book.await_free(key)


def test_expires_and_eta_of_a_parked_task_are_kept(book, locked, key):
    """As they were sent, to the microsecond."""
    expires = datetime.now(timezone.utc) + timedelta(seconds=300)
    result = book.app.send_task("mirror", (key,), expires=expires, countdown=0.2).id
    book.await_waiting(key, 1)
    locked.release()
    seen = mirrored(book, result)["seen"]
    assert datetime.fromisoformat(seen["expires"]) == expires
    assert datetime.fromisoformat(seen["eta"]) < expires
    assert book.value(result)


def test_stamps_travel_with_a_parked_task_and_its_retry(book, locked, key):
    """A stamping visitor on a group: as without a lock, also in the second attempt of a member."""
    plain, parked = (
        [member.id for member in stamped(book, task, key).apply_async().results]
        for task in ("mirror_plain", "mirror")
    )
    book.await_waiting(key, 2)
    locked.release()
    for unlocked, result in zip(plain, parked, strict=True):
        for times in (1, 2):
            seen = mirrored(book, result, times=times)["seen"]
            assert stamps(seen) == stamps(mirrored(book, unlocked, times=times)["seen"])
            assert stamps(seen) == (["tenant"], {"tenant": "acme"})
            assert seen["retries"] == times - 1
    assert all(book.value(result) for result in parked)
    book.await_free(key)


def test_t17_a_parked_task_can_be_revoked_by_its_stamp(book, locked, key):
    """``revoke_by_stamped_headers`` ends it as REVOKED; it does not run."""
    sig = book.app.signature("mirror", (key,))
    stamp = f"stamp-{key}"
    result = sig.apply_async(stamped_headers=["tenant"], tenant=stamp).id
    book.await_waiting(key, 1)
    book.app.control.revoke_by_stamped_headers({"tenant": [stamp]}, reply=True, limit=1, timeout=20)
    locked.release()
    assert book.outcome(result)[0] == states.REVOKED
    assert book.events("mirror", id=result) == []
    book.await_free(key)


@pytest.mark.parametrize("terminate", [False, True])
def test_t17_a_parked_task_can_be_revoked_by_its_result(book, locked, key, terminate):
    """``AsyncResult.revoke()``: REVOKED, it does not run, and who is behind it does."""
    result = book.app.send_task("mirror", (key,)).id
    behind = book.app.send_task("mirror", (key, 1)).id
    book.await_waiting(key, 2)
    AsyncResult(result, app=book.app).revoke(terminate=terminate)
    assert book.outcome(result)[0] == states.REVOKED
    locked.release()
    assert book.value(behind)
    assert book.events("mirror", id=result) == []
    book.await_free(key)


def test_states_and_extended_results_are_those_of_the_run(book, locked, key):
    """PENDING while parked, STARTED in the body, and then the meta data of ``result_extended``."""
    result = book.app.send_task("mirror", (key,), {"n": 1}).id
    book.await_waiting(key, 1)
    assert book.state(result) == states.PENDING
    locked.release()
    assert mirrored(book, result)["state"] == states.STARTED
    assert book.value(result)
    meta = book._meta(result)
    assert (meta["name"], meta["args"], meta["kwargs"]) == ("mirror", [key], {"n": 1})
    assert (meta["retries"], meta["queue"]) == (0, "celery")


@pytest.mark.full("mirror_fail-FAILURE-False", "mirror_skip-REVOKED-True")
@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize(
    ("task", "state"), [("mirror_skip", states.REVOKED), ("mirror_fail", states.FAILURE)]
)
def test_ignored_results_are_kept_only_if_errors_are_to_be(own_book, key, task, state, stores):
    """A task with ``ignore_result`` that is turned away heeds ``store_errors_even_if_ignored``."""
    own_book.conf["task_store_errors_even_if_ignored"] = stores
    with (
        own_book.worker(app="integration.call_paths_app:app", pool="threads"),
        Lock(own_book.client, f"k:{key}", lease=60),
    ):
        result = own_book.app.send_task(task, (key,), ignore_result=True).id
        other = own_book.app.send_task("mirror_plain", (key,)).id
        assert own_book.value(other)
        expected = state if stores else states.PENDING
        eventually(lambda: own_book.state(result) == expected, 5)


# -- protocol 1, and messages of other languages ---------------------------------------------------


def send_protocol_1(book, key, n=1, **options):
    """Send as Celery 3 did: everything is in the body."""
    with Celery("old", broker=book.url, backend=book.backend, set_as_current=False) as app:
        app.conf.task_protocol = 1
        return app.send_task("act", (key, n), **options).id


def send_hybrid(book, key, n=1, **options):
    """Send as clients in other languages do: a JSON object, without headers."""
    return book.put(
        {"id": f"hybrid-{key}-{n}", "task": "act", "args": [key, n], "kwargs": {}, **options}
    )


SENDERS = {"protocol 1": send_protocol_1, "hybrid": send_hybrid}


@pytest.mark.parametrize("send", SENDERS.values(), ids=SENDERS)
def test_old_messages_are_parked_and_run(book, locked, key, send):
    """Messages without headers are kept too, blocked in the pool or before it, and run in order."""
    first = send(book, key, 1)
    book.await_waiting(key, 1)
    results = [first, send(book, key, 2), send(book, key, 3)]
    book.await_waiting(key, 3)
    locked.release()
    assert [book.value(result) for result in results] == [1, 2, 3]
    assert [(start["held"], start["leaks"]) for start in book.starts(key)] == [(True, [])] * 3
    assert book.order(key) == [1, 2, 3]
    book.await_free(key)


@pytest.mark.full
@pytest.mark.parametrize("send", SENDERS.values(), ids=SENDERS)
def test_copies_of_old_messages_wake_a_worker_and_end_quietly(own_book, key, send):
    """Parked when no worker was left: one that comes later runs each once, whatever copies came."""
    app = "integration.call_paths_app:app"
    with own_book.worker(app=app, pool="threads", queues=["celery"]) as first:
        own_book.start_holder(key)
        results = [send(own_book, key, n) for n in (1, 2)]
        own_book.await_waiting(key, 2)
        with own_book.worker(app=app, pool="threads", queues=["elsewhere"]):
            first.terminate()
            first.await_log("Warm shutdown")  # before that, it would run both itself
            own_book.open(f"{key}-0")
            first.wait()
            eventually(lambda: own_book.queued() >= 1, 15)
    with own_book.worker(app=app, pool="threads"):
        assert [own_book.value(result, 20) for result in results] == [1, 2]
        own_book.await_free(key)
        eventually(lambda: own_book.queued() == 0 and own_book.unacked() == 0, 10)
    assert own_book.order(key) == [0, 1, 2]
    assert all(start["leaks"] == [] for start in own_book.starts(key))


# -- exceptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_t29_our_errors_arrive_whole_from_a_prefork_worker(own_book, key, tmp_path, serializer):
    """LockConflict, with its fields, through the pool and either result serializer."""
    with (
        Book(own_book.url, tmp_path, conf={"result_serializer": serializer}) as book,
        book.worker() as worker,
        Lock(book.client, f"k:{key}", lease=60),
    ):
        for n in range(3):
            state, error = book.outcome(book.send("act_fail", key, n))
            assert (state, type(error)) == (states.FAILURE, LockConflict)
            assert error.name == f"k:{key}"
            assert 0 < error.expires_in <= 60
            assert "pid" in error.holder
        assert book.value(book.send("act", f"{key}-x", 7)) == 7
        assert worker.is_running

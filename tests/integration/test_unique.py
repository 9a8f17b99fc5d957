"""Unique calls, sent to real workers."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import warnings
from enum import Enum
from unittest import mock

import pytest
from celery import Celery, chain
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import NotRegistered, TaskRevokedError
from kombu.serialization import codec, registry

from celery_singleton_lock import (
    ConfigurationError,
    DuplicateTask,
    LockedTask,
    LockNameError,
    install,
    reset_all,
)
from integration.unique_app import make_app, sending
from support.waiting import eventually
from support.workers import CeleryWorker


@pytest.fixture(autouse=True)
def _collect_what_celery_leaves_open():
    """Its consumer of results keeps a connection, of which a later test would be told."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


MONTHLY = {"lock_key": "report:{month}", "lock_unique": "until_done", "shared": False}


@pytest.fixture
def app(redis_url):
    with sending(make_app(redis_url)) as app:
        yield app


@pytest.fixture
def client(redis_client):
    return redis_client


def new_worker(redis_url, **options):
    return CeleryWorker("integration.unique_app", redis_url, concurrency=2, **options)


@pytest.fixture(
    params=[
        "prefork",
        "threads",
        pytest.param("gevent", marks=pytest.mark.full),
    ]
)
def pool(request):
    return request.param


def ran(client):
    return [
        each.decode() if isinstance(each, bytes) else each for each in client.lrange("ran", 0, -1)
    ]


def has_run(client, *calls):
    eventually(lambda: ran(client) == list(calls), timeout=60)


def entries(client):
    return client.keys("*:unique:*")


def go(client, *calls):
    for call in calls:
        client.rpush(f"go:{call}", 1)


def test_a_call_is_not_sent_while_one_like_it_waits(app, client, redis_url, pool):
    """Until it starts: the next one is sent then."""
    send = app.tasks["started"].delay
    first, second = send("may", "a"), send("may", "b")
    assert (first.duplicate, second.duplicate) == (False, True)
    assert second.id == first.id
    assert send("june", "c").duplicate is False
    with new_worker(redis_url, pool=pool):
        eventually(lambda: set(ran(client)) == {"a", "c"}, timeout=60)
        third = send("may", "d")
        assert third.duplicate is False
        assert send("may", "e").id == third.id
        go(client, "a", "c", "d")
        assert second.get(timeout=60) == "a"
        assert third.get(timeout=60) == "d"
        eventually(lambda: not entries(client))


def test_a_call_is_not_sent_until_the_first_one_is_done(app, client, redis_url, pool):
    send = app.tasks["done"].delay
    first = send("may", "a")
    with new_worker(redis_url, pool=pool):
        has_run(client, "a")
        assert send("may", "b").id == first.id
        go(client, "a")
        assert first.get(timeout=60) == "a"
        eventually(lambda: not entries(client))
        last = send("may", "c")
        assert last.duplicate is False
        go(client, "c")
        assert last.get(timeout=60) == "c"


def test_a_duplicate_can_be_an_error(app):
    send = app.tasks["strict"].delay
    first = send("may", "a")
    with pytest.raises(DuplicateTask, match=first.id) as raised:
        send("may", "b")
    assert raised.value.task_id == first.id


def test_a_key_tells_which_calls_are_alike(app):
    send = app.tasks["by_user"].delay
    assert not send("may", "a", user="ann").duplicate
    assert not send("may", "b", user="bob").duplicate
    assert send("may", "c", user="ann").duplicate


def test_a_call_may_be_unique_for_a_time(app, client):
    send = app.tasks["seconds"].delay
    assert not send("may", "a").duplicate
    (entry,) = entries(client)
    assert 590_000 < client.pttl(entry) <= 600_000
    assert send("may", "b").duplicate


def test_one_call_may_be_sent_all_the_same(app):
    task = app.tasks["done"]
    task.delay("may", "a")
    assert task.apply_async(("may", "b"), lock_unique=None).duplicate is False
    with pytest.raises(DuplicateTask):
        task.apply_async(("may", "c"), lock_on_duplicate="raise")


def test_many_senders_at_once_send_one_message(app, client):
    results, go_all = [], threading.Barrier(50)

    def send(number):
        go_all.wait()
        results.append(app.tasks["done"].delay("may", str(number)))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(50)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert client.llen("celery") == 1
    assert len({each.id for each in results}) == 1
    assert sum(not each.duplicate for each in results) == 1


def test_a_sender_that_dies_before_it_sends_blocks_nobody(app, client):
    """It has announced its call; another one waits a second, and sends itself."""
    store = app.tasks["done"]._lock_extension.store()
    store.announce("report:may", "done", "dead")
    result = app.tasks["done"].delay("may", "a")
    assert not result.duplicate
    assert client.llen("celery") == 1
    assert app.tasks["done"].delay("may", "b").id == result.id


def test_a_message_that_cannot_be_serialised_blocks_nobody(app):
    with pytest.raises(Exception, match="serializ"):
        app.tasks["done"].delay("may", object())
    assert not entries(app.tasks["done"]._lock_extension.store().client)
    assert not app.tasks["done"].delay("may", "a").duplicate


@pytest.mark.full
@pytest.mark.needs_real_redis("data over a restart")
def test_a_call_whose_end_redis_has_lost_blocks_nobody(client, redis_url, make_redis):
    """Its message was with the broker when the data was saved that Redis has started from."""
    locks = make_redis()
    with sending(make_app(redis_url, locks.url)) as app, locks.client() as stored:
        first = app.tasks["done"].delay("may", "a")
        stored.save()
        with new_worker(redis_url, env={"LOCKS_URL": locks.url}) as worker:
            go(client, "a")
            assert first.get(timeout=60) == "a"
            eventually(lambda: not entries(stored))
            locks.kill()
            locks.restart(keep_data=True)
            assert entries(stored), "the call is there as it was"
            worker.await_log("lost data", 60)
            eventually(lambda: not entries(stored), timeout=60)
            assert not app.tasks["done"].delay("may", "b").duplicate
            go(client, "b")
            has_run(client, "a", "b")


def test_a_purged_call_can_be_forgotten(app, client):
    task = app.tasks["by_user"]
    task.delay("may", "a", user="ann")
    app.control.purge()
    assert task.delay("may", "b", user="ann").duplicate
    assert not task.forget_call(("may", "b"), {"user": "bob"})
    assert task.forget_call(("may", "b"), {"user": "ann"})
    assert not task.delay("may", "b", user="ann").duplicate


def test_a_part_of_a_canvas_is_sent_in_any_case(app, client):
    task = app.tasks["done"]
    task.delay("may", "a")
    chain(task.si("may", "b"), task.si("may", "c")).apply_async()
    assert client.llen("celery") == 2


@pytest.mark.parametrize("task", ["done", "strict"])
@pytest.mark.parametrize("option", ["link", "link_error"])
def test_a_call_whose_callback_waits_for_its_end_is_sent(app, client, task, option):
    """A duplicate with an error callback was not sent, so nobody called the callback."""
    app.tasks[task].delay("may", "a")
    callback = app.signature("errback")
    sent = app.tasks[task].apply_async(("may", "b"), **{option: callback})
    assert (sent.duplicate, client.llen("celery")) == (False, 2)


def test_a_skipped_call_does_not_block_the_next_one(app, client, redis_url):
    with new_worker(redis_url):
        holder = app.tasks["done"].delay("may", "a")
        has_run(client, "a")
        skipped = app.tasks["skips"].delay("may", "b")
        with pytest.raises(TaskRevokedError):
            skipped.get(timeout=60)
        eventually(lambda: len(entries(client)) == 1)
        assert not app.tasks["skips"].delay("may", "c").duplicate
        go(client, "a")
        assert holder.get(timeout=60) == "a"


def test_a_revoked_call_does_not_block_the_next_one(app, client, redis_url):
    """It was revoked before a worker received it."""
    with new_worker(redis_url):
        app.control.cancel_consumer("celery", reply=True)
        revoked = app.tasks["done"].delay("may", "a")
        app.control.revoke(revoked.id, reply=True)
        app.control.add_consumer("celery", reply=True)
        eventually(lambda: not entries(client), timeout=60)
        again = app.tasks["done"].delay("may", "b")
        assert not again.duplicate
        go(client, "b")
        assert again.get(timeout=60) == "b"


def test_a_call_of_a_task_that_its_worker_does_not_know_blocks_nobody(app, client, redis_url):
    """As in a deployment of senders before workers."""

    @app.task(base=LockedTask, name="newer", **MONTHLY)
    def newer(month): ...

    with new_worker(redis_url):
        assert isinstance(newer.delay("may").get(timeout=60, propagate=False), NotRegistered)
        eventually(lambda: not entries(client))
        assert not newer.delay("may").duplicate
        eventually(lambda: not entries(client))


@pytest.mark.parametrize("content_type", ["application/x-yaml", "application/json"])
def test_a_call_whose_message_its_worker_cannot_read_blocks_nobody(
    app, client, redis_url, monkeypatch, content_type
):
    """It refuses YAML, and the JSON of this message is cut."""
    cut = codec(content_type, "utf-8", lambda _: '[["may"')
    monkeypatch.setitem(registry._encoders, "cut", cut)
    done = app.tasks["done"]
    with new_worker(redis_url):
        done.apply_async(("may", "a"), serializer="cut")
        eventually(lambda: not entries(client), timeout=60)
        again = done.delay("may", "b")
        assert not again.duplicate
        go(client, "b")
        assert again.get(timeout=60) == "b"


def test_a_call_that_is_revoked_while_it_waits_for_its_time_blocks_nobody(
    app, client, redis_url, pool
):
    """A reminder is put off: the old call counted until its ETA, so the new one was not sent."""
    with new_worker(redis_url, pool=pool) as worker:
        old = app.tasks["done"].apply_async(("may", "old"), countdown=600)
        worker.await_log(f"{old.id}] received")
        old.revoke()
        eventually(lambda: not entries(client))
        new = app.tasks["done"].delay("may", "new")
        assert not new.duplicate
        go(client, "new")
        assert new.get(timeout=60) == "new"


@pytest.mark.full
def test_a_call_that_is_revoked_while_it_waits_for_celerys_rate_blocks_nobody(
    app, client, redis_url
):
    with new_worker(redis_url) as worker:
        app.control.rate_limit("done", "1/h", reply=True, timeout=60, limit=1)
        first = app.tasks["done"].delay("june", "first")
        has_run(client, "first")
        old = app.tasks["done"].delay("may", "old")
        worker.await_log(f"{old.id}] received")
        old.revoke()
        eventually(lambda: len(entries(client)) == 1)
        assert not app.tasks["done"].delay("may", "new").duplicate
        go(client, "first")
        assert first.get(timeout=60) == "first"


def test_a_call_that_is_revoked_while_it_waits_for_a_slot_blocks_nobody(app, client, redis_url):
    with new_worker(redis_url) as worker:
        busy = [app.tasks["done"].delay(month, month) for month in ("june", "july")]
        eventually(lambda: len(ran(client)) == 2, timeout=60)
        old = app.tasks["done"].delay("may", "old")
        worker.await_log(f"{old.id}] received")
        app.control.revoke([busy[0].id, old.id])  # a task that runs counts until its end
        eventually(lambda: len(entries(client)) == 2)
        new = app.tasks["done"].delay("may", "new")
        assert not new.duplicate
        assert len(entries(client)) == 3
        go(client, "june", "july", "new")
        assert [each.get(timeout=60) for each in (*busy, new)] == ["june", "july", "new"]
        assert "old" not in ran(client)


def test_a_running_call_that_is_revoked_and_sends_a_retry_blocks_nobody(
    app, client, redis_url, pool
):
    """Its retry was discarded before it had ended, so calls like it were not sent for an hour."""
    with new_worker(redis_url, pool=pool) as worker:
        old = app.tasks["cleans_up"].delay("may", "old")
        has_run(client, "old")
        old.revoke()
        worker.await_log("Tasks flagged as revoked")
        go(client, "old")
        worker.await_log("Discarding revoked task")
        client.rpush("go:clean", "1")
        eventually(lambda: not entries(client))


def test_a_retry_is_no_duplicate_of_itself(app, client, redis_url):
    """Until it is done, other calls are."""
    with new_worker(redis_url):
        first = app.tasks["retried"].delay("may", "a")
        go(client, "a")
        has_run(client, "a", "again")
        assert app.tasks["retried"].delay("may", "b").id == first.id
        go(client, "again")
        assert first.get(timeout=60) == "again"
        eventually(lambda: not entries(client))


def test_a_parked_call_blocks_others_like_it(app, client, redis_url):
    with new_worker(redis_url):
        holder = app.tasks["strict"].delay("may", "a")
        has_run(client, "a")
        parked = app.tasks["done"].delay("may", "b")
        eventually(lambda: client.keys("*:bodies"), timeout=60)
        (entry,) = [key for key in entries(client) if str(key).rstrip("'").endswith("done:call")]
        eventually(lambda: client.pttl(entry) == -1, timeout=60)
        assert app.tasks["done"].delay("may", "c").id == parked.id
        go(client, "a", "b")
        assert holder.get(timeout=60) == "a"
        assert parked.get(timeout=60) == "b"
        eventually(lambda: not entries(client))


def test_a_call_whose_process_was_killed_runs_again_and_blocks_others(app, client, redis_url):
    with new_worker(redis_url):
        first = app.tasks["late"].delay("may", "a")
        has_run(client, "a")
        os.kill(int(client.lindex("pid", 0)), signal.SIGKILL)
        has_run(client, "a", "a")
        assert app.tasks["late"].delay("may", "b").id == first.id
        go(client, "a")
        assert first.get(timeout=60) == "a"
        eventually(lambda: not entries(client))


def test_without_redis_a_call_is_sent(app, client, monkeypatch):
    """The lock still lets one run at a time."""
    app.conf.singleton_lock_backend = "redis://127.0.0.1:1/0"
    assert not app.tasks["done"].delay("may", "a").duplicate
    assert not app.tasks["done"].delay("may", "b").duplicate
    assert client.llen("celery") == 2


def test_without_a_broker_the_next_call_need_not_wait(app, client):
    """The message was certainly not sent."""
    app.conf.broker_url = "redis://127.0.0.1:1/0"
    app.conf.broker_transport_options = {"max_retries": 0}
    for _ in range(2):
        with pytest.raises(app.tasks["done"].OperationalError):
            app.tasks["done"].apply_async(("may", "a"), retry=False)
        assert not entries(client)


# -- what the sender knows of a call ---------------------------------------------------------------


def test_a_key_looks_into_a_model_as_its_message_has_it(app, client):
    pydantic = pytest.importorskip("pydantic")
    if not hasattr(app.tasks["done"], "_dump_pydantic_arguments"):
        pytest.skip("this Celery sends no models")

    class Order(pydantic.BaseModel):
        number: int

    def ship(order): ...

    ship.__annotations__ = {"order": Order}
    ship = app.task(
        base=LockedTask,
        lock_key="order:{order[number]}",
        lock_unique="until_done",
        pydantic=True,
        shared=False,
    )(ship)
    assert not ship.delay(Order(number=1)).duplicate
    assert not ship.delay(Order(number=2)).duplicate
    assert ship.delay({"number": 1}).duplicate
    assert ship.forget_call((Order(number=1),))


def test_a_key_that_is_no_unicode_is_refused(app, client):
    with pytest.raises(LockNameError, match="lone surrogate"):
        app.tasks["by_user"].delay("may", "a", user="\udce9")
    assert not entries(client)


@pytest.mark.parametrize("option", [{"expires": "soon"}, {"countdown": "soon"}])
def test_a_time_that_celery_refuses_announces_nothing(app, client, option):
    """The next sender waited a second for a call that was never sent."""
    with pytest.raises((TypeError, ValueError, AttributeError)):
        app.tasks["done"].apply_async(("may", "a"), **option)
    assert not entries(client)


def test_headers_may_be_pairs(app):
    send = app.tasks["done"].apply_async
    assert not send(("may", "a"), headers=[("tenant", "x")]).duplicate
    assert send(("may", "b"), headers=[("tenant", "x")]).duplicate


def test_a_call_counts_until_its_task_class_lets_it_expire(app, client):
    app.tasks["done"].expires = 90
    app.tasks["done"].delay("may", "a")
    (entry,) = entries(client)
    assert 80_000 < client.pttl(entry) <= 90_000


# -- a call by the name of its task ----------------------------------------------------------------


def test_a_call_by_name_is_not_sent_either(app, client):
    """By ``send_task``, by a signature, or by beat."""
    first = app.tasks["done"].delay("may", "a")
    for again in (
        app.send_task("done", ("may", "b")),
        app.signature("done", ("may", "c")).apply_async(),
        app.signature("done", ("may", "d"), app=app).delay(),
        Scheduler(app).apply_async(ScheduleEntry("e", task="done", args=("may", "e"), app=app)),
    ):
        assert (again.duplicate, again.id) == (True, first.id)
    assert client.llen("celery") == 1


def test_a_call_by_name_has_the_options_of_send_task(app, client):
    install(app)
    sent = app.send_task("done", ("may", "a"), None, 5, expires=90)
    assert not sent.duplicate
    (message,) = map(json.loads, client.lrange("celery", 0, -1))
    assert message["headers"]["eta"]
    assert message["headers"]["expires"]
    assert app.send_task("done", ("may", "b"), lock_unique=None).duplicate is False
    with pytest.raises(DuplicateTask):
        app.send_task("done", ("may", "c"), lock_on_duplicate="raise")
    with pytest.raises(ConfigurationError, match="lock_lease"):
        app.send_task("done", ("may", "c"), lock_lease=5)


def test_a_program_that_only_sends_installs_it(redis_url, client):
    """Nothing has used its tasks, so they are not bound to it yet."""
    with sending(make_app(redis_url)) as app:
        assert not hasattr(app.send_task("done", ("may", "a")), "duplicate")
    with sending(make_app(redis_url)) as app:
        for _ in range(2):
            install(app)
        assert not app.send_task("done", ("may", "a")).duplicate
        assert app.send_task("done", ("may", "b")).duplicate
        assert not hasattr(app.send_task("elsewhere", ("may",)), "duplicate")


def test_a_replaced_send_task_of_the_class_is_called(app):
    """As users' tests do it; their messages were sent."""
    app.tasks["done"]
    with mock.patch.object(Celery, "send_task", return_value="mocked"):
        assert app.send_task("elsewhere") == app.tasks["replaced"].delay("may") == "mocked"


def test_another_send_task_gets_what_it_was_given(redis_url):
    """Its signature may be another one."""

    class App(Celery):
        def send_task(self, task_name, *args, **options):
            return task_name, args, options

    app = App("other", broker=redis_url, set_as_current=False)
    install(app)
    assert app.send_task("plain", (1,), {}, 30) == ("plain", ((1,), {}, 30), {})
    assert app.send_task(task_name="plain", countdown=3) == ("plain", (), {"countdown": 3})


# -- a task that has ended does not count ----------------------------------------------------------


class Month(str, Enum):
    """A callable key sees it in the sender, and its text in the worker."""

    MAY = "may"


def test_a_task_that_lost_its_lock_does_not_count_when_it_has_ended(app, client, redis_url, pool):
    """Its next calls were duplicates for an hour."""
    send = app.tasks["late"].delay
    first = send("may", "a")
    with new_worker(redis_url, pool=pool):
        has_run(client, "a")
        assert reset_all(client, "report:may") == 1
        go(client, "a")
        assert first.get(timeout=60) == "a"
        eventually(lambda: not entries(client))


def test_a_task_does_not_count_whose_worker_computes_another_lock(app, client, redis_url, pool):
    first = app.tasks["keyed"].delay(Month.MAY, "a")
    with new_worker(redis_url, pool=pool):
        go(client, "a")
        assert first.get(timeout=60) == "a"
        eventually(lambda: not entries(client))


def test_a_task_with_a_request_class_of_its_own_ends_its_entry(app, client, redis_url):
    """Later calls were duplicates for an hour."""
    with new_worker(redis_url, env={"OWN_REQUEST": "1"}):
        first = app.tasks["done"].delay("may", "a")
        has_run(client, "a")
        assert app.tasks["done"].delay("may", "b").id == first.id
        skipped = app.tasks["skips"].delay("may", "skipped")
        with pytest.raises(TaskRevokedError):
            skipped.get(timeout=60)
        assert not app.tasks["skips"].delay("june", "c").duplicate
        go(client, "a", "c")
        assert first.get(timeout=60) == "a"
        eventually(lambda: not entries(client), timeout=60)
        retried = app.tasks["retried"].delay("july", "d")
        go(client, "d")
        has_run(client, "a", "c", "d", "again")
        assert app.tasks["retried"].delay("july", "e").id == retried.id
        started = app.tasks["started"].delay("august", "f")
        eventually(lambda: "f" in ran(client), timeout=60)
        assert not app.tasks["started"].delay("august", "g").duplicate
        go(client, "again", "f", "g")
        assert retried.get(timeout=60) == "again"
        assert started.get(timeout=60) == "f"
        eventually(lambda: not entries(client), timeout=60)


def test_who_waits_for_the_end_of_a_chain_or_of_a_replaced_task_gets_it(
    app, client, redis_url, pool
):
    """Each ended with a call like one that waits elsewhere, and its result stayed PENDING."""
    app.tasks["started"].apply_async(("may", "elsewhere"), queue="nobody")
    go(client, "a", "b", "instead", "own")
    with new_worker(redis_url, pool=pool):
        task = app.tasks["started"]
        assert chain(app.tasks["done"].si("june", "a"), task.si("may", "b"))().get(60) == "b"
        assert app.tasks["replaced"].delay("may").get(timeout=60) == "instead"
        own = task.apply_async(("may", "own"), task_id="of-the-caller")
        assert (own.duplicate, own.get(timeout=60)) == (False, "own")

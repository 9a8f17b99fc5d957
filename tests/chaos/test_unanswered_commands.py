"""The locks' Redis executes a command, and its reply is lost."""

from __future__ import annotations

import pytest
import redis

from celery_singleton_lock.store.scripts import load_scripts
from integration.book import SAFE_LEASE, Book
from support.proxy import Proxy
from support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.integration]

LEASE = SAFE_LEASE


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "verb", "behind"),
    [("act", "claim", 0), ("act", "claim", 2), ("act_late", "claim", 0), ("act", "acquire", 0)],
)
def test_L13_a_task_runs_though_its_lock_lapsed_before_it_heard_that_it_had_it(
    redis_server, redis_url, tmp_path, task, verb, behind
):
    """The grant is written, with all that follows from it, and the lease ends in the silence.

    Found by the storm (seed 7): a parked task that is acknowledged early was settled by its claim,
    so its message was gone when its worker asked again.
    """
    with (
        Proxy(redis_server.port) as proxy,
        Book(redis_url, tmp_path, lock_url=redis_url) as book,
        book.worker(conf={"singleton_lock_backend": proxy.url, "singleton_lock_lease": LEASE}),
    ):
        # Of a lock whose last task has only just ended the worker parks the next one unasked.
        key = "a" if verb == "claim" else "b"
        before = book.send(task, key, 0, hold="a")
        book.started(before)
        others = []
        if verb == "acquire":
            book.open("a")
            book.value(before)
            silence_at(proxy, verb)
        after = book.send(task, "a", 1)
        if verb == "claim":
            others = [book.send(task, "a", 2 + n) for n in range(behind)]
            eventually(lambda: book.view("a").waiting == 1 + behind)
            silence_at(proxy, verb)
            book.open("a")
        eventually(lambda: proxy.stalled, message="Redis has been asked")
        eventually(lambda: lapsed(book.view("a")), message="the lease has ended")
        proxy.stalled = False
        assert book.value(after) == 1
        assert sorted(map(book.value, others)) == [2 + n for n in range(len(others))]
        ran = [*book.order("a"), *book.order("b")]
        assert sorted(ran) == list(range(2 + len(others)))
        book.await_free("a")


@pytest.mark.full
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_L13_a_worker_that_stops_without_a_reply_leaves_its_task_to_another(
    redis_server, redis_url, tmp_path, pool
):
    """Its claim settled the message, unheard: it is told to go, and then Redis answers.

    Found by the storm (RabbitMQ, seed 21): what took its place in line again found the pool closed.
    """
    with (
        Proxy(redis_server.port) as proxy,
        Book(redis_url, tmp_path, lock_url=redis_url) as book,
    ):
        conf = {"singleton_lock_backend": proxy.url, "singleton_lock_lease": LEASE}
        with book.worker(pool=pool, conf=conf) as leaving:
            book.started(book.send("act", "a", 0, hold="a"))
            after = book.send("act", "a", 1)
            book.await_waiting("a", 1)
            silence_at(proxy, "claim")
            book.open("a")
            eventually(lambda: proxy.stalled, 10, "Redis has been asked")
            leaving.await_log("Locked tasks wait")
            leaving.terminate()
            leaving.await_log("Warm shutdown")
            eventually(lambda: lapsed(book.view("a")), message="the lease has ended")
            proxy.stalled = False
            leaving.wait()
        with book.worker(conf={"singleton_lock_lease": LEASE}):
            assert book.value(after) == 1
        assert book.order("a") == [0, 1]
        book.await_free("a")


@pytest.mark.full
def test_L13_a_task_that_waits_for_a_slot_after_an_outage_outlives_its_worker(
    redis_server, redis_url, tmp_path
):
    """Its claim settled the message, unheard; Redis answers again, and the only slot is taken."""
    with (
        Proxy(redis_server.port) as proxy,
        Book(redis_url, tmp_path, lock_url=redis_url) as book,
    ):
        conf = {"singleton_lock_backend": proxy.url, "singleton_lock_lease": LEASE}
        with book.worker(concurrency=1, conf=conf) as leaving:
            book.started(book.send("act", "a", 0, hold="a"))
            after = book.send("act", "a", 1)
            book.await_waiting("a", 1)
            silence_at(proxy, "claim")
            book.open("a")
            leaving.await_log("Locked tasks wait")
            book.started(book.send("plain", "p", hold="p"))
            eventually(lambda: lapsed(book.view("a")), message="the lease has ended")
            proxy.stalled = False
            leaving.await_log("the locks' Redis answers again")
            leaving.terminate()
            leaving.await_log("Warm shutdown")
            book.open("p")
            leaving.wait()
        with book.worker(conf={"singleton_lock_lease": LEASE}):
            assert book.value(after) == 1
        book.await_free("a")


def silence_at(proxy: Proxy, verb: str) -> None:
    """Have Redis fall silent once it has executed a script, which it knows by then."""
    script = load_scripts()[verb]
    with redis.Redis(port=proxy.target) as client:
        client.script_load(script.text)
    proxy.stall_at = script.sha.encode()


def lapsed(view) -> bool:
    """Whether the lease of whoever has it is over, though nobody has swept yet."""
    return all(holder.expires_in <= 0 for holder in view.holders)

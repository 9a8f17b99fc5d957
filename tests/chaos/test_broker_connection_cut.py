"""The broker's connection is cut while a task waits for a thread: its message is redelivered."""

from __future__ import annotations

import os
import signal

import pytest

from integration.book import Book
from support.proxy import Proxy
from support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.integration]


@pytest.mark.full
@pytest.mark.parametrize("task", ["act", "act_late"])
def test_T14_a_task_that_waits_for_a_thread_during_a_connection_loss_runs_once(
    redis_server, redis_url, tmp_path, task
):
    """A pool of threads is not flushed, so the message runs, and the copy that comes is one.

    Found by the storm (seed 42): with a limit above one both ran side by side.
    """
    with (
        Proxy(redis_server.port) as proxy,
        Book(redis_url, tmp_path, lock_url=redis_url) as book,
        book.worker(
            broker=proxy.url,
            pool="threads",
            concurrency=1,
            conf={"singleton_lock_backend": redis_url},
        ) as worker,
    ):
        book.started(book.send("plain", "p", 0, hold="p"))
        waiting = book.send(task, "a", 1)
        received = f"{task}[{waiting}] received"
        worker.await_log(received)
        proxy.cut()
        eventually(lambda: worker.log().count(received) == 2, 15, "it is delivered again")
        book.open("p")
        assert book.value(waiting) == 1
        last = book.send("plain", "p", 1)  # behind both in the one thread
        assert book.value(last) == 1
        assert book.order("a") == [1]
        book.await_free("a")


@pytest.mark.full
@pytest.mark.parametrize("task", ["act", "act_late"])
def test_T11_a_task_that_a_child_has_but_has_not_accepted_at_a_cut_keeps_its_lock(
    redis_server, redis_url, tmp_path, task
):
    """Celery then forgets the task, and its child runs it nevertheless."""
    with (
        Proxy(redis_server.port) as proxy,
        Book(redis_url, tmp_path, lock_url=redis_url) as book,
        book.worker(
            broker=proxy.url,
            concurrency=1,
            conf={"singleton_lock_backend": redis_url, "singleton_lock_lease": 12},
        ) as worker,
    ):
        book.value(book.send("plain", "p"))  # the child is up
        (child,) = worker.child_pids()
        os.kill(child, signal.SIGSTOP)
        try:
            written = book.send(task, "a", 1, hold="a")
            received = f"{task}[{written}] received"
            worker.await_log(received)
            for _ in range(3):  # rounds of the main loop, which writes it to the child
                assert book.app.control.ping(timeout=10, limit=1)
            proxy.cut()
            eventually(lambda: worker.log().count(received) == 2, 15, "it is delivered again")
        finally:
            os.kill(child, signal.SIGCONT)
        book.started(written)
        book.await_renewal("a")
        book.open("a")
        assert book.value(written) == 1
        assert book.peak("a") == 1
        book.await_free("a")
        eventually(lambda: not shown(book), message=lambda: f"nothing is in hand: {shown(book)}")


def shown(book):
    """Return the tasks that the worker has in hand."""
    (told,) = book.app.control.inspect(timeout=10)._request("locks").values()
    return told["locks"]

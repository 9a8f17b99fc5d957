"""The broker's connection is cut while a task waits for a thread: its message is redelivered."""

from __future__ import annotations

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

"""The broker loses a message before a worker receives it: the only loss that the rules allow."""

from __future__ import annotations

import signal

import pytest

from integration.book import Book
from support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.integration]


def test_a_message_on_its_way_from_a_redis_broker_is_lost_with_its_worker_without_any_lock(
    redis_url, redis_client, tmp_path
):
    """Celery's own: kombu pops a message and notes it as unacknowledged in a later call.

    Shown with a plain task that is acknowledged late. RabbitMQ has no such gap.
    """
    with Book(redis_url, tmp_path) as book, book.worker(concurrency=1) as worker:
        book.value(book.send("plain_late", "before", 1))
        eventually(lambda: redis_client.hlen("unacked") == 0)

        def handed_out():
            """Send to a stopped worker. If it is blocked in BRPOP, it does not read the answer."""
            worker.signal(signal.SIGSTOP)
            book.send("plain_late", "p", 1)
            if redis_client.llen("celery") == 0:
                return True
            worker.signal(signal.SIGCONT)  # it was not: another time
            book.await_drained("celery")
            return False

        eventually(handed_out)
        worker.kill()
        assert (redis_client.llen("celery"), redis_client.hlen("unacked")) == (0, 0)

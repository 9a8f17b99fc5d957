"""lock_on_full="replace": the newest message replaces the oldest waiter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from celery import chord, states

from integration.book import LONG_LEASE
from support.waiting import eventually


@pytest.fixture(scope="module")
def lease():
    """No lease ends here, also not while a process stands still."""
    return LONG_LEASE


def test_one_runs_and_one_waits_with_the_latest_arguments(book, worker, key):
    """Of five waiting tasks the last one runs.

    The others end as REVOKED and name the task that replaced them.
    """
    first = book.start_holder(key, task="act_latest")
    sent = []
    for n in range(1, 6):
        sent.append(book.send("act_latest", key, n))
        eventually(lambda n=n: book.await_waiting(key, 1) and _last(book, key) == sent[-1])
    for earlier, later in pairwise(sent):
        state, reason = book.outcome(earlier)
        assert state == states.REVOKED
        assert f"k:{key}" in str(reason)
        assert later in str(reason)
    book.open(f"{key}-0")
    assert [book.value(first), book.value(sent[-1])] == [0, 5]
    assert book.order(key) == [0, 5]
    book.await_free(key)


def _last(book, key):
    waiters = book.view(key).waiters
    return waiters[-1].task_id if waiters else None


def test_with_two_waiters_the_oldest_is_replaced_and_the_others_keep_their_order(book, worker, key):
    """lock_max_waiting=2: of four, the last two run, in the order of their arrival."""
    first = book.start_holder(key, task="act_latest_two")
    sent = []
    for n in range(1, 5):
        sent.append(book.send("act_latest_two", key, n))
        eventually(lambda: _last(book, key) == sent[-1])
    assert [book.outcome(r)[0] for r in sent[:2]] == [states.REVOKED] * 2
    book.open(f"{key}-0")
    assert [book.value(r) for r in (first, *sent[2:])] == [0, 3, 4]
    assert book.order(key) == [0, 3, 4]
    book.await_free(key)


def test_a_chord_is_notified_that_its_member_was_replaced(book, worker, key):
    """It does not wait for ever: its body fails."""
    first = book.start_holder(key, task="act_latest")
    tasks = book.app.tasks
    body = chord([tasks["act"].si(f"{key}-x", 1), tasks["act_latest"].si(key, 1)])(
        tasks["total"].s()
    )
    book.await_waiting(key, 1)
    newest = book.send("act_latest", key, 2)
    assert book.outcome(body.id)[0] in (states.FAILURE, states.REVOKED)
    book.open(f"{key}-0")
    assert [book.value(first), book.value(newest)] == [0, 2]


def test_messages_of_other_tasks_that_share_the_lock_stay(book, worker, key):
    """Only a message of the same task is replaced; here there is none, so the newest fails."""
    first = book.start_holder(key, task="act_latest")
    other = book.send("act", key, 1)
    book.await_waiting(key, 1)
    assert book.outcome(book.send("act_latest", key, 2))[0] == states.FAILURE
    book.open(f"{key}-0")
    assert [book.value(first), book.value(other)] == [0, 1]


@pytest.mark.full
def test_what_was_replaced_outlives_the_worker_that_was_to_end_it(own_book, key):
    """Its message stays until a worker has ended it: here the next worker."""
    conf = {"singleton_lock_lease": 3.0}
    worker = own_book.worker(concurrency=1, conf=conf).start()
    first = own_book.start_holder(
        key, task="act_latest"
    )  # the only slot: nobody is ended while it runs
    old = own_book.send("act_latest", key, 1)
    own_book.await_waiting(key, 1)
    new = own_book.send("act_latest", key, 2)
    eventually(lambda: _last(own_book, key) == new)
    own_book.kill_worker(worker)
    with own_book.worker(concurrency=1, conf=conf):
        assert own_book.outcome(old, 25)[0] == states.REVOKED
        assert own_book.value(new, 25) == 2
    assert first

"""What a blocked task does: park, skip or fail; bounds of the wait; permits; the lock in a task."""

from __future__ import annotations

import pickle

import pytest
from celery import chain, chord, states

from celery_singleton_lock import current_lock
from celery_singleton_lock.errors import LockConflict, LockQueueFull, LockWaitTimeout
from integration.book import LONG_LEASE
from support.waiting import eventually, in_time, seconds_until


@pytest.fixture(scope="module")
def lease():
    """No lease ends here, also not while a process stands still."""
    return LONG_LEASE


def test_a_parked_task_waits_without_a_slot(book, worker, key):
    """20 blocked tasks leave the four slots to others, and run in order when the lock is free."""
    first = book.start_holder(key)
    parked = [book.send("act", key, n) for n in range(1, 21)]
    book.await_waiting(key, 20)
    assert book.value(book.send("act", f"{key}-other", 1)) == 1
    eventually(lambda: book.unacked() == 0, 5, "a result can be there before its acknowledgement")
    book.open(f"{key}-0")
    assert [book.value(r) for r in (first, *parked)] == list(range(21))
    assert book.order(key) == list(range(21))
    assert book.peak(key) == 1
    book.await_free(key)


def test_skip_ends_revoked_with_a_reason_that_names_lock_and_holder(book, worker, key):
    """The result of the skipped task names the lock and its holder."""
    first = book.start_holder(key)
    state, reason = book.outcome(book.send("act_skip", key, 1))
    assert state == states.REVOKED
    assert f"k:{key}" in str(reason)
    assert first in str(reason)
    assert book.order(key) == [0]
    book.open(f"{key}-0")
    assert book.value(first) == 0
    book.await_free(key)


def test_skip_is_heard_by_a_chord(book, worker, key):
    """After a skipped member, the chord's body fails at once and does not wait for ever."""
    book.start_holder(key)
    tasks = book.app.tasks
    body = chord([tasks["act"].si(f"{key}-x", 1), tasks["act_skip"].si(key, 2)])(tasks["total"].s())
    assert book.outcome(body.id)[0] in (states.FAILURE, states.REVOKED)
    book.open(f"{key}-0")
    book.await_free(key)


def test_fail_ends_with_the_holder_in_the_error(book, worker, key):
    """The error is LockConflict, with lock, holder and time left, through Celery's own path."""
    first = book.start_holder(key)
    state, error = book.outcome(book.send("act_fail", key, 1))
    assert state == states.FAILURE
    assert isinstance(error, LockConflict)
    assert f"k:{key}" in str(error)
    assert first in str(error)
    book.open(f"{key}-0")
    assert book.value(first) == 0
    book.await_free(key)


@pytest.mark.parametrize(("task", "kind"), [("act_fail", LockConflict)])
def test_T29_our_exceptions_do_not_end_the_worker(book, worker, key, task, kind):
    """Ten exceptions of this package from the pool.

    Each arrives complete, and the worker keeps running.
    """
    book.start_holder(key)
    outcomes = [book.outcome(book.send(task, key, n)) for n in range(1, 11)]
    assert {type(error) for _, error in outcomes} == {kind}
    assert all(type(pickle.loads(pickle.dumps(error))) is kind for _, error in outcomes)
    book.open(f"{key}-0")
    assert book.value(book.send("act", f"{key}-x", 1)) == 1
    assert worker.is_running


@pytest.mark.parametrize("task", ["act_skip", "act_fail"])
@pytest.mark.parametrize("end", ["retry-early", "replace-early"])
def test_T15_a_retry_does_not_end_because_its_last_attempt_still_holds_the_lock(
    book, worker, key, task, end
):
    """The retry or replacement arrives before the last attempt has released the lock. It waits."""
    sent = book.send(task, key, 0, end=end, extra=f"{key}-again")
    book.await_waiting(key, 1)
    assert book.outcome(book.send(task, key, 1))[0] != states.SUCCESS
    book.open(f"{key}-again")
    assert book.value(sent) == 0
    assert book.order(key) == [0, 0]
    book.await_free(key)


@pytest.mark.parametrize("task", ["act_skip", "act_fail"])
@pytest.mark.parametrize("sent_as", ["link", "chain"])
def test_T15_a_link_does_not_end_because_its_sender_still_holds_the_lock(
    book, worker, key, task, sent_as
):
    """Celery sends it when the body has returned. Another task is skipped, or fails."""
    first, after = book.app.tasks["act_ends_late"], book.app.tasks[task].si(key, 1)
    if sent_as == "link":
        first.apply_async((key, 0), link=after)
    else:
        chain(first.si(key, 0), after)()
    book.await_waiting(key, 1)
    assert book.outcome(book.send(task, key, 2))[0] != states.SUCCESS
    book.open(f"{key}-end")
    eventually(lambda: book.order(key) == [0, 1])
    book.await_free(key)


def test_wait_timeout_ends_a_parked_task_by_the_failure_path(book, worker, key):
    """After the timeout the task fails with LockWaitTimeout.

    The next waiter still gets the lock.
    """
    first = book.start_holder(key)
    late = book.send("act_patient", key, 1)
    behind = book.send("act", key, 2)
    state, error = book.outcome(late)
    assert state == states.FAILURE
    assert isinstance(error, LockWaitTimeout)
    assert f"k:{key}" in str(error)
    assert book.state(first) != states.SUCCESS
    book.open(f"{key}-0")
    assert book.value(behind) == 2
    assert book.order(key) == [0, 2]
    took = seconds_until(lambda: not book.view(key).bodies)
    book.await_free(key)
    in_time(took, 2)  # its message is dropped at once: no process is waited for


def test_max_waiting_fails_a_task_if_the_queue_is_full(book, worker, key):
    """One runs and two wait; the fourth fails with LockQueueFull, the three run."""
    first = book.start_holder(key, task="act_bounded")
    waiting = [book.send("act_bounded", key, n) for n in (1, 2)]
    book.await_waiting(key, 2)
    state, error = book.outcome(book.send("act_bounded", key, 3))
    assert state == states.FAILURE
    assert isinstance(error, LockQueueFull)
    book.open(f"{key}-0")
    assert [book.value(r) for r in (first, *waiting)] == [0, 1, 2]
    assert book.order(key) == [0, 1, 2]
    book.await_free(key)


def test_on_full_skip_ends_revoked(book, worker, key):
    """With lock_on_full="skip" the task beyond the limit ends as REVOKED, with a reason."""
    first = book.start_holder(key, task="act_bounded_skip")
    waiting = [book.send("act_bounded_skip", key, n) for n in (1, 2)]
    book.await_waiting(key, 2)
    state, reason = book.outcome(book.send("act_bounded_skip", key, 3))
    assert state == states.REVOKED
    assert f"k:{key}" in str(reason)
    book.open(f"{key}-0")
    assert [book.value(r) for r in (first, *waiting)] == [0, 1, 2]
    book.await_free(key)


def test_max_waiting_0_allows_no_waiter(book, worker, key):
    """A blocked task fails at once; a task whose lock is free runs."""
    first = book.start_holder(key, task="act_nobody_waits")
    assert isinstance(book.outcome(book.send("act_nobody_waits", key, 1))[1], LockQueueFull)
    book.open(f"{key}-0")
    assert book.value(first) == 0
    book.await_free(key)
    assert book.value(book.send("act_nobody_waits", key, 2)) == 2


def test_T22_limit_2_lets_exactly_two_run(book, worker, key):
    """30 tasks of a lock with two permits on four slots: never three at once, and two."""
    sent = [book.send("act_two", key, n, hold=f"{key}-both") for n in range(2)]
    sent += [book.send("act_two", key, n, hold=0.03) for n in range(2, 30)]
    for result in sent[:2]:
        book.started(result)
    book.open(f"{key}-both")
    assert [book.value(r) for r in sent] == list(range(30))
    assert book.peak(key) == 2
    assert sorted(book.order(key)) == list(range(30))
    book.await_free(key)


def test_a_retry_that_was_sent_twice_runs_twice(book, worker, key):
    """The earlier attempt ran twice, and each run sent a retry: both run, as in Celery."""
    first = book.start_holder(key, 1, task="act_two", task_id=f"{key}-again", retries=1)
    book.send("act_two", key, 1, task_id=f"{key}-again", retries=1)
    book.started(first, times=2)
    book.open(f"{key}-1")
    book.await_free(key)
    assert book.order(key) == [1, 1]


def test_two_tasks_with_one_template_share_their_locks(book, worker, key):
    """A template is the whole name: another task of the same template waits."""
    first = book.start_holder(key)
    other = book.send("act_late", key, 1)
    book.await_waiting(key, 1)
    book.open(f"{key}-0")
    assert [book.value(first), book.value(other)] == [0, 1]
    assert [start["task"] for start in book.starts(key)] == ["act", "act_late"]


@pytest.mark.parametrize(
    ("task", "lock"),
    [("act", "k:{}"), ("act_called", "called:{}"), ("act_args", 'act_args:{{"key":"{}"}}')],
)
def test_each_way_to_name_a_lock_excludes(book, worker, key, task, lock):
    """Template, callable and lock_args: two calls with the same key do not overlap."""
    sent = [book.send(task, key, n, hold=0.05) for n in range(3)]
    assert [book.value(r) for r in sent] == [0, 1, 2]
    assert book.peak(key) == 1
    names = {start["lock"] for start in book.starts(key)}
    assert len(names) == 1
    assert key in names.pop()


def test_without_a_key_each_different_call_has_its_own_lock(book, worker, key):
    """The default: equal calls wait for each other, different ones run at once."""
    equal = [book.send("act_digest", key, 1, hold=0.1) for _ in range(2)]
    other = book.send("act_digest", key, 2, hold=0.1)
    assert [book.value(r) for r in (*equal, other)] == [1, 1, 2]
    locks = [start["lock"] for start in book.starts(key)]
    assert len(set(locks)) == 2
    runs = [run for run in book.runs(key) if run[2]["n"] == 1]
    assert runs[0][1] <= runs[1][0]


def test_the_lock_in_a_task_has_name_state_and_a_growing_fence(book, worker, key):
    """``current_lock()`` is held under its name, and each grant has a higher fencing token."""
    for n in range(5):
        book.value(book.send("act", key, n))
    starts = book.starts(key)
    assert {(start["lock"], start["held"]) for start in starts} == {(f"k:{key}", True)}
    fences = [start["fence"] for start in starts]
    assert fences == sorted(set(fences))


def test_T33_direct_call_apply_and_eager_neither_take_nor_free(book, worker, key):
    """In the caller's process the task runs unlocked, while a worker's task holds the key."""
    first = book.start_holder(key)
    before = book.view(key)
    task = book.app.tasks["act"]
    assert task(key, 1) == 1
    assert task.apply((key, 2)).get() == 2
    book.app.conf.task_always_eager = True
    try:
        assert task.delay(key, 3).get() == 3
    finally:
        book.app.conf.task_always_eager = False
    assert [(s["held"], s["lock"], s["fence"]) for s in book.starts(key)[1:]] == [
        (False, "", 0)
    ] * 3
    after = book.view(key)
    assert [h.token for h in after.holders] == [h.token for h in before.holders]
    assert after.waiting == 0
    book.open(f"{key}-0")
    assert book.value(first) == 0
    book.await_free(key)


def test_outside_of_tasks_the_lock_is_inert():
    """``current_lock()`` at module level holds nothing and raises nothing."""
    lock = current_lock()
    lock.ensure_held()
    assert (lock.held, lock.lost, lock.fencing_token) == (False, False, 0)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((5,), {}), ((), {"key": 5}), ((5, 7), {}), ((5,), {"size": 7})]
)
def test_T31_positional_keyword_and_default_arguments_name_one_lock(book, worker, args, kwargs):
    """f(5), f(key=5), f(5, 7) and f(5, size=7) take the same lock."""
    result = book.app.tasks["default"].apply_async(args, kwargs).id
    assert book.value(result) == "k:5:7"


def test_T40_a_raising_key_callable_fails_its_task_and_nothing_else(book, worker, key):
    """The task fails with an error that names it and the cause; the worker keeps running."""
    results = [book.send("act_raising", f"bad-{key}", n) for n in range(8)]
    for result in results:
        state, error = book.outcome(result)
        assert state == states.FAILURE
        assert "act_raising" in str(error)
    good = [book.send("act_raising", key, n, hold=0.05) for n in range(6)]
    assert [book.value(r) for r in good] == list(range(6))
    assert book.peak(key) == 1
    assert worker.is_running


def test_arguments_that_do_not_bind_fail_as_without_a_lock(book, worker):
    """A call with wrong arguments ends with Python's TypeError; no lock is held."""
    result = book.app.send_task("default", (), {"wrong": 1}).id
    state, error = book.outcome(result)
    assert (state, type(error)) == (states.FAILURE, TypeError)


def test_a_none_in_a_template_fails_its_task_by_name(book, worker):
    """None in a template is an error that names task and argument; it takes no lock."""
    result = book.app.tasks["act"].apply_async((None, 1)).id
    state, error = book.outcome(result)
    assert state == states.FAILURE
    assert "act" in str(error)
    assert "key" in str(error)
    assert book.view("None").fencing_token == 0


def test_an_unserialisable_argument_fails_its_task_by_name(book, worker, key):
    """A pickled argument without a canonical form is an error that names the argument."""
    result = book.app.tasks["act_digest"].apply_async((_Odd(), 1), serializer="pickle").id
    state, error = book.outcome(result)
    assert state == states.FAILURE
    assert "key" in str(error)
    assert worker.is_running


class _Odd:
    """Has no canonical form."""

    def __reduce__(self):
        return (object, ())


@pytest.mark.parametrize(
    ("task", "kind"),
    [("act_fail", LockConflict), ("act_patient", LockWaitTimeout)],
)
def test_an_expected_refusal_is_logged_once_without_a_traceback(book, worker, key, task, kind):
    """A task that fails because its lock is held gives one line at INFO, and no traceback."""
    book.start_holder(key)
    failed = book.send(task, key, 1)
    state, error = book.outcome(failed)
    assert (state, type(error)) == (states.FAILURE, kind)
    book.open(f"{key}-0")
    book.await_free(key)

    def told():
        lines = worker.log().splitlines()
        return [line for line in lines if failed in line and kind.__name__ in line]

    eventually(told)  # the main process may log it after the result is stored
    assert book.value(book.send("act", key, 2)) == 2
    told = told()
    assert len(told) == 1, told
    assert "INFO" in told[0]
    assert "raised expected" in told[0]

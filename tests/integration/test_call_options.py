"""Lock options of one call, and keys that use properties of the message."""

from __future__ import annotations

import pytest
from celery import Celery, chain, states

from celery_singleton_lock import ConfigurationError, LockedTask
from celery_singleton_lock.config.call_options import HEADER


@pytest.mark.parametrize("door", ["apply_async", "set", "signature", "chain"])
def test_a_call_is_skipped_where_its_task_would_wait(book, worker, key, door):
    """By each way in which a call can have options; the task's own calls wait."""
    book.start_holder(key)
    act, option = book.app.tasks["act"], {"lock_on_conflict": "skip"}
    call = {
        "apply_async": lambda: act.apply_async((key, 1), **option),
        "set": lambda: act.s(key, 1).set(**option).delay(),
        "signature": lambda: book.app.signature("act", (key, 1), options=option).apply_async(),
        "chain": chain(book.app.tasks["plain"].si(f"{key}-x"), act.si(key, 1).set(**option)),
    }[door]().id
    parked = book.send("act", key, 2)
    assert book.outcome(call)[0] == states.REVOKED
    book.open(f"{key}-0")
    assert book.value(parked) == 2
    assert book.order(key) == [0, 2]


def test_the_options_of_a_call_decide_whether_it_fails_or_stops_waiting(book, worker, key):
    """Parked with a deadline of its own; refused at once."""
    book.start_holder(key)
    fails = book.send("act", key, 1, lock_on_conflict="fail")
    waits = book.send("act", key, 2, lock_wait_timeout=0.5)
    assert "LockConflict" in repr(book.outcome(fails)[1])
    assert "LockWaitTimeout" in repr(book.outcome(waits)[1])
    book.open(f"{key}-0")
    book.await_free(key)


def test_a_call_takes_another_lock(book, worker, key):
    """By a template over the same arguments; also when it was parked there."""
    book.start_holder(key)
    other = book.send("act", key, 1, hold=f"{key}-1", lock_key="other:{key}")
    assert book.started(other)["lock"] == f"other:{key}"
    behind = book.send("act", key, 2, lock_key="other:{key}")
    book.await_waiting(key, 1, lock="other:{}")
    book.open(f"{key}-1")
    assert book.value(behind) == 2
    assert book.starts(key)[-1]["lock"] == f"other:{key}"
    book.open(f"{key}-0")
    book.await_free(key)


def test_an_urgent_task_is_the_next_of_fifty_that_are_parked(book, worker, key):
    """Also one that is parked last; one that can wait comes after those that arrive later."""
    book.start_holder(key)
    patient = book.send("act", key, 98, lock_priority=-60)
    usual = [book.send("act", key, n) for n in range(1, 51)]
    book.await_waiting(key, 51)
    urgent = book.send("act", key, 99, lock_priority=60)
    book.await_waiting(key, 52)
    book.open(f"{key}-0")
    assert [book.value(each) for each in (*usual, urgent, patient)] == [*range(1, 51), 99, 98]
    order = book.order(key)
    assert (order[1], order[-1]) == (99, 98)
    assert order[2:-1] == [*range(1, 51)]


def test_a_priority_that_is_no_number_fails_its_task_and_names_it(book, worker, key):
    failed = book.send("act", key, 1, lock_priority="{key}")
    state, error = book.outcome(failed)
    assert state == states.FAILURE
    assert f"lock_priority is '{key}', from the template" in str(error)


@pytest.mark.parametrize("end", ["retry", "raise"])
def test_T37_a_retry_keeps_the_options_of_its_call_which_stay_hidden(book, worker, key, end):
    """Of a retry that the task asks for, and of one that Celery makes."""
    task = "act" if end == "retry" else "act_auto"
    first = book.send(task, key, 0, end=end, extra=0.1, lock_key="other:{key}")
    book.outcome(first)
    starts = book.starts(key)
    assert [(s["lock"], s["leaks"]) for s in starts] == [(f"other:{key}", [])] * 2


def test_a_message_with_invalid_options_fails_without_affecting_others(book, worker, key):
    """Any sender may have sent it: the error gives the reason, and the worker keeps running."""
    for wrong, reason in (
        ({"lock_on_conflict": "sk1p"}, "lock_on_conflict is 'sk1p'"),
        ({"lock_lease": 9}, "lock_lease cannot be given to one call"),
        ({"lock_key": 5}, "lock_key of a call is 5"),
        ({"lock_key": "a:{nonsense}"}, "names the argument 'nonsense'"),
        ("skip", "the header csl-options is str"),
    ):
        state, error = book.outcome(book.send("act", key, 1, headers={HEADER: wrong}))
        assert state == states.FAILURE
        assert reason in str(error)
    assert book.value(book.send("act", key, 2)) == 2
    assert book.order(key) == [2]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"lock_lease": 5}, "lock_lease cannot be given to one call. A call may have lock_key, "),
        ({"lock_on_conflict": "sk1p"}, "lock_on_conflict is 'sk1p'"),
        ({"lock_on_conflict": "wait"}, "it needs a time-out"),
        ({"lock_wait_timeout": "5 minutes"}, "use 300"),
        ({"lock_key": len}, "it must be a template, not a callable"),
        ({"lock_key": "{key}"}, "it has no literal text"),
    ],
)
@pytest.mark.parametrize("eager", [False, True])
def test_options_that_a_call_cannot_have_are_refused_at_the_call(option, words, eager):
    """Before anything is sent."""
    with Celery("calls", broker="memory://", set_as_current=False) as app:
        app.conf.task_always_eager = eager

        @app.task(base=LockedTask, shared=False, lock_key="k:{key}")
        def act(key):
            return key

        for call in (act.apply_async, act.s("a").set(**option).apply_async):
            with pytest.raises(ConfigurationError, match=r"task .*act: ") as caught:
                call(**({"args": ("a",), **option} if call == act.apply_async else {}))
            assert words in str(caught.value)


def test_options_of_an_eager_call_do_not_apply_to_nested_calls(redis_url, redis_client):
    """Where eager tasks take locks."""
    with Celery(
        "eager", broker="memory://", backend="cache+memory://", set_as_current=False
    ) as app:
        app.conf.update(
            singleton_lock_backend=redis_url, singleton_lock_eager=True, task_always_eager=True
        )
        seen = []

        @app.task(bind=True, base=LockedTask, shared=False, lock_key="k:{key}")
        def inner(self, key):
            seen.append(self.lock.name)

        @app.task(bind=True, base=LockedTask, shared=False, lock_key="k:{key}", max_retries=1)
        def outer(self, key):
            seen.append((self.lock.name, self.request.headers))
            inner.delay(key)
            if not self.request.retries:
                raise self.retry(countdown=0)

        outer.apply_async(("a",), lock_key="other:{key}")
        assert seen == [("other:a", None), "k:a"] * 2


def test_a_key_names_queue_and_headers_of_the_message(book, worker, key):
    """The same in a retry; a message without the header fails with its name."""
    headers = {"tenant": f"{key}-t"}
    first = book.send("act_sent", key, 0, end="retry", extra=0.1, headers=headers)
    book.outcome(first)
    assert [start["lock"] for start in book.starts(key)] == [f"sent:celery:{key}-t"] * 2
    state, error = book.outcome(book.send("act_sent", key, 1))
    assert state == states.FAILURE
    assert "the message has no header 'tenant'. Send it: apply_async(headers=" in str(error)
    book.start_holder(key, 2, task="act_sent", headers=headers)
    parked = book.send("act_sent", key, 3, headers=headers)
    book.await_waiting(f"{key}-t", 1, lock="sent:celery:{}")
    book.open(f"{key}-2")
    assert book.value(parked) == 3

"""What a worker renews for the messages that it has parked, for how long; what it gives back."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from kombu.message import Message

from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.lock_set import LockSet, Part, lock_set_in
from celery_singleton_lock.core.model import Ending, Reply, Verdict
from celery_singleton_lock.core.parked_message import Delivery
from celery_singleton_lock.store.operator.base import Standing, Waiting
from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.lock_set_header import begun_again
from celery_singleton_lock.worker.message_codec import pack
from celery_singleton_lock.worker.partial_lock_sets import PartialLockSets

LEASE = 30
OPTIONS = LockOptions(lease=LEASE)
A, B, C = Part("a", "ta.0"), Part("b", "tb.0"), Part("c", "c0c0c0c0.0")


class Paper:
    """A store and a watchdog that record their calls."""

    def __init__(self):
        self.now, self.calls, self.watched = 100.0, [], set()
        self.message, self.granted = None, False
        self.clock = SimpleNamespace(monotonic=lambda: self.now)

    def release(self, name, token, ending, **_):
        self.calls.append(("release", name, token, ending))
        granted = ending is Ending.CANCEL and self.granted
        return Reply(Verdict.GRANTED if granted else Verdict.RELEASED)

    def body(self, name, token):
        return self.message

    def park(self, owner, claim, to_park):
        self.calls.append(("park", claim.name, owner.attempt, claim.place))
        self.parked = to_park
        return Reply(Verdict.TWIN)

    def claim(self, owner, name, lease, *, kept_elsewhere, later):
        self.calls.append(("claim", name, owner.token, kept_elsewhere))

    def watch_later(self, name, token, lease, *, held, on_lost):
        self.watched.add(token)
        self.lost = on_lost

    def forget(self, token, patience):
        self.watched.discard(token)


@pytest.fixture
def paper():
    return Paper()


@pytest.fixture
def standing():
    """Where the parked message stands: change it."""
    return SimpleNamespace(state="parked")


@pytest.fixture
def kept(paper, standing):
    def look(name, token):
        waiting = standing.state and Waiting(name, token, standing.state)
        return Standing(waiting or None, 0, 0.0, ended=False)

    return PartialLockSets(paper, paper, "w#1", look)


@pytest.fixture
def header():
    """Of a task that has a and b, and is parked at c."""
    lock_set = LockSet((A, B, C), at=2, place=7)
    return LockHeader("c", C.token, "id/0/0", "task", "w#1", lock_set=lock_set)


def park(kept, header):
    kept.begin(header, OPTIONS)
    kept.leave_previous_queue(header, LEASE)


@pytest.mark.parametrize("state", ["parked", "granted", "overdue", "revoked", "leaving"])
def test_what_a_message_keeps_is_renewed_while_it_waits(kept, paper, header, standing, state):
    """Also with a verdict, until a worker has ended it."""
    park(kept, header)
    standing.state = state
    for _ in range(5):
        paper.now += LEASE
        kept.look()
    assert paper.watched == {"ta.0", "tb.0"}
    assert len(kept) == 1


@pytest.mark.parametrize("state", ["running", "adrift", ""])
def test_a_lock_of_a_running_task_is_left_to_it_or_to_its_lease(
    kept, paper, header, standing, state
):
    """Another worker runs it; or none consumes its queue; or it is there no more."""
    park(kept, header)
    standing.state = state
    kept.look()
    assert paper.watched, "it is asked once a third of a lease"
    paper.now += LEASE / 3
    kept.look()
    assert not paper.watched
    assert not paper.calls, "who has it may run: nothing is taken from it"


def test_what_is_not_parked_yet_is_not_missed(kept, paper, header, standing):
    """Redis has not answered for long: the message is still on its way there."""
    kept.begin(header, OPTIONS)
    standing.state = ""
    paper.now += 10 * LEASE
    kept.look()
    assert paper.watched == {"ta.0", "tb.0"}


def test_one_lost_lock_ends_the_others(kept, paper, header):
    """Nobody can use them any more."""
    park(kept, header)
    paper.lost("a", "ta.0")
    assert not paper.watched
    assert len(kept) == 0


def test_the_dispatcher_renews_what_comes_back_to_this_worker(kept, paper, header, standing):
    """It is not given up when the message runs."""
    park(kept, header)
    kept.taken_over(header.token)
    standing.state = "running"
    paper.now += LEASE
    kept.look()
    assert paper.watched == {"ta.0", "tb.0"}


def test_at_the_end_nothing_is_renewed(kept, paper, header):
    park(kept, header)
    kept.close()
    assert not paper.watched


def test_a_task_that_has_nothing_yet_keeps_nothing(kept, paper, header):
    kept.begin(header._replace(lock_set=header.lock_set._replace(at=0)), OPTIONS)
    kept.begin(header._replace(lock_set=None), OPTIONS)
    assert (len(kept), paper.watched) == (0, set())


def test_where_a_message_was_kept_before_it_is_dropped_and_the_lock_is_not(kept, paper, header):
    kept.leave_previous_queue(header._replace(lock_set=header.lock_set._replace(left=B)), LEASE)
    assert paper.calls == [("claim", "b", "tb.0", True)]


def test_a_restarted_task_releases_all_locks_and_keeps_its_place(kept, paper, header):
    """First what it kept, so that it does not find itself; the message only once it is parked."""
    granted = header._replace(granted=True)
    again = begun_again(granted, header.lock_set, frees=header.lock_set.kept)
    kept.free(again)
    assert paper.calls == [
        ("release", "a", "ta.0", Ending.AGAIN),
        ("release", "b", "tb.0", Ending.AGAIN),
    ]
    kept.leave_previous_queue(again, LEASE)
    assert paper.calls[2:] == [("release", "c", "c0c0c0c0.0", Ending.FINAL)]


@pytest.mark.parametrize(("token", "given_back"), [("c0c0c0c0.0", ["a", "b"]), ("c0c0c0c0.1", [])])
def test_a_delivery_that_is_not_run_gives_back_what_is_its_own(
    kept, paper, header, token, given_back
):
    """A later one keeps nothing: who had the first may still run."""
    park(kept, header)
    body = json.dumps({"headers": header.lock_set.header()}).encode() + b"\n[]"
    kept.give_back(Delivery("c", token, 1, body))
    assert [name for _, name, _, _ in paper.calls] == given_back


@pytest.fixture
def message(paper, header):
    """The message of the header, as it is kept."""
    message = Message(
        "[[1], {}, {}]",
        headers={"id": "id"},
        content_type="application/json",
        content_encoding="utf-8",
        properties={},
        delivery_info={},
    )
    paper.message = pack(message, header.lock_set.header())


def test_a_worker_that_ends_has_its_messages_begin_again_elsewhere(kept, paper, header, message):
    """Queued at the first lock before it leaves the other line; then all is free, that last."""
    park(kept, header)
    kept.begin_all_again(paper.now + 1)
    assert paper.calls == [
        ("park", "a", "id/0/0", 7),
        ("release", "c", "c0c0c0c0.0", Ending.CANCEL),
        ("release", "b", "tb.0", Ending.AGAIN),
        ("release", "a", "ta.0", Ending.AGAIN),
    ]
    again = lock_set_in(paper.parked.body)
    assert (again.at, again.place, [part.name for part in again.parts]) == (0, 7, ["a", "b", "c"])


def test_a_task_that_was_granted_meanwhile_keeps_all_locks(kept, paper, header, message):
    """Somebody runs it now, and holds what was kept for it."""
    park(kept, header)
    paper.granted = True
    kept.begin_all_again(paper.now + 1)
    assert [call[:2] for call in paper.calls] == [("park", "a"), ("release", "c")]


@pytest.mark.parametrize("state", ["granted", "running", "overdue", "adrift", ""])
def test_what_does_not_wait_any_more_is_not_handed_over(
    kept, paper, header, standing, message, state
):
    park(kept, header)
    standing.state = state
    kept.begin_all_again(paper.now + 1)
    assert not paper.calls


def test_a_worker_ends_in_time(kept, paper, header, message):
    park(kept, header)
    kept.begin_all_again(paper.now)
    assert not paper.calls

"""The desk: what becomes of a message, step by step, without a worker.

A pool, a broker and an agent of paper: each notes what it is told.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import Terminated, WorkerLostError
from celery import Celery
from celery.worker.request import create_request_cls
from celery.worker.state import revoked
from kombu.message import Message
from kombu.utils.json import dumps

from celery_singleton_lock import LockedTask
from celery_singleton_lock.core.clock import ServerClock, wall_time
from celery_singleton_lock.worker.dispatch.dispatcher import Desk, worker_id
from celery_singleton_lock.events import Observers
from celery_singleton_lock.worker.extension import install
from celery_singleton_lock.worker.execution.tracer import Turned
from celery_singleton_lock.worker.dispatch.notifier import Herald
from celery_singleton_lock.core.model import Delivery, Ending
from celery_singleton_lock.core.lock_mode import Modes
from celery_singleton_lock.worker.dispatch.wait_for_redis import Outage
from celery_singleton_lock.worker.request import LockedRequest, bare
from celery_singleton_lock.worker.lock_header import COPY, STAMP, Stamp, notice_of_end
from celery_singleton_lock.worker.dispatch.header_factory import Stamper


class Paper:
    """Notes each call as (name, arguments)."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def names(self):
        return [name for name, _, _ in self.calls]

    def requests(self, verb):
        return [args[0] for name, args, _ in self.calls if name == verb]


@pytest.fixture
def app():
    app = Celery("desk", broker="memory://", backend="cache+memory://", set_as_current=False)

    def run(key, n=0):
        return n

    for name, options in {
        "early": {},
        "late": {"acks_late": True},
        "two": {"lock_limit": 2},
        "fails": {"lock_on_conflict": "fail"},
        "runs": {"lock_on_backend_error": "run"},
    }.items():
        app.task(name=name, base=LockedTask, shared=False, lock_key="k:{key}", **options)(run)
    app.task(name="pair", base=LockedTask, shared=False, lock_keys=["k:{key}", "k:{n}"])(run)
    app.finalize()
    app.conf.singleton_lock_backend = "redis://localhost:1/0"
    return app


@pytest.fixture
def office(app):
    """A desk, its clerk, and what has been sent to the pool."""
    extension, clerk, sent, prefetch = install(app), Paper(), [], []
    place, herald = ServerClock(), Herald(Observers())
    stamper = Stamper(
        worker="w#1",
        place=place,
        rules=extension.options,
        of_call=extension.options_of_call,
        name_of=extension.name_of,
        modes=Modes({}),
    )
    desk = Desk(
        stamper=stamper,
        rules=extension.options,
        forward=sent.append,
        clerk=clerk,
        herald=herald,
        prefetch=prefetch.append,
    )

    def message(task, *args, request_id=None, canvas=None, **headers):
        tag = f"{len(made)}"
        made.append(tag)
        fields = {"id": request_id or f"id{tag}", "task": task, **headers}
        note = Message(
            body=dumps([args, {}, canvas or {}]),
            content_type="application/json", content_encoding="utf-8",
            headers=fields, delivery_info={"redelivered": headers.get("redelivered", False)},
        )  # fmt: skip
        pool = SimpleNamespace(apply_async=lambda *a, **k: None)
        cls = create_request_cls(LockedRequest, app.tasks[task], pool, "w", None, app=app)
        request = cls(
            note, app=app, task=app.tasks[task], hostname="w",
            on_ack=lambda *_: acked.append(request.id),
            on_reject=lambda *_: rejected.append(request.id),
        )  # fmt: skip
        return request

    made, acked, rejected = [], [], []
    return SimpleNamespace(
        desk=desk, clerk=clerk, sent=sent, prefetch=prefetch, message=message, acked=acked,
        rejected=rejected, place=place, herald=herald,
    )  # fmt: skip


def take(office, request):
    """A child has taken the lock."""
    request.on_accepted(4711, 0.0)
    office.desk.on_notice(request.stamp.token)


def end(request):
    """A child has told of a success."""
    request.on_success((0, None, 0.1))


def turn(request, verdict="blocked"):
    """A child was turned away."""
    request.on_failure(SimpleNamespace(exception=Turned(verdict, "held"), traceback=""))


def die(request, error):
    """A child is gone."""
    try:
        raise error
    except type(error):
        request.on_failure(ExceptionInfo())


@pytest.mark.parametrize(("notice_first", "held"), [(False, [False, False]), (True, [True, True])])
def test_a_lock_that_was_taken_before_its_task_was_accepted_can_be_lost(office, notice_first, held):
    """Child and pool tell by two pipes: a lock of which the notice came first is known to be held.

    Else its first renewal would take a lock that is gone for one that is not taken yet, and the
    task would neither be told nor interrupted.
    """
    request = office.message("pair", "a", "b")
    office.desk(request)
    if notice_first:
        office.desk.on_notice(request.stamp.token)
    request.on_accepted(4711, 0.0)
    assert [how["held"] for name, _, how in office.clerk.calls if name == "watch"] == held


def test_a_message_of_a_free_lock_goes_to_the_pool_with_a_stamp(office):
    """It is stamped with lock, token and attempt; nobody is asked."""
    request = office.message("early", "a")
    office.desk(request)
    assert office.sent == [request]
    stamp = Stamp(*request.request_dict[STAMP])
    assert (stamp.name, stamp.attempt, stamp.worker) == ("k:a", f"{request.id}/0/0", "w#1")
    assert office.clerk.calls == []


@pytest.mark.parametrize("canvas", [{}, {"chain": None, "callbacks": None}, {"chain": []}])
def test_a_child_need_not_decode_the_arguments_again(office, canvas):
    """The main process has, for the lock's name, and Celery sends them along anyway."""
    request = office.message("early", "a", canvas=canvas)
    office.desk(request)
    assert (request.body, request.content_type) == ([["a"], {}, canvas], None)
    assert request.content_encoding is None


def test_a_canvas_travels_as_it_came(office):
    """Celery does not pickle it, and there may be in it what cannot be."""
    request = office.message("early", "a", canvas={"chain": [{"task": "next"}]})
    before = request.body
    office.desk(request)
    assert (request.body, request.content_type) == (before, "application/json")


def test_where_tasks_share_a_process_each_decodes_its_arguments(office):
    """They would share them with the message, and a task may change its own."""
    office.desk.children = False
    request = office.message("early", ["a"])
    before = request.body
    office.desk(request)
    assert (request.body, request.content_type) == (before, "application/json")


def test_tokens_are_never_the_task_id(office):
    """L14: two deliveries of one task have two tokens."""
    one, two = (office.message("early", "a", request_id="same") for _ in range(2))
    office.desk(one)
    office.desk(two)
    assert one.stamp.token != two.stamp.token
    assert "same" not in one.stamp.token


def test_places_grow_with_the_order_of_arrival(office):
    """A message that arrived later never has the smaller place."""
    office.place.sync(1000.0, 0.0)
    requests = [office.message("early", key) for key in "abc"]
    for request in requests:
        office.desk(request)
    places = [request.stamp.place for request in requests]
    assert places == sorted(set(places))


def test_other_tasks_pass_untouched(office):
    """What is no locked request goes Celery's own way."""
    office.desk("anything")
    assert office.sent == ["anything"]


def test_the_second_of_a_key_is_parked_without_a_slot(office):
    """The first holds the lock: the second goes to the clerk."""
    first, second = office.message("early", "a"), office.message("early", "a")
    office.desk(first)
    take(office, first)
    office.desk(second)
    assert office.sent == [first]
    assert office.clerk.requests("park") == [second]


def test_a_follower_is_not_parked_before_it_is_known_who_comes_first(office):
    """Else a release elsewhere could grant it while the first is on its way to a slot."""
    requests = [office.message("early", "a") for _ in range(3)]
    for request in requests:
        office.desk(request)
    assert office.clerk.requests("park") == []
    take(office, requests[0])
    assert office.clerk.requests("park") == requests[1:]


def test_who_is_turned_away_is_parked_before_its_followers(office):
    """Order of arrival, also if the first finds its lock busy."""
    requests = [office.message("early", "a") for _ in range(3)]
    for request in requests:
        office.desk(request)
    requests[0].on_accepted(4711, 0.0)
    turn(requests[0])
    assert office.clerk.requests("park") == requests


def test_who_arrives_while_one_is_being_parked_comes_behind_it(office):
    """It is not sent to the pool, where it could overtake."""
    first, second, third = (office.message("early", "a") for _ in range(3))
    office.desk(first)
    first.on_accepted(4711, 0.0)
    turn(first)
    office.desk(second)
    assert office.clerk.requests("park") == [first, second]
    office.desk.parked(first, "", 1)
    office.desk.parked(second, "", 2)
    office.desk(third)
    assert office.sent == [first, third]


def test_nothing_is_kept_of_a_lock_when_all_is_over(office):
    """The table of flights does not grow."""
    requests = [office.message("early", "a") for _ in range(3)]
    for request in requests:
        office.desk(request)
    take(office, requests[0])
    end(requests[0])
    for request in requests[1:]:
        office.desk.parked(request, "", 1)
    assert office.desk.counts()["in_flight"] == {}
    assert office.desk.flights.by_token == {}


def test_a_limit_of_two_lets_two_into_the_pool(office):
    """The third is parked."""
    requests = [office.message("two", "a") for _ in range(3)]
    for request in requests:
        office.desk(request)
    for request in requests[:2]:
        take(office, request)
    assert office.sent == requests[:2]
    assert office.clerk.requests("park") == [requests[2]]


def test_a_policy_that_does_not_wait_is_decided_in_the_pool(office):
    """lock_on_conflict="fail": each goes to the pool, and is refused there."""
    requests = [office.message("fails", "a") for _ in range(2)]
    for request in requests:
        office.desk(request)
    assert office.sent == requests


def test_an_early_ack_waits_for_the_lock(office):
    """Accepted is not acknowledged: a blocked task would be lost with its worker."""
    request = office.message("early", "a")
    office.desk(request)
    request.on_accepted(4711, 0.0)
    assert office.acked == []
    office.desk.on_notice(request.stamp.token)
    assert office.acked == [request.id]


def test_a_turned_away_early_ack_waits_for_redis(office):
    """It is acknowledged only when the agent says that it is parked."""
    request = office.message("early", "a")
    office.desk(request)
    request.on_accepted(4711, 0.0)
    turn(request)
    assert office.acked == []
    office.desk.parked(request, "holder", 1)
    assert office.acked == [request.id]


def test_a_lost_notice_is_made_up_for_by_the_end(office):
    """The pipe was full: the task's end acknowledges."""
    request = office.message("early", "a")
    office.desk(request)
    request.on_accepted(4711, 0.0)
    end(request)
    assert office.acked == [request.id]


def test_a_late_ack_comes_with_the_end(office):
    """acks_late: neither acceptance nor the lock acknowledges."""
    request = office.message("late", "a")
    office.desk(request)
    take(office, request)
    assert office.acked == []
    end(request)
    assert office.acked == [request.id]


def test_the_lease_is_watched_from_acceptance_to_the_end(office):
    """Watch, confirm, forget."""
    request = office.message("early", "a")
    office.desk(request)
    take(office, request)
    end(request)
    assert office.clerk.names() == ["watch", "confirm", "forget"]


@pytest.mark.parametrize("error", [WorkerLostError("gone"), Terminated(9)])
def test_the_agent_releases_for_a_dead_child(office, error):
    """With its pid, so that it does so only once the process is gone."""
    request = office.message("early", "a")
    office.desk(request)
    take(office, request)
    die(request, error)
    (stamp, ending, pid), _ = next((a, k) for name, a, k in office.clerk.calls if name == "end")
    assert (stamp, ending, pid) == (request.stamp, Ending.FINAL, 4711)


def test_a_notice_of_somebody_unknown_is_ignored(office):
    """A child that was flushed may still announce."""
    office.desk.on_notice("unknown")
    assert office.clerk.calls == []


def test_a_child_that_could_not_release_has_the_agent_do_it(office):
    """Its process lives, so nobody waits for its end."""
    stamp = Stamp("a", "t.0", "id/1/0", "task", "w")
    office.desk.on_notice(notice_of_end(stamp, Ending.FINAL))
    assert office.clerk.calls == [("end", (stamp, Ending.FINAL, None, 0.0), {})]


def test_a_redelivered_message_is_stamped_as_a_copy(office):
    """Only then the script looks for its twin."""
    request = office.message("late", "a", redelivered=True)
    office.desk(request)
    assert request.stamp.copy


def test_a_copy_that_we_published_is_looked_up(office):
    """It says of what it is a copy, and that header does not reach the task."""
    request = office.message("early", "a", **{COPY: ["k:a", "token.0"]})
    office.desk(request)
    assert [(n, a[1:]) for n, a, _ in office.clerk.calls] == [("look_up", ("k:a", "token.0"))]
    assert COPY not in request.request_dict
    office.desk.redispatch(request)
    assert office.sent == [request]


def test_a_key_that_cannot_be_made_travels_to_the_child_as_an_error(office):
    """T40: nothing is raised into the main loop; the task fails in its slot."""
    request = office.message("early", None)
    office.desk(request)
    assert office.sent == [request]
    assert request.stamp.error is not None


def test_arguments_that_do_not_bind_go_unlocked(office):
    """The call itself fails, and needs no lock for that."""
    request = office.message("early")
    office.desk(request)
    assert office.sent == [request]
    assert (request.stamp.name, request.stamp.error) == ("", None)


def test_while_redis_is_down_messages_are_held_and_the_window_grows(office):
    """One more may be unacknowledged for each; when Redis is back they go on, in order."""
    office.desk.backend_down()
    requests = [office.message("early", key) for key in "abc"]
    for request in requests:
        office.desk(request)
    assert office.sent == []
    assert office.prefetch == [1, 1, 1]
    office.desk.backend_up()
    assert office.sent == requests
    assert sum(office.prefetch) == 0


def test_while_redis_is_down_a_task_that_may_run_unlocked_does(office):
    """lock_on_backend_error="run" and "fail" are decided in the pool."""
    office.desk.backend_down()
    requests = [office.message("runs", "a") for _ in range(2)]
    for request in requests:
        office.desk(request)
    assert office.sent == requests


def test_who_finds_redis_away_is_held_with_its_followers(office):
    """They go on in the order of arrival when Redis is back."""
    requests = [office.message("early", "a") for _ in range(3)]
    for request in requests:
        office.desk(request)
    requests[0].on_accepted(4711, 0.0)
    turn(requests[0], "unavailable")
    assert office.clerk.requests("park") == []
    assert "backend_failed" in office.clerk.names()
    assert office.desk._outage._suspended == requests
    assert office.acked == []


def test_who_was_in_the_pool_when_redis_went_away_is_still_the_first(office):
    """The agent notices the outage before the child: arrival decides, not who is held first."""
    first, second, third = (office.message("late", "a", n) for n in range(3))
    office.desk(first)
    office.desk.backend_down()
    office.desk(second)
    turn(first, "unavailable")
    office.desk(third)
    assert office.desk._outage._suspended == [second, first, third]
    office.desk.backend_up()
    assert office.sent == [first, first]
    take(office, first)
    assert office.clerk.requests("park") == [second, third]


def test_what_is_held_is_either_sent_on_or_still_held_when_a_mode_changes_meanwhile(office):
    """Whether a lock is kept is asked once: another thread may hear of a switch any moment."""
    outage, kept = Outage(office.prefetch.append), iter([False, True])
    outage.begin(request := office.message("late", "a"))
    assert outage.free(lambda _: next(kept)) == [request]
    assert len(outage) == 0
    assert sum(office.prefetch) == 0


def test_a_message_that_a_pool_thread_holds_while_redis_comes_back_is_sent_on(office):
    """The thread and the main loop meet at any moment: nothing stays behind until a next outage."""
    outage, ended, threads = Outage(office.prefetch.append), [], []

    class Meeting(list):
        def append(self, request):
            threads.append(threading.Thread(target=lambda: ended.extend(outage.end())))
            threads[0].start()
            threads[0].join(0.1)
            super().append(request)

    outage._suspended = Meeting()
    outage.begin(request := office.message("late", "a"))
    threads[0].join()
    assert ended == [request]
    assert not outage.suspend(office.message("late", "a"))
    assert len(outage) == 0
    assert sum(office.prefetch) == 0


def test_why_locked_tasks_wait_is_logged_once(office, caplog):
    """By whoever notices first."""
    for key in "ab":
        request = office.message("late", key)
        office.desk(request)
        turn(request, "unavailable")
    assert [record.message for record in caplog.records] == [
        "celery-singleton-lock: held Locked tasks wait."
    ]


def deliver(office, task="early", key="a", verdict="granted"):
    request = office.message(task, key)
    delivery = Delivery(f"k:{key}", "token.0", 7, b"", verdict, 1.5)
    office.desk.deliver(delivery, request)
    return request


def test_a_delivered_message_goes_to_the_pool_with_its_grant(office):
    """Its lease is renewed while it waits for its slot; a second delivery of it is nothing."""
    request = deliver(office)
    assert office.sent == [request]
    assert (request.stamp.granted, request.stamp.token) == (True, "token.0")
    assert office.clerk.names() == ["watch"]
    deliver(office)
    assert office.sent == [request]
    assert office.desk.flights.backlog() == 1


def test_a_message_that_has_ended_here_does_not_run_again_after_redis_has_lost_its_end(office):
    """Nor is it left in Redis, nor dropped without a word."""
    first = deliver(office)
    first.on_accepted(4711, 0.0)
    end(first)
    deliver(office)  # an operator's wish, or a lapsed lease: Redis was there all the while
    assert len(office.sent) == 2
    end(office.sent[1])
    office.desk.ends.doubt()
    told = []
    office.herald.observers.add(SimpleNamespace(notify=told.append))
    again = deliver(office)
    assert len(office.sent) == 2
    assert ("end", (again.stamp, Ending.FINAL, None), {}) in office.clerk.calls
    assert [event.verdict for event in told] == ["ended"]


def test_what_is_told_of_a_delivered_message_waits_and_keeps_its_order(office):
    """Who parked it tells of that first. Each event has the time at which it happened."""
    later, told = [], []
    office.herald.later, office.herald.sends_events = later.append, lambda: True
    office.herald.send_event = lambda event, /, **fields: told.append((event, fields["timestamp"]))
    request = office.message("early", "b")
    request._eventer = SimpleNamespace(enabled=True, send=office.herald.send_event)
    office.desk.deliver(Delivery("k:b", "token.1", 7, b"", "granted", 1.5), request)
    take(office, request)
    request.send_event("task-succeeded")
    assert told == []
    (speak,) = later
    spoke = wall_time()
    speak()
    names = [name for name, _ in told]
    assert names[0] == "task-delivered"
    assert names.index("task-started") < names.index("task-succeeded")
    assert max(at for _, at in told) < spoke
    request.send_event("task-retried")
    assert told[-1][0] == "task-retried"


def test_who_comes_behind_a_delivered_message_is_parked_at_once(office):
    """It holds its lock already."""
    deliver(office)
    request = office.message("early", "a")
    office.desk(request)
    assert office.clerk.requests("park") == [request]


def test_an_overdue_message_goes_to_the_pool_to_fail_there(office):
    """Celery's own failure path ends it."""
    request = deliver(office, verdict="overdue")
    assert type(request.stamp.error).__name__ == "LockWaitTimeout"
    assert office.sent == [request]


@pytest.fixture
def no_revokes():
    """What this process knows of revokes ends with the test: ids are used again."""
    yield
    revoked.clear()


def test_T17_a_revoked_message_is_ended_here_though_another_worker_heard_of_it(office, no_revokes):
    """Celery's own path ends it: REVOKED, acknowledged; nothing is sent, and it is settled."""
    request = deliver(office, verdict="revoked")
    assert office.sent == []
    assert request.task.backend.get_state(request.id) == "REVOKED"
    assert request.acknowledged
    assert office.clerk.names() == ["end", "forget"]
    assert office.clerk.calls[0][1][1] is Ending.FINAL


def test_a_grant_that_lapsed_is_dropped_here(office):
    """The message is delivered again under its next token, so nothing is parked or acknowledged."""
    request = deliver(office)
    request.on_accepted(4711, 0.0)
    turn(request, "gone")
    assert office.clerk.requests("park") == []
    assert office.desk.flights.by_token == {}


def test_connection_loss_gives_back_what_the_pool_has_flushed(office):
    """Delivered messages are released to come again; those of the broker come by themselves."""
    own, delivered = office.message("early", "a"), deliver(office, key="b")
    office.desk(own)
    follower = office.message("early", "a")
    office.desk(follower)
    office.desk.abandon(unless_dispatched=False)
    ended = [args for name, args, _ in office.clerk.calls if name == "end"]
    assert [(stamp.name, ending) for stamp, ending, _ in ended] == [("k:b", Ending.RETURN)]
    assert office.desk.flights.by_token == {}
    assert office.clerk.requests("park") == []
    assert delivered.landed


def test_what_a_child_has_begun_unheard_keeps_its_lock_over_a_connection_loss(office):
    """It was given back unless it had begun; its lease is renewed if the store still knows it."""
    delivered = deliver(office)
    office.desk.abandon(unless_dispatched=False)
    delivered.on_accepted(4711, 0.0)
    watched = [more["held"] for name, _, more in office.clerk.calls if name == "watch"]
    assert watched == [True, False]
    assert office.desk.flights.has(delivered.stamp.token)
    turn(delivered, "gone")
    assert office.clerk.names()[-1] == "forget"
    assert office.desk.flights.by_token == {}


def test_what_another_worker_got_is_not_renewed_and_frees_its_slot(office):
    delivered = deliver(office)
    office.desk.withdraw(delivered)
    office.desk.withdraw(delivered)
    assert office.clerk.names().count("forget") == 1
    delivered.on_accepted(4711, 0.0)
    assert office.clerk.names().count("watch") == 1
    turn(delivered, "gone")
    assert office.desk.unclaimed == 1
    assert office.clerk.requests("park") == []
    assert office.desk.flights.by_token == {}


def test_a_shutdown_gives_back_what_no_child_has_got(office):
    """A closing prefork pool throws away what it has not written to a child."""
    unsent, written, threaded = (deliver_as(office, key) for key in "abc")
    unsent.dispatched = written.dispatched = threaded.dispatched = True
    unsent.job = SimpleNamespace(_write_to=None)
    written.job = SimpleNamespace(_write_to="a process")
    threaded.job = object()
    office.desk.abandon(unless_dispatched=True)
    assert [unsent.landed, written.landed, threaded.landed] == [True, False, False]


def deliver_as(office, key):
    request = office.message("early", key)
    office.desk.deliver(Delivery(f"k:{key}", f"{key}.0", 7, b""), request)
    return request


def test_refused_for_a_full_queue_it_fails_in_the_pool(office):
    """LockQueueFull travels in the stamp."""
    first, second = office.message("early", "a"), office.message("early", "a")
    office.desk(first)
    take(office, first)
    office.desk(second)
    office.desk.refused(second, "as many wait")
    assert office.sent == [first, second]
    assert type(second.stamp.error).__name__ == "LockQueueFull"


def test_a_reject_with_requeue_is_no_final_end(office):
    """T36: what comes back keeps its body."""
    request = office.message("late", "a")
    office.desk(request)
    assert request.ending() is Ending.AGAIN
    request.reject(requeue=True)
    assert request.ending() is Ending.AGAIN
    other = office.message("late", "b")
    office.desk(other)
    other.reject(requeue=False)
    assert other.ending() is Ending.REJECT


def test_the_desk_is_busy_while_something_is_in_the_pool(office):
    """Then dead children are looked for."""
    assert not office.desk.flights.busy()
    request = office.message("early", "a")
    office.desk(request)
    assert office.desk.flights.busy()
    end(request)
    assert not office.desk.flights.busy()


def test_without_a_desk_a_request_is_celerys_own(app, office):
    """Nothing breaks if a worker has no desk."""
    request = office.message("early", "a")
    request.on_accepted(4711, 0.0)
    assert office.acked == [request.id]
    end(request)


def test_threads_wrap_their_errors():
    """The error itself counts."""
    error = ValueError("x")
    assert bare(error) is error
    wrapped = ExceptionWithTraceback(error, "")
    assert bare(wrapped) is error


def test_a_worker_id_is_never_given_twice():
    """T16: a namesake is another worker."""
    assert len({worker_id("w@host") for _ in range(100)}) == 100


def test_a_connection_that_is_lost_at_the_acknowledgement_leaves_the_rest_in_order(office, caplog):
    """Celery sets its prefetch count behind it, on a channel that may be closed by then."""

    def lost(*_):
        raise ConnectionResetError("the broker went away")

    request = office.message("late", "a")
    request._connection_errors, request._on_ack = (ConnectionError,), lost
    office.desk(request)
    take(office, request)
    end(request)
    assert "may be delivered again" in caplog.text
    assert not office.desk.counts()["in_flight"]

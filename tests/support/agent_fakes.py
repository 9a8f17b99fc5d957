"""Fakes of what the agent calls: they record the calls, and fail on demand."""

from __future__ import annotations

from types import SimpleNamespace

from kombu.message import Message

from celery_singleton_lock.core.model import SCHEMA, Identity, Reply, Verdict
from celery_singleton_lock.core.parked_message import Delivery, SweepReply
from celery_singleton_lock.worker.dispatch.recently_ended import RecentEnds
from celery_singleton_lock.worker.lock_header import LockHeader
from celery_singleton_lock.worker.message_stage import FIRST_ARRIVAL

CAPACITY = 2


MAX_BODY = 1000


class ManualClock:
    """A clock that the test sets."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Leases:
    """A watchdog that renews nothing, and knows when each lease ends."""

    def __init__(self, clock, forgotten):
        self.clock = clock
        self.ends = {}
        self.forget = lambda token, patience: forgotten.append(token)
        self.watch = self.look_after = self.last_round = lambda *about, **more: None

    def valid_until(self, token):
        return self.ends.get(token)


class FakeStore:
    """Records its calls; replies as set, or raises."""

    def __init__(self, clock):
        self.clock = clock
        self.calls = []
        self.reserved = []
        self.fails = {}
        self.replies = {}
        self.bodies = {}
        self.inbox = []
        self.due = []
        self.strays = []
        self.next_starts = {}
        self.switched = {}
        self.beats = []
        self.fleet = 1
        self.waited = []
        self.identities = [Identity(("marker",), frozenset({"run"}))]
        self.gone = set()
        self.schema_found = SCHEMA

    def asked(self, *verbs):
        return [call for call in self.calls if call[0] in verbs]

    def _note(self, verb, *details):
        self.calls.append((verb, *details))
        if self.fails.get(verb):
            raise self.fails[verb]

    def park_many(self, to_park):
        tokens = [owner.token for owner, _, _ in to_park]
        self.claims = [claim for _, claim, _ in to_park]
        self._note("park_many", *tokens)
        return [self.replies.get(token, Reply(Verdict.WAITING, rank=1)) for token in tokens]

    def release(self, name, token, ending, *, reserve=None, **_):
        self._note("release", token, ending)
        self.reserved.append(reserve)
        return self.replies.get(token, Reply(Verdict.RELEASED))

    def sweep_and_grant_many(self, names, **_):
        self._note("sweep_and_grant_many", *names)
        swept = SweepReply(self.strays)
        swept.next_starts = {name: at for name, at in self.next_starts.items() if name in names}
        return swept

    def take_due_locks(self, limit):
        self._note("take_due_locks", limit)
        return self.due[:limit]

    def inbox_size(self, worker):
        return len(self.inbox)

    def body(self, name, token):
        self._note("body", token)
        return self.bodies.get(token)

    def bodies_of(self, parked):
        self._note("bodies_of", *(token for _, token in parked))
        return [self.bodies.get(token) for _, token in parked]

    def receive(self, worker, timeout):
        self._note("receive")
        return self.inbox.pop(0) if self.inbox else None

    def record_publish_result(self, name, seal, tokens, *, sent, **_):
        self._note("record_publish_result", seal, *tokens, sent)
        return len(tokens)

    def worker_heartbeat(self, worker, realm, queues, ttl, free, *, tasks, light, stopped=None):
        self._note("worker_heartbeat", *queues)
        self.stopped = stopped
        self.beats.append((ttl, light))
        self.free = free
        return self.switched

    def list_running(self, worker, new, gone, seconds):
        self._note("list_running", sorted(new), sorted(gone))

    def fleet_size(self, realm, queues):
        return self.fleet

    def switch(self, task, mode):
        self._note("switch", task, mode)

    def waited_for(self):
        self._note("waited_for")
        return self.waited

    def deliver_unlocked(self, names, tasks, most, **_):
        self._note("deliver_unlocked", sorted(names), tasks, most)
        return len(names)

    def leave(self, worker, realm, queues):
        self._note("leave", *queues)

    def time(self):
        self._note("time")
        return 5000.0

    def probe(self):
        self._note("probe")

    def identify(self):
        return self.identities[-1]

    def schema(self, needed=SCHEMA):
        self._note("schema")
        return self.schema_found

    def has_messages(self, messages):
        self._note("has_messages", *(message.task_id for message in messages))
        return [message.task_id not in self.gone for message in messages]

    def has_traces(self, messages):
        self._note("has_traces", *(message.task_id for message in messages))
        return [message.task_id not in self.gone for message in messages]

    def withdraw(self, name, key, task_id, retries, *, ended):
        self._note("withdraw", name, key, task_id, retries, ended)

    def vouch(self, tokens):
        self._note("vouch", *tokens)

    def note_lost(self, notes):
        self._note("note_lost", *notes)


class FakeInFlight:
    """Knows what it was given."""

    def __init__(self):
        self.tokens = set()
        self.lost = []
        self.by_token = {}
        self.waiting = 0
        self.slotless = []
        self.begun = None

    def has(self, token):
        return token in self.tokens

    def of(self, token):
        return self.by_token.get(token)

    def in_hand(self):
        return list(self.by_token.values())

    def granted(self, task_ids):
        return []

    def has_begun(self, token):
        return token in (self.tokens if self.begun is None else self.begun)

    def waiting_since(self, until):
        return [request for request in self.slotless if request.received_at <= until]

    def who(self, token):
        return "app.task", token

    def note_lost(self, token):
        self.lost.append(token)

    def backlog(self):
        return self.waiting

    def busy(self):
        return bool(self.by_token)


class FakeDispatcher:
    """Records its calls."""

    def __init__(self, clock):
        self.told = []
        self.children = True
        self.in_flight = FakeInFlight()
        self.ends = RecentEnds(clock)
        self.blocked = self.deliveries = self.pool_exit = self

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self.told.append((name, *args))

    def make_room(self):
        """Called in each tick."""

    def heard(self, *verbs):
        return [call for call in self.told if call[0] in verbs]


def header(token):
    return LockHeader(f"k:{token}", token, f"{token}/0/0", "task", "w#1")


def request(token, body=b"[[], {}, {}]"):
    """Return a message that has passed the dispatcher."""
    headers = {"id": token, "task": "task"}
    message = Message(
        body=body, content_type="application/json", content_encoding="utf-8", headers=headers
    )
    told = {"message": message, "body": body, "options": lambda of_task: of_task("task")}
    told |= {"arrival": FIRST_ARRIVAL, "is_only_copy": False, "is_unanswered": False}
    told |= {"runs_later": False, "is_here_only": False}
    return SimpleNamespace(id=token, lock_header=header(token), task="task", **told)


def delivery(token, body=b"{}"):
    return Delivery(f"k:{token}", token, 7, body)


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def until_retired(agent):
    """Return a ``receive`` without grants, which waits as long as the worker takes grants."""

    def receive(worker, timeout):
        agent.inbox._retired.wait(timeout)

    return receive

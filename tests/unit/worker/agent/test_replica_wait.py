"""Waiting for replicas: what is confirmed, what is parked again, and what is logged."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.model import Claim, Owner, Reply, Verdict
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.worker.agent.replica_wait import ParkedAnswer, ReplicaWait
from celery_singleton_lock.worker.agent_commands import Call, Park
from celery_singleton_lock.worker.agent_queue import RETRY, AgentQueue
from support.waiting import eventually


class PaperReplicas:
    """A store whose replicas have what was written to these locks."""

    def __init__(self):
        self.clock = SystemClock()
        self.have = set()
        self.lost = set()
        self.asked = 0
        self.away = False

    def confirm(self, names):
        self.asked += 1
        if self.away:
            raise BackendUnreachable
        return [name in self.have for name in names]

    def has_traces(self, messages):
        return [message.lock not in self.lost for message in messages]

    def too_few(self):
        return "Too few."


@pytest.fixture
def store():
    return PaperReplicas()


@pytest.fixture
def orders():
    return AgentQueue(SystemClock())


@pytest.fixture
def safe():
    return []


@pytest.fixture
def waiting(store, orders, safe):
    waiting = ReplicaWait(store, commands=orders, confirmed=safe.append)
    yield waiting
    waiting.close(60)
    assert not waiting.thread.is_alive()


def answer(name, verdict=Verdict.WAITING):
    park = Park(SimpleNamespace(id=name, lock_header=SimpleNamespace(moved=False)))
    to_park = (Owner(f"{name}.0"), Claim(name), MessageToPark(b"", "R", "q"))
    return ParkedAnswer(park, to_park, Reply(verdict), 0.0)


def carried_out(orders):
    """Carry out the calls that were ordered; return the other orders."""
    others = []
    for order in orders.take(0.0):
        order.call() if isinstance(order, Call) else others.append(order)
    return others


def test_what_replicas_have_is_confirmed_in_the_agents_thread(waiting, store, orders, safe):
    store.have = {"a", "b"}
    asked = [answer(name) for name in "ab"]
    for each in asked:
        waiting.ask(each)
    eventually(lambda: not carried_out(orders) and len(safe) == 2)
    assert safe == asked


def test_what_was_parked_on_a_former_master_is_parked_again(waiting, store, orders, safe):
    """The replicas of the new master confirmed it, and it was lost with the former one."""
    store.have, store.lost = {"a", "b"}, {"a"}
    lost, kept = answer("a"), answer("b")
    waiting.ask(lost)
    waiting.ask(kept)
    again, found = replace(lost.park, again=True), []
    eventually(lambda: found.extend(carried_out(orders)) or (found, safe) == ([again], [kept]))


def test_a_copy_that_a_former_master_alone_had_is_parked_again(waiting, store, orders, safe):
    """If the worker of its first message dies, the copy is the only message of the task."""
    store.have, store.lost = {"a"}, {"a"}
    waiting.ask(copy := answer("a", Verdict.TWIN))
    again, found = replace(copy.park, again=True), []
    eventually(lambda: found.extend(carried_out(orders)) or (found, safe) == ([again], []))


def test_a_copy_without_a_trace_is_parked_again_only_once(waiting, store, orders, safe):
    """An earlier copy may be stored instead of it: then it never leaves a trace."""
    store.have, store.lost = {"a"}, {"a"}
    copy = answer("a", Verdict.TWIN)
    waiting.ask(again := copy._replace(park=replace(copy.park, again=True)))
    eventually(lambda: not carried_out(orders) and safe == [again])


def test_a_worker_that_still_asks_the_former_master_does_not_ask_without_a_pause(
    waiting, store, orders, safe, monkeypatch
):
    """Its connection to the former master may stay open for a long time."""
    put_off = []
    monkeypatch.setattr(orders, "put_off", lambda *asked: put_off.append(asked))
    store.have, store.lost = {"a"}, {"a"}
    lost = answer("a")
    again = replace(lost.park, again=True)
    waiting.ask(lost)
    eventually(lambda: put_off == [(again, 0.0)])
    waiting.ask(lost._replace(park=again))
    eventually(lambda: put_off == [(again, 0.0), (again, RETRY)])
    assert not safe


def test_what_they_lack_waits_and_is_parked_again_when_they_confirm(
    waiting, store, orders, safe, caplog
):
    """A failover may have lost it; and it holds up nothing that another master's replicas have."""
    store.have = {"b"}
    late = answer("a")
    waiting.ask(late)
    eventually(lambda: store.asked >= 2)
    waiting.ask(other := answer("b"))
    eventually(lambda: not carried_out(orders) and safe == [other])
    store.away = True
    asked = store.asked
    eventually(lambda: store.asked >= asked + 2)
    store.away, store.have = False, {"a", "b"}
    found = []
    eventually(lambda: found.extend(carried_out(orders)) or found == [late.park])
    eventually(lambda: len(caplog.messages) == 2)
    assert "Too few." in caplog.messages[0]
    assert "again" in caplog.messages[1]

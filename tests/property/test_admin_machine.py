"""Operators among clients, at random: whatever they do, no lock breaks and no task is lost unsaid.

Clients take, park, claim and release; operators drop, promote, pause, resume, set limits, force
releases, drain, export and import. Leases are long: what lapses is played in test_machine.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_singleton_lock.admin.bulk_parked import Filter, export, purge, restore
from celery_singleton_lock.core.model import Claim, Ending, Owner, Parcel, Verdict, base_of, new_token
from celery_singleton_lock.store.operator.base import PARTS, Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore

pytestmark = [
    pytest.mark.property,
    pytest.mark.needs_real_redis("the invariants are the scripts'"),
    pytest.mark.full_run_plays("600"),
]

NAME, LEASE = "account:42", 600.0
MANY = 6  # waiting, before a purge makes sense
ANY = st.integers(0, 1000)


def by(action=""):
    return Operator("jane", "desk", "test", action=action)


class Machine(RuleBasedStateMachine):
    """One lock; a subclass names the ``client`` of its Redis."""

    client: Any = None

    def __init__(self):
        super().__init__()
        self.client.flushdb()
        self.store = RedisAdminStore(self.client)
        self.store.beat("w", "R", ["q"], LEASE)
        self.alive: set[str] = set()  # bases of the messages that are to run, or run
        self.clients: set[str] = set()  # tokens of clients that hold the lock
        self.steps = Counter[str]()
        self.exported: list[str] = []
        self.paused = False
        self.limit, self.ruled = 1, None
        self.before: set[str] = set()

    def teardown(self):
        self.store.close()

    # -- what is there ------------------------------------------------------------------------

    def held(self):
        return [holder.token for holder in self.store.inspect(NAME).holders]

    def waiting(self):
        return [each for part in PARTS for each in self.store.page(NAME, part).waiting]

    def one_of(self, tokens, n):
        return tokens[n % len(tokens)] if tokens else new_token()

    # -- clients ------------------------------------------------------------------------------

    @rule()
    def acquires(self):
        token = new_token()
        reply = self.store.acquire(Owner(token), Claim(NAME, LEASE, self.limit))
        if reply.verdict is Verdict.GRANTED:
            self.clients.add(token)
        else:
            assert reply.verdict is Verdict.BLOCKED
            assert bool(reply.paused) is self.paused

    @rule(number=st.integers(1, 4))
    def parks(self, number):
        for _ in range(number):
            token = new_token()
            owner = Owner(token, f"{token}/0/0", "app.task")
            self.store.park(owner, Claim(NAME, LEASE, self.limit), Parcel(b"{}\n", "R", "q"))
            self.alive.add(base_of(token))

    @rule(n=ANY)
    def claims(self, n):
        token = self.one_of(self.held(), n)
        reply = self.store.claim(Owner(token, worker="w"), NAME, LEASE)
        assert reply.verdict in {Verdict.GRANTED, Verdict.ABSENT}

    @rule(n=ANY)
    def releases(self, n):
        token = self.one_of(self.held(), n)
        self.store.release(NAME, token, Ending.FINAL)
        self.gone(token)

    def gone(self, token):
        self.alive.discard(base_of(token))
        self.clients.discard(token)

    # -- operators ----------------------------------------------------------------------------

    @rule(n=ANY)
    def drops(self, n):
        tokens = [each.token for each in self.waiting()]
        dropped = self.store.drop(NAME, [self.one_of(tokens, n)], by(), done_for=None)
        self.steps["drop"] += len(dropped)
        for each in dropped:
            self.gone(each.token)

    @rule(n=ANY)
    def drops_who_holds(self, n):
        token = self.one_of(self.held(), n)
        assert self.store.drop(NAME, [token], by()) == []

    @rule(n=ANY)
    def promotes(self, n):
        tokens = [each.token for each in self.store.page(NAME, "queue").waiting]
        token = self.one_of(tokens, n)
        reply = self.store.promote(NAME, token, by())
        assert (reply.verdict is Verdict.ABSENT) is (token not in tokens)
        self.steps["promote"] += token in tokens
        line = [each.token for each in self.store.page(NAME, "queue").waiting]
        assert token not in line or line[0] == token

    @rule()
    def pauses(self):
        assert self.store.pause(NAME, by()) is not self.paused
        self.steps["pause"] += not self.paused
        self.paused = True

    @rule()
    def resumes(self):
        assert self.store.resume(NAME, by()) is self.paused
        self.steps["resume"] += self.paused
        self.paused = False

    @rule(limit=st.sampled_from([None, 1, 2, 3]))
    def sets_limit(self, limit):
        assert self.store.set_limit(NAME, limit, by()) == (limit or self.limit)
        self.steps["limit"] += 1
        self.ruled = limit

    @rule(n=ANY, keep=st.booleans())
    def forces(self, n, keep):
        token = self.one_of(self.held(), n)
        reply = self.store.force_release(NAME, token, by(), keep=keep, done_for=0.001)
        if reply.verdict is Verdict.RELEASED:
            self.steps["release"] += 1
            if not keep or token in self.clients:
                self.gone(token)

    @rule(n=ANY, dies=st.booleans())
    def drains(self, n, dies):
        """One message; who dies in between leaves it in the store."""
        tokens = [each.token for each in self.waiting() if each.state == "parked"]
        seal = new_token()
        sealed = self.store.seal(NAME, [self.one_of(tokens, n)], 600, seal)
        if sealed and not dies:
            tokens = [each.token for each in sealed]
            assert len(self.store.drop(NAME, tokens, by("drain"), done_for=None, seal=seal)) == 1
            self.steps["drain"] += 1
            self.gone(tokens[0])

    @rule()
    def exports(self):
        self.exported = list(export(self.store, Filter(NAME, exact=True), by()))
        self.steps["export"] += len(self.exported)

    @precondition(lambda self: self.exported)
    @rule(again=st.booleans())
    def imports(self, again):
        before = {base_of(each.token) for each in self.waiting()}
        tally = restore(self.store, self.exported, by(), again=again)
        self.steps["import"] += tally.total
        here = {*map(base_of, self.held()), *(base_of(each.token) for each in self.waiting())}
        self.alive |= here - {*map(base_of, self.clients)}
        assert before <= here
        self.exported = []

    @precondition(lambda self: len(self.alive) > MANY)
    @rule()
    def purges(self):
        here = [each.token for each in self.waiting()]
        assert purge(self.store, Filter(NAME, exact=True), by("purge")).total == len(here)
        self.steps["purge"] += len(here)
        for token in here:
            self.gone(token)

    # -- what must be so ----------------------------------------------------------------------

    @invariant()
    def nobody_is_lost_unsaid(self):
        """Each message is held or waits, once; but those that ended, or that were dropped."""
        here = Counter([*self.held(), *(each.token for each in self.waiting())])
        assert set(here.values()) <= {1}
        bases = {base_of(token) for token in here} - {*map(base_of, self.clients)}
        assert bases == self.alive
        assert self.clients <= set(here)

    @invariant()
    def no_grant_passes_the_limit_or_a_pause(self):
        view = self.store.inspect(NAME)
        held = {holder.token for holder in view.holders}
        new, self.before = held - self.before, held
        limit = self.ruled or self.limit
        assert not new or len(held) <= limit
        assert not (new and self.paused)
        assert bool(view.paused) is self.paused
        in_line = self.store.page(NAME, "queue").waiting
        assert self.paused or not in_line or len(held) >= limit, "nobody is granted"

    @invariant()
    def each_step_is_audited(self):
        told = Counter[str]()
        for entry in self.store.audit(1000):
            told[entry["action"]] += entry["count"]
        assert told == +self.steps

    @invariant()
    def nothing_contradicts_itself(self):
        assert list(self.store.drift(NAME)) == []


@pytest.mark.parametrize("examples", [12, 600])
@pytest.mark.timeout(900)
def test_whatever_operators_do_no_lock_breaks_and_no_task_is_lost_unsaid(redis_client, examples):
    """A paused lock is granted to nobody; resumed, the next one has it; the audit has each step."""
    run_state_machine_as_test(
        type("MachineHere", (Machine,), {"client": redis_client}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=examples < 100,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

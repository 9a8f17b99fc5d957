"""Operators and clients at random: no lock breaks, and no task is lost without a report.

Clients take, park, claim, release and retry; operators drop, promote, pause, resume, set limits,
force releases, drain, export and import. Leases are long: test_machine.py covers expiry.
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

from celery_singleton_lock.admin.bulk_parked import purge
from celery_singleton_lock.admin.export_parked import export, restore
from celery_singleton_lock.admin.select_parked import Filter
from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.owner_token import base_of, new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.store.operator.base import PARTS, Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore

pytestmark = [
    pytest.mark.property,
    pytest.mark.needs_real_redis("the invariants are the scripts'"),
    pytest.mark.full("300"),
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
        self.store = RedisAdminStore(self.client, claim_lease=LEASE)
        self.store.worker_heartbeat("w", "R", ["q"], LEASE)
        self.alive: set[str] = set()  # bases of the messages that are to run, or run
        self.clients: set[str] = set()  # tokens of clients that hold the lock
        self.steps = Counter[str]()
        self.exported: list[str] = []
        self.paused = False
        self.limit, self.ruled = 1, None
        self.before: set[str] = set()

    def teardown(self):
        """Compare the audit once: it only grows, and reading it costs more than a step."""
        try:
            told = Counter[str]()
            for entry in self.store.audit(1000):
                told[entry["action"]] += entry["count"]
            assert told == +self.steps
        finally:
            self.store.close()

    # -- what is there -----------------------------------------------------------------------------

    def holders(self):
        return [holder.token for holder in self.store.inspect(NAME).holders]

    def held(self):
        """Return the holders, but permits that are kept for retries."""
        return [token for token in self.holders() if not token.startswith("keep:")]

    def kept(self):
        """Return the attempts for which permits are kept."""
        return [t.removeprefix("keep:") for t in self.holders() if t.startswith("keep:")]

    def waiting(self):
        return [each for part in PARTS for each in self.pages(part)]

    def pages(self, part):
        """Yield all waiters of a part: a page ends after a hundred, or after fewer."""
        after, more = "", True
        while more:
            page = self.store.list_waiters(NAME, part, after)
            yield from page.waiting
            after = more = page.end

    def one_of(self, tokens, n):
        return tokens[n % len(tokens)] if tokens else new_token()

    # -- clients -----------------------------------------------------------------------------------

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
            self.park(f"{new_token()}/0/0")

    def park(self, attempt):
        token = new_token()
        owner = Owner(token, attempt, "app.task")
        self.store.park(owner, Claim(NAME, LEASE, self.limit), MessageToPark(b"{}\n", "R", "q"))
        self.alive.add(base_of(token))

    @rule(n=ANY)
    def claims(self, n):
        token = self.one_of(self.held(), n)
        reply = self.store.claim(Owner(token, worker="w"), NAME, LEASE)
        assert reply.verdict in {Verdict.GRANTED, Verdict.ABSENT}

    @rule(n=ANY)
    def releases(self, n):
        token = self.one_of(self.holders(), n)
        self.store.release(NAME, token, Ending.FINAL)
        self.gone(token)

    @precondition(lambda self: self.before)
    @rule(n=ANY, early=st.booleans())
    def retries(self, n, early):
        """A task keeps its permit for its retry, which may be parked before that."""
        token, attempt = self.one_of(self.held(), n), f"{new_token()}/1/0"
        if early:
            self.park(attempt)
        self.store.release(NAME, token, Ending.KEEP, reserve=Reservation(attempt, LEASE))
        self.gone(token)

    @rule(n=ANY)
    def next_attempt_arrives(self, n):
        kept = self.kept()
        if kept:
            self.park(kept[n % len(kept)])

    def gone(self, token):
        self.alive.discard(base_of(token))
        self.clients.discard(token)

    # -- operators ---------------------------------------------------------------------------------

    @rule(n=ANY)
    def drops(self, n):
        tokens = [each.token for each in self.waiting()]
        dropped = self.store.drop_waiters(NAME, [self.one_of(tokens, n)], by(), done_for=None)
        self.steps["drop"] += len(dropped)
        for each in dropped:
            self.gone(each.token)

    @rule(n=ANY)
    def drops_who_holds(self, n):
        token = self.one_of(self.held(), n)
        assert self.store.drop_waiters(NAME, [token], by()) == []

    @rule(n=ANY)
    def promotes(self, n):
        tokens = [each.token for each in self.pages("queue")]
        token = self.one_of(tokens, n)
        reply = self.store.promote(NAME, token, by())
        assert (reply.verdict is Verdict.ABSENT) is (token not in tokens)
        self.steps["promote"] += token in tokens
        line = [each.token for each in self.pages("queue")]
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

    @precondition(lambda self: len(self.before) > 1 and not self.paused)
    @rule()
    def lowers_the_limit_of_those_who_hold_and_pauses(self):
        self.sets_limit(1)
        self.pauses()

    @rule(limit=st.sampled_from([None, 1, 2, 3]))
    def sets_limit(self, limit):
        assert self.store.set_limit(NAME, limit, by()) == (limit or self.limit)
        self.steps["limit"] += 1
        self.ruled = limit

    @rule(n=ANY, keep=st.booleans())
    def forces(self, n, keep):
        token = self.one_of(self.holders(), n)
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
        sealed = self.store.take_out_messages(NAME, [self.one_of(tokens, n)], 600, seal)
        if sealed and not dies:
            tokens = [each.token for each in sealed]
            assert (
                len(self.store.drop_waiters(NAME, tokens, by("drain"), done_for=None, seal=seal))
                == 1
            )
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

    # -- what must be so ---------------------------------------------------------------------------

    @invariant()
    def nobody_is_lost_unsaid(self):
        """Each message is held or waits, once; but those that ended, or that were dropped."""
        assert len(set(self.kept())) == len(self.kept())
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
        assert not (self.paused and any(not token.startswith("keep:") for token in new))
        assert bool(view.paused) is self.paused
        in_line = self.store.list_waiters(NAME, "queue").waiting
        assert self.paused or not in_line or len(held) >= limit, "nobody is granted"

    @rule()
    def counts(self):
        """It asks each bucket, so it is not repeated after each step."""
        view = self.store.inspect(NAME)
        found = {name: waiting for name, waiting, _ in self.store.count_waiters()}
        if view.waiting or view.adrift:
            assert found == {NAME: view.waiting + view.adrift}
        else:
            assert found in ({}, {NAME: 0})  # it has waited, or a message must end

    @invariant()
    def nothing_contradicts_itself(self):
        assert list(self.store.find_contradictions(NAME)) == []


@pytest.mark.full
@pytest.mark.parametrize("examples", [12, 300])
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

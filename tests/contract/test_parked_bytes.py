"""How much is parked of a queue: the sum is that of its messages, whatever happens to them."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from support.passing_time import let_pass
from support.waiters import hold, park

pytestmark = pytest.mark.contract

JANE = Operator("jane", "desk", "test")
LOCKS = ("a", "b", "account:42")
QUEUES = ("q", "other")
PARTS = ("queue", "adrift")
ENDINGS = (
    *(Ending.FINAL, Ending.AGAIN, Ending.LATER, Ending.UNREAD, Ending.REJECT, Ending.CANCEL),
    *(Ending.RETURN, Ending.OFFER, Ending.REFUSED, Ending.REPEAT),
)
STEPS, FULL_STEPS = 100, 1000
on_all_stores = pytest.mark.parametrize("kind", ["redis", "in_memory", "cluster"], indirect=True)


@pytest.fixture
def store(make_store):
    return make_store(claim_lease=20.0)


def waiters(store, name):
    """All parked messages of a lock that wait for it."""
    for part in PARTS:
        page = store.list_waiters(name, part, most=1000)
        assert not page.end
        yield from (each for each in page.waiting if each.size)


def counted(store, realm="R"):
    """What each queue has by the counter, as number and bytes."""
    found = store.parked(realm).items()
    return {queue: (each.waiting, each.size) for queue, each in found}


def stored(store, realm="R"):
    """What each queue has, read from the messages."""
    number, size = Counter(), Counter()
    for name in LOCKS:
        for each in waiters(store, name):
            if each.realm == realm:
                number[each.queue] += 1
                size[each.queue] += each.size
    return {queue: (number[queue], size[queue]) for queue in number}


@on_all_stores
def test_the_bytes_of_a_queue_are_those_of_its_parked_messages(store):
    """Those of another queue, or of another broker, are not among them."""
    store.worker_heartbeat("w", "R", QUEUES, 600.0)
    holders = [hold(store, name) for name in LOCKS]
    for name, size in zip(LOCKS, (1, 10, 100), strict=True):
        park(store, name, body=b"x" * size)
    park(store, "a", body=b"x" * 1000, queue="other")
    park(store, "a", body=b"x" * 1000, realm="S")
    assert counted(store) == {"q": (3, 111), "other": (1, 1000)}
    assert store.parked("R", ["q", "empty"])["q"].size == 111
    assert store.parked("R", ["q", "empty"])["empty"].waiting == 0
    for holder, name in zip(holders, LOCKS, strict=True):
        store.release(name, holder.token, Ending.FINAL)
    assert counted(store) == {"other": (1, 1000)}
    assert counted(store, "S") == {"q": (1, 1000)}


@on_all_stores
def test_a_message_that_is_parked_twice_after_a_lost_reply_counts_once(store):
    """Nor does a copy of it."""
    hold(store, "a")
    who, to_park = Owner(new_token(), "id/0/0", "app.task"), MessageToPark(b"body", "R", "q")
    for _ in range(3):
        store.park(who, Claim("a"), to_park)
    store.park(Owner(new_token(), "id/0/0", "app.task"), Claim("a", copy=True), to_park)
    assert counted(store) == {"q": (1, 4)}


def test_a_message_of_an_older_version_leaves_no_wrong_sum(store):
    """It was parked without its bytes, and the other one ended without subtracting them."""
    first = hold(store, "a")
    tokens = [park(store, "a", body=b"x" * 100) for _ in range(2)]
    store.worker_heartbeat("w", "R", ["q"], 600.0)
    keys = store.keyspace.lock("a")
    store.client.hincrby(f"{store.keyspace.fleet}:parked_bytes", "R:q", 5000)
    record = store.client.hget(keys.record, tokens[0])
    plain = record.decode() if isinstance(record, bytes) else record
    assert '"bytes":"100"' in plain
    store.client.hset(
        keys.record, tokens[0], plain.replace('"bytes":"100",', "").replace(',"bytes":"100"', "")
    )
    store.release("a", first.token, Ending.FINAL)
    store.drop_waiters("a", tokens, JANE)
    assert counted(store) == {}
    park(store, "a", body=b"x" * 100)
    park(store, "a", body=b"x" * 7)
    assert sum(size for _, size in counted(store).values()) == sum(
        each.size for each in waiters(store, "a")
    )


class Walk:
    """Random calls of workers and operators, also repeated ones."""

    def __init__(self, store, seed, *, passes=True):
        self.store = store
        self.random = random.Random(seed)
        self.calls = [
            *[self.park] * 6,
            *[self.receive, self.end, self.sweep] * 2,
            *(self.heartbeat, self.hold, self.drop, self.take_out, self.adopt),
            *(self.force_release, self.reset, self.pause, self.time_passes, self.revoke),
            *(self.replace, self.unlocked),
        ]
        if not passes:
            self.calls.remove(self.time_passes)

    def step(self):
        self.random.choice(self.calls)(self.random.choice(LOCKS))

    def token(self, name):
        found = list(waiters(self.store, name))
        return self.random.choice(found).token if found else "nobody.0"

    def holder(self, name):
        found = self.store.inspect(name).holders
        return self.random.choice(found).token if found else "nobody.0"

    def park(self, name, **claim):
        attempt = f"id{self.random.randrange(40)}/0/0"
        copy, unanswered = self.random.choice([(0, False), (0, False), (1, False), (1, True)])
        who = Owner(new_token(), attempt, "app.task", "w")
        body = b"x" * self.random.randrange(1, 500)
        wait = self.random.choice([None, 3.0, 300.0])
        realm = self.random.choice("RRRS")
        to_park = MessageToPark(body, realm, self.random.choice(QUEUES), wait)
        limit = self.random.choice([1, 1, 2])
        options = {"copy": copy, "unanswered": unanswered, "limit": limit, **claim}
        for _ in range(self.random.choice([1, 1, 2])):
            self.store.park(who, Claim(name, 30.0, **options), to_park)

    def replace(self, name):
        self.park(name, max_waiting=1, replace=True)

    def hold(self, name):
        who = Owner(new_token(), f"id{self.random.randrange(40)}/0/0", "app.task", "w")
        self.store.acquire(who, Claim(name, 30.0), wait=self.random.choice([None, 60.0]))

    def receive(self, _name):
        delivery = self.store.receive("w", 0.001)
        if delivery is not None and self.random.random() < 0.7:
            acks_early = self.random.choice([True, False])
            self.store.claim(
                Owner(delivery.token, worker="w"), delivery.name, 30.0, acks_early=acks_early
            )

    def end(self, name):
        ending = self.random.choice([*ENDINGS, Ending.FINAL, Ending.FINAL])
        token = self.random.choice([self.holder(name), self.holder(name), self.token(name)])
        self.store.release(name, token, ending, worker="w")

    def sweep(self, name):
        strays = self.store.sweep_and_grant(name, worker="w", realm="R", patience=1.0)
        for each in strays:
            if self.random.random() < 0.8:
                sent = self.random.choice([True, False])
                self.store.record_publish_result(name, each.seal, [each.token], sent=sent)

    def heartbeat(self, _name):
        queues = self.random.choice([QUEUES, ["q"], ["other"]])
        if self.random.random() < 0.3:
            self.store.leave("w", "R", QUEUES)
        else:
            self.store.worker_heartbeat("w", "R", queues, 30.0)

    def drop(self, name):
        self.store.drop_waiters(name, [self.token(name)], JANE)

    def take_out(self, name):
        token, seal = self.token(name), new_token()
        self.store.take_out_messages(name, [token], 5.0, seal)
        if self.random.random() < 0.5:
            self.store.drop_waiters(name, [token], JANE, seal=seal)

    def adopt(self, name):
        self.store.adopt_messages(name, [self.token(name)], self.random.choice("RS"), JANE)

    def force_release(self, name):
        keep = self.random.choice([True, False])
        self.store.force_release(name, self.holder(name), JANE, keep=keep)

    def reset(self, name):
        self.store.reset(name)

    def pause(self, name):
        self.random.choice([self.store.pause, self.store.resume])(name, JANE)

    def revoke(self, name):
        self.store.deliver_revoked(name, self.token(name), realm="R", worker="w")

    def unlocked(self, name):
        self.store.deliver_unlocked([name], ["app.task"], 2, worker="w", realm="R")

    def time_passes(self, _name):
        let_pass(self.store, self.random.choice([1, 5, 40]))


@pytest.mark.parametrize("seed", range(3))
def test_the_bytes_are_right_after_any_calls(store, seed, full):
    """Of workers that crash, operators that move messages, and repeated calls."""
    walk = Walk(store, seed)
    for number in range(FULL_STEPS if full else STEPS):
        walk.step()
        for realm in "RS":
            assert counted(store, realm) == stored(store, realm), (number, realm)


MUTANTS = {
    "no bytes are added": ("'HINCRBY', fleet .. ':parked_bytes', route, size", "'TIME'"),
    "no bytes are subtracted": ("'HINCRBY', sums, route, '-' .. size", "'TIME'"),
    "another size is subtracted": ("rec.bytes = digits(size)", "rec.bytes = digits(size + 1)"),
    "the sum outlives the last message": ("redis.pcall('HDEL', sums, route)", ""),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_line_of_the_scripts_is_noticed(redis_client, name):
    """By a walk as above."""
    old, new = MUTANTS[name]
    store = RedisAdminStore(redis_client, claim_lease=20.0)
    patched = mutate(store.operations, old, new)
    assert patched
    with pytest.raises(AssertionError):
        play(store, redis_client)
    store.close()


def play(store, client):
    """Walk, and compare the counters after each step."""
    for seed in range(5):
        client.flushall()
        walk = Walk(store, seed, passes=False)
        for _ in range(STEPS):
            walk.step()
            assert counted(store) == stored(store)
            sums = client.hgetall(f"{store.keyspace.fleet}:parked_bytes")
            assert len(sums) == len(store.parked("R")) + len(store.parked("S"))


def mutate(operations, old, new):
    """Change a line of all scripts that have it; return how many have."""
    scripts = operations.scripts
    changed = {
        verb: dataclasses.replace(each, text=each.text.replace(old, new))
        for verb, each in scripts.items()
        if old in each.text
    }
    scripts |= changed
    for verb in ("acquire", "claim", "release"):
        setattr(operations, f"_{verb}", scripts[verb])
    return len(changed)

"""The cost of each method of the store with many waiters: commands, counted by Redis.

Half of the waiters are parked messages, half are clients. One script creates them as copies of real
waiters, so that 100,000 of them take a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from celery_singleton_lock.core.model import Claim, Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark, ParkedMessage
from celery_singleton_lock.core.redis_keys import Keyspace
from celery_singleton_lock.store.redis.sync import RedisStore

SIZES: Final = (10, 1_000, 100_000)
ROUNDS: Final = 3
NAME: Final = "crowded"
OTHER: Final = "crowded too"

_OURS = ("config", "info", "script", "client", "hello")
_MULTIPLY = """
local keys = {}
for i, part in ipairs({'holders', 'queue', 'record', 'meta', 'bodies', 'deadlines'}) do
  keys[part] = KEYS[i]
end
local index, client, parked, lock = KEYS[7], ARGV[1], ARGV[2], ARGV[5]
local like_client = cjson.decode(redis.call('HGET', keys.record, client))
local like_parked = cjson.decode(redis.call('HGET', keys.record, parked))
local till = redis.call('ZSCORE', keys.deadlines, client)
local body = redis.call('HVALS', keys.bodies)[1]
local first = tonumber(redis.call('ZSCORE', keys.queue, parked))
for i = tonumber(ARGV[3]), tonumber(ARGV[4]) do
  local base = 'w' .. i
  local token, attempt, rec = base .. '.0', base .. '/0/0', like_client
  if i % 2 == 0 then
    rec = like_parked
    rec.attempt = attempt
    redis.call('HSET', keys.bodies, base, body)
    redis.call('HSET', index, attempt, lock .. '\\n' .. token)
  else
    redis.call('ZADD', keys.deadlines, till, token)
  end
  rec.place = string.format('%.0f', first + i)
  redis.call('ZADD', keys.queue, rec.place, token)
  redis.call('HSET', keys.record, token, cjson.encode(rec))
end
"""


@dataclass(frozen=True)
class Cost:
    """What one call cost.

    Args:
        sent: commands that the client sent; a script is one, whatever it runs.
        inside: commands that scripts ran.
        usec: microseconds of the server for scripts.
    """

    sent: int
    inside: int
    usec: int


def crowd(store: RedisStore, client: Any, size: int) -> Owner:
    """Let one hold the lock and ``size`` wait for it; return who holds it."""
    holder, waits, parked = Owner(new_token(), "h/0/0"), Owner(new_token()), Owner("m.0", "m/0/0")
    store.worker_heartbeat("w", "R", ["q"], 600.0)
    store.acquire(holder, Claim(NAME, 600.0))
    store.park(parked, Claim(NAME), MessageToPark(b"body", "R", "q"))
    store.acquire(waits, Claim(NAME), wait=10_000.0)
    keys = store.keyspace.lock(NAME)
    parts = (keys.holders, keys.queue, keys.record, keys.meta, keys.bodies, keys.deadlines)
    for start in range(2, size, 10_000):
        last = min(start + 10_000, size) - 1
        given = (waits.token, parked.token, start, last, NAME)
        client.eval(_MULTIPLY, 7, *parts, keys.index, *given)
    return holder


def calls(store: RedisStore, holder: Owner) -> Mapping[str, Callable[[], Any]]:
    """Return every verb, in an order in which each has something to do, and what it does."""
    client, message, task = Owner(new_token()), Owner("new.0", "new/0/0"), "app.task"
    to_park, usual = MessageToPark(b"body", "R", "q"), Claim(NAME)
    follows = Reservation("follows/0/0", 60.0)
    messages = [ParkedMessage(NAME, f"p{n}.0", task, f"p{n}") for n in range(2)]
    many = [(Owner(f"p{n}.0", f"p{n}/0/0"), usual, to_park) for n in range(10)]
    return {
        "acquire, and be refused": lambda: store.acquire(Owner(new_token()), usual),
        "acquire, and wait": lambda: store.acquire(client, usual, wait=10_000.0),
        "acquire, as a copy of a waiter": lambda: store.acquire(
            Owner(new_token(), "m/0/0"), Claim(NAME, copy=True)
        ),
        "park": lambda: store.park(message, usual, to_park),
        "park, as a copy of a waiter": lambda: store.park(
            Owner(new_token(), "m/0/0"), Claim(NAME, copy=True), to_park
        ),
        "park, and replace the oldest": lambda: store.park(
            Owner("r.0", "r/0/0", ""), Claim(NAME, max_waiting=1, replace=True), to_park
        ),
        "park_many, ten": lambda: store.park_many(many),
        "claim": lambda: store.claim(holder, NAME, 600.0),
        "claim, and wait on": lambda: store.claim(client, NAME, 600.0),
        "extend": lambda: store.extend([(NAME, holder.token, 600.0)]),
        "sweep_and_grant": lambda: store.sweep_and_grant(NAME, worker="w", realm="R"),
        "sweep_and_grant_many, two": lambda: store.sweep_and_grant_many(
            [NAME, OTHER], worker="w", realm="R"
        ),
        "record_publish_result": lambda: store.record_publish_result(
            NAME, "seal", [message.token], sent=True, worker="w"
        ),
        "take_due_locks": store.take_due_locks,
        "unswept_locks": lambda: store.unswept_locks(60.0),
        "inspect": lambda: store.inspect(NAME),
        "locate_tasks": lambda: store.locate_tasks(["new"]),
        "body": lambda: store.body(NAME, message.token),
        "bodies_of": lambda: store.bodies_of([(NAME, message.token)]),
        "release: cancel": lambda: store.release(NAME, client.token, Ending.CANCEL),
        "deliver_revoked": lambda: store.deliver_revoked(
            NAME, message.token, realm="R", worker="w"
        ),
        "release: keep": lambda: store.release(
            NAME, holder.token, Ending.KEEP, worker="w", reserve=follows
        ),
        "acquire, what was kept": lambda: store.acquire(
            holder._replace(attempt=follows.attempt, task=task), usual
        ),
        "release: final, and grant": lambda: store.release(
            NAME, holder.token, Ending.FINAL, worker="w"
        ),
        "receive": lambda: store.receive("w", 0.01),
        "reset, and grant": lambda: store.reset(NAME),
        "close_for": lambda: store.close_for(OTHER, 60.0, "by me"),
        "release: again, and grant": lambda: store.release(
            NAME, _held(store), Ending.AGAIN, worker="w"
        ),
        "wait": lambda: store.wait(NAME, client.token, 0.01),
        "worker_heartbeat": lambda: store.worker_heartbeat("w", "R", ["q"], 600.0),
        "list_running": lambda: store.list_running(
            "w", [("t", "k", "x.0")], [("u", "k", "x.0")], 600.0
        ),
        "fleet_size": lambda: store.fleet_size("R", ["q"]),
        "inbox_size": lambda: store.inbox_size("w"),
        "leave": lambda: store.leave("w2", "R", ["q"]),
        "parked": lambda: store.parked("R"),
        "waited_for": store.waited_for,
        "deliver_unlocked": lambda: store.deliver_unlocked([NAME], [""], 1, worker="w", realm="R"),
        "switch": lambda: store.switch(task, "observe"),
        "switches": store.switches,
        "record_observation": lambda: store.record_observation(
            Owner("o", "o/0/0", task), usual, waits=True
        ),
        "observations": store.observations,
        "clear_observations": store.clear_observations,
        "identify": store.identify,
        "has_messages, two": lambda: store.has_messages(messages),
        "has_traces, two": lambda: store.has_traces(messages),
        "vouch, two": lambda: store.vouch(["p0", "p1"]),
        "note_lost, two": lambda: store.note_lost({"p0": "{}", "p1": "{}"}),
        "confirm": lambda: store.confirm([NAME]),
        "probe": store.probe,
        "time": store.time,
    }


def _held(store: RedisStore) -> str:
    holders: Any = store.client.zrange(store.keyspace.lock(NAME).holders, 0, 0)
    return holders[0].decode() if isinstance(holders[0], bytes) else str(holders[0])


def spent(client: Any, call: Callable[[], Any]) -> Cost:
    """Return what one call costs."""
    client.config_resetstat()
    answer = call()
    stats = client.info("commandstats")
    counted = {
        name.removeprefix("cmdstat_"): entry
        for name, entry in stats.items()
        if not name.removeprefix("cmdstat_").startswith(_OURS)
    }
    every = sum(entry["calls"] for entry in counted.values())
    scripts = counted.get("evalsha", {"calls": 0, "usec": 0})
    if not scripts["calls"]:
        return Cost(every, 0, 0)
    if getattr(answer, "verdict", None) is Verdict.ABSENT:
        msg = "the call had nothing to do"
        raise AssertionError(msg)
    return Cost(scripts["calls"], every - scripts["calls"], scripts["usec"])


def costs(client: Any, size: int, rounds: int = ROUNDS) -> dict[str, Cost]:
    """Return what each verb costs beside so many waiters; of the time, the least of the rounds."""
    found: dict[str, Cost] = {}
    for _ in range(rounds):
        client.flushall()
        store = RedisStore(client, Keyspace(), claim_lease=600.0)  # has read no grants together
        holder = crowd(store, client, size)
        for what, call in calls(store, holder).items():
            cost = spent(client, call)
            before = found.get(what, cost)
            if (cost.sent, cost.inside) != (before.sent, before.inside):
                msg = f"{what} cost {before} at first, and then {cost}"
                raise AssertionError(msg)
            found[what] = min(cost, before, key=lambda each: each.usec)
        store.close()
    return found


def warm_up(client: Any) -> None:
    """Let the server know all scripts."""
    store = RedisStore(client, Keyspace(), claim_lease=600.0)
    client.flushall()
    for call in calls(store, crowd(store, client, 10)).values():
        call()
    store.close()


BOUNDED: Final = {"park, and replace the oldest": 100}
"""Verbs that look at so many waiters at most: below it they cost less, from there on the same."""


def grows(at: Mapping[int, Mapping[str, Cost]]) -> dict[str, list[int]]:
    """Return the verbs whose number of commands depends on how many wait, with what they cost."""
    found = {}
    for what in at[min(at)]:
        least = BOUNDED.get(what, 0)
        looked = [cost[what] for size, cost in at.items() if size > least]
        if len({(cost.sent, cost.inside) for cost in looked}) > 1:
            found[what] = [cost[what].inside for cost in at.values()]
    return found

"""The possible moves, with small arguments, for Hypothesis and random walks.

A move picks a recent token by its number, in any state. So late, repeated and wrong calls are as
frequent as correct ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery_singleton_lock.core.model import Ending, Reservation, Verdict
from celery_singleton_lock.core.owner_token import base_of
from support.script_model.clients import Patient
from support.script_model.flow import FAIR, PACED
from support.script_model.world import LIMITS, MIXED, ONE, TWO, WORKERS, Asker, World

LOCKS = (ONE, ONE, TWO, MIXED, PACED, PACED, FAIR, FAIR)
FLOWING = (ONE, PACED, PACED, FAIR, FAIR)
WHO = tuple(range(8))
LOST = (False, False, False, True)
HEAD_STARTS = (1_500_000, 30_000_000, -3_000_000)
PLACES = (0, 0, 1_500_000, -1, -2_000_000, -2_000_000, -7_000_000)
Move = Callable[..., None]
Program = Sequence[tuple[str, Mapping[str, Any]]]
"""Moves by name, with their arguments."""

MOVES: dict[str, tuple[Move, Mapping[str, Sequence[Any]], int]] = {}


def move(weight: int = 1, **choices: Sequence[Any]) -> Callable[[Move], Move]:
    """Register a move, how often it happens, and the values of its arguments."""

    def register(function: Move) -> Move:
        MOVES[function.__name__] = (function, choices, weight)
        return function

    return register


def token_of(world: World, lock: str, who: int) -> str:
    state = world.state(lock)
    found = [
        *state.holders,
        *sorted(state.queue, key=state.queue.__getitem__),
        *state.adrift,
        *sorted(state.overdue),
        *(d.token for d in world.deliveries[-3:] if d.name == lock),
        *(a.token for a in world.askers[-8:] if a.claim.name == lock),
    ]
    return found[who % len(found)] if found else "nobody.0"


def asker_of(world: World, lock: str, who: int) -> Asker | None:
    found = [asker for asker in reversed(world.askers) if asker.claim.name == lock]
    return found[who % len(found)] if found else None


def _limit(lock: str, who: int) -> int:
    return 1 + who % 3 if lock == MIXED else 0


@move(
    3, lock=LOCKS, who=WHO, lease=(1.0, 10.0, 30.0), wait=(None, 2.0, 20.0), place=PLACES, lost=LOST
)
def client_tries(world, lock, who, lease, wait, place, lost):
    asker = world.new_asker(
        lock,
        lease=lease,
        attempt="",
        place=place,
        limit=_limit(lock, who),
        max_waiting=2 if who == 7 else None,
    )
    world.acquire(asker, wait, lost=lost)


@move(2, lock=LOCKS, who=WHO, wait=(None, 2.0, 20.0), lost=LOST)
def asks_again(world, lock, who, wait, lost):
    asker = asker_of(world, lock, who)
    if asker:
        world.acquire(asker, wait, lost=lost)


@move(2, lock=LOCKS, who=WHO, timeout=(None, 2.0, 9.0, 25.0), lease=(1.0, 10.0))
def client_waits(world, lock, who, timeout, lease):
    """A client begins to wait, as Lock does: in heartbeats, until its own deadline."""
    patient = Patient(world, lock, timeout, lease, _limit(lock, who))
    patient.go_on()
    if not patient.over:
        world.patients.append(patient)


@move(4, who=WHO, steps=(1, 1, 2, 5))
def client_goes_on(world, who, steps):
    """One that waits does what its wake-up, or its clock, tells it."""
    if not world.patients:
        return
    patient = world.patients[who % len(world.patients)]
    for _ in range(steps):
        if not patient.over:
            patient.go_on()
    if patient.over:
        world.patients.remove(patient)


@move(1, who=WHO)
def client_dies(world, who):
    if world.patients:
        world.patients.pop(who % len(world.patients))


@move(
    4,
    lock=LOCKS,
    who=WHO,
    place=PLACES,
    first=("acquire", "acquire", "park", "park", "wait"),
    worker=tuple(WORKERS),
    deadline=(None, None, 3.0, 20.0),
    lost=LOST,
)
def message_arrives(world, lock, who, place, first, worker, deadline, lost):
    realm, queues = WORKERS[worker]
    asker = world.new_asker(
        lock,
        place=place,
        worker=worker,
        realm=realm,
        queue=queues[who % len(queues)],
        deadline=deadline,
        limit=_limit(lock, who),
        max_waiting=2 if who == 7 else None,
        lease=(1.0, 10.0)[who % 2],
    )
    if first == "wait":
        world.acquire(asker, 4.0, lost=lost)
        return
    _goes_in(world, asker, first, who, lost)


def _goes_in(world, asker, first, who, lost):
    reply = world.acquire(asker, lost=lost) if first == "acquire" else None
    if first != "acquire" or (reply and reply.verdict is Verdict.BLOCKED) or (lost and who % 2):
        world.park(asker, lost=lost)


@move(2, lock=LOCKS, who=WHO, lost=LOST)
def is_parked_late(world, lock, who, lost):
    asker = asker_of(world, lock, who)
    if asker and asker.owner.attempt:
        world.park(asker, lost=lost)


@move(
    3,
    lock=LOCKS,
    who=WHO,
    marked=(1, 1, 0, 2, "same", "new", "old"),
    then=("", "park", "end", "park"),
    lost=LOST,
)
def copy_arrives(world, lock, who, marked, then, lost):
    """Another message of an attempt; its first may end between its two calls.

    It is marked as redelivered, or has the base of the first, or is known to have arrived first now
    or 30 s ago; else it is another call of that id.
    """
    first_at = {"same": 0, "new": world.now_us, "old": world.now_us - 30_000_000}
    first = asker_of(world, lock, who)
    if not first or not first.owner.attempt:
        return
    copy = world.new_asker(
        lock,
        attempt=first.owner.attempt,
        copy=first_at.get(marked, marked),
        base=first.base if marked == "same" else "",
        realm=first.to_park.realm,
        queue=first.to_park.queue,
        limit=first.claim.limit,
    )
    reply = world.acquire(copy, lost=lost)
    if then == "end":
        world.release(lock, first.token)
    if then and (not reply or reply.verdict in {Verdict.BLOCKED, Verdict.TWIN}):
        world.park(copy, lost=lost)


@move(4, lock=LOCKS, who=WHO, settle=(False, False, True), lease=(1.0, 10.0), lost=LOST)
def claims(world, lock, who, settle, lease, lost):
    world.claim(lock, token_of(world, lock, who), lease, settle=settle, lost=lost)


@move(
    7,
    lock=LOCKS,
    who=(0, 0, 0, *WHO),
    ending=(
        *(Ending.FINAL, Ending.FINAL, Ending.AGAIN, Ending.AGAIN),
        *(Ending.CANCEL, Ending.REJECT, Ending.UNREAD, Ending.REFUSED),
    ),
    worker=("", *WORKERS),
    mark=(False, True),
    lost=LOST,
)
def ends(world, lock, who, ending, worker, mark, lost):
    token, refused = token_of(world, lock, who), ending is Ending.REFUSED
    delay = Reservation("another lock", 3.0) if refused else None
    world.release(lock, token, ending, worker=worker, mark=mark, reserve=delay, lost=lost)


@move(
    3,
    lock=LOCKS,
    who=(0, 0, 0, *WHO),
    seconds=(1.0, 8.0, 25.0),
    early=("", "", "", "acquire", "park", "wait"),
    worker=("", *WORKERS),
    lost=LOST,
)
def retries(world, lock, who, seconds, early, worker, lost):
    """A task ends with a retry and keeps its permit; the retry may arrive before that."""
    token = token_of(world, lock, who)
    ended = world.state(lock).record.get(token, {}).get("attempt", "")
    if not ended:
        return
    number, retried, nesting = ended.split("/")
    attempt = f"{number}/{int(retried) + 1}/{nesting}"
    asker = world.new_asker(lock, attempt=attempt, limit=_limit(lock, who))
    if early == "wait":
        world.acquire(asker, 4.0, lost=lost)
    elif early:
        _goes_in(world, asker, early, who, lost)
    reserve = Reservation(attempt, seconds)
    world.release(lock, token, Ending.KEEP, worker=worker, reserve=reserve, lost=lost)


@move(
    2,
    lock=LOCKS,
    who=(0, 0, 0, *WHO),
    seconds=(1.0, 8.0, 25.0),
    worker=("", *WORKERS),
    mark=(False, True),
    lost=LOST,
)
def succeeds(world, lock, who, seconds, worker, mark, lost):
    """A task succeeds, and its lock stays taken for a while."""
    token = token_of(world, lock, who)
    reserve = Reservation("", seconds)
    world.release(lock, token, Ending.HOLD, worker=worker, mark=mark, reserve=reserve, lost=lost)


@move(
    4,
    lock=LOCKS,
    who=WHO,
    first=("acquire", "park", "wait"),
    copy=(False, False, True),
    max_waiting=(None, 1),
    queue=("q", "q", "nobody's"),
    lost=LOST,
)
def next_attempt_arrives(world, lock, who, first, copy, max_waiting, queue, lost):
    reserved = sorted(world.ledgers[lock].reserved)
    if not reserved:
        return
    asker = world.new_asker(
        lock,
        attempt=reserved[who % len(reserved)],
        copy=copy,
        limit=_limit(lock, who),
        max_waiting=max_waiting,
        queue=queue,
    )
    if first == "wait":
        world.acquire(asker, 4.0, lost=lost)
    else:
        _goes_in(world, asker, first, who, lost)


@move(
    4,
    lock=LOCKS,
    who=WHO,
    place=PLACES,
    worker=tuple(WORKERS),
    deadline=(None, None, 3.0),
    task=("app.latest", "app.latest", "app.other"),
    ended=(False, False, True),
    lost=LOST,
)
def message_replaces(world, lock, who, place, worker, deadline, task, lost, ended=False):
    """A message makes room for itself; a worker may end at once the one that it replaces."""
    realm, queues = WORKERS[worker]
    asker = world.new_asker(
        lock,
        place=place,
        worker=worker,
        realm=realm,
        queue=queues[who % len(queues)],
        deadline=deadline,
        limit=_limit(lock, who),
        max_waiting=1 + who % 2,
        replace=True,
        task=task,
    )
    _goes_in(world, asker, ("acquire", "park")[who % 2], who, lost)
    for each in WORKERS if ended else ():
        worker_receives(world, each, "end", who)


@move(
    2,
    lock=LOCKS,
    who=WHO,
    place=PLACES,
    head_start=HEAD_STARTS,
    first=("acquire", "park", "wait"),
    worker=tuple(WORKERS),
    lost=LOST,
)
def waiter_with_priority_arrives(world, lock, who, place, head_start, first, worker, lost):
    realm, queues = WORKERS[worker]
    asker = world.new_asker(
        lock,
        place=place,
        worker=worker,
        realm=realm,
        queue=queues[who % len(queues)],
        limit=_limit(lock, who),
        head_start=head_start,
    )
    if first == "wait":
        world.acquire(asker, 4.0, lost=lost)
    else:
        _goes_in(world, asker, first, who, lost)


@move(1, lock=LOCKS, who=WHO, number=(0, 1, 2))
def late_delivery_ends(world, lock, who, number):
    """A holder of some delivery of a message ends, be it the present one or not."""
    world.release(lock, f"{base_of(token_of(world, lock, who))}.{number}")


@move(3, lock=LOCKS, who=WHO, lease=(1.0, 10.0), lost=LOST)
def renews(world, lock, who, lease, lost):
    world.extend(
        lock, [token_of(world, lock, who), token_of(world, lock, who + 1)], lease, lost=lost
    )


@move(3, worker=tuple(WORKERS), then=("claim", "claim", "die", "end", "settle"), who=WHO)
def worker_receives(world, worker, then, who):
    """A worker takes a grant; one that settles it may hear of its being parked only then."""
    got = world.receive(worker)
    if got is None or then == "die":
        return
    if got.verdict != "granted" or then == "end":
        world.release(got.name, got.token, worker=worker)
    else:
        world.claim(got.name, got.token, settle=then == "settle" or who == 7)
    if then == "settle" and who % 2:
        world.park(world.first_of[base_of(got.token)])


@move(
    4,
    lock=LOCKS,
    who=(0, 0, 0, *WHO),
    reached=(True, True, False),
    later=(0.0, 11.0),
    lost=LOST,
)
def claim_is_not_answered(world, lock, who, reached, later, lost):
    """A worker that has not heard of its claim parks the message again; a copy may follow later."""
    token = token_of(world, lock, who)
    first, rec = world.first_of.get(base_of(token)), world.state(lock).record.get(token, {})
    if first is None or not rec.get("parked") or rec["state"] not in {"granted", "running"}:
        return
    if reached:
        world.claim(lock, token, settle=True)
    if later:
        world.advance(later)
    arrived = int(rec.get("arrived") or rec["place"])
    world.park(world.unanswered(first, token, arrived), lost=lost)


@move(2, lock=LOCKS, worker=tuple(WORKERS), patience=(0.0, 3.0, 60.0), lost=LOST)
def kick(world, lock, worker, lost, patience=0.0):
    world.kick(lock, worker, patience=patience, lost=lost)


def _leaving(world, strays=None):
    """Those that are still out of the line, under the seal with which they were taken out."""
    records = {name: world.state(name).record for name in LIMITS}
    return [
        stray
        for stray in (world.strays if strays is None else strays)
        if records[stray.name].get(stray.token, {}).get("state") == "leaving"
        and records[stray.name][stray.token].get("seal") == stray.seal
    ]


@move(8, number=(0, 1, 2), sent=(True, True, False), told=(False, True))
def message_is_published(world, number, sent, told):
    """A message that was taken out of the line goes to the broker, or the broker refuses it."""
    leaving = _leaving(world) or world.strays
    if not leaving:
        return
    stray = leaving[-1 - number % len(leaving)]
    if sent:
        world.published.add((stray.seal, stray.token))
        if told:
            world.left(stray, sent=True)
    else:
        world.strays.remove(stray)
        world.left(stray, sent=False)


def _comes_from_the_broker(world, stray, first, lost):
    """A worker that locks gets a moved message; it acknowledges what is TWIN or parked."""
    message = (stray.seal, stray.token)
    if message in world.acknowledged:
        return
    asker = world.moved(stray)
    reply = world.acquire(asker, lost=lost) if first == "acquire" else None
    if reply is None or reply.verdict in {Verdict.BLOCKED, Verdict.TWIN}:
        reply = world.park(asker)
    if reply is not None:  # a full Redis has refused it, and the broker has it still
        world.acknowledged.add(message)


@move(4, number=(0, 1, 2), first=("acquire", "park"), lost=LOST)
def moved_message_arrives(world, number, first, lost):
    """A worker that locks gets it from the broker, before or after it was forgotten here."""
    known = [s for s in world.strays if (s.seal, s.token) in world.published]
    if known:
        _comes_from_the_broker(world, known[-1 - number % len(known)], first, lost)


@move(3, number=(0, 1, 2), first=("acquire", "park"), told=(True, True, False), lost=LOST)
def moved_message_arrives_early(world, number, first, told, lost):
    """A worker that locks gets it between its publishing and the call that forgets it here."""
    leaving = _leaving(world)
    if not leaving:
        return
    stray = leaving[-1 - number % len(leaving)]
    world.published.add((stray.seal, stray.token))
    _comes_from_the_broker(world, stray, first, lost)
    if told:
        world.left(stray, sent=True, lost=lost)


@move(3, number=(0, 1, 2), lost=LOST)
def moved_message_is_forgotten(world, number, lost):
    """Who published it tells Redis; or dies before, and never does."""
    sent = [s for s in world.strays if (s.seal, s.token) in world.published]
    known = _leaving(world, sent) or sent
    if known:
        world.left(known[-1 - number % len(known)], sent=True, lost=lost)


@move(3, lock=LOCKS, who=WHO, worker=tuple(WORKERS), delayed=(False, True), lost=LOST)
def is_revoked(world, lock, who, worker, lost, delayed=False):
    """Its task was revoked; whoever it is, and whatever it does just then."""
    found = [(name, t) for name in LIMITS for t in sorted(world.state(name).delayed)]
    if delayed and found:
        lock, token = found[who % len(found)]
    else:
        token = token_of(world, lock, who)
    world.revoke(lock, token, worker, lost=lost)


@move(2, worker=tuple(WORKERS), lost=LOST)
def tick(world, worker, lost):
    world.sweep(worker, lost=lost)


@move(5, worker=tuple(WORKERS), free=(0, 0, 1, 2, -3))
def worker_joins(world, worker, free=0):
    world.beat(worker, free)


@move(1, lock=LOCKS, who=(0, 0, 0, *WHO), worker=tuple(WORKERS), lost=LOST)
def grant_is_passed_on(world, lock, who, worker, lost):
    """A worker has no slot for what it was granted, or has lost its broker."""
    ending = Ending.RETURN if who == 1 else Ending.OFFER
    world.release(lock, token_of(world, lock, who), ending, worker=worker, lost=lost)


@move(1, worker=tuple(WORKERS))
def worker_leaves(world, worker):
    world.leave(worker)


@move(6, seconds=(0.000001, 0.001, 0.5, 1.0, 2.0, 2.5, 5.0, 12.0, 31.0))
def time_passes(world, seconds):
    world.advance(seconds)


@move(1, rarely=(True, *(False,) * 5), seconds=(70.0, 4000.0))
def long_time_passes(world, rarely, seconds):
    if rarely:
        world.advance(seconds)


@move(1, rarely=(True, *(False,) * 5))
def all_data_is_lost(world, rarely):
    if rarely:
        world.lose_all_data()


@move(1, rarely=(True, *(False,) * 3))
def memory_is_full(world, rarely):
    """Another user of the server fills it, or goes."""
    if rarely or world.full:
        world.fill(full=not world.full)


@move(2, lock=LOCKS, what=range(8), worker=tuple(WORKERS), lost=LOST)
def goes_on_though_memory_is_full(world, lock, what, worker, lost):
    """What needs no memory, just while there is none."""
    lock = next((name for name in (lock, *LOCKS) if world.state(name).standing), lock)
    state, was_full = world.state(lock), world.full
    kept = [t for t, rec in state.record.items() if rec.get("parked") and t in state.holders]
    token = kept[0] if kept and what < 3 else token_of(world, lock, 0)
    world.fill(full=True)
    if what < 3:
        ending = (Ending.FINAL, Ending.AGAIN, Ending.CANCEL)[what]
        world.release(lock, token, ending, worker=worker, lost=lost)
    elif what == 3:
        world.claim(lock, token, lost=lost)
    elif what == 4:
        world.extend(lock, [token], lost=lost)
    elif what == 5:
        world.advance(11.0)  # who holds has died
        world.beat(worker)
        world.sweep(worker, lost=lost)
        world.kick(lock, worker, lost=lost)
    elif what == 6:
        world.revoke(lock, token_of(world, lock, 1), worker, lost=lost)
    else:
        retries(world, lock, 0, 8.0, "", worker, lost)
    world.fill(full=was_full)


@move(1, seconds=(0.0, 1.0, 10.0, 60.0))
def looks_for_neglected(world, seconds):
    world.neglected(seconds)


@move(2, number=(0, 1, 2), first=("acquire", "park"), lost=LOST)
def copy_comes_back(world, number, first, lost):
    """A copy that a worker of an older version has published, sooner or later."""
    if world.strays:
        stray = world.strays[-1 - number % len(world.strays)]
        _goes_in(world, world.copy_of(stray), first, number, lost)


@move(1, lock=LOCKS)
def is_reset(world, lock):
    world.reset(lock)


@move(1, lock=LOCKS, lost=LOST)
def is_paused(world, lock, lost):
    world.pause(lock, lost=lost)


@move(5, lock=LOCKS, lost=LOST)
def is_resumed(world, lock, lost):
    if world.ledgers[lock].paused:
        world.resume(lock, lost=lost)


@move(1, lock=LOCKS, limit=(None, None, 1, 2, 3), seconds=(None, 4.0, 15.0))
def limit_is_set(world, lock, limit, seconds=None):
    world.set_limit(lock, limit, seconds)


@move(1, lock=FLOWING, seconds=(3.0, 12.0))
def is_paused_for_a_time(world, lock, seconds):
    world.pause(lock, seconds)


@move(2, lock=(PACED, FAIR, TWO), ruled=(True, False), seconds=(None, 3.0, 12.0))
def rates_are_set(world, lock, ruled, seconds):
    world.set_rates(lock, ruled, seconds)


@move(2, lock=FLOWING, seconds=(0.5, 3.0, 20.0), lost=LOST)
def is_closed(world, lock, seconds, lost):
    """A service asks its callers to wait."""
    world.close_for(lock, seconds, lost=lost)


@move(2, lock=FLOWING)
def is_reopened(world, lock):
    world.reopen(lock)


@move(
    3, lock=FLOWING, who=(0, 0, 0, *WHO), seconds=(None, 1.0, 8.0), worker=("", *WORKERS), lost=LOST
)
def asks_to_be_run_later(world, lock, who, seconds, worker, lost):
    """A task raises RetryLater, whose lock is closed in the same call, or is closed already."""
    token = token_of(world, lock, who)
    reserve = seconds and Reservation("429", seconds)
    world.release(lock, token, Ending.LATER, worker=worker, reserve=reserve, lost=lost)


@move(2, lock=(FAIR, FAIR, PACED), who=(0, 0, *WHO), amount=(1, 3), lost=LOST)
def is_charged(world, lock, who, amount, lost):
    world.charge(lock, token_of(world, lock, who), amount, lost=lost)


@move(2, lock=(TWO, MIXED), who=WHO, limit=(1, 2), early=("", "", "park"), lost=LOST)
def is_slowed_down(world, lock, who, limit, early, lost):
    """An operator lowers the limit and pauses the lock; one of those who hold it retries."""
    world.set_limit(lock, limit)
    world.pause(lock)
    retries(world, lock, who, 8.0, early, "", lost)


@move(2, lock=LOCKS, who=WHO, first=("acquire", "park", "wait"), lost=LOST)
def next_attempt_meets_a_pause(world, lock, who, first, lost):
    """What the operator has paused between two attempts is resumed after the second has come."""
    world.pause(lock)
    next_attempt_arrives(world, lock, who, first, False, 1, "q", lost)  # noqa: FBT003
    world.resume(lock)


def everybody_dies(world: World) -> None:  # noqa: C901  # a list of facts
    """The last move: all die; each lock must be free within its longest lease (I9)."""
    from support.script_model.invariants.facts import broken  # noqa: PLC0415  # the invariants know the world

    world.fill(full=False)
    for worker in WORKERS:
        world.leave(worker)
    for lock, ledger in world.ledgers.items():
        if ledger.paused:
            world.resume(lock)
        if ledger.ruled:
            world.set_limit(lock, None)
        if ledger.flow.rates_ruled:
            world.set_rates(lock, ruled=False)
    world.advance(31.0)
    for lock, limit in LIMITS.items():
        for permit in range(limit + 1):
            newcomer = world.new_asker(lock, attempt="", limit=limit, plain=True)
            reply = world.acquire(newcomer)
            in_force = world.ledgers[lock].limit
            expected = Verdict.GRANTED if permit < in_force else Verdict.BLOCKED
            if reply.verdict is not expected:
                broken("I9", f"a longest lease after all died, {lock} says {reply}")


def walk(world: World, seed: int, steps: int) -> None:
    """A random history of about so many steps."""
    chance = random.Random(seed)
    names = [name for name, (_, _, weight) in MOVES.items() for _ in range(weight)]
    end = world.steps + steps
    while world.steps < end:
        name = chance.choice(names)
        _, choices, _ = MOVES[name]
        make(world, name, {key: chance.choice(values) for key, values in choices.items()})
    everybody_dies(world)


def make(world: World, name: str, arguments: Mapping[str, Any]) -> None:
    """Make one move, and note it, so that the same can be played again; JSON knows no enums."""
    function, choices, _ = MOVES[name]
    world.played.append((name, dict(arguments)))
    function(world, **{key: choices[key][choices[key].index(arguments[key])] for key in arguments})


def play(world: World, program: Program) -> None:
    """Make these moves, to the end of all."""
    for name, arguments in program:
        make(world, name, arguments)
    everybody_dies(world)

"""The rules of the storm: pure functions from a history to violations."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from chaos.broker import VISIBILITY
from chaos.history import DYING, Event, History, Run, Span, joined
from chaos.tasks import GROUP_LIMIT, RATED, requeues

READY = frozenset({"SUCCESS", "FAILURE", "REVOKED"})

TICK = 0.005
"""Seconds by which a process may assume a lease too long: scripts count in whole milliseconds, and
the server's wall clock may be slewed against this machine's monotonic clock."""

IDLE = 2.0
"""Longest wait of a task in seconds while a permit is free and a worker could run it."""

TELLING = 3.0
"""Seconds until a worker's main loop acknowledges an ended task: some hundredths on an idle
machine."""

RESTORING = 10.0
"""Seconds between two looks of kombu for messages to restore."""

BLINK = 1.0
"""Longest pause in seconds between two reads of the locks without a gap in observation."""


@dataclass(frozen=True)
class Violation:
    """A violation of a rule.

    Args:
        rule: name of the rule.
        at: time in seconds of the history.
        text: what happened.
    """

    rule: str
    at: float
    text: str


Rule = Callable[[History], Iterator[Violation]]
RULES: dict[str, Rule] = {}
SAFETY: dict[str, Rule] = {}
"""Rules that must hold at any moment of a storm; the others must hold at its end."""


def rule(name: str, *, always: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule by name."""

    def register(function: Rule) -> Rule:
        RULES[name] = function
        if always:
            SAFETY[name] = function
        return function

    return register


def violations_of(history: History, rules: dict[str, Rule] | None = None) -> list[Violation]:
    """Return all that broke a rule, by its time."""
    chosen = RULES if rules is None else rules
    found = [violation for check in chosen.values() for violation in check(history)]
    return sorted(found, key=lambda violation: violation.at)


# --- locks ----------------------------------------------------------------------------------------


@rule("at most the limit believe that they hold a lock", always=True)
def overlaps(history: History) -> Iterator[Violation]:
    for key, beliefs in _by_each(history.beliefs, lambda each: each[0].keys):
        for run, begin, others in _crowds(beliefs):
            if len(others) >= min(each.limit(key) for each in (run, *others)):
                names = ", ".join(map(str, others))
                yield Violation(
                    "at most the limit believe that they hold a lock",
                    begin,
                    f"{key}: {run} began while it was held by {names}",
                )


@rule("no attempt runs beside itself", always=True)
def twins(history: History) -> Iterator[Violation]:
    """Except for one that was sent twice: with two permits two messages are two runs."""
    twice = _sent_twice(history)
    for attempt, beliefs in _by(history.beliefs, lambda each: (each[0].id, each[0].attempt)):
        if attempt in twice:
            continue
        for run, begin, others in _crowds(beliefs):
            if any(other is not run for other in others):
                yield Violation(
                    "no attempt runs beside itself",
                    begin,
                    f"{run} began beside {others[0]}, and both are {attempt}",
                )


@rule("fencing tokens grow", always=True)
def fences(history: History) -> Iterator[Violation]:
    name = "fencing tokens grow"
    since = _earliest_grant(history)
    for key, runs in _by_each(history.runs, lambda run: run.keys):
        seen: dict[int, Run] = {}
        largest: Run | None = None
        ended: list[tuple[float, int]] = []
        for run in runs:
            fence = run.fence(key)
            if fence in seen:
                yield Violation(name, run.start, f"{key}: {run} has the fence of {seen[fence]}")
            seen[fence] = run
            # One at a time: whoever holds the lock has the largest token. A run that was paused
            # between its grant and its start holds nothing any more.
            holds = run.limit(key) == 1 and bool(history.belief(run))
            if holds and largest is not None and fence < largest.fence(key):
                yield Violation(name, run.start, f"{key}: {run} began after {largest}")
            if holds and (largest is None or fence > largest.fence(key)):
                largest = run
            before = [former for end, former in ended if end < since[run.run]]
            if before and fence < max(before):
                yield Violation(name, run.start, f"{key}: {run} was granted after {max(before)}")
            ended.append((run.end, fence))


@rule("a lock is lost only for a cause", always=True)
def causeless_losses(history: History) -> Iterator[Violation]:
    for run in history.runs:
        if run.lost is not None and not history.disturbed(run):
            yield Violation(
                "a lock is lost only for a cause",
                run.lost,
                f"{', '.join(run.keys)}: {run} lost it; neither it nor its worker nor Redis had "
                "stood still",
            )


# --- flow control ---------------------------------------------------------------------------------


@rule("no period has more starts than the rate", always=True)
def rates(history: History) -> Iterator[Violation]:
    """A fencing token is the time of the grant, in microseconds of the server.

    Grants that are not claimed yet count, so their times keep the rate as those of starts do.
    """
    rated = [run for run in history.runs if run.facts.get("task") in RATED]
    for key, runs in _by_each(rated, lambda run: run.keys):
        by_fence = {run.fence(key): run for run in runs}
        fences = sorted(by_fence)
        number, period = RATED[runs[0].task]
        for first, last in zip(fences, fences[number:], strict=False):
            if (last - first) / 1e6 < period - TICK:
                run, apart = by_fence[last], (last - first) / 1e6
                text = f"{key}: {run} is start {number + 1} within {apart:.3f} s"
                yield Violation("no period has more starts than the rate", run.start, text)


@rule("at most the limit of a group hold its lock", always=True)
def group_limits(history: History) -> Iterator[Violation]:
    fair = [(run, span) for run, span in history.beliefs if run.facts.get("group")]
    for (key, group), beliefs in _by(fair, lambda each: (each[0].keys[0], each[0].group)):
        for run, begin, others in _crowds(beliefs):
            if len(others) >= GROUP_LIMIT:
                text = f"{key}: {run} of group {group} began beside {', '.join(map(str, others))}"
                yield Violation("at most the limit of a group hold its lock", begin, text)


@rule("only older calls are replaced")
def newest_calls(history: History) -> Iterator[Violation]:
    """The last one of a key is replaced by none. What the storm has revoked does not count."""
    revoked = {event["id"] for event in history.of("revoke")}
    states = {event["id"]: event["state"] for event in history.of("final")}
    calls = [task for task in history.of("published") if task["task"] in {"settles", "preempts"}]
    for key, tasks in _by(calls, lambda task: task["key"]):
        ended = [task for task in tasks if task["id"] in states and task["id"] not in revoked]
        if ended and all(states[task["id"]] == "REVOKED" for task in ended) and ended == tasks:
            text = f"{key}: all of {len(ended)} calls were replaced"
            yield Violation("only older calls are replaced", history.now, text)


@rule("what a call was a duplicate of had not ended")
def duplicates(history: History) -> Iterator[Violation]:
    """Unless its last run until then, or its worker, was disturbed: its end may be unheard."""
    finals = {event["id"]: event["t"] for event in history.of("final")}
    runs = dict(_by(history.runs, lambda run: run.id))
    for event in history.of("duplicate"):
        task_id, since = event["id"], event["since"]
        begun = [run for run in runs.get(task_id, ()) if run.start <= since]
        if finals.get(task_id, math.inf) > since - TELLING:
            continue
        if not begun or not history.disturbed(begun[-1], since):
            text = f"{task_id} had ended {since - finals[task_id]:.1f} s before a call like it"
            yield Violation("what a call was a duplicate of had not ended", since, text)


# --- the register ---------------------------------------------------------------------------------


@rule("the register refuses whoever was succeeded")
def late_writes(history: History) -> Iterator[Violation]:
    name = "the register refuses whoever was succeeded"
    for key, writes in _by(history.of("register"), lambda write: write["key"]):
        largest = 0
        for write in sorted(writes, key=lambda write: write["seq"]):
            if write["accepted"] and write["fence"] < largest:
                yield Violation(name, write["at"], f"{key}: {write['run']} wrote after {largest}")
            if write["accepted"]:
                largest = max(largest, write["fence"])


@rule("no holder is refused")
def refused_holders(history: History) -> Iterator[Violation]:
    beliefs = defaultdict(list)
    for run, span in history.beliefs:
        beliefs[run.run].append(span)
    for write in history.of("register"):
        believed = any(a <= write["at"] < b - TICK for a, b in beliefs[write["run"]])
        if believed and not write["accepted"]:
            text = f"{write['key']}: {write['run']} (fence {write['fence']}) was refused"
            yield Violation("no holder is refused", write["at"], text)


# --- tasks ----------------------------------------------------------------------------------------


@rule("every published task reaches a final state")
def unfinished(history: History) -> Iterator[Violation]:
    for task in unsettled(history):
        text = f"{task['task']} {task['id']} on {task['key']} has no final state"
        yield Violation("every published task reaches a final state", task["t"], text)


def unsettled(history: History) -> list[Event]:
    """Return the tasks that have no final state and no excuse.

    A later link of a chain is published by the success of the one before. An early-acknowledged
    task may die with a process that had it in its hands. And the broker's transport may lose what
    nobody has received, see :func:`lost_on_the_way`, and Celery the final state of a task that was
    retried, see :func:`overwritten`. A duplicate waits for the one that is lost, see
    :func:`followers_of_the_lost`.
    """
    states = {event["id"]: event["state"] for event in history.of("final")}
    died, lost = _died_in_hands(history), lost_on_the_way(history)
    lost |= followers_of_the_lost(history).keys()
    ended = overwritten(history)
    return [
        task
        for task in history.of("published")
        if states.get(task["id"]) not in READY
        and (task.get("after") is None or states.get(task["after"]) == "SUCCESS")
        and (task["late"] or task["id"] not in died)
        and task["id"] not in lost
        and task["id"] not in ended
    ]


def overwritten(history: History) -> set[str]:
    """Return the tasks that ended before a former attempt of theirs had stored its state.

    Celery sends a retry before it stores RETRY. If that attempt is quicker, or its message is
    thrown away at once since the task was revoked, RETRY is stored over the task's last state.
    """
    ends = {event["id"]: (math.inf, event["t"]) for event in history.of("discarded")}
    for run in history.runs:
        if not run.killed and not math.isinf(run.end):
            ends[run.id] = max(ends.get(run.id, (0, 0.0)), (run.attempt, run.end))
    return {
        run.id
        for run in history.runs
        for attempt, end in [ends.get(run.id, (0, 0.0))]
        if attempt > run.attempt and end < history.left(run) < math.inf
    }


def lost_on_the_way(history: History) -> set[str]:
    """Return the tasks whose last attempt reached no worker, although one was to get it.

    Or reached none any more, once a worker had sent it back to the broker (policy ``requeue``).

    kombu's Redis transport pops a message (BRPOP), and notes it as unacknowledged in a later call.
    What is on its way in between is lost if the connection is cut, or the worker killed: no worker
    has seen it, so no lock was asked for. ``test_broker_gap.py`` shows it with a plain task. So is
    what a worker that ends gives back, if another one is killed at that moment; and what the broker
    restores after the death of a worker that had not begun with it.
    RabbitMQ has no such excuse.
    """
    if any(event.get("broker") == "rabbitmq" for event in history.of("storm")):
        return set()
    received = {(event["id"], event["attempt"]) for event in history.of("received")}
    arrived = {event["id"]: event["t"] for event in history.of("received")}
    back = {event["id"] for event in history.of("returned") if event["t"] > arrived[event["id"]]}
    back |= _given_back_to_the_dead(history) | _restored_to_the_dead(history)
    attempt: dict[str, int] = defaultdict(int)
    for event in history.of("again"):
        attempt[event["id"]] = max(attempt[event["id"]], event["attempt"])
    succeeded = {event["id"] for event in history.of("final") if event["state"] == "SUCCESS"}
    last = max((event["t"] for event in history.of("cut", "kill")), default=-math.inf)
    return {
        task["id"]
        for task in history.of("published")
        if ((task["id"], attempt[task["id"]]) not in received or task["id"] in back)
        and task["t"] <= last + DYING
        and (task.get("after") is None or task["after"] in succeeded)
    }


def followers_of_the_lost(history: History) -> dict[str, str]:
    """Return the duplicates that wait for a call that the broker has lost, with their keys.

    Such a call counts for ``lock_unique_max``, an hour. If one of its task runs later, it is over.
    """
    sent = [task for task in history.of("published") if task["task"] == "follows"]
    ran: dict[str, float] = defaultdict(lambda: -math.inf)
    for run in history.runs:
        if run.facts.get("task") == "follows":
            for key in run.locks:
                ran[key] = max(ran[key], run.start)
    lost = lost_on_the_way(history) - {event["id"] for event in history.of("received")}
    since = {
        task["key"]: task["t"]
        for task in reversed(sent)
        if task["id"] in lost and ran[task["key"]] < task["t"]
    }
    late = [task for task in sent if since.get(task["key"], math.inf) < task["t"]]
    return {task["id"]: task["key"] for task in late}


def _given_back_to_the_dead(history: History) -> set[str]:
    """Return the messages whose worker ended just when another was killed, or connections cut."""
    holder = {event["id"]: (event["pid"], event["t"]) for event in history.of("received")}
    blows = [(event["t"], event.get("victim")) for event in history.of("cut", "kill")]
    ends = {who: history.death_of(*who) for who in set(holder.values())}
    return {
        task_id
        for task_id, who in holder.items()
        if any(abs(at - ends[who]) <= DYING and victim != who[0] for at, victim in blows)
    }


def _restored_to_the_dead(history: History) -> set[str]:
    """Return the messages of killed workers that were restored when another one was killed.

    The locks' Redis has never had them: no process of the first worker had asked for their locks,
    or the lock was denied and the worker held them back (policy ``requeue``).
    """
    last = {event["id"]: (event["pid"], event["t"]) for event in history.of("received")}
    back = {task["id"] for task in history.of("published") if requeues(task["task"])}
    asked = {event["id"]: event["t"] for event in history.of("asks") if event["id"] not in back}
    asked |= {run.id: run.start for run in history.runs if run.id in back}
    killed = {event["victim"]: event["t"] for event in history.of("kill")}
    blows = [event["t"] for event in history.of("cut", "kill")]
    return {
        task_id
        for task_id, (main, at) in last.items()
        if asked.get(task_id, -math.inf) < at < killed.get(main, -math.inf)
        and any(at + VISIBILITY <= blow <= at + VISIBILITY + RESTORING for blow in blows)
    }


@rule("a task that succeeded has run to its end")
def never_run(history: History) -> Iterator[Violation]:
    whole = [run for run in history.runs if not run.killed and not math.isinf(run.end)]
    ended = {run.id for run in whole}
    first = {key: runs[0].end for key, runs in _by_each(whole, lambda run: run.keys)}
    followers = {
        task["id"]: first.get(task["key"], math.inf)
        for task in history.of("published")
        if task["task"] == "follows"
    }
    for event in history.of("final"):
        followed = followers.get(event["id"], math.inf) <= event["t"]
        if event["state"] == "SUCCESS" and event["id"] not in ended and not followed:
            yield Violation(
                "a task that succeeded has run to its end",
                event["t"],
                f"{event['id']} is a SUCCESS, and no body of it has ended",
            )


@rule("what has ended runs again only for a cause")
def ended_twice(history: History) -> Iterator[Violation]:
    """Acknowledged early or late, parked before or not, with one lock or several.

    What tells a copy from its like is the first lock of those that have several, so nothing else
    is a cause for them.
    """
    name = "what has ended runs again only for a cause"
    twice, sent = _sent_twice(history), _sent(history)
    later = {event["run"] for event in history.of("later")}
    cuts = [event["t"] for event in history.of("cut")]
    for attempt, runs in _by(history.runs, lambda run: (run.id, run.attempt)):
        for run, after in pairwise(runs):
            if run.killed or run.end >= after.start or attempt in twice or run.run in later:
                continue
            since = sent.get(attempt, run.asked)
            copied = any(since <= cut <= after.start for cut in cuts)
            if not (copied or _is_end_unheard(history, run)):
                yield Violation(name, after.start, f"{after} began though {run} had ended")


def _is_end_unheard(history: History, run: Run) -> bool:
    """Return whether the end of a run may not have reached Redis, or the broker.

    Redis is told by who ran the task, and the broker then by the worker's main process. One of them
    was killed or stood still before, or Redis was away. Or the worker was shutting down, which hung
    until it was killed; or which its tasks took part in: of a pool of threads Celery acknowledges
    what ends meanwhile, plain tasks too, only when all others have ended.
    """
    told = min(history.left(run), run.end + DYING) + TELLING
    dead = min(history.death_of(pid, run.asked) for pid in (run.pid, run.main))
    late = history.retired(run.main, told) if run.pid == run.main else history.hung(run.main, told)
    return dead <= told or late or history.disturbed(run, told)


def _sent(history: History) -> dict[tuple[str, int], float]:
    """Return when each attempt was sent: a cut after that may make a copy of it."""
    found = {(task["id"], 0): task["t"] for task in history.of("published")}
    for event in history.of("again"):
        found.setdefault((event["id"], event["attempt"]), event["t"])
    return found


def _sent_twice(history: History) -> set[tuple[str, int]]:
    """Return the attempts that whoever sends them has sent more than once, since it ran again.

    An attempt is sent by the one before, the first of a link of a chain by the link before.
    """
    runs: dict[tuple[str, int], int] = defaultdict(int)
    for run in history.runs:
        runs[run.id, run.attempt] += 1
    twice: set[tuple[str, int]] = set()
    before = {task["id"]: task.get("after") for task in history.of("published")}
    last: dict[str, int] = {}
    for task_id, attempt in runs:
        last[task_id] = max(last.get(task_id, 0), attempt)
    for task_id, attempt in sorted(runs, key=lambda each: each[1]):
        sender = (task_id, attempt - 1)
        if not attempt:
            link = before.get(task_id)
            sender = (link, last.get(link, 0))
        if runs.get(sender, 0) > 1 or sender in twice:
            twice.add((task_id, attempt))
    return twice


def _died_in_hands(history: History) -> set[str]:
    """Return the tasks that were in the hands of a process when that died.

    A process may have two deliveries of a task at once, and give one of them back.
    """
    held: dict[tuple[int, str], list[float]] = defaultdict(list)
    doubtful: dict[str, int] = {}
    for event in sorted(history.of("asks", "left"), key=lambda event: event["t"]):
        who = event["pid"], event["id"]
        if event["e"] == "asks":
            held.pop((doubtful.pop(event["id"], 0), event["id"]), None)
            held[who].append(event["t"])
        else:
            held[who] = held[who][:-1]
            if event.get("to"):  # it may have been given the lock, and has not heard of it
                held[event["to"], event["id"]].append(event["t"])
                doubtful[event["id"]] = event["to"]
    return {
        task_id
        for (pid, task_id), since in held.items()
        if any(not math.isinf(history.death_of(pid, t)) for t in since)
    }


# --- the fleet ------------------------------------------------------------------------------------


@rule("nothing waits beside a free lock")
def idle_locks(history: History) -> Iterator[Violation]:
    alive = fleet_alive(history)
    for lock, spans in _free_spans(history).items():
        for begin, end in spans:
            for up, down in alive:
                idle = min(end, down) - max(begin, up)
                if idle > IDLE:
                    text = f"{lock}: a permit was free beside waiters for {idle:.1f} s"
                    yield Violation("nothing waits beside a free lock", max(begin, up), text)


def _free_spans(history: History) -> dict[str, list[Span]]:
    """Return when each lock was seen with a free permit beside waiters, look after look."""
    found: dict[str, list[Span]] = defaultdict(list)
    seen: dict[str, float] = {}
    breaks = iter([since for since, _ in history.outages])
    broken, before = next(breaks, math.inf), -math.inf
    for look in history.of("look"):
        at, free = look["t"], look["free"]
        cut = at - before > BLINK or broken <= at
        while broken <= at:
            broken = next(breaks, math.inf)
        for lock in [lock for lock in seen if cut or lock not in free]:
            found[lock].append((seen.pop(lock), before))
        for lock in free:
            seen.setdefault(lock, at)
        before = at
    for lock, since in seen.items():
        found[lock].append((since, before))
    return found


def fleet_alive(history: History) -> list[Span]:
    """Return when at least one worker lived that nobody had stopped."""
    spans: list[Span] = []
    for event in history.of("ready"):
        pid, since = event["victim"], event["t"]
        ends = [e["t"] for e in history.of("retire", "died") if e["victim"] == pid]
        end = min([*ends, history.death_of(pid, since), history.now])
        for stopped, going in sorted(history.stops[pid]):
            spans.append((since, min(stopped, end)))
            since = min(going, end)
        spans.append((since, end))
    return joined(span for span in spans if span[0] < span[1])


FAULT_OF_CELERY: Final = "ValueError: file descriptor is None"
"""Celery 5.7's asynpool: the connection is lost just when a child has died and is not reaped yet.
The loop that begins anew then watches a sentinel that is closed, and the worker ends with plain
tasks as well. What it held is delivered again."""


@rule("no worker dies of itself", always=True)
def dead_workers(history: History) -> Iterator[Violation]:
    for event in history.of("died"):
        if FAULT_OF_CELERY in event["last"]:
            continue
        text = f"{event['worker']} ended with {event['code']}, and nobody had killed it"
        yield Violation("no worker dies of itself", event["t"], text)


@rule("no key is left")
def leftovers(history: History) -> Iterator[Violation]:
    """Markers are left for a while: the last fence, ended attempts, who was in the fleet."""
    excused = _keys_of_followers(history)
    for event in history.of("key"):
        part = event["name"].rpartition(":")[2]
        stays = part in {"meta", "done"} or ":fleet:" in event["name"] or ":flow" in event["name"]
        marker = event["ttl"] >= 0 and stays
        lapsed = event["ttl"] >= 0 and not event["live"]
        if not (marker or lapsed or event["name"].endswith(":schema") or event["name"] in excused):
            text = (
                f"{event['name']} ({event['type']}, expires in {event['ttl']} s): {event['live']}"
            )
            yield Violation("no key is left", event["t"], text)


def _keys_of_followers(history: History) -> set[str]:
    """Return the keys in Redis of duplicates that wait for a call that the broker has lost."""
    locks = {f"k:{key}" for key in followers_of_the_lost(history).values()}
    names = {event["name"] for event in history.of("key")}
    own = {name for name in names if any(f":{lock}:" in name for lock in locks)}
    buckets = {name.partition("}")[0] + "}" for name in own}
    return own | {f"{bucket}:{part}" for bucket in buckets for part in ("index", "due")}


@rule("the library logs no failure of its own")
def complaints(history: History) -> Iterator[Violation]:
    for event in history.of("complaint"):
        text = f"{event['worker']}: {event['text']}"
        yield Violation("the library logs no failure of its own", event["t"], text)


# --- tools ----------------------------------------------------------------------------------------


def _by(things: Iterable, key: Callable) -> Iterator[tuple]:
    groups = defaultdict(list)
    for thing in things:
        groups[key(thing)].append(thing)
    yield from groups.items()


def _by_each(things: Iterable, keys: Callable) -> Iterator[tuple]:
    """Group as :func:`_by` does; a thing of several keys is in the groups of all of them."""
    pairs = [(key, thing) for thing in things for key in keys(thing)]
    for key, group in _by(pairs, lambda pair: pair[0]):
        yield key, [thing for _, thing in group]


def _crowds(beliefs: list[tuple[Run, Span]]) -> Iterator[tuple[Run, float, list[Run]]]:
    """Yield each belief's run and begin with the runs that held at that moment."""
    held: list[tuple[float, int, Run]] = []
    for number, (run, (begin, end)) in enumerate(sorted(beliefs, key=lambda each: each[1])):
        while held and held[0][0] - TICK <= begin:
            heapq.heappop(held)
        yield run, begin, [other for _, _, other in held]
        heapq.heappush(held, (end, number, run))


def _earliest_grant(history: History) -> dict[str, float]:
    """Return when each run can have been granted at the earliest: it was published by then."""
    published = {
        event["id"]: event["t"] for event in history.of("published") if not event.get("after")
    }
    return {run.run: published.get(run.id, -math.inf) for run in history.runs}

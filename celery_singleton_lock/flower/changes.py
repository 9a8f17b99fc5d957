"""Changes that an operator makes on the page: of one lock or waiter, or of many.

The page first asks about each change, and shows what it would change. Then the change is made by
the functions that the commands use, so both refuse the same and write the same audit entries.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from celery_singleton_lock.admin import (
    Operator,
    Refused,
    Waiting,
    change_lock,
    force_release,
    forced_release_warning,
)
from celery_singleton_lock.admin.bulk_parked import not_purged, purge
from celery_singleton_lock.admin.change_lock import drop_warning, find_waiter, queues_again
from celery_singleton_lock.admin.select_parked import Filter, count
from celery_singleton_lock.admin.why_sentences import short
from celery_singleton_lock.config.limits import MAX_COUNT
from celery_singleton_lock.core.duration import time_in_force
from celery_singleton_lock.core.rate import Rate, rates_of
from celery_singleton_lock.errors import BackendError, ConfigurationError
from celery_singleton_lock.flower.values import SHORT, visible
from celery_singleton_lock.message_text import number_of
from celery_singleton_lock.store.operator.base import AdminStore

ACTIONS: Final = ("pause", "resume", "reopen", "limit", "rate", "promote", "drop", "release")
"""The names of all changes."""

MAX_TARGETS: Final = 500
"""Largest number of locks or waiters of one change."""

MAX_DROPPED: Final = 10_000
"""Largest number of tasks that one change drops: the page waits for it."""

SHOWN: Final = 20
"""Largest number of locks, holders or waiters that a question or an answer names."""


class Target(NamedTuple):
    """A lock, or a holder or waiter of it, that is changed.

    Args:
        lock_id: id of the lock.
        token: owner token of one holder or waiter; empty: the lock.
    """

    lock_id: str
    token: str = ""


class ChangeRequest(NamedTuple):
    """A change that was requested.

    Args:
        action: one of :data:`ACTIONS`.
        targets: the locks, holders or waiters to change.
        sure: False: only return the question.
        why: reason, for the audit.
        permits: number of permits of the action ``limit``; None: the limit that the tasks declare.
        asked_at: server time of the question. Tasks that were parked later are not dropped.
        rates: rates of the action ``rate``; empty: those that the tasks declare.
        seconds: time after which a pause, a limit or rates end by themselves; None: they do not.
    """

    action: str
    targets: tuple[Target, ...]
    sure: bool = False
    why: str = ""
    permits: int | None = None
    asked_at: float = 0.0
    rates: tuple[Rate, ...] = ()
    seconds: float | None = None

    @property
    def to(self) -> str:
        """The value that it sets, as text; empty if it sets none, or restores the declared one."""
        return str(self.permits or "") or ", ".join(map(str, self.rates))


def parse_change(body: bytes) -> ChangeRequest:
    """Return the request in a JSON object.

    Raises:
        ValueError: it is not such an object. The text says what to send.
    """
    try:
        given = json.loads(body)
        targets = tuple(Target(str(t["id"]), str(t.get("token", ""))) for t in given["targets"])
        action, permits = str(given["action"]), given.get("permits")
        asked_at = float(given.get("asked_at", 0.0))
        wanted = ChangeRequest(
            action, targets, given.get("sure") is True, str(given.get("why", "")), permits, asked_at
        )
        rates, lasts = str(given.get("rates") or ""), str(given.get("for") or "")
    except (ValueError, TypeError, KeyError, AttributeError):
        msg = 'Send a JSON object with "action", "targets" (a list of {"id", "token"}) and "sure".'
        raise ValueError(msg) from None
    try:
        parsed = rates_of(rates.replace(",", " ").split() or None)
        seconds = time_in_force(lasts) if lasts else None
    except ConfigurationError as error:
        raise ValueError(str(error)) from None
    wanted = wanted._replace(rates=parsed, seconds=seconds)
    _check(wanted)
    return wanted


def _check(wanted: ChangeRequest) -> None:
    permits = wanted.permits
    if wanted.action not in ACTIONS:
        msg = f"action is {wanted.action!r}: use one of {', '.join(ACTIONS)}."
        raise ValueError(msg)
    if not 0 < len(wanted.targets) <= MAX_TARGETS:
        msg = f"targets has {len(wanted.targets)} entries: send 1 to {MAX_TARGETS}."
        raise ValueError(msg)
    if permits is not None and (type(permits) is not int or not 1 <= permits <= MAX_COUNT):
        msg = f"permits is {permits!r}: send a number from 1 to {MAX_COUNT:,}, or null."
        raise ValueError(msg)
    if wanted.seconds is not None and _ends(wanted):
        msg = f"{wanted.action} ends what is set now, so a time has no effect. Leave it out."
        raise ValueError(msg)
    if not math.isfinite(wanted.asked_at):
        msg = "asked_at is not a finite number: send the one of the question."
        raise ValueError(msg)
    if wanted.action == "promote" and not all(target.token for target in wanted.targets):
        msg = "promote needs the token of each waiter."
        raise ValueError(msg)


def _ends(wanted: ChangeRequest) -> bool:
    """Return whether a change returns to what the tasks declare."""
    cleared = {"limit": wanted.permits is None, "rate": not wanted.rates}
    return cleared.get(wanted.action, wanted.action != "pause")


class Effects(Protocol):
    """What a change does outside of the locks' Redis."""

    untold: int

    @property
    def realm(self) -> str:
        """The realm of the app's broker. Tasks of other brokers are dropped one by one only."""
        ...

    @property
    def done_for(self) -> float:
        """Seconds for which copies of a dropped message do not run."""
        ...

    def tell_dropped(self, each: Waiting, by: Operator) -> None:
        """Store REVOKED as the result of a dropped task."""
        ...


@dataclass(slots=True)
class ChangeResult:
    """What a change has done.

    Args:
        done: lock name -> number of tasks or steps.
        refused: what was not done, with its reason.
    """

    done: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)


class LockChanges:
    """Asks about changes, and carries them out.

    Args:
        store: the operator's store of the app's locks.
        name_of: returns the name of the lock with an id.
        effects: stores results of dropped tasks.
    """

    def __init__(self, store: AdminStore, name_of: Callable[[str], str], effects: Effects) -> None:
        """Create the object. Nothing is read yet."""
        self._store = store
        self._name_of = name_of
        self._effects = effects

    # -- the question -----------------------------------------------------------------------------

    def question(self, wanted: ChangeRequest) -> dict[str, Any]:
        """Return what the change would do. Changes nothing.

        Returns:
            ``question``; ``risk``, which is empty if nothing can be lost; ``items``, the first
            locks, holders or waiters; ``targets`` and ``asked_at``, to be sent with ``sure``.

        Raises:
            UnknownLock: no list had one of the locks.
            Refused: there is nothing to change, or too much.
            BackendError: Redis did not answer, or refused the command.
        """
        asked_at = self._store.time()
        targets = [(self._name_of(each.lock_id), each) for each in wanted.targets]
        if wanted.action == "release":
            found = self._ask_release(targets)
        elif wanted.action == "drop":
            found = self._ask_drop(targets)
        elif wanted.action == "promote":
            waiters = [find_waiter(self._store, name, each.token) for name, each in targets]
            told = number_of(len(waiters), "task")
            found = (f"Move {told} to the head of the queue?", "", list(map(_waiter, waiters)))
        else:
            told = number_of(len(targets), "lock")
            question = f"{_VERBS[wanted.action]} {told}? {_MEANINGS[wanted.action]}"
            found = (question, "", [name for name, _ in targets])
        question, risk, items, *kept = found
        return {
            "question": question,
            "risk": visible(risk, 5 * SHORT),
            "items": [visible(item, SHORT) for item in items[:SHOWN]],
            "more": max(0, len(items) - SHOWN),
            "targets": kept[0] if kept else list(map(_as_json, wanted.targets)),
            "asked_at": asked_at,
        }

    def _ask_release(self, targets: Sequence[tuple[str, Target]]) -> Any:
        found = [
            (name, target, holder)
            for name, target in targets
            for holder in self._store.inspect(name, waiters=0).holders
            if target.token in {"", holder.token}
        ]
        if not found:
            msg = "Nobody holds it any more."
            raise Refused(msg)
        if len(found) > MAX_TARGETS:
            msg = f"These locks have {len(found)} holders: choose at most {MAX_TARGETS}."
            raise Refused(msg)
        (name, _, first), several = found[0], len(found) > 1
        risk = _RISK if several else forced_release_warning(name, str(first), first.state)
        question = f"Take {'the locks' if several else 'the lock'} from {_holders(len(found))}?"
        items = [f"{short(holder)}: {name}" for name, _, holder in found]
        kept = [_as_json(target._replace(token=holder.token)) for _, target, holder in found]
        return question, risk, items, kept

    def _ask_drop(self, targets: Sequence[tuple[str, Target]]) -> Any:
        singly = [
            find_waiter(self._store, name, each.token) for name, each in targets if each.token
        ]
        if singly:
            risk = drop_warning(singly) if len(singly) == 1 else _THEY_WILL_NOT_RUN
            told = number_of(len(singly), "task")
            return f"Drop {told} permanently?", risk, list(map(_waiter, singly))
        counts = {name: self._parked(name) for name, _ in targets}
        total = sum(counts.values())
        if not total:
            msg = "No task of this app's broker is parked there any more."
            raise Refused(msg)
        _refuse_too_many(total)
        items = [f"{number:,} of {name}" for name, number in counts.items() if number]
        question = f"Drop all {number_of(total, 'parked task')} permanently?"
        return question, _THEY_WILL_NOT_RUN, items

    def _parked(self, name: str) -> int:
        wanted = Filter(name, exact=True)
        return count(self._store, wanted, not_purged(self._effects.realm)).total

    # -- the change -------------------------------------------------------------------------------

    def carry_out(self, wanted: ChangeRequest, by: Operator) -> ChangeResult:
        """Change one target after the other. Writes audit entries.

        A target that is refused does not stop the others. If Redis does not answer, the remaining
        targets are not changed.

        Raises:
            UnknownLock: no list had one of the locks. Nothing is changed.
        """
        targets = [(self._name_of(each.lock_id), each) for each in wanted.targets]
        outcome = ChangeResult()
        # Each promoted task passes the others, so the last one goes first.
        ordered = targets[::-1] if wanted.action == "promote" else targets
        for number, (name, target) in enumerate(ordered):
            try:
                outcome.done[name] += self._change(wanted, name, target.token, by)
            except Refused as error:
                outcome.refused.append(str(error))
            except BackendError as error:
                left = len(ordered) - number
                outcome.refused.append(f"{error} {left} of {len(ordered)} were left.")
                break
        return outcome

    def _change(self, wanted: ChangeRequest, name: str, token: str, by: Operator) -> int:
        """Change one lock or waiter; return the number of tasks or steps."""
        store = self._store
        match wanted.action:
            case "pause":
                return int(change_lock.pause(store, name, by, seconds=wanted.seconds))
            case "resume":
                return int(store.resume(name, by))
            case "reopen":
                return int(change_lock.reopen(store, name, by))
            case "limit":
                change_lock.set_limit(store, name, wanted.permits, by, seconds=wanted.seconds)
            case "rate":
                change_lock.set_rates(store, name, wanted.rates, by, seconds=wanted.seconds)
            case "promote":
                change_lock.promote(store, name, token, by)
            case "drop":
                return self._drop(name, token, by, wanted.asked_at)
            case _:
                force_release(store, name, token, by)
        return 1

    def _drop(self, name: str, token: str, by: Operator, asked_at: float) -> int:
        def tell(each: Waiting) -> None:
            if not queues_again(each):
                self._effects.tell_dropped(each, by)

        done_for = self._effects.done_for
        if token:
            found = [find_waiter(self._store, name, token)]
            dropped = change_lock.drop(
                self._store, name, found, by, done_for=done_for, dropped=tell
            )
            gone = len(dropped)
        else:
            _refuse_too_many(self._parked(name))
            wanted = Filter(name, exact=True, arrived_by=asked_at or math.inf)
            realm = self._effects.realm
            gone = purge(
                self._store, wanted, by, realm=realm, dropped=tell, done_for=done_for
            ).total
        if not gone:
            msg = f"Nothing was dropped of {name!r}: it has the lock by now, or has ended."
            raise Refused(msg, name)
        return gone


def answer_of(wanted: ChangeRequest, outcome: ChangeResult, untold: int = 0) -> dict[str, Any]:
    """Return the answer to a request that was carried out.

    Args:
        wanted: the request.
        outcome: what was done.
        untold: number of results that could not be stored.
    """
    number = sum(outcome.done.values())
    what = "task" if wanted.action in {"promote", "drop"} else "lock"
    told = f"{_DONE[wanted.action]} {number_of(number, what)}."
    if not number and not outcome.refused:
        told = "Nothing had to be changed."
    if untold:
        told += f" {number_of(untold, 'result')} could not be stored as REVOKED."
    return {
        "done": number,
        "text": told,
        "refused": [visible(each, 5 * SHORT) for each in _first(outcome.refused)],
    }


def _first(refused: Sequence[str]) -> Iterator[str]:
    yield from refused[:SHOWN]
    if len(refused) > SHOWN:
        yield f"and {len(refused) - SHOWN} more"


def _refuse_too_many(total: int) -> None:
    if total > MAX_DROPPED:
        msg = (
            f"{total:,} tasks are parked there, and the page drops at most {MAX_DROPPED:,} at a "
            "time. Use the command: locks purge --lock NAME"
        )
        raise Refused(msg)


def _as_json(target: Target) -> dict[str, str]:
    return {"id": target.lock_id, "token": target.token}


def _holders(number: int) -> str:
    return "this holder" if number == 1 else f"{number} holders"


def _waiter(each: Waiting) -> str:
    task = f"{each.task}[{each.task_id}]" if each.task else "a client"
    return f"{task}: {each.lock}"


_VERBS: Final = {
    "pause": "Pause",
    "resume": "Resume",
    "reopen": "Reopen",
    "limit": "Set the limit of",
    "rate": "Set the rate of",
}

_DONE: Final = {
    "pause": "Paused",
    "resume": "Resumed",
    "reopen": "Reopened",
    "limit": "Set the limit of",
    "rate": "Set the rate of",
    "promote": "Moved to the head of the queue:",
    "drop": "Dropped",
    "release": "Released",
}

_MEANINGS: Final = {
    "pause": "They are granted to no waiter until they are resumed, or until the time has passed. "
    "Present holders keep them.",
    "resume": "They are granted to their waiters again.",
    "reopen": "They are granted to their waiters before the time ends for which a task or client "
    "has closed them. A pause stays.",
    "limit": "It overrides what the tasks declare. Present holders keep their permits.",
    "rate": "It overrides what the tasks declare. Starts that were counted still count.",
}

_THEY_WILL_NOT_RUN: Final = "They will not run. Their results become REVOKED."

_RISK: Final = (
    "They may still be running, and will not be stopped. The next tasks of these locks will run at "
    "the same time. Only a resource that refuses lower fencing tokens is safe."
)

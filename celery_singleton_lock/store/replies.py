"""Converts answers of the scripts to values (pure)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from celery_singleton_lock.core.lock_view import (
    SETTLING,
    Holder,
    LockView,
    Observed,
    RateInForce,
    WaitingGroup,
    WaitsFor,
)
from celery_singleton_lock.core.model import Identity, Preempted, Renewal, Reply, Verdict
from celery_singleton_lock.core.parked_message import Delivery, SweepReply, UntakenMessage
from celery_singleton_lock.core.rate import described
from celery_singleton_lock.errors import BackendError


def text(raw: Any) -> str:
    """Return a reply as text, whether the client decodes replies or not."""
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def identity(answers: Iterable[Any]) -> Identity:
    """Return which servers have answered; an answer is None if its slot moves.

    Raises:
        BackendError: an answer is one.
    """
    markers: list[str | None] = []
    runs: set[str] = set()
    for answer in answers:
        if isinstance(answer, BackendError):
            raise answer
        marker, run = (None, "") if answer is None else map(text, answer)
        markers.append(marker)
        runs.add(run)
    return Identity(tuple(markers), frozenset(runs - {""}))


def seconds(milliseconds: Any) -> float:
    """Return seconds for a reply in milliseconds."""
    return float(milliseconds) / 1000


def holder(token: str, record: str, expires_in: float = 0.0) -> Holder:
    """Return a holder or waiter, given its record as JSON."""
    return holder_of(token, json.loads(record), expires_in)


def holder_of(token: str, rec: Mapping[str, Any], expires_in: float = 0.0) -> Holder:
    """Return a holder or waiter, given its record."""
    return Holder(
        token,
        rec.get("task", ""),
        (rec.get("of") or rec.get("attempt", "")).split("/")[0],
        rec.get("worker", ""),
        rec.get("host", ""),
        int(rec.get("pid") or 0),
        expires_in,
        int(rec.get("fence") or 0),
        state_of(rec),
        seconds(rec.get("since") or 0),
        seconds(rec.get("lease") or 0),
        group=rec.get("group", ""),
        unique=unique_in(rec),
    )


def unique_in(rec: Mapping[str, Any]) -> str:
    """Return the key of a record's unique call; empty if it does not count as sent."""
    unique = rec.get("unique")
    return str(unique[0]) if unique else ""


def state_of(rec: Mapping[str, Any]) -> str:
    """Return the state of a record as users see it."""
    if rec.get("preempted_by"):
        return "preempted"
    if rec.get("delayed"):
        if rec.get("follows"):
            return "following"
        return SETTLING if rec.get("settles") else "delayed"
    return str(rec.get("state", ""))


def entries_in_index(raw: Any) -> list[tuple[str, str]]:
    """Return the lock and token of each message that an entry of the index contains."""
    told = text(raw)
    entries = [told] if "\n" in told else json.loads(told)
    return [(name, token) for name, _, token in (entry.rpartition("\n") for entry in entries)]


def worker_in(raw: Any) -> str:
    """Return the worker of a record."""
    return str(json.loads(text(raw)).get("worker", ""))


def reply(raw: bytes | str) -> Reply:
    """Return the answer of a script with the reply type ``answer``, such as acquire."""
    if raw == _RELEASED:
        return _NOBODY_NEXT
    verdict, fence, left, rank, look, limit, reason, who = text(raw).split("\n", 7)
    next_look = max(0.0, int(look) / 1000)
    token, _, rest = who.partition("\n")
    record, _, why = rest.partition("\n")
    is_closed = reason == _CLOSED
    return Reply(
        _VERDICTS[verdict],
        int(fence),
        int(left) / 1000,
        int(rank),
        next_look,
        holder(token, record, next_look) if record else None,
        int(limit),
        "" if is_closed else why,
        waits_for=_REASONS.get(reason),
        closed=(why or _UNKNOWN) if is_closed else "",
        excess=reason if verdict == Verdict.TOO_COSTLY.value else "",
        lost=reason == _LOST,
    )


_RELEASED: Final = b"released\n0\n0\n0\n0\n1\n\n"
_NOBODY_NEXT: Final = Reply(Verdict.RELEASED)
"""The most frequent answer: no other holder and no waiter."""

_VERDICTS: Final = {verdict.value: verdict for verdict in Verdict}
_CLOSED: Final = "closed"
"""Reason of a lock that is closed for a time. To users it is a pause, which ends by itself."""
_LOST: Final = "lost"
"""Reason of a script that has found no trace of a message."""
_UNKNOWN: Final = "by an unknown caller"
_REASONS: Final = {**{reason.value: reason for reason in WaitsFor}, _CLOSED: WaitsFor.PAUSE}


def renewal(raw: Any) -> Renewal:
    """Return the answer of ``extend`` for one lock."""
    if isinstance(raw, list):
        return Preempted(text(raw[0]))
    return raw == 1 if isinstance(raw, int) else None


def pairs(raw: Sequence[Any]) -> dict[str, str]:
    """Return a list of names and values as a mapping."""
    return dict(zip(map(text, raw[::2]), map(text, raw[1::2]), strict=True))


def observed_block(raw: str) -> Reply:
    """Return what would have blocked a task that runs without its lock."""
    reason = _REASONS.get(json.loads(raw)["waits_for"])
    return Reply(Verdict.BLOCKED, holder=holder("", raw), waits_for=reason)


def observed(buckets: Iterable[Mapping[Any, Any]]) -> tuple[Observed, ...]:
    """Return sums of observations by name, ordered by the time that the lock would have cost."""
    sums: dict[str, dict[str, float]] = {}
    for bucket in buckets:
        for name, raw in bucket.items():
            total = sums.setdefault(text(name), {})
            for what, value in json.loads(raw).items():
                both = (total.get(what, 0), value)
                total[what] = max(both) if what == "longest" else sum(both)
    found = (
        Observed(
            name,
            runs=int(total["runs"]),
            blocked=int(total["blocked"]),
            paused=int(total.get("paused", 0)),
            replaced=int(total.get("replaced", 0)),
            waited=seconds(total["waited"]),
            longest=seconds(total["longest"]),
        )
        for name, total in sums.items()
    )
    return tuple(sorted(found, key=lambda each: (-each.waited, -each.blocked, each.name)))


def delivery(raw: bytes | str) -> Delivery:
    """Return a grant from an inbox."""
    packed = raw.encode() if isinstance(raw, str) else raw
    head, _, body = packed.partition(b"\n")
    fields = json.loads(head)
    return Delivery(
        name=fields["lock"],
        token=fields["token"],
        fencing_token=int(fields["fence"]),
        body=body if fields["whole"] == "1" else None,
        verdict=fields["verdict"],
        waited=seconds(fields["waited"]),
        by=fields.get("by", ""),
        returns=int(fields.get("returns") or 0),
        queue=fields.get("queue") or "",
        excess=fields.get("excess") or "",
        settled=bool(fields.get("settles")),
    )


def untaken_messages(name: str, seal: str, raw: Sequence[Any]) -> list[UntakenMessage]:
    """Return the messages that were taken out of the queue for publishing."""
    return [
        _untaken_message(name, seal, text(raw[i]), json.loads(raw[i + 1]), bytes(raw[i + 2]))
        for i in range(0, len(raw) - 2, 3)
    ]


def swept(name: str, seal: str, raw: Sequence[Any]) -> SweepReply:
    """Return the answer of sweep_and_grant."""
    found = SweepReply(untaken_messages(name, seal, raw))
    if len(raw) % 3:
        found.next_starts[name] = max(0.0, seconds(raw[-1]))
    return found


def _untaken_message(
    name: str, seal: str, token: str, rec: Mapping[str, Any], body: bytes
) -> UntakenMessage:
    attempt, place, task = rec["attempt"], int(rec["place"]), rec.get("task", "")
    return UntakenMessage(name, token, rec["queue"], body, seal, attempt, place, task)


def view(name: str, raw: Sequence[Any]) -> LockView:
    """Return the answer of inspect."""
    now, found, held, queued, waiting, adrift, bodies, reason, till, rates, *more = raw
    closed, why, rates_till, own, groups = more
    meta, ms = pairs(found), float(now)
    paused, limit_set = (_is_in_force(meta, what, ms) for what in ("paused", "ruled"))
    holders = tuple(
        holder(text(held[i]), text(held[i + 2]), seconds(float(held[i + 1]) - ms))
        for i in range(0, len(held), 3)
    )
    return LockView(
        name=name,
        holders=holders,
        waiters=tuple(
            holder(text(queued[i]), text(queued[i + 1])) for i in range(0, len(queued), 2)
        ),
        waiting=int(waiting),
        adrift=int(adrift),
        bodies=int(bodies),
        limit=int((limit_set and meta["ruled"]) or meta.get("limit") or 0),
        fencing_token=int(meta.get("fence", 0)),
        counters=_counters(meta),
        paused=meta["paused"] if paused else "",
        pause_left=_left(meta.get("paused_until") if paused else None, ms),
        limit_set=limit_set,
        limit_left=_left(meta.get("ruled_until") if limit_set else None, ms),
        limit_computed=int(own) == 1,
        waits_for=_REASONS.get(text(reason)),
        next_look=_left(till, ms),
        rates=tuple(map(_rate, json.loads(text(rates) or "[]"))),
        closed_for=_left(closed, ms),
        closed=(text(why) or _UNKNOWN) if float(closed) else "",
        rates_set=text(rates_till) != "",
        rates_left=_left(rates_till, ms),
        groups_waiting=int(groups[0]) if groups else 0,
        groups=_groups(groups[1:], holders),
    )


def _groups(listed: Sequence[Any], holders: Iterable[Holder]) -> tuple[WaitingGroup, ...]:
    held = Counter(each.group for each in holders)
    return tuple(
        WaitingGroup(text(name), int(waiting), held[text(name)], int(at_limit) == 1)
        for name, waiting, at_limit in zip(listed[::3], listed[1::3], listed[2::3], strict=True)
    )


def _is_in_force(meta: Mapping[str, str], what: str, now_ms: float) -> bool:
    """Return whether an operator's value is in force: its time may have ended."""
    return what in meta and float(meta.get(f"{what}_until", now_ms + 1)) > now_ms


def _left(till_ms: Any, now_ms: float) -> float:
    """Return the seconds until a time of the server; 0 if there is none, or if it is past."""
    till = float(till_ms or 0)
    return max(0.0, seconds(till - now_ms)) if till else 0.0


def _rate(listed: Sequence[Any]) -> RateInForce:
    key, number, period_us, burst, started, by_cost, by_operator = listed
    return RateInForce(
        described(number, period_us // 1_000_000, burst),
        number,
        started,
        is_smooth=burst > 0,
        by_cost=bool(by_cost),
        key=key,
        most=burst or number,
        by_operator=bool(by_operator),
    )


def _counters(meta: Mapping[str, str]) -> dict[str, int]:
    return {
        key: int(meta[key])
        for key in ("grants", "lapses", "resets", "forced", "replaced", "preempted", "too_costly")
        if key in meta
    }

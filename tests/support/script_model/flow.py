"""Flow control in the machine: what callers of two locks declare, and when they may start.

The rates in force are read from the keys. What has started is not: it is noted step by step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.rate import Rate, packed
from support.script_model.snapshot import LockState

PACED, FAIR = "paced", "fair"
FLOWS = (PACED, FAIR)
US = 1_000_000
HEAD_STARTS = (0, 5 * US, -3 * US, 0)
GROUPS = (Group("a", limit=1), Group("b", limit=2, weight=2.0), Group("c", weight=0.5))
RATES = (Rate("3/5s"), Rate("6/12s", kind="smooth", burst=4))
RULED = (Rate("1/2s"),)
COSTED = "4/5s"


def head_start_of(lock: str, number: int) -> int:
    """Return the head start of a caller, in microseconds."""
    return HEAD_STARTS[number // 4 % 4] if lock in FLOWS and number % 4 else 0


def flow_of(lock: str, number: int) -> str:
    """Return the flow options of a caller: each fourth has none, as those of older versions."""
    if lock not in FLOWS or number % 4 == 0:
        return ""
    head_start = head_start_of(lock, number)
    rated = number % 4 != 2  # some declare everything else
    if lock == PACED:
        return packed(RATES[: 1 + number // 16 % 2] if rated else (), head_start)
    rates = (Rate(COSTED, cost=1 + number % 2),) if rated else ()
    return packed(rates, head_start, group=GROUPS[number % 3])


@dataclass
class Flow:
    """What is known of a lock's flow control independently of its keys.

    Attributes:
        starts: time in microseconds, cost by the id of each rate that counted it, and token.
        closed: ms until when it is closed.
        paused_until: ms at which the operator's pause ends; likewise for the other two.
        held_back: whether a reservation could not be used in this step.
        granted_again: tokens that have started, and have another grant now. Who parks a message
            has not heard of its start, so that it does not count in a period.
    """

    starts: list[tuple[int, dict[str, int], str]] = field(default_factory=list)
    closed: int = 0
    paused_until: int | None = None
    ruled_until: int | None = None
    rates_ruled: bool = False
    rates_until: int | None = None
    held_back: bool = False
    granted_again: set[str] = field(default_factory=set)
    expired_lines: set[str] = field(default_factory=set)  # groups whose clients died unnoticed


def known_rates(state: LockState, now: int) -> tuple[list[Any], list[Any]]:
    """Return the rates in force, and all that count starts."""
    fields = state.flow.get("", {})
    own = json.loads(fields.get("rates", "[]") or "[]") or []
    ruled = json.loads(fields.get("ruled_rates", "[]"))
    if int(float(fields.get("rates_until", now + 1))) <= now:
        ruled = []
    units = {len(rate) > 4 for rate in ruled}
    beside = [rate for rate in own if (len(rate) > 4) not in units]
    return [*ruled, *beside], [*ruled, *own]


def log_of(rate: list[Any]) -> str:
    """Return where a rate counts: sliding ones without costs have one log."""
    return rate[0] if len(rate) > 4 or rate[3] else "log"


def cost_of(rate: list[Any], rec: dict[str, Any]) -> int:
    return int((rec.get("costs") or {}).get(rate[0], 1)) if len(rate) > 4 else 1


def costs_of(flow: str | None) -> dict[str, int]:
    """Return what a caller with these options declares to cost, by the id of each rate."""
    return {rate[0]: rate[4] for rate in json.loads(flow or "{}").get("rates", []) if rate[4:]}


def unclaimed(state: LockState, now: int) -> Iterator[dict[str, Any]]:
    for token in state.valid(now):
        if state.record[token]["state"] == "granted":
            yield state.record[token]


def opens_at(  # the parts of one question
    flow: Flow,
    rates: list[Any],
    granted: list[dict[str, Any]],
    rec: dict[str, Any] | None,
    now_us: int,
) -> float:
    """Return when a waiter with this record may start by its lock's rates (microseconds).

    Without a record: when no more start than the rates allow.
    """
    opens = float(now_us)
    for rate in rates:
        cost = 0 if rec is None else cost_of(rate, rec)
        opens = max(opens, _opens(flow, rate, granted, cost, now_us))
    return opens


def _opens(flow: Flow, rate: list[Any], granted: Any, cost: int, now_us: int) -> float:
    number, period, burst, key = *rate[1:4], log_of(rate)
    taken = sum(cost_of(rate, rec) for rec in granted)
    starts = [(at, costs[key]) for at, costs, _ in flow.starts if key in costs]
    if burst:
        gap, on_time = math.ceil(period / number), 0
        for at, each in starts:
            on_time = max(at, on_time) + each * gap
        return max(on_time, now_us) + (taken + cost - burst) * gap
    # A token that starts again has not heard that it had started.
    last = {token: (at, costs[key]) for at, costs, token in flow.starts if key in costs}
    last = {token: start for token, start in last.items() if token not in flow.granted_again}
    inside = sorted((at, each) for at, each in last.values() if at > now_us - period)
    over = taken + cost - number + sum(each for _, each in inside)
    opens: float = now_us
    for at, each in inside:
        if over > 0:
            opens, over = at + period, over - each
    return opens if over <= 0 else math.inf


def group_is_full(state: LockState, rec: dict[str, Any], now: int) -> bool:
    most, group = rec.get("group_limit"), rec.get("group", "")
    held = [t for t in state.valid(now) if state.record[t].get("group", "") == group]
    return bool(most) and len(held) >= int(most)

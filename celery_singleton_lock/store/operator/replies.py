"""Converts answers of the scripts for operators to values, and makes audit entries (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.lock_view import SETTLING
from celery_singleton_lock.core.unique import FirstCall
from celery_singleton_lock.message_text import encodable
from celery_singleton_lock.store import replies
from celery_singleton_lock.store.operator.base import Glance, Operator, Waiting

LONGEST_WHY: Final = 500
"""Characters of a reason that are stored."""


def audit_entry(by: Operator, action: str, to: str = "") -> str:
    """Return who does what, as the scripts write it into the audit log."""
    told = {**asdict(by), "action": by.action or action, "to": to, "why": by.why[:LONGEST_WHY]}
    del told["seconds"]  # the script writes when it ends
    return json.dumps({key: encodable(value) for key, value in told.items() if value})


def audited(raw: Any) -> dict[str, Any]:
    """Return an entry of the audit log. If it cannot be read, its action is ``unreadable``."""
    try:
        entry: dict[str, Any] = json.loads(raw)
        texts, numbers = (entry["action"], entry["lock"]), (entry["count"], entry.get("more", 0))
        if all(type(e) is str for e in texts) and all(type(e) is int for e in numbers):
            times = {k: replies.seconds(entry[k]) for k in ("at", *("until",) * ("until" in entry))}
            return {**entry, **times}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    why = f"not an audit entry: {replies.text(raw)!r:.60}"
    return {"at": 0.0, "action": "unreadable", "lock": "", "count": 1, "why": why}


def glances_of(raw: Any) -> list[Glance]:
    """Return the locks in an answer of view/summarise_locks.lua.

    Raises:
        ValueError: a record is not JSON.
    """
    return [
        Glance(each, broken=True) if isinstance(each, str) else _glance(*each)
        for each in json.loads(replies.text(raw))
    ]


def _glance(  # noqa: PLR0917  # in the order of view/summarise_locks.lua
    held: int,
    waiting: int,
    adrift: int,
    bodies: int,
    limit: int,
    paused: float,
    oldest: float,
    rated: int,
    closed: float,
    groups: int,
    aside: int,
    name: str,
    *holders: Any,
) -> Glance:
    shown = tuple(
        replies.holder_of(token, record, left / 1000)
        for token, left, record in zip(holders[::3], holders[1::3], holders[2::3], strict=True)
    )
    return Glance(
        name,
        held,
        waiting,
        adrift,
        bodies,
        limit,
        paused != 0,
        oldest / 1000,
        shown,
        rated=rated == 1,
        grouped=rated == 2,  # noqa: PLR2004  # see held_back() there
        closed_for=closed / 1000,
        paused_for=max(0.0, paused / 1000),
        groups=groups,
        aside=aside,
    )


def waiting_of(  # noqa: PLR0917  # in the order of a page
    lock: str,
    now_ms: float,
    token: Any,
    record: Any,
    size: int,
    message: bytes = b"",
    until: float = 0.0,
) -> Waiting:
    """Return a waiter, given its record; without ``now_ms`` its ages are 0.

    Args:
        lock: name of the lock.
        now_ms: time of the server.
        token: its owner token.
        record: its record.
        size: bytes of its message.
        message: its message, if it was read.
        until: until when it may stay as it is, milliseconds; 0: no limit.
    """
    rec = json.loads(record)
    place, arrived = int(rec.get("place") or 0), int(rec.get("arrived") or 0)
    since = float(rec.get("since") or 0)
    state = replies.state_of(rec)
    return Waiting(
        lock=lock,
        token=replies.text(token),
        state=state,
        task=rec.get("task", ""),
        attempt=rec.get("attempt", ""),
        age=max(0.0, now_ms / 1000 - (arrived or place) / 1_000_000) if now_ms else 0.0,
        since=max(0.0, (now_ms - since) / 1000) if now_ms else 0.0,
        size=size,
        realm=rec.get("realm", ""),
        queue=rec.get("queue", ""),
        worker=rec.get("worker", ""),
        lease=replies.seconds(rec.get("lease") or 0),
        place=place,
        wait=replies.seconds(rec["wait"]) if rec.get("wait") else None,
        copied=bool(rec.get("copied")),
        returns=int(rec.get("returns") or 0),
        message=message,
        arrived=arrived,
        costs=rec.get("costs"),
        group=_group_of(rec),
        refused=rec.get("refused", ""),
        follows=rec["follows"][1] if rec.get("follows") else "",
        unique=replies.unique_in(rec),
        settles_for=max(0.0, (until - now_ms) / 1000) if state == SETTLING else 0.0,
        comes_again=bool(rec.get("offer_every")),
        publish_pause=replies.seconds(rec.get("publish_every") or 0),
    )


def first_calls(lock: str, raw: Sequence[Any]) -> list[FirstCall]:
    """Return the answer of view/list_calls.lua."""
    now, found = raw
    return [
        _first_call(lock, float(now), *found[i : i + _OF_A_CALL])
        for i in range(0, len(found), _OF_A_CALL)
    ]


_OF_A_CALL: Final = 6
"""Values of a call in the reply."""


def _first_call(  # noqa: PLR0917  # in the order of view/list_calls.lua
    lock: str,
    now_ms: float,
    key: Any,
    state: Any,
    task_id: Any,
    left: Any,
    followers: Any,
    record: Any,
) -> FirstCall:
    here = waiting_of(lock, now_ms, "", record, 0) if record else None
    return FirstCall(
        replies.text(key),
        replies.text(task_id),
        here.state if here else replies.text(state),
        age=here.age if here else 0.0,
        expires_in=None if int(left) < 0 else replies.seconds(left),
        followers=int(followers),
    )


def _group_of(rec: Mapping[str, Any]) -> Group | None:
    if "group" not in rec:
        return None
    return Group(rec["group"], rec.get("group_limit"), float(rec.get("group_weight") or 1))

"""Export parked tasks to a file, and import them into this or another Redis."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from celery_singleton_lock.admin.select_parked import LOAD, STEP, Filter, Tally, select, steps
from celery_singleton_lock.core.model import ANOTHER_RUN, Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import Parcel
from celery_singleton_lock.errors import BackendError, ConfigurationError
from celery_singleton_lock.store.operator.base import AdminStore, Operator, Waiting
from celery_singleton_lock.store.script_arguments import limit_of, milliseconds_of

READ: Final = 100
"""Largest number of tasks that are read at a time."""


def export(store: AdminStore, wanted: Filter, by: Operator) -> Iterator[str]:
    """Yield each parked task as a line of JSON, with its message and arguments. Changes no task.

    Args:
        store: the store of the locks.
        wanted: the tasks.
        by: the operator. The audit entry is written before the tasks are read.

    Raises:
        BackendError: Redis did not answer, or refused the command.
    """
    limits: dict[str, int] = {}
    by = replace(by, action="export")
    for group in steps(select(store, wanted), READ):
        lock = group[0].lock
        store.write_audit_entry(lock, by, steps=len(group))
        if lock not in limits:
            limits = {lock: max(1, store.inspect(lock, waiters=0).limit)}
        messages = store.messages(lock, [each.token for each in group])
        for each, message in zip(group, messages, strict=True):
            if message is not None:
                yield json.dumps(_line(each, limits[lock], message))


_FIELDS: Final = ("lock", "token", "task", "attempt", "realm", "queue", "lease", "place", "wait")


def _line(each: Waiting, limit: int, message: bytes) -> dict[str, Any]:
    fields = {name: getattr(each, name) for name in _FIELDS}
    return {**fields, "limit": limit, "message": base64.b64encode(message).decode()}


def restore(
    store: AdminStore,
    lines: Iterable[str],
    by: Operator,
    *,
    realm: str = "",
    again: bool = False,
) -> Tally:
    """Park the tasks of a file that :func:`export` wrote.

    Each task gets its old owner token and its old place in the queue, so that a second import
    changes nothing.

    Args:
        store: the store of the locks.
        lines: the lines of the file.
        by: the operator, for the audit.
        realm: new realm of the messages; empty: each message keeps its own.
        again: give each task a new owner token, so that tasks that were purged or have run are
            parked too. A task that waits or runs now is still skipped.

    Returns:
        The number of parked tasks.

    Raises:
        ConfigurationError: a line is invalid. The tasks of the lines before it are parked.
        BackendError: Redis did not answer, or refused the command.
    """
    tally = Tally()
    by = replace(by, action="import")
    for group in _batches(_parcels(lines, realm, again=again)):
        parked = _park(store, group, tally)
        for name, number in parked.items():
            store.write_audit_entry(name, by, steps=number)
        tally.done.update(parked)
    return tally


def would_restore(lines: Iterable[str]) -> Tally:
    """Return the tasks that :func:`restore` would park if none of them waits, runs or has ended.

    Args:
        lines: the lines of the file.

    Raises:
        ConfigurationError: a line is invalid.
    """
    return Tally(done=Counter(claim.name for _, claim, _ in _parcels(lines, "", again=False)))


def _park(store: AdminStore, group: list[_Parked], tally: Tally) -> Counter[str]:
    """Park a group, and count the parked tasks by lock. Skip those that have ended, wait or run."""
    parked = Counter[str]()
    for (_, claim, _), reply in zip(group, store.park_many(group), strict=True):
        if isinstance(reply, BackendError):
            raise reply
        if reply.verdict in {Verdict.DONE, Verdict.FULL}:
            tally.skipped["has ended already"] += 1
        elif reply.verdict is Verdict.TWIN:
            tally.skipped["waits or runs already"] += 1
        else:
            parked[claim.name] += 1
    return parked


_Parked = tuple[Owner, Claim, Parcel]


def _batches(parcels: Iterator[_Parked]) -> Iterator[list[_Parked]]:
    """Yield tasks in groups bounded in number and bytes. Before an error, yield the last group."""
    group: list[_Parked] = []
    size = 0
    try:
        for each in parcels:
            if group and (len(group) == STEP or size + len(each[2].body) > LOAD):
                yield group
                group, size = [], 0
            group.append(each)
            size += len(each[2].body)
    except ConfigurationError:
        if group:
            yield group
        raise
    if group:
        yield group


def _parcels(lines: Iterable[str], realm: str, *, again: bool) -> Iterator[_Parked]:
    number = 1
    try:
        for number, line in enumerate(lines, 1):  # noqa: B007  # named below
            if line.strip():
                yield _parcel(line, realm, again=again)
    except (ValueError, KeyError, TypeError) as error:
        cause = f"{error}" if isinstance(error, ConfigurationError) else f"{error!r:.80}"
        msg = f"line {number} is not a parked task ({cause}): give a file that export wrote."
        raise ConfigurationError(msg) from None


def _parcel(line: str, realm: str, *, again: bool) -> _Parked:
    """Parse a line.

    Raises:
        ValueError: the line is not JSON, or a value is invalid.
        KeyError: a value is missing.
        TypeError: the line is not a JSON object, or a value has the wrong type.
    """
    given = json.loads(line)
    texts = {name: given[name] for name in _TEXTS}
    if not all(isinstance(each, str) and each.encode() for each in texts.values()):
        msg = f"{', '.join(_TEXTS)} must be texts"
        raise ValueError(msg)
    if not all(type(given[name]) is int for name in ("limit", "place")):
        msg = "limit and place must be whole numbers"
        raise ValueError(msg)
    milliseconds_of("lease", given["lease"])
    claim = Claim(
        given["lock"],
        given["lease"],
        limit_of(given["limit"]),
        given["place"],
        copy=ANOTHER_RUN if again else 0,
    )
    body = base64.b64decode(given["message"], validate=True)
    parcel = Parcel(body, realm or given["realm"], given["queue"], given["wait"])
    token = new_token() if again else given["token"]
    return Owner(token, given["attempt"], given["task"]), claim, parcel


_TEXTS: Final = ("token", "attempt", "task", "lock", "realm", "queue")

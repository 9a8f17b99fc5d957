"""Export parked tasks to a file, and import them into this or another Redis."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, Final, TextIO, TypeVar

from celery_singleton_lock.admin.force_release import Refused
from celery_singleton_lock.admin.select_parked import LOAD, STEP, Filter, Tally, select, steps
from celery_singleton_lock.admin.sweep import requeue_expired
from celery_singleton_lock.core.fair_group import LEAST_WEIGHT, MOST_WEIGHT, Group, group_name
from celery_singleton_lock.core.model import Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import base_of, token_on
from celery_singleton_lock.core.parked_message import MessageToPark, ParkedMessage
from celery_singleton_lock.core.rate import BY_COST, packed, parsed, rates_of
from celery_singleton_lock.core.record_state import TO_END, RecordState
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
    by = replace(by, action="export")
    requeue_expired(store)
    began = int(store.time() * 1000)
    for group in steps(select(store, wanted), READ):
        store.write_audit_entry(group[0].lock, by, steps=len(group))
        yield from _lines_of(store, group, began).values()


def _lines_of(store: AdminStore, group: list[Waiting], exported: int) -> dict[str, str]:
    """Return owner token -> line, for each task of a group of one lock that has a message."""
    lock = group[0].lock
    view = store.inspect(lock, waiters=0)
    rates = [f"{rate.rate}{BY_COST if rate.by_cost else ''}" for rate in view.rates]
    of_lock = {"limit": max(1, view.limit), "rates": rates}
    messages = store.messages(lock, [each.token for each in group])
    return {
        each.token: json.dumps(_line(each, of_lock, message, exported))
        for each, message in zip(group, messages, strict=True)
        if message is not None
    }


class PurgedFile:
    """Writes purged tasks, and no others, to a file as :func:`export` does.

    A task is written before it is dropped. If it was not dropped, it is removed from the file.

    Args:
        store: the store of the locks.
        file: the file; it can seek.
    """

    def __init__(self, store: AdminStore, file: TextIO) -> None:
        self._store = store
        self._file = file
        self._exported = int(store.time() * 1000)
        self._lines: dict[str, str] = {}
        self._start = 0

    def before(self, group: list[Waiting]) -> None:
        """Write tasks of one lock that are about to be dropped."""
        self._start = self._file.tell()
        self._lines = _lines_of(self._store, group, self._exported)
        self._write(self._lines.values())

    def after(self, dropped: Iterable[Waiting]) -> None:
        """Remove from the file the tasks that were not dropped."""
        kept = [self._lines[each.token] for each in dropped if each.token in self._lines]
        if len(kept) < len(self._lines):
            self._file.seek(self._start)
            self._file.truncate()
            self._write(kept)

    def _write(self, lines: Iterable[str]) -> None:
        self._file.writelines(f"{line}\n" for line in lines)
        self._file.flush()


_FIELDS: Final = ("lock", "token", "task", "attempt", "realm", "queue", "lease", "place", "wait")


def _line(
    each: Waiting, of_lock: Mapping[str, Any], message: bytes, exported: int
) -> dict[str, Any]:
    fields = {name: getattr(each, name) for name in _FIELDS}
    if each.arrived:
        fields["arrived"] = each.arrived
    if each.costs:
        fields["costs"] = each.costs
    if each.group:
        fields["group"] = list(each.group)
    encoded = base64.b64encode(message).decode()
    return {**fields, **of_lock, "exported": exported, "message": encoded}


def refuse_drained(store: AdminStore, lines: Iterable[str], *, realm: str = "") -> None:
    """Raise if a task of a file may have been drained since its export: it would run twice.

    Changes nothing. Lines after an invalid one are not checked, since :func:`restore` ends there.

    Args:
        store: the store of the locks.
        lines: the lines of the file. They are not read if no drain is on record.
        realm: new realm of the messages, as of :func:`restore`.

    Raises:
        Refused: messages of the queue of a task were drained after its export, or at a time that
            cannot be compared, because the file has none.
        BackendError: Redis did not answer, or refused the command.
    """
    drains = store.drains()
    number, latest = 0, 0.0
    with suppress(ConfigurationError):
        for given in _parsed(lines, _fields) if drains else ():
            drained = _last_drain(drains, given, realm)
            # The export stores whole milliseconds, as the drain does: equal times have no order.
            if drained and given.get("exported", 0) <= drained * 1000:
                number, latest = number + 1, max(latest, drained)
    if number:
        when = datetime.fromtimestamp(latest, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        msg = (
            f"{number:,} task{'s' * (number > 1)} of this file may have been sent back to the "
            "broker, and have run: their queues were drained after the export (or the file does "
            f"not tell when it was exported), last on {when}. Nothing was parked. To park them, so "
            "that they may run twice: --force"
        )
        raise Refused(msg)


def _last_drain(drains: Mapping[str, float], given: Mapping[str, Any], realm: str) -> float:
    """Return when the queue of a task was drained; 0 if never. It may have been adopted before."""
    routes = (f"{each}:{given['queue']}" for each in (given["realm"], realm))
    return max(drains.get(route, 0.0) for route in routes)


def restore(
    store: AdminStore,
    lines: Iterable[str],
    by: Operator,
    *,
    realm: str = "",
    again: bool = False,
) -> Tally:
    """Park the tasks of a file that :func:`export` wrote.

    Each task gets its old place in the queue, and is recognised by the base of its old owner token,
    so that a second import changes nothing. If a new realm is given, a task that waits with another
    realm gets the new one. A task whose broker has live workers is not changed.

    Args:
        store: the store of the locks.
        lines: the lines of the file.
        by: the operator, for the audit; ``by.action`` is ``import`` if it is empty.
        realm: new realm of the messages; empty: each message keeps its own.
        again: also park tasks that were purged or dropped. Tasks that have run are still skipped.

    Returns:
        The number of parked tasks.

    Raises:
        ConfigurationError: a line is invalid. The tasks of the lines before it are parked.
        BackendError: Redis did not answer, or refused the command. The text says how many tasks
            were parked before.
    """
    tally = Tally()
    by = replace(by, action=by.action or "import")
    try:
        served = served_realms(store, realm)
        for group in _batches(_parsed(lines, lambda line: _message_to_park(_fields(line)))):
            rest = _adopt(store, group, realm, served, by, tally) if realm else group
            if again:
                rest = _allow_again(store, rest)
            _park(store, rest, by, tally)
    except BackendError as error:
        msg = (
            f"{error} {tally.total:,} tasks of the file were parked before. Import it again when "
            "Redis takes them: no task is parked twice"
        )
        raise type(error)(msg) from error
    return tally


def would_restore(lines: Iterable[str], served: Collection[str] = ()) -> Tally:
    """Return the tasks that :func:`restore` would park if none of them waits, runs or has ended.

    Args:
        lines: the lines of the file.
        served: realms whose tasks are not changed; see :func:`served_realms`.

    Raises:
        ConfigurationError: a line is invalid.
    """
    tally = Tally()
    for _, claim, message in _parsed(lines, lambda line: _message_to_park(_fields(line))):
        if message.realm in served:
            tally.skipped[SERVED] += 1
        else:
            tally.done[claim.name] += 1
    return tally


ENDED: Final = "has ended already"
"""Why a task is not parked."""

SERVED: Final = "of another broker, which has live workers"
"""Why a task is not assigned to the app's broker."""


def served_realms(store: AdminStore, realm: str) -> frozenset[str]:
    """Return the realms of the other brokers that have live workers.

    Args:
        store: the store of the locks.
        realm: the new realm of an import; empty: there is none, so none is returned.
    """
    found = {about["realm"] for about in store.workers().values()} if realm else set()
    return frozenset(found - {realm})


def _adopt(  # noqa: PLR0917  # a step of restore()
    store: AdminStore,
    group: list[_Parked],
    realm: str,
    served: frozenset[str],
    by: Operator,
    tally: Tally,
) -> list[_Parked]:
    """Assign waiting tasks of a group to another broker. Return the others, with the new realm."""
    waiting: dict[str, list[str]] = {}
    rest: list[_Parked] = []
    for owner, claim, message in group:
        found = store.locate_token(claim.name, owner.token).waiting
        now = (found.realm if found else "") or message.realm
        if now != realm and now in served:
            tally.skipped[SERVED] += 1
            continue
        rest.append((owner, claim, replace(message, realm=realm)))
        if found and found.realm != realm and found.state in _NOT_BEGUN:
            waiting.setdefault(claim.name, []).append(owner.token)
    adopted = {
        (name, token)
        for name, tokens in waiting.items()
        for token in store.adopt_messages(name, tokens, realm, by)
    }
    tally.done.update(name for name, _ in adopted)
    return [each for each in rest if (each[1].name, each[0].token) not in adopted]


_NOT_BEGUN: Final = TO_END | {
    RecordState.PARKED,
    RecordState.ADRIFT,
    RecordState.DELAYED,
    RecordState.SETTLING,
    RecordState.FOLLOWING,
}
"""States in which a worker of its broker has to run or end a task, and none has it."""


def _allow_again(store: AdminStore, group: list[_Parked]) -> list[_Parked]:
    """Forget that tasks were dropped. If this process ends now, the next import parks them.

    A worker may still have an earlier delivery of such a task, so each gets another token.
    """
    owners: dict[str, list[tuple[str, str]]] = {}
    for owner, claim, _ in group:
        owners.setdefault(claim.name, []).append((owner.token, owner.attempt))
    for name, dropped in owners.items():
        store.forget_drops(name, dropped)
    return [
        (owner._replace(token=token_on(base_of(owner.token))), claim, message)
        for owner, claim, message in group
    ]


def _park(store: AdminStore, group: list[_Parked], by: Operator, tally: Tally) -> None:
    """Park a group, and count its tasks. Skip those that have ended, wait or run.

    Raises:
        BackendError: Redis refused a task. The others of the group are parked, and counted.
    """
    parked, refused, here = Counter[str](), list[BackendError](), list[str]()
    messages = [_message_of(owner, claim) for owner, claim, _ in group]
    before = list(zip(store.has_messages(messages), store.has_traces(messages), strict=True))
    replies, after = store.park_many(group), store.has_messages(messages)
    for (owner, claim, _), (was_stored, was_known), is_stored, reply in zip(
        group, before, after, replies, strict=True
    ):
        # A task that waits or runs under its old token answers WAITING too. The message of a
        # running one may have been deleted; so may that of a new one, which has begun since.
        is_new = not was_stored and (is_stored or not was_known)
        if isinstance(reply, BackendError):
            refused.append(reply)
            continue
        here.append(_message_of(owner, claim).task_id)
        if reply.verdict in {Verdict.DONE, Verdict.FULL}:
            tally.skipped[ENDED] += 1
        elif not is_new or reply.verdict is Verdict.TWIN:
            tally.skipped["waits or runs already"] += 1
        else:
            parked[claim.name] += 1
    store.forget_losses(here)
    tally.done.update(parked)
    for name, number in parked.items():
        store.write_audit_entry(name, by, steps=number)
    for error in refused:
        raise error


def _message_of(owner: Owner, claim: Claim) -> ParkedMessage:
    return ParkedMessage(claim.name, owner.token, owner.task, owner.attempt.rsplit("/", 2)[0])


_Parked = tuple[Owner, Claim, MessageToPark]


def _batches(messages: Iterator[_Parked]) -> Iterator[list[_Parked]]:
    """Yield tasks in groups bounded in number and bytes. Before an error, yield the last group."""
    group: list[_Parked] = []
    size = 0
    try:
        for each in messages:
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


_Parsed = TypeVar("_Parsed")


def _parsed(lines: Iterable[str], parse: Callable[[str], _Parsed]) -> Iterator[_Parsed]:
    number = 1
    try:
        for number, line in enumerate(lines, 1):  # noqa: B007  # named below
            if line.strip():
                yield parse(line)
    except (ValueError, KeyError, TypeError) as error:
        cause = f"{error}" if isinstance(error, ConfigurationError) else f"{error!r:.80}"
        msg = f"line {number} is not a parked task ({cause}): give a file that export wrote."
        raise ConfigurationError(msg) from None


def _fields(line: str) -> dict[str, Any]:
    """Parse a line. The lease and the message are not checked.

    Raises:
        ValueError: the line is not JSON, or a value is invalid.
        KeyError: a value is missing.
        TypeError: the line is not a JSON object, or a value has the wrong type.
    """
    given: dict[str, Any] = json.loads(line)
    texts = {name: given[name] for name in _TEXTS}
    if not all(isinstance(each, str) and each.encode() for each in texts.values()):
        msg = f"{', '.join(_TEXTS)} must be texts"
        raise ValueError(msg)
    # Old files have no time of export. Without priority there is no arrival.
    optional = (given.get("exported", 0), given.get("arrived", 0))
    if not all(type(each) is int for each in (given["limit"], given["place"], *optional)):
        msg = "limit, place, arrived and exported must be whole numbers"
        raise ValueError(msg)
    return given


def _group_in(given: Mapping[str, Any]) -> Group | None:
    """Return the group in the fields of a line; None if its task has none.

    Raises:
        ValueError: it is not a group.
    """
    if given.get("group") is None:
        return None
    name, limit, weight = given["group"]
    is_name = isinstance(name, str) and name and group_name(name) == name
    has_limit = limit is None or (type(limit) is int and limit >= 1)
    has_weight = type(weight) in {int, float} and LEAST_WEIGHT <= weight <= MOST_WEIGHT
    if not (is_name and has_limit and has_weight):
        msg = "group must be a list of its name, limit and weight"
        raise ValueError(msg)
    return Group(name, limit, float(weight))


def _message_to_park(given: Mapping[str, Any]) -> _Parked:
    """Convert the fields of a line.

    Raises:
        ValueError: a value is invalid.
        KeyError: a value is missing.
        TypeError: a value has the wrong type.
    """
    milliseconds_of("lease", given["lease"])
    arrived = given.get("arrived") or given["place"]
    costs = given.get("costs") or {}
    rates = rates_of([parsed(str(text)) for text in given.get("rates", ())] or None)
    rates = tuple(each.costing(costs[each.key]) if each.key in costs else each for each in rates)
    flow = packed(rates, arrived - given["place"], group=_group_in(given))
    limit = limit_of(given["limit"])
    claim = Claim(given["lock"], given["lease"], limit, arrived, flow=flow)
    body = base64.b64decode(given["message"], validate=True)
    message = MessageToPark(body, given["realm"], given["queue"], given["wait"])
    return Owner(given["token"], given["attempt"], given["task"]), claim, message


_TEXTS: Final = ("token", "attempt", "task", "lock", "realm", "queue")

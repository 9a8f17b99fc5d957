"""Commands that set how a lock is granted: pause, resume, reopen, limit, rate.

Each takes the name of one lock, or ``--match`` for all locks that exist now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click

from celery_singleton_lock.admin import change_lock
from celery_singleton_lock.admin.change_lock import UnknownName
from celery_singleton_lock.admin.force_release import Refused
from celery_singleton_lock.admin.why_sentences import seconds as shown_seconds
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.change_commands import done
from celery_singleton_lock.cli.options import (
    agreed,
    as_json,
    dry,
    for_a_time,
    matching,
    reason,
)
from celery_singleton_lock.cli.target import Target, with_target
from celery_singleton_lock.config.limits import MAX_COUNT, NO_LIMIT
from celery_singleton_lock.core.rate import SLIDING, SMOOTH, Rate, rates_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import number_of, printable
from celery_singleton_lock.store.operator.base import Operator

SHOWN: Final = 20
"""Most names of locks that a question lists."""

Command = Callable[..., Any]


def _of_one_or_many(what: str, *, unknown: bool = True) -> Callable[[Command], Command]:
    """Add the arguments and options of these commands; ``unknown``: they accept unknown names."""
    forced = click.option("--force", is_flag=True, help="Accept a name that no known lock has.")

    def add(command: Command) -> Command:
        for option in (
            click.argument("words", nargs=-1, metavar=what),
            matching,
            *([forced] if unknown else []),
            reason,
            agreed,
            dry,
            as_json,
        ):
            command = option(command)
        return command

    return add


@click.command()
@_of_one_or_many("[NAME]")
@for_a_time
@with_target
def pause(target: Target, words: tuple[str, ...], seconds: float | None, **how: Any) -> None:
    """Stop granting a lock until it is resumed, or for a time. Present holders keep it."""
    names = _names(target, words, how, "Pause")

    def change(name: str, by: Operator) -> str:
        new = change_lock.pause(target.store, name, by, force=how["force"], seconds=seconds)
        return f"Paused{_for(seconds)}." if new else ""

    sets = ("", seconds)
    _change(target, names, change, "pause", "It was already paused.", how, sets)


@click.command()
@_of_one_or_many("[NAME]", unknown=False)
@with_target
def resume(target: Target, words: tuple[str, ...], **how: Any) -> None:
    """Grant a lock again after a pause."""
    names = _names(target, words, how, "Resume")

    def change(name: str, by: Operator) -> str:
        return "Resumed." if change_lock.resume(target.store, name, by) else ""

    _change(target, names, change, "resume", "It was not paused.", how)


@click.command()
@_of_one_or_many("[NAME]", unknown=False)
@with_target
def reopen(target: Target, words: tuple[str, ...], **how: Any) -> None:
    """Grant a lock again before the end of the time for which a task has closed it."""
    names = _names(target, words, how, "Reopen")

    def change(name: str, by: Operator) -> str:
        return "Reopened." if change_lock.reopen(target.store, name, by) else ""

    _change(target, names, change, "reopen", "It was not closed.", how)


@click.command()
@_of_one_or_many("[NAME] [PERMITS]")
@click.option("--clear", is_flag=True, help="Return to the limit that the tasks declare.")
@for_a_time
@with_target
def limit(target: Target, words: tuple[str, ...], seconds: float | None, **how: Any) -> None:
    """Set the number of PERMITS of a lock, for ever or for a time, whatever its tasks declare."""
    named, values = _split(words, how)
    permits = _permits(values) if not how["clear"] else None
    _refuse_both(how["clear"], values, seconds, "a number of permits")
    names = _names(target, named, how, "Set the limit of")

    def change(name: str, by: Operator) -> str:
        store, force = target.store, how["force"]
        now = change_lock.set_limit(store, name, permits, by, force=force, seconds=seconds)
        told = "none" if now == NO_LIMIT else now
        return f"The limit is {told}{_for(seconds)}."

    _change(target, names, change, "limit", "", how, (str(permits or ""), seconds))


@click.command()
@_of_one_or_many("[NAME] [RATE…]")
@click.option("--clear", is_flag=True, help="Return to the rates that the tasks declare.")
@click.option("--burst", type=int, help="Space the starts evenly; so many may come at once.")
@click.option("--by-cost", is_flag=True, help="Count the costs of starts, as a Rate with a cost.")
@for_a_time
@with_target
def rate(
    target: Target, words: tuple[str, ...], seconds: float | None, burst: int | None, **how: Any
) -> None:
    """Set the RATE of a lock, such as 100/m, for ever or for a time, whatever its tasks declare.

    It replaces the rates that count starts. With --by-cost it replaces those that count costs.
    """
    named, values = _split(words, how)
    _refuse_both(how["clear"], values, seconds, "a rate, such as 100/m")
    rates = _rates(values, burst, by_cost=how["by_cost"])
    names = _names(target, named, how, "Set the rate of")

    shown = ", ".join(map(str, rates))

    def change(name: str, by: Operator) -> str:
        change_lock.set_rates(target.store, name, rates, by, force=how["force"], seconds=seconds)
        return f"The rate is {shown or 'as its tasks declare'}{_for(seconds)}."

    _change(target, names, change, "rate", "", how, (shown, seconds))


# --- the arguments --------------------------------------------------------------------------------


def _split(words: tuple[str, ...], how: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the name (none with --match), and the values that follow it."""
    at = 0 if how["match"] else 1
    return words[:at], words[at:]


def _refuse_both(clear: bool, values: Sequence[str], seconds: float | None, what: str) -> None:
    if clear == bool(values):
        msg = f"give {what}, or --clear"
        raise click.UsageError(msg)
    if clear and seconds is not None:
        msg = "--clear ends what is set now, so --for has no effect. Leave one of the two out"
        raise click.UsageError(msg)


def _permits(values: Sequence[str]) -> int | None:
    if not values:
        return None
    if len(values) > 1:
        msg = f"give one number of permits, not {' '.join(values)}"
        raise click.UsageError(msg)
    permits: Any = click.IntRange(1, MAX_COUNT)(values[0])
    return int(permits)


def _rates(values: Sequence[str], burst: int | None, *, by_cost: bool) -> tuple[Rate, ...]:
    kind, cost = SLIDING if burst is None else SMOOTH, 1 if by_cost else None
    try:
        return rates_of([Rate(each, kind=kind, burst=burst, cost=cost) for each in values] or None)
    except ConfigurationError as error:
        raise click.UsageError(str(error).removesuffix(".")) from None


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {shown_seconds(seconds)}"


def _names(
    target: Target, named: tuple[str, ...], how: dict[str, Any], verb: str
) -> Sequence[str] | None:
    """Return the locks to change; None if nothing is to be changed."""
    pattern = how["match"]
    if bool(pattern) == bool(named) or len(named) > 1:
        msg = "give the name of one lock, or --match"
        raise click.UsageError(msg)
    if not pattern and not how["dry_run"]:
        return named
    names = named or change_lock.names_matching(target.store, pattern)
    told = number_of(len(names), "lock")
    if how["dry_run"]:
        _tell(names, f"{told} would be changed", how["machine"])
        return None
    if not names:
        msg = f"no lock has a name with {pattern!r}. See list --idle"
        raise Refused(msg)
    if not how["yes"]:
        _tell(names, f"{told} in all", machine=False)
        render.ask(f"{verb} {'these' if len(names) > 1 else 'this'} {told}?")
    return names


def _tell(names: Sequence[str], total: str, machine: bool) -> None:
    if machine:
        return render.as_json({"locks": list(names), "total": len(names)})
    for name in names[:SHOWN]:
        render.say(printable(name, render.WIDEST), err=True)
    if len(names) > SHOWN:
        render.say(f"… and {len(names) - SHOWN:,} more", err=True)
    return render.say(total, err=True)


# --- the change -----------------------------------------------------------------------------------


def _change(  # noqa: PLR0917  # the parts of one command
    target: Target,
    names: Sequence[str] | None,
    change: Callable[[str, Operator], str],
    action: str,
    unchanged: str,
    how: dict[str, Any],
    sets: tuple[str, float | None] = ("", None),
) -> None:
    """Change the locks. One lock that was selected by its name prints its state after that."""
    if names is None:
        return None
    by = target.operator(why=how["why_text"]).sets(*sets)
    if not how["match"]:
        with _hint_for_unknown(names[0], action):
            told = change(names[0], by)
        text = told or unchanged
        return done(target, by, how["machine"], action, names[0], text, changed=bool(told))
    changed = _changed_of(names, change, by)
    target.announce(by, changed, action)
    if how["machine"]:
        return render.as_json({"action": action, "locks": sorted(changed)})
    return render.say(f"{number_of(len(changed), 'lock')} changed.")


def _changed_of(
    names: Sequence[str], change: Callable[[str, Operator], str], by: Operator
) -> dict[str, int]:
    """Change each lock that is still known."""
    changed = {}
    for name in names:
        try:
            if change(name, by):
                changed[name] = 1
        except UnknownName:
            continue
    return changed


@contextmanager
def _hint_for_unknown(name: str, step: str) -> Iterator[None]:
    """Add to the error how to force a name that no known lock has."""
    try:
        yield
    except UnknownName as error:
        if step in {"resume", "reopen"}:
            raise
        what = {"rate": "set the rate of"}.get(step, step)
        msg = f"{error} See list --idle. To {what} it before its first use: --force"
        raise Refused(msg, name) from None

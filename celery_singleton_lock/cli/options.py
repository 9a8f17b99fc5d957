"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import click

from celery_singleton_lock.admin.multi_lock_views import WAITS
from celery_singleton_lock.admin.select_parked import Filter
from celery_singleton_lock.core.duration import seconds_of, time_in_force
from celery_singleton_lock.errors import ConfigurationError

Command = Callable[..., Any]

STATES: Final = WAITS - {"waiting"}
"""States of parked tasks."""

LONG: Final = 1000
"""Largest length of a command's summary in characters. click's default is one line."""


class Commands(click.Group):
    """A command group whose help shows the whole first sentence of each command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the name and the summary of each command."""
        rows = [
            (name, self.commands[name].get_short_help_str(LONG)) for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class FiniteRange(click.FloatRange):
    """A number in a range. click's FloatRange accepts ``nan`` in each range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number. Fail if it is not a finite number in the range."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def duration(text: str) -> float:
    """Parse a duration such as ``90``, ``10m``, ``2h`` or ``3d``, and return it in seconds.

    Raises:
        click.BadParameter: the text is not a duration.
    """
    return _checked(seconds_of, text)


def _time_in_force(text: str) -> float:
    return _checked(time_in_force, text)


def _checked(parse: Callable[[str], float], text: str) -> float:
    try:
        return parse(text)
    except ConfigurationError as error:
        raise click.BadParameter(str(error).removesuffix(".")) from None


as_json: Final = click.option("--json", "machine", is_flag=True, help="Print one JSON document.")
dry: Final = click.option("--dry-run", is_flag=True, help="Count the tasks, and change nothing.")
agreed: Final = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
reason: Final = click.option("--why", "why_text", default="", help="Reason, for the audit.")
lock_name: Final = click.argument("name")
for_a_time: Final = click.option(
    "--for",
    "seconds",
    type=_time_in_force,
    metavar="TIME",
    help="Time after which it ends by itself: 90, 10m, 2h, 3d.",
)
matching: Final = click.option(
    "--match", default="", help="All locks that exist now whose name has this part (*?[: pattern)."
)


def filters(command: Command) -> Command:
    """Add the options that select parked tasks to a command; see :func:`chosen`."""
    for option in (
        click.option("--lock", help="Whole name of a lock."),
        click.option("--match", help="Part of a lock's name, or a pattern (*?[)."),
        click.option("--task", help="Name of the task, or a pattern."),
        click.option(
            "--older-than",
            "older",
            type=duration,
            default="0",
            metavar="AGE",
            help="Least time that the task has waited: 90, 10m, 2h, 3d.",
        ),
        click.option("--queue", help="Broker queue from which the task came."),
        click.option("--state", type=click.Choice(sorted(STATES)), help="State of the task."),
        click.option("--all", "everything", is_flag=True, help="All parked tasks."),
    ):
        command = option(command)
    return command


def chosen(options: dict[str, Any]) -> Filter:
    """Remove the filter options from ``options``, and return them as a filter.

    Raises:
        click.UsageError: no filter is given, or both --lock and --match.
    """
    for name in ("lock", "match", "task", "queue"):
        if options[name] == "":
            # Such as a variable of a shell that is not set: it must not select more tasks.
            msg = f"--{name} is empty: leave it out, or give a name"
            raise click.UsageError(msg)
        options[name] = options[name] or ""
    lock, match = options.pop("lock"), options.pop("match")
    rest = {name: options.pop(name) for name in ("task", "older", "queue", "state")}
    rest["state"] = rest["state"] or ""
    everything = options.pop("everything")
    if lock and match:
        msg = "give --lock or --match, not both"
        raise click.UsageError(msg)
    if not (lock or match or any(rest.values()) or everything):
        msg = "select the tasks: --lock, --match, --task, --older-than, --queue, --state, or --all"
        raise click.UsageError(msg)
    return Filter(lock=lock or match, exact=bool(lock), **rest)

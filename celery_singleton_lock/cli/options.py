"""Options that several commands take."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import click

from celery_singleton_lock.admin.bulk_parked import Filter

Command = Callable[..., Any]

LONG: Final = 1000
"""Characters of a summary; click would cut it where the line ends."""


class Commands(click.Group):
    """A group of which the help shows each command's first sentence, wrapped and not cut."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of the commands, and what each does."""
        rows = [
            (name, self.commands[name].get_short_help_str(LONG)) for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration(text: str) -> float:
    """Return seconds, of a number with or without a unit: ``90``, ``10m``, ``2h``, ``3d``.

    Raises:
        click.BadParameter: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        msg = f"{text!r}: write 90, 10m, 2h or 3d"
        raise click.BadParameter(msg)
    return float(match[1]) * _UNITS[match[2]]


as_json = click.option("--json", "machine", is_flag=True, help="One document of JSON.")
dry = click.option("--dry-run", is_flag=True, help="Count what would be done, and do nothing.")
agreed = click.option("--yes", is_flag=True, help="Do not ask.")
reason = click.option("--why", "why_text", default="", help="Reason, for the audit.")
lock_name = click.argument("name")


def filters(command: Command) -> Command:
    """Give a command the options by which parked tasks are chosen, as one :class:`Filter`."""
    for option in (
        click.option("--lock", default="", help="Whole name of a lock."),
        click.option("--match", default="", help="Part of a lock's name, or a pattern (*?[)."),
        click.option("--task", default="", help="Name of the task, or a pattern."),
        click.option(
            "--older-than",
            "older",
            type=duration,
            default="0",
            metavar="AGE",
            help="90, 10m, 2h, 3d.",
        ),
        click.option("--queue", default="", help="Queue from which it came."),
        click.option("--state", default="", help="parked, adrift, overdue, replaced or revoked."),
        click.option("--all", "everything", is_flag=True, help="All that is parked."),
    ):
        command = option(command)
    return command


def chosen(options: dict[str, Any]) -> Filter:
    """Return the filter of these options, and take them out.

    Raises:
        click.UsageError: none is given, which could be a slip.
    """
    lock, match = options.pop("lock"), options.pop("match")
    rest = {name: options.pop(name) for name in ("task", "older", "queue", "state")}
    everything = options.pop("everything")
    if lock and match:
        msg = "give --lock or --match, not both"
        raise click.UsageError(msg)
    if not (lock or match or any(rest.values()) or everything):
        msg = "say which: --lock, --match, --task, --older-than, --queue, --state, or --all"
        raise click.UsageError(msg)
    return Filter(lock=lock or match, exact=bool(lock), **rest)

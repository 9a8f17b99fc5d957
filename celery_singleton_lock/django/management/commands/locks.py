"""``manage.py locks …``: the commands of ``celery -A app locks``, for the project's Celery app."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any, Final

import click
from celery import Celery, _state
from celery.app.utils import find_app
from django.core.management.base import BaseCommand, CommandError

from celery_singleton_lock.cli import locks
from celery_singleton_lock.cli.options import Commands

_HANDLED: Final = ("--settings", "--pythonpath")
"""Options that manage.py itself has read before it comes here."""


def _chosen_app(app: str | None) -> Celery:
    """Return the app that is named, or the one that the project has made."""
    if app:
        try:
            return find_app(app)
        except (ImportError, AttributeError) as error:
            msg = f"--app {app}: {error}"
            raise click.UsageError(msg) from error
    current = _state.get_current_app()
    if current.main == "default" and current is _state.default_app:
        msg = (
            "the project has made no Celery app by now: import it in the project's __init__.py "
            "(from .celery import app), or name it: manage.py locks --app PROJECT …"
        )
        raise click.UsageError(msg)
    return current


def _group() -> click.Group:
    """Return the group of commands, with the options of manage.py before them."""

    def remember(context: click.Context, _: Any, app: str | None) -> None:
        context.obj = SimpleNamespace(app=None if context.resilient_parsing else _chosen_app(app))

    about = "The Celery app, as celery -A takes it; the one that the project has made, if left out."
    params: list[click.Parameter] = [
        click.Option(["-A", "--app"], expose_value=False, callback=remember, help=about),
        *(click.Option([name], expose_value=False, help="As manage.py's.") for name in _HANDLED),
    ]
    return Commands(
        "locks",
        commands=locks.commands,
        params=params,
        help=locks.help,
        context_settings=locks.context_settings,
    )


class Command(BaseCommand):
    """Hand all arguments to the commands of ``celery -A app locks``; their exit status counts."""

    help = "See and mend the locks of this project's tasks: manage.py locks --help."
    requires_system_checks: tuple[str, ...] = ()  # it has to work where something is wrong

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as the program manage.py does."""
        sys.exit(_group().main(argv[2:], prog_name=f"{argv[0]} {argv[1]}"))

    def add_arguments(self, parser: Any) -> None:
        """Take whatever comes, for ``call_command("locks", "list", "--json")``."""
        parser.add_argument("args", nargs="...")

    def handle(self, *args: str, **options: Any) -> None:
        """Run as ``call_command`` does.

        Raises:
            CommandError: it was not done; its ``returncode`` is the exit status.
        """
        out = options.get("stdout") or sys.stdout
        with contextlib.redirect_stdout(out):
            try:
                status = _group().main(list(args), prog_name="locks", standalone_mode=False)
            except click.ClickException as error:
                raise CommandError(error.format_message(), returncode=error.exit_code) from error
            except click.Abort as error:
                msg = "aborted"
                raise CommandError(msg) from error
        if isinstance(status, int) and status:
            msg = f"locks ended with status {status}"
            raise CommandError(msg, returncode=status)

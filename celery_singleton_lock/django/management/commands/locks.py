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
"""Options that manage.py has already read."""


def _chosen_app(app: str | None) -> Celery:
    """Return the named app, or the app that the project has created."""
    if app:
        try:
            return find_app(app)
        except (ImportError, AttributeError) as error:
            msg = f"--app {app}: {error}"
            raise click.UsageError(msg) from error
    current = _state.get_current_app()
    if current.main == "default" and current is _state.default_app:
        msg = (
            "the project has not created a Celery app: import it in the project's __init__.py "
            "(from .celery import app), or name it: manage.py locks --app PROJECT …"
        )
        raise click.UsageError(msg)
    return current


def _group() -> click.Group:
    """Return the commands, with the options of manage.py."""

    def remember(context: click.Context, _: Any, app: str | None) -> None:
        context.obj = SimpleNamespace(app=None if context.resilient_parsing else _chosen_app(app))

    about = "The Celery app, as for celery -A. Default: the app that the project has created."
    params: list[click.Parameter] = [
        click.Option(["-A", "--app"], expose_value=False, callback=remember, help=about),
        *(click.Option([name], expose_value=False, help="See manage.py.") for name in _HANDLED),
    ]
    return Commands(
        "locks",
        commands=locks.commands,
        params=params,
        help=locks.help,
        context_settings=locks.context_settings,
    )


class Command(BaseCommand):
    """Runs the commands of ``celery -A app locks``, with their exit status."""

    help = "Show and change the locks of this project's tasks: manage.py locks --help."
    requires_system_checks: tuple[str, ...] = ()  # the command must run even if a check fails

    def run_from_argv(self, argv: list[str]) -> None:
        """Run from the command line."""
        sys.exit(_group().main(argv[2:], prog_name=f"{argv[0]} {argv[1]}"))

    def add_arguments(self, parser: Any) -> None:
        """Accept all arguments, for ``call_command("locks", "list", "--json")``."""
        parser.add_argument("args", nargs="...")

    def handle(self, *args: str, **options: Any) -> None:
        """Run from ``call_command``.

        Raises:
            CommandError: the command failed. ``returncode`` is the exit status.
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

"""``celery-singleton-lock``: the commands for a URL, without an app."""

from __future__ import annotations

from typing import Final

import click

from celery_singleton_lock.cli.commands import COMMANDS
from celery_singleton_lock.cli.options import Commands
from celery_singleton_lock.cli.target import of_url, refuse_undecodable

BACKEND: Final = "CELERY_SINGLETON_LOCK_BACKEND"


@click.group(
    cls=Commands,
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="tasks, try, drain, release --terminate and import --adopt need the app: celery -A "
    "YOUR_APP locks … With the app, why also asks workers and results.",
)
@click.option(
    "--backend",
    envvar=BACKEND,
    metavar="URL",
    help=f"Redis of the locks. Other users can see command lines: prefer the variable {BACKEND}.",
)
@click.option("--prefix", default="csl", show_default=True, help="First part of every key.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the Redis client, such as master_name=mymaster. May be repeated.",
)
@click.version_option(package_name="celery-singleton-lock")
@click.pass_context
def main(
    context: click.Context, backend: str | None, prefix: str, options: tuple[str, ...]
) -> None:
    """Show and change the locks of Celery tasks."""
    refuse_undecodable(context)
    if not backend:
        msg = f"give the locks' Redis: --backend redis://HOST:6379/0, or {BACKEND}=…"
        raise click.UsageError(msg)
    pairs = [option.partition("=") for option in options]
    wrong = [name for name, sign, _ in pairs if not sign]
    if wrong:
        msg = f"--option {wrong[0]}: write NAME=VALUE, such as master_name=mymaster"
        raise click.UsageError(msg)
    context.obj = of_url(backend, prefix, {name: value for name, _, value in pairs})

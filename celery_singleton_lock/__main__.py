"""``python -m celery_singleton_lock``: the commands that need no app."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from celery_singleton_lock.cli import main as operators
from celery_singleton_lock.demo import cli as demo

PROGRAM = "python -m celery_singleton_lock"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command: the demo, or one of ``celery-singleton-lock``. Without one, print the help.

    Args:
        arguments: the command line; None: that of this process.

    Returns:
        The exit status.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] not in {"demo", "-h", "--help"}:
        return int(operators(given, prog_name=PROGRAM) or 0)
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Celery tasks that run one at a time per key.",
        epilog=f"list, show, why, doctor and the others: {PROGRAM} list --help",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    about = "run a flash sale: plain tasks, LockedTask, and LockedTask with kill -9 (< 60 s)"
    demo.add_arguments(commands.add_parser("demo", help=about, description=about))
    chosen = parser.parse_args(given)
    if chosen.command is None:
        parser.print_help()
        return 0
    return demo.main(chosen)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m celery_singleton_lock``: the commands that need no app of one's own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from celery_singleton_lock.demo import cli as demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; without one, print the help."""
    parser = argparse.ArgumentParser(
        prog="python -m celery_singleton_lock",
        description="Celery tasks that run one at a time per key.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    about = "play a flash sale: plain tasks, LockedTask, and LockedTask under kill -9 (< 60 s)"
    demo.add_arguments(commands.add_parser("demo", help=about, description=about))
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    return demo.main(chosen)


if __name__ == "__main__":
    sys.exit(main())

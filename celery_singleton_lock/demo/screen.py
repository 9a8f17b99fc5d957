"""Shows a run in progress, and the table of the three runs. Only this module needs ``rich``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from celery_singleton_lock.core.lock_view import LockView
from celery_singleton_lock.demo.figures import Figures
from celery_singleton_lock.demo.history import Hold, Kill
from celery_singleton_lock.demo.run import Run
from celery_singleton_lock.demo.shop import LOCK_KEY
from celery_singleton_lock.demo.workload import STOCK
from celery_singleton_lock.errors import SingletonLockError

if TYPE_CHECKING:
    from typing_extensions import Self

FRAME: Final = 0.12
LINE: Final = 2.0
BAR: Final = 24

Inspect = Callable[[str], LockView]
"""Reads a lock: ``RedisStore.inspect``."""


def views(inspect: Inspect) -> dict[str, LockView]:
    """Return the lock of each product; nothing if Redis does not answer."""
    try:
        return {product: inspect(LOCK_KEY.format(product=product)) for product in STOCK}
    except SingletonLockError:
        return {}


# --- plain lines ----------------------------------------------------------------------------------


class Lines:
    """Prints lines, for a pipe or a log.

    Args:
        inspect: reads a lock.
    """

    def __init__(self, inspect: Inspect) -> None:
        """Create it. Nothing is printed yet."""
        self._inspect = inspect
        self._next = 0.0
        self._reported: set[int] = set()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def begin(self, run: Run) -> None:
        """Print the title of a run."""
        self._next = time.monotonic() + LINE
        self.say(f"\n{run.variant.title}")

    def watch(self, run: Run) -> None:
        """Print each kill once the next task has started, and the state every two seconds."""
        for kill in run.history.kills:
            if kill.recovery is not None and id(kill) not in self._reported:
                self._reported.add(id(kill))
                self.say(f"  {kill_text(kill)}")
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE
            self.say(f"  {run.seconds:4.1f} s  {self._state(run)}")

    def end(self, run: Run, figures: Figures) -> None:
        """Print the result."""
        self.watch(run)
        self.say(f"  {figures.seconds:4.1f} s  {summary(figures)}")

    def _state(self, run: Run) -> str:
        served = f"{len(run.history.finished())} of {len(run.orders)} orders served"
        if not run.variant.is_locked:
            return f"{served}, {len(run.history.running)} running"
        locks = views(self._inspect)
        held = sum(len(lock.holders) for lock in locks.values())
        waiting = {product: lock.waiting for product, lock in locks.items() if lock.waiting}
        queues = ", ".join(f"{count} for {product}" for product, count in waiting.items())
        return f"{served}, {held} locks held, waiting: {queues or 'none'}"


# --- a live screen --------------------------------------------------------------------------------


class Screen(Lines):
    """A live table for a terminal: sales, holders, waiters and kills.

    Args:
        inspect: reads a lock.
    """

    def __init__(self, inspect: Inspect) -> None:
        """Create it. :meth:`__enter__` starts the display."""
        super().__init__(inspect)
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        """Hide the cursor."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False)

    def begin(self, run: Run) -> None:
        """Draw the table at once."""
        self._next = 0.0
        self.watch(run)

    def watch(self, run: Run) -> None:
        """Redraw the table if the last frame is old enough."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + FRAME
            self._live.update(self._frame(run), refresh=True)

    def end(self, run: Run, figures: Figures) -> None:
        """Replace the table by one line with the result."""
        self._live.update(Text(), refresh=True)
        self.say(f"{run.variant.title}\n   {figures.seconds:4.1f} s  {summary(figures)}")

    def _frame(self, run: Run) -> RenderableType:
        parts: list[RenderableType] = [self._products(run)]
        if run.variant.kills:
            parts.append(_kills(run.history.kills))
        done = f"{len(run.history.finished())} of {len(run.orders)} orders · {run.seconds:.1f} s"
        return Panel(Group(*parts), title=run.variant.title, subtitle=done, border_style="cyan")

    def _products(self, run: Run) -> Table:
        table = Table(box=None, expand=True, padding=(0, 1))
        for heading in ("product", "sold", "", "held by", "waiting"):
            right = heading in ("sold", "waiting")
            table.add_column(heading, justify="right" if right else "left", no_wrap=True)
        sold = run.shop.sold()
        locks = views(self._inspect) if run.variant.is_locked else {}
        for product in STOCK:
            table.add_row(*_product_row(run, product, sold.get(product, 0), locks.get(product)))
        return table


def _product_row(run: Run, product: str, sold: int, lock: LockView | None) -> list[RenderableType]:
    stock = STOCK[product]
    style = "red" if sold > stock else "green" if sold == stock else "cyan"
    return [
        product,
        Text(f"{sold}/{stock}", style=style),
        ProgressBar(stock, min(sold, stock), BAR, complete_style=style, finished_style=style),
        _running(run.history.holding(product)) if lock is None else _holders(lock, run),
        "" if lock is None else f"{lock.waiting} parked",
    ]


def _running(holds: Iterable[Hold]) -> Text:
    pids = [str(hold.pid) for hold in holds]
    crowded = len(pids) > 1
    text = f"{len(pids)} at once: {' '.join(pids)}" if crowded else " ".join(pids)
    return Text(text, style="red" if crowded else "")


def _holders(lock: LockView, run: Run) -> Text:
    """Return the holders from Redis, with the orders from the tasks' events."""
    names = []
    for holder in lock.holders:
        hold = run.history.running.get(holder.pid)
        order = f", order {hold.order}" if hold else ""
        names.append(f"process {holder.pid}{order}" if holder.pid else "granted, not started")
    return Text(" ".join(names), style="green")


def _kills(kills: list[Kill]) -> RenderableType:
    lines = [Text(""), *(Text(f"✕ {kill_text(kill)}", style="yellow") for kill in kills[-5:])]
    return Group(*lines, *(Text("") for _ in range(6 - len(lines))))


# --- texts ----------------------------------------------------------------------------------------


def kill_text(kill: Kill) -> str:
    """Return a sentence about a kill."""
    hold = kill.hold
    what = f"killed process {hold.pid} during order {hold.order} ({hold.product})"
    if kill.recovery is None:
        return f"{what}; waiting for the next task …"
    return f"{what}; the next task started after {kill.recovery:.2f} s"


def summary(figures: Figures) -> str:
    """Return the result of a run as one line."""
    units = f"{figures.units_sold} units sold of {sum(STOCK.values())}"
    if figures.oversold:
        return f"{units}: OVERSOLD by {figures.oversold}"
    if figures.mismatch:
        return f"{units}: stock and orders differ by {figures.mismatch}"
    return f"{units}: exact to the unit"


ROWS: Final[tuple[tuple[str, Callable[[Figures], object]], ...]] = (
    ("orders", lambda run: run.orders),
    ("units sold", lambda run: run.units_sold),
    ("left in stock", lambda run: run.stock_left),
    ("oversold", lambda run: run.oversold),
    ("stock and orders differ by", lambda run: run.mismatch),
    ("overlaps of a product", lambda run: run.overlaps),
    ("orders lost", lambda run: run.lost),
    ("processes killed", lambda run: run.kills),
    ("next start after (median)", lambda run: _seconds(run, "median")),
    ("next start after (longest)", lambda run: _seconds(run, "longest")),
    ("duration", lambda run: f"{run.seconds:.1f} s"),
)
FAULTS: Final = ("oversold", "stock and orders differ by", "overlaps of a product")


def _seconds(run: Figures, name: str) -> str:
    return "" if run.recovery is None else f"{getattr(run.recovery, name):.2f} s"


def show_table(runs: Mapping[str, Figures]) -> None:
    """Print a table of the runs."""
    stock = sum(STOCK.values())
    table = Table(title=f"\nThe flash sale: a stock of {stock:,} items", title_style="bold")
    table.add_column("")
    for heading in ("plain tasks", "LockedTask", "LockedTask, kill -9"):
        table.add_column(heading, justify="right")
    for label, value in ROWS:
        cells = [Text(str(value(run))) for run in runs.values()]
        for cell in cells:
            if label in FAULTS:
                cell.stylize("bold red" if cell.plain != "0" else "green")
        table.add_row(label, *cells)
    Console(highlight=False).print(table)

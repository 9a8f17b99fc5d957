"""Draws which task worked on which product, and when, as SVG.

The image has a panel for each run, and a lane for each product, all on the same time scale. A task
is a bar in the colour of its process. Tasks of a lane that overlap share its height, and are
underlined in red. The image has its own background, so it is readable on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from celery_singleton_lock.demo.figures import Figures, overlapping
from celery_singleton_lock.demo.history import History, Hold, Kill
from celery_singleton_lock.demo.run import Run
from celery_singleton_lock.demo.worker import PROCESSES
from celery_singleton_lock.demo.workload import STOCK

WIDTH: Final = 1200
MARGIN: Final = 36
LEFT: Final = 150  # left end of the lanes
RIGHT: Final = WIDTH - MARGIN
HEAD: Final = 118  # title and legend
LANE: Final = 26
BAR: Final = 20
CAPTION: Final = 40  # above the lanes of a panel
FOOT: Final = 46  # below them: the axis
MOST_TICKS: Final = 16

# By Okabe and Ito: distinguishable with a colour vision deficiency.
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#a56cc1")
RED: Final = "#d7263d"

STYLE: Final = """
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif;
         font-size: 13px; fill: #33415c }
  .title { font-size: 22px; font-weight: 700; fill: #14213d }
  .caption { font-size: 15px; font-weight: 600; fill: #14213d }
  .bad { fill: #b3162c; font-weight: 600 } .good { fill: #04724d; font-weight: 600 }
  .small { font-size: 11.5px; fill: #5c677d }
"""


def write(path: Path, runs: Mapping[Run, Figures], redis: str) -> None:
    """Write the image of all runs."""
    path.write_text(draw(runs, redis), encoding="utf-8")


def draw(runs: Mapping[Run, Figures], redis: str) -> str:
    """Return the image as SVG."""
    scale = Scale(max(run.seconds for run in runs))
    slots = slots_of(run.history for run in runs)
    panel = CAPTION + LANE * len(STOCK) + FOOT
    height = HEAD + panel * len(runs) + 6
    parts = [_canvas(height), *_head(redis)]
    for index, (run, figures) in enumerate(runs.items()):
        parts += [f'<g transform="translate(0 {HEAD + index * panel})">']
        parts += [*_caption(run, figures), *_axis(scale), *_lanes(run, scale, slots), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class Scale:
    """Converts seconds to pixels.

    Args:
        seconds: duration of the longest run.
    """

    seconds: float

    def x(self, seconds: float) -> float:
        """Return the horizontal position of a time."""
        share = min(max(seconds, 0.0), self.seconds) / self.seconds
        return round(LEFT + share * (RIGHT - LEFT), 2)

    def ticks(self) -> Iterable[int]:
        """Return the whole seconds that are labelled on the axis."""
        step = math.ceil(self.seconds / MOST_TICKS)
        return range(0, math.floor(self.seconds) + 1, step)


def slots_of(histories: Iterable[History]) -> dict[int, int]:
    """Return the slot of each process. A new process takes the slot of a killed one."""
    slots: dict[int, int] = {}
    free: list[int] = []
    new = count()
    for history in histories:
        killed = sorted((kill.at, kill.hold.pid) for kill in history.kills)
        for hold in sorted(history.holds, key=lambda hold: hold.start):
            while killed and killed[0][0] <= hold.start:
                free.append(slots[killed.pop(0)[1]])
            if hold.pid not in slots:
                slots[hold.pid] = free.pop(0) if free else next(new)
        free += [slots[pid] for _, pid in killed]
    return slots


# --- the frame ------------------------------------------------------------------------------------


def _canvas(height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n'
        "<title>Flash sale: which task worked on which product</title>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="14" fill="#fbfcfe" stroke="#cbd5e1"/>'
    )


def _head(redis: str) -> Iterator[str]:
    stock = sum(STOCK.values())
    yield _text(MARGIN, 46, "Flash sale: which task worked on which product", "title")
    about = f"{stock:,} items, {PROCESSES} Celery processes, {redis}"
    yield _text(MARGIN, 68, about, "small")
    x = MARGIN
    for slot, colour in enumerate(COLOURS[:PROCESSES]):
        yield f'<rect x="{x}" y="84" width="14" height="14" rx="2.5" fill="{colour}"/>'
        yield _text(x + 20, 96, f"process {slot + 1}")
        x += 100
    x += 10
    yield f'<rect x="{x}" y="93" width="22" height="4" fill="{RED}"/>'
    yield _text(x + 30, 96, "several tasks at the same stock")
    x += 270
    yield _cross(x + 8, 91)
    yield _text(x + 22, 96, "killed with SIGKILL")
    x += 175
    yield f'<rect x="{x}" y="84" width="22" height="14" fill="{RED}" opacity=".18"/>'
    yield _text(x + 30, 96, "until the next task started")


def _caption(run: Run, figures: Figures) -> Iterator[str]:
    yield _text(MARGIN, 22, run.variant.title, "caption")
    good = not (figures.oversold or figures.mismatch or figures.overlaps or figures.lost)
    verdict = "exact to the unit" if good else f"oversold by {figures.oversold}"
    facts = f"{figures.units_sold:,} sold: {verdict} · {_plural(figures.overlaps, 'overlap')}"
    facts += f" · {figures.lost} lost" if run.variant.is_locked else ""
    if figures.recovery is not None:
        facts += f" · {figures.kills} killed, next start after {figures.recovery.median:.2f} s"
        facts += f" (median; longest {figures.recovery.longest:.2f} s)"
    yield _text(RIGHT, 22, facts, "good" if good else "bad", anchor="end")


def _axis(scale: Scale) -> Iterator[str]:
    top, bottom = CAPTION - 4, CAPTION + LANE * len(STOCK)
    for second in scale.ticks():
        x = scale.x(second)
        yield f'<path d="M{x} {top}V{bottom}" stroke="#e2e8f0"/>'
        yield _text(x, bottom + 16, f"{second} s", "small", anchor="middle")
    yield f'<path d="M{LEFT} {bottom}H{RIGHT}" stroke="#94a3b8"/>'


def _plural(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


# --- the lanes ------------------------------------------------------------------------------------


def _lanes(run: Run, scale: Scale, slots: Mapping[int, int]) -> Iterator[str]:
    lanes = run.history.lanes()
    for index, product in enumerate(STOCK):
        y = CAPTION + index * LANE
        yield _text(LEFT - 14, y + 16, product, anchor="end")
        yield from _lane(lanes.get(product, []), run.started, scale, slots, y)
    for kill in run.history.kills:
        y = CAPTION + list(STOCK).index(kill.hold.product) * LANE
        yield from _kill(kill, run.started, scale, y)


def _lane(
    holds: list[Hold], began: float, scale: Scale, slots: Mapping[int, int], top: float
) -> Iterator[str]:
    for hold, row, rows in rows_of(holds):
        left, right = scale.x(hold.start - began), scale.x(_end(hold) - began)
        height = BAR / rows
        colour = COLOURS[slots[hold.pid] % len(COLOURS)]
        fence = f", fencing token {hold.fence}" if hold.fence else ""
        yield (
            f'<rect x="{left}" y="{top + 1 + row * height:.2f}" '
            f'width="{max(1.0, right - left - 0.5):.2f}" height="{height - 0.5:.2f}" rx="1.2" '
            f'fill="{colour}"><title>order {hold.order}, process {hold.pid}{fence}</title></rect>'
        )
    for start, end in overlapping(holds):
        left, right = scale.x(start - began), scale.x(end - began)
        width = max(0.8, right - left)
        yield f'<rect x="{left}" y="{top + 22}" width="{width:.2f}" height="3" fill="{RED}"/>'


def rows_of(holds: Iterable[Hold]) -> Iterator[tuple[Hold, int, int]]:
    """Yield each task run with its row, and the number of rows of its group of overlapping runs.

    Args:
        holds: the task runs of one lane, in order of start.
    """
    group: list[tuple[Hold, int]] = []
    ends: list[float] = []
    for hold in holds:
        if all(end <= hold.start for end in ends):
            yield from ((hold, row, len(ends)) for hold, row in group)
            group, ends = [], []
        row = next((row for row, end in enumerate(ends) if end <= hold.start), len(ends))
        ends[row : row + 1] = [_end(hold)]
        group.append((hold, row))
    yield from ((hold, row, len(ends)) for hold, row in group)


def _kill(kill: Kill, began: float, scale: Scale, top: float) -> Iterator[str]:
    at = scale.x(kill.at - began)
    until = scale.x((kill.next_start or math.inf) - began)
    what = f"process {kill.hold.pid} killed in order {kill.hold.order}"
    then = "" if kill.recovery is None else f"; the next task started after {kill.recovery:.3f} s"
    yield (
        f'<rect x="{at}" y="{top}" width="{max(1.0, until - at):.2f}" height="{BAR + 2}" '
        f'fill="{RED}" opacity=".18"/>'
    )
    yield f"<g><title>{what}{then}</title>{_cross(at, top + 11)}</g>"


def _end(hold: Hold) -> float:
    return math.inf if hold.end is None else hold.end


def _cross(x: float, y: float) -> str:
    path = f"M{x - 5:.2f} {y - 5}l10 10m0-10l-10 10"
    halo = f'<path d="{path}" stroke="#fff" stroke-width="5" stroke-linecap="round"/>'
    return f'{halo}<path d="{path}" stroke="{RED}" stroke-width="2.6" stroke-linecap="round"/>'


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    look = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}"{look} text-anchor="{anchor}">{escape(text)}</text>'

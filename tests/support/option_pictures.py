"""The pictures of docs/which-option.md: calls of a task, and when each of them runs.

The page has the code of each task. The store, the scripts and the decision about a blocked task are
the real ones; only the clock is moved by hand, and the bodies of the tasks only take time.

Write them anew with ``PYTHONPATH=tests python -m support.option_pictures``.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from celery import Celery

import celery_singleton_lock
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.conflict_policy import SKIPPED, Facts, Outcome, outcome_of
from celery_singleton_lock.core.model import Ending, Owner, Reservation, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.parked_message import MessageToPark
from celery_singleton_lock.core.unique import EntryState, unpacked
from celery_singleton_lock.send_unique import Call as UniqueSending
from celery_singleton_lock.store.replies import delivery
from celery_singleton_lock.worker.execution.task_lock import claim_of
from celery_singleton_lock.worker.lock_header import LockHeader

DOCS: Final = Path(__file__).parents[2] / "docs"
PAGE: Final = DOCS / "which-option.md"
FOLDER: Final = "images/options"
STEP: Final = 0.05
"""Seconds between two looks."""
WORKER, REALM, QUEUE = "w", "r", "celery"
SECTION: Final = re.compile(
    r"^### (?P<title>[^\n]*)\n\n```python\n(?P<code>.*?)^```\n\n(?:!\[[^\n]*\n)?",
    re.MULTILINE | re.DOTALL,
)


class Scene(NamedTuple):
    """Calls of a task.

    Args:
        file: name of the picture.
        calls: seconds at which each is sent, and its arguments.
        takes: seconds for which each body runs.
        until: end of the picture, in seconds.
    """

    file: str
    calls: tuple[tuple[float, Mapping[str, Any]], ...]
    takes: float
    until: float


def _of(times: str, **arguments: Any) -> tuple[tuple[float, Mapping[str, Any]], ...]:
    return tuple((float(time), arguments) for time in times.split())


def _each(name: str, calls: str) -> tuple[tuple[float, Mapping[str, Any]], ...]:
    """Return calls with another value of an argument each: ``"0:a 1:b"``."""
    parts = (call.split(":") for call in calls.split())
    return tuple((float(time), {name: value}) for time, value in parts)


SCENES: Final = {
    "Run all of them, one at a time for each account, in order": Scene(
        "park", _each("account", "0:A 0.5:A 1:B 1.5:A 6:B"), 2, 8
    ),
    "If one runs already, skip this one": Scene("skip", _of("0 1 2.5 3 5"), 2, 8),
    "One runs, and one waits with the newest arguments": Scene(
        "replace", _of("0 0.5 1 1.5 5"), 3, 10
    ),
    "The newest call replaces the one that runs": Scene("preempt", _of("0 1 2.2 7"), 3, 11),
    "Three at a time": Scene("limit", _of("0 0.3 0.6 0.9 1.2 1.5"), 2, 6),
    "At most two starts in five seconds for each customer": Scene(
        "rate", _each("customer", "0:A 0.4:A 0.8:A 1.2:A 1.6:B 2:A"), 0.5, 12
    ),
    "Evenly spaced starts": Scene("smooth", _of("0 0.2 0.4 0.6 0.8 6"), 0.5, 8),
    "Only the last call of a burst": Scene("debounce", _of("0 0.7 1.4 2.1 7 7.5"), 1, 12),
    "Not twice in the queue": Scene("unique", _of("0 0.5 1 2.5 3 3.5"), 2, 9),
    "Urgent calls first": Scene(
        "priority",
        tuple((time, {"urgency": urgency}) for time, urgency in
              ((0, 0), (0.3, 0), (0.6, 0), (0.9, 60), (1.2, 0))),
        1.5,
        9,
    ),
    "No customer waits behind the backlog of another": Scene(
        "fair", _each("customer", "0:A 0.1:A 0.2:A 0.3:A 0.4:A 0.6:B 2.2:B"), 1, 9
    ),
    "At most once in five seconds, counted from its success": Scene(
        "hold", _of("0 0.5 3 6 7"), 1, 10
    ),
}  # fmt: skip


# --- what happens ---------------------------------------------------------------------------------


@dataclass
class Fate:
    """What became of a call.

    Args:
        name: a letter.
        sent: seconds at which it was sent.
        arguments: its arguments.
        token: owner token under which it waits or runs.
        start: seconds at which its body has started.
        end: seconds at which its body has ended, or it was decided that it does not run.
        verdict: why it does not run; empty if it does.
    """

    name: str
    sent: float
    arguments: Mapping[str, Any]
    token: str = ""
    start: float | None = None
    end: float | None = None
    verdict: str = ""

    def __str__(self) -> str:
        about = ", ".join(map(str, self.arguments.values()))
        return f"{self.name} ({about})" if about else self.name

    def told(self) -> str:
        """Return a sentence about the call."""
        if self.verdict:
            return f"{self} is {self.verdict}"
        if self.start is None:
            return f"{self} waits"
        waited = "at once" if self.start - self.sent < 2 * STEP else f"at {self.start:.2g} s"
        return f"{self} starts {waited}"


class _App(Celery):
    """Keeps its tasks for itself; those of an app are shared with all others by default."""

    def task(self, *args: Any, **options: Any) -> Any:
        return super().task(*args, **{**options, "shared": False})


class Play:
    """One worker with free slots, and the calls of a scene.

    Args:
        code: of the page, which declares a task.
        scene: the calls.
    """

    def __init__(self, code: str, scene: Scene) -> None:
        app = _App("pictures", broker="memory://", set_as_current=False)
        app.conf.singleton_lock_backend = f"memory://{uuid.uuid4().hex}"
        given = {name: getattr(celery_singleton_lock, name) for name in ("LockedTask", "Rate")}
        names: dict[str, Any] = {"app": app, **given}
        exec(code, names)
        (function,) = re.findall(r"^def (\w+)", code, re.MULTILINE)
        self.task = app.tasks[names[function].name]
        self.scene, self.now = scene, 0.0
        self.fates = [
            Fate(chr(ord("a") + n), time, arguments)
            for n, (time, arguments) in enumerate(scene.calls)
        ]
        self.extension = self.task._lock_extension
        self.store = self.extension.store()
        self.server = self.store.client.server
        self.server.clock.stop()
        self.server.advance(1 - self.server.clock.microseconds() % 1_000_000 / 1_000_000)
        self.names = {self.extension.name_of(self.task, (), fate.arguments) for fate in self.fates}
        self.store.worker_heartbeat(WORKER, REALM, [QUEUE], 600.0, 100, tasks=[self.task.name])

    def played(self) -> list[Fate]:
        """Return what becomes of the calls."""
        steps = round(self.scene.until / STEP)
        for step in range(steps + 1):
            self.now = step * STEP
            self._end()
            for fate in self.fates:
                if abs(fate.sent - self.now) < STEP / 2:
                    self._send(fate)
            self._sweep()
            self._receive()
            self.server.advance(STEP)
        return self.fates

    def _sweep(self) -> None:
        """Sweep the locks that are due, as an agent does."""
        now = self.server.clock.microseconds() / 1000
        for name in self.names:
            due = self.store.client.zscore(self.store.keyspace.lock(name).due, name)
            if due is not None and due <= now:
                self.store.sweep_and_grant(name, worker=WORKER)

    def _send(self, fate: Fate) -> None:
        options: LockOptions = self.extension.options(self.task)
        name = self.extension.name_of(self.task, (), fate.arguments)
        unique = None
        if options.unique is not None:
            _, key = self.extension.unique_key(self.task, (), fate.arguments, {})
            found = self.store.announce(name, key, fate.name)
            if found.state is not EntryState.ANNOUNCED:
                return self._without_run(fate, "not sent")
            sending = UniqueSending(self.task, options, name, key, {"task_id": fate.name})
            self.store.confirm_sent(name, key, fate.name, 0, sending.kept)
            unique = unpacked(sending.header)
        options = self.extension.computed(self.task, (), fate.arguments, None, options)
        return self._arrive(fate, name, replace(options, unique=unique))

    def _arrive(self, fate: Fate, name: str, options: LockOptions) -> None:
        fate.token = new_token()
        place = self.server.clock.microseconds()
        header = LockHeader(
            name,
            fate.token,
            f"{fate.name}/0/0",
            self.task.name,
            WORKER,
            place=place,
            flow=options.flow,
        )
        owner = Owner(fate.token, header.attempt, header.task, WORKER)
        claim = claim_of(header, options)
        if options.debounce is None:
            reply = self.store.acquire(owner, claim)
            outcome = outcome_of(options, reply, Facts())
            if outcome is Outcome.RUN:
                fate.start = self.now
                return
            if outcome is not Outcome.PARK:
                self._without_run(fate, "skipped" if outcome in SKIPPED else "failed")
                return
        message = MessageToPark(fate.name.encode(), REALM, QUEUE, options.wait_timeout)
        if self.store.park(owner, claim, message).verdict is Verdict.FULL:
            self._without_run(fate, "skipped" if options.on_full == "skip" else "failed")

    def _receive(self) -> None:
        """Carry out what the worker was told."""
        client = self.store.client
        inbox = f"{self.store.keyspace.fleet}:inbox:{WORKER}"
        while raw := client.lpop(inbox):
            told = delivery(raw)
            base = told.token.rpartition(".")[0]
            (fate,) = (each for each in self.fates if each.token.startswith(base))
            fate.token = told.token
            owner = Owner(told.token, f"{fate.name}/0/0", self.task.name, WORKER)
            if told.verdict == "preempted":
                self.store.release(told.name, told.token, Ending.FINAL, worker=WORKER)
                self._without_run(fate, told.verdict)
            elif told.verdict != "granted":
                self.store.release(told.name, told.token, Ending.FINAL)
                self._without_run(fate, told.verdict)
            elif self.store.claim(owner, told.name, 60.0).verdict is Verdict.GRANTED:
                fate.start = self.now

    def _end(self) -> None:
        """End the bodies that have run for long enough."""
        options: LockOptions = self.extension.options(self.task)
        for fate in self.fates:
            if fate.start is None or fate.end is not None:
                continue
            if self.now - fate.start < self.scene.takes - STEP / 2:
                continue
            fate.end = self.now
            name = self.extension.name_of(self.task, (), fate.arguments)
            if options.hold_for is None:
                self.store.release(name, fate.token, Ending.FINAL, worker=WORKER)
            else:
                kept = Reservation("", options.hold_for - self.scene.takes)
                self.store.release(name, fate.token, Ending.HOLD, reserve=kept, worker=WORKER)

    def _without_run(self, fate: Fate, verdict: str) -> None:
        fate.end, fate.verdict = self.now, verdict


# --- the pictures ---------------------------------------------------------------------------------

WIDTH, LEFT, ROW, TOP = 720, 70, 22, 24
STYLE: Final = """
text { font: 12px system-ui, sans-serif; fill: #1f2937; }
.grid { stroke: #d1d5db; } .wait { stroke: #9ca3af; stroke-dasharray: 2 3; }
.sent { fill: #6b7280; } .run { fill: #2563eb; } .not { stroke: #dc2626; stroke-width: 2; }
.why { fill: #b91c1c; }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb; } .grid { stroke: #374151; } .wait { stroke: #9ca3af; }
  .sent { fill: #9ca3af; } .run { fill: #60a5fa; } .not { stroke: #f87171; }
  .why { fill: #fca5a5; }
}
"""


def svg(scene: Scene, fates: list[Fate]) -> str:
    """Return the picture: a row for each call, from when it was sent until it has ended."""
    height = TOP + ROW * len(fates) + 8
    scale = (WIDTH - LEFT - 20) / scene.until

    def x(seconds: float) -> str:
        return f"{LEFT + seconds * scale:.0f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(told(fates))}</title>",
        f"<style>{STYLE}</style>",
    ]
    for second in range(int(scene.until) + 1):
        at = f'x1="{x(second)}" x2="{x(second)}" y1="{TOP - 6}" y2="{height - 4}"'
        lines.append(f'<line class="grid" {at}/>')
        unit = " s" if second == 0 else ""
        lines.append(f'<text x="{x(second)}" y="12" text-anchor="middle">{second}{unit}</text>')
    for row, fate in enumerate(fates):
        y = TOP + ROW * row + ROW // 2
        lines += _row(scene, fate, y, x)
    return "\n".join([*lines, "</svg>", ""])


def _row(scene: Scene, fate: Fate, y: int, x: Any) -> Iterator[str]:
    yield f'<text x="8" y="{y + 4}">{escape(str(fate))}</text>'
    decided = fate.start if fate.start is not None else fate.end
    until = scene.until if decided is None else decided
    if until - fate.sent > STEP:
        yield f'<line class="wait" x1="{x(fate.sent)}" x2="{x(until)}" y1="{y}" y2="{y}"/>'
    if fate.start is not None:
        end = scene.until if fate.end is None else fate.end
        width = int(x(end)) - int(x(fate.start))
        yield (
            f'<rect class="run" x="{x(fate.start)}" y="{y - 7}" width="{width}" height="14" '
            'rx="3"/>'
        )
    yield f'<circle class="sent" cx="{x(fate.sent)}" cy="{y}" r="4"/>'
    if fate.verdict:
        at = int(x(until if fate.start is None else fate.end))
        yield f'<path class="not" d="M{at + 8} {y - 4}l8 8m0 -8l-8 8"/>'
        yield f'<text class="why" x="{at + 22}" y="{y + 4}">{fate.verdict}</text>'


def told(fates: list[Fate]) -> str:
    """Return what happens, in words."""
    return "; ".join(fate.told() for fate in fates) + "."


def written(page: str) -> tuple[str, dict[str, str]]:
    """Return the page with its pictures, and the pictures by file."""
    pictures: dict[str, str] = {}

    def drawn(found: re.Match[str]) -> str:
        scene = SCENES[found["title"].strip('"').rstrip(".")]
        fates = Play(found["code"], scene).played()
        file = f"{FOLDER}/{scene.file}.svg"
        pictures[file] = svg(scene, fates)
        picture = f"![{told(fates)}]({file})"
        return f"### {found['title']}\n\n```python\n{found['code']}```\n\n{picture}\n"

    page = SECTION.sub(drawn, page)
    missing = len(SCENES) - len(pictures)
    if missing:
        msg = f"{missing} of the {len(SCENES)} scenes are not on the page"
        raise ValueError(msg)
    return page, pictures


if __name__ == "__main__":
    text, files = written(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    for file, picture in files.items():
        (DOCS / file).parent.mkdir(exist_ok=True)
        (DOCS / file).write_text(picture, encoding="utf-8")

"""The app of a scene: its worker's, and the caller's. One task; its body does as it is told."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from celery import Celery

from benchmarks.what_happens.packages import PACKAGES, Wanted

ENVIRONMENT: Final = "CSL_WHAT_HAPPENS"
"""Environment variable that carries :class:`Setup` to the worker, as JSON."""

LONGEST_HOLD = 90.0


@dataclass(frozen=True)
class Setup:
    """What worker and caller must agree on."""

    package: str
    broker: str
    locks: str
    folder: str
    wanted: Wanted

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setup:
        fields = json.loads(text)
        return cls(**{**fields, "wanted": Wanted(**fields["wanted"])})


class Journal:
    """What the bodies of tasks did and when, and the gates that hold them: files in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._path = self._folder / "journal"
        self._path.touch()

    def note(self, event: str, **facts: Any) -> None:
        """Append a line, at once, so that lines never mix and a kill loses none."""
        line = json.dumps({"event": event, "t": time.monotonic(), "pid": os.getpid(), **facts})
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def lines(self) -> list[dict[str, Any]]:
        whole = self._path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def open_gate(self, name: str) -> None:
        (self._folder / f"gate-{name}").touch()

    def close_service(self, seconds: float) -> None:
        """Let the service that tasks call answer 429 for a time."""
        (self._folder / "service").write_text(str(time.monotonic() + seconds))

    def ask_service(self, n: int) -> int:
        """Call the service; return the whole seconds for which it asks to wait, or 0."""
        closed = float((self._folder / "service").read_text()) - time.monotonic()
        wait = max(0, math.ceil(closed))
        self.note("asked", n=n, wait=wait)
        return wait

    def await_gate(self, name: str) -> None:
        deadline = time.monotonic() + LONGEST_HOLD
        while not (self._folder / f"gate-{name}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # a task waits for a file, as its work would


def build(setup: Setup) -> Celery:
    """Return the app, with the task as the package declares it."""
    app = Celery("what_happens", broker=setup.broker, backend=setup.locks)
    app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=True)
    journal = Journal(setup.folder)

    def work(self: Any, key: str, n: int = 0, hold: Any = 0, end: str = "return") -> int:
        """Hold for some seconds, or until a gate is open; then end as told."""
        run = {"run": uuid.uuid4().hex, "id": self.request.id, "key": key, "n": n}
        run["retries"] = self.request.retries
        journal.note("begin", **run)
        try:
            _hold(journal, hold)
        finally:
            journal.note("end", **run, lost=_knows_of_loss(self))
        if end == "429" and (wait := journal.ask_service(n)):
            PACKAGES[setup.package].later(self, wait)
        if end == "retry" and not self.request.retries:
            raise self.retry(countdown=1)
        return n

    PACKAGES[setup.package].declare(app, setup.locks, work, setup.wanted)

    @app.task(name="occupy")
    def occupy(gate: str) -> None:
        """Keep a slot, without any lock."""
        journal.note("occupied", gate=gate)
        journal.await_gate(gate)

    @app.task(name="total")
    def total(numbers: list[int]) -> list[int]:
        """End a chord."""
        journal.note("total", numbers=numbers)
        return numbers

    app.finalize()
    return app


def _hold(journal: Journal, hold: Any) -> None:
    if isinstance(hold, str):
        journal.await_gate(hold)
    elif hold:
        time.sleep(hold)  # the work


def _knows_of_loss(task: Any) -> bool | None:
    """Whether the task can see that its lock is lost; None if its package does not tell."""
    return getattr(getattr(task, "lock", None), "lost", None)


if ENVIRONMENT in os.environ:
    app = build(Setup.from_json(os.environ[ENVIRONMENT]))

"""The table of events in docs/events.md, generated from their types.

``PYTHONPATH=tests python -m support.event_docs`` writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from celery_singleton_lock import events

PAGE: Final = Path(__file__).parents[2] / "docs" / "events.md"
BEGIN, END = "<!-- events: written by tests/support/event_docs.py -->", "<!-- end of events -->"
SHARED: Final = {"lock", "task", "task_id"}
"""Fields of all events about a task: told once, above the table."""


def kinds() -> list[type[events.Event]]:
    """Return all types of events, in the order in which they are declared."""
    found = [each for each in vars(events).values() if isinstance(each, type)]
    bases = (
        *(events.TaskEvent, events.LockAdmin, events.BackendDown, events.BackendUp),
        *(events.QueueStopped, events.QueueResumed),
    )
    return [each for each in found if issubclass(each, bases) and each is not events.TaskEvent]


def table() -> str:
    """Return the table."""
    lines = ["| Celery event | type | when | fields |", "|---|---|---|---|"]
    for kind in kinds():
        name = events.CELERY_EVENTS.get(kind)
        about_task = issubclass(kind, events.TaskEvent)
        shared = SHARED if about_task else set()
        told = [field(*each) for each in events.fields_of(kind) if each[0] not in shared]
        cells = [f"`{name}`" if name else "(observers only)", f"`{kind.__name__}`", when(kind)]
        lines.append(f"| {' | '.join(cells)} | {'<br>'.join(told)} |")
    return "\n".join(lines) + "\n"


def field(name: str, unit: str, about: str) -> str:
    """Return the text about a field."""
    return f"`{name}`{f' ({unit})' if unit else ''}: {about}"


def when(kind: type) -> str:
    """Return what a type of events stands for."""
    return " ".join((kind.__doc__ or "").split())


def page() -> str:
    """Return the page with the table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

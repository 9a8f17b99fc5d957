"""Wait for a fact, not for a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INTERVAL = 0.01


def eventually(
    predicate: Callable[[], T], timeout: float = 10, message: str | Callable[[], str] = ""
) -> T:
    """Return the predicate's first true answer; fail with ``message`` if there is none in time.

    An AssertionError inside the predicate counts as "not yet", and is shown at the end.
    """
    deadline = time.monotonic() + timeout
    answer: T | None = None
    reason: AssertionError | None = None
    while True:
        late = time.monotonic() >= deadline
        try:
            answer, reason = predicate(), None
        except AssertionError as error:
            reason = error
        else:
            if answer:
                return answer
        if late:
            break
        time.sleep(INTERVAL)
    told = message() if callable(message) else message
    text = f"not within {timeout} s: {told or predicate}; last answer {answer!r}"
    raise AssertionError(text) from reason


def never(predicate: Callable[[], object], during: float, message: str = "") -> None:
    """Fail as soon as the predicate is true within ``during`` seconds."""
    deadline = time.monotonic() + during
    while time.monotonic() < deadline:
        answer = predicate()
        if answer:
            text = f"happened within {during} s: {message or predicate}; answer {answer!r}"
            raise AssertionError(text)
        time.sleep(INTERVAL)

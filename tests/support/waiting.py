"""Wait for a fact, not for a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INTERVAL = 0.01
"""Seconds between two looks, at first."""

SELDOM = 0.05
"""Seconds between two looks at what takes long: each costs processor time."""

SLACK = 4
"""How much longer a busy machine may take."""

PATIENCE = 30
"""Least seconds before something is given up."""


def eventually(
    predicate: Callable[[], T],
    timeout: float = 10,
    message: str | Callable[[], str] = "",
    *,
    exact: bool = False,
) -> T:
    """Return the predicate's first true answer; fail with ``message`` if there is none.

    This is no place for a promise about time, since the machine may be busy otherwise: for that,
    measure, and see :func:`in_time`. An AssertionError inside the predicate counts as "not yet",
    and is shown at the end.

    Args:
        predicate: asked again and again.
        timeout: seconds that it may take on an idle machine: :data:`SLACK` times as long is waited,
            and :data:`PATIENCE` at least.
        message: what should have become true.
        exact: no longer than ``timeout`` is waited: for what is expected never to come.
    """
    timeout = timeout if exact else max(SLACK * timeout, PATIENCE)
    began = time.monotonic()
    deadline = began + timeout
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
        time.sleep(_pause(time.monotonic() - began))
    told = message() if callable(message) else message
    text = f"not within {timeout} s: {told or predicate}; last answer {answer!r}"
    raise AssertionError(text) from reason


def seconds_until(predicate: Callable[[], object], message: str | Callable[[], str] = "") -> float:
    """Return how many seconds passed until the predicate was true: for :func:`in_time`."""
    began = time.monotonic()
    eventually(predicate, message=message)
    return time.monotonic() - began


def never(predicate: Callable[[], object], during: float, message: str = "") -> None:
    """Fail as soon as the predicate is true within ``during`` seconds."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < during:
        answer = predicate()
        if answer:
            text = f"happened within {during} s: {message or predicate}; answer {answer!r}"
            raise AssertionError(text)
        time.sleep(_pause(waited))


class Late(AssertionError):
    """Something took longer than promised."""


def in_time(took: float, within: float) -> None:
    """Check a promise about time: it took ``took`` seconds, and ``within`` is the bound.

    The test is played again, twice at most (see conftest.py): what is late by design is late each
    time, and what is late since the machine was busy just then is not. All else that a test checks
    has to hold at the first time.

    Raises:
        Late: if it took longer.
    """
    if not took < within:
        text = f"took {took:.2f} s, and {within:g} s are promised"
        raise Late(text)


def _pause(waited: float) -> float:
    """Return how long to pause before another look."""
    return min(max(INTERVAL, waited / 20), SELDOM)

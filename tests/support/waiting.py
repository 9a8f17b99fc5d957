"""Wait until a condition is true, instead of sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

INTERVAL = 0.01
"""Seconds between the first two checks."""

LONGEST_INTERVAL = 0.05
"""Largest number of seconds between two checks. Each check costs CPU time."""

SLACK = 4
"""Factor by which a busy machine may be slower."""

PROBE = 0.1
"""Seconds of CPU time with which the load of the machine is measured."""

PATIENCE = 60
"""Smallest timeout in seconds."""

STANDSTILL = 10.0
"""Seconds for which the processes of one measurement may stand still on a busy machine."""


def eventually(
    predicate: Callable[[], T],
    timeout: float = 10,
    message: str | Callable[[], str] = "",
    *,
    exact: bool = False,
) -> T:
    """Return the first true result of a predicate; fail with ``message`` if there is none.

    Do not test a promise about time with this, since the machine may be busy: measure the time, and
    use :func:`in_time`. An AssertionError inside the predicate counts as false, and is shown if the
    wait fails.

    Args:
        predicate: called again and again.
        timeout: seconds that it may take on an idle machine. The wait is :data:`SLACK` times as
            long, and at least :data:`PATIENCE`.
        message: what should have become true.
        exact: wait exactly ``timeout``, for a condition that should never become true.
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
    """Return the seconds until the predicate was true, for :func:`in_time`."""
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


def in_time(took: float, within: float) -> None:
    """Check a promise about time that was measured once.

    Any process may stand still in the meantime, for :data:`STANDSTILL`. So let the defect take
    longer than that, for example by a long lease, or measure more than once: :func:`in_time_once`.

    Args:
        took: measured seconds.
        within: promised seconds.
    """
    assert took < within + STANDSTILL or took < within * slowdown() + STANDSTILL, (
        f"took {took:.2f} s, and {within:g} s are promised"
    )


def in_time_once(measured: Iterable[float], within: float) -> None:
    """Check a promise about time that was measured several times: the best one is in time.

    What is late by design is late each time. On a busy machine the bound grows by :func:`slowdown`.

    Args:
        measured: seconds of each measurement.
        within: promised seconds.
    """
    took = min(measured)
    assert took < within or took < within * slowdown(), (
        f"took {took:.2f} s at best, and {within:g} s are promised"
    )


def slowdown() -> float:
    """Return the factor by which work takes longer now than on an idle machine; at least 1."""
    began, used = time.perf_counter(), time.thread_time()
    while (worked := time.thread_time() - used) < PROBE:
        pass
    probed = (time.perf_counter() - began) / worked
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(1.0, probed, load)


def _pause(waited: float) -> float:
    """Return the pause before the next check."""
    return min(max(INTERVAL, waited / 20), LONGEST_INTERVAL)

"""Records which calls run now, so that a call that would wait for itself can be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def noted(running: set[T], call: T) -> Iterator[None]:
    """Keep a call in a set while the body of a ``with`` statement runs.

    A soft time limit may be raised at any line. A call that stayed in the set would be refused from
    then on.
    """
    try:
        try:
            running.add(call)
            yield
        finally:
            running.discard(call)
    finally:
        running.discard(call)

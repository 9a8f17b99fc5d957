"""An attribute that is one object for all threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from celery_singleton_lock.core.shared_attribute import SharedAttribute


class Thing:
    """Makes its parts while another thread does."""

    def __init__(self, threads: int) -> None:
        self.together = threading.Barrier(threads)
        self.made: list[object] = []

    @SharedAttribute
    def part(self) -> object:
        """A part."""
        self.together.wait(60)
        self.made.append(object())
        return self.made[-1]


def test_two_threads_that_read_it_first_at_once_get_one_object():
    thing = Thing(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: thing.part, range(2))
    assert len(thing.made) == 2
    assert first is second is thing.part
    assert len(thing.made) == 2  # read again, it is not made again


def test_it_is_made_again_once_it_is_deleted():
    thing = Thing(1)
    first = thing.part
    del vars(thing)["part"]
    assert thing.part is not first
    assert Thing.part.__doc__ == "A part."

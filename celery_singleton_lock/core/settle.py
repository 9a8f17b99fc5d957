"""How a message settles before it queues for its lock (``lock_debounce``)."""

from __future__ import annotations

from typing import NamedTuple


class Settle(NamedTuple):
    """A quiet period. Each later message of the same task and lock replaces the one that settles.

    Args:
        quiet: seconds without a further message after which the newest one queues.
        most: seconds after the first message after which the newest one queues in any case; None
            for no limit.
        run_first: whether the first message queues at once, if none came within ``quiet``.
    """

    quiet: float
    most: float | None = None
    run_first: bool = False

    @property
    def packed(self) -> list[int]:
        """The value for the scripts: milliseconds, 0 for no limit, and 1 to run the first."""
        most = 0 if self.most is None else max(1, round(self.most * 1000))
        return [max(1, round(self.quiet * 1000)), most, int(self.run_first)]

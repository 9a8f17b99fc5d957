"""What a scene is, and what is seen in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.what_happens.packages import Wanted
from benchmarks.what_happens.stage import Stage


@dataclass(frozen=True)
class Seen:
    """What was seen in a scene.

    Args:
        brief: for the table.
        told: the whole, as a sentence without its full stop.
    """

    brief: str
    told: str


@dataclass(frozen=True)
class Scene:
    """A row of the page.

    Args:
        name: for ``--only``.
        play: plays it. Its docstring is title, description and remark: what is fair to add.
        wanted: how the task is declared.
        workers: how many there are.
    """

    name: str
    play: Callable[[Stage], Seen]
    wanted: Wanted = field(default_factory=Wanted)
    workers: int = 1

    @property
    def title(self) -> str:
        return self._paragraphs[0].rstrip(".")

    @property
    def description(self) -> str:
        return self._paragraphs[1]

    @property
    def remark(self) -> str:
        return self._paragraphs[2]

    @property
    def _paragraphs(self) -> list[str]:
        return [" ".join(part.split()) for part in (self.play.__doc__ or "").split("\n\n")]

    def on(self, package: str) -> Seen:
        """Play it on a stage of its own."""
        with Stage(package, self.wanted, self.workers) as stage:
            return self.play(stage)

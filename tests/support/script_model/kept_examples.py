"""The defects that searches have found, each with its shortest program of moves.

A mutant brings each defect back. So a program is known to show its defect, and can be found again
when the moves have changed: ``python -m tests.property.record_examples``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.script_model.invariants import InvariantBroken, check
from support.script_model.moves import Program, play, walk
from support.script_model.mutants import mutant
from support.script_model.world import World

FOLDER: Final = Path(__file__).parents[2] / "property" / "examples"

WALKS: Final = 400
"""Most random walks that look for a hole that is known to be there."""


@dataclass(frozen=True)
class Hole:
    """What a search has found.

    Args:
        file: name of its program, without ``.json``.
        story: what went wrong.
        mutant: name of the mutant that opens it again.
    """

    file: str
    story: str
    mutant: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.file}.json"

    def load(self) -> dict[str, Any]:
        kept: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return kept


HOLES: Final = (
    Hole(
        "park_grants_nobody",
        "A message was parked at a free lock and not granted: a local function hid an argument.",
        "park does not grant",
    ),
    Hole(
        "twin_inherits_deadline",
        "A client waited in its slot and died; its twin was told that its wait was over.",
        "a twin inherits the deadline of a client that died",
    ),
    Hole(
        "asking_while_adrift",
        "A message adrift was asked for, and a live waiter stayed beside a free permit.",
        "a message adrift asks, and nobody else is granted",
    ),
    Hole(
        "parked_again_while_it_runs",
        "A message was acknowledged at its start; parked once more after a lost reply, it ran "
        "twice at once.",
        "a message that was acknowledged at its start is kept again",
    ),
    Hole(
        "claim_delivers_itself",
        "A waiter claimed in its turn, and its message was delivered beside it.",
        "who claims in its turn gets its own delivery",
    ),
    Hole(
        "dead_alone_in_the_index",
        "A message that was acknowledged at its start died with its process, and stayed in the "
        "index for ever.",
        "who dies alone stays in the index",
    ),
    Hole(
        "read_late_from_a_socket",
        "A stopped worker read a message that another had long been given, and which was thus not "
        "marked as redelivered: both ran at once.",
        "only a marked copy is looked up when it is parked",
    ),
    Hole(
        "full_server_is_not_swept",
        "Redis was full, and refused the first write of every sweep: who died blocked the rest.",
        "a full server cannot be swept",
    ),
    Hole(
        "kept_permit_for_nobody",
        "A retry took its kept permit while nobody consumed its queue, and nobody heard of it.",
        "a kept permit is given to a message that nobody can run",
    ),
    Hole(
        "queues_again_after_its_wait",
        "A message that left for publishing, and whose wait ended, queued again until a sweep.",
        "a message whose wait is over queues again",
    ),
    Hole(
        "line_of_clients_stays",
        "A message left its line, and the clients behind it kept a line that never expired.",
        "a line of clients lives for ever",
    ),
)


def breaks(client: Any, program: Program, scripts: Any = None) -> str | None:
    """Return the invariant that a program breaks, if any."""
    world = World(client, check, scripts)
    try:
        play(world, program)
    except InvariantBroken as found:
        return found.invariant
    return None


def search(client: Any, scripts: Any) -> tuple[str, Program]:
    """Return the invariant that a random walk breaks, and the walk.

    Raises:
        LookupError: none of them breaks any.
    """
    for seed in range(WALKS):
        world = World(client, check, scripts)
        try:
            walk(world, seed, 150)
        except InvariantBroken as found:
            return found.invariant, world.played
    msg = f"{WALKS} walks break nothing"
    raise LookupError(msg)


def shrunk(client: Any, program: Program, invariant: str, scripts: Any = None) -> Program:
    """Return the program without all moves that it does not need to break the invariant."""
    kept = list(program)
    size = len(kept) // 2
    while size:
        for shorter in _without(kept, size):
            if breaks(client, shorter, scripts) == invariant:
                kept = shorter
                break
        else:
            size //= 2
    return kept


def _without(program: list[Any], size: int) -> Iterator[list[Any]]:
    """Yield the program without each run of so many moves, the last first."""
    for start in range(len(program) - size, -1, -size):
        yield program[:start] + program[start + size :]


def keep(client: Any, hole: Hole) -> dict[str, Any]:
    """Look for a hole, and keep the shortest program that shows it."""
    scripts = mutant(hole.mutant).scripts()
    invariant, found = search(client, scripts)
    program = shrunk(client, found, invariant, scripts)
    write(hole.path, hole.story, invariant, program)
    return hole.load()


def write(path: Path, story: str, invariant: str, program: Program) -> None:
    """Write a program, a move to a line."""
    moves = ",\n    ".join(json.dumps([name, arguments]) for name, arguments in program)
    head = f'"story": {json.dumps(story)},\n  "breaks": {json.dumps(invariant)},'
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'{{\n  {head}\n  "moves": [\n    {moves}\n  ]\n}}\n', encoding="utf-8", newline="\n"
    )

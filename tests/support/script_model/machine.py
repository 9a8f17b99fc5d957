"""The moves as rules of a Hypothesis state machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import event, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from support.script_model import outcomes
from support.script_model.invariants import InvariantBroken, check
from support.script_model.moves import MOVES, everybody_dies
from support.script_model.world import World


def machine_on(client: Any, tally: Counter[str]) -> Callable[[settings, int | None], int]:
    """Return a function that runs the machine on a client's Redis, and returns the number of steps.

    A rule's arguments are drawn from the move's short lists. A move is a rule as many times as it
    has weight. Found histories are printed by Hypothesis as calls of the moves. What they led to is
    counted in ``tally``, and shown by Hypothesis' own statistics as events.
    """
    walked = [0]

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()
            self.world = World(client, check, watch=partial(outcomes.count, self.seen))
            self.broken = False

        def teardown(self) -> None:
            walked[0] += self.world.steps
            if not self.broken:
                everybody_dies(self.world)
            tally.update(self.seen)
            for outcome in self.seen:
                event(outcome)

    for name, (function, choices, weight) in MOVES.items():
        for number in range(weight):
            given = {
                key: st.sampled_from(list(dict.fromkeys(values))) for key, values in choices.items()
            }
            made = rule(**given)(_as_method(function, f"{name}_{number}" if number else name))
            setattr(Machine, f"{name}_{number}" if number else name, made)

    def run(how: settings, seed: int | None) -> int:
        test = Machine if seed is None else seeded(seed)(Machine)
        run_state_machine_as_test(test, settings=how)
        return walked[0]

    return run


def _as_method(function: Callable[..., None], name: str) -> Callable[..., None]:
    def method(self: Any, **drawn: Any) -> None:
        try:
            function(self.world, **drawn)
        except InvariantBroken:
            self.broken = True
            print("\n".join(self.world.history[-20:]))
            raise

    method.__name__ = name
    return method

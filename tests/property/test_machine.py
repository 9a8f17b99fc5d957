"""Random histories, generated and shrunk by Hypothesis, on the real scripts in a real Redis.

A failing history is shrunk, and printed as calls of the store. For longer runs:
``python -m tests.property.run --steps 200000``.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings

from support.script_model.machine import machine_on
from support.script_model.outcomes import ALL, unseen

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the invariants are the scripts'")]

EXAMPLES, USUAL_EXAMPLES = 100, 25
STEPS = 60


@pytest.mark.slow
def test_machine_keeps_the_invariants(redis_client, full):
    """No sequence of calls, losses and deaths breaks an invariant."""
    tally: Counter[str] = Counter()
    examples = EXAMPLES if full else USUAL_EXAMPLES
    run = machine_on(redis_client, tally)
    run_settings = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    steps = run(run_settings, None)
    assert steps > examples, "the machine did not move"
    assert len(unseen(tally)) < len(ALL) * 3 / 4, "the machine plays the same over and over"

"""Random histories, made and shrunk by Hypothesis, on the real scripts on a real Redis.

A found history is printed as calls of the verbs, and shrunk. Longer:
``python -m tests.property.run --steps 200000``.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings

from support.script_model.machine import machine_on
from support.script_model.outcomes import ALL, unseen

pytestmark = [pytest.mark.property, pytest.mark.needs_real_redis("the invariants are the scripts'")]

EXAMPLES = 100
STEPS = 60


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machine_keeps_the_invariants(redis_client):
    """No sequence of calls, losses and deaths breaks an invariant."""
    tally: Counter[str] = Counter()
    run = machine_on(redis_client, tally)
    run_settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    steps = run(run_settings, None)
    assert steps > EXAMPLES, "the machine did not move"
    assert len(unseen(tally)) < len(ALL) / 2, "the machine plays the same over and over"

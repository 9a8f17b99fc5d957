"""A short storm over real workers: no rule is broken, and wrong variants of the library are caught.

CI plays a longer one instead, in a step of its own: ``python -m tests.chaos --minutes 2``, with
``--catch``.
"""

from __future__ import annotations

import pytest

from chaos.__main__ import summary
from chaos.bounds import measure, table
from chaos.defects import VARIANTS
from chaos.storm import Storm

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.needs_real_redis("signals, append-only data"),
    pytest.mark.timeout(600),
    pytest.mark.long("storm", "variant", "next_one"),
]


def test_a_storm_breaks_no_rule(tmp_path):
    """35 s of kills, stops, cuts and revokes without a violation of a rule."""
    report = Storm(tmp_path, seed=1, seconds=35).run()
    assert not report.violations, summary(report)
    assert report.struck >= 12, "the storm was none"
    assert len(report.history.of("published")) >= 100, "there was no traffic"


@pytest.mark.parametrize("variant", ["release", "renewal", "kept"])
def test_a_wrong_variant_is_caught(tmp_path, variant):
    """The same storm sees what is wrong with a library that lacks one guarantee, within 30 s."""
    assert variant in VARIANTS
    report = Storm(tmp_path, seed=1, seconds=30, broken=variant).run()
    assert report.caught is not None, summary(report)


def test_the_next_one_begins_within_the_promised_time(tmp_path):
    """However the one before has vanished: see docs/guarantees.md."""
    found = measure(tmp_path, times=1)
    assert all(each.kept for each in found), table(found)

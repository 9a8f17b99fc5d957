"""The alert rules of the examples fire when they should, checked with promtool."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
RULES = (MONITORING / "alerts.yml").read_text()
TESTS = (MONITORING / "alerts_test.yml").read_text()


def promtool(*args):
    """Run Prometheus' tool (in Debian's package prometheus), if it is here."""
    found = os.environ.get("CSL_TEST_PROMTOOL") or shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on this machine")
    ran = subprocess.run([found, *args], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_rule_is_seen_to_fire_and_to_be_quiet():
    declared = set(re.findall(r"- alert: (\w+)", RULES))
    assert declared == set(re.findall(r'alertname="(\w+)"', TESTS))
    assert declared == set(re.findall(r"alertname: (\w+)", TESTS))


def test_the_list_that_a_stopped_queue_advises_begins_with_the_most_waiters():
    """Sorted by name, it showed twenty other locks, unless Redis had over 20,000 keys."""
    text = " ".join(RULES[RULES.index("CeleryLockQueueStopped") :].split())
    assert "`celery -A app locks list --sort waiting --limit 20` shows the locks with most" in text


def test_the_rules_fire_when_they_should():
    promtool("test", "rules", str(MONITORING / "alerts_test.yml"))


def test_prometheus_can_read_what_the_dashboard_asks(tmp_path):
    """As rules, since its tool reads no dashboard; the dashboard's variables are numbers here."""
    board = json.loads((MONITORING / "dashboard.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = [
        {"record": f"panel:{n}", "expr": re.sub(r"\$\w+|\$\{\w+\}", "5m", expr)}
        for n, expr in enumerate(asked)
    ]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))

"""The tables of speed in README.md and docs/costs.md are what the benchmarks printed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HAND_OVER = {
    "benchmark": "hand_over",
    "command": "python -m benchmarks.hand_over --rounds 9",
    "machine": {
        "date": "2031-01-02",
        "cores": 4,
        "load_before": 0.25,
        "python": "3.14.0",
        "celery": "5.7.0",
        "redis_py": "8.1.0",
        "redis": "redis-server 8.0 (/usr/bin/redis-server)",
    },
    "settings": {"hold": 0.01},
    "scenes": {"beside": {"redis_py": {"p50_ms": 50.0, "p99_ms": 99.0}}, "alone": {}},
    "targets": [
        {"what": "beside: p50 in ms", "value": 1.234, "target": "<= 1.6", "met": True},
        {"what": "beside: p99 in ms", "value": 25.0, "target": "<= 20", "met": False},
        {"what": "alone: p50 in ms", "value": 0.5, "target": "<= 1", "met": True},
        {"what": "alone: p99 in ms", "value": 4.0, "target": "<= 5", "met": True},
    ],
}


@pytest.fixture
def table(monkeypatch):
    """The module, which is not installed."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.table")


@pytest.fixture
def copies(table, monkeypatch, tmp_path):
    """Let the module write to copies of its files."""
    for page in table.PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text((ROOT / page).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "results.json").write_text(json.dumps(table.known()), encoding="utf-8")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results.json")
    return tmp_path


@pytest.mark.parametrize("page", ["README.md", "docs/costs.md"])
def test_the_table_of_a_page_is_up_to_date(table, page):
    """Write it again with ``python -m benchmarks.table --write``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == table.written(text, page, table.known())


def test_no_figures_are_kept_of_a_row_that_is_no_more(table):
    assert list(table.known()) == [key for key in table.ROWS if key in table.known()]


def test_one_benchmark_is_renewed_without_the_others(table, copies):
    before = table.known()
    (copies / "new.json").write_text(json.dumps(HAND_OVER), encoding="utf-8")
    assert table.main([str(copies / "new.json"), "--write"]) == 0
    after = table.known()
    assert {key for key in after if after[key] != before.get(key)} == {"hand-over, beside"}
    row = after["hand-over, beside"]
    assert row["ours"] == "1.23 / 25.0 ms"
    assert row["target"] == "at most 1.6 / at most 20 (missed)"
    assert row["date"] == "2031-01-02, load 0.2"
    for page in table.PAGES:
        text = (copies / page).read_text(encoding="utf-8")
        assert "| `python -m benchmarks.hand_over --rounds 9` |" in text
        assert "4 cores, Python 3.14.0, Celery 5.7.0, redis-py 8.1.0, redis-server 8.0." in text


def test_a_row_whose_peer_did_not_run_keeps_its_figures(table):
    assert "hand-over, alone" not in table.figures(HAND_OVER)


def test_figures_of_a_busy_machine_say_so(table):
    busy = {**HAND_OVER, "machine": {**HAND_OVER["machine"], "load_before": 7.5}}
    assert table.figures(busy)["hand-over, beside"]["date"] == "2031-01-02, load 7.5 (busy machine)"


def test_a_page_without_the_markers_is_refused(table):
    with pytest.raises(ValueError, match=r"README\.md has .* 0 times"):
        table.written("no markers", "README.md", {})

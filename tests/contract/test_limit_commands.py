"""The commands pause, resume, limit and rate: of one lock, of many, and for a time."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from celery_singleton_lock.cli.main import main
from celery_singleton_lock.core.model import Claim, Owner, Verdict
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.rate import Rate, packed, rates_of
from celery_singleton_lock.store.operator.redis import RedisAdminStore

pytestmark = [pytest.mark.contract, pytest.mark.needs_real_redis("the command line opens a URL")]

HOUR = 3600


@pytest.fixture
def store(redis_client):
    return RedisAdminStore(redis_client)


@pytest.fixture
def run(redis_url):
    def invoke(*words, code=0, stdin=None):
        found = CliRunner().invoke(main, ["--backend", redis_url, *map(str, words)], input=stdin)
        assert found.exit_code == code, (found.output, found.exception)
        return found

    return invoke


@pytest.fixture
def names(store):
    """Locks that exist."""
    found = ("tenant:1", "tenant:2", "other")
    for name in found:
        hold(store, name)
    return found


def hold(store, name):
    assert store.acquire(Owner(new_token()), Claim(name, 300.0)).verdict is Verdict.GRANTED


def test_a_lock_is_paused_for_a_time(run, store, names):
    assert "Paused for 10 min 0 s." in run("pause", "other", "--for", "10m").output
    assert 500 < store.inspect("other").pause_left <= 600
    shown = run("show", "other").output
    assert "PAUSED for another" in shown
    assert ", until 20" in shown
    assert "It was not paused." in run("resume", "tenant:1").output
    assert "Resumed." in run("resume", "other").output
    assert not store.inspect("other").paused
    assert run("audit").output.count(" until 20") == 1


def test_a_limit_is_set_for_a_time(run, store, names):
    assert "The limit is 5 for 1 h 0 min." in run("limit", "other", 5, "--for", "1h").output
    view = store.inspect("other")
    assert view.limit == 5
    assert HOUR - 60 < view.limit_left <= HOUR
    assert "set by an operator for another" in run("show", "other").output
    assert "The limit is 1." in run("limit", "other", "--clear").output


def test_a_rate_is_set_for_a_time_and_cleared(run, store, names):
    told = run("rate", "other", "100/m", "9/s", "--for", "1h").output
    assert "The rate is 100/m, 9/s for 1 h 0 min." in told
    view = store.inspect("other")
    assert [str(rate) for rate in view.rates] == ["100/m", "9/s"]
    assert HOUR - 60 < view.rates_left <= HOUR
    assert "set by an operator for another" in run("show", "other").output
    assert "rate 100/m, 9/s until 20" in run("audit").output
    run("rate", "other", "10/s", "--burst", 5)
    assert [str(rate) for rate in store.inspect("other").rates] == ["10/s smooth, burst 5"]
    assert "The rate is as its tasks declare." in run("rate", "other", "--clear").output
    assert not store.inspect("other").rates_set


def test_a_pattern_means_the_locks_that_exist_now(run, store, names):
    """They are listed before the question."""
    asked = run("pause", "--match", "tenant:*", "--for", "10m", code=1, stdin="n\n").output
    assert "tenant:1\ntenant:2\n2 locks in all\nPause these 2 locks?" in asked
    assert not store.inspect("tenant:1").paused
    assert "2 locks changed." in run("pause", "--match", "tenant:*", stdin="y\n").output
    assert store.inspect("tenant:1").paused
    assert not store.inspect("other").paused
    hold(store, "tenant:3")
    assert not store.inspect("tenant:3").paused
    run("limit", "--match", "tenant:", 4, "--yes")
    run("rate", "--match", "tenant:", "7/m", "--yes")
    for name in ("tenant:1", "tenant:3"):
        view = store.inspect(name)
        assert (view.limit, [str(rate) for rate in view.rates]) == (4, ["7/m"])
    told = json.loads(run("resume", "--match", "tenant:", "--yes", "--json").output)
    assert told == {"action": "resume", "locks": ["tenant:1", "tenant:2"]}
    assert {entry["lock"] for entry in store.audit()} == {"tenant:1", "tenant:2", "tenant:3"}


def test_a_dry_run_changes_nothing(run, store, names):
    found = json.loads(run("pause", "--match", "tenant", "--dry-run", "--json").output)
    assert found == {"locks": ["tenant:1", "tenant:2"], "total": 2}
    assert "1 lock would be changed" in run("limit", "other", 3, "--dry-run").output
    assert store.audit() == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pause"], "give the name of one lock, or --match"),
        (["pause", "a", "b"], "give the name of one lock, or --match"),
        (["pause", "a", "--match", "b"], "give the name of one lock, or --match"),
        (["pause", "a", "--for", "soon"], "'soon' is not a duration: give 90, 10m, 2h or 3d"),
        (["pause", "a", "--for", "0"], "'0' is 0 seconds: give a time above 0"),
        (["pause", "a", "--for", "400d"], "give a time above 0, and at most 366d"),
        (["limit", "a"], "give a number of permits, or --clear"),
        (["limit", "a", "3", "--clear"], "give a number of permits, or --clear"),
        (["limit", "a", "0"], "0 is not in the range"),
        (["limit", "a", "3", "4"], "give one number of permits, not 3 4"),
        (["limit", "a", "--clear", "--for", "1h"], "so --for has no effect"),
        (["rate", "a"], "give a rate, such as 100/m, or --clear"),
        (["rate", "a", "fast"], "Rate 'fast' cannot be read"),
        (["rate", "a", "5/m", "9/m"], "two sliding rates have a period of 60 seconds"),
        (["rate", "a", "5/m", "--burst", "9"], "burst of rate '5/m' is 9"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_refused(run, store, words, told):
    assert told in run(*words, code=2).output
    assert store.audit() == []


def test_a_name_or_pattern_that_no_lock_has_is_refused(run, names):
    assert (
        "To set the rate of it before its first use: --force"
        in run("rate", "tenant:9", "5/m", code=1).output
    )
    assert "no lock has a name with 'nobody'" in run("pause", "--match", "nobody", code=1).output


def test_a_rate_by_cost_is_set_beside_a_rate_of_starts(run, store, names):
    """Of the tasks: `show` tells them apart."""
    claim = Claim("other", 300.0, 9, flow=packed(rates_of(["7/h", Rate("100/h", cost=40)])))
    assert store.acquire(Owner(new_token()), claim).verdict is Verdict.BLOCKED
    assert "The rate is 500/h." in run("rate", "other", "500/h", "--by-cost").output
    shown = run("show", "other").output
    assert "500/h, 0 used, set by an operator\n" in shown
    assert "rate     7/h: 0 in the last period\n" in shown
    assert "100/h" not in shown
    run("rate", "other", "--clear")
    assert "100/h, 0 used\n" in run("show", "other").output

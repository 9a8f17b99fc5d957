"""The pytest plugin in a separate project: the examples of docs/testing.md."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import celery_singleton_lock

pytest_plugins = "pytester"

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+)\.py\n")
PLUGIN = "celery_singleton_lock.pytest_plugin"
INSTALLED = any(each.value == PLUGIN for each in entry_points(group="pytest11"))


@pytest.fixture
def project(pytester, monkeypatch):
    """A project that has the files of the page, and finds no Redis."""
    monkeypatch.setenv("PYTHONPATH", str(Path(celery_singleton_lock.__file__).parents[1]))
    monkeypatch.setenv("PATH", str(pytester.path))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    for text in BLOCK.findall(PAGE):
        named = FILE.match(text)
        if named:
            pytester.makepyfile(**{named[1]: text})
    return pytester


def run(project, *args):
    """Run pytest in the project, with the plugin, as an installed package brings it along."""
    plugin = () if INSTALLED else ("-p", PLUGIN)
    return project.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", "-n0", *args)


@pytest.mark.full
def test_the_page_runs_unchanged(project):
    run(project).assert_outcomes(passed=6)


def test_locks_without_celery_run_as_they_stand():
    (text,) = [text for text in BLOCK.findall(PAGE) if "memory_client" in text]
    exec(compile(text, "docs/testing.md", "exec"), {})


@pytest.mark.full
def test_a_failure_is_shown_at_the_line_of_the_assertion(project):
    """Not from the inside of the kit."""
    project.makepyfile(
        test_shop="""
        from shop import settle

        def test_nothing_holds_it(shop_worker, singleton_locks):
            singleton_locks.assert_parked(settle.delay(42, 10), timeout=0.5)
        """
    )
    told = run(project)
    told.assert_outcomes(failed=1)
    told.stdout.fnmatch_lines(
        [
            ">*singleton_locks.assert_parked(*",
            "E*AssertionError: Task * is not parked. What happened to it:*",
            "E*it started under the lock 'account:42'*",
            "E*The lock 'account:42': held by nobody; waiting: nobody.*",
            "test_shop.py:4: AssertionError",
        ]
    )


@pytest.mark.full
def test_celerys_fixtures_work(project):
    """Their app and worker, which has the pool solo; tasks are declared before it starts."""
    project.makepyfile(
        conftest="""
        import pytest
        import work

        pytest_plugins = ["celery.contrib.pytest"]

        @pytest.fixture(scope="session")
        def celery_config():
            return {"broker_url": "memory://", "result_backend": "cache+memory://",
                    "broker_transport_options": {"polling_interval": 0.01},
                    "singleton_lock_backend": "memory://"}

        @pytest.fixture(scope="session")
        def celery_worker_parameters():
            return {"perform_ping_check": False}
        """,
        work="""
        from celery import shared_task
        from celery_singleton_lock import LockedTask

        @shared_task(base=LockedTask, lock_key="k")
        def work(): ...
        """,
        test_shop="""
        from work import work

        def test_parked(celery_app, celery_worker, singleton_locks):
            assert singleton_locks.app is celery_app
            with singleton_locks.hold("k"):
                result = work.delay()
                singleton_locks.assert_parked(result)
            singleton_locks.assert_ran_alone(result)
        """,
    )
    run(project).assert_outcomes(passed=1)


def test_a_run_without_locks_is_not_affected(project, monkeypatch):
    """No fixture asked for, nothing imported; other plugins, which may import Celery, stay away."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    project.makepyfile(
        conftest="",
        test_shop="""
        import sys

        def test_nothing_is_imported():
            assert not {"celery", "redis", "fakeredis"} & set(sys.modules)
        """,
    )
    project.runpytest_subprocess("-p", PLUGIN).assert_outcomes(passed=1)

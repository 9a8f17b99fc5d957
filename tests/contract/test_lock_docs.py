"""The examples in the docs about locks in code, and those in examples/, are run here."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from types import MappingProxyType

import pytest
import redis.asyncio
from celery import _state

import celery_singleton_lock
from celery_singleton_lock import Lock
from celery_singleton_lock.core.model import CLAIM_LEASE
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.lock.backends import _watchdogs

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
URL = "redis://localhost:6379/0"


@pytest.fixture(autouse=True)
def _no_watchdog_stays():
    yield
    for dog in list(_watchdogs.values()):
        if hasattr(dog, "stop"):
            dog.stop()


def blocks(page, redis_url):
    """Return the Python of a page, with this test's Redis."""
    found = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    return [block.replace(URL, redis_url) for block in found]


# --- locks-in-code.md -----------------------------------------------------------------------------


def test_each_example_of_the_page_runs(redis_url, capsys):
    """Alone, as if copied from the page."""
    found = blocks("locks-in-code.md", redis_url)
    assert len(found) == 7
    for block in found:
        exec(block, {})
    said = capsys.readouterr().out
    assert said.count("held, fence 1") == 2
    assert "report 7" in said
    assert "call 1\ncall 2 waits for the rate\none more prompt" in said


@pytest.mark.parametrize("kind", ["Lock", "AsyncLock"])
def test_the_page_names_every_argument_and_every_call(kind):
    page = (DOCS / "locks-in-code.md").read_text(encoding="utf-8")
    lock = getattr(celery_singleton_lock, kind)
    given = inspect.signature(lock).parameters.values()
    arguments = {each.name for each in given if each.kind is not each.VAR_KEYWORD} - {"backend"}
    calls = {name for name in dir(lock) if not name.startswith("_")}
    assert {name for name in arguments | calls if not re.search(rf"\b{name}\b", page)} == set()


# --- parity.md ------------------------------------------------------------------------------------

ROW = re.compile(r"^\| ([^|]+) \|(?:[^|]*\|){2} `([^|]+)` \| `([^|]+)` \|$", re.MULTILINE)
ROWS = ROW.findall((DOCS / "parity.md").read_text(encoding="utf-8"))


PUBLIC = {name: getattr(celery_singleton_lock, name) for name in celery_singleton_lock.__all__}


def expected(name, lock):
    """Return what a row's call answers, where that is known beforehand."""
    return {
        "acquire it if it is free": True,
        "own owner id": lock and lock.token,
        "id of the holder": lock and lock.token,
        "whether anybody holds it": True,
        "whether this client holds it": True,
        "hold it longer": True,
        "for a full lease from now": True,
        "a chosen owner id": True,
        "reset one": 1,
        "wait, with a fall-back if the holder's lease ends": True,
        "compute once for all callers": 42,
        "reset all": 2,
    }.get(name)


def compiled(cell):
    """Return a cell as code; a cell of one expression answers with it.

    Its waits may take longer: a busy machine stands still for as long as they last.
    """
    tree = ast.parse(cell.replace("blocking_timeout=2)", "blocking_timeout=60)"))
    if isinstance(tree.body[-1], ast.Expr):
        target = ast.Name("answer", ast.Store())
        tree.body[-1] = ast.copy_location(ast.Assign([target], tree.body[-1].value), tree.body[-1])
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(ast.fix_missing_locations(tree), cell, "exec", flags=flags)


async def run_cells(column, space, before):
    """Run a column from top to bottom; compare what is answered, and collect it."""
    answers = {}
    for row in ROWS:
        name, space["answer"] = row[0], None
        await asyncio.to_thread(before, name)
        running = eval(compiled(row[column]), space)
        if running is not None:
            await running
        wanted = expected(name, space.get("lock"))
        assert wanted is None or space["answer"] == wanted, row[column]
        answers[name] = space["answer"]
    return answers


def before_row(client):
    """Return the set-up of a row: another client holds a lock that expires, or is reset."""

    def before(name):
        if "lease ends" in name:
            Lock(client, "lapses", lease=0.3, renew=False).acquire()
        if name == "reset all":
            Lock(client, "somebody's", renew=False, thread_local=False).acquire()

    return before


def test_every_call_for_threads_matches_its_row_in_the_docs(redis_client):
    space = {**PUBLIC, "client": redis_client, "new_token": new_token}
    space["compute"] = lambda: 42
    answers = asyncio.run(run_cells(1, space, before_row(redis_client)))
    assert len(answers) == 18
    assert answers["the holder, as a text"].startswith("pid ")


def test_every_call_for_asyncio_matches_its_row_in_the_docs(redis_client, redis_url):
    async def compute():
        return 42

    async def scene():
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            space = {**PUBLIC, "client": client, "new_token": new_token}
            space["compute"] = compute
            return await run_cells(2, space, before_row(redis_client))

    answers = asyncio.run(scene())
    assert answers["the holder, as a text"].startswith("pid ")


def test_the_page_has_the_actual_claim_lease():
    assert f"a claim lease of {CLAIM_LEASE:g} s" in " ".join(
        (DOCS / "parity.md").read_text(encoding="utf-8").split()
    )


# --- migrate/ -------------------------------------------------------------------------------------

LOCKS = {"redis-py": "redis", "python-redis-lock": "redis_lock"}
TASKS = {
    "celery-singleton": "celery_singleton",
    "celery-once": "celery_once",
    "celery-heimdall": "celery_heimdall",
}


@pytest.mark.parametrize("page", [*LOCKS, *TASKS])
def test_a_page_starts_with_the_changes_in_behaviour(page):
    text = (DOCS / "migrate" / f"{page}.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[:3] == ["What changes in behaviour", "Before", "After"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("page", LOCKS)
def test_a_lock_before_and_after_excludes_others_while_the_work_runs(
    page, when, redis_client, redis_url
):
    """As in its documentation; afterwards the lock is free."""
    if when == "before":
        pytest.importorskip(LOCKS[page])
    before, after = blocks(f"migrate/{page}.md", redis_url)
    text, keys = (before if when == "before" else after), []
    space = {"client": redis_client, "work": lambda: keys.extend(redis_client.scan_iter("*"))}
    exec(text, space)
    assert keys
    exec(text, space)


@pytest.fixture
def declared(redis_url, monkeypatch):
    """Run a block of a page; its app does not affect other tests."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    monkeypatch.setattr(_state._tls, "current_app", None, raising=False)
    apps = []

    def declare(page, when, work):
        before, after = blocks(f"migrate/{page}.md", redis_url)
        space = {"__name__": "tasks", "work": work}
        exec(before if when == "before" else after, space)
        apps.append(space["app"])
        return space["app"], space["settle"]

    yield declare
    for app in apps:
        app.close()


@pytest.mark.parametrize("page", TASKS)
def test_a_task_before_sent_no_second_one(page, redis_client, declared):
    """What people come from: the second call sends nothing."""
    pytest.importorskip(TASKS[page])
    _, settle = declared(page, "before", lambda: None)
    first, second = settle.delay(1, 10), settle.delay(1, 10)
    assert second.id in {None, first.id}
    assert settle.delay(2, 10).id not in {None, first.id}


@pytest.mark.parametrize("page", TASKS)
def test_a_task_after_sends_no_second_one(page, redis_client, declared):
    """None for the same account, whatever the amount; one for another account."""
    ran = []
    app, settle = declared(page, "after", lambda: ran.append(1))
    first, second, other = settle.delay(1, 10), settle.delay(1, 20), settle.delay(2, 10)
    assert (first.duplicate, second.duplicate, other.duplicate) == (False, True, False)
    assert second.id == first.id
    app.conf.update(task_always_eager=True, singleton_lock_eager=True)
    assert settle.delay(1, 20).state == "SUCCESS"
    assert ran == [1]


# --- examples/ ------------------------------------------------------------------------------------


@pytest.fixture
def example(redis_url, monkeypatch, capsys):
    """Run an example with changes, and return what it prints, line by line."""
    monkeypatch.setenv("CELERY_BROKER_URL", redis_url)

    def run(name, changes=MappingProxyType({})):
        path = ROOT / "examples" / name
        code = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(code) <= 25, "about a dozen lines, and what they import"
        text = path.read_text(encoding="utf-8")
        for short, long in changes.items():
            assert short in text
            text = text.replace(short, long)
        exec(compile(text, str(path), "exec", dont_inherit=True), {"__name__": "__main__"})
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("name", ["two_level_lock.py", "two_level_lock_async.py"])
def test_three_print_one_after_another_each_with_a_higher_fence(example, name):
    said = example(name)
    assert {line.split()[0] for line in said} == {"Ann", "Ben", "Cid"}
    fences = [int(line.split()[-1]) for line in said]
    assert fences == sorted(set(fences))


def test_ten_calls_take_three_seconds_at_three_a_second(example):
    said = example("rate.py")
    assert sorted(int(line.split()[-1]) for line in said) == list(range(10))
    assert max(float(line.split()[0]) for line in said) >= 3


def test_the_urgent_waiter_is_next(example):
    assert example("priority.py") == ["ticket", "report", "backup"]


def test_a_late_owner_does_not_free_its_successors_lock(example):
    """SET NX, with a release that checks the token."""
    assert example("set_nx_with_token.py") == [
        "mine: True",
        "late: False",
        "late: True",
        "not mine any more; late holds it: True",
    ]


@pytest.mark.usefixtures("renew_often")
def test_the_watchdog_renews_and_reports_a_loss(example):
    """With a longer lease, so that a busy machine renews it in time, and as often."""
    assert example("watchdog.py", {"lease=0.5": "lease=20"}) == [
        "lost after four leases: False",
        "heard of the loss: True",
    ]

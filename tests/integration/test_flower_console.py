"""The operator's console in Flower's Locks page: what is stuck, why, and what is done about it.

There is no worker: the tests write the state of the locks themselves.
"""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace

import pytest

from celery_singleton_lock.core.fair_group import Group
from celery_singleton_lock.core.model import Claim, Ending, Owner
from celery_singleton_lock.core.owner_token import new_token
from celery_singleton_lock.core.rate import Rate, packed, rates_of
from celery_singleton_lock.core.settle import Settle
from celery_singleton_lock.core.unique import UniqueCall
from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.worker.install import install
from integration.book import Book
from support import waiters
from support.flower import (
    PASSWORD,
    USER,
    Flower,
    accessibility_problems,
    browser,
    needs_flower,
)
from support.waiters import hold_many
from support.waiting import eventually, in_time

pytestmark = [
    pytest.mark.needs_real_redis("fakeredis is too slow for Flower and 30,000 locks"),
    pytest.mark.timeout(240),
]

ALIVE, DEAD = "worker-1@host#a1", "worker-2@host#b2"
MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


@pytest.fixture(scope="module")
def book(redis_provider, tmp_path_factory):
    needs_flower()
    with (
        RedisServer(redis_provider) as server,
        Book(server.url, tmp_path_factory.mktemp("book")) as book,
    ):
        yield book


@pytest.fixture(scope="module")
def flower(book, tmp_path_factory):
    env = book.worker().environment
    with Flower("integration.worker_app", env, tmp_path_factory.mktemp("flower")) as flower:
        yield flower


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture
def store(book):
    """The operator's store of an empty Redis, with one live worker."""
    keys = book.client.keys("csl:*")
    if keys:
        book.client.delete(*keys)
    store = RedisAdminStore(book.client, claim_lease=60.0)
    store.app_realm = install(book.app).realm
    store.worker_heartbeat(ALIVE, store.app_realm, ["q"], 600)
    yield store
    store.close()


@pytest.fixture
def view(chromium, flower):
    """A page, logged in. An error of a script, or a request to another server, fails the test."""
    context = chromium.new_context(
        base_url=flower.url,
        http_credentials={"username": USER, "password": PASSWORD},
        viewport={"width": 1280, "height": 900},
    )
    context.set_default_timeout(30_000)
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
    page.on("console", lambda told: "Content Security" in told.text and problems.append(told.text))
    page.on(
        "request",
        lambda asked: asked.url.startswith((flower.url, "data:")) or problems.append(asked.url),
    )
    yield page
    context.close()
    assert problems == []


def hold(store, name, worker=ALIVE, task="shop.settle", limit=1, lease=120.0):
    """Hold a lock as a task; return its token."""
    token = new_token()
    owner = Owner(token, f"{token[:8]}-task/0/0", task, worker, "host", 7)
    store.acquire(owner, Claim(name, lease=lease, limit=limit))
    return token


def park(store, *args, **how):
    """Park a message of the broker of Flower's app; return its token."""
    return waiters.park(store, *args, realm=store.app_realm, **how)


def trouble(store):
    """Make one lock of each kind."""
    for name in ("account:1", "account:2"):
        hold(store, name)
    park(store, "account:2", "waits-1")
    hold(store, "paused")
    park(store, "paused")
    store.pause("paused", Operator("jane", why="migration"))
    store.worker_heartbeat(DEAD, store.app_realm, ["q"], 600)
    hold(store, "dead", DEAD)
    park(store, "dead", "waits-2")
    token = hold(store, "unserved")
    park(store, "unserved", "waits-3", queue="nobody")
    store.release("unserved", token, Ending.FINAL)
    # The heartbeat of a worker that died four seconds ago.
    store.client.pexpire(f"csl:fleet:worker:{DEAD}", 26_000)


def open_page(page, query=""):
    page.goto(f"/locks{query}")
    page.wait_for_selector('#csl-locks[data-state="shown"]')


def names(page):
    return page.locator(".csl-fold").all_inner_texts()


def chip(page, state):
    return page.locator(f'#csl-states [data-state="{state}"]')


def unfold(page, name):
    shown = re.compile(re.escape(name) + r"(?!\d)")  # account:1, and not account:10
    page.locator(".csl-fold", has_text=shown).click()
    page.locator("#csl-more").wait_for()


def press(page, key):
    """Press a button of the unfolded lock, and wait for the question."""
    page.locator(f'[data-key="{key}"]').click()
    page.locator("#csl-dialog-yes:enabled").wait_for()


def agree(page, times=1):
    for _ in range(times):
        page.locator("#csl-dialog-yes").click()
    page.locator("#csl-done .csl-told").wait_for()
    return page.locator("#csl-done").inner_text()


def last_entry(store):
    entry = store.audit(1)[0]
    return SimpleNamespace(**{"why": "", **entry})


# -- what is wrong ---------------------------------------------------------------------------------


def test_stuck_locks_come_first_each_with_its_reason_and_are_counted_by_state(view, store):
    trouble(store)
    open_page(view)
    eventually(lambda: chip(view, "dead").inner_text() == "1 dead holder")
    counts = [each.inner_text() for each in view.locator("#csl-states button").all()]
    assert counts == [
        "5 all", "3 stuck", "1 dead holder", "1 no worker", "1 paused", "4 waited for", "4 held",
    ]  # fmt: skip
    assert set(names(view)[:3]) == {"paused", "dead", "unserved"}
    rows = {
        row.locator(".csl-fold").inner_text(): row.inner_text()
        for row in view.locator("#csl-rows > tr").all()
    }
    assert "An operator has paused it. 1 task waits until it is resumed." in rows["paused"]
    assert "has shown no sign of life" in rows["dead"]
    assert "Start such a worker." in rows["unserved"]
    assert "Behind settle[" in rows["account:2"]
    assert view.locator("#csl-rows > tr.csl-stuck").count() == 3


@pytest.mark.full("found1", "found2", "found3", "found4", "found6")
@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("?state=stuck", {"paused", "dead", "unserved"}),
        ("?state=dead", {"dead"}),
        ("?state=paused&search=pau", {"paused"}),
        ("?search=account", {"account:1", "account:2"}),
        ("?search=waits-1", {"account:2"}),
        ("?search=shop.settle&order=name", {"account:1", "account:2", "dead", "paused"}),
        ("?longer=3600", {"unserved"}),
        ("?state=stuck&search=account", set()),
    ],
)
def test_a_filter_and_a_search_are_in_the_address(view, store, query, found):
    """A link to the page shows the same to a colleague."""
    trouble(store)
    open_page(view, query)
    eventually(lambda: set(names(view)) == found)
    if not found:
        assert (
            "No lock is in this state. 2 are not shown." in view.locator("#csl-empty").inner_text()
        )


@pytest.mark.full
def test_a_press_on_a_count_filters_and_a_press_on_a_heading_sorts(view, store):
    trouble(store)
    open_page(view)
    chip(view, "paused").click()
    eventually(lambda: names(view) == ["paused"])
    assert "state=paused" in view.url
    assert chip(view, "paused").get_attribute("aria-pressed") == "true"
    chip(view, "paused").click()
    view.locator("th button", has_text="Lock").click()
    eventually(lambda: names(view) == ["account:1", "account:2", "dead", "paused", "unserved"])
    assert view.locator('th[data-order="name"]').get_attribute("aria-sort") == "ascending"


def test_the_first_waiter_is_explained_with_its_reason(view, store):
    """The reason is a word of its own, for each kind of wait."""
    trouble(store)
    open_page(view)
    for name, reason, told in (
        ("account:2", "waits for its holder", "First waiter: blocked"),
        ("paused", "waits for the end of a pause", "is paused (jane"),
        ("unserved", "waits for a worker", "no live worker with locks consumes the queue 'nobody'"),
    ):
        unfold(view, name)
        view.locator("#csl-more .csl-sentence .csl-state", has_text=reason).wait_for()
        assert told in view.locator("#csl-more .csl-sentence", has_text="First").inner_text()


# -- what is done about it -------------------------------------------------------------------------


def test_a_lock_is_paused_and_resumed_with_a_reason_in_the_audit(view, store):
    hold(store, "account:1")
    open_page(view)
    unfold(view, "account:1")
    press(view, "act pause")
    assert "Present holders keep them" in view.locator("#csl-dialog").inner_text()
    assert not store.inspect("account:1").paused
    view.locator("#csl-dialog-why").fill("deploy")
    assert "Paused 1 lock." in agree(view)
    entry = last_entry(store)
    assert (entry.action, entry.lock, entry.who, entry.via) == (
        "pause",
        "account:1",
        USER,
        "flower",
    )
    assert entry.why == "deploy"
    view.locator("#csl-more .csl-sentence", has_text="Paused by jane").wait_for()
    view.locator('[data-key="act resume"]').wait_for()
    press(view, "act resume")
    assert "Resumed 1 lock." in agree(view)
    assert not store.inspect("account:1").paused


@pytest.mark.full
def test_a_lock_that_a_task_has_closed_is_reopened(view, store):
    store.close_for("account:1", 300.0, "by shop.settle: 429")
    open_page(view, "?search=*")
    unfold(view, "account:1")
    view.locator("#csl-more .csl-sentence", has_text="by shop.settle: 429").wait_for()
    press(view, "act reopen")
    assert "A pause stays" in view.locator("#csl-dialog").inner_text()
    assert store.inspect("account:1").closed
    view.locator("#csl-dialog-why").fill("quota was raised")
    assert "Reopened 1 lock." in agree(view)
    assert not store.inspect("account:1").closed
    entry = last_entry(store)
    assert (entry.action, entry.lock, entry.why) == ("reopen", "account:1", "quota was raised")


@pytest.mark.full
def test_a_limit_is_set_and_a_wrong_number_is_not_sent(view, store):
    hold(store, "account:1")
    open_page(view)
    unfold(view, "account:1")
    press(view, "act limit")
    view.locator("#csl-dialog-number").fill("0")
    view.locator("#csl-dialog-yes").click()
    assert view.locator("#csl-dialog").evaluate("dialog => dialog.open")
    view.locator("#csl-dialog-number").fill("3")
    agree(view)
    assert store.inspect("account:1").limit == 3
    press(view, "act limit")
    view.locator("#csl-dialog-number").fill("")
    agree(view)
    assert not store.inspect("account:1").limit_set


def test_a_waiter_is_promoted_and_another_is_dropped_after_two_questions(view, store):
    hold(store, "account:1")
    tokens = {task: park(store, "account:1", task) for task in ("t1", "t2", "t3")}
    open_page(view)
    unfold(view, "account:1")
    press(view, f"promote {tokens['t3']}")
    assert "app.task[t3]: account:1" in view.locator("#csl-dialog").inner_text()
    agree(view)
    press(view, f"drop {tokens['t1']}")
    view.locator("#csl-dialog-yes").click()
    assert view.locator("#csl-dialog-title").inner_text() == "Are you sure?"
    assert "It will not run." in view.locator("#csl-dialog").inner_text()
    assert "Dropped 1 task." in agree(view)
    queue = store.list_waiters("account:1", "queue").waiting
    assert [each.task_id for each in queue] == ["t3", "t2"]


@pytest.mark.full
def test_the_selected_waiters_are_dropped_together(view, store):
    """The selection survives the updates of the page."""
    hold(store, "account:1")
    tokens = {task: park(store, "account:1", task) for task in ("t1", "t2", "t3")}
    open_page(view)
    unfold(view, "account:1")
    for task in ("t1", "t3"):
        view.locator(f'[data-key="mark {tokens[task]}"]').check()
    before = view.locator(".csl-bars").inner_text()
    eventually(lambda: view.locator(".csl-bars").inner_text() != before)
    assert view.locator("#csl-more input:checked").count() == 2
    press(view, "marked drop")
    assert "Dropped 2 tasks." in agree(view, 2)
    assert [each.task_id for each in store.list_waiters("account:1", "queue").waiting] == ["t2"]


@pytest.mark.full
def test_selected_locks_are_paused_together_and_a_hidden_one_is_not(view, store):
    """A lock that a filter hides is selected no more."""
    for name in ("account:1", "account:2", "report"):
        hold(store, name)
    open_page(view, "?order=name")
    view.locator(".csl-fold").nth(2).wait_for()  # a list may be a second old
    view.locator("#csl-all").check()
    view.locator("#csl-selected", has_text="3 selected").wait_for()
    view.locator("#csl-search").fill("account")
    view.locator("#csl-selected", has_text="2 selected").wait_for()
    view.locator('#csl-bulk [data-action="pause"]').click()
    view.locator("#csl-dialog-yes:enabled").wait_for()
    items = view.locator("#csl-dialog-items li").all_inner_texts()
    assert items == ["account:1", "account:2"]
    assert "Paused 2 locks." in agree(view)
    assert [store.inspect(name).paused != "" for name in ("account:1", "account:2", "report")] == [
        True, True, False,
    ]  # fmt: skip


@pytest.mark.full
def test_selected_locks_are_released_after_two_questions(view, store):
    """Who has got a lock after the question keeps it, and the page says so."""
    tokens = [hold(store, name) for name in ("account:1", "account:2")]
    open_page(view)
    view.get_by_text("account:2", exact=True).first.wait_for()  # a list may be a second old
    view.locator("#csl-all").check()
    view.locator('#csl-bulk [data-action="release"]').click()
    view.locator("#csl-dialog-yes:enabled").wait_for()
    store.release("account:1", tokens[0], Ending.FINAL)
    later = hold(store, "account:1")
    view.locator("#csl-dialog-yes").click()
    assert "at the same time" in view.locator("#csl-dialog").inner_text()
    told = agree(view)
    assert "Released 1 lock." in told
    assert "Not done: " in told
    assert store.inspect("account:1").holders[0].token == later
    assert not store.inspect("account:2").holders


@pytest.mark.full
def test_all_waiting_tasks_of_a_lock_are_dropped_after_two_questions(view, store):
    hold(store, "account:1")
    for task in ("t1", "t2"):
        park(store, "account:1", task)
    open_page(view)
    unfold(view, "account:1")
    press(view, "act drop")
    assert "Drop all 2 parked tasks permanently?" in view.locator("#csl-dialog").inner_text()
    assert "Dropped 2 tasks." in agree(view, 2)
    assert store.inspect("account:1").waiting == 0
    assert (last_entry(store).action, last_entry(store).count) == ("drop", 2)


@pytest.mark.full
def test_a_change_that_is_not_possible_any_more_is_told(view, store):
    hold(store, "account:1")
    token = park(store, "account:1", "t1")
    open_page(view)
    unfold(view, "account:1")
    view.locator(f'[data-key="drop {token}"]').wait_for()
    view.locator("#csl-live").click()
    store.drop_waiters("account:1", [token], Operator("joe"))
    view.locator(f'[data-key="drop {token}"]').click()
    view.locator("#csl-dialog-title", has_text="Not done").wait_for()
    assert "does not wait for 'account:1'" in view.locator("#csl-dialog-text").inner_text()
    view.locator("#csl-dialog-no").click()


# -- what was before -------------------------------------------------------------------------------


@pytest.mark.full
def test_the_audit_shows_who_changed_what_and_why(view, store):
    """It is updated while it is shown; its address can be sent to a colleague."""
    hold(store, "account:1")
    store.pause("account:1", Operator("joe", "cli-host", "cli", MARKUP))
    open_page(view)
    assert view.locator("#csl-audit").is_hidden()
    view.locator("#csl-audit-open").click()
    view.locator("#csl-audit tbody tr").first.wait_for()
    assert "audit=1" in view.url
    told = view.locator("#csl-audit tbody tr").first.inner_text()
    for part in ("joe@cli-host (cli)", "pause", "account:1", MARKUP):
        assert part in told
    store.resume("account:1", Operator("jane"))
    view.locator("#csl-audit tbody tr", has_text="resume").wait_for()
    assert accessibility_problems(view) == []


@pytest.mark.full
def test_the_waits_and_holds_of_the_last_tasks_are_drawn(view, book, store):
    """From the events that Flower receives; each chart has its figures in words."""
    hold(store, "account:1")
    open_page(view)
    unfold(view, "account:1")
    assert view.locator("#csl-more svg").count() == 0

    def send():
        with book.app.events.default_dispatcher() as dispatcher:
            for seconds in (1.0, 4.0, 2.0):
                dispatcher.send("lock-acquired", lock="account:1", waited=seconds)
            dispatcher.send("lock-released", lock="account:1", held=90.0)
        return view.locator("#csl-more svg").count() == 2  # Flower may not listen yet

    def drawn():
        labels = [each.get_attribute("aria-label") for each in view.locator("#csl-more svg").all()]
        number = view.locator("#csl-more .csl-chart-waited rect").count()
        assert labels[0].startswith(f"Wait of the last {number} tasks")
        assert "median 2.0 s, longest 4.0 s." in labels[0]
        assert "median 90 s, longest 90 s." in labels[1]
        return True

    eventually(send)
    eventually(drawn)  # what was sent last may come a moment later
    assert accessibility_problems(view) == []


# -- whoever looks at it ---------------------------------------------------------------------------


def test_the_page_allows_no_script_style_or_request_of_others(flower):
    """Neither inline nor from elsewhere. The fixture ``view`` checks that none is tried."""
    policy = flower.headers("/locks")["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    body = flower.get("/locks")[1]
    assert "<style" not in body
    assert " style=" not in body
    assert body.count("<script") == body.count("<script src=") + body.count("<script defer")


def test_the_groups_that_wait_are_listed_and_an_operators_rates_are_marked(view, store):
    """Names of groups come from arguments, so markup in them is text."""
    hostile = "<img src=x onerror=alert(1)>"

    def flow(group):
        rates = rates_of(["9/h", Rate("100/h", cost=10)])
        return packed(rates, group=Group(group))

    owner = Owner(new_token(), "first/0/0", "shop.settle", ALIVE, "host", 7)
    store.acquire(owner, Claim("account:1", 120.0, flow=flow("acme")))
    for number, group in enumerate((hostile, hostile, "acme")):
        park(store, "account:1", f"waits-{number}", flow=flow(group))
    store.set_rates("account:1", [Rate("5/h")], Operator("jane"))
    open_page(view)
    view.locator("tbody tr", has_text="2 groups wait").wait_for()
    unfold(view, "account:1")
    listed = view.get_by_role("region", name="Groups").locator("tbody tr")
    assert [row.inner_text().split("\t") for row in listed.all()] == [
        [hostile, "2", "0", ""],
        ["acme", "1", "1", ""],
    ]
    assert "Rate: 5/h, set by an operator, 100/h, 10 used" in view.inner_text("body")
    assert f"group {hostile}" in view.get_by_role("region", name="Queue").inner_text()


def test_a_settling_call_is_shown_with_the_time_at_which_it_starts_at_the_earliest(view, store):
    park(store, "index:1", "call-1", flow=packed((), settle=Settle(600.0)))
    open_page(view)
    view.locator("tbody tr", has_text="1 out of the queue").wait_for()
    assert "settling (lock_debounce)" in view.inner_text("body")
    unfold(view, "index:1")
    waiter = view.get_by_role("region", name="Queue").locator("tbody tr").inner_text()
    assert "settling" in waiter
    assert re.search(r"queues in (9 min \d+ s|10 min 0 s) at the earliest", waiter)


def test_the_unique_calls_of_a_lock_are_listed(view, store):
    """Their keys come from arguments, so markup in them is text."""
    owner = Owner(new_token(), "first/0/0", "shop.report", ALIVE, "host", 7)
    unique = UniqueCall("account:1", MARKUP, until_start=False, most=600.0)
    store.acquire(owner, Claim("account:1", 120.0, flow=packed((), unique=unique)))
    follows = unique._replace(follows="first")
    for number in range(2):
        park(store, "account:1", f"waits-{number}", flow=packed((), unique=follows))
    store.announce("account:1", "sent", "other")
    open_page(view)
    unfold(view, "account:1")
    listed = view.get_by_role("region", name="Unique calls").locator("tbody tr")
    rows = [row.inner_text().split("\t") for row in listed.all()]
    assert [(key, task, state, waiting) for key, task, state, _, waiting in rows] == [
        (MARKUP, "task[first]", "running", "2"),
        ("sent", "task[other]", "pending", "0"),
    ]
    assert [counts.split()[0] for _, _, _, counts, _ in rows] == ["since", "for"]


def test_names_with_markup_are_text_in_every_part_of_the_page(view, store):
    """In the list, the unfolded lock, the questions and the answers."""
    hold(store, MARKUP, task=MARKUP)
    park(store, MARKUP, MARKUP)
    open_page(view)
    unfold(view, "onerror")
    press(view, "act drop")
    view.locator("#csl-dialog-why").fill(MARKUP)
    assert MARKUP in view.locator("#csl-dialog-items").inner_text()
    agree(view, 2)
    press(view, "act pause")
    view.locator("#csl-dialog-why").fill(MARKUP)
    agree(view)
    view.locator("#csl-more .csl-sentence", has_text="Paused by").wait_for()
    assert MARKUP in view.locator("#csl-more").inner_text()
    assert view.locator("#csl-locks img").count() == 0
    assert view.locator("#csl-locks bdi b").count() == 0


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_axe_finds_no_accessibility_problem(view, store, scheme, width):
    """In the list, with an unfolded lock, and in a question."""
    trouble(store)
    view.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    view.set_viewport_size({"width": width, "height": 900})
    open_page(view)
    eventually(lambda: chip(view, "dead").inner_text() == "1 dead holder")
    assert accessibility_problems(view) == []
    unfold(view, "dead")
    view.locator("#csl-more table").nth(1).wait_for()
    assert accessibility_problems(view) == []
    press(view, "act drop")
    assert accessibility_problems(view) == []
    assert agree(view, 2)
    assert accessibility_problems(view) == []


@pytest.mark.full
def test_at_400_pixels_each_value_has_its_label_and_nothing_is_cut(view, store):
    trouble(store)
    hold(store, "a-lock-with-a-rather-long-name:" + "part-" * 30)
    view.set_viewport_size({"width": 400, "height": 900})
    open_page(view)
    unfold(view, "account:2")
    view.locator("#csl-more table").nth(1).wait_for()
    assert view.evaluate("document.documentElement.scrollWidth") <= 400
    labels = view.evaluate(
        """() => [...document.querySelectorAll("#csl-rows td[data-label]")]
          .filter(cell => cell.offsetParent && cell.textContent)
          .map(cell => getComputedStyle(cell, "::before"))
          .filter(style => style.display !== "none").map(style => style.content)"""
    )
    assert {'"State"', '"Held by"', '"Waiting"', '"Rank"', '"Lease left"'} <= set(labels)


@pytest.mark.full
def test_an_operator_needs_no_mouse(view, store):
    """Search, walk through the locks, unfold one, pause it; the focus stays where it was."""
    for name in ("account:1", "account:2", "report"):
        hold(store, name)
    open_page(view, "?order=name")
    view.keyboard.press("/")
    view.keyboard.type("account")
    eventually(lambda: names(view) == ["account:1", "account:2"])
    view.locator(".csl-fold").first.focus()
    view.keyboard.press("ArrowDown")
    assert view.evaluate("document.activeElement.innerText") == "account:2"
    view.keyboard.press("Enter")
    view.locator('[data-key="act pause"]').wait_for()
    for _ in range(2):  # past the link to the holder's task
        view.keyboard.press("Tab")
    before = view.locator(".csl-bars").first.inner_text()
    eventually(lambda: view.locator(".csl-bars").first.inner_text() != before)
    assert view.evaluate("document.activeElement.dataset.key") == "act pause"
    view.keyboard.press("Enter")
    view.locator("#csl-dialog-yes:enabled").wait_for()
    assert view.evaluate("document.activeElement.id") == "csl-dialog-why"
    view.keyboard.type("deploy")
    for _ in range(2):
        view.keyboard.press("Tab")
    view.keyboard.press("Enter")
    view.locator("#csl-done .csl-told").wait_for()
    assert store.inspect("account:2").paused.endswith("deploy")


# -- many locks ------------------------------------------------------------------------------------


@pytest.mark.full
def test_sixty_locks_are_two_pages_and_rows_are_dense(view, store):
    """In a window of 1280 by 900 pixels, ten locks are seen without scrolling."""
    hold_many(store, 60)
    open_page(view, "?order=name")
    view.locator("#csl-summary", has_text="60 locks").wait_for()
    view.locator("#csl-place", has_text="50 of 60").wait_for()
    shown = view.evaluate(
        """() => [...document.querySelectorAll("#csl-rows > tr")]
          .filter(row => row.getBoundingClientRect().bottom <= innerHeight).length"""
    )
    assert shown >= 10
    view.locator("#csl-next").click()
    view.locator("#csl-place", has_text="60 of 60").wait_for()


@pytest.mark.full
def test_thirty_thousand_locks_are_counted_filtered_and_searched(view, flower, store):
    """Answers are small, and Flower's other pages do not wait for them.

    Before a filter needs them, only the locks with waiters are read.
    """
    hold_many(store, 30_000)
    park(store, "account:5", "waits-1")
    store.pause("account:29999", Operator("jane"))
    open_page(view)
    view.locator("#csl-summary", has_text="only locks with waiters are listed").wait_for()
    assert names(view) == ["account:5"]
    chip(view, "paused").click()
    view.locator("#csl-summary", has_text="1 lock, 0 waiting").wait_for(timeout=120_000)
    assert chip(view, "").inner_text() == "30,000 all"
    assert chip(view, "paused").inner_text() == "1 paused"
    eventually(lambda: names(view) == ["account:29999"], 60)
    took, sizes = [], []
    for _ in range(5):
        began = time.monotonic()
        sizes.append(len(flower.get("/locks/data?order=trouble&search=*")[1]))
        flower.get("/healthcheck")
        took.append(time.monotonic() - began)
    assert max(sizes) < 100_000
    view.locator("#csl-states [data-state='']").click()
    view.locator("#csl-search").fill("id4321")
    eventually(lambda: "account:4321" in names(view), 60)
    told = json.loads(flower.get("/locks/data?search=account:17777")[1])
    assert (told["total"], told["locks"][0]["name"]) == (1, "account:17777")
    store.client.flushdb()
    in_time(min(took), 2.0)

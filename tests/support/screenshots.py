"""The screenshots in docs/images, made by tests/integration/test_flower_screenshots.py."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from celery_singleton_lock.demo.redis_server import RedisServer
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from integration.book import Book
from support.flower import PASSWORD, USER, Flower, browser
from support.waiting import eventually

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
BUSY: Final = {"account:42": 4, "account:7": 1, "report:eu": 0, "stock:lamp": 2}
"""Lock -> number of waiters."""

EARLIER: Final = 12
"""Number of tasks that have run before, for the charts."""


def make_screenshots(folder: Path, scratch: Path, provider: Any) -> None:
    """Make all screenshots.

    Args:
        folder: where the images go.
        scratch: folder for the files of the worker and of Flower.
        provider: starts Redis servers.
    """
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(provider))
        book = stack.enter_context(Book(server.url, scratch))
        worker = stack.enter_context(book.worker(name="worker-1", concurrency=4, args=("-E",)))
        env = worker.environment
        flower = stack.enter_context(Flower("integration.worker_app", env, scratch))
        eventually(lambda: knows(flower, book.send("plain", "warm-up")), 20)
        for earlier in [book.send("act", "account:42", -n) for n in range(EARLIER)]:
            book.value(earlier)
        ids = start_tasks(book)
        eventually(lambda: knows(flower, ids[0]), 20)
        admin = RedisAdminStore(book.client)
        admin.pause("k:stock:lamp", Operator("jane", "desk-3", "cli", "stock is being counted"))
        started = stack.enter_context(browser())
        for scheme in ("light", "dark"):
            shoot(started, flower, ids, scheme, folder)
        shoot_narrow(started, flower, folder)


def knows(flower: Flower, task: str) -> bool:
    """Return whether Flower has received an event of a task."""
    return flower.get(f"/api/task/info/{task}")[0] == 200


def start_tasks(book: Book) -> list[str]:
    """Start tasks that hold locks and tasks that wait for them; return the ids of the latter."""
    waiting: list[str] = []
    for key, count in BUSY.items():
        book.started(book.send("act", key, 0, hold="end"))
        waiting += [book.send("act", key, n + 1) for n in range(count)]
        book.await_waiting(key, count)
    return waiting


def shoot(started: Any, flower: Flower, ids: list[str], scheme: str, folder: Path) -> None:
    """Make the screenshots of one colour scheme."""
    context = started.new_context(
        base_url=flower.url,
        color_scheme=scheme,
        viewport={"width": 1120, "height": 820},
        http_credentials={"username": USER, "password": PASSWORD},
    )
    page, suffix = context.new_page(), "" if scheme == "light" else "-dark"
    page.goto("/locks")
    page.locator(".csl-fold", has_text="account:42").click()
    page.locator("#csl-more table").nth(1).wait_for()
    page.locator("#csl-more svg").nth(1).wait_for()
    page.screenshot(path=folder / f"flower-locks{suffix}.png")
    page.goto(f"/task/{ids[1]}")
    page.locator("#csl-task dl").wait_for()
    page.screenshot(path=folder / f"flower-task{suffix}.png")
    context.close()


def shoot_narrow(started: Any, flower: Flower, folder: Path) -> None:
    """Make the screenshot of a phone."""
    context = started.new_context(
        base_url=flower.url,
        viewport={"width": 400, "height": 820},
        http_credentials={"username": USER, "password": PASSWORD},
    )
    page = context.new_page()
    page.goto("/locks")
    page.locator(".csl-stuck").first.wait_for()
    page.screenshot(path=folder / "flower-locks-narrow.png")
    context.close()

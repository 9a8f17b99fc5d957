"""Make the screenshots in docs/images: ``PYTHONPATH=tests python -m support.screenshots``."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from celery_singleton_lock.demo.redis_provider import find_provider
from celery_singleton_lock.demo.redis_server import RedisServer
from integration.book import Book
from support.flower import PASSWORD, USER, Flower, browser
from support.waiting import eventually

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
BUSY: Final = {"account:42": 4, "account:7": 1, "report:eu": 0, "stock:lamp": 2}
"""Lock -> number of waiters."""


def main() -> None:
    """Make all screenshots."""
    IMAGES.mkdir(exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisServer(find_provider()))
        book = stack.enter_context(Book(server.url, folder))
        worker = stack.enter_context(book.worker(name="worker-1", concurrency=4, args=("-E",)))
        env = worker.environment
        flower = stack.enter_context(Flower("integration.worker_app", env, folder))
        ids = start_tasks(book)
        eventually(lambda: flower.get(f"/api/task/info/{ids[0]}")[0] == 200, 20)
        started = stack.enter_context(browser())
        for scheme in ("light", "dark"):
            shoot(started, flower, ids, scheme)


def start_tasks(book: Book) -> list[str]:
    """Start tasks that hold locks and tasks that wait for them; return the ids of the latter."""
    waiting: list[str] = []
    for key, count in BUSY.items():
        book.started(book.send("act", key, 0, hold="end"))
        waiting += [book.send("act", key, n + 1) for n in range(count)]
        book.await_waiting(key, count)
    return waiting


def shoot(started: Any, flower: Flower, ids: list[str], scheme: str) -> None:
    """Make the screenshots of one colour scheme."""
    context = started.new_context(
        base_url=flower.url,
        color_scheme=scheme,
        viewport={"width": 1120, "height": 640},
        http_credentials={"username": USER, "password": PASSWORD},
    )
    page, suffix = context.new_page(), "" if scheme == "light" else "-dark"
    page.goto("/locks")
    page.locator(".csl-fold").first.click()
    page.locator("#csl-more table").nth(1).wait_for()
    page.screenshot(path=IMAGES / f"flower-locks{suffix}.png")
    page.goto(f"/task/{ids[1]}")
    page.locator("#csl-task dl").wait_for()
    page.screenshot(path=IMAGES / f"flower-task{suffix}.png")
    context.close()


if __name__ == "__main__":
    main()

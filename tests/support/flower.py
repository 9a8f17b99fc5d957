"""A Flower process, and a headless browser."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.ci import skip_or_fail
from support.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from typing_extensions import Self

USER, PASSWORD = "jane", "s3cret-of-jane"
CONFIG = "import celery_singleton_lock.flower\n"
START_TIMEOUT = 30


class Flower:
    """``celery flower`` with the Locks page; by default behind basic authentication.

    Args:
        app: what ``celery -A`` takes.
        environment: environment variables of the process, such as those of a worker.
        folder: folder of its configuration and its log.
        args: further arguments; the default asks for a login.
        config: text of flowerconfig.py.
    """

    def __init__(
        self,
        app: str,
        environment: Mapping[str, str],
        folder: Path,
        *,
        args: tuple[str, ...] = (f"--basic_auth={USER}:{PASSWORD}",),
        config: str = CONFIG,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = folder / f"flower-{self.port}.log"
        conf = folder / f"flowerconfig-{self.port}.py"
        conf.write_text(config)
        self._env = {**environment, "PYTHONUNBUFFERED": "1"}
        self._command = [sys.executable, "-m", "celery", "-A", app, "flower"]
        self._command += ["--address=127.0.0.1", f"--port={self.port}", f"--conf={conf}", *args]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            eventually(self._answers, START_TIMEOUT, lambda: f"Flower answers; {self.log()}")
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        try:
            return self.get("/healthcheck")[0] in (200, 404)  # 404: below a URL prefix
        except OSError:
            return False

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(60)

    def log(self) -> str:
        """Return what it has printed."""
        return self.log_file.read_text(errors="replace")

    def get(
        self,
        path: str,
        *,
        user: str = USER,
        password: str = PASSWORD,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
    ) -> tuple[int, str]:
        """Return status and body of a request, without following a redirect to a login."""
        request = urllib.request.Request(
            self.url + path, data=data, headers={**login_of(user, password), **(headers or {})}
        )
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def headers(self, path: str) -> Mapping[str, str]:
        """Return the headers of an answer."""
        request = urllib.request.Request(self.url + path, headers=login_of(USER, PASSWORD))
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(answer.headers)


def login_of(user: str, password: str) -> dict[str, str]:
    """Return the header of a basic login; none for an empty user."""
    basic = b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {basic}"} if user else {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def needs_flower() -> None:
    """Skip the test if Flower is not installed; in CI, fail."""
    if find_spec("flower") is None:
        skip_or_fail("Flower is not installed: pip install 'celery-singleton-lock[flower]'")


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome, or None."""
    asked = os.environ.get("CSL_TEST_CHROMIUM")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return asked or next(filter(None, map(shutil.which, names)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a headless browser. If there is none, skip the test; in CI, fail."""
    if find_spec("playwright") is None:
        skip_or_fail("playwright is not installed: pip install playwright")
    chromium = find_chromium()
    if chromium is None:
        skip_or_fail("no Chromium on this machine: apt-get install chromium")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # may be missing

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield started
        finally:
            started.close()


def axe_script() -> str:
    """Return the script of axe-core. If it is not installed, skip the test; in CI, fail."""
    if find_spec("axe_playwright_python") is None:
        skip_or_fail("axe-core is not installed: pip install axe-playwright-python")
    return (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


def accessibility_problems(page: Any, within: str = "#csl-locks") -> list[str]:
    """Return what axe-core finds wrong with a part of a page: the rule, and the elements.

    Args:
        page: a page of the browser.
        within: CSS selector of that part.
    """
    if page.evaluate("typeof window.axe") == "undefined":
        page.evaluate(axe_script())
    found = page.evaluate("within => axe.run(within)", within)
    return [
        f"{each['id']}: {node['target']}: {node['failureSummary']}"
        for each in found["violations"]
        for node in each["nodes"]
    ]

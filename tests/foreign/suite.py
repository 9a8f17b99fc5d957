"""Run another project's own tests, from its source distribution, against this package.

Nothing of theirs is in this repository: pip downloads the source distribution into pytest's cache.
An adapter puts this package in the place of theirs: a pytest plugin (``tests/foreign/adapters``)
or a package with the name of theirs (``tests/foreign/standins``). What has no equivalent here is
listed with a reason; it runs as well, and must fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import IO

from celery_singleton_lock.demo.redis_server import RedisServer
from foreign.reporter import RESULTS

TESTS = Path(__file__).parents[1]

DOWNLOAD = 300
"""Seconds that a download may take."""


@dataclass(frozen=True)
class Suite:
    """Another project's tests.

    Args:
        name: of the suite.
        project: its name on the package index.
        files: what is taken out of its source distribution: folders, and the configuration of
            pytest, which comes first.
        tests: what pytest runs, relative to the source distribution.
        plugins: what its tests need, and the adapter; no other plugin is loaded.
        options: further arguments of pytest; ``{redis}`` stands for the URL of the Redis.
        listed: pattern of tests, without their parameters -> why they have no equivalent here.
        release: its version; the installed one by default.
        seconds: how long the whole run may take.
        env: further variables of its environment.
    """

    name: str
    project: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    listed: Mapping[str, str]
    plugins: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    release: str = ""
    seconds: int = 600
    env: Mapping[str, str] = field(default_factory=dict)

    def patterns(self, test: str) -> list[str]:
        """Return the entries of the table that mean a test."""
        function = test.partition("[")[0]
        return [pattern for pattern in self.listed if fnmatchcase(function, pattern)]

    @property
    def pinned(self) -> str:
        """The version whose tests run."""
        return self.release or version(self.project)

    def __str__(self) -> str:
        return f"{self.name} ({self.project} {self.pinned})"


@dataclass
class Results:
    """What became of each test.

    Args:
        outcomes: test -> passed, failed or skipped.
        texts: test -> how it failed.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, test: str, outcome: str, text: str) -> None:
        """Add a report. A test fails if any part of it fails; one that is rerun may pass."""
        if outcome == "failed" or self.outcomes.get(test) != "failed":
            self.outcomes[test] = outcome
        if text:
            self.texts[test] = text

    def named(self, *outcomes: str) -> list[str]:
        """Return the tests with one of these outcomes."""
        return [test for test, outcome in self.outcomes.items() if outcome in outcomes]


# -- fetch -----------------------------------------------------------------------------------------


def fetch(suite: Suite, cache: Path) -> Path:
    """Return the source distribution; download it if the cache does not have it.

    Args:
        suite: whose tests.
        cache: the folder of all downloads.
    """
    place = cache / f"{suite.project}-{suite.pinned}"
    if not any(place.glob("*.tar.gz")):
        only_source = ("--no-deps", "--no-binary", suite.project, "--dest", str(place))
        wanted = f"{suite.project}=={suite.pinned}"
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *only_source, wanted],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD,
            check=False,
        )
        assert done.returncode == 0, f"pip cannot download {wanted}:\n{done.stderr[-2000:]}"
    (archive,) = place.glob("*.tar.gz")
    return archive


def unpack(suite: Suite, archive: Path, to: Path) -> Path:
    """Unpack the suite's files alone, for the project itself is installed; return their folder."""
    with tarfile.open(archive) as contents:
        top = contents.getnames()[0].partition("/")[0]
        wanted = tuple(f"{top}/{name}" for name in suite.files)
        members = [
            member
            for member in contents.getmembers()
            if any(member.name == name or member.name.startswith(f"{name}/") for name in wanted)
        ]
        contents.extractall(to, members, filter="data")
    return to / top


# -- run -------------------------------------------------------------------------------------------


def run(suite: Suite, root: Path, server: RedisServer, scratch: Path) -> Results:
    """Run the suite in a pytest of its own, with the plugins that it names and no other.

    Args:
        suite: what to run.
        root: where its files are.
        server: its Redis.
        scratch: a folder for the results and the log.
    """
    log, lines = scratch / "log.txt", scratch / "results.jsonl"
    plugins = ("foreign.reporter", *suite.plugins)
    words = ["-c", str(root / suite.files[0]), f"--rootdir={root}", "--tb=short", "--durations=20"]
    words += [word for plugin in ("no:cacheprovider", *plugins) for word in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", *words, *_options(suite, server), *suite.tests]
    with log.open("w", encoding="utf-8") as output:
        code = _run(command, suite.seconds, root, _environment(suite, server, lines), output)
    end = log.read_text(encoding="utf-8", errors="replace")[-4000:]
    assert code in (0, 1), f"the tests of {suite} did not run to their end ({code}):\n{end}"
    results = Results()
    for line in lines.read_text(encoding="utf-8").splitlines():
        results.add(**json.loads(line))
    return results


def _run(
    command: list[str], seconds: float, cwd: Path, env: dict[str, str], output: IO[str]
) -> int:
    """Return the exit code; -9 if it took too long. Nothing that it has started stays."""
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return child.returncode


def _options(suite: Suite, server: RedisServer) -> list[str]:
    return [option.format(redis=server.url) for option in suite.options]


def _environment(suite: Suite, server: RedisServer, lines: Path) -> dict[str, str]:
    ours = ("PYTEST_", "COV_", "COVERAGE_", "CSL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    executable = server.provider.path
    path = [str(Path(executable).parent)] if executable else []
    return {
        **env,
        "PATH": os.pathsep.join([*path, env.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "foreign" / "standins"))),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(server.port),
        "REDIS_URL": server.url,
        "TEST_BROKER": server.url,
        "TEST_BACKEND": server.url,
        RESULTS: str(lines),
        **suite.env,
    }

"""A pytest plugin that runs mutants: each in a fork of the process that has collected the tests.

To start pytest and a Redis for each mutant took a hundred times as long as the test that kills it.
A fork has both already. It activates its mutant, runs the tests that call the changed function, the
fastest first, and ends at the first failure.

Before that each test runs once in the same way, to record which functions it calls, and whether it
passes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import pytest
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state

from celery_singleton_lock.demo.redis_provider import Provider, find_provider
from celery_singleton_lock.demo.redis_server import RedisServer
from mutation.accepted import reason_for
from mutation.results import (
    CRASHED,
    FAILED,
    PACKAGE,
    SURVIVED,
    UNTESTED,
    Mutant,
    mutants,
    record,
)
from mutation.sample import sampled

CALLS: Final = Path("calls.json")
"""Which functions each test calls, and how long it takes; pytest runs in ``mutants/``."""

KILLERS: Final = Path("killers.json")
"""Which test killed a mutant, and how."""

IMPORTED: Final = Path("imported.json")
"""Which functions run when the package, or a test, is imported."""

FIRST: Final = 5.0
"""Seconds of the quickest tests together; what survives them meets the others, too."""

STEADY: Final = 1.0
"""Seconds of a test that fails for no other reason than the mutant; the failure of a longer one has
to come twice, since on a busy machine it may have waited for too short a time."""

STARVED: Final = 1.0
"""Seconds that a fork may wait for a processor; the failure of one that waited longer has to come
twice, since tests have bounds of time."""

PATIENCE: Final = 30.0
"""Seconds that a mutant may take besides five times what its tests take."""

OUT_OF_TIME: Final = 24
"""SIGXCPU, as mutmut has it."""


class RunnerError(Exception):
    """A fork crashed without a mutant: what this runner finds would mean nothing."""


@cache
def provider() -> Provider:
    """Return the Redis of this run, as tests/conftest.py has it."""
    return find_provider(os.environ.get("CSL_TEST_REDIS") or None)


@dataclass(frozen=True)
class Play:
    """Tests to be played in a fork.

    Args:
        mutant: name of the mutant that is switched on; ``stats`` to note what is called.
        items: the tests.
        seconds: how long they take, as far as known.
        then: takes what the fork has told.
    """

    mutant: str
    items: Sequence[pytest.Item]
    seconds: float
    then: Callable[[dict[str, Any]], None] = lambda told: None


@dataclass
class Slot:
    """Where one fork runs at a time, with a Redis of its own.

    Args:
        told: the file in which the fork leaves what it found.
        play: what is played now.
        pid: of the fork.
        until: when it is given up, in seconds of the monotonic clock.
        spoilt: whether the server may not be as it was, after a test that failed on it.
    """

    told: Path
    server: RedisServer = field(default_factory=lambda: RedisServer(provider()))
    settings: Mapping[str, str] = field(default_factory=dict)
    play: Play | None = None
    pid: int = 0
    until: float = 0.0
    spoilt: bool = True

    def begin(self, play: Play, session: pytest.Session) -> None:
        """Fork."""
        if self.spoilt:
            self._renew()
        self.spoilt = True
        self.told.unlink(missing_ok=True)
        self.play, self.until = play, time.monotonic() + PATIENCE + 5 * play.seconds
        self.pid = os.fork()
        if not self.pid:
            _in_fork(session, self)

    def _renew(self) -> None:
        """See to it that the last mutant has left the server as it was."""
        try:
            with self.server.client(socket_timeout=2) as client:
                client.flushall()
                if client.config_get() == self.settings:
                    return
        except Exception:  # noqa: BLE001  # whatever is wrong with it
            pass
        with contextlib.suppress(Exception):
            self.server.stop()
        self.server = RedisServer(provider())
        self.server.start()
        with self.server.client() as client:
            self.settings = client.config_get()

    def is_over(self) -> bool:
        """Return whether the fork has ended, or is given up; then it has told what it found."""
        assert self.play is not None
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = not pid and time.monotonic() > self.until
        if not pid and not late:
            return False
        starved = _starved(self.pid) if late else 0.0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # and what its tests have started
        if late:
            os.waitpid(self.pid, 0)
        try:
            found = json.loads(self.told.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            how = f"ended with {status}, without a word"
            found = {"failed": "", "how": how, "died": True, "starved": starved}
        self.spoilt = late or found.get("used", True)
        play, self.play = self.play, None
        play.then({**found, "late": late})
        return True


def _in_fork(session: pytest.Session, slot: Slot) -> None:
    """Play the tests until one fails, and leave what was found."""
    try:
        # What it starts ends with it. A session of its own would be scheduled apart from ours, and
        # so be as important as all others together, however nice we are.
        os.setpgid(0, 0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        session.config.pluginmanager.unregister(name="terminalreporter")
        watcher = Watcher(slot.server)
        session.config.pluginmanager.register(watcher)
        _forget_caches()
        state()._stats.clear()
        play = slot.play
        set_mutant_under_test(play.mutant)
        began, starved = time.monotonic(), _starved(os.getpid())
        for item, following in zip(play.items, [*play.items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if watcher.failed:
                break
        found = {
            "failed": watcher.failed,
            "used": bool(watcher.failed) and watcher.lent,
            "how": watcher.how,
            "calls": sorted(state()._stats),
            "seconds": time.monotonic() - began,
            "starved": _starved(os.getpid()) - starved,
        }
        slot.told.write_text(json.dumps(found), encoding="utf-8")
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)
    except BaseException:  # noqa: BLE001  # not of a test: pytest has caught those
        crash = {"failed": "", "how": traceback.format_exc(), "died": True, "starved": 0.0}
        slot.told.write_text(json.dumps(crash), encoding="utf-8")
    finally:
        os._exit(0)


def _starved(pid: int) -> float:
    """Return the seconds for which a process could have run, had it had a processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


def _forget_caches() -> None:
    """Let functions whose answers are cached be called again: by the mutant."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE:
            for value in list(vars(module).values()):
                # Of the kind: to ask a value that is lazy, such as Django's settings, wakes it.
                if hasattr(type(value), "cache_clear"):
                    value.cache_clear()


class Watcher:
    """Sees the first failure, and lends the slot's server."""

    def __init__(self, server: RedisServer) -> None:
        self.failed, self.how, self.lent, self._server = "", "", False, server

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)
            self.how = f"{report.when}: {crash.message if crash else report.longrepr}"[:300]

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        if fixturedef.argname != "redis_server":
            return None
        self.lent = True
        fixturedef.cached_result = (self._server, fixturedef.cache_key(request), None)
        return self._server


class Judge:
    """Plays the mutants in the order in which the least remains to be done for the next.

    Args:
        session: with the tests.
        jobs: forks at a time.
    """

    def __init__(self, session: pytest.Session, jobs: int) -> None:
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        folder = Path(tempfile.mkdtemp())
        self._slots = [Slot(folder / str(number)) for number in range(jobs)]
        self._calls: dict[str, dict[str, Any]] = _loaded(CALLS)
        self._killers: dict[str, list[str]] = _loaded(KILLERS)
        self._again: list[Play] = []
        self._sound: set[str] = set()
        self._unsound: set[str] = set()

    # -- playing ----------------------------------------------------------------------------------

    def play(self, plays: Iterable[Play]) -> None:
        """Play all, as many at a time as there are slots."""
        waiting = iter(plays)
        while True:
            for slot in self._slots:
                if slot.play is None and (play := self._next(waiting)) is not None:
                    slot.begin(play, self._session)
            busy = [slot for slot in self._slots if slot.play is not None]
            if not busy:
                return
            _wait([slot.pid for slot in busy])
            for slot in busy:
                slot.is_over()

    def _next(self, waiting: Iterator[Play]) -> Play | None:
        return self._again.pop() if self._again else next(waiting, None)

    def close(self) -> None:
        for slot in self._slots:
            if slot.play is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(slot.pid, signal.SIGKILL)
            with contextlib.suppress(Exception):
                slot.server.stop()

    # -- which test calls what --------------------------------------------------------------------

    def look(self) -> None:
        """Play each test that is new, or has changed, without a mutant."""
        digests = {file: _digest(file) for file in {item.path for item in self._items.values()}}
        self._control()
        names = _names()
        known = {
            name: told
            for name, told in self._calls.items()
            if name in self._items
            and not told["failed"]
            and told["digest"] == digests[self._items[name].path]
            and told.get("names") == names
        }
        self._calls = known
        new = [item for name, item in self._items.items() if name not in known]
        print(f"{len(new)} of {len(self._items)} tests are new or changed", flush=True)
        for start in range(0, len(new), 100):
            self.play(self._looks(new[start : start + 100], digests, names))
            _save(CALLS, self._calls)
            print(f"{start}", end=" ", flush=True)
        for name, told in self._calls.items():
            if told["failed"] or told.get("late"):
                how = next(iter(told["how"].splitlines()), "")
                print(f"left out, since it fails without a mutant: {name}: {how}")

    def _control(self) -> None:
        """See whether a fork can play a test at all.

        Raises:
            RunnerError: if it cannot.
        """

        def then(told: dict[str, Any]) -> None:
            if told.get("died"):
                msg = f"a fork crashed, and no mutant was on:\n{told['how']}"
                raise RunnerError(msg)

        self.play([Play("", list(self._items.values())[-1:], 20.0, then)])

    def _looks(
        self, items: Iterable[pytest.Item], digests: Mapping[Path, str], names: str
    ) -> Iterator[Play]:
        for item in items:

            def then(told: dict[str, Any], item: pytest.Item = item) -> None:
                if not told.get("died"):
                    more = {"digest": digests[item.path], "names": names}
                    self._calls[item.nodeid] = {**told, **more}

            yield Play("stats", [item], 20.0, then)

    # -- mutants ----------------------------------------------------------------------------------

    def judge(self) -> None:
        """Play every mutant that was not: the tests that take a moment, then the longer ones."""
        callers: dict[str, list[str]] = defaultdict(list)
        for test, told in self._calls.items():
            if not told["failed"] and not told.get("late"):
                for function in told.get("calls", ()):
                    callers[function].append(test)
        for tests in callers.values():
            tests.sort(key=lambda test: self._calls[test]["seconds"])
        first = {function: self._first(tests) for function, tests in callers.items()}
        self._round(first)
        rest = {function: tests[len(first[function]) :] for function, tests in callers.items()}
        self._round(rest)

    def _first(self, tests: Sequence[str]) -> Sequence[str]:
        """Return the quickest tests, as many as take some seconds together."""
        took = accumulate(self._calls[test]["seconds"] for test in tests)
        return [test for test, seconds in zip(tests, took, strict=True) if seconds <= FIRST]

    def _round(self, callers: Mapping[str, Sequence[str]]) -> None:
        wanted = json.loads(os.environ["CSL_MUTANTS_MODULES"])
        found = [mutant for mutant in mutants(Path()) if not mutant.rewords]
        found = [mutant for mutant in found if not wanted or mutant.module in wanted]
        share = float(os.environ["CSL_MUTANTS_SAMPLE"])
        found = list(sampled(found, share, int(os.environ["CSL_MUTANTS_SEED"])))
        found = [mutant for mutant in found if _is_open(mutant)]
        number = Counter(mutant.module for mutant in found)
        modules = sorted(number, key=wanted.index if wanted else number.__getitem__)
        print(f"{len(found)} mutants of {len(modules)} modules", flush=True)
        for module in modules:
            those = [mutant for mutant in found if mutant.module == module]
            began, codes = time.monotonic(), {}
            for start in range(0, len(those), 50):
                self.play(self._trials(those[start : start + 50], callers, codes))
                record(codes, module, Path())
                _save(KILLERS, self._killers)
            killed = sum(code in {min(FAILED), OUT_OF_TIME} for code in codes.values())
            took = time.monotonic() - began
            print(f"{module}: {killed} of {len(those)} killed, {took:.0f} s", flush=True)

    def _trials(
        self,
        those: Iterable[Mutant],
        callers: Mapping[str, Sequence[str]],
        codes: dict[str, int],
    ) -> Iterator[Play]:
        for mutant in those:
            tests = [t for t in callers.get(mutant.original, ()) if t not in self._unsound]
            if not tests:
                codes.setdefault(mutant.name, UNTESTED if mutant.code is None else mutant.code)
                continue

            def then(told: dict[str, Any], play: Play) -> None:
                self._weigh(play, told, codes)

            seconds = sum(self._calls[test]["seconds"] for test in tests)
            play = Play(mutant.name, [self._items[test] for test in tests], seconds)
            yield replace(play, then=partial(then, play=play))

    def _weigh(
        self, play: Play, told: Mapping[str, Any], codes: dict[str, int], *, again: bool = False
    ) -> None:
        """Note what became of a mutant, once it is sure that nothing else did it."""
        failed, late, crashed = told["failed"], told["late"], _has_crashed(told)
        if not (failed or late or crashed):
            # A failure that does not come again says nothing. Survivors are played in each run.
            codes[play.mutant] = SURVIVED
            return
        item = self._items.get(failed)
        if not again and (crashed or self._is_doubtful(told)):
            repeat = partial(self._weigh, play, codes=codes, again=True)
            items = [item] if item else play.items
            self._again.append(replace(play, items=items, then=lambda said: repeat(told=said)))
        elif crashed:
            print(f"crashes: {play.mutant}: {told['how']}", flush=True)
            codes[play.mutant] = CRASHED
        elif item and failed not in self._sound:
            self._again.append(Play("", [item], 20.0, partial(self._try, play, told, codes)))
        else:
            codes[play.mutant] = OUT_OF_TIME if late else min(FAILED)
            self._killers[play.mutant] = [failed, told["how"]]

    def _is_doubtful(self, told: Mapping[str, Any]) -> bool:
        """Return whether it may be that a test only had too little time."""
        if told["starved"] > STARVED:
            return True
        hangs = told["late"] or "Timeout" in told["how"]
        return not hangs and self._calls[told["failed"]]["seconds"] > STEADY

    def _try(
        self,
        play: Play,
        killed: Mapping[str, Any],
        codes: dict[str, int],
        told: Mapping[str, Any],
        *,
        again: bool = False,
    ) -> None:
        """See whether a test that killed passes without a mutant, now that the code is as it is."""
        failed = killed["failed"]
        if not (told["failed"] or told["late"] or told.get("died")):
            self._sound.add(failed)
            self._weigh(play, killed, codes, again=True)
        elif not again and told["starved"] > STARVED:
            repeat = partial(self._try, play, killed, codes, again=True)
            self._again.append(Play("", [self._items[failed]], 20.0, repeat))
        else:
            self._unsound.add(failed)
            codes[play.mutant] = SURVIVED  # of what else it meets: nothing yet
            print(f"fails without a mutant: {failed}: {told['how']}", flush=True)


def _has_crashed(told: Mapping[str, Any]) -> bool:
    """Return whether a fork has ended, or raised, outside of a test."""
    return bool(told.get("died")) and not told["late"]


def _is_open(mutant: Mutant) -> bool:
    """Return whether a mutant has to be played: a survivor, too, since there may be new tests."""
    if mutant.killed:
        return False
    return not mutant.judged or not reason_for(mutant)


def _wait(pids: Sequence[int]) -> None:
    """Wait until one of these processes has ended, for a second at most."""
    files = [os.pidfd_open(pid) for pid in pids]
    select.select(files, [], [], 1.0)
    for file in files:
        os.close(file)


def _digest(file: Path) -> str:
    """Return a digest of a file of tests."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _names() -> str:
    """Return a digest of the names of all functions: with one more, or less, tests call others."""
    names = sorted({mutant.original for mutant in mutants(Path())})
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _loaded(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _save(file: Path, told: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(told), encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Play mutants instead of the tests."""
    if session.testsfailed or session.config.option.collectonly:
        return None
    session.config._tmp_path_factory.getbasetemp()  # one for all forks
    IMPORTED.write_text(json.dumps(sorted(state()._stats)), encoding="utf-8")
    set_mutant_under_test("")
    gc.freeze()  # forks share it
    judge = Judge(session, int(os.environ["CSL_MUTANTS_JOBS"]))
    try:
        judge.look()
        judge.judge()
    finally:
        judge.close()
    return True

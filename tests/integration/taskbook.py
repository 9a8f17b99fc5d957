"""The app under test: one function in many declarations, and the journal that it writes.

The arguments of a task say how long it holds the lock and how it ends. It records its start and its
end. The journal is a file, so it survives the end of Redis and workers.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery import Celery, Task, chain, group, states
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from redis import Redis

from celery_singleton_lock import Lock, LockedTask, RetryLater, current_lock, current_locks

HOLD = 120.0
"""Most seconds for which a task waits for its gate."""

_ballast: list[bytearray] = []
"""What a task leaves behind, for its process to be found too large."""

OURS = ("csl", "singleton_lock")
CARRIED = ("correlation_id", "reply_to", "priority", "expiration", "delivery_mode")
"""Properties of a message that its sender has chosen."""


class Journal:
    """What tasks did, one line of JSON per event; and the gates that hold them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "journal"

    def note(self, event: str, **facts: Any) -> None:
        """Append an event; a line is written at once, so lines never mix."""
        line = json.dumps(
            {"e": event, "t": time.monotonic(), "pid": os.getpid(), **facts}, default=str
        )
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def await_gate(self, name: str) -> None:
        """Wait until the test opens a gate."""
        deadline = time.monotonic() + HOLD
        while not (self.folder / f"gate-{name}").exists():
            if time.monotonic() > deadline:
                text = f"nobody opened {name}"
                raise TimeoutError(text)
            time.sleep(0.01)

    def first_time(self, name: str) -> bool:
        """Whether this is asked for the first time."""
        try:
            (self.folder / f"once-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _leaks(request: Any) -> list[str]:
    """Return this package's headers that user code, a retry or a child would see."""
    seen = [*vars(request), *(request.headers or {}), *request.as_execution_options()]
    seen += list(request.as_execution_options().get("headers") or {})
    return sorted({name for name in seen if any(part in name for part in OURS)})


def build(  # noqa: C901, PLR0915  # a list of declarations, made anew for each app
    broker: str, backend: str, folder: str | Path, conf: Mapping[str, Any]
) -> Celery:
    """Return an app with all tasks of this book."""
    app = Celery("taskbook", broker=broker, backend=backend, set_as_current=False)
    app.conf.update(
        singleton_lock_lease=3.0,
        broker_connection_retry_on_startup=True,
        accept_content=["json", "pickle"],
        result_accept_content=["json", "pickle"],
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )
    app.conf.update(conf)
    journal = Journal(folder)

    def act(
        self: Task,
        key: Any = "",
        n: Any = 0,
        hold: float | str | None = None,
        end: str = "return",
        extra: Any = None,
    ) -> Any:
        """Hold the lock, and end in the given way."""
        info, lock = self.request.delivery_info or {}, current_lock()
        facts = {
            "task": self.name,
            "id": self.request.id,
            "key": str(key),
            "n": n,
            "retries": self.request.retries,
            "fence": lock.fencing_token,
            "lock": lock.name,
            "held": lock.held,
            "locks": [(each.name, each.fencing_token, each.held) for each in current_locks()],
            "redelivered": bool(info.get("redelivered")),
            "priority": info.get("priority"),
            "queue": info.get("routing_key"),
            "worker": self.request.hostname,
            "props": {k: v for k, v in (self.request.properties or {}).items() if k in CARRIED},
            "headers": {
                k: v for k, v in (self.request.headers or {}).items() if k.startswith("x-")
            },
            "leaks": _leaks(self.request),
            "deaths": sum(death["count"] for death in vars(self.request).get("x-death") or ()),
        }
        journal.note("start", **facts)
        try:
            _hold(hold)
            if end in {"retry", "retry-always"}:
                _await_stored_retry(self)
            return _end(self, end, key, n, extra)
        finally:
            journal.note("end", **facts)

    def _hold(hold: float | str | None) -> None:
        if isinstance(hold, str):
            journal.await_gate(hold)
        elif hold:
            time.sleep(hold)

    def _end(self: Task, end: str, key: Any, n: Any, extra: Any) -> Any:
        ending: Callable[[], Any] | None = {
            "raise": lambda: _raise(ValueError("told to")),
            "ignore": lambda: _raise(Ignore()),
            "reject": lambda: _raise(Reject("told to", requeue=False)),
            "reject-twice": lambda: _reject_twice(self, n),
            "requeue-always": lambda: _raise(Reject("told to", requeue=True)),
            "die-always": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "exit": lambda: sys.exit(3),
            "cancel": lambda: asyncio.run(_cancel_itself()),
            "cancel-unpicklable": lambda: _raise(asyncio.CancelledError(lambda: n)),
            "soft": lambda: _outlive_soft_limit(journal, extra),
            "watch": lambda: _watch_lock(journal, key, extra),
            "hog": lambda: _hog(journal, extra),
            "nest": lambda: self.apply((key, f"{n}-nested")).get(disable_sync_subtasks=False),
            "replace-other": lambda: self.replace(self.signature((f"{key}-other", n))),
            "freeze": lambda: _freeze(extra),
            "memory": lambda: _raise(MemoryError("told to")),
            "import": lambda: importlib.import_module("there_is_no_such_module"),
            "swell": lambda: _swell(int(extra)),
        }.get(end)
        if ending is not None:
            return ending()
        if end == "replace":
            return self.replace(self.signature((key, n), {"hold": extra or None}))
        if end == "chain":
            return self.replace(chain(self.si(key, f"{n}-1"), self.si(key, f"{n}-2")))
        if end == "children":
            group(self.si(key, f"{n}-c{i}") for i in range(int(extra or 2))).apply_async()
            return n
        if end == "retry-always":
            raise self.retry(countdown=0.1, max_retries=int(extra or 1))
        if end == "retry-elsewhere":
            raise self.retry(countdown=extra[0], queue=extra[1], max_retries=3)
        if end != "return" and journal.first_time(f"{self.request.id}-{end}"):
            _once(self, end, extra)
        return n

    def _await_stored_retry(self: Task) -> None:
        """Wait for the state of the attempt before: Celery stores it after it has sent this one."""
        deadline = time.monotonic() + HOLD
        is_stored = self.request.is_eager or not self.request.retries
        while not is_stored and time.monotonic() < deadline:
            time.sleep(0.01)
            is_stored = self.backend.get_state(self.request.id) == states.RETRY

    def _reject_twice(self: Task, n: Any) -> Any:
        if any(journal.first_time(f"{self.request.id}-{time}") for time in ("one", "two")):
            raise Reject("told to", requeue=False)
        return n

    def _once(self: Task, end: str, extra: Any) -> None:
        if end == "retry":
            raise self.retry(countdown=float(extra or 0.1), max_retries=3)
        if end == "retry-early":
            again = self.retry(countdown=0, throw=False)
            journal.await_gate(extra)
            raise again
        if end == "replace-early":
            try:
                self.replace(self.signature(self.request.args, self.request.kwargs))
            finally:
                journal.await_gate(extra)
        if end == "requeue":
            raise Reject("told to", requeue=True)
        if end == "later":
            raise RetryLater(0.2, name=current_lock().name)
        if end == "die":
            journal.note("dying", id=self.request.id)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        if end == "os-exit":
            journal.note("dying", id=self.request.id)
            os._exit(7)

    def declare(name: str, base: type[Task] = LockedTask, **options: Any) -> None:
        options.setdefault("lock_key", "k:{key}")
        if base is not LockedTask:
            del options["lock_key"]
        app.task(bind=True, base=base, name=name, shared=False, **options)(act)

    late = {"acks_late": True, "reject_on_worker_lost": True}
    declare("plain", Task)
    declare("plain_late", Task, **late)
    declare("act")
    declare("act_again", lock_lease=2)
    declare("act_late", acks_late=True)
    declare("act_lost", **late)
    declare("act_unforgiving", acks_late=True, acks_on_failure_or_timeout=False)
    declare("act_skip", lock_on_conflict="skip")
    declare("act_fail", lock_on_conflict="fail")
    declare("act_patient", lock_wait_timeout=1.0)
    declare("act_bounded", lock_max_waiting=2)
    declare("act_bounded_skip", lock_max_waiting=2, lock_on_full="skip")
    declare("act_nobody_waits", lock_max_waiting=0)
    declare("act_two", lock_limit=2)
    declare("act_two_lost", lock_limit=2, **late)
    declare("act_failing", lock_on_backend_error="fail")
    declare("act_running", lock_on_backend_error="run")
    wait = {"lock_on_conflict": "wait", "lock_wait_timeout": 30}
    declare("act_wait", **wait)
    declare("act_wait_late", **wait, **late)
    declare("act_wait_12", **wait | {"lock_wait_timeout": 12.0})
    declare("act_wait_soft", **wait, soft_time_limit=1)
    declare("act_wait_hard", **wait, time_limit=1)
    declare("act_wait_brief", **wait | {"lock_wait_timeout": 1.0})
    declare("act_wait_bounded", **wait, lock_max_waiting=1)
    requeue = {"lock_on_conflict": "requeue", "lock_requeue_delay": 0.2, "lock_requeue_max": 0.8}
    declare("act_requeue", **requeue)
    declare("act_requeue_late", **requeue, **late)
    declare("act_requeue_brief", **requeue, lock_wait_timeout=1.0)
    declare("act_requeue_slow", **requeue | {"lock_requeue_delay": 5.0, "lock_requeue_max": 5.0})
    declare("act_keep", lock_on_retry="keep")
    declare("act_keep_late", lock_on_retry="keep", acks_late=True)
    declare("act_hold", lock_hold_for=2)
    declare("act_hold_long", lock_hold_for=60)
    declare("act_sent", lock_key="sent:{__queue__}:{__headers__[tenant]}")
    declare("act_latest", lock_max_waiting=1, lock_on_full="replace")
    declare("act_latest_two", lock_max_waiting=2, lock_on_full="replace")
    declare("act_abort", lock_on_lost="abort")
    declare("act_abort_late", lock_on_lost="abort", acks_late=True)
    declare("act_args", lock_key=None, lock_args=["key"])
    declare("act_digest", lock_key=None)
    declare("act_called", lock_key=_key_of)
    declare("act_raising", lock_key=_raising_key)
    declare("act_soft", soft_time_limit=1)
    declare("act_hard", time_limit=1)

    def end_late(_self: Task, _result: Any, _id: str, args: Sequence[Any], _kwargs: Any) -> None:
        journal.await_gate(f"{args[0]}-end")

    declare("act_ends_late", on_success=end_late)
    declare("act_hook", time_limit=1, on_failure=_raising_hook)
    declare("act_hook_fail", lock_on_conflict="fail", on_failure=_raising_hook)
    declare("act_hook_patient", lock_wait_timeout=1.0, on_failure=_raising_hook)
    declare("act_hard_late", time_limit=1, acks_late=True, acks_on_timeout=False)
    # Celery stores RETRY after it has sent the retry, which must not have ended by then.
    auto = {"autoretry_for": (ValueError,), "max_retries": 1, "default_retry_delay": 1.0}
    declare("act_auto", **auto)
    declare("act_auto_late", acks_late=True, **auto)
    declare("plain_auto", Task, **auto)
    declare("plain_auto_late", Task, acks_late=True, **auto)
    declare("plain_kept", Task, acks_late=True)

    pair = {"lock_key": None, "lock_keys": ["k:{key}", "k:{n}"]}
    declare("pair", **pair)
    declare("pair_lost", **pair, **late)
    declare("pair_hold", **pair, lock_hold_for=60)
    declare("pair_skip", **pair, lock_on_conflict="skip")
    declare("pair_fail", **pair, lock_on_conflict="fail")
    declare("pair_wait", **pair, **wait)
    declare("pair_requeue", **pair, **requeue)
    declare("pair_patient", **pair, lock_wait_timeout=1.0)
    declare("pair_bounded", **pair, lock_max_waiting=0)
    declare("pair_failing", **pair, lock_on_backend_error="fail")
    declare("pair_running", **pair, lock_on_backend_error="run")
    declare("pair_abort", **pair, lock_on_lost="abort")
    declare("pair_limited", lock_key=None, lock_keys={"k:{key}": 1, "k:{n}": 2})

    @app.task(name="lock_in_body", shared=False)
    def lock_in_body(key: Any, n: int) -> int:
        """A plain task that waits for the lock in its slot."""
        with Lock(Redis.from_url(backend), f"k:{key}"):
            return n

    @app.task(name="total", shared=False)
    def total(numbers: list[Any]) -> Any:
        """End a chord."""
        return sorted(numbers)

    @app.task(name="total_locked", base=LockedTask, shared=False, lock_key="k:{key}")
    def total_locked(numbers: list[Any], key: str) -> Any:
        """End a chord, locked."""
        journal.note("total", key=key, numbers=numbers)
        return sorted(numbers)

    @app.task(name="default", base=LockedTask, shared=False, lock_key="k:{key}:{size}")
    def default(key: Any, size: Any = 7, *, note: str = "") -> str:
        """Return the lock's name: for T31."""
        return current_lock().name

    app.finalize()
    return app


def _raise(error: BaseException) -> None:
    raise error


async def _cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(HOLD)


def _raising_hook(*_: Any) -> None:
    text = "the hook is broken"
    raise RuntimeError(text)


def _key_of(key: Any = "", n: Any = 0, hold: Any = None, end: Any = None, extra: Any = None) -> str:
    return f"called:{key}"


def _raising_key(
    key: Any = "", n: Any = 0, hold: Any = None, end: Any = None, extra: Any = None
) -> str:
    if key.startswith("bad"):
        text = f"no lock for {key}"
        raise KeyError(text)
    return f"k:{key}"


def _outlive_soft_limit(journal: Journal, extra: Any) -> str:
    try:
        time.sleep(30)
    except SoftTimeLimitExceeded:
        journal.note("soft")
        if extra == "raise":
            raise
    return "tidied up"


def _watch_lock(journal: Journal, key: str, extra: Any) -> dict[str, Any]:
    """Check the lock until it is lost; record the time since the test's signal."""
    lock = current_lock()
    journal.await_gate(str(extra))
    began, deadline = time.monotonic(), time.monotonic() + 60
    while not lock.lost and time.monotonic() < deadline:
        time.sleep(0.02)
    told = time.monotonic() - began
    journal.note("told", key=key, lost=lock.lost, after=told)
    try:
        lock.ensure_held()
    except Exception as error:  # noqa: BLE001
        return {"lost": lock.lost, "after": told, "error": type(error).__name__}
    return {"lost": lock.lost, "after": told, "error": None}


def _hog(journal: Journal, until: Any) -> None:
    """Keep the interpreter busy for so many seconds, or until the test opens a gate."""
    if isinstance(until, str):
        gate = journal.folder / f"gate-{until}"
        while not gate.exists():
            sum(range(1_000_000))
        return
    deadline = time.monotonic() + float(until)
    while time.monotonic() < deadline:
        sum(range(10_000))


def _freeze(until: Any) -> None:
    """Keep the interpreter's lock, as C code may: for seconds, or while a test locks a file."""
    if isinstance(until, str):
        with Path(until).open() as file:
            ctypes.PyDLL(None).flock(file.fileno(), fcntl.LOCK_EX)
        return
    ctypes.PyDLL(None).poll(None, 0, int(float(until) * 1000))


def _swell(size: int) -> int:
    """Take memory, and keep it."""
    _ballast.append(bytearray(os.urandom(1024) * (size // 1024)))
    return size

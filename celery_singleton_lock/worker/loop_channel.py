"""Passes calls of other threads, and notices of pool children, to the worker's main loop.

There are two pipes, created before the pool forks, so that children inherit the writing ends.

* A child that acquired its lock writes its token into the first pipe. This takes microseconds; a
  message through Redis would take a round trip. The first notice wakes the loop, which then polls
  the pipe until it is empty. A wake-up for each notice would cost more than all other work for a
  lock, and permanent polling would use CPU in an idle worker.
* Other threads append a call, and write a byte into the second pipe, which wakes the loop at once.

A spawned child does not inherit the pipes. It opens the first one by name
(:meth:`LoopChannel.publish`). The name is removed when the worker ends, even after SIGKILL.
Delayed calls are kept here too, since Celery clears its own timers when a connection is lost.
If the worker has no event loop, a thread or a greenlet makes the calls: :attr:`LoopChannel.thread`.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.native_threads import original
from celery_singleton_lock.worker.background_thread import BackgroundThread

logger: Final = logging.getLogger(__name__)
_clock = SystemClock()

NOTICE_POLL: Final = 0.05
"""Seconds between two polls for notices, while notices arrive."""

LATER: Final = 0.5
"""Delay of the calls of :meth:`LoopChannel.later`, in seconds."""

AFTER_POOL: Final = 0.0005
"""Delay of the calls of :meth:`LoopChannel.after_pool`, in seconds."""

STILL: Final = 1.0
"""Seconds that a call may wait before the loop counts as stopped."""

TURN: Final = 0.05
"""Seconds after which the loop looks at its other events before it makes further calls."""

PATH: Final = "CELERY_SINGLETON_LOCK_LOOP_CHANNEL"
"""Environment variable with the name of the pipe for spawned children."""

PROC: Final = "/proc"
"""Directory in which Linux lists processes and their open files."""

_CHUNK: Final = 65536
_FOLDER: Final = "celery-singleton-lock-"
_NAME: Final = "loop-channel"


class LoopChannel:
    """Two pipes into the main loop.

    Attributes:
        on_notice: called in the main loop with each notice of a child.
        thread: makes all calls as they arrive, in a worker that has no loop.
    """

    def __init__(self) -> None:
        self._read_now, self._write_now = original("os", "read"), original("os", "write")
        self._reader, self._writer = _pipe()
        self._notice_reader, self._notice_writer = _pipe()
        self._closes_files = self._finalizer()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._later: deque[tuple[float, Callable[[], None]]] = deque()
        self._after_pool: deque[Callable[[], None]] = deque()
        # `thread` and the thread that ends the worker
        self._one_at_a_time = threading.RLock()
        self._rest = b""
        self._closed = False
        self._hub: Any = None
        self._loops = 0
        self._away = False
        self._waiting_since: float | None = None
        self._listens = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.on_notice: Callable[[str], None] = _nobody
        self.thread: Final = BackgroundThread("singleton-lock-loop-channel", self._serve_next)

    def attach(self, hub: Any) -> None:
        """Register the pipes with the event loop. Call it again after a lost connection.

        Args:
            hub: kombu's event loop.
        """
        self._hub = hub
        self.resume()
        self._loops += 1
        hub.add_reader(self._reader, self.drain)
        self._listen()

    def detach(self) -> None:
        """Note that the main loop reconnects, and makes no calls until :meth:`resume`."""
        self._away = True

    def resume(self) -> None:
        """Note that the main loop runs, or is about to."""
        self._away = False

    def stands_still(self) -> bool:
        """Return whether no calls are made at present. Safe from any thread.

        None are made while Celery reconnects to its broker, and while a solo worker runs a task.
        """
        since = self._waiting_since
        return self._away or (since is not None and _clock.monotonic() - since > STILL)

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Run ``call(*args)`` in the main loop as soon as possible. Safe from any thread."""
        self._calls.append((call, args))
        if self._waiting_since is None:
            self._waiting_since = _clock.monotonic()
        self._write(self._writer, b".")

    def later(self, call: Callable[[], None]) -> None:
        """Run ``call()`` in the main loop after at least :data:`LATER` seconds.

        Only the main loop itself may call this.
        """
        self._later.append((_clock.monotonic() + LATER, call))
        if self._listens:
            self._hush()
            self._hub.call_later(NOTICE_POLL, self._look, self._loops)

    def after_pool(self, call: Callable[[], None]) -> None:
        """Run ``call()`` after the main loop has sent the pool the tasks that are ready.

        Only the main loop itself may call this. While it does not run, the call is made at once.
        """
        if self._hub is None or self._away:
            return guarded(call)
        self._after_pool.append(call)
        if len(self._after_pool) == 1:
            self._hub.call_later(AFTER_POOL, self._make_calls_after_pool)
        return None

    def announce(self, token: str) -> None:
        """Send a notice to the main loop: a token that holds its lock, or one of :data:`MARKS`.

        Safe from children and threads. If the pipe is full, the notice is dropped; the end of the
        task has the same effect.
        """
        self._write(self._notice_writer, token.encode() + b"\n")

    def publish(self) -> str:
        """Return a name of the first pipe, for children that do not inherit it.

        On Linux every open file has a name in ``/proc``, which ends with the process.
        """
        name = f"{PROC}/{os.getpid()}/fd/{self._notice_writer}"
        return name if _can_be_opened(name) else self._publish_in_folder()

    def _publish_in_folder(self) -> str:
        """Replace the first pipe by a named one. Remove named pipes of workers that were killed."""
        for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
            if _nobody_reads(left / _NAME):
                shutil.rmtree(left, ignore_errors=True)
        self._folder = tempfile.TemporaryDirectory(prefix=_FOLDER)
        unread, path = Path(self._folder.name, "unread"), Path(self._folder.name, _NAME)
        os.mkfifo(unread, 0o600)
        os.close(self._notice_reader)
        os.close(self._notice_writer)
        self._notice_reader = os.open(unread, os.O_RDONLY | os.O_NONBLOCK)
        unread.rename(path)  # only now: other workers remove a pipe of this name without a reader
        # stays open: otherwise the pipe would be closed with the last child
        self._notice_writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self._closes_files.detach()
        self._closes_files = self._finalizer()
        return str(path)

    def _finalizer(self) -> weakref.finalize[[tuple[int, ...]], LoopChannel]:
        """Close the files with the last reference: other threads may write after :meth:`close`."""
        files = (self._reader, self._writer, self._notice_reader, self._notice_writer)
        finalizer = weakref.finalize(self, _close, files)
        finalizer.atexit = False
        return finalizer

    def close(self) -> None:
        """Remove the pipe's name, and end :attr:`thread`."""
        self._closed = True
        self.post(_nobody, "")
        if self._folder is not None:
            self._folder.cleanup()

    def _serve_next(self) -> bool:
        """Make the calls that arrive next. Return False once closed, when no call is left."""
        with self.thread.idle():
            select.select(
                [self._reader, self._notice_reader], [], [], NOTICE_POLL if self._later else None
            )
        self.drain()
        return bool(self._calls) or not self._closed

    def drain(self, *_: Any) -> None:
        """Make the calls that have arrived. Runs in the main loop. Never raises.

        A solo worker runs its tasks in these calls, and further ones arrive meanwhile. So after
        :data:`TURN` seconds the loop looks at its other events: signals, the broker, its timers.
        """
        self._waiting_since = None  # a call posted from now on writes to the pipe again
        self._read(self._reader)
        self.handle_notices()  # notices first: a call may concern the end of the same task
        until = _clock.monotonic() + TURN
        while self._calls:
            call, args = self._calls.popleft()
            guarded(call, *args)
            if self._calls and _clock.monotonic() >= until:
                self._go_on_in_next_turn()
                break

    def _go_on_in_next_turn(self) -> None:
        """Wake the loop once more, for the calls that remain."""
        if self._waiting_since is None:
            self._waiting_since = _clock.monotonic()
        self._write(self._writer, b".")

    def handle_notices(self) -> bool:
        """Handle the notices that have arrived, and make the delayed calls that are due.

        Runs in the main loop.

        Returns:
            Whether there was a notice, or a delayed call waits.
        """
        with self._one_at_a_time:
            heard = self._read(self._notice_reader)
            *lines, self._rest = (self._rest + heard).split(b"\n")
        for line in lines:
            guarded(self.on_notice, line.decode())
        self._make_later_calls(_clock.monotonic())
        return bool(heard or self._later)

    def _listen(self) -> None:
        """Let the next notice wake the loop."""
        self._listens = True
        self._hub.add_reader(self._notice_reader, self._look, self._loops)

    def _hush(self) -> None:
        """Stop notices from waking the loop; it polls from now on."""
        self._listens = False
        self._hub.remove_reader(self._notice_reader)

    def _look(self, loop: int) -> None:
        """Poll for notices until there are none. Do nothing if the loop was reset meanwhile."""
        if loop != self._loops:
            return
        if self._listens:
            self._hush()
        if self.handle_notices():
            self._hub.call_later(NOTICE_POLL, self._look, loop)
        else:
            self._listen()

    def hurry(self) -> None:
        """Make all delayed calls now, since the loop or the connection ends."""
        self._make_calls_after_pool()
        self._make_later_calls(math.inf)

    def _make_calls_after_pool(self) -> None:
        while self._after_pool:
            guarded(self._after_pool.popleft())

    def _make_later_calls(self, now: float) -> None:
        with self._one_at_a_time:
            while self._later and self._later[0][0] <= now:
                guarded(self._later.popleft()[1])

    def _read(self, end: int) -> bytes:
        try:
            return bytes(self._read_now(end, _CHUNK))
        except BlockingIOError:
            return b""

    def _write(self, end: int, line: bytes) -> None:
        # If the pipe is full, the reader will find the call. If code of the user in a child has
        # closed it, the end of the task has the same effect as the notice. So no task may fail
        # because of that.
        with suppress(OSError):
            self._write_now(end, line)


def announcer() -> Callable[[str], None]:
    """Return the function with which a spawned child sends notices to its worker.

    In other processes it does nothing: a forked child uses the loop channel of its parent.
    """
    path = os.environ.get(PATH)
    if path is None:
        return _nobody
    try:
        write_end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        logger.warning("celery-singleton-lock: the worker's channel %s is closed: %s", path, error)
        return _nobody

    def announce(token: str) -> None:
        with suppress(OSError):  # the pipe is full, or the worker has ended
            os.write(write_end, token.encode() + b"\n")

    return announce


def _can_be_opened(name: str) -> bool:
    """Return whether children can open a file of this process by its name below :data:`PROC`.

    Only Linux has such names. If a process has changed its user (``--uid``), they belong to root,
    and children cannot open them.
    """
    with suppress(OSError):
        Path(name).stat()
        return Path(name).lstat().st_uid == os.geteuid()
    return False


def _nobody_reads(path: Path) -> bool:
    """Return whether a named pipe was left by a worker that was killed."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.ENXIO  # another error: it is missing, or of another user
    return False


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return reader, writer


def _close(files: tuple[int, ...]) -> None:
    for file in files:
        os.close(file)


def guarded(call: Callable[..., None], *args: Any) -> None:
    """Make a call, and log an exception, which would end the worker's main loop."""
    try:
        call(*args)
    except Exception:
        logger.exception("celery-singleton-lock: %r failed in the worker's main loop", call)


def _nobody(_token: str) -> None:
    """Ignore a notice."""

"""Calls from other threads, and notices from pool children, into the worker's main loop.

Two pipes, made before the pool forks, so that children inherit the writing ends. A child that took
its lock writes its token into one: a few microseconds, where Redis would be a round trip. The first
such notice wakes the loop, which then looks now and then until there is none: to be woken by each
would cost it more than all else that it does for a lock, and to look for ever would keep an idle
machine awake. Other threads append a call and write a byte into the other pipe, which wakes the
loop at once.

A child that is spawned inherits nothing: for it, its pipe has a name (:meth:`Mailbox.publish`),
which ends with the worker, however that ends.
What is to be done in the loop a little later waits here too: Celery's own timers are cleared when a
connection is lost.
Where the worker has no loop of its own, a thread, or a greenlet, stands in:
:attr:`Mailbox.thread`.
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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from celery_singleton_lock.worker.background_thread import BackgroundThread
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.native_threads import original

logger = logging.getLogger(__name__)
_clock = SystemClock()

HEAR: Final = 0.05
"""Seconds between two looks for notices, while there are any; a task that ends before says the same
by its end."""

LATER: Final = 0.5
"""Seconds after which a later call is made."""

STILL: Final = 1.0
"""Seconds after which a loop that has not made a call counts as standing still."""

PATH: Final = "CELERY_SINGLETON_LOCK_MAILBOX"
"""Environment variable by which spawned children learn the name of their pipe."""

PROC: Final = "/proc"
"""Where Linux shows processes, and their open files."""

_CHUNK: Final = 65536
_FOLDER: Final = "celery-singleton-lock-"
_NAME: Final = "mailbox"


class Mailbox:
    """Two pipes into the main loop.

    Attributes:
        on_notice: called in the main loop with each token that a child announced.
        thread: makes all calls as they arrive, in a worker that has no loop.
    """

    def __init__(self) -> None:
        """Open the pipes; no end ever blocks."""
        self._read_now, self._write_now = original("os", "read"), original("os", "write")
        self._reader, self._writer = _pipe()
        self._ear, self._mouth = _pipe()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._later: deque[tuple[float, Callable[[], None]]] = deque()
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
        self.thread: Final = BackgroundThread("singleton-lock-mailbox", self._serve_next)

    def attach(self, hub: Any) -> None:
        """Have Celery's event loop make the calls; again after a lost connection, which resets it.

        Args:
            hub: kombu's.
        """
        self._hub = hub
        self.turn()
        self._loops += 1
        hub.add_reader(self._reader, self.drain)
        self._listen()

    def detach(self) -> None:
        """Note that the main loop is away until :meth:`turn`: it looks for its broker."""
        self._away = True

    def turn(self) -> None:
        """Note that the main loop turns, or is about to."""
        self._away = False

    def stands_still(self) -> bool:
        """Return whether nobody makes the calls at present. Safe from any thread.

        So it is while Celery looks for its broker, and while a solo worker runs a task.
        """
        since = self._waiting_since
        return self._away or (since is not None and _clock.monotonic() - since > STILL)

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Run ``call(*args)`` in the main loop, soon. Safe from any thread."""
        self._calls.append((call, args))
        if self._waiting_since is None:
            self._waiting_since = _clock.monotonic()
        self._write(self._writer, b".")

    def later(self, call: Callable[[], None]) -> None:
        """Run ``call()`` in the main loop, :data:`LATER` seconds from now or a little after.

        For calls from the main loop itself.
        """
        self._later.append((_clock.monotonic() + LATER, call))
        if self._listens:
            self._hush()
            self._hub.call_later(HEAR, self._look, self._loops)

    def announce(self, token: str) -> None:
        """Tell the main loop that ``token`` holds its lock. Safe from children and threads.

        A full pipe drops the notice: the end of the task tells the same, later.
        """
        self._write(self._mouth, token.encode() + b"\n")

    def publish(self) -> str:
        """Return a name of the children's pipe, for those that inherit no file.

        Linux has one for every open file, and takes it away however the process ends.
        """
        name = f"{PROC}/{os.getpid()}/fd/{self._mouth}"
        return name if _can_be_opened(name) else self._publish_in_folder()

    def _publish_in_folder(self) -> str:
        """Make a pipe with a name of its own, and clear away those that killed workers have left.

        A second pipe would have to be watched as well, so this one takes the first one's place.
        """
        for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
            if _nobody_reads(left / _NAME):
                shutil.rmtree(left, ignore_errors=True)
        self._folder = tempfile.TemporaryDirectory(prefix=_FOLDER)
        unread, path = Path(self._folder.name, "unread"), Path(self._folder.name, _NAME)
        os.mkfifo(unread, 0o600)
        os.close(self._ear)
        os.close(self._mouth)
        self._ear = os.open(unread, os.O_RDONLY | os.O_NONBLOCK)
        unread.rename(path)  # only now: under this name a pipe without a reader has been left
        self._mouth = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # or each last child would end it
        return str(path)

    def close(self) -> None:
        """Take the name away again, and end who serves. The pipes stay open for stragglers."""
        self._closed = True
        self.post(_nobody, "")
        if self._folder is not None:
            self._folder.cleanup()

    def _serve_next(self) -> bool:
        """Make the calls that arrive next. False: closed."""
        with self.thread.idle():
            select.select([self._reader, self._ear], [], [], HEAR if self._later else None)
        self.drain()
        return not self._closed

    def drain(self, *_: Any) -> None:
        """Make the calls that have arrived. Runs in the main loop, and never raises into it."""
        self._waiting_since = None  # of a call that is posted from now on the pipe tells again
        self._read(self._reader)
        self.hear()  # a child's notice comes before what another thread says of its task
        while self._calls:
            call, args = self._calls.popleft()
            guarded(call, *args)

    def hear(self) -> bool:
        """Take the notices that have arrived, and make the later calls that are due.

        Runs in the main loop.

        Returns:
            Whether there was anything, or will be soon.
        """
        heard = self._read(self._ear)
        *lines, self._rest = (self._rest + heard).split(b"\n")
        for line in lines:
            guarded(self.on_notice, line.decode())
        self._make_later_calls(_clock.monotonic())
        return bool(heard or self._later)

    def _listen(self) -> None:
        """Be woken by the next notice."""
        self._listens = True
        self._hub.add_reader(self._ear, self._look, self._loops)

    def _hush(self) -> None:
        """Be woken by none; from now on somebody looks."""
        self._listens = False
        self._hub.remove_reader(self._ear)

    def _look(self, loop: int) -> None:
        """Look for notices until there are none; but not for a loop that was reset meanwhile."""
        if loop != self._loops:
            return
        if self._listens:
            self._hush()
        if self.hear():
            self._hub.call_later(HEAR, self._look, loop)
        else:
            self._listen()

    def hurry(self) -> None:
        """Make all later calls now: the loop ends, or the connection over which they tell."""
        self._make_later_calls(math.inf)

    def _make_later_calls(self, now: float) -> None:
        with self._one_at_a_time:  # who serves, and who ends the worker
            while self._later and self._later[0][0] <= now:
                guarded(self._later.popleft()[1])

    def _read(self, end: int) -> bytes:
        try:
            return bytes(self._read_now(end, _CHUNK))
        except BlockingIOError:
            return b""

    def _write(self, end: int, line: bytes) -> None:
        try:
            self._write_now(end, line)
        except BlockingIOError:
            pass  # the reader is behind, and will find the call when it comes to it
        except OSError:
            logger.debug("the worker's mailbox is closed")


def announcer() -> Callable[[str], None]:
    """Return how this process announces, if it was spawned by a worker: into the named pipe.

    Elsewhere nobody listens: a forked child has its parent's mailbox, and sets it.
    """
    path = os.environ.get(PATH)
    if path is None:
        return _nobody
    try:
        mouth = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        logger.warning("celery-singleton-lock: the worker's mailbox %s is closed: %s", path, error)
        return _nobody

    def announce(token: str) -> None:
        with suppress(OSError):  # full, or the worker is gone: see Mailbox.announce
            os.write(mouth, token.encode() + b"\n")

    return announce


def _can_be_opened(name: str) -> bool:
    """Return whether our children can open a file of ours by its name below :data:`PROC`.

    Only Linux has such names. A process that has changed its user (``--uid``) keeps its files to
    itself; they are root's then.
    """
    with suppress(OSError):
        Path(name).stat()
        return Path(name).lstat().st_uid == os.geteuid()
    return False


def _nobody_reads(path: Path) -> bool:
    """Return whether a pipe with a name has been left by a worker that was killed."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.ENXIO  # what is missing, or another user's, is left alone
    return False


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return reader, writer


def guarded(call: Callable[..., None], *args: Any) -> None:
    """Call, and log what is raised: an exception in the main loop would end the worker."""
    try:
        call(*args)
    except Exception:
        logger.exception("celery-singleton-lock: %r failed in the worker's main loop", call)


def _nobody(_token: str) -> None:
    """Stand in where nobody listens, or not yet."""

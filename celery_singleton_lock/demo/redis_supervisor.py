"""The supervisor of one server process: it ends the server when the owner ends.

It is a separate process, started by path and without site-packages, so it imports only the standard
library. See :mod:`celery_singleton_lock.demo.redis_server`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

CHECK: Final = 0.5
"""Seconds between two checks of the parent: a fork of the owner may keep the pipe open."""


class Supervisor:
    """Runs one server until it ends, or until the owner ends.

    Args:
        owner: process id of the owner.
        scratch: directory to remove after the owner's end; None: none.
    """

    def __init__(self, owner: int, scratch: str | None) -> None:
        """Create it. :meth:`run` starts the server."""
        self._owner = owner
        self._scratch = scratch

    def run(self, command: Sequence[str]) -> int:
        """Start the server, print its process id, and wait for its end or the owner's.

        Args:
            command: command line of the server.

        Returns:
            The server's exit status.
        """
        child_ended = _pipe_on_child_exit()
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # this process has one thread
        )
        print(server.pid, flush=True)  # the owner reads it from the pipe
        while server.poll() is None and self._owner_lives(child_ended):
            pass
        if server.poll() is None:
            self._end(server)
        return server.wait()

    def _owner_lives(self, child_ended: int) -> bool:
        """Wait for an event; return whether the owner still runs."""
        readable, _, _ = select.select([sys.stdin, child_ended], [], [], CHECK)
        if child_ended in readable:
            os.read(child_ended, 64)
        return sys.stdin not in readable and os.getppid() == self._owner

    def _end(self, server: subprocess.Popen[bytes]) -> None:
        server.kill()
        server.wait()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _pipe_on_child_exit() -> int:
    """Return a file descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _die_with_parent() -> None:
    """Make the kernel kill this process when the supervisor ends. Only Linux can do this."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def main() -> int:
    """Run the command of the command line for an owner."""
    parser = argparse.ArgumentParser(description="Run COMMAND until OWNER ends.")
    parser.add_argument("--owner", type=int, required=True, metavar="PID")
    parser.add_argument("--scratch", help="directory to remove when the owner has ended")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    chosen = parser.parse_args()
    return Supervisor(chosen.owner, chosen.scratch).run(chosen.command)


if __name__ == "__main__":
    sys.exit(main())

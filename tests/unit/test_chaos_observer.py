"""The observer of a storm finds its processes, and reports its own errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chaos.observer import children
from support.checked_thread import CheckedThread


def test_the_children_of_a_process_are_found_until_it_ends():
    """Afterwards there are none, which is not an error."""
    code = "import subprocess; subprocess.Popen(['cat']); print(input(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        parent.stdin.write(b"begun\n")
        parent.stdin.flush()
        parent.stdout.readline()
        assert len(children(parent.pid)) == 1
        parent.kill()
        parent.stdin.close()
    assert children(parent.pid) == []


def test_join_raises_the_error_of_a_thread():
    def job():
        raise FileNotFoundError("/proc/1/task")

    thread = CheckedThread(job)
    thread.start()
    with pytest.raises(RuntimeError, match="job ended with an error") as caught:
        thread.join()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_join_of_a_thread_without_an_error_raises_nothing():
    done = []
    thread = CheckedThread(lambda: done.append(1))
    thread.start()
    thread.join()
    assert done == [1]

"""What looks at a storm sees its processes, and does not die in silence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chaos.observer import children
from support.checked_thread import CandidThread


def test_the_children_of_a_process_are_found_until_it_ends():
    """Then there are none, which is no error: processes end while somebody looks."""
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


def test_the_error_of_a_thread_is_raised_by_who_joins_it():
    def job():
        raise FileNotFoundError("/proc/1/task")

    thread = CandidThread(job)
    thread.start()
    with pytest.raises(RuntimeError, match="job ended by itself") as caught:
        thread.join()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_thread_without_an_error_is_joined_in_silence():
    done = []
    thread = CandidThread(lambda: done.append(1))
    thread.start()
    thread.join()
    assert done == [1]

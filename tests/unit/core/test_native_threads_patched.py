"""The system's threads and locks, with and without gevent and eventlet around them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import pytest

from celery_singleton_lock.core import native_threads
from support.ci import skip_or_fail
from support.waiting import in_time

PATCH = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}

BUSY = """
import time
from celery_singleton_lock.core import native_threads as native
ticks, stop, told = [], native.Condition(native.RLock()), []
def tick():
    with stop:
        while not told:
            stop.wait(0.05)
            ticks.append(time.monotonic())
threads = [native.Thread(target=tick, name="tick", daemon=True)]
threads[0].start()
end = time.monotonic() + 60
while len(ticks) < 10 and time.monotonic() < end:
    sum(range(1000))
print(native.patched_by(), len(ticks), native.original("os", "read") is __import__("os").read)
with stop:
    told.append(True)  # it may be between two waits
    stop.notify_all()
threads[0].join(60)
print(threads[0].is_alive())
"""


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_native_thread_goes_on_while_a_greenlet_computes(library):
    """In a patched process that computes it ticks on, and can be told to end."""
    if find_spec(library) is None:
        skip_or_fail(f"{library} is not installed")
    assert native_threads.patched_by() == ""  # here; what follows is another process
    assert native_threads.original("os", "read") is os.read
    script = f"import warnings; warnings.simplefilter('ignore')\n{PATCH[library]}\n{BUSY}"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    first, alive = ended.stdout.splitlines()
    patched_by, ticks, unpatched_read = first.split()
    assert patched_by == library
    assert int(ticks) >= 10
    assert unpatched_read == str(library == "gevent")  # which leaves os.read as it is
    assert alive == "False"


def test_without_a_patch_everything_is_the_systems():
    """Nothing is patched here, so the originals are what is there."""
    assert native_threads.patched_by() == ""
    assert native_threads.original("threading", "Thread") is threading.Thread


def test_a_condition_times_out_and_forgets_the_waiter():
    """A waiter that was not notified in time learns it, and uses up no later notice."""
    changed = native_threads.Condition(native_threads.RLock())
    began = time.monotonic()
    with changed:
        assert changed.wait(0.05) is False
    took = time.monotonic() - began
    assert took > 0.04
    assert not changed._waiters
    in_time(took, 20)


def test_a_condition_is_notified_and_wait_for_asks_again():
    """A waiter wakes when another thread has made its condition true."""
    changed, facts = native_threads.Condition(native_threads.RLock()), []

    def make_true() -> None:
        with changed:
            facts.append(True)
            changed.notify_all()

    with changed:
        thread = native_threads.Thread(target=make_true, name="maker", daemon=True)
        thread.start()
        assert changed.wait_for(lambda: facts, 60)
    thread.join(60)
    assert not thread.is_alive()


def test_a_native_thread_is_never_waited_for_at_exit():
    """It is a daemon, and says so to who wants another."""
    with pytest.raises(ValueError, match="daemon=True"):
        native_threads.Thread(target=print, name="patient", daemon=False)

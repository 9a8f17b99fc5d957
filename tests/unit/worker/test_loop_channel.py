"""The pipe into the worker's main loop."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from kombu.asynchronous import Hub

from celery_singleton_lock.worker.loop_channel import PATH, TURN, LoopChannel, announcer, guarded
from support.waiting import eventually


@pytest.fixture
def loop_channel():
    box = LoopChannel()
    box.heard = []
    box.on_notice = box.heard.append
    return box


def test_calls_and_notices_arrive_in_their_order(loop_channel):
    """What was posted is called, what was announced is heard, each in order."""
    called = []
    for n in range(3):
        loop_channel.announce(f"token-{n}")
        loop_channel.post(called.append, n)
    loop_channel.drain()
    assert (loop_channel.heard, called) == (["token-0", "token-1", "token-2"], [0, 1, 2])


def test_calls_that_take_long_let_the_loop_look_at_its_other_events(hub, loop_channel):
    """A solo worker runs its tasks in these calls; each of them brings the next grant."""
    ran, ends = [], threading.Event()

    def run():
        ends.wait(TURN)  # the task works for so long
        ran.append(1)
        if len(ran) < 50:
            loop_channel.post(run)

    loop_channel.attach(hub)
    loop_channel.post(run)
    turns = hub.create_loop()
    next(turns)
    assert len(ran) <= 2, "a signal to stop would wait until the backlog is over"
    while len(ran) < 50:
        next(turns)


def test_nothing_to_read_is_no_error(loop_channel):
    """The loop may wake for nothing."""
    loop_channel.drain()
    assert loop_channel.heard == []


def test_a_notice_cut_in_two_is_put_together(loop_channel):
    """A read may end amid a line."""
    os.write(loop_channel._notice_writer, b"tok")
    loop_channel.drain()
    assert loop_channel.heard == []
    os.write(loop_channel._notice_writer, b"en\nother\n")
    loop_channel.drain()
    assert loop_channel.heard == ["token", "other"]


def test_a_full_pipe_blocks_no_writer_and_loses_no_call(loop_channel):
    """Notices may be dropped, since the task's end tells the same; calls are not."""
    called = []
    for n in range(10_000):
        loop_channel.announce("x" * 22)
        loop_channel.post(called.append, n)
    while len(called) < 10_000:
        loop_channel.drain()
    assert called == list(range(10_000))
    assert 0 < len(loop_channel.heard) < 10_000


def test_no_task_fails_in_a_child_whose_code_has_closed_the_pipe(loop_channel):
    """Its lock would stay held until the lease ends. The task's end tells the same."""

    def closed(*_):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    loop_channel._write_now = closed
    loop_channel.announce("token")


def test_an_error_in_a_call_stays_out_of_the_loop(loop_channel, caplog):
    """It is logged, and the next call is made."""
    called = []
    loop_channel.on_notice = lambda token: 1 / 0
    loop_channel.announce("token")
    loop_channel.post(lambda: 1 / 0)
    loop_channel.post(called.append, 1)
    loop_channel.drain()
    assert called == [1]
    assert caplog.text.count("ZeroDivisionError") == 2


def test_calls_from_many_threads_all_arrive(loop_channel):
    """Posting is safe from any thread."""
    called = []

    def post():
        for n in range(200):
            loop_channel.post(called.append, n)

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop_channel.drain()
    assert sorted(called) == sorted(list(range(200)) * 8)


def test_a_call_that_posts_another_is_served_in_the_same_round(loop_channel):
    """Nothing waits for the next wake-up."""
    called = []
    loop_channel.post(lambda: loop_channel.post(called.append, 1))
    loop_channel.drain()
    assert called == [1]


def test_guarded_names_the_call(caplog):
    """The log says which call failed."""

    def broken():
        raise ValueError("oh")

    guarded(broken)
    assert "broken" in caplog.text


LINUX = sys.platform == "linux"


def announce_from_outside(path):
    """Announce a token from a process that has inherited nothing."""
    script = "from celery_singleton_lock.worker.loop_channel import announcer; announcer()('token')"
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, PATH: path}, timeout=120, check=True
    )


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(
    params=[pytest.param(True, marks=pytest.mark.skipif(not LINUX, reason="/proc")), False]
)
def open_files_have_names(request, monkeypatch):
    """Whether the system shows the files that a process has opened, as Linux does."""
    if not request.param:
        monkeypatch.setattr("celery_singleton_lock.worker.loop_channel.PROC", "/there-is-none")
    return request.param


def test_a_process_that_inherited_nothing_announces_by_name(
    loop_channel, temporary, open_files_have_names
):
    """A spawned child knows the pipe by its name alone; the name goes with the worker."""
    path = loop_channel.publish()
    announce_from_outside(path)
    loop_channel.handle_notices()
    assert loop_channel.heard == ["token"]
    loop_channel.announce("from here")
    loop_channel.handle_notices()
    assert loop_channel.heard == ["token", "from here"]
    loop_channel.close()
    assert list(temporary.iterdir()) == []


PUBLISH_AND_BE_KILLED = """
import os, signal, sys
from celery_singleton_lock.worker import loop_channel
loop_channel.PROC = sys.argv[1]
box = loop_channel.LoopChannel()
print(box.publish(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def publish_and_be_killed(proc, folder):
    """Let a worker's main process publish its loop channel, and kill it; return the name."""
    killed = subprocess.run(
        [sys.executable, "-c", PUBLISH_AND_BE_KILLED, proc],
        env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    return killed.stdout.strip()


@pytest.mark.skipif(not LINUX, reason="only Linux has names for open files")
def test_a_killed_process_leaves_nothing_in_the_temporary_folder(temporary):
    """Its pipe had a name that the system took away."""
    path = publish_and_be_killed("/proc", temporary)
    assert not Path(path).exists()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_has_left_is_cleared_away_by_the_next(
    loop_channel, temporary, monkeypatch
):
    """Where there is no such name: and the pipe of one that lives is left alone."""
    left = publish_and_be_killed("/there-is-none", temporary)
    assert Path(left).exists()
    monkeypatch.setattr("celery_singleton_lock.worker.loop_channel.PROC", "/there-is-none")
    path, other = loop_channel.publish(), LoopChannel()
    another = other.publish()
    assert [Path(name).exists() for name in (left, path, another)] == [False, True, True]
    announce_from_outside(path)
    loop_channel.handle_notices()
    assert loop_channel.heard == ["token"]
    loop_channel.close()
    other.close()


PUBLISH_AS_ANOTHER = """
import ctypes, os
from celery_singleton_lock.worker import loop_channel
if os.geteuid() == 0:
    os.setuid(65534)
else:
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: what a change of the user does as well
print(loop_channel.LoopChannel().publish())
"""


@pytest.mark.skipif(not LINUX, reason="only Linux has names for open files")
def test_the_pipe_of_a_process_that_changed_its_user_has_a_name_of_its_own():
    """Linux gives the open files to root then (``--uid``), and a child could not open them."""
    command = [sys.executable, "-c", PUBLISH_AS_ANOTHER]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.startswith(str(Path(tempfile.gettempdir(), "celery-singleton-lock-")))


def test_a_child_logs_a_missing_channel_of_its_worker_and_continues(monkeypatch, tmp_path, caplog):
    """Its announcements then go nowhere: the end of a task tells the same."""
    monkeypatch.setenv(PATH, str(tmp_path / "gone"))
    announcer()("token")
    assert "channel" in caplog.text


def test_a_thread_serves_where_there_is_no_loop(loop_channel):
    """Calls are made and notices heard as they arrive, until the loop channel is closed."""
    called = threading.Event()
    thread = loop_channel.thread
    thread.start()
    loop_channel.announce("token")
    loop_channel.post(called.set)
    assert called.wait(60)
    assert loop_channel.heard == ["token"]
    loop_channel.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_later_call_is_made_half_a_second_later_in_its_turn(loop_channel, monkeypatch):
    """Not by the loop's next look; and those that end the worker need not wait."""
    told, clock = [], SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("celery_singleton_lock.worker.loop_channel._clock", clock)
    for n in range(3):
        loop_channel.later(partial(told.append, n))
    loop_channel.handle_notices()
    clock.now += 0.4
    loop_channel.handle_notices()
    assert told == []
    clock.now += 0.2
    eventually(lambda: not loop_channel.handle_notices(), 5, "they are made")
    assert told == [0, 1, 2]
    loop_channel.later(partial(told.append, 3))
    loop_channel.hurry()
    assert told == [0, 1, 2, 3]


def test_a_later_call_that_fails_keeps_none_of_the_others(loop_channel):
    """It is logged."""
    told = []
    loop_channel.later(lambda: 1 / 0)
    loop_channel.later(partial(told.append, 1))
    loop_channel.hurry()
    assert told == [1]


def test_without_a_loop_a_call_after_the_pool_is_made_at_once(loop_channel):
    told = []
    loop_channel.after_pool(partial(told.append, 1))
    assert told == [1]


def test_serving_without_a_loop_makes_later_calls_too(loop_channel):
    """Nothing else wakes it meanwhile."""
    told = threading.Event()
    thread = loop_channel.thread
    thread.start()
    loop_channel.post(loop_channel.later, told.set)
    assert told.wait(60)
    loop_channel.close()
    thread.join(60)
    assert not thread.is_alive()


# -- in Celery's event loop ------------------------------------------------------------------------


@pytest.fixture
def hub(loop_channel):
    """A loop that makes the loop channel's calls."""
    hub = Hub()
    loop_channel.attach(hub)
    yield hub
    hub.close()


def is_woken(hub, loop_channel):
    """Whether the next notice wakes the loop; else the loop wakes by itself."""
    assert (loop_channel._notice_reader in hub.readers) != bool(hub.timer._queue)
    return loop_channel._notice_reader in hub.readers


def run_until(hub, predicate):
    def come():
        hub.run_once()
        return predicate()

    eventually(come, 5)


def test_calls_after_the_pool_are_made_soon_and_one_that_fails_keeps_none_of_the_others(
    hub, loop_channel
):
    told = []
    for call in (partial(told.append, 1), lambda: 1 / 0, partial(told.append, 2)):
        loop_channel.after_pool(call)
    assert told == []
    run_until(hub, lambda: told == [1, 2])
    loop_channel.after_pool(partial(told.append, 3))
    run_until(hub, lambda: told == [1, 2, 3])


def test_calls_after_the_pool_are_made_before_the_connection_ends(hub, loop_channel):
    """Celery clears the timers of its loop then, and messages could not be acknowledged."""
    told = []
    loop_channel.after_pool(partial(told.append, 1))
    loop_channel.hurry()
    assert told == [1]
    hub.timer.clear()
    loop_channel.after_pool(partial(told.append, 2))
    run_until(hub, lambda: told == [1, 2])
    loop_channel.detach()
    loop_channel.after_pool(partial(told.append, 3))
    assert told == [1, 2, 3]


def test_an_idle_loop_sleeps_until_a_notice_wakes_it(hub, loop_channel):
    assert is_woken(hub, loop_channel)
    loop_channel.announce("token")
    run_until(hub, lambda: loop_channel.heard == ["token"])


def test_a_loop_that_was_woken_is_woken_by_no_other_notice_until_there_are_none(hub, loop_channel):
    """It looks for them meanwhile: to be woken by each would cost it a turn."""
    for n in range(3):
        loop_channel.announce(str(n))
        run_until(hub, lambda n=n: loop_channel.heard[n:] == [str(n)])
        assert not is_woken(hub, loop_channel)
    run_until(hub, lambda: is_woken(hub, loop_channel))


def test_a_loop_that_sleeps_makes_later_calls(hub, loop_channel):
    """And then sleeps again."""
    told = []
    loop_channel.later(partial(told.append, 1))
    loop_channel.later(partial(told.append, 2))
    run_until(hub, lambda: told == [1, 2])
    run_until(hub, lambda: is_woken(hub, loop_channel))


def test_a_later_call_made_by_a_notice_is_served_once(hub, loop_channel, monkeypatch):
    monkeypatch.setattr("celery_singleton_lock.worker.loop_channel.LATER", 60.0)
    loop_channel.on_notice = lambda _: loop_channel.later(lambda: None)
    loop_channel.announce("token")
    run_until(hub, lambda: loop_channel._later)
    assert len(hub.timer._queue) == 1
    loop_channel.announce("other")
    run_until(hub, lambda: len(loop_channel._later) == 2)
    assert len(hub.timer._queue) == 1


@pytest.mark.parametrize("cleared", [True, False], ids=["timers cleared", "timers kept"])
@pytest.mark.parametrize("stirred", [True, False], ids=["stirred", "idle"])
def test_a_loop_that_a_lost_connection_has_reset_serves_again(hub, loop_channel, cleared, stirred):
    """Whatever was left of the former one."""
    if stirred:
        loop_channel.announce("before")
        run_until(hub, lambda: loop_channel.heard == ["before"])
    hub.reset()
    if cleared:
        hub.timer.clear()
    loop_channel.attach(hub)
    for n in range(3):
        loop_channel.announce(str(n))
        run_until(hub, lambda n=n: loop_channel.heard[-1:] == [str(n)])
    run_until(hub, lambda: loop_channel._notice_reader in hub.readers and not hub.timer._queue)

"""The pipe into the worker's main loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
from kombu.asynchronous import Hub

from celery_singleton_lock.worker.loop_channel import PATH, Mailbox, announcer, guarded
from support.waiting import eventually


@pytest.fixture
def mailbox():
    box = Mailbox()
    box.heard = []
    box.on_notice = box.heard.append
    yield box
    for end in (box._reader, box._writer, box._ear, box._mouth):
        os.close(end)


def test_calls_and_notices_arrive_in_their_order(mailbox):
    """What was posted is called, what was announced is heard, each in order."""
    called = []
    for n in range(3):
        mailbox.announce(f"token-{n}")
        mailbox.post(called.append, n)
    mailbox.drain()
    assert (mailbox.heard, called) == (["token-0", "token-1", "token-2"], [0, 1, 2])


def test_nothing_to_read_is_no_error(mailbox):
    """The loop may wake for nothing."""
    mailbox.drain()
    assert mailbox.heard == []


def test_a_notice_cut_in_two_is_put_together(mailbox):
    """A read may end amid a line."""
    os.write(mailbox._mouth, b"tok")
    mailbox.drain()
    assert mailbox.heard == []
    os.write(mailbox._mouth, b"en\nother\n")
    mailbox.drain()
    assert mailbox.heard == ["token", "other"]


def test_a_full_pipe_blocks_nobody_and_loses_no_call(mailbox):
    """Notices may be dropped, since the task's end tells the same; calls are not."""
    called = []
    for n in range(10_000):
        mailbox.announce("x" * 22)
        mailbox.post(called.append, n)
    while len(called) < 10_000:
        mailbox.drain()
    assert called == list(range(10_000))
    assert 0 < len(mailbox.heard) < 10_000


def test_an_error_in_a_call_stays_out_of_the_loop(mailbox, caplog):
    """It is logged, and the next call is made."""
    called = []
    mailbox.on_notice = lambda token: 1 / 0
    mailbox.announce("token")
    mailbox.post(lambda: 1 / 0)
    mailbox.post(called.append, 1)
    mailbox.drain()
    assert called == [1]
    assert caplog.text.count("ZeroDivisionError") == 2


def test_calls_from_many_threads_all_arrive(mailbox):
    """Posting is safe from any thread."""
    called = []

    def post():
        for n in range(200):
            mailbox.post(called.append, n)

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mailbox.drain()
    assert sorted(called) == sorted(list(range(200)) * 8)


def test_a_call_that_posts_another_is_served_in_the_same_round(mailbox):
    """Nothing waits for the next wake-up."""
    called = []
    mailbox.post(lambda: mailbox.post(called.append, 1))
    mailbox.drain()
    assert called == [1]


def test_a_closed_pipe_is_no_error_for_who_writes():
    """A worker that is ending has no mailbox any more."""
    box = Mailbox()
    for end in (box._reader, box._writer, box._ear, box._mouth):
        os.close(end)
    box.announce("token")
    box.post(print)


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
    mailbox, temporary, open_files_have_names
):
    """A spawned child knows the pipe by its name alone; the name goes with the worker."""
    path = mailbox.publish()
    announce_from_outside(path)
    mailbox.hear()
    assert mailbox.heard == ["token"]
    mailbox.announce("from here")
    mailbox.hear()
    assert mailbox.heard == ["token", "from here"]
    mailbox.close()
    assert list(temporary.iterdir()) == []


PUBLISH_AND_BE_KILLED = """
import os, signal, sys
from celery_singleton_lock import mailbox
mailbox.PROC = sys.argv[1]
box = mailbox.Mailbox()
print(box.publish(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def publish_and_be_killed(proc, folder):
    """Let a worker's main process publish its mailbox, and kill it; return the name."""
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
    mailbox, temporary, monkeypatch
):
    """Where there is no such name: and the pipe of one that lives is left alone."""
    left = publish_and_be_killed("/there-is-none", temporary)
    assert Path(left).exists()
    monkeypatch.setattr("celery_singleton_lock.worker.loop_channel.PROC", "/there-is-none")
    path, other = mailbox.publish(), Mailbox()
    another = other.publish()
    assert [Path(name).exists() for name in (left, path, another)] == [False, True, True]
    announce_from_outside(path)
    mailbox.hear()
    assert mailbox.heard == ["token"]
    mailbox.close()
    other.close()
    for end in (other._reader, other._writer, other._ear, other._mouth):
        os.close(end)


PUBLISH_AS_ANOTHER = """
import ctypes, os
from celery_singleton_lock import mailbox
if os.geteuid() == 0:
    os.setuid(65534)
else:
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: what a change of the user does as well
print(mailbox.Mailbox().publish())
"""


@pytest.mark.skipif(not LINUX, reason="only Linux has names for open files")
def test_the_pipe_of_a_process_that_changed_its_user_has_a_name_of_its_own():
    """Linux gives the open files to root then (``--uid``), and a child could not open them."""
    command = [sys.executable, "-c", PUBLISH_AS_ANOTHER]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.startswith(str(Path(tempfile.gettempdir(), "celery-singleton-lock-")))


def test_a_child_whose_workers_mailbox_is_gone_says_so_and_goes_on(monkeypatch, tmp_path, caplog):
    """Its announcements then go nowhere: the end of a task tells the same."""
    monkeypatch.setenv(PATH, str(tmp_path / "gone"))
    announcer()("token")
    assert "mailbox" in caplog.text


def test_a_thread_serves_where_there_is_no_loop(mailbox):
    """Calls are made and notices heard as they arrive, until the mailbox is closed."""
    called = threading.Event()
    thread = mailbox.thread
    thread.start()
    mailbox.announce("token")
    mailbox.post(called.set)
    assert called.wait(5)
    assert mailbox.heard == ["token"]
    mailbox.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_later_call_is_made_half_a_second_later_in_its_turn(mailbox):
    """Not by the loop's next look; and those that end the worker need not wait."""
    told = []
    for n in range(3):
        mailbox.later(partial(told.append, n))
    mailbox.hear()
    assert told == []
    eventually(lambda: not mailbox.hear(), 5, "they are made")
    assert told == [0, 1, 2]
    mailbox.later(partial(told.append, 3))
    mailbox.hurry()
    assert told == [0, 1, 2, 3]


def test_a_later_call_that_fails_keeps_none_of_the_others(mailbox):
    """It is logged."""
    told = []
    mailbox.later(lambda: 1 / 0)
    mailbox.later(partial(told.append, 1))
    mailbox.hurry()
    assert told == [1]


def test_who_serves_without_a_loop_makes_later_calls_too(mailbox):
    """Nothing else wakes it meanwhile."""
    told = threading.Event()
    thread = mailbox.thread
    thread.start()
    mailbox.post(mailbox.later, told.set)
    assert told.wait(5)
    mailbox.close()
    thread.join(5)
    assert not thread.is_alive()


# -- in Celery's event loop ------------------------------------------------------------------------


@pytest.fixture
def hub(mailbox):
    """A loop that makes the mailbox's calls."""
    hub = Hub()
    mailbox.attach(hub)
    yield hub
    hub.close()


def is_woken(hub, mailbox):
    """Whether the next notice wakes the loop; else the loop wakes by itself."""
    assert (mailbox._ear in hub.readers) != bool(hub.timer._queue)
    return mailbox._ear in hub.readers


def run_until(hub, predicate):
    def come():
        hub.run_once()
        return predicate()

    eventually(come, 5)


def test_an_idle_loop_sleeps_until_a_notice_wakes_it(hub, mailbox):
    assert is_woken(hub, mailbox)
    mailbox.announce("token")
    run_until(hub, lambda: mailbox.heard == ["token"])


def test_a_loop_that_was_woken_is_woken_by_no_other_notice_until_there_are_none(hub, mailbox):
    """It looks for them meanwhile: to be woken by each would cost it a turn."""
    for n in range(3):
        mailbox.announce(str(n))
        run_until(hub, lambda n=n: mailbox.heard[n:] == [str(n)])
        assert not is_woken(hub, mailbox)
    run_until(hub, lambda: is_woken(hub, mailbox))


def test_a_loop_that_sleeps_makes_later_calls(hub, mailbox):
    """And then sleeps again."""
    told = []
    mailbox.later(partial(told.append, 1))
    mailbox.later(partial(told.append, 2))
    run_until(hub, lambda: told == [1, 2])
    run_until(hub, lambda: is_woken(hub, mailbox))


def test_a_later_call_of_who_hears_a_notice_has_nobody_look_twice(hub, mailbox):
    mailbox.on_notice = lambda _: mailbox.later(lambda: None)
    mailbox.announce("token")
    run_until(hub, lambda: mailbox._later)
    assert len(hub.timer._queue) == 1
    mailbox.announce("other")
    run_until(hub, lambda: len(mailbox._later) == 2)
    assert len(hub.timer._queue) == 1


@pytest.mark.parametrize("cleared", [True, False], ids=["timers cleared", "timers kept"])
@pytest.mark.parametrize("stirred", [True, False], ids=["stirred", "idle"])
def test_a_loop_that_a_lost_connection_has_reset_hears_again(hub, mailbox, cleared, stirred):
    """Whatever was left of the former one."""
    if stirred:
        mailbox.announce("before")
        run_until(hub, lambda: mailbox.heard == ["before"])
    hub.reset()
    if cleared:
        hub.timer.clear()
    mailbox.attach(hub)
    for n in range(3):
        mailbox.announce(str(n))
        run_until(hub, lambda n=n: mailbox.heard[-1:] == [str(n)])
    run_until(hub, lambda: mailbox._ear in hub.readers and not hub.timer._queue)

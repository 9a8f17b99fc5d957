"""The pipe into the worker's main loop."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from celery_singleton_lock.mailbox import PATH, Mailbox, announcer, guarded


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


def test_a_notice_wakes_nobody(mailbox):
    """The loop looks for notices by itself; to be woken by each would cost it a turn."""
    mailbox.announce("token")
    assert select.select([mailbox], [], [], 0)[0] == []
    mailbox.hear()
    assert mailbox.heard == ["token"]


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


def test_a_process_that_inherited_nothing_announces_by_name(mailbox):
    """A spawned child knows the pipe by its name alone; the name goes with the worker."""
    path = mailbox.publish()
    script = "from celery_singleton_lock.mailbox import announcer; announcer()('token')"
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, PATH: path}, timeout=30, check=True
    )
    mailbox.hear()
    assert mailbox.heard == ["token"]
    mailbox.announce("from here")
    mailbox.hear()
    assert mailbox.heard == ["token", "from here"]
    mailbox.close()
    assert not Path(path).parent.exists()


def test_a_child_whose_workers_mailbox_is_gone_says_so_and_goes_on(monkeypatch, tmp_path, caplog):
    """Its announcements then go nowhere: the end of a task tells the same."""
    monkeypatch.setenv(PATH, str(tmp_path / "gone"))
    announcer()("token")
    assert "mailbox" in caplog.text


def test_a_thread_serves_where_there_is_no_loop(mailbox):
    """Calls are made and notices heard as they arrive, until the mailbox is closed."""
    called = threading.Event()
    thread = threading.Thread(target=mailbox.serve, daemon=True)
    thread.start()
    mailbox.announce("token")
    mailbox.post(called.set)
    assert called.wait(5)
    assert mailbox.heard == ["token"]
    mailbox.close()
    thread.join(5)
    assert not thread.is_alive()

"""The digest of a script, which each process computes when it first runs it."""

from __future__ import annotations

import hashlib
import threading

import pytest

from celery_singleton_lock.store import scripts
from celery_singleton_lock.store.scripts import Script


@pytest.mark.parametrize("attribute", ["sha", "head"])
def test_nobody_waits_for_a_thread_that_computes_it(monkeypatch, attribute):
    """A pool process that was forked meanwhile has no such thread, and waited for ever."""
    computes, go_on = threading.Event(), threading.Event()
    first, second = (Script("park", text, "lock", ()) for text in ("slow", "quick"))

    def sha1(text, **options):
        if text == b"slow":
            computes.set()
            go_on.wait(60)
        return hashlib.sha1(text, **options)

    class Slow:
        pass

    Slow.sha1 = staticmethod(sha1)
    monkeypatch.setattr(scripts, "hashlib", Slow)
    slow = threading.Thread(target=getattr, args=(first, attribute), daemon=True)
    quick = threading.Thread(target=getattr, args=(second, attribute), daemon=True)
    slow.start()
    assert computes.wait(60)
    quick.start()
    quick.join(10)
    waits = quick.is_alive()
    go_on.set()
    slow.join(60)
    quick.join(60)
    assert not waits

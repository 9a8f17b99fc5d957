"""What has ended in a worker."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.worker.dispatch.recently_ended import RecentEnds


def test_a_cold_shutdown_does_not_hang_if_its_signal_comes_while_an_end_is_noted():
    """Celery's signal handler ends further tasks, in the thread that it has interrupted."""
    ends, tokens = RecentEnds(SystemClock()), iter(["inner.0"])

    class Interrupted:
        @property
        def token(self):
            for token in tokens:
                ends.note(SimpleNamespace(token=token))
            return "outer.0"

    thread = threading.Thread(target=ends.note, args=(Interrupted(),), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(ends.headers()) == 2

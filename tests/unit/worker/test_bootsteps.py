"""The steps that a worker takes at its start and end."""

from __future__ import annotations

from types import SimpleNamespace

from celery_singleton_lock.worker.bootsteps import ConsumerStep


def test_a_cold_shutdown_gives_back_what_the_worker_has():
    """Celery sends no `worker_shutdown` then; after a warm one it sends it, too."""
    done = []
    controller = SimpleNamespace()
    consumer = SimpleNamespace(controller=controller)
    step = object.__new__(ConsumerStep)
    step.runtime = SimpleNamespace(
        consumer=consumer,
        extension=SimpleNamespace(worker=(1, dict)),
        shut=lambda: done.append("shut"),
        loop_channel=SimpleNamespace(
            handle_notices=lambda: done.append("heard"), close=lambda: done.append("closed")
        ),
    )
    step.shutdown(consumer)
    assert done == ["heard", "shut", "closed"]
    step._on_worker_shutdown(controller)
    assert done == ["heard", "shut", "closed"]

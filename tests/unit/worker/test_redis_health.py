"""Down and up are reported in the order in which threads found them."""

from __future__ import annotations

import threading

from celery_singleton_lock.events import BackendDown, BackendUp, Observers
from celery_singleton_lock.worker.redis_health import RedisHealth


class Clock:
    """Stands still."""

    def monotonic(self):
        return 1.0


def test_tasks_do_not_wait_for_ever_if_redis_is_back_before_its_loss_was_told():
    """A pool's thread finds that Redis is away; the agent's thread finds at once that it is back.

    Told the other way round, the dispatcher holds all locked tasks until the next outage.
    """
    calls, observers = [], Observers()
    health = RedisHealth(
        Clock(),
        address="redis://h",
        observers=observers,
        on_loss=lambda: calls.append("loss"),
        on_return=lambda: calls.append("return"),
    )

    class Slow:
        """An observer that takes so long that the agent's thread asks Redis meanwhile."""

        def notify(self, event):
            if isinstance(event, BackendDown):
                agent = threading.Thread(target=health.answered)
                agent.start()
                agent.join(60)
            elif isinstance(event, BackendUp):
                calls.append("up is reported")

    observers.add(Slow())
    health.not_answered()
    assert calls == ["loss", "return", "up is reported"]
    assert not health.down

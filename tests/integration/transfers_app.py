"""What ``celery -A integration.transfers_app`` loads: accounts in a plain store, and transfers.

The store reads and writes, and guards nothing: two transfers of one account that overlap lose
money, or make some.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time

import redis
from celery import Celery

from celery_singleton_lock import LockedTask

URL = os.environ.get("CELERY_BROKER_URL", "memory://")
SETTINGS = {
    "singleton_lock_lease": 9.0,
    "broker_connection_retry_on_startup": True,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    "task_ignore_result": True,
}
LOCKS = ["account:{source}", "account:{target}"]

app = Celery("transfers", broker=URL, backend=URL, set_as_current=False)
app.conf.update(SETTINGS | json.loads(os.environ.get("BOOK_CONF", "{}")))
store = redis.Redis.from_url(URL, decode_responses=True) if URL.startswith("redis") else None


@app.task(
    bind=True,
    base=LockedTask,
    name="transfer",
    lock_keys=LOCKS,
    acks_late=True,
    reject_on_worker_lost=True,
    shared=False,
)
def transfer(self, source, target, amount, *, dies=False):
    """Read both balances, take a while, write both; note that it is done, in the same step.

    So a process that is killed has transferred all or nothing.
    """
    balances = {name: int(store.get(f"balance:{name}")) for name in (source, target)}
    time.sleep(random.random() / 500)  # long enough to be overtaken
    if dies and store.set(f"died:{self.request.id}", 1, nx=True):
        os.kill(os.getpid(), signal.SIGKILL)
    if store.sismember("done", self.request.id):
        return  # it was killed after it had written
    balances[source] -= amount
    balances[target] += amount
    with store.pipeline() as step:
        step.mset({f"balance:{name}": balance for name, balance in balances.items()})
        step.sadd("done", self.request.id)
        step.execute()

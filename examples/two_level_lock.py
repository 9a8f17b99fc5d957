"""Three threads and one lock. Waiters block without polling, and get the lock in order."""

import os
import threading
import time

import redis

from celery_singleton_lock import Lock

client = redis.Redis.from_url(os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0"))


def work(name: str) -> None:
    with Lock(client, "printer", lease=30, blocking_timeout=60) as lock:
        print(f"{name} prints, fence {lock.fencing_token}")
        time.sleep(0.1)


threads = [threading.Thread(target=work, args=(name,)) for name in ("Ann", "Ben", "Cid")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

"""Three waiters in memory; the urgent one is next: python priority.py."""

import threading
import time

from celery_singleton_lock import Lock
from celery_singleton_lock.testing import memory_client

client = memory_client()


def print_page(page: str, priority: float) -> None:
    with Lock(client, "printer", priority=priority):
        print(page)


pages = {"report": 0, "backup": -3600, "ticket": 30}
threads = [threading.Thread(target=print_page, args=page) for page in pages.items()]
with Lock(client, "printer"):
    for thread in threads:
        thread.start()
        time.sleep(0.2)  # so that they arrive in this order
for thread in threads:
    thread.join()

"""A lease of half a second, and work of two seconds. The lease is renewed; a loss is noticed."""

import os
import threading

import redis

from celery_singleton_lock import Lock

client = redis.Redis.from_url(os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0"))
lost = threading.Event()

with Lock(client, "report", lease=0.5):
    print("lost after four leases:", lost.wait(2))

lock = Lock(client, "report", lease=0.5, on_lost=lambda *_: lost.set())
lock.acquire()
Lock(client, "report").reset()  # as an operator would
print("heard of the loss:", lost.wait(30))

"""A holder pauses for longer than its lease, then writes: ``python paused.py``. Needs no worker."""

from __future__ import annotations

import time

import redis
from tasks import StaleFence, app, balance, open_ledger, post

from celery_singleton_lock import Lock

open_ledger()
before = balance(1)
client = redis.Redis.from_url(app.conf.broker_url)

paused = Lock(client, "account:1", lease=1, renew=False)  # as if its machine were suspended
paused.acquire()
fence = paused.fencing_token
time.sleep(1.1)

with Lock(client, "account:1") as successor:
    post(1, 50, successor.fencing_token)
try:
    post(1, -1000, fence)
except StaleFence as error:
    print("refused:", error)
print("the balance changed by", balance(1) - before)

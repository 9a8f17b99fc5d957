"""SET NX with a token: acquired if free, released only by its owner. Both are atomic in Redis."""

import os

import redis

from celery_singleton_lock import Lock, LockNotOwned

client = redis.Redis.from_url(os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0"))
mine, late = (Lock(client, "stock:lamp", lease=30, renew=False) for _ in range(2))

print("mine:", mine.acquire(blocking=False))
print("late:", late.acquire(blocking=False))
mine.reset()  # as if the lease had expired
print("late:", late.acquire(blocking=False))
try:
    mine.release()
except LockNotOwned:
    print("not mine any more; late holds it:", late.owned())
late.release()

"""SET NX with a token: taken if free, released only by its owner. Both are one step at Redis."""

import os

import redis

from celery_singleton_lock import Lock, LockNotOwned

client = redis.Redis.from_url(os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0"))
mine, late = (Lock(client, "stock:lamp", lease=5, renew=False) for _ in range(2))

print("mine:", mine.acquire(blocking=False))
print("late:", late.acquire(blocking=False))
mine.reset()  # as if the lease had ended
print("late:", late.acquire(blocking=False))
try:
    mine.release()
except LockNotOwned:
    print("not mine any more; late holds it:", late.owned())
late.release()

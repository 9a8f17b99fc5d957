"""Ten calls from four threads, at most three in any second: python rate.py."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import redis

from celery_singleton_lock import locked

client = redis.Redis.from_url(os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0"))
began = time.monotonic()


@locked("crm", client, limit=4, rate="3/s")
def call(number: int) -> str:
    return f"{time.monotonic() - began:.1f} s: call {number}"


with ThreadPoolExecutor(4) as pool:
    print(*pool.map(call, range(10)), sep="\n")

"""The same with asyncio: tasks and threads of all processes wait in one queue."""

import asyncio
import os

import redis.asyncio

from celery_singleton_lock import AsyncLock


async def work(client: redis.asyncio.Redis, name: str) -> None:
    async with AsyncLock(client, "printer", lease=30, blocking_timeout=60) as lock:
        print(f"{name} prints, fence {lock.fencing_token}")
        await asyncio.sleep(0.1)


async def main() -> None:
    url = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")
    async with redis.asyncio.Redis.from_url(url) as client:
        await asyncio.gather(*(work(client, name) for name in ("Ann", "Ben", "Cid")))


asyncio.run(main())

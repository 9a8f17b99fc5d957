"""The store on one Redis or Valkey server."""

from celery_singleton_lock.store.redis.sync import RedisStore

__all__ = ["RedisStore"]

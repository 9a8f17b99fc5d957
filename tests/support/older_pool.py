"""A pool of redis-py as in older versions."""

from __future__ import annotations

import redis


class OlderBlockingPool(redis.BlockingConnectionPool):
    """As before redis-py 7: it cannot close idle connections only."""

    def disconnect(self):
        super().disconnect()

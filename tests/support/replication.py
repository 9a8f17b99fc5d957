"""Check whether a replica has the data of its master."""

from __future__ import annotations

import redis


def is_replicated(client: redis.Redis, key: str = "replication-check") -> bool:
    """Return whether one replica has all writes of all connections to this server.

    Since Redis 7.2, WAIT covers only the writes of its own connection, so this writes a key.

    Args:
        client: client of the master.
        key: a key to write; on a Cluster, one that this master serves.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.set(key, 1, px=1000)
        pipe.execute_command("WAIT", 1, 100)
        return bool(pipe.execute()[1] == 1)

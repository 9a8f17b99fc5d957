"""Whether a replica has what its master has."""

from __future__ import annotations

import redis


def is_replicated(client: redis.Redis, key: str = "mark-of-the-tests") -> bool:
    """Whether one replica has all that was written to this server, on whatever connection.

    Since Redis 7.2 WAIT asks for what its own connection has written: so that writes something.

    Args:
        client: of the master.
        key: what may be written; on a Cluster one that this master has.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.set(key, 1, px=1000)
        pipe.execute_command("WAIT", 1, 100)
        return bool(pipe.execute()[1] == 1)

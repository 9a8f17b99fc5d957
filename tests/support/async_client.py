"""Closes redis-py's clients for asyncio, of all versions."""

from __future__ import annotations

from typing import Any


async def close_client(client: Any) -> None:
    """Close the connections of a client of a server or a Cluster."""
    await getattr(client, "aclose", client.close)()  # redis-py 5.0.0 has only close()

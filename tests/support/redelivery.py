"""A Redis broker that soon delivers again what was not acknowledged."""

from __future__ import annotations

from typing import Any


def redelivery_after(seconds: float) -> dict[str, Any]:
    """Return ``broker_transport_options`` with a visibility time-out.

    Kombu usually looks every ten seconds, and each tenth look counts. A worker that is killed while
    it restores messages keeps the others from that for five minutes.

    Args:
        seconds: the time-out.
    """
    return {
        "visibility_timeout": seconds,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 5,
    }

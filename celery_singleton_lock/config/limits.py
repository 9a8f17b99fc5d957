"""Limits of options, and the common prefix of settings."""

from __future__ import annotations

from typing import Final

MIN_LEASE: Final = 1.0
"""Shortest lease in seconds: after a third of it, a renewal and a second attempt must fit in."""

LONG_LEASE: Final = 300.0
"""Seconds; a longer lease causes a warning."""

MAX_LEASE: Final = 7 * 86_400.0
"""Seconds. After a crash the lock stays held for this time."""

LONGEST_LEASE: Final = 30.0
"""Seconds; default of the longest lease in a quorum. A restarted server waits for this time."""

MAX_WAIT: Final = 366 * 86_400.0
"""Longest wait in seconds that an option may set; None means no limit."""

LONGEST_DELAY: Final = 900.0
"""Seconds. A requeued message stays unacknowledged for this time, which brokers limit."""

MIN_REPLICAS_WAIT: Final = 0.01
"""Shortest wait for replicas, in seconds."""

MAX_REPLICAS_WAIT: Final = 1.5
"""Longest wait for replicas, in seconds. The agent's connection times out after 2."""

MAX_COUNT: Final = 2**31 - 1
"""Largest number of permits, waiters or bytes in an option."""

MAX_BYTES: Final = 2**53
"""Largest number of bytes of all messages of a queue; scripts count exactly up to here."""

NO_LIMIT: Final = MAX_COUNT
"""Number of permits of a lock whose limit is None: it bounds starts by its rate only."""

PREFIX: Final = "singleton_lock_"
"""Common prefix of the settings."""

MOST_PORT: Final = 65535
"""Highest TCP port."""

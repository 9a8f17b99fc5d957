"""How much of a thing there may be, and how settings are called."""

from __future__ import annotations

from typing import Final

MIN_LEASE: Final = 1.0
"""Seconds. A third of it must be enough to notice, ask, and ask again."""

LONG_LEASE: Final = 300.0
"""Seconds above which a lease earns a warning."""

MAX_LEASE: Final = 7 * 86_400.0
"""Seconds. A crash would hold the lock for as long."""

LONGEST_LEASE: Final = 30.0
"""Seconds; longest lease on several servers, unless another is given: a restarted one waits so."""

MAX_WAIT: Final = 366 * 86_400.0
"""Seconds. Longer is for ever, and that is written None."""

LONGEST_DELAY: Final = 900.0
"""Seconds. A requeued message is unacknowledged for as long, and brokers bound that."""

MIN_REPLICAS_WAIT: Final = 0.01
"""Seconds."""

MAX_REPLICAS_WAIT: Final = 1.5
"""Seconds. The agent's connection gives up after 2."""

MAX_COUNT: Final = 2**31 - 1
"""Most permits, waiters and bytes that can be asked for."""

PREFIX: Final = "singleton_lock_"
"""How the names of settings begin."""

MOST_PORT: Final = 65535
"""Highest TCP port."""

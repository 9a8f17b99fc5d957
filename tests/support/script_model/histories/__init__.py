"""Short directed histories: defects of other systems or of this one, in a few moves each.

All invariants are checked after every step of each history. The real scripts must break none, and
each mutant must break at least one.
"""

from __future__ import annotations

from support.script_model.histories import (
    copies,
    full_redis,
    limits,
    messages,
    publishing,
    retries,
    turns,
    withdrawals,
)
from support.script_model.histories.registry import HISTORIES

__all__ = [
    "HISTORIES",
    "copies",
    "full_redis",
    "limits",
    "messages",
    "publishing",
    "retries",
    "turns",
    "withdrawals",
]

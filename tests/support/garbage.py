"""Collect the garbage of earlier tests."""

from __future__ import annotations

import gc
from typing import Any


def no_earlier_garbage(caplog: Any) -> None:
    """Collect what earlier tests left behind, and drop what asyncio logs about it."""
    gc.collect()
    caplog.clear()

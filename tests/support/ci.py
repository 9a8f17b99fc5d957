"""What may be missing on a laptop, and may not in CI."""

from __future__ import annotations

import os

import pytest


def in_ci() -> bool:
    """Whether a missing server is an error, and not a matter of this machine."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def skip_or_fail(reason: str) -> None:
    """Skip on a laptop, fail in CI."""
    if in_ci():
        pytest.fail(f"CI=true, so this may not be skipped: {reason}", pytrace=False)
    pytest.skip(reason)

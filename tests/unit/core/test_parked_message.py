"""Values with a stored message."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.parked_message import Delivery, MessageToPark, UntakenMessage


@pytest.mark.parametrize(
    "value",
    [
        MessageToPark(b"secret", "realm", "q"),
        Delivery("k", "t.0", 1, b"secret"),
        UntakenMessage("k", "t.0", "q", b"secret", "seal", "id/0/0", 1),
    ],
)
def test_a_log_line_shows_no_message(value):
    """It has the arguments of the call, and Celery's ``argsrepr`` may hide some of them."""
    assert "secret" not in repr(value)

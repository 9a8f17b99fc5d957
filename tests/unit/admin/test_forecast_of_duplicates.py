"""What ``locks try`` says of a call that is like one that counts as sent."""

from __future__ import annotations

import pytest

from celery_singleton_lock.admin.try_call import Forecast, not_sent
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.unique import EntryState, SentCall


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (EntryState.PENDING, "is being sent. If its sender has died, this call runs itself"),
        (EntryState.PARKED_OR_HELD, "is parked, or holds the lock"),
        (EntryState.SENT, "was sent before, and counts for another 9.0 s"),
    ],
)
def test_a_call_that_follows_is_sent(state, says):
    options = LockOptions(unique="until_done", on_duplicate="follow")
    found = not_sent(Forecast("run", "It would start."), SentCall(state, "first", 9.0), options)
    assert (found.outcome, found.duplicate_of) == ("follow", "first")
    told = f"It would be sent to have the result of task first, which {says} (lock_unique)."
    assert found.sentence == told

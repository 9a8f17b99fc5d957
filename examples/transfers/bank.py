"""Open 50 accounts, send 300 transfers at once, and count the money."""

from __future__ import annotations

import random

from celery import group
from tasks import bank, transfer

ACCOUNTS = range(50)

bank.mset({f"balance:{number}": 100 for number in ACCOUNTS})
chance = random.Random(1)  # noqa: S311  # the same transfers each time
sent = group(transfer.s(*chance.choices(ACCOUNTS, k=2), chance.randrange(50)) for _ in range(300))
sent.delay().join(timeout=120)
print(f"{sum(int(bank.get(f'balance:{number}')) for number in ACCOUNTS):,} of 5,000")

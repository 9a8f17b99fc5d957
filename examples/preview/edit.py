"""Edit a document three times. Each version comes while the one before it is drawn."""

from __future__ import annotations

import time

from celery.exceptions import TaskRevokedError
from tasks import log, preview

log.delete("log:letter")
results = []
for version in (1, 2, 3):
    results.append(preview.delay("letter", version))
    while f"version {version} begins" not in log.lrange("log:letter", 0, -1):
        time.sleep(0.05)
for result in results:
    try:
        print("drawn:", result.get())
    except TaskRevokedError:
        print("revoked:", result.id[:8])
print(*log.lrange("log:letter", 0, -1), sep="\n")

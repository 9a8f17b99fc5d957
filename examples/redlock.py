"""A lock on three Redis servers, of which one may fail: python redlock.py URL1 URL2 URL3."""

import sys

from celery_singleton_lock import Lock, LockTimeout

lock = Lock(sys.argv[1:], "report:2026", lease=10, blocking_timeout=60)
try:
    with lock:
        print("writing with fence", lock.fencing_token)
        lock.ensure_held()
except LockTimeout as busy:
    print("not now:", busy)

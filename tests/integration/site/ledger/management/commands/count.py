"""``manage count FILE TIMES``: count up the number in a file, under a lock of the cache."""

import os
import time
from pathlib import Path

from django.core.management.base import BaseCommand

from celery_singleton_lock.django import CacheLock


class Command(BaseCommand):
    """Read, wait, write; with ``--stay``, hold the lock until killed."""

    def add_arguments(self, parser):
        parser.add_argument("file", type=Path)
        parser.add_argument("times", type=int)
        parser.add_argument("--stay", action="store_true")

    def handle(self, *_, file, times, stay, **__):
        lock = CacheLock("count", lease=1 if stay else 30, wait_timeout=30)
        for _ in range(times):
            with lock:
                number = int(file.read_text())
                time.sleep(0.002)
                file.write_text(str(number + 1))
                if stay:
                    os.kill(os.getpid(), 9)

"""Locks in Flower: one line in ``flowerconfig.py`` adds them.

::

    import celery_singleton_lock.flower

This adds a **Locks** page and ``/api/locks``. The pages of tasks and workers show their locks. See
docs/flower.md.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("flower") is None:
    msg = (
        "celery_singleton_lock.flower needs Flower, which is not installed: "
        'pip install "celery-singleton-lock[flower]"'
    )
    raise ImportError(msg)

from celery_singleton_lock.flower.mount import mount as _mount

_mount()

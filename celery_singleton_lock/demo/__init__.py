"""The demo: a flash sale with a Redis and a Celery worker of its own.

Read the modules in this order. :mod:`~celery_singleton_lock.demo.shop`: the Celery app of the
worker. ``workload``: the orders. ``run``: one run, with its ``worker`` and ``killer``. ``history``:
which task worked on which product, and when. ``figures``: the result. ``screen`` and ``timeline``:
its display. ``cli``: the command.
"""

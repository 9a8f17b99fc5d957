"""The flash sale: the quick start with a Redis, a worker and a crowd of buyers of its own.

Read it in this order: :mod:`~celery_singleton_lock.demo.shop` is the Celery app that the worker
runs; ``crowd`` is who buys what; ``stage`` plays one run; ``history`` notes who held what and when;
``verdict`` judges; ``screen`` and ``picture`` show it; ``cli`` is the command.
"""

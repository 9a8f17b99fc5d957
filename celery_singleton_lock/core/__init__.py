"""Values and pure functions: no I/O, no Celery."""

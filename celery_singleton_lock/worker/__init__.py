"""The code that runs in a Celery worker, and that adds an app's locks to its workers."""

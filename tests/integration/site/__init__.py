"""A small Django project with a locked task: settings, Celery app, one Django app, commands."""

"""``python -m integration.site`` is its manage.py."""

import os
import sys

from django.core.management import execute_from_command_line

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "integration.site.settings")
import integration.site.celery  # noqa: F401  # the app that shared tasks belong to

execute_from_command_line(sys.argv)

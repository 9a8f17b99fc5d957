"""How a refusal to start is shown: to a person as one sentence, to a program as an exception."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from celery.exceptions import ImproperlyConfigured
from celery.platforms import EX_FAILURE

from celery_singleton_lock.errors import ConfigurationError, SingletonLockError

logger = logging.getLogger(__name__)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Within a command (``celery -A app worker``) show a wrong option or setting as one line.

    Celery shows it below a traceback of 70 lines, since it knows no better. The exception stays an
    instance of its class; outside of commands it is the same exception.

    Raises:
        ConfigurationError: an option or a setting is wrong.
        ImproperlyConfigured: likewise, together with Celery's own options.
    """
    try:
        yield
    except (ConfigurationError, ImproperlyConfigured) as error:
        if not _in_a_command():
            raise
        kind: Any = type(error)
        raise _shown(kind)(str(error)) from error


@contextmanager
def logged_in_one_line() -> Iterator[None]:
    """Log why a worker that has been set up does not start, and end it.

    Celery logs any other exception with its traceback, and ends the worker with the same status.

    Raises:
        SystemExit: the worker must not start.
    """
    try:
        yield
    except (SingletonLockError, ImproperlyConfigured) as error:
        logger.critical("celery-singleton-lock: this worker does not start. %s", error)
        raise SystemExit(EX_FAILURE) from error


def _in_a_command() -> bool:
    click: Any = sys.modules.get("click")  # not imported by a program that only sends tasks
    return click is not None and click.get_current_context(silent=True) is not None


@cache
def _shown(kind: type[Any]) -> type[Any]:
    """Return a class of exceptions of which ``click`` shows the sentence alone."""
    from click import ClickException  # noqa: PLC0415  # it is there: a command runs

    if issubclass(kind, ClickException):
        return kind
    return type(kind.__name__, (kind, ClickException), {"show": _show})


def _show(self: Exception, file: Any = None) -> None:
    from click import echo  # noqa: PLC0415  # likewise

    echo(f"Error: {self}", file=file, err=file is None)

"""Shows why a worker does not start: as one sentence in a command, as an exception in a program."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from celery.exceptions import ImproperlyConfigured
from celery.platforms import EX_FAILURE

from celery_singleton_lock.errors import ConfigurationError, SingletonLockError

logger: Final = logging.getLogger(__name__)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Show an invalid option or setting as one line in a command (``celery -A app worker``).

    Otherwise Celery shows it below a traceback of 70 lines. In a command, the exception is raised
    as an instance of a subclass of its class. Elsewhere it is not changed.

    Raises:
        ConfigurationError: an option or a setting is invalid.
        ImproperlyConfigured: an option or a setting is invalid together with Celery's options.
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
    """Log in one line why a worker does not start, and end it.

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
    """Return a subclass of an exception class for which click prints only the message."""
    from click import ClickException  # noqa: PLC0415  # installed, since a command runs

    if issubclass(kind, ClickException):
        return kind
    return type(kind.__name__, (kind, ClickException), {"show": _show})


def _show(self: Exception, file: Any = None) -> None:
    from click import echo  # noqa: PLC0415  # likewise

    echo(f"Error: {self}", file=file, err=file is None)

"""Refuses unknown options and settings. A misspelt one would otherwise have no effect."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.option_checks import OPTIONS
from celery_singleton_lock.config.settings import TASK_OPTIONS
from celery_singleton_lock.errors import ConfigurationError

_SYNONYMS: Final = {
    "expiry": "lease",
    "expire": "lease",
    "expires": "lease",
    "ttl": "lease",
    "timeout": "lease",
    "name": "key",
    "concurrency": "limit",
    "max_concurrency": "limit",
    "permits": "limit",
    "url": "backend",
    "backend_url": "backend",
}
"""Name in another library -> option here. celery-singleton has ``…expiry`` and ``…backend_url``."""


def check_unknown(task_name: str, attributes: Iterable[str]) -> None:
    """Refuse ``lock_…`` attributes of a task that are not options.

    Args:
        task_name: name of the task.
        attributes: names of its attributes; those that do not begin with ``lock_`` are ignored.

    Raises:
        ConfigurationError: there is one; the message suggests a similar name.
    """
    for name in attributes:
        if name.startswith("lock_") and name not in TASK_OPTIONS:
            hint = _nearest(name, "lock_", TASK_OPTIONS)
            if name.removeprefix("lock_") in OPTIONS:
                hint = f"It is a setting, for all tasks: singleton_{name}."
            msg = f"task {task_name}: there is no option {name!r}. {hint}"
            raise ConfigurationError(msg)


def check_unknown_settings(names: Iterable[str]) -> None:
    """Refuse ``singleton_lock_…`` settings that do not exist.

    ``singleton_lock_expiry`` is celery-singleton's, and is ignored.

    Args:
        names: names of all settings, also with Django's namespace (``CELERY_SINGLETON_LOCK_…``).

    Raises:
        ConfigurationError: there is one; the message suggests a similar name.
    """
    known = [PREFIX + option for option in OPTIONS if option != "limit"]
    for name in names:
        plain = name.lower().removeprefix("celery_")
        if plain.startswith(PREFIX) and plain not in {*known, f"{PREFIX}expiry"}:
            hint = _nearest(plain, PREFIX, known)
            if name.isupper():  # as in Django's settings
                hint = spelled_as(name, hint)
            msg = f"There is no setting {name!r}. {hint}"
            raise ConfigurationError(msg)


def spelled_as(name: str, text: str) -> str:
    """Return a text with the settings spelled as ``name`` is: with its namespace, in capitals.

    Args:
        name: a setting in Django's spelling (``CELERY_SINGLETON_LOCK_LEASE``).
        text: contains settings in Celery's spelling.
    """
    namespace = name.partition(PREFIX.upper())[0]
    return re.sub(rf"\b{PREFIX}\w+", lambda setting: namespace + setting[0].upper(), text)


def _nearest(name: str, prefix: str, known: Iterable[str]) -> str:
    options = [option.removeprefix(prefix) for option in known]
    option = name.removeprefix(prefix)
    meant = _SYNONYMS.get(option)
    close = [meant] if meant in options else difflib.get_close_matches(option, options, n=1)
    if close:
        return f"Did you mean {prefix}{close[0]}?"
    return f"There are: {', '.join(prefix + option for option in options)}."

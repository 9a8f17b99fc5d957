"""Refuses unknown options and settings. A misspelt one would otherwise have no effect."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Final

from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.option_checks import OPTIONS, ConfigurationWarning
from celery_singleton_lock.config.settings import TASK_ONLY, TASK_OPTIONS
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
    "rate_limit": "rate",
    "throttle": "rate",
    "policy": "on_conflict",
    "group": "fair_by",
    "follow": "on_duplicate",
    "url": "backend",
    "backend_url": "backend",
}
"""Name in another library -> option here. celery-singleton has ``…expiry`` and ``…backend_url``."""

_SETTINGS: Final = tuple(option for option in OPTIONS if option not in TASK_ONLY)
"""Names of all settings, without their prefix."""

_SAME_PREFIX: Final = 0.9
"""Least similarity of a misspelt prefix to this package's; celery-singleton's is below it."""

_SAME_OPTION: Final = 0.8
"""Least similarity to an option of the text that follows such a prefix."""


_PLAIN: Final = {option.replace("_", ""): option for option in TASK_OPTIONS}
"""Options without underscores, to recognise ``lockkey``, ``LOCK_KEY``, ``singleton_lock_key``."""


def _plain(name: str) -> str:
    return name.lower().removeprefix("singleton_").replace("_", "")


def check_unknown(task_name: str, attributes: Iterable[str]) -> None:
    """Refuse attributes of a task that are misspelt options.

    Args:
        task_name: name of the task.
        attributes: names of its attributes; those that are not similar are ignored.

    Raises:
        ConfigurationError: there is one; the message suggests a similar name.
    """
    given = frozenset(attributes)
    for name in sorted(given):
        meant = _PLAIN.get(_plain(name), name)
        if meant not in given and not name.startswith("_"):  # else it may be a constant
            msg = f"task {task_name}: there is no option {name!r}. Write {meant!r}."
            raise ConfigurationError(msg)
        if name.startswith("lock_") and name not in TASK_OPTIONS:
            hint = _nearest(name, "lock_", TASK_OPTIONS)
            if name.removeprefix("lock_") in OPTIONS:
                hint = f"It is a setting, for all tasks: singleton_{name}."
            msg = f"task {task_name}: there is no option {name!r}. {hint}"
            raise ConfigurationError(msg)


_OF_OTHERS: Final = {
    "unique_on": (object, "celery-singleton", "lock_key"),
    "raise_on_duplicate": (bool, "celery-singleton", "lock_on_duplicate"),
    "once": (dict, "celery-once", "lock_key and lock_unique"),
    "heimdall": (dict, "celery-heimdall", "lock_key and lock_unique"),
}
"""Option of another package -> its type, the package, and the options that take its place."""


def warn_of_others(task: Any) -> None:
    """Warn of options of packages from which a task does not derive: they have no effect."""
    bases = {str(cls.__module__).partition(".")[0] for cls in type(task).__mro__}
    for option, (kind, package, ours) in _OF_OTHERS.items():
        value = getattr(task, option, None)
        is_theirs = value is not None and isinstance(value, kind) and not callable(value)
        if not is_theirs or package.replace("-", "_") in bases:
            continue
        msg = (
            f"task {task.name}: {option} is {value!r}, an option of {package}, and has no effect "
            f"on a LockedTask. Use {ours} (docs/migrate/{package}.md)."
        )
        warnings.warn(msg, ConfigurationWarning, stacklevel=4)


def check_unknown_settings(names: Iterable[str], namespace: str | None = None) -> None:
    """Refuse settings that do not exist, or that Celery does not read in this app.

    Args:
        names: names of all settings of the app, as they are written.
        namespace: the app's (``CELERY`` for ``CELERY_SINGLETON_LOCK_…``); None if it has none.

    Raises:
        ConfigurationError: there is one; the message suggests what to write.
    """
    for _, text in wrong_settings(names, namespace):
        raise ConfigurationError(text)


def wrong_settings(names: Iterable[str], namespace: str | None) -> Iterator[tuple[str, str]]:
    """Return the settings that have no effect, each with the text of its error.

    Names that belong to others are ignored: ``singleton_lock_expiry`` is celery-singleton's, and
    a name with another namespace may be a setting of another app. If an option is set, a wrong
    spelling of it is ignored, too: the setting may be computed from a constant with that name.

    Args:
        names: names of all settings of the app, as they are written.
        namespace: the app's; None if it has none.
    """
    given = {str(name) for name in names}
    read = {option: _spellings(PREFIX + option, namespace) for option in _SETTINGS}
    effective = {option for option in _SETTINGS if not read[option].isdisjoint(given)}
    meant = {
        spelling: option
        for option in _SETTINGS
        if f"lock_{option}" in TASK_OPTIONS
        for spelling in _spellings(f"lock_{option}", namespace)
    }
    for name in sorted(given.difference(*read.values())):
        plain = name.lower().removeprefix(_prefix(namespace or "celery").lower())
        option = meant.get(name) or _misspelt(plain)
        if plain.startswith(PREFIX) and plain.removeprefix(PREFIX) not in _SETTINGS:
            if plain != f"{PREFIX}expiry":
                hint = _nearest(plain, PREFIX, [PREFIX + option for option in _SETTINGS])
                yield name, f"There is no setting {name!r}. {_spelled_like(name, hint, namespace)}"
        elif option is not None and option not in effective:
            yield name, f"The setting {name!r} has no effect{_instead(name, option, namespace)}"


def spelled_in(namespace: str, text: str) -> str:
    """Return a text with the settings spelled as in a namespace.

    Args:
        namespace: such as ``CELERY``, for ``CELERY_SINGLETON_LOCK_LEASE``.
        text: contains settings without a namespace.
    """
    return re.sub(rf"\b{PREFIX}\w+", lambda setting: _spelling(setting[0], namespace), text)


def _prefix(namespace: str) -> str:
    return namespace.rstrip("_") + "_"


def _spelling(setting: str, namespace: str) -> str:
    """Return a setting as Celery reads it in a namespace: in capitals if the namespace is."""
    prefix = _prefix(namespace)
    full = setting if setting.startswith(prefix) else prefix + setting
    return full.upper() if prefix.isupper() else full.lower()


def _spellings(setting: str, namespace: str | None) -> set[str]:
    """Return all names under which Celery reads a setting of an app."""
    return {setting, _spelling(setting, namespace)} if namespace else {setting}


def _spelled_like(name: str, text: str, namespace: str | None) -> str:
    """Spell the settings in a text in the way in which ``name``, a setting, should be spelt."""
    if namespace and (name.isupper() or name.lower().startswith(_prefix(namespace).lower())):
        return spelled_in(namespace, text)
    return text


def _misspelt(name: str) -> str | None:
    """Return the option whose setting has a similar name; None if there is none."""
    for mark in re.finditer("_", name):
        prefix, option = name[: mark.end()], name[mark.end() :]
        of_another = prefix[0] != PREFIX[0]  # such as my_singleton_lock_
        if not of_another and difflib.SequenceMatcher(None, prefix, PREFIX).ratio() > _SAME_PREFIX:
            close = difflib.get_close_matches(option, _SETTINGS, n=1, cutoff=_SAME_OPTION)
            if close:
                return close[0]
    return None


def _instead(name: str, option: str, namespace: str | None) -> str:
    if not namespace and name == _spelling(PREFIX + option, "CELERY"):
        return (
            f": this app has no namespace for its settings. Write {PREFIX}{option}, or give "
            'namespace="CELERY" to config_from_object.'
        )
    return f". {_spelled_like(name, f'Did you mean {PREFIX}{option}?', namespace)}"


def _nearest(name: str, prefix: str, known: Iterable[str]) -> str:
    options = [option.removeprefix(prefix) for option in known]
    option = name.removeprefix(prefix)
    meant = _SYNONYMS.get(option)
    close = [meant] if meant in options else difflib.get_close_matches(option, options, n=1)
    if close:
        return f"Did you mean {prefix}{close[0]}?"
    return f"There are: {', '.join(prefix + option for option in options)}."

"""System checks: ``manage.py check`` checks ``CELERY_SINGLETON_LOCK_…`` as a worker does.

============================  =====================================================================
``celery_singleton_lock.…``
============================  =====================================================================
``E001``                      unknown setting, also with a misspelt prefix or without ``CELERY_``
``E002``                      invalid value
``E003``                      no Redis for the locks: unknown alias, or invalid URL
``E004``                      invalid option of a task; only with ``--deploy``
``W001``                      valid value with an effect that is probably not intended
``W002``                      locks and parked tasks share a database with the values of a cache
``W003``                      tasks cannot be imported, so their options are not checked
============================  =====================================================================
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Final

from celery import current_app
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register  # noqa: A004  # Django's

from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.config.django_cache_alias import is_alias
from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.option_checks import OPTIONS, ConfigurationWarning, Place
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.config.unknown_names import spelled_in, wrong_settings
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.worker.execution.follow import check_results
from celery_singleton_lock.worker.install import install

TAG: Final = "celery_singleton_lock"
NAMESPACE: Final = "CELERY"
NAMES: Final = f"{NAMESPACE}_{PREFIX.upper()}"
"""Prefix of this library's settings in Django's settings."""


@register(TAG)
def check_settings(**_: Any) -> list[CheckMessage]:
    """Return errors and warnings about the settings of the locks."""
    given = {name: getattr(settings, name) for name in dir(settings) if _is_ours(name)}
    wrong = [*_unknown(), *_values(given)]
    return wrong or list(_backend(given))


@register(TAG, deploy=True)
def check_tasks(**_: Any) -> list[CheckMessage]:
    """Return errors in the options of the locked tasks, which are imported as a worker does."""
    if check_settings():
        return []
    app = current_app._get_current_object()  # noqa: SLF001  # Celery's proxy has no other way
    try:
        app.loader.import_default_modules()
        app.finalize(auto=True)
    except ConfigurationError as error:
        return [_error("E004", error)]
    except Exception as error:  # noqa: BLE001  # a module of the user may raise anything
        text = f"The tasks of {app.main or 'the app'} cannot be imported: {error}"
        return [Warning(text, hint="Their options are not checked.", id=f"{TAG}.W003")]
    return list(_options(app))


def _options(app: Any) -> Iterator[CheckMessage]:
    extension = install(app)
    for name in sorted(extension.declared()):
        try:
            check_results(app.tasks[name], extension.options(app.tasks[name]))
        except ConfigurationError as error:
            yield _error("E004", error)


def _is_ours(name: str) -> bool:
    return name.startswith(NAMES)


def _unknown() -> Iterator[CheckMessage]:
    """Check all names for misspelt settings, and for those without the namespace."""
    for _, text in wrong_settings(dir(settings), NAMESPACE):
        yield _error("E001", ConfigurationError(text))


def _values(given: dict[str, Any]) -> Iterator[CheckMessage]:
    for name, value in given.items():
        check = OPTIONS.get(_plain(name).removeprefix(PREFIX))
        if check is None:
            continue
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ConfigurationWarning)
            try:
                check(Place(name), value)
            except ConfigurationError as error:
                yield _error("E002", error)
        yield from (Warning(str(each.message), id=f"{TAG}.W001") for each in told)


def _backend(given: dict[str, Any]) -> Iterator[CheckMessage]:
    """Check the address of the locks' Redis, if there is one."""
    url = given.get(f"{NAMES}BACKEND")
    if url is None:
        return
    known = {_plain(name): value for name, value in given.items()}
    try:
        parsed = parse_settings(known.get)
        parsed.addresses()
    except ConfigurationError as error:
        yield _error("E003", error)
        return
    if isinstance(url, str) and is_alias(url):
        yield from _shared(url.partition("://")[2].strip("/"), parsed)


def _shared(alias: str, ours: Settings) -> Iterator[CheckMessage]:
    """Warn if a cache uses the same database: its ``clear()`` would delete the locks."""
    here = str(ours.address())
    others = [each for each in settings.CACHES if each != alias and _address(each) == here]
    sharing = ["default"] if alias == "default" else others
    if sharing:
        yield Warning(
            f"Locks and parked tasks are in the database of the cache {sharing[0]!r}: its clear() "
            "would delete them, and parked tasks would be lost.",
            hint='Add an alias for locks to CACHES, with another database (".../2"), and set '
            f'{NAMES}BACKEND = "django-cache://locks".',
            id=f"{TAG}.W002",
        )


def _address(alias: str) -> str:
    """Return the Redis address of a cache; empty if it has none, or an invalid one."""
    try:
        return str(parse_settings({f"{PREFIX}backend": f"django-cache://{alias}"}.get).address())
    except ConfigurationError:
        return ""


def _plain(name: str) -> str:
    return name.removeprefix(f"{NAMESPACE}_").lower()


def _error(number: str, error: ConfigurationError) -> CheckMessage:
    return Error(spelled_in(NAMESPACE, error.message), id=f"{TAG}.{number}")

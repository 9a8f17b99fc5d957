"""Credentials that change while a process runs: redis-py's credential providers.

A URL cannot contain a token or password that is replaced every hour. redis-py asks a provider for
user and password whenever it opens a connection.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from redis.credentials import CredentialProvider

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import a_kind

PROVIDER: Final = "credential_provider"
"""Name of the backend option, and of the option in the query of a URL."""


def provider_of(value: object, source: str) -> CredentialProvider:
    """Return a credential provider.

    Args:
        value: a provider; a class or function without arguments that returns one; or the import
            path of one of these, ``"package.module:name"``.
        source: the setting that has the value, for errors.

    Raises:
        ConfigurationError: it cannot be imported or called, or is not a provider.
    """
    found: Any = _imported(value, source) if isinstance(value, str) else value
    if not isinstance(found, CredentialProvider) and callable(found):
        try:
            found = found()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise _wrong(value, source, f"calling it without arguments failed ({told})") from error
    if not isinstance(found, CredentialProvider):
        raise _wrong(value, source, f"that is {a_kind(found)}, not a redis.CredentialProvider")
    return found


def _imported(path: str, source: str) -> Any:
    module, colon, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not colon or not name:
        raise _wrong(path, source, 'write "package.module:name"')
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _wrong(path, source, f"it cannot be imported ({error})") from error


def _wrong(value: object, source: str, told: str) -> ConfigurationError:
    shown = repr(value) if isinstance(value, str) else a_kind(value)
    return ConfigurationError(
        f"{source}: the {PROVIDER} is {shown}: {told}. Use an instance of a subclass of "
        'redis.CredentialProvider, or its import path "package.module:name".'
    )

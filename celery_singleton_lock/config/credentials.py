"""Credentials that change while a process lives: redis-py's credential providers.

A token of a cloud's identity service, or a password out of a vault, that is renewed every hour, can
stand in no URL. redis-py asks a provider for user and password whenever it opens a connection.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from redis.credentials import CredentialProvider

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.message_text import a_kind

PROVIDER: Final = "credential_provider"
"""Name of the backend option, and of the option behind the ``?`` of a URL."""


def provider_of(value: object, source: str) -> CredentialProvider:
    """Return a credential provider.

    Args:
        value: one; or where one is, or a class or function without arguments that makes one:
            ``"package.module:name"``.
        source: the setting from which it came, for errors.

    Raises:
        ConfigurationError: it cannot be imported, cannot be made, or is none.
    """
    found: Any = _imported(value, source) if isinstance(value, str) else value
    if not isinstance(found, CredentialProvider) and callable(found):
        try:
            found = found()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise _wrong(value, source, f"it cannot be made without arguments ({told})") from error
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
        f"{source}: the {PROVIDER} is {shown}: {told}. Give an object of a class derived from "
        'redis.CredentialProvider, or where one is: "package.module:name".'
    )

"""The target of a command: the store, the operator, and the app if there is one."""

from __future__ import annotations

import getpass
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, TypeVar

import click

from celery_singleton_lock.cli.app_context import AppSide
from celery_singleton_lock.config.app_settings import parse_settings
from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.config.settings import Settings
from celery_singleton_lock.errors import (
    BackendError,
    ConfigurationError,
    SingletonLockError,
)
from celery_singleton_lock.message_text import is_encodable, printable
from celery_singleton_lock.store.connect import is_elsewhere
from celery_singleton_lock.store.factory import open_admin_store
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.worker.install import install
from celery_singleton_lock.worker.operator_actions import BrokerError

PATIENCE: Final = 5.0
"""Seconds to wait for a reply of Redis."""

REFUSED: Final = 1
"""Exit status: not done, or not found."""

UNREACHABLE: Final = 3
"""Exit status: the locks' Redis or the broker did not answer, or refused a command."""

UNSURE: Final = 4
"""Exit status of ``doctor``: no check failed, but one is unknown or warns."""

_AS_OPTIONS: Final = {
    rf'Set {PREFIX}backend_options = \{{"(\w+)": "(\w+)"\}}': r"Give --option \1=\2",
    rf'{PREFIX}backend_options\["(\w+)"\]': r"--option \1",
    rf"{PREFIX}backend_options": "--option",
    rf"{PREFIX}(backend|prefix)": r"--\1",
}
"""Names of settings -> names of command line options, applied in this order."""


class NotDone(click.ClickException):
    """The command was not done. Exit status 1."""

    exit_code = REFUSED


class NoAnswer(click.ClickException):
    """Redis or the broker did not answer, or refused a command. Exit status 3."""

    exit_code = UNREACHABLE


@dataclass
class Target:
    """The target of a command.

    Args:
        settings: the settings, with the address of the locks' Redis.
        source: name of the setting or option that gave the address.
        app: the app; None if there is none.
    """

    settings: Settings
    source: str
    app: AppSide | None = None
    _store: RedisAdminStore | None = field(default=None, repr=False)
    _changes: bool = field(default=False, repr=False)

    @property
    def store(self) -> RedisAdminStore:
        """The store of the locks. The first access creates it.

        Raises:
            ConfigurationError: no address is known, or the locks are in the memory of another
                process.
        """
        if self._store is None:
            settings = self.settings
            if settings.backend is None:
                msg = (
                    f"The locks' Redis is not known: {settings.backend_source}. Give the app "
                    "(celery -A YOUR_APP locks …), set singleton_lock_backend in it, or give the "
                    "URL (celery-singleton-lock --backend URL …)."
                )
                raise ConfigurationError(msg)
            address = settings.address()
            if is_elsewhere(address):
                msg = (
                    f"{self.source} is {address!s}: these locks are in the memory of a test's "
                    "process, and no other process can see them. Use the fixture singleton_locks "
                    "in that test: it shows holders and waiters."
                )
                raise ConfigurationError(msg)
            self._store = open_admin_store(
                address,
                settings.backend_options,
                settings.prefix,
                patience=PATIENCE,
                quarantine=settings.quarantine or None,  # a URL does not tell it
            )
        return self._store

    def witness(self) -> AppSide | None:
        """Return the app, if there is one, with the broker queues that live workers consume."""
        app = self.app
        if app is not None:
            app.consumed = lambda: {
                queue
                for about in self.store.workers().values()
                if about["realm"] == app.realm
                for queue in about["queues"]
            }
        return app

    def close(self) -> None:
        """Close the store, and restore the settings of the app."""
        if self._store is not None:
            self._store.hang_up()
        if self.app is not None:
            self.app.close()

    def operator(self, action: str = "", why: str = "") -> Operator:
        """Return the operator of this command, for the audit. The command may change something."""
        self._changes = True
        return Operator(login(), socket.gethostname(), "cli", why, action)

    def announce(self, by: Operator, done: Mapping[str, int], action: str) -> None:
        """Send one event ``lock-admin`` for each lock, if there is an app."""
        if self.app is not None:
            self.app.announce(by, done, action)

    def need_app(self, what: str) -> AppSide:
        """Return the app.

        Raises:
            click.UsageError: there is none.
        """
        if self.app is None:
            msg = f"{what} needs the app: celery -A YOUR_APP locks …"
            raise click.UsageError(msg)
        return self.app

    @contextmanager
    def errors_as_lines(self) -> Iterator[None]:
        """Raise this package's errors as click's errors of one line, with the exit status."""
        try:
            with package_errors_as_lines():
                yield
        except BackendError as error:
            hint = " Check the address, and that Redis runs." * ("did not answer" in str(error))
            if self._changes and "no answer in time" in str(error):  # Redis may have the command
                hint += " It may still make the change later: look before you repeat it."
            where = f"{self.source} is {self.settings.address()}"
            raise NoAnswer(_line(f"{where}: {error}{hint}")) from None


def login() -> str:
    """Return the login name; under sudo, the name of the user who called it."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        return f"uid {os.getuid()}"


def of_app(app: Any) -> Target:
    """Return the target of a command with an app.

    Raises:
        ConfigurationError: a setting is invalid.
    """
    extension = install(app)
    settings = extension.settings
    return Target(settings, settings.backend_source, AppSide(app, extension))


def of_url(url: str, prefix: str, options: Mapping[str, str]) -> Target:
    """Return the target of a command with a URL.

    Raises:
        click.UsageError: the URL, the prefix or an option is invalid.
    """
    with setting_errors_as_usage():
        target = _of_url(url, prefix, options)
        if not target.settings.in_memory:  # Target.store refuses that later, with the address
            _ = target.store  # checks the options; sends nothing
        return target


def _of_url(url: str, prefix: str, options: Mapping[str, str]) -> Target:
    given: dict[str, Any] = {
        "singleton_lock_backend": url,
        "singleton_lock_prefix": prefix,
        "singleton_lock_backend_options": dict(options),
    }
    return Target(parse_settings(given.get), "--backend")


@contextmanager
def setting_errors_as_usage() -> Iterator[None]:
    """Raise an invalid setting as a usage error of the command line option."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConfigurationWarning)
            yield
    except (ConfigurationError, ConfigurationWarning) as error:
        raise click.UsageError(_line(_with_option_names(str(error)))) from None


def _with_option_names(text: str) -> str:
    """Replace names of settings by names of command line options."""
    for setting, option in _AS_OPTIONS.items():
        text = re.sub(setting, option, text)
    return text


@contextmanager
def package_errors_as_lines() -> Iterator[None]:
    """Raise errors of this package as click's errors of one line, except BackendError."""
    try:
        yield
    except BackendError:
        raise
    except BrokerError as error:
        raise NoAnswer(_line(str(error))) from None
    except SingletonLockError as error:
        raise NotDone(_line(str(error))) from None


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


R = TypeVar("R")


def with_target(command: Callable[..., R]) -> Callable[..., R]:
    """Pass a :class:`Target` to a command as first argument, and print its errors as one line."""

    @click.pass_context
    @wraps(command)
    def run(context: click.Context, /, *args: Any, **kwargs: Any) -> R:
        refuse_undecodable(context)
        with package_errors_as_lines():
            target = target_of(context)
        context.call_on_close(target.close)
        with target.errors_as_lines():
            return command(target, *args, **kwargs)

    return run


def refuse_undecodable(context: click.Context) -> None:
    """Refuse arguments that are not valid UTF-8.

    Raises:
        click.UsageError: an argument is not valid UTF-8.
    """
    for name, given in context.params.items():
        for each in given if isinstance(given, tuple) else (given,):
            if isinstance(each, str) and not is_encodable(each):
                msg = f"{name} is not valid UTF-8: {printable(each, LONGEST_SHOWN)}"
                raise click.UsageError(msg)


LONGEST_SHOWN: Final = 200
"""Largest number of characters of an invalid argument in an error text."""


def target_of(context: click.Context) -> Target:
    """Return the target of an invocation.

    ``celery-singleton-lock`` has put it into the context. ``celery`` has put the app there.
    """
    found = context.find_object(Target)
    return of_app(context.find_root().obj.app) if found is None else found

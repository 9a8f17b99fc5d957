"""Where a command works: the store, who asks, and the app if there is one."""

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
from itertools import islice
from typing import Any, Final, TypeVar

import click

from celery_singleton_lock.config.limits import PREFIX
from celery_singleton_lock.config.option_checks import ConfigurationWarning
from celery_singleton_lock.cli.app_context import AppSide, BrokerError
from celery_singleton_lock.errors import (
    BackendError,
    ConfigurationError,
    SingletonLockError,
)
from celery_singleton_lock.worker.extension import install
from celery_singleton_lock.config.settings import Settings, parse_settings
from celery_singleton_lock.store.operator.base import Operator
from celery_singleton_lock.store.connect import is_elsewhere
from celery_singleton_lock.store.factory import open_admin_store
from celery_singleton_lock.store.operator.redis import RedisAdminStore
from celery_singleton_lock.message_text import printable

PATIENCE: Final = 5.0
"""Seconds within which Redis must answer a person."""

REFUSED: Final = 1
"""Exit status: what was asked for was not done, or is not there."""

UNREACHABLE: Final = 3
"""Exit status: the locks' Redis, or the broker, did not answer, or refused."""

NAMED: Final = 20
"""Most locks that the events of one operation name."""

UNSURE: Final = 4
"""Exit status of ``doctor``: nothing is broken, but something is unknown, or wants a look."""


_AS_OPTIONS: Final = {
    rf'Set {PREFIX}backend_options = \{{"(\w+)": "(\w+)"\}}': r"Give --option \1=\2",
    rf'{PREFIX}backend_options\["(\w+)"\]': r"--option \1",
    rf"{PREFIX}backend_options": "--option",
    rf"{PREFIX}(backend|prefix)": r"--\1",
}
"""What settings are called where there are none, in this order."""


class NotDone(click.ClickException):
    """What was asked for was not done."""

    exit_code = REFUSED


class NoAnswer(click.ClickException):
    """Redis, or the broker, did not answer, or refused."""

    exit_code = UNREACHABLE


@dataclass
class Place:
    """What a command is given.

    Args:
        settings: where the locks live.
        source: where its address was given.
        app: what the app knows; None without one.
    """

    settings: Settings
    source: str
    app: AppSide | None = None
    _store: RedisAdminStore | None = field(default=None, repr=False)

    @property
    def store(self) -> RedisAdminStore:
        """The store; made when it is first used.

        Raises:
            ConfigurationError: the locks are in the memory of another process.
        """
        if self._store is None:
            settings = self.settings
            if settings.backend is None:
                msg = (
                    f"It is not known which Redis has the locks: {settings.backend_source}. Give "
                    "the app (celery -A YOUR_APP locks …), set singleton_lock_backend in it, or "
                    "give the URL (celery-singleton-lock --backend URL …)."
                )
                raise ConfigurationError(msg)
            address = settings.address()
            if is_elsewhere(address):
                msg = (
                    f"{self.source} is {address!s}: these locks live in the memory of the process "
                    "that uses them, a test's, and no other can see them. Ask in the test: the "
                    "fixture singleton_locks shows who holds and waits."
                )
                raise ConfigurationError(msg)
            self._store = open_admin_store(
                address,
                settings.backend_options,
                settings.prefix,
                patience=PATIENCE,
                quarantine=settings.quarantine,
            )
        return self._store

    def witness(self) -> AppSide | None:
        """Return the app's side, if there is one, with the queues that live workers consume."""
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
        """Close what was opened."""
        if self._store is not None:
            self._store.hang_up()

    def operator(self, action: str = "", why: str = "") -> Operator:
        """Return who asks."""
        return Operator(login(), socket.gethostname(), "cli", why, action)

    def announce(self, by: Operator, done: Mapping[str, int], action: str) -> None:
        """Send the events of what was done, where there is an app: one for each lock.

        Of many locks the first twenty are named, as in the audit.
        """
        if self.app is None:
            return
        named = dict(islice(done.items(), NAMED))
        rest = sum(done.values()) - sum(named.values())
        if rest:
            named[f"(and {len(done) - NAMED} more)"] = rest
        for name, number in named.items():
            self.app.announce(by, name, action, number)

    def need_app(self, what: str) -> AppSide:
        """Return the app's side.

        Raises:
            click.UsageError: there is no app.
        """
        if self.app is None:
            msg = f"{what} needs the app: celery -A YOUR_APP locks …"
            raise click.UsageError(msg)
        return self.app

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """Show our errors as one line that says where, and with the status that scripts go by."""
        try:
            with told():
                yield
        except BackendError as error:
            hint = " Check that it runs, and its address." * ("did not answer" in str(error))
            where = f"{self.source} is {self.settings.address()}"
            raise NoAnswer(_line(f"{where}: {error}{hint}")) from None


def login() -> str:
    """Return who is logged in; who became root by sudo, as who they were."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        return f"uid {os.getuid()}"


def of_app(app: Any) -> Place:
    """Return the place of an app.

    Raises:
        ConfigurationError: a setting is wrong.
    """
    extension = install(app)
    settings = extension.settings
    return Place(settings, settings.backend_source, AppSide(app, extension))


def of_url(url: str, prefix: str, options: Mapping[str, str]) -> Place:
    """Return the place of a URL.

    Raises:
        click.UsageError: it cannot be used, or an option cannot.
    """
    with told_as_options():
        place = _of_url(url, prefix, options)
        if not place.settings.in_memory:  # of which is said later where they are
            _ = place.store  # its options are looked at; nothing is sent yet
        return place


def _of_url(url: str, prefix: str, options: Mapping[str, str]) -> Place:
    given: dict[str, Any] = {
        "singleton_lock_backend": url,
        "singleton_lock_prefix": prefix,
        "singleton_lock_backend_options": dict(options),
    }
    return Place(parse_settings(given.get), "--backend")


@contextmanager
def told_as_options() -> Iterator[None]:
    """Show an error of a setting as wrong usage of the option in which its value was given."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConfigurationWarning)
            yield
    except (ConfigurationError, ConfigurationWarning) as error:
        raise click.UsageError(_line(_spelled(str(error)))) from None


def _spelled(text: str) -> str:
    """Return a sentence on settings as one on options."""
    for setting, option in _AS_OPTIONS.items():
        text = re.sub(setting, option, text)
    return text


@contextmanager
def told() -> Iterator[None]:
    """Show errors that are no outage as one line; an outage of the broker, too."""
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


def with_place(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command its :class:`Place` first, and show its errors in one line."""

    @click.pass_context
    @wraps(command)
    def run(context: click.Context, /, *args: Any, **kwargs: Any) -> R:
        with told():
            place = place_of(context)
        context.call_on_close(place.close)
        with place.errors_told():
            return command(place, *args, **kwargs)

    return run


def place_of(context: click.Context) -> Place:
    """Return the place of an invocation: our own group has made it; Celery's carries the app."""
    found = context.find_object(Place)
    return of_app(context.find_root().obj.app) if found is None else found

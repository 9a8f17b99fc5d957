"""The locked tasks of an app, as they are declared. Reads no Redis."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery_singleton_lock.config.multi_lock_option import Limit
from celery_singleton_lock.core.template_field import HEADERS, QUEUE
from celery_singleton_lock.message_text import named
from celery_singleton_lock.worker.extension import Extension, declared_options


@dataclass(frozen=True, slots=True)
class DeclaredKey:
    """How a task names one of its locks.

    Args:
        key: the template; the name of the callable; the names of the arguments, separated by
            commas; or empty.
        kind: ``template``, ``callable``, ``arguments`` (``lock_args``), or ``digest`` (of all
            arguments).
        limit: permits of the lock; a text if they are computed from the arguments of a call.
    """

    key: str
    kind: str
    limit: int | str

    def __str__(self) -> str:
        """The key as the table shows it."""
        if self.kind == "arguments":
            return f"lock_args {self.key}" if self.key else "one lock for all calls"
        return {"template": self.key, "callable": f"callable {self.key}"}.get(
            self.kind, "all arguments"
        )


@dataclass(frozen=True, slots=True)
class DeclaredTask:
    """A locked task.

    Args:
        name: name of the task.
        keys: its locks; several with ``lock_keys``.
        policy: what it does if a lock is busy (``lock_on_conflict``).
        lease: seconds.
        mode: as declared, without switches.
        shares_with: other tasks that have a lock name in common with it, for some arguments.
    """

    name: str
    keys: tuple[DeclaredKey, ...]
    policy: str
    lease: float
    mode: str
    shares_with: tuple[str, ...] = ()


def declared_tasks(extension: Extension) -> list[DeclaredTask]:
    """Return all locked tasks of an app, sorted by name.

    Two tasks share a lock if their templates are equal except for the names of the arguments, or if
    they have the same callable.

    Raises:
        ConfigurationError: an option or a setting is invalid.
    """
    found, forms = [], dict[str, set[object]]()
    for name in sorted(extension.declared()):
        task = extension.app.tasks[name]
        options, declared = extension.options(task), declared_options(task)
        keys = _keys(declared, _limit(declared, options.limit))
        forms[name] = {_form(key) for key, _ in keys if isinstance(key, str) or callable(key)}
        shown = tuple(_shown(key, declared, limit) for key, limit in keys)
        found.append(DeclaredTask(name, shown, options.on_conflict, options.lease, options.mode))
    return [replace(task, shares_with=_sharing(task.name, forms)) for task in found]


def _sharing(name: str, forms: Mapping[str, set[object]]) -> tuple[str, ...]:
    mine = forms[name]
    return tuple(other for other, theirs in forms.items() if other != name and mine & theirs)


def _limit(declared: Mapping[str, Any], limit: int) -> int | str:
    """Return the limit of a task; if it is computed, its template or the name of the callable."""
    given = declared.get("lock_limit")
    if isinstance(given, str):
        return given
    return f"callable {getattr(given, '__qualname__', given)}" if callable(given) else limit


def _keys(declared: Mapping[str, Any], limit: int | str) -> list[tuple[Any, int | str]]:
    """Return the keys of a task, each with its limit."""
    several = declared.get("lock_keys")
    if several is None:
        return [(declared.get("lock_key"), limit)]
    pairs = several.items() if isinstance(several, Mapping) else [(key, None) for key in several]
    return [
        (
            key.__func__ if isinstance(key, staticmethod) else key,
            own.number if isinstance(own, Limit) else own or limit,
        )
        for key, own in pairs
    ]


def _shown(key: Any, declared: Mapping[str, Any], limit: int | str) -> DeclaredKey:
    if isinstance(key, str):
        return DeclaredKey(key, "template", limit)
    if callable(key):
        place = getattr(key, "__qualname__", "")
        shown = f"{key.__module__}.{place}" if place else named(type(key))
        return DeclaredKey(shown, "callable", limit)
    arguments = declared.get("lock_args")
    if arguments is not None:
        return DeclaredKey(", ".join(arguments), "arguments", limit)
    return DeclaredKey("", "digest", limit)


def _form(key: Any) -> object:
    """Return a value that is equal for keys that give the same names."""
    if not isinstance(key, str):
        return id(key)
    form: list[object] = [""]
    for literal, field, spec, conversion in string.Formatter().parse(key):
        form[-1] = f"{form[-1]}{literal}"
        if field is not None:
            of_message = field if field.startswith((QUEUE, HEADERS)) else ""
            form += [(of_message, spec, conversion), ""]
    return tuple(form)

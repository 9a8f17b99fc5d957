"""From ``lock_keys`` and the arguments of a call to the names of its locks (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NoReturn

from celery_singleton_lock.core.lock_set import in_order
from celery_singleton_lock.config.option_checks import OPTIONS, Place
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.core.lock_name_template import Namer, Sent, Wording, compile_name

MOST: Final = 32
"""Most locks of one task: each is two round trips."""

SHOWN: Final = 3
"""Locks that an error shows of too many."""

_OF_SEVERAL: Final = Wording(
    key="lock_keys",
    has="has",
    callable_key="callable in lock_keys",
    several="lock_keys is one list of all templates",
)


@dataclasses.dataclass(frozen=True, slots=True)
class SeveralNamer:
    """Names the locks of each call of one task. Made by :func:`compile_names`."""

    _keys: tuple[tuple[Namer, int | None], ...]
    _limit: int

    def name(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        sent: Sent | None = None,
    ) -> str:
        """Return the locks of a call, in the order in which they are taken.

        Args:
            args: positional arguments, as they came over the wire.
            kwargs: keyword arguments, as they came over the wire.
            sent: what else is known of the call.

        Returns:
            As :func:`~celery_singleton_lock.core.lock_set.in_order`.

        Raises:
            ArgumentsDoNotBind: the task cannot be called like that.
            LockNameError: as of :meth:`Namer.name`.
        """
        keys = ((namer.name(args, kwargs, sent), limit) for namer, limit in self._keys)
        return in_order(keys, self._limit)


def compile_names(
    task_name: str, run: Callable[..., Any], lock_keys: Any, limit: int = 1
) -> SeveralNamer:
    """Check how a task names its locks, and prepare for naming them quickly.

    Args:
        task_name: name of the task.
        run: the task's function, of which the signature counts.
        lock_keys: templates or callables, as ``lock_key`` takes them; or a dict of them with the
            limit of each.
        limit: the task's ``lock_limit``, which is that of locks without a limit of their own.

    Raises:
        ConfigurationError: the declaration is wrong. The message names task, option and remedy.
    """
    place = Place("lock_keys", task_name)
    if isinstance(lock_keys, str) or not isinstance(lock_keys, (list, tuple, Mapping)):
        place.refuse(
            lock_keys,
            'it must be a list of templates, such as ["account:{a}", "account:{b}"], or a dict of '
            "them with their limits. For one lock use lock_key",
        )
    if not 1 <= len(lock_keys) <= MOST:
        _refuse_number(place, lock_keys)
    given = lock_keys.items() if isinstance(lock_keys, Mapping) else [(k, None) for k in lock_keys]
    return SeveralNamer(
        tuple((_namer(task_name, run, key), _limit(place, key, own)) for key, own in given),
        limit,
    )


def _refuse_number(place: Place, lock_keys: Collection[Any]) -> NoReturn:
    """Refuse no locks, or too many, of which a few are shown."""
    if not lock_keys:
        place.refuse(lock_keys, f"it must name from 1 to {MOST} locks. For none leave it out")
    few = ", ".join(map(repr, islice(lock_keys, SHOWN)))
    msg = (
        f"{place} names {len(lock_keys)} locks ({few}, …): it may name {MOST} at most, since each "
        "costs two round trips. Lock what they have in common."
    )
    raise ConfigurationError(msg)


def _namer(task_name: str, run: Callable[..., Any], key: Any) -> Namer:
    if key is None:
        Place("lock_keys", task_name).refuse([None], "each lock needs a template or a callable")
    plain = key.__func__ if isinstance(key, staticmethod) else key
    return compile_name(task_name, run, lock_key=plain, wording=_OF_SEVERAL)


def _limit(place: Place, key: Any, limit: Any) -> int | None:
    if limit is None:
        return None
    checked: int = OPTIONS["limit"](Place(f"{place.option}[{key!r}]", place.task), limit)
    return checked

"""Computes the lock set of a call from ``lock_keys`` and its arguments (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NoReturn

from celery_singleton_lock.config.option_checks import OPTIONS, Place
from celery_singleton_lock.core.lock_name_template import Namer, Sent, Wording, compile_name
from celery_singleton_lock.core.lock_set import in_order
from celery_singleton_lock.errors import ConfigurationError

MOST: Final = 32
"""Largest number of locks of one task: each costs two round trips."""

SHOWN: Final = 3
"""How many locks an error shows if there are more than :data:`MOST`."""

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
        """Return the locks of a call, in the order in which they are acquired.

        Args:
            args: positional arguments, as the message has them.
            kwargs: keyword arguments, as the message has them.
            sent: what else is known of the call.

        Returns:
            The result of :func:`~celery_singleton_lock.core.lock_set.in_order`.

        Raises:
            ArgumentsDoNotBind: the task cannot be called with these arguments.
            LockNameError: see :meth:`Namer.name`.
        """
        keys = ((namer.name(args, kwargs, sent), limit) for namer, limit in self._keys)
        return in_order(keys, self._limit)


def compile_names(
    task_name: str, run: Callable[..., Any], lock_keys: Any, limit: int = 1
) -> SeveralNamer:
    """Check the option ``lock_keys`` of a task, and compile it.

    Args:
        task_name: name of the task.
        run: the task's function; its signature is used.
        lock_keys: a list of templates or callables, each as in ``lock_key``; or a dict from them to
            limits.
        limit: the task's ``lock_limit``, for locks without a limit of their own.

    Raises:
        ConfigurationError: the declaration is wrong. The message names task and option, and says
            what to change.
    """
    place = Place("lock_keys", task_name)
    if isinstance(lock_keys, str) or not isinstance(lock_keys, (list, tuple, Mapping)):
        place.refuse(
            lock_keys,
            'it must be a list of templates, such as ["account:{a}", "account:{b}"], or a dict '
            "from templates to limits. For one lock use lock_key",
        )
    if not 1 <= len(lock_keys) <= MOST:
        _refuse_number(place, lock_keys)
    given = lock_keys.items() if isinstance(lock_keys, Mapping) else [(k, None) for k in lock_keys]
    return SeveralNamer(
        tuple((_namer(task_name, run, key), _limit(place, key, own)) for key, own in given),
        limit,
    )


def _refuse_number(place: Place, lock_keys: Collection[Any]) -> NoReturn:
    if not lock_keys:
        place.refuse(lock_keys, f"it must name 1 to {MOST} locks. For no lock leave it out")
    few = ", ".join(map(repr, islice(lock_keys, SHOWN)))
    msg = (
        f"{place} names {len(lock_keys)} locks ({few}, …): it may name at most {MOST}, since each "
        "costs two round trips. Use one lock for what they have in common."
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

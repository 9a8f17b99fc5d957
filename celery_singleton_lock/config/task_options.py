"""Resolve the options of a task, and check that they do not contradict each other."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery_singleton_lock.config.argument_checks import BARE_KEY, warn_of_bare_name
from celery_singleton_lock.config.limits import LONGEST_LEASE
from celery_singleton_lock.config.multi_lock_option import idle_pairs, rates_in
from celery_singleton_lock.config.option_checks import OPTIONS, ConfigurationWarning, Place
from celery_singleton_lock.config.settings import TASK_ONLY, LockOptions, Settings
from celery_singleton_lock.core.lock_name_template import is_computed


def resolve_options(
    task_name: str,
    attributes: Mapping[str, Any],
    settings: Settings | None,
    *,
    warn: bool = True,
) -> LockOptions:
    """Check the ``lock_…`` options of a task, and add the defaults of the settings.

    Args:
        task_name: name of the task, for errors.
        attributes: the options that the task declares, by name (``lock_lease``). A missing option
            is taken from the settings; None is a value (``lock_wait_timeout=None`` is no limit,
            whatever the settings are). Other attributes are ignored, see
            :func:`~celery_singleton_lock.config.unknown_names.check_unknown`.
        settings: the app's settings; None if they are not known yet. Then an option that may come
            from them is not compared with others.
        warn: whether to warn of options without effect and of a long lease. Without ``settings``
            there is no warning.

    Raises:
        ConfigurationError: an option has an invalid value, or contradicts another one.
    """
    values: dict[str, Any] = {}
    defaults = settings or Settings()
    warns = warn and settings is not None
    for field in dataclasses.fields(LockOptions):
        option = f"lock_{field.name}"
        if option in attributes:
            place = Place(option, task_name, warns)
            values[field.name] = OPTIONS[field.name](place, attributes[option])
        elif field.name not in TASK_ONLY:
            values[field.name] = getattr(defaults, field.name)
    options = LockOptions(**values)
    _check_together(task_name, attributes, options, settings)
    if attributes.get("lock_keys") is not None:
        _check_for_several(task_name, attributes, options, settings)
    if settings is not None and settings.is_quorum:
        _check_for_quorum(task_name, attributes, options, settings)
    if warns:
        _warn_of_idle(task_name, attributes, options)
        if options.parks:
            _warn_of_idle_locks(task_name, attributes.get("lock_keys"))
    return options


def _check_together(
    task_name: str, attributes: Mapping[str, Any], options: LockOptions, settings: Settings | None
) -> None:
    none_declared = attributes.get("lock_wait_timeout", "") is None
    is_final = settings is not None or none_declared
    if options.on_conflict == "wait" and options.wait_timeout is None and is_final:
        Place("lock_on_conflict", task_name).refuse(
            "wait",
            "a task that waits occupies a pool slot, so it needs a time-out. Add "
            'lock_wait_timeout=60, or use "park", which needs no slot',
        )
    if options.on_full == "replace" and options.max_waiting == 0:
        Place("lock_max_waiting", task_name).refuse(
            0, 'lock_on_full="replace" replaces a task that waits, and none may wait. Use 1'
        )
    if options.on_full == "replace" and options.on_conflict == "wait":
        Place("lock_on_full", task_name).refuse(
            "replace",
            'it replaces parked messages, and lock_on_conflict="wait" parks none. Use "skip"',
        )
    has_rate = options.rate or is_computed(attributes.get("lock_rate"))
    if attributes.get("lock_limit", 1) is None and not has_rate:
        Place("lock_limit", task_name).refuse(
            None, 'without a rate, the lock would bound nothing. Add lock_rate="100/m", or use 1'
        )
    rates = rates_in(attributes.get("lock_keys"))
    if (has_rate or rates) and options.on_conflict in {"wait", "requeue"}:
        declared = [str(rate) for rate in options.rate] or attributes.get("lock_rate")
        Place("lock_keys" if rates else "lock_rate", task_name).refuse(
            attributes["lock_keys"] if rates else declared,
            f'with lock_on_conflict="{options.on_conflict}" a task above its rate would occupy a '
            'pool slot, or go back to the broker again and again. Use "park", "skip" or "fail"',
        )
    _check_preempt(task_name, attributes, options)
    _check_fairness(task_name, attributes, options)
    _check_debounce(task_name, attributes, options, settings)
    _check_unique(task_name, attributes, options, settings)
    if options.requeue_delay > options.requeue_max:
        Place("lock_requeue_delay", task_name).refuse(
            options.requeue_delay,
            f"it is longer than lock_requeue_max ({options.requeue_max:g}). Use at most that",
        )


def _check_fairness(task_name: str, attributes: Mapping[str, Any], options: LockOptions) -> None:
    if options.fair_by is None:
        return
    if attributes.get("lock_keys") is not None:
        Place("lock_fair_by", task_name).refuse(
            options.fair_by,
            "with lock_keys a group that is next for one lock may wait for another one. Use "
            "lock_key, or leave lock_fair_by out",
        )
    if options.on_conflict == "requeue":
        Place("lock_fair_by", task_name).refuse(
            options.fair_by,
            'with lock_on_conflict="requeue" tasks wait in the broker, which knows no groups. Use '
            '"park"',
        )
    if options.on_full == "replace":
        Place("lock_on_full", task_name).refuse(
            "replace",
            "with lock_fair_by the oldest waiter may be of another group than the task that "
            'replaces it. Use "skip" or "fail"',
        )


def _check_debounce(
    task_name: str, attributes: Mapping[str, Any], options: LockOptions, settings: Settings | None
) -> None:
    if options.debounce is None:
        return
    place = Place("lock_debounce", task_name)
    if settings is not None and settings.is_quorum:
        place.refuse(
            options.debounce,
            "with several servers in singleton_lock_backend no message is stored in Redis, and "
            "lock_debounce stores messages there. Leave it out, or use one Redis",
        )
    if options.on_conflict != "park":
        place.refuse(
            options.debounce,
            f'lock_debounce parks messages, and lock_on_conflict="{options.on_conflict}" does not. '
            'Use "park"',
        )
    if attributes.get("lock_keys") is not None:
        place.refuse(
            options.debounce,
            "with lock_keys calls of one burst may have different locks. Use lock_key, or leave "
            "lock_debounce out",
        )
    most = options.debounce_max
    if most is not None and most <= options.debounce:
        Place("lock_debounce_max", task_name).refuse(
            most,
            f"it must be longer than lock_debounce ({options.debounce:g}), since even a single "
            "call waits for lock_debounce. Leave it out for no limit",
        )


def _check_unique(
    task_name: str, attributes: Mapping[str, Any], options: LockOptions, settings: Settings | None
) -> None:
    if options.unique is None:
        return
    place = Place("lock_unique", task_name)
    if settings is not None and settings.is_quorum:
        place.refuse(
            options.unique,
            "with several servers in singleton_lock_backend no server knows all calls that were "
            "sent. Leave it out, or use one Redis",
        )
    if attributes.get("lock_keys") is not None:
        place.refuse(
            options.unique,
            "with lock_keys two calls that are alike may have different locks. Use lock_key, or "
            "leave lock_unique out",
        )
    if options.debounce is not None:
        place.refuse(
            options.unique,
            "with lock_debounce the newest call counts, and with lock_unique the first one. Use "
            "one of the two",
        )
    if options.on_duplicate == "follow" and options.unique != "until_done":
        place.refuse(
            options.unique,
            'with lock_on_duplicate="follow" a call must count until its task has its result. Use '
            '"until_done"',
        )
    templates = {option: str(attributes.get(option)) for option in ("lock_key", "lock_unique_key")}
    of_queue = [option for option, text in templates.items() if "{__queue__" in text]
    if of_queue:
        place.refuse(
            options.unique,
            f"{of_queue[0]} names {{__queue__}}, and the sender does not know the queue. Use an "
            "argument instead",
        )


def _check_preempt(task_name: str, attributes: Mapping[str, Any], options: LockOptions) -> None:
    if not options.preempts:
        return
    one_key = 'Use lock_key, or lock_on_conflict="park"'
    for option, is_given, reason in (
        ("keys", attributes.get("lock_keys") is not None, f"may free one lock only. {one_key}"),
        (
            "rate",
            options.rate or is_computed(attributes.get("lock_rate")),
            'may not start when the older one has ended. Leave it out, or use "park"',
        ),
        ("fair_by", options.fair_by is not None, f"may be of another group. {_LEAVE_ONE}"),
        ("debounce", options.debounce is not None, f"settles first. {_LEAVE_ONE}"),
        ("unique", options.unique is not None, f"is not sent. {_LEAVE_ONE}"),
        ("on_full", options.on_full == "replace", 'replaces the one that waits. Use "fail"'),
        (
            "on_retry",
            options.on_retry == "keep",
            'waits for a retry of the older one. Use "release"',
        ),
    ):
        if is_given:
            given = attributes.get(f"lock_{option}", getattr(options, option, None))
            Place(f"lock_{option}", task_name).refuse(
                given,
                f'with lock_on_conflict="preempt" the newest call replaces the older ones, '
                f"and with this it {reason}",
            )


def _check_for_several(
    task_name: str, attributes: Mapping[str, Any], options: LockOptions, settings: Settings | None
) -> None:
    given = "lock_keys is given too, and each names all locks. Keep lock_keys, and "
    remedies = {
        "lock_key": "put this into it",
        "lock_args": "leave lock_args out: each of lock_keys is a template of arguments",
    }
    for other, remedy in remedies.items():
        if attributes.get(other) is not None:
            Place(other, task_name).refuse(attributes[other], given + remedy)
    _refuse_computed(
        task_name,
        attributes,
        "with lock_keys it would be computed once for several locks. Use lock_key, or a number for "
        "each lock",
    )
    _check_limits(task_name, attributes)
    if options.rate:
        Place("lock_rate", task_name).refuse(
            [str(rate) for rate in options.rate],
            "lock_keys is given too, and each of its locks has a rate of its own. Write it there: "
            f'{{"…": Limit(1, rate="{options.rate[0]}")}}',
        )
    if options.on_full == "replace":
        Place("lock_on_full", task_name).refuse(
            "replace",
            "with lock_keys the oldest waiter may have other locks than this task. Use "
            '"skip" or "fail"',
        )
    if options.on_retry == "keep":
        Place("lock_on_retry", task_name).refuse(
            "keep",
            "with lock_keys the next attempt may need other locks, and could wait for them in "
            'another order than other tasks. Use "release"',
        )
    if settings is not None and settings.is_quorum:
        Place("lock_keys", task_name).refuse(
            attributes["lock_keys"],
            "with several servers in singleton_lock_backend a task has one lock. Use one Redis, "
            "or lock_key",
        )


def _refuse_computed(task_name: str, attributes: Mapping[str, Any], remedy: str) -> None:
    for option in ("lock_limit", "lock_rate"):
        if is_computed(attributes.get(option)):
            Place(option, task_name).refuse(attributes[option], remedy)


def _check_limits(task_name: str, attributes: Mapping[str, Any]) -> None:
    keys = attributes["lock_keys"]
    limits = list(keys.values()) if isinstance(keys, Mapping) else [None]
    if limits and None not in limits and attributes.get("lock_limit") is not None:
        Place("lock_limit", task_name).refuse(
            attributes["lock_limit"],
            "each of lock_keys has a limit of its own, so this one has no effect. Leave it out, "
            "or write None in lock_keys for the locks that have this limit",
        )


def _check_for_quorum(
    task_name: str, attributes: Mapping[str, Any], options: LockOptions, settings: Settings
) -> None:
    several = "with several servers in singleton_lock_backend "
    longest = settings.backend_options.get("longest_lease", LONGEST_LEASE)
    if options.on_conflict in {"park", "preempt"}:
        Place("lock_on_conflict", task_name).refuse(
            options.on_conflict,
            f"{several}messages cannot be parked: one server would be the only one that has them. "
            'Use "requeue", which returns them to the broker (singleton_lock_on_conflict for all '
            "tasks)",
        )
    _refuse_computed(
        task_name, attributes, f"{several}a lock has one permit, and no rate. Leave it out"
    )
    if options.limit != 1:
        Place("lock_limit", task_name).refuse(
            options.limit, f"{several}a lock has one permit. Leave it out, or use one Redis"
        )
    _check_flow_for_quorum(task_name, options, several)
    if options.on_retry == "keep":
        Place("lock_on_retry", task_name).refuse(
            "keep", f'{several}no lock is reserved for a retry. Use "release"'
        )
    if options.hold_for is not None:
        Place("lock_hold_for", task_name).refuse(
            options.hold_for,
            f"{several}no lock stays held after a task. Leave it out (singleton_lock_hold_for for "
            "all tasks), or use one Redis",
        )
    if options.mode == "observe":
        Place("lock_mode", task_name).refuse(
            "observe",
            f'{several}there is no report. Use "enforce" or "off" (singleton_lock_mode for all '
            "tasks), or one Redis",
        )
    if options.lease > longest:
        Place("lock_lease", task_name).refuse(
            options.lease,
            f"a server votes again {longest:g} s after a restart, so a longer lease is not safe. "
            "Use a shorter lease, which is renewed, or set longest_lease in "
            "singleton_lock_backend_options to the same value in all workers",
        )


def _check_flow_for_quorum(task_name: str, options: LockOptions, several: str) -> None:
    if options.rate:
        Place("lock_rate", task_name).refuse(
            [str(rate) for rate in options.rate],
            f"{several}no server has a log of all starts. Leave it out, or use one Redis",
        )
    if options.priority:
        Place("lock_priority", task_name).refuse(
            options.priority, f"{several}a lock has no queue. Leave it out, or use one Redis"
        )
    if options.fair_by is not None:
        Place("lock_fair_by", task_name).refuse(
            options.fair_by,
            f"{several}no server has the queue of all groups. Leave it out, or use one Redis",
        )


def _warn_of_idle(task_name: str, attributes: Mapping[str, Any], options: LockOptions) -> None:
    """Warn of options that the task declares and that have no effect."""
    idle: dict[str, str] = {}
    rates = options.rate or rates_in(attributes.get("lock_keys"))
    has_rate = bool(rates) or is_computed(attributes.get("lock_rate"))
    parks_above_rate = has_rate and options.on_rate == "park"
    if options.on_conflict in {"skip", "fail"} and not parks_above_rate:
        reason = f'with lock_on_conflict="{options.on_conflict}" it never waits{_LEAVE_OUT}'
        idle = dict.fromkeys(("lock_wait_timeout", "lock_max_waiting", "lock_on_full"), reason)
    elif options.on_conflict == "requeue":
        reason = f'with lock_on_conflict="requeue" it is never in a queue{_LEAVE_OUT}'
        idle = dict.fromkeys(("lock_max_waiting", "lock_on_full"), reason)
    elif options.max_waiting is None:
        most = 1 if options.on_full == "replace" else 100
        reason = f"without lock_max_waiting its queue is never full. Add lock_max_waiting={most}"
        idle = {"lock_on_full": reason}
    if options.on_conflict != "requeue":
        reason = 'it needs lock_on_conflict="requeue". Add that, or leave this out'
        idle |= dict.fromkeys(("lock_requeue_delay", "lock_requeue_max"), reason)
    if not options.preempts:
        reason = 'it needs lock_on_conflict="preempt". Add that, or leave this out'
        idle |= dict.fromkeys(("lock_preempt_grace", "lock_preempt_max"), reason)
    idle |= _idle_flow(options, has_rate=has_rate, parks_above_rate=parks_above_rate)
    for option, reason in idle.items():
        if attributes.get(option) is not None:
            value = attributes[option]
            msg = f"task {task_name}: {option} is {value!r}, and has no effect: {reason}."
            warnings.warn(msg, ConfigurationWarning, stacklevel=4)


def _idle_flow(options: LockOptions, *, has_rate: bool, parks_above_rate: bool) -> dict[str, str]:
    idle: dict[str, str] = {}
    if options.fair_by is None:
        reason = 'without lock_fair_by there are no groups. Add lock_fair_by="{tenant}"'
        idle |= dict.fromkeys(("lock_fair_limit", "lock_fair_weight"), reason)
    if options.unique is None:
        unique = "until_done" if options.on_duplicate == "follow" else "until_started"
        reason = f'without lock_unique each call is sent. Add lock_unique="{unique}"'
        idle |= dict.fromkeys(("lock_unique_key", "lock_on_duplicate"), reason)
    if options.debounce is None:
        reason = "without lock_debounce no call settles. Add lock_debounce=5"
        idle |= dict.fromkeys(("lock_debounce_max", "lock_debounce_first"), reason)
    if options.on_conflict not in {"park", "preempt", "wait"} and not parks_above_rate:
        reason = f'with lock_on_conflict="{options.on_conflict}" it is in no queue{_LEAVE_OUT}'
        idle["lock_priority"] = reason
    if not has_rate:
        idle["lock_on_rate"] = 'without lock_rate there is no rate. Add lock_rate="100/m"'
    return idle


def _warn_of_idle_locks(task_name: str, lock_keys: Any) -> None:
    """Warn of locks that a task may hold without need, since another one makes it wait."""
    for held, other in idle_pairs(lock_keys)[:1]:
        msg = (
            f"task {task_name}: lock_keys: a task may hold {held!r} while it waits for {other!r}, "
            "and with a rate that may take long. Meanwhile, calls that need the same "
            f"{held!r} and another {other!r} wait without need. Locks are acquired in the order of "
            f'their names: let the name of {other!r} come first, as in "1:tenant:{{tenant}}" and '
            '"2:api" (docs/several-locks.md#rates), or ignore this warning.'
        )
        warnings.warn(msg, ConfigurationWarning, stacklevel=4)


_LEAVE_ONE: Final = "Leave one of the two out"
_LEAVE_OUT: Final = f". {_LEAVE_ONE}"


def warn_of_bare_names(
    task_name: str, body: Callable[..., Any], declared: Mapping[str, Any]
) -> None:
    """Warn of a text that is the name of an argument, and no template of it."""
    examples = {"lock_key": BARE_KEY, "lock_fair_by": "{{{0}}}", "lock_unique_key": "{{{0}}}"}
    for option, example in examples.items():
        what = f"task {task_name}: {option}"
        warn_of_bare_name(what, declared.get(option), body, example, depth=4)
    for key in declared.get("lock_keys") or ():
        warn_of_bare_name(f"task {task_name}: a key of lock_keys", key, body, BARE_KEY, depth=4)


def warn_of_coroutine(task_name: str, body: Callable[..., Any]) -> None:
    """Warn of a task with ``async def``: Celery calls it, and awaits nothing."""
    if inspect.iscoroutinefunction(body):
        msg = (
            f"task {task_name}: it is declared with async def. Celery awaits no coroutine, so the "
            "body does not run under the lock. Use a plain function that calls asyncio.run()."
        )
        warnings.warn(msg, ConfigurationWarning, stacklevel=4)

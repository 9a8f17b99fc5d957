"""Commands for the app's own declarations: tasks, try, forget-call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import click

from celery_singleton_lock.admin.force_release import Refused
from celery_singleton_lock.admin.forget_call import forget_call
from celery_singleton_lock.admin.try_call import DUPLICATE, Forecast, LockNow, not_sent, try_call
from celery_singleton_lock.admin.why_sentences import seconds
from celery_singleton_lock.cli import render
from celery_singleton_lock.cli.app_context import AppSide
from celery_singleton_lock.cli.change_commands import done
from celery_singleton_lock.cli.declared_tasks import DeclaredTask, declared_tasks
from celery_singleton_lock.cli.options import Command, as_json, reason
from celery_singleton_lock.cli.target import LONGEST_SHOWN, Target, with_target
from celery_singleton_lock.config.limits import NO_LIMIT
from celery_singleton_lock.config.settings import LockOptions
from celery_singleton_lock.core.lock_mode import ENFORCE, Modes
from celery_singleton_lock.core.lock_name_template import Sent
from celery_singleton_lock.core.lock_set import Key, Names
from celery_singleton_lock.message_text import a_kind, meant, printable


@click.command("tasks")
@as_json
@with_target
def tasks_command(target: Target, *, machine: bool) -> None:
    """List the locked tasks of the app: key, policy, limit, lease, and who shares the key."""
    app = target.need_app("tasks")
    app.load_tasks()
    found = declared_tasks(app.extension)
    if machine:
        return render.as_json(found)
    if not found:
        return render.say("The app declares no locked task. Give a task base=LockedTask.")
    return render.show(render.table(_TASKS, _task_rows(found), render.width()))


_TASKS: Final = ("TASK", "KEY", "POLICY", "LIMIT", "LEASE", "MODE", "SHARES ITS LOCK WITH")


def _task_rows(tasks: Iterable[DeclaredTask]) -> Iterable[Sequence[object]]:
    for task in tasks:
        limits = ["none" if key.limit == NO_LIMIT else str(key.limit) for key in task.keys]
        yield (
            task.name,
            ", ".join(map(str, task.keys)),
            task.policy,
            ", ".join(limits if len(set(limits)) > 1 else limits[:1]),
            seconds(task.lease),
            task.mode,
            ", ".join(task.shares_with),
        )


def _arguments(command: Command) -> Command:
    """Add the options for the arguments and headers of a call to a command."""
    for option in (
        click.option(
            "--header",
            "headers",
            multiple=True,
            metavar="NAME=VALUE",
            help="Header of the message.",
        ),
        click.option(
            "--kwargs", "kwargs_text", default="{}", metavar="JSON", help="A dict: '{\"a\": 1}'."
        ),
        click.option("--args", "args_text", default="[]", metavar="JSON", help="A list: '[42]'."),
    ):
        command = option(command)
    return command


@click.command("try")
@click.argument("task")
@_arguments
@click.option("--queue", default="", help="Queue of the message. Default: as the app routes it.")
@as_json
@with_target
def try_command(  # noqa: PLR0917  # click gives them by name
    target: Target,
    task: str,
    args_text: str,
    kwargs_text: str,
    queue: str,
    headers: tuple[str, ...],
    *,
    machine: bool,
) -> None:
    """Show the locks of a call, and what would happen to it now. Sends and changes nothing.

    TASK is the name of a locked task, as in celery -A YOUR_APP locks tasks.
    """
    app = target.need_app("try")
    call = _call(app, task, args_text, kwargs_text, headers)
    queue = queue or app.queue_of(call.task)
    sent = Sent(lambda: (queue, call.headers))
    name = app.extension.name_of(call.task, call.args, call.kwargs, sent)
    options = app.extension.options(call.task)
    options = app.extension.computed(call.task, call.args, call.kwargs, sent, options)
    keys = name.keys if isinstance(name, Names) else (Key(name, rate=options.rate),)
    if target.settings.is_quorum:
        forecast = _of_quorum(keys, options)
    else:
        options = replace(options, mode=_mode_now(target, task, options))
        forecast = try_call(target.store, task, keys, options, app.realm)
        unique = _unique_key(app, call)
        sent_before = target.store.find_call(*unique) if unique else None
        if sent_before is not None:
            forecast = not_sent(forecast, sent_before, options)
    if machine:
        return render.as_json(
            {"task": task, "queue": queue, "mode": options.mode, **_fields(forecast)}
        )
    lines = list(render.table(("LOCK", "HELD", "WAITING", "NOW"), map(_lock_row, forecast.locks)))
    lines += ["", forecast.sentence]
    if forecast.outcome != DUPLICATE:
        lines += _without_worker(target, app, queue, task)
    return render.show(lines)


@click.command("forget-call")
@click.argument("task")
@_arguments
@reason
@as_json
@with_target
def forget_call_command(  # noqa: PLR0917  # click gives them by name
    target: Target,
    task: str,
    args_text: str,
    kwargs_text: str,
    headers: tuple[str, ...],
    why_text: str,
    *,
    machine: bool,
) -> None:
    """Let a unique call of TASK be sent again after its message was lost (lock_unique).

    TASK is the name of a locked task, as in celery -A YOUR_APP locks tasks.
    """
    app = target.need_app("forget-call")
    unique = _unique_key(app, _call(app, task, args_text, kwargs_text, headers))
    if unique is None:
        msg = f"each call of the task {task!r} is sent: it has no lock_unique, or takes no lock"
        raise Refused(msg)
    name, key = unique
    by = target.operator(why=why_text)
    before = forget_call(target.store, name, key, by)
    told = f"Task {before} does not count as sent any more: the next call like it is sent."
    done(target, by, machine, "forget-call", name, told)


class _Call(NamedTuple):
    """A call, as the options of a command describe it."""

    task: Any
    args: Any
    kwargs: Any
    headers: dict[str, str]


def _call(
    app: AppSide, task: str, args_text: str, kwargs_text: str, headers: Iterable[str]
) -> _Call:
    """Return the call of a locked task.

    Raises:
        click.UsageError: an option is not valid.
        Refused: the app has no such task, or it takes no lock.
    """
    args, kwargs = _parsed("--args", args_text), _parsed("--kwargs", kwargs_text)
    given = _headers(headers)
    app.load_tasks()
    return _Call(_locked_task(app, task), args, kwargs, given)


def _unique_key(app: AppSide, call: _Call) -> tuple[str, str] | None:
    """Return the lock name and the unique key of a call; None if each call is sent."""
    options = app.extension.options(call.task)
    if options.unique is None or options.mode != ENFORCE:
        return None
    sending = {"headers": call.headers}
    return app.extension.unique_key(call.task, call.args, call.kwargs, sending)


def _fields(forecast: Forecast) -> dict[str, Any]:
    return {name: getattr(forecast, name) for name in Forecast.__dataclass_fields__}


def _lock_row(lock: LockNow) -> Sequence[object]:
    held = f"{lock.held}/{lock.limit}" if lock.limit < NO_LIMIT else str(lock.held)
    return lock.name, held, lock.waiting, lock.told


_KINDS: Final[Mapping[str, tuple[type, str]]] = {
    "--args": (list, "a list, such as '[42]'"),
    "--kwargs": (dict, "an object, such as '{\"account_id\": 42}'"),
}


def _parsed(option: str, text: str) -> Any:
    """Return the value of an option that is JSON.

    Raises:
        click.UsageError: it is not JSON, or of another kind.
    """
    kind, wanted = _KINDS[option]
    shown = printable(text, LONGEST_SHOWN)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{option} is {shown}: it is not JSON ({error}). Give {wanted}."
        raise click.UsageError(printable(msg)) from None
    if not isinstance(value, kind):
        msg = f"{option} is {shown}: it is {a_kind(value)}. Give {wanted}."
        raise click.UsageError(msg)
    return value


def _headers(given: Iterable[str]) -> dict[str, str]:
    pairs = [header.partition("=") for header in given]
    for name, sign, _ in pairs:
        if not name or not sign:
            msg = (
                f"--header {printable(name, LONGEST_SHOWN)}: write NAME=VALUE, such as tenant=acme"
            )
            raise click.UsageError(msg)
    return {name: value for name, _, value in pairs}


def _locked_task(app: AppSide, name: str) -> Any:
    """Return a locked task of the app.

    Raises:
        Refused: the app has no such task, or it takes no lock.
    """
    locked = app.extension.declared()
    if name in locked:
        return app.app.tasks[name]
    if name in app.app.tasks:
        msg = f"the task {name!r} is not a LockedTask, and takes no lock. Give it base=LockedTask"
        raise Refused(msg)
    hint = meant(name, locked) or " See locks tasks."
    msg = f"the app has no locked task {name!r}.{hint}"
    raise Refused(msg)


def _mode_now(target: Target, task: str, options: LockOptions) -> str:
    """Return the mode of a task, with the switches in Redis."""
    modes = Modes({task: options.mode})
    modes.apply(target.store.switches())
    return modes.of(task)


def _of_quorum(keys: Iterable[Key], options: LockOptions) -> Forecast:
    told = (
        "What would happen is not known: the locks are on a quorum of servers, of which no command "
        "reads the state."
    )
    locks = tuple(LockNow(key.name, key.limit or options.limit, told="not known") for key in keys)
    return Forecast("unknown", told, locks=locks)


def _without_worker(target: Target, app: AppSide, queue: str, task: str) -> list[str]:
    """Return a line if no live worker would take the message."""
    if target.settings.is_quorum or not queue:
        return []
    workers = target.store.consumers(app.realm, queue, task)
    if any(workers.values()):
        return []
    told = f"no live worker with this task consumes the queue {queue!r}"
    return [f"But {told}: the message would stay at the broker until one starts."]

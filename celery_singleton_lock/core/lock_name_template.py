"""Computes a lock's name from the declaration of its task and the arguments of a call (pure).

:func:`compile_name` compiles a declaration once; :meth:`Namer.name` runs for each message. A name
is the same in every process: arguments are bound to the signature, with defaults applied, and are
written as :mod:`celery_singleton_lock.core.canonical_value` says. A str in a template is not
quoted, so ``account:{account_id}`` gives the same lock for ``42`` and ``"42"``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from celery_singleton_lock.core.call_signature import ArgumentsDoNotBind, Signature
from celery_singleton_lock.core.canonical_value import digest, kind_of, surrogate_in, written_all
from celery_singleton_lock.core.lock_name_errors import OF_FUNCTION, OF_TASK, Unnameable, Wording
from celery_singleton_lock.core.template_field import HEADERS, QUEUE, Field
from celery_singleton_lock.errors import ConfigurationError, LockNameError
from celery_singleton_lock.message_text import a_kind, named

__all__ = [
    "OF_FUNCTION",
    "OF_TASK",
    "ArgumentsDoNotBind",
    "Namer",
    "Sent",
    "Wording",
    "compile_name",
]


def is_computed(value: object) -> bool:
    """Return whether an option is a template or a callable, and not a value."""
    return callable(value) or (isinstance(value, str) and "{" in value)


class Sent(NamedTuple):
    """What is known about a call besides its arguments.

    Args:
        queue_and_headers: returns the queue of the call's message, and the headers that its
            sender has set.
        call: lock options of this call alone.
    """

    queue_and_headers: Callable[[], tuple[str, Mapping[str, Any]]]
    call: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Namer:
    """Names the lock of each call of one task. Made by :func:`compile_name`."""

    _who: str
    _wording: Wording
    _signature: Signature
    _rule: Callable[[dict[str, Any]], str]
    _reads_message: bool = False

    def name(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        sent: Sent | None = None,
    ) -> str:
        """Return the name of the lock that a call with these arguments takes.

        Args:
            args: positional arguments, as the message has them.
            kwargs: keyword arguments, as the message has them.
            sent: what else is known of the call; None if nothing is.

        Returns:
            The name: not empty, and the same in every process.

        Raises:
            ArgumentsDoNotBind: the task cannot be called with these arguments.
            LockNameError: an argument is missing, is None in a template, or cannot be written; or
                the ``lock_key`` callable raised an error (the cause), or returned no text.
        """
        arguments = self._signature.bind(args, kwargs or {})
        if self._reads_message:
            queue, headers = sent.queue_and_headers() if sent else ("", {})
            arguments = {**arguments, QUEUE: queue or None, HEADERS: headers}
        try:
            name = self._rule(arguments)
            name.encode()
        except Unnameable as error:
            msg = f"{self._who}: {error.told(self._wording)}"
            raise LockNameError(msg) from error.__cause__
        except UnicodeEncodeError as error:
            where = surrogate_in(arguments)
            msg = f"{self._who}: {where} holds a lone surrogate. Send valid Unicode."
            raise LockNameError(msg) from error
        return name


def compile_name(
    task_name: str,
    run: Callable[..., Any],
    *,
    lock_key: str | Callable[..., str] | None = None,
    lock_args: Sequence[str] | None = None,
    bound: bool = False,
    wording: Wording = OF_TASK,
) -> Namer:
    """Check the declaration of a lock name, and compile it.

    Without ``lock_key`` and ``lock_args`` the name is the task's name and a digest of all its
    arguments.

    Args:
        task_name: name of the task.
        run: the task's function; its signature is used.
        lock_key: the whole name as a template, or a callable that returns it.

            A template has fields, and literal text, so that tasks do not share a lock by accident.
            The fields are:

            * ``{account_id}``: an argument.
            * ``{order[id]}``: a part of a dict or list. ``{order.id}`` is refused, because
              arguments are plain data.
            * ``{secret!h}``: a digest of an argument. A short secret can still be guessed.
            * ``{day:%Y-%m}``: a formatted number, date or text. The format must not depend on the
              locale.
            * ``{__queue__}``: the queue of the task's message.
            * ``{__headers__[tenant]}``: a header that the sender of the message has set.

            A callable is called with the task's arguments, defaults applied. It must do no I/O.
        lock_args: instead of ``lock_key``, the arguments that are part of the name. The name is
            the task's name and the canonical text of their values (so ``42`` and ``"42"`` are two
            locks, and None is a value). An empty list is one lock for the whole task.
        bound: ``run`` has a first parameter that is not an argument of the task (``self``).
        wording: words for the task and for ``lock_key`` in error texts.

    Returns:
        The namer of the task's calls.

    Raises:
        ConfigurationError: the declaration is wrong. The message names task and option, and says
            what to change.
    """
    signature = Signature(task_name, run, wording, bound=bound)
    declared = _Declaration(task_name, signature, wording)
    if lock_key is not None and lock_args is not None:
        msg = (
            f"task {task_name}: lock_key and lock_args are both given, and each names the "
            "whole lock. Keep lock_key, and put the names of lock_args into its template."
        )
        raise ConfigurationError(msg)
    if lock_args is not None:
        rule, option = declared.by_arguments(lock_args), "lock_args"
    elif lock_key is None:
        return Namer(signature.who, wording, signature, declared.by_digest())
    elif isinstance(lock_key, str):
        rule, option = declared.by_template(lock_key), wording.key
    else:
        rule, option = declared.by_callable(lock_key), wording.key
    told = dataclasses.replace(wording, leave_out=f"leave it out of {option}")
    return Namer(signature.who, told, signature, rule, declared.reads_message)


def compile_value(
    task_name: str,
    run: Callable[..., Any],
    value: str | Callable[..., object],
    option: str,
    *,
    bound: bool = False,
    wording: Wording = OF_TASK,
) -> Callable[[Sequence[Any], Mapping[str, Any], Sent | None], object]:
    """Check an option that is computed from the arguments of a call, and compile it.

    Args:
        task_name: name of the task.
        run: the task's function; its signature is used.
        value: a template, as of :func:`compile_name`, or a callable with the task's parameters.
        option: name of the option, for errors.
        bound: ``run`` has a first parameter that is not an argument of the task.
        wording: words for the task in error texts.

    Returns:
        A function of the arguments of a call that returns the text of the template, or what the
        callable returns. It raises ``ArgumentsDoNotBind``, or ``Unnameable`` with the reason.

    Raises:
        ConfigurationError: the template or callable does not fit the task.
    """
    words = dataclasses.replace(
        wording,
        key=option,
        has="is",
        callable_key=f"callable {option}",
        if_none=f"{option} is not known",
        several="it is one value",
    )
    signature = Signature(task_name, run, words, bound=bound)
    declared = _Declaration(task_name, signature, words)
    rule: Callable[[dict[str, Any]], object]
    if isinstance(value, str):
        rule = declared.by_template(value, may_be_a_field=True)
    else:
        rule = declared.by_callable(value, _any)

    def compute(args: Sequence[Any], kwargs: Mapping[str, Any], sent: Sent | None) -> object:
        arguments = signature.bind(args, kwargs)
        if declared.reads_message:
            queue, headers = sent.queue_and_headers() if sent else ("", {})
            arguments = {**arguments, QUEUE: queue or None, HEADERS: headers}
        try:
            return rule(arguments)
        except Unnameable as error:
            msg = f"{signature.who}: {error.told(words)}"
            raise NotComputable(msg) from error.__cause__

    return compute


class NotComputable(Exception):
    """An argument is missing or None, or a callable has raised an error (the cause)."""


def literal_start(key: object) -> str:
    """Return the text with which each name of a template begins; empty for a callable."""
    if not isinstance(key, str):
        return ""
    return next((literal for literal, *_ in string.Formatter().parse(key)), "")


def fields_in(template: str) -> list[str]:
    """Return the fields of a template, with their formats."""
    parts = string.Formatter().parse(template)
    return [f"{name}!{kind}:{spec}" for _, name, spec, kind in parts if name is not None]


# --- the declaration ------------------------------------------------------------------------------

_Rule = Callable[[dict[str, Any]], str]

_FIELD = re.compile(r"(?P<first>[^\W\d]\w*)(?P<path>(?:\[[^\[\]]+\])*)")
_LOCALE = re.compile(r"%[^YmdHMSfjVGuUWwyz%]|(?<!%)n$")
"""Formats that depend on the locale: names of months, AM/PM …, and the number type n."""


class _Declaration:
    """The declaration of one task. Each ``by_…`` method returns a function that computes names."""

    def __init__(self, task: str, signature: Signature, wording: Wording) -> None:
        self._task = task
        self._signature = signature
        self._wording = wording
        self.reads_message = False

    def by_digest(self) -> _Rule:
        task = self._task
        return lambda arguments: f"{task}:{digest(written_all(arguments))}"

    def by_arguments(self, names: Sequence[str]) -> _Rule:
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            remedy = f"it must be a list of names: {self._signature.example(names)}"
            self._refuse("lock_args", names, remedy)
        if not names:
            return lambda _arguments: self._task
        fields = [self._field("lock_args", names, name) for name in names]
        prefix = f"{self._task}:"
        return lambda arguments: prefix + ",".join([field.written(arguments) for field in fields])

    def by_template(self, template: str, *, may_be_a_field: bool = False) -> _Rule:
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            remedy = f"{error}. Write {{{{ or }}}} for a brace that is text"
            self._refuse(self._wording.key, template, remedy)
        literals = any(char.isalnum() for literal, *_ in parts for char in literal)
        if not (literals or may_be_a_field):
            remedy = (
                f"it has no literal text, so unrelated {self._wording.kind}s would share locks. "
                'Begin with a word for what is locked: "account:{account_id}"'
            )
            self._refuse(self._wording.key, template, remedy)
        pattern, fields = "", []
        for literal, name, spec, conversion in parts:
            pattern += literal.replace("%", "%%")
            if name is not None:
                pattern += "%s"
                fields.append(self._template_field(template, name, spec or "", conversion))
        return lambda arguments: pattern % tuple([field.text(arguments) for field in fields])

    def by_callable(
        self, function: object, check: Callable[[object], Any] | None = None
    ) -> Callable[[dict[str, Any]], Any]:
        """Return a function that calls ``function``, and checks that it returns a name."""
        if not callable(function):
            remedy = f"{a_kind(function)} is neither a template nor a callable"
            if isinstance(function, (list, tuple, dict)):
                remedy += f"; {self._wording.several}"
            self._refuse(self._wording.key, function, remedy)
        if inspect.iscoroutinefunction(function):
            remedy = "it is a coroutine function, and is not awaited. Use a plain def"
            self._refuse(self._wording.key, function, remedy)
        problem = self._signature.mismatch(function)
        if problem:
            kind = self._wording.kind
            remedy = f"{problem}. Give it the {kind}'s signature: {self._signature}"
            self._refuse(self._wording.key, function, remedy)
        returned = check or _name_returned
        return lambda arguments: returned(_called(function, *self._signature.as_called(arguments)))

    def _template_field(self, template: str, name: str, spec: str, conversion: str | None) -> Field:
        shown = "{" + name + (f"!{conversion}" if conversion else "") + (spec and ":" + spec) + "}"
        if conversion not in {None, "h"}:
            remedy = f"{shown}: the only conversion is !h, for a digest. Leave !{conversion} out"
            self._refuse(self._wording.key, template, remedy)
        if spec and conversion:
            remedy = f"{shown}: a digest has no format. Leave out {':' + spec!r}"
            self._refuse(self._wording.key, template, remedy)
        if "{" in spec or _LOCALE.search(spec):
            remedy = f"{shown}: this format is nested, or depends on the locale. Use another one"
            self._refuse(self._wording.key, template, remedy)
        field = self._of_message(template, name) or self._field(self._wording.key, template, name)
        return dataclasses.replace(field, spec=spec, hashed=conversion == "h")

    def _of_message(self, template: str, name: str) -> Field | None:
        """Return a field for a part of the message; None if it names an argument."""
        match = _FIELD.fullmatch(name)
        if match is None or match["first"] not in {QUEUE, HEADERS}:
            return None
        if self._wording.kind != OF_TASK.kind:
            self._refuse(self._wording.key, template, f"{name!r} exists only for tasks")
        path = tuple(re.findall(r"\[([^\[\]]+)\]", match["path"]))
        if len(path) != (match["first"] == HEADERS):
            self._refuse(
                self._wording.key,
                template,
                f"{{{name}}}: write {{{QUEUE}}} for the queue of the message, and "
                f"{{{HEADERS}[tenant]}} for its header 'tenant'",
            )
        self.reads_message = True
        return Field(name, match["first"], path)

    def _field(self, option: str, value: object, name: str) -> Field:
        """Return the field for an argument, or a part of one, as written in an option."""
        match = _FIELD.fullmatch(name)
        if match is None:
            remedy = f"{name!r} is not the name of an argument, as in account_id or order[id]"
            if "." in name:
                remedy += f". {self._wording.looks_into}"
            wanted = name if name.startswith("__") else ""
            self._refuse(option, value, f"{remedy}. {self._signature.advice_on_names(wanted)}")
        first = match["first"]
        if not self._signature.accepts(first):
            remedy = (
                f"it names the argument {first!r}, which the {self._wording.kind} does not have. "
                f"{self._signature.advice_on_names(first)}"
            )
            self._refuse(option, value, remedy)
        path = tuple(re.findall(r"\[([^\[\]]+)\]", match["path"]))
        rest = None if first in self._signature.names else self._signature.rest
        return Field(name, first, path, rest)

    def _refuse(self, option: str, value: object, remedy: str) -> NoReturn:
        has = self._wording.has if option == self._wording.key else "is"
        shown = repr(value) if type(value).__module__ == "builtins" else f"<{named(type(value))}>"
        msg = f"{self._signature.who}: {option} {has} {shown}: {remedy}" + (
            "" if remedy.endswith("?") else "."
        )
        raise ConfigurationError(msg)


def _called(
    function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raised = f"raised {kind_of(error)}: {error}"
        raise Unnameable(lambda words: f"the {words.callable_key} {raised}") from error


def _any(value: object) -> object:
    return value


def _name_returned(name: object) -> str:
    if not isinstance(name, str) or not name:
        kind = "an empty str" if name == "" else a_kind(name)
        returned = f"returned {kind}. It must return the name, as a str"
        raise Unnameable(lambda words: f"the {words.callable_key} {returned}")
    return str(name)

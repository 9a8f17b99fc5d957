"""From a task's declaration and its wire arguments to the name of its lock (pure).

A declaration is compiled once, by :func:`compile_name`; each message then costs one
:meth:`Namer.name`. A name must come out the same in every process: so arguments are bound to the
signature first, with defaults applied, and written in one canonical way.

====================================================  ============================================
a wire value                                          is written as
====================================================  ============================================
None, bool, int, str                                  JSON
float                                                 JSON; 42.0 as 42; NaN and infinity refused
Decimal, UUID                                         the JSON string ``str(value)``
datetime, date, time                                  the JSON string ``value.isoformat()``
timedelta                                             its seconds
bytes                                                 the JSON string of its base64
Enum                                                  its value
list, tuple                                           JSON array
set                                                   JSON array, sorted
dict, dataclass                                       JSON object, sorted; keys as JSON writes them
object with ``__json__`` (kombu's hook)               what that returns
====================================================  ============================================

Anything else is refused, since it has no meaning outside of the process that made it. A str in a
template is put in as it is, so ``account:{account_id}`` gives one lock for ``42`` and ``"42"``.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import difflib
import enum
import hashlib
import inspect
import json
import math
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

from celery_singleton_lock.errors import ConfigurationError, LockNameError
from celery_singleton_lock.message_text import a_kind, named

DIGEST_LENGTH: Final = 32
"""Hex digits of a digest in a name: 128 bits of SHA-256."""


class ArgumentsDoNotBind(LockNameError):
    """The task itself cannot be called with these arguments, and fails with TypeError if it is.

    No lock is needed for that: let the task run unlocked, and fail by itself.
    """


class Sent(NamedTuple):
    """What is known of a call beside its arguments.

    Args:
        said: returns the queue of its message, and the headers that its sender has set.
        call: lock options of this call alone.
    """

    said: Callable[[], tuple[str, Mapping[str, Any]]]
    call: Mapping[str, Any] | None = None


QUEUE: Final = "__queue__"
HEADERS: Final = "__headers__"
"""Fields of a template that are read in the message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wording:
    """How errors speak of what takes the lock, and of the option that names it.

    Args:
        kind: what takes the lock.
        key: the option, a template or a callable.
        has: verb between the option and what is wrong in it.
        callable_key: the option where it is a callable.
        several: what to write for several locks.
        looks_into: how a template looks into a value.
        leave_out: how to leave an argument out of the name.
    """

    kind: str = "task"
    key: str = "lock_key"
    has: str = "is"
    callable_key: str = "callable lock_key"
    several: str = "for several locks use lock_keys"
    looks_into: str = "Wire values are plain data: look into them with [ ], not with a dot"
    leave_out: str = "leave it out with lock_key or lock_args"


OF_TASK: Final = Wording()

OF_FUNCTION: Final = Wording(
    kind="function",
    key="the key",
    callable_key="callable key",
    several="a key names one lock",
    looks_into="A template looks into dicts and lists, with [ ]. For an attribute use a callable "
    "key, such as lambda order: f'order:{order.id}'",
    leave_out="leave it out with a key that names the others",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Namer:
    """Names the lock of each call of one task. Made by :func:`compile_name`."""

    _who: str
    _wording: Wording
    _signature: _Signature
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
            args: positional arguments, as they came over the wire.
            kwargs: keyword arguments, as they came over the wire.
            sent: what else is known of the call; None if nothing is.

        Returns:
            The name: not empty, and the same in every process.

        Raises:
            ArgumentsDoNotBind: the task cannot be called like that.
            LockNameError: an argument is missing, is None in a template, or cannot be written; or
                the ``lock_key`` callable raised (then the cause), or returned no text.
        """
        arguments = self._signature.bind(args, kwargs or {})
        if self._reads_message:
            queue, headers = sent.said() if sent else ("", {})
            arguments = {**arguments, QUEUE: queue or None, HEADERS: headers}
        try:
            name = self._rule(arguments)
            name.encode()
        except _Unnameable as error:
            msg = f"{self._who}: {error.told(self._wording)}"
            raise LockNameError(msg) from error.__cause__
        except UnicodeEncodeError as error:
            where = _surrogate_in(arguments)
            msg = f"{self._who}: {where} holds half a surrogate pair. Send valid text."
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
    """Check how a task names its lock, and prepare for naming it quickly.

    Without ``lock_key`` and ``lock_args`` the name is the task's name and a digest of all its
    arguments.

    Args:
        task_name: name of the task.
        run: the task's function, of which the signature counts.
        lock_key: the whole name as a template, or a callable that returns it.

            A template has literal text, so that tasks share a lock by intention only, and fields:
            ``{account_id}``; ``{order[id]}`` looks into a dict or list (a dotted ``{order.id}`` is
            refused: wire values are plain data); ``{secret!h}`` puts in a digest of what
            ``{secret}`` would have (it hides, but a short secret can be guessed); ``{day:%Y-%m}``
            formats a number, date or text, as long as it reads the same under every locale.
            ``{__queue__}`` is the queue from which the message of a task came, and
            ``{__headers__[tenant]}`` a header that its sender has set.

            A callable is called as the task is, with defaults applied. It must do no I/O.
        lock_args: instead of ``lock_key``, the arguments that count; the name is the task's name
            and their values, as written above (so ``42`` and ``"42"`` are two locks, and None is a
            value). An empty list is one lock for the whole task.
        bound: ``run`` has a first parameter that is not an argument of the task (``self``).
        wording: how errors speak of the task and of ``lock_key``.

    Returns:
        What names each call.

    Raises:
        ConfigurationError: the declaration is wrong. The message names task, option and remedy.
    """
    signature = _Signature(task_name, run, wording, bound=bound)
    declared = _Declaration(task_name, signature, wording)
    if lock_key is not None and lock_args is not None:
        msg = (
            f"task {task_name}: lock_key and lock_args are both given, and each is the whole "
            "answer. Keep lock_key, or put the names of lock_args into its template."
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


# --- the declaration ------------------------------------------------------------------------------

_Rule = Callable[[dict[str, Any]], str]

_FIELD = re.compile(r"(?P<first>[^\W\d]\w*)(?P<path>(?:\[[^\[\]]+\])*)")
_LOCALE = re.compile(r"%[^YmdHMSfjVGuUWwyz%]|(?<!%)n$")
"""Formats that the locale of a process changes: month names, AM/PM …, and the number type n."""


class _Declaration:
    """How one task names its lock: each method checks one way, and returns the rule for it."""

    def __init__(self, task: str, signature: _Signature, wording: Wording) -> None:
        self._task = task
        self._signature = signature
        self._wording = wording
        self.reads_message = False

    def by_digest(self) -> _Rule:
        """Task name and digest of all arguments."""
        task = self._task
        return lambda arguments: f"{task}:{_digest(_written_all(arguments))}"

    def by_arguments(self, names: Sequence[str]) -> _Rule:
        """Task name and the values of some arguments."""
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            remedy = f"it must be a list of names: {self._signature.example(names)}"
            self._refuse("lock_args", names, remedy)
        if not names:
            return lambda _arguments: self._task
        fields = [self._field("lock_args", names, name) for name in names]
        prefix = f"{self._task}:"
        return lambda arguments: prefix + ",".join([field.written(arguments) for field in fields])

    def by_template(self, template: str) -> _Rule:
        """Literal text and the values of some arguments."""
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            remedy = f"{error}. Write a brace that is meant as text twice"
            self._refuse(self._wording.key, template, remedy)
        if not any(char.isalnum() for literal, *_ in parts for char in literal):
            remedy = (
                f"it has no literal text, so {self._wording.kind}s that have nothing in common "
                "would share locks. "
                'Begin with a word that says what is locked: "account:{account_id}"'
            )
            self._refuse(self._wording.key, template, remedy)
        pattern, fields = "", []
        for literal, name, spec, conversion in parts:
            pattern += literal.replace("%", "%%")
            if name is not None:
                pattern += "%s"
                fields.append(self._template_field(template, name, spec or "", conversion))
        return lambda arguments: pattern % tuple([field.text(arguments) for field in fields])

    def by_callable(self, function: object) -> _Rule:
        """Whatever a function of the arguments returns."""
        if not callable(function):
            remedy = f"{a_kind(function)} is neither a template nor a callable"
            if isinstance(function, (list, tuple, dict)):
                remedy += f"; {self._wording.several}"
            self._refuse(self._wording.key, function, remedy)
        if inspect.iscoroutinefunction(function):
            remedy = "it is a coroutine function. The name is needed at once: use a plain def"
            self._refuse(self._wording.key, function, remedy)
        problem = self._signature.mismatch(function)
        if problem:
            kind = self._wording.kind
            remedy = f"{problem}. Give it the {kind}'s signature: {self._signature}"
            self._refuse(self._wording.key, function, remedy)
        return lambda arguments: _called(function, *self._signature.as_called(arguments))

    def _template_field(
        self, template: str, name: str, spec: str, conversion: str | None
    ) -> _Field:
        """Check one replacement field."""
        shown = "{" + name + (f"!{conversion}" if conversion else "") + (spec and ":" + spec) + "}"
        if conversion not in {None, "h"}:
            remedy = f"{shown}: there is no !{conversion} here, only !h for a digest. Leave it out"
            self._refuse(self._wording.key, template, remedy)
        if spec and conversion:
            remedy = f"{shown}: a digest has no format. Leave out {':' + spec!r}"
            self._refuse(self._wording.key, template, remedy)
        if "{" in spec or _LOCALE.search(spec):
            remedy = f"{shown}: this format is nested, or reads differently under another locale"
            self._refuse(self._wording.key, template, remedy)
        field = self._of_message(template, name) or self._field(self._wording.key, template, name)
        return dataclasses.replace(field, spec=spec, hashed=conversion == "h")

    def _of_message(self, template: str, name: str) -> _Field | None:
        """Return a field that is read in the message; None if it names an argument."""
        match = _FIELD.fullmatch(name)
        if match is None or match["first"] not in {QUEUE, HEADERS}:
            return None
        if self._wording.kind != OF_TASK.kind:
            self._refuse(self._wording.key, template, f"{name!r} is known of a task only")
        path = tuple(re.findall(r"\[([^\[\]]+)\]", match["path"]))
        if len(path) != (match["first"] == HEADERS):
            self._refuse(
                self._wording.key,
                template,
                f"{{{name}}}: write {{{QUEUE}}} for the queue of the message, and "
                f"{{{HEADERS}[tenant]}} for its header 'tenant'",
            )
        self.reads_message = True
        return _Field(name, match["first"], path)

    def _field(self, option: str, value: object, name: str) -> _Field:
        """Check the name of an argument, as written in an option, and how to look into it."""
        match = _FIELD.fullmatch(name)
        if match is None:
            remedy = f"{name!r} is not the name of an argument, as in account_id or order[id]"
            if "." in name:
                remedy += f". {self._wording.looks_into}"
            wanted = name if name.startswith("__") else ""
            self._refuse(option, value, f"{remedy}. {self._signature.known(wanted)}")
        first = match["first"]
        if not self._signature.accepts(first):
            remedy = (
                f"it names the argument {first!r}, which the {self._wording.kind} does not have. "
                f"{self._signature.known(first)}"
            )
            self._refuse(option, value, remedy)
        path = tuple(re.findall(r"\[([^\[\]]+)\]", match["path"]))
        rest = None if first in self._signature.names else self._signature.rest
        return _Field(name, first, path, rest)

    def _refuse(self, option: str, value: object, remedy: str) -> NoReturn:
        """Raise the error that names task, option, value and remedy."""
        has = self._wording.has if option == self._wording.key else "is"
        shown = repr(value) if type(value).__module__ == "builtins" else f"<{named(type(value))}>"
        msg = f"{self._signature.who}: {option} {has} {shown}: {remedy}" + (
            "" if remedy.endswith("?") else "."
        )
        raise ConfigurationError(msg)


# --- the signature --------------------------------------------------------------------------------


class _Signature:
    """The arguments of a task, and how a message's are bound to them.

    Most tasks have plain parameters; those are bound with two dict operations. ``inspect`` does it
    for the others, and finds the words when a call does not fit.
    """

    def __init__(
        self, task: str, run: Callable[..., Any], wording: Wording, *, bound: bool
    ) -> None:
        self._kind = wording.kind
        self.who = f"{wording.kind} {task}"
        try:
            self._full = _signature_of(run, bound=bound)
            self._raw = _signature_of(run, bound=bound, follow_wrapped=False)
        except (TypeError, ValueError) as error:
            msg = f"{self.who}: the signature of {run!r} cannot be read. Use a plain function."
            raise ConfigurationError(msg) from error
        self._bound_to = _bound_to(run)
        parameters = self._full.parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        self.names = frozenset(self._full.parameters)
        self.rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._plain = kinds <= {
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        }
        self._positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._all = len(parameters) if len(self._positional) == len(parameters) else -1
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def __str__(self) -> str:
        return str(self._full.replace(return_annotation=inspect.Signature.empty))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return every argument by name, defaults applied."""
        if self._plain and isinstance(args, (list, tuple)) and isinstance(kwargs, dict):
            given = dict(zip(self._positional, args))  # noqa: B905  # the lengths are compared below
            if not kwargs and len(args) == self._all:
                return given
            given.update(kwargs)
            arguments = self._defaults | given
            if len(given) == len(args) + len(kwargs) and arguments.keys() == self.names:
                return arguments
        return self._bind_any(args, kwargs)

    def _bind_any(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind whatever the kinds of the parameters; say why if it is not possible."""
        try:
            bound = self._full.bind(*args, **kwargs)
        except TypeError as error:
            msg = f"{self.who} cannot be called with its arguments: {error}."
            raise self._unbound(args, kwargs)(msg) from error
        bound.apply_defaults()
        return bound.arguments

    def _unbound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> type[LockNameError]:
        """Tell a call that fails by itself from one that a decorator's ``*args`` would let in.

        The latter would run, so it must not run unlocked.
        """
        try:
            self._raw.bind(*args, **kwargs)
        except TypeError:
            return ArgumentsDoNotBind
        return LockNameError

    def accepts(self, name: str) -> bool:
        """Whether an argument of this name may exist."""
        return name in self.names or self.rest is not None

    def known(self, wanted: str = "") -> str:
        """Say which arguments there are, and which was perhaps meant."""
        names = list(self._full.parameters)
        if wanted and wanted == self._bound_to and wanted not in {"self", "cls"}:
            rest = ", ".join(str(each) for each in self._full.parameters.values())
            shown = f"(self, {wanted}{rest and f', {rest}'})"
            return f"bind=True passes the task itself as the first parameter. Use def …{shown}"
        if wanted.startswith("__") and self._kind == "task":
            return (
                "Write {__queue__} for the queue of the message, and {__headers__[tenant]} for its "
                "header 'tenant', both in lock_key"
            )
        if not names:
            return f"The {self._kind} has no arguments"
        close = difflib.get_close_matches(wanted, names, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Use one of them"
        return f"It has: {', '.join(names)}. {hint}"

    def example(self, given: object) -> str:
        """Return what to write as a list of names, of what was given instead."""
        names = re.findall(r"\w+", given) if isinstance(given, str) else []
        known = [name for name in self._full.parameters if name not in self._variable()]
        use = names or known[:1] or ["account_id"]
        return f"use {json.dumps(use)}"

    def as_called(self, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments in the way in which the task's function takes them."""
        bound = inspect.BoundArguments(self._full, arguments)
        return bound.args, bound.kwargs

    def mismatch(self, function: Callable[..., Any]) -> str:
        """Say why ``function`` cannot be called as the task is; an empty string if it can."""
        try:
            other = inspect.signature(function)
        except (TypeError, ValueError):
            return ""  # nothing to be seen before it is called
        args, kwargs = self.as_called(dict.fromkeys(self.names - self._variable()))
        try:
            other.bind(*args, **kwargs)
        except TypeError as error:
            return f"it cannot take the {self._kind}'s arguments: {error}"
        mine = {name: place for place, name in enumerate(self._full.parameters)}
        for place, name in enumerate(other.parameters):
            if name in self._positional and mine[name] != place:
                return f"its parameter {name!r} stands in another place than the {self._kind}'s"
        return ""

    def _variable(self) -> set[str]:
        """Names of ``*args`` and ``**kwargs``."""
        variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        return {p.name for p in self._full.parameters.values() if p.kind in variable}


def _signature_of(
    run: Callable[..., Any], *, bound: bool, follow_wrapped: bool = True
) -> inspect.Signature:
    """Return the signature of ``run``, without ``self`` if that is still there."""
    signature = inspect.signature(run, follow_wrapped=follow_wrapped)
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]
    return signature.replace(parameters=parameters)


def _bound_to(run: Callable[..., Any]) -> str:
    """Return the parameter in which a bound task's function gets the task; empty if none."""
    if not inspect.ismethod(run):
        return ""
    return next(iter(inspect.signature(run.__func__).parameters), "")


# --- values ---------------------------------------------------------------------------------------


class _Unnameable(Exception):
    """A value cannot be part of a name.

    Args:
        told: says which, and what to do, in the words of who declared the name.
    """

    def __init__(self, told: Callable[[Wording], str]) -> None:
        super().__init__()
        self.told = told


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """One value of a name.

    Args:
        shown: as the user wrote it: ``order[id]``.
        first: the argument.
        path: keys to follow from there.
        rest: name of the task's ``**kwargs``, if the argument is to be found in it.
        spec: format.
        hashed: put in a digest.
    """

    shown: str
    first: str
    path: tuple[str, ...] = ()
    rest: str | None = None
    spec: str = ""
    hashed: bool = False

    def text(self, arguments: dict[str, Any]) -> str:
        """Return the value as a template shows it."""
        value = self._value(arguments)
        if type(value) is str and not (self.spec or self.hashed):
            return value
        if value is None and self.first == QUEUE:
            msg = f"{{{QUEUE}}} is not known: this call has come through no queue"
            raise _Unnameable(lambda _: msg)
        if value is None:
            raise _Unnameable(
                lambda words: (
                    f"argument {self.shown!r} is None, so all such calls would share one lock. "
                    f"Send a value, or use a {words.callable_key} that says what None means"
                )
            )
        text = _text(self.shown, value)
        if self.spec:
            return self._formatted(value)
        return _digest(text) if self.hashed else text

    def written(self, arguments: dict[str, Any]) -> str:
        """Return the value in its canonical form."""
        return _written(self.shown, self._value(arguments))

    def _value(self, arguments: dict[str, Any]) -> Any:
        """Find the value."""
        source = arguments if self.rest is None else arguments[self.rest]
        looked_into = self.first
        try:
            value = source[self.first]
            for key in self.path:
                if not isinstance(value, (Mapping, Sequence)) or isinstance(value, _TEXTS):
                    raise _Unnameable(partial(self._not_inside, looked_into, value))
                value, looked_into = _item(value, key), f"{looked_into}[{key}]"
        except (LookupError, TypeError, ValueError) as error:
            msg = f"argument {self.shown!r} is missing from this call. Send it, or rename the field"
            if self.first == HEADERS:
                msg = (
                    f"the message has no header {self.path[0]!r}. Send it: "
                    f"apply_async(headers={{{self.path[0]!r}: …}})"
                )
            raise _Unnameable(lambda _: msg) from error
        return value

    def _not_inside(self, looked_into: str, value: object, words: Wording) -> str:
        """Say that a value has nothing inside; not what it is, since that may be a secret."""
        if value is None:
            return (
                f"argument {looked_into!r} is None, and {{{self.shown}}} looks into it. Send a dict"
            )
        return (
            f"argument {looked_into!r} is {a_kind(value)}, and {{{self.shown}}} looks into a dict "
            f"or list. Write {{{looked_into}}} in {words.key}, or send a dict"
        )

    def _formatted(self, value: Any) -> str:
        """Apply the format."""
        if isinstance(value, enum.Enum):
            value = value.value
        try:
            if not isinstance(value, _FORMATTABLE):
                raise TypeError
            return format(value, self.spec)
        except (TypeError, ValueError, ArithmeticError) as error:
            msg = f"argument {self.shown!r} is {a_kind(value)}, which {self.spec!r} cannot format"
            raise _Unnameable(lambda _: msg) from error


def _item(value: Any, key: str) -> Any:
    """Look into a dict (of which JSON has made all keys str) or a list."""
    if isinstance(value, Mapping):
        return value[int(key)] if key not in value and key.isdecimal() else value[key]
    return value[int(key)]


def _called(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Ask the user's function."""
    try:
        name = function(*args, **kwargs)
    except Exception as error:
        raised = f"raised {_kind(error)}: {error}"
        raise _Unnameable(lambda words: f"the {words.callable_key} {raised}") from error
    if not isinstance(name, str) or not name:
        kind = "an empty str" if name == "" else a_kind(name)
        returned = f"returned {kind}. It must return the name, as a str"
        raise _Unnameable(lambda words: f"the {words.callable_key} {returned}")
    return str(name)


_TEXTS: Final = (str, bytes, bytearray)
"""Sequences that a template does not look into."""

_ATOMS: Final = frozenset({str, int, bool, type(None)})
"""Types that are plain as they are."""

_WIDE: Final = 2**63
"""Integers below this one are written without a detour."""

_FORMATTABLE: Final = (str, int, float, decimal.Decimal, dt.date, dt.time)

_write: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"), check_circular=False
).encode


def _text(shown: str, value: Any) -> str:
    """Return the canonical form as people read it: a string without its quotes."""
    if type(value) is str:
        return value
    if type(value) is int and -_WIDE < value < _WIDE:
        return str(value)
    return _written(shown, value, lambda plain: plain if isinstance(plain, str) else _write(plain))


def _written(shown: str, value: Any, write: Callable[[Any], str] = _write) -> str:
    """Return the canonical form of an argument's value."""
    try:
        return write(_plain(value))
    except Exception as error:  # the user's __json__ may raise anything
        reason = str(error) if type(error) is _NotPlain else f"{_kind(error)} while writing it"
        msg = f"argument {shown!r} cannot be part of a lock name: {reason}. Send plain data, or "
        raise _Unnameable(lambda words: msg + words.leave_out) from error


def _written_all(arguments: dict[str, Any]) -> str:
    """Return the canonical form of all arguments, as one JSON object."""
    pairs = [f"{_write(name)}:{_written(name, arguments[name])}" for name in sorted(arguments)]
    return "{" + ",".join(pairs) + "}"


def _digest(text: str) -> str:
    """Return the shortened SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_LENGTH]


def _kind(value: object) -> str:
    """Return the name of a value's type, which is all that an error may show of it."""
    return type(value).__name__


def _surrogate_in(arguments: dict[str, Any]) -> str:
    """Say which argument cannot be encoded."""
    for name, value in arguments.items():
        with suppress(_Unnameable):  # of another argument, which is in no name
            if re.search("[\ud800-\udfff]", _written(name, value)):
                return f"argument {name!r}"
    return "its lock name"


class _NotPlain(TypeError):
    """A value that has no canonical form; says why."""


def _plain(value: Any) -> Any:
    """Return what JSON can write, the same for what is the same on both ends of the wire."""
    if type(value) in _ATOMS:
        return value
    for kind, plain in _PLAIN:
        if isinstance(value, kind):
            return plain(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return {name: _plain(getattr(value, name)) for name in fields}
    if hasattr(type(value), "__json__"):
        return _plain(value.__json__())
    msg = f"{a_kind(value)} means nothing in another process"
    raise _NotPlain(msg)


def _plain_float(value: float) -> float:
    """42.0 is 42, since senders in other languages do not tell them apart."""
    if not math.isfinite(value):
        msg = f"{value} equals nothing, or is no number"
        raise _NotPlain(msg)
    return int(value) if value.is_integer() else float(value)


def _plain_decimal(value: decimal.Decimal) -> str:
    """As it travels: 1.0 and 1.00 stay two values, since older senders leave only the text."""
    if not value.is_finite():
        msg = f"{value} equals nothing, or is no number"
        raise _NotPlain(msg)
    return str(value)


def _plain_dict(value: Mapping[Any, Any]) -> dict[str, Any]:
    """All keys str, as JSON makes them."""
    plain = {_plain_key(key): _plain(item) for key, item in value.items()}
    if len(plain) < len(value):
        msg = "two keys of its dict read the same in JSON"
        raise _NotPlain(msg)
    return plain


def _plain_key(key: Any) -> str:
    """Return a key as JSON writes it."""
    plain = _plain(key)
    if isinstance(plain, (dict, list)):
        msg = f"{a_kind(key)} cannot be a key in JSON"
        raise _NotPlain(msg)
    return plain if isinstance(plain, str) else _write(plain)


_PLAIN: Final[tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...]] = (
    (enum.Enum, lambda value: _plain(value.value)),  # before str and int: it may be one of them
    (str, str.__str__),
    (int, int),
    (float, _plain_float),
    (dict, _plain_dict),
    ((list, tuple), lambda value: [_plain(item) for item in value]),
    (decimal.Decimal, _plain_decimal),
    (uuid.UUID, str),
    ((dt.date, dt.time), lambda value: value.isoformat()),
    (dt.timedelta, lambda value: _plain_float(value.total_seconds())),
    ((bytes, bytearray), lambda value: base64.b64encode(value).decode()),
    ((set, frozenset), lambda value: sorted([_plain(item) for item in value], key=_write)),
    (Mapping, _plain_dict),
)
"""Type -> its plain form; the first that fits."""

"""The parameters of a task, and how the arguments of a call are bound to them (pure)."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from celery_singleton_lock.core.lock_name_errors import Wording
from celery_singleton_lock.errors import ConfigurationError, LockNameError


class ArgumentsDoNotBind(LockNameError):
    """The task cannot be called with these arguments, and raises TypeError if it is.

    The call runs without the lock: it fails before the body starts.
    """


class Signature:
    """The parameters of a task.

    Args:
        task: name of the task, for errors.
        run: the task's function.
        wording: words for the task in error texts.
        bound: whether ``run`` has a first parameter that is not an argument of the task.

    Attributes:
        who: the task, as errors name it.
        names: names of all parameters.
        rest: name of ``**kwargs``; None if there is none.

    Raises:
        ConfigurationError: the signature of ``run`` cannot be read.
    """

    def __init__(
        self, task: str, run: Callable[..., Any], wording: Wording, *, bound: bool
    ) -> None:
        self._kind = wording.kind
        self.who: str = f"{wording.kind} {task}"
        try:
            self._full = _signature_of(run, bound=bound)
            self._raw = _signature_of(run, bound=bound, follow_wrapped=False)
        except (TypeError, ValueError) as error:
            msg = f"{self.who}: the signature of {run!r} cannot be read. Use a plain function."
            raise ConfigurationError(msg) from error
        self._bound_to = _bound_to(run)
        parameters = self._full.parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        self.names: Final = frozenset(self._full.parameters)
        self.rest: Final = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
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
        """Return each argument by name, with defaults applied.

        Raises:
            ArgumentsDoNotBind: the task cannot be called with these arguments.
            LockNameError: a decorator of the task accepts them, but the task's function does not.
        """
        # Plain parameters need only two dict operations. inspect is slower, but explains an error.
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
        try:
            bound = self._full.bind(*args, **kwargs)
        except TypeError as error:
            msg = f"{self.who} cannot be called with its arguments: {error}."
            raise self._unbound(args, kwargs)(msg) from error
        bound.apply_defaults()
        return bound.arguments

    def _unbound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> type[LockNameError]:
        """Return the type of the error for arguments that do not bind.

        A decorator with ``*args`` accepts any arguments, so its body would run before the task
        fails. It must not run without the lock.
        """
        try:
            self._raw.bind(*args, **kwargs)
        except TypeError:
            return ArgumentsDoNotBind
        return LockNameError

    def accepts(self, name: str) -> bool:
        """Return whether an argument of this name may exist."""
        return name in self.names or self.rest is not None

    def advice_on_names(self, wanted: str = "") -> str:
        """Return advice for an error text: the arguments that exist, and the most similar one."""
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
        """Return advice for an error text: a list of names to write instead of ``given``."""
        names = re.findall(r"\w+", given) if isinstance(given, str) else []
        known = [name for name in self._full.parameters if name not in self._variable()]
        use = names or known[:1] or ["account_id"]
        return f"use {json.dumps(use)}"

    def as_called(self, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for a call of the task's function."""
        bound = inspect.BoundArguments(self._full, arguments)
        return bound.args, bound.kwargs

    def mismatch(self, function: Callable[..., Any]) -> str:
        """Return why ``function`` cannot take the task's arguments; empty if it can."""
        try:
            other = inspect.signature(function)
        except (TypeError, ValueError):
            return ""  # unknown until it is called
        first = next(iter(other.parameters), "")
        if first in {"self", "cls"} and first not in self.names:
            return f"it is called without {first!r}: in a class, put @staticmethod above it"
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        single = [name for name, each in other.parameters.items() if each.kind is kind]
        if single == ["args", "kwargs"] and not self.names & {"args", "kwargs"}:
            return f"it gets the {self._kind}'s arguments themselves, not a list and a dict of them"
        args, kwargs = self.as_called(dict.fromkeys(self.names - self._variable()))
        try:
            other.bind(*args, **kwargs)
        except TypeError as error:
            return f"it cannot take the {self._kind}'s arguments: {error}"
        mine = {name: place for place, name in enumerate(self._full.parameters)}
        for place, name in enumerate(other.parameters):
            if name in self._positional and mine[name] != place:
                return f"its parameter {name!r} has another position than the {self._kind}'s"
        return ""

    def _variable(self) -> set[str]:
        variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        return {p.name for p in self._full.parameters.values() if p.kind in variable}


def _signature_of(
    run: Callable[..., Any], *, bound: bool, follow_wrapped: bool = True
) -> inspect.Signature:
    """Return the signature of ``run``, without ``self`` if it has that."""
    signature = inspect.signature(run, follow_wrapped=follow_wrapped)
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]
    return signature.replace(parameters=parameters)


def _bound_to(run: Callable[..., Any]) -> str:
    """Return the name of the first parameter of a bound method; empty for a function."""
    if not inspect.ismethod(run):
        return ""
    return next(iter(inspect.signature(run.__func__).parameters), "")

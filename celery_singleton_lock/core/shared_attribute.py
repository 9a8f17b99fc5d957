"""An attribute that is computed when it is first read, and is one object for all threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class SharedAttribute(Generic[T]):
    """Decorates a method that returns the attribute's value.

    From Python 3.12 on, ``functools.cached_property`` returns two different objects to two threads
    that read it first at the same time. Here, both threads get the same one.

    Args:
        make: the method. It may be called more than once; the first result is used.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the value under the attribute's name, so that Python finds it without a call."""
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> SharedAttribute[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> T | SharedAttribute[T]:
        """Return the value."""
        if instance is None:
            return self
        # dict.setdefault is atomic: the first result counts for all threads.
        value: T = vars(instance).setdefault(self._name, self._make(instance))
        return value

"""How errors call what they were given (pure)."""

from __future__ import annotations


def a_kind(value: object) -> str:
    """Return what a value is, with its article: ``an int``. The value itself may be a secret."""
    kind = named(type(value))
    return f"{'an' if kind[0] in 'aeioAEIO' else 'a'} {kind}"


def named(kind: type) -> str:
    """Return the name of a class as people import it: redis-py has two of each name."""
    module = kind.__module__
    if module == "builtins":
        return kind.__name__
    return f"{module.rpartition('.')[0] if module.startswith('redis.') else module}.{kind.__name__}"

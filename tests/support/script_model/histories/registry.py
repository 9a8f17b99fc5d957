"""All histories by name."""

from __future__ import annotations

from collections.abc import Callable

from support.script_model.world import World

History = Callable[[World], None]
HISTORIES: dict[str, History] = {}


def history(function: History) -> History:
    HISTORIES[function.__name__] = function
    return function

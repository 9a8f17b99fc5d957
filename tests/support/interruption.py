"""Exceptions that come from outside, at any line: a soft time limit, or Ctrl-C."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType

from billiard.exceptions import SoftTimeLimitExceeded


class Injected:
    """Raises SoftTimeLimitExceeded at the n-th line of some modules that this thread executes.

    Not where a `with` block begins or ends: tracing sees a line there, but the interpreter lets no
    asynchronous exception in between `__enter__` and the block, nor the block and `__exit__`.

    Args:
        at: which line; counted from one.
        modules: in which it counts.

    Attributes:
        where: function and line; None if so many lines were not executed.
    """

    def __init__(self, at: int, *modules: ModuleType) -> None:
        self._left = at
        self._files = {Path(str(module.__file__)) for module in modules}
        self.where: str | None = None

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *exc):
        sys.settrace(self._before)

    def _enter_frame(self, frame, event, arg):
        return self._in_frame if Path(frame.f_code.co_filename) in self._files else None

    def _in_frame(self, frame, event, arg):
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith("with "):
            self._left -= 1
            if self._left == 0:
                self.where = (
                    f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}"
                )
                raise SoftTimeLimitExceeded(self.where)
        return self._in_frame

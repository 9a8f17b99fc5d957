"""The entry points of the commands, also if the package runs from its checkout."""

from __future__ import annotations

import re
from importlib.metadata import entry_points, version
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def metadata_path(folder: Path) -> list[str]:
    """Return the folders to put first on PYTHONPATH so that ``celery`` finds the commands."""
    if entry_points(group="celery.commands", name="locks"):
        return []
    section = re.search(
        r'entry-points."celery.commands"\]\n(.*?)\n\n', PYPROJECT.read_text(), re.DOTALL
    )
    home = folder / "celery_singleton_lock-0.dist-info"
    home.mkdir(exist_ok=True)
    release = version("celery-singleton-lock")
    (home / "METADATA").write_text(f"Name: celery-singleton-lock\nVersion: {release}\n")
    lines = section[1].replace('"', "")
    (home / "entry_points.txt").write_text(f"[celery.commands]\n{lines}\n")
    return [str(folder)]

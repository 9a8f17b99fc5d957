"""An older version of this repository, for tests of upgrades."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class OlderVersion:
    """An older version with its own tests, whose apps fit its modules.

    Args:
        folder: folder of the version. Workers start there, so that Python imports from there.
    """

    folder: Path

    def worker(self) -> dict[str, Any]:
        """Return the options of a ``CeleryWorker`` of this version."""
        return {"env": self.environment, "cwd": self.folder}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a worker of this version."""
        # The folder of stubs has its old name in that version.
        parts = ("", "tests", "tests/support/light")
        return {"PYTHONPATH": os.pathsep.join(str(self.folder / part) for part in parts)}

    def file_of(self, module: str) -> Path:
        """Return the file that its workers import for a module."""
        shown = subprocess.run(
            [sys.executable, "-c", f"import {module} as it; print(it.__file__)"],
            env={**os.environ, **self.environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return Path(shown.stdout.strip())


def older_version(commit: str, folder: Path) -> OlderVersion:
    """Unpack a version from the history of this repository; skip the test if it is missing.

    Args:
        commit: hash of its commit.
        folder: folder to unpack it into.
    """
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"needs commit {commit[:7]}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as contents:
        contents.extractall(folder, filter="data")
    return OlderVersion(folder)

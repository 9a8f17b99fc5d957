"""The resource that the tasks write to: a register per key that refuses lower fencing tokens.

It is the resource of docs/guarantees.md: it stores the largest fencing token that it has seen, and
refuses lower ones. Each attempt to write is recorded, in the order of SQLite's transactions.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 30.0
"""Seconds to wait for SQLite: a process that is stopped in mid-transaction keeps it locked."""

TABLE = """
CREATE TABLE IF NOT EXISTS write (
    seq INTEGER PRIMARY KEY,
    t REAL, kind TEXT, run TEXT, pid INTEGER, fence INTEGER, accepted INTEGER
)
"""
WRITE = """
INSERT INTO write (t, kind, run, pid, fence, accepted)
SELECT ?, ?, ?, ?, ?, ? >= COALESCE((SELECT MAX(fence) FROM write), 0)
RETURNING accepted
"""


class Register:
    """The registers in a folder, one file per key.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write(self, key: str, fence: int, run: str, kind: str = "write") -> bool:
        """Write under a fencing token; return whether that was accepted.

        Args:
            key: which register.
            fence: the writer's token.
            run: the writer.
            kind: ``enter`` for its first write. Later writes of its predecessors must fail.
        """
        with self._open(key) as base:
            values = (time.monotonic(), kind, run, os.getpid(), fence, fence)
            return bool(base.execute(WRITE, values).fetchone()[0])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all that was tried, per key in order."""
        for path in sorted(self.folder.glob("register-*")):
            key = path.name.removeprefix("register-")
            with self._open(key) as base:
                base.row_factory = sqlite3.Row
                for row in base.execute("SELECT * FROM write ORDER BY seq"):
                    yield {"key": key, **dict(row)}

    @contextmanager
    def _open(self, key: str) -> Iterator[sqlite3.Connection]:
        path = self.folder / f"register-{key}"
        base = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
        with closing(base):
            base.execute("PRAGMA synchronous = OFF")  # processes die here, machines do not
            base.execute("BEGIN IMMEDIATE")
            base.execute(TABLE)
            yield base
            base.execute("COMMIT")

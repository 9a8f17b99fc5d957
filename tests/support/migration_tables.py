"""The tables of docs/migrate that say what other packages' tests assert, from our tests.

Write them anew with ``PYTHONPATH=tests python -m support.migration_tables``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

LIBRARIES: Final = ("celery-singleton", "celery-once", "celery-heimdall")
FOLDER: Final = Path(__file__).parents[2] / "docs" / "migrate"
PAGES: Final = {library: FOLDER / f"{library}.md" for library in LIBRARIES}
TESTS: Final = "../../tests/integration/test_migration.py"
BEGIN: Final = "<!-- written by python -m support.migration_tables -->"
END: Final = "<!-- end -->"
WITHOUT: Final = {
    "celery-singleton": {
        "`clear_locks(app)` deletes all locks.": (
            "Not needed: entries of killed tasks end by themselves. After a purge, `forget_call` "
            "ends one call."
        ),
    },
    "celery-once": {
        "A file can be the backend.": (
            "No: it serves one machine, and has no leases. Locks are in Redis or Valkey."
        ),
        "Eager tasks set the key.": "No: nothing is sent, so no call is a duplicate.",
    },
    "celery-heimdall": {
        "The error has the seconds for which the lock stays.": (
            "No: a task counts until it has ended, which nobody knows. `locks try` tells the most."
        ),
    },
}
"""What has no equivalent, and why."""


def rows(library: str, tests: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a package's tests assert, and what is here."""
    for name, test in tests.items():
        for whose, asserted in getattr(test, "asserted", ()):
            if whose == library:
                yield asserted, f"{' '.join(test.__doc__.split())} ([`{name}`]({TESTS}))"
    yield from WITHOUT[library].items()


def written(library: str, page: str, tests: Mapping[str, Any]) -> str:
    """Return the page with its table."""
    lines = [f"| {asserted} | {here} |" for asserted, here in rows(library, tests)]
    table = "\n".join([BEGIN, "", f"| {library} | here |", "|---|---|", *lines, "", END])
    page, found = re.subn(f"{re.escape(BEGIN)}.*?{END}", lambda _: table, page, flags=re.DOTALL)
    assert found == 1, f"the table is {found} times in {library}.md"
    return page


if __name__ == "__main__":
    from integration import test_migration

    for library, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        path.write_text(written(library, text, vars(test_migration)), encoding="utf-8")

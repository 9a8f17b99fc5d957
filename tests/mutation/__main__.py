"""Would the tests notice? ``python -m tests.mutation``: change the code, and see whether one fails.

mutmut makes the mutants, as ``[tool.mutmut]`` in pyproject.toml says, and runs for each the tests
that call the changed function. What was judged stays judged while its function stays the same:
remove ``mutants/`` to begin anew. Interrupted, it goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutation.accepted import reason_for
from mutation.page import table, write
from mutation.quickest import MOST
from mutation.verdicts import MUTANTS, PACKAGE, ROOT, Mutant, mutants

QUICK: Final = 0.3
"""Seconds of the longest test that a mutant meets at first; what survives meets them all."""

AFRESH: Final = Path(__file__).with_name("afresh.py")
"""Runs mutmut so that a mutant is there before anything is imported."""


def main() -> int:
    options = _options()
    if not options.report:
        run([Path(sys.executable).with_name("mutmut")], options.processes, most=QUICK)
        left = [mutant.name for mutant in survivors()]
        if left:
            run([sys.executable, AFRESH], options.processes, left)
    found = list(mutants())
    write(found)
    for mutant in survivors():
        print(f"\n{mutant.name}")
        print(*(f"- {line}" for line in mutant.was.splitlines()), sep="\n")
        print(*(f"+ {line}" for line in mutant.becomes.splitlines()), sep="\n")
    print(*table(found), sep="\n")
    return 1 if survivors() else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--report", action="store_true", help="run nothing, write what is known")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def survivors() -> list[Mutant]:
    """Return the mutants that no test killed, and that must not live."""
    return [
        mutant
        for mutant in mutants()
        if not mutant.killed and not mutant.rewords and not reason_for(mutant)
    ]


def run(
    mutmut: Sequence[str | Path],
    processes: int,
    names: Sequence[str] = (),
    *,
    most: float | None = None,
) -> None:
    """Have mutmut run the tests: for these mutants, or, if none is named, for what it has not yet.

    Args:
        mutmut: how to call it.
        processes: how many at a time.
        names: of mutants.
        most: seconds; longer tests are left out.
    """
    environment = {
        **os.environ,
        # Processes that the tests start have to run the mutant, too.
        "PYTHONPATH": os.pathsep.join([str(MUTANTS), str(MUTANTS / "tests")]),
        # Half of the start of pytest; the two plugins that count are named in pyproject.toml.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **({} if most is None else {MOST: str(most)}),
    }
    _renew_data()
    command = [*mutmut, "run", "--max-children", str(processes), *names]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def _renew_data() -> None:
    """Copy the Lua as it is now: mutmut copies what is no Python only once."""
    package = ROOT / PACKAGE
    for path in package.rglob("*.lua"):
        copy = MUTANTS / path.relative_to(ROOT)
        if copy.parent.is_dir():
            shutil.copy2(path, copy)


if __name__ == "__main__":
    sys.exit(main())

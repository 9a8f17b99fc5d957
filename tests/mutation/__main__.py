"""Would the tests notice? ``python -m tests.mutation``: change the code, and see whether one fails.

mutmut makes the mutants, as ``[tool.mutmut]`` in pyproject.toml says, and judge.py plays for each
the tests that call the changed function. What was judged stays judged while its function stays the
same: remove ``mutants/`` to begin anew. Interrupted, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutation.accepted import reason_for
from mutation.page import table, write
from mutation.results import FAILED, MUTANTS, ROOT, SURVIVED, Mutant, mutants, record
from mutation.sample import SEED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGURED: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


def main() -> int:
    options = _options()
    if not options.report:
        judge(options)
        judge_afresh()
    found = list(mutants())
    write(found, seed=options.seed)
    for mutant in survivors():
        print(f"\n{mutant.name}")
        print(*(f"- {line}" for line in mutant.was.splitlines()), sep="\n")
        print(*(f"+ {line}" for line in mutant.becomes.splitlines()), sep="\n")
    print(*table(found, options.seed), sep="\n")
    return 1 if survivors() else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "modules", nargs="*", help="such as store/redis/sync.py; all, if none is named"
    )
    parser.add_argument("--report", action="store_true", help="run nothing, write what is known")
    parser.add_argument(
        "--sample",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="play this share of each module's mutants, such as 0.3; all, if not given",
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"which share that is ({SEED}, if not given)"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def survivors() -> list[Mutant]:
    """Return the mutants that no test killed, and that must not live."""
    return [
        mutant
        for mutant in mutants()
        if not mutant.killed and not mutant.rewords and not reason_for(mutant)
    ]


def judge(options: argparse.Namespace) -> None:
    """Make the mutants of what has changed, and play those that were not."""
    make = Path(__file__).with_name("make.py")
    _python(make, str(options.processes), cwd=ROOT).check_returncode()
    # Native: a mutated module is long, and pytest's own traceback would parse it for each failure.
    plugin = ("-p", "mutation.run_mutants", "-sq", "--tb=native")
    _pytest(
        *plugin,
        *_tests(),
        CSL_MUTANTS_JOBS=str(options.processes),
        CSL_MUTANTS_MODULES=json.dumps(options.modules),
        CSL_MUTANTS_SAMPLE=str(options.sample),
        CSL_MUTANTS_SEED=str(options.seed),
    ).check_returncode()


def judge_afresh() -> None:
    """Play survivors once more in a process that imports everything under the mutant.

    What runs while a module is imported (a check that is made there, a table) has run before a fork
    switches its mutant on.
    """
    imported = set(json.loads((MUTANTS / "imported.json").read_text(encoding="utf-8")))
    calls = json.loads((MUTANTS / "calls.json").read_text(encoding="utf-8"))
    for mutant in survivors():
        if mutant.original in imported and mutant.code == SURVIVED:
            tests = [test for test, told in calls.items() if mutant.original in told["calls"]]
            ran = _pytest("-x", *(tests or _tests()), mutant=mutant.name)
            if ran.returncode:
                record({mutant.name: min(FAILED)}, mutant.module)


def _tests() -> list[str]:
    selected: list[str] = CONFIGURED["mutmut"]["pytest_add_cli_args_test_selection"]
    return selected


def _pytest(
    *arguments: str, mutant: str = "stats", **options: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest on the package with its mutants; ``stats`` notes which functions are called."""
    environment = {
        # Processes that the tests start have to run the mutant, too.
        "PYTHONPATH": os.pathsep.join([str(MUTANTS), str(MUTANTS / "tests")]),
        # Half of the start of pytest; what counts is named in pyproject.toml.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PY_IGNORE_IMPORTMISMATCH": "1",
        "MUTANT_UNDER_TEST": mutant,
        **options,
    }
    usual = CONFIGURED["mutmut"]["pytest_add_cli_args"]
    return _python("-m", "pytest", "--rootdir=.", *usual, *arguments, **environment)


def _python(
    *arguments: str | Path, cwd: Path = MUTANTS, **environment: str
) -> subprocess.CompletedProcess[str]:
    here = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **environment}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**os.environ, **here}, text=True, check=False
    )


if __name__ == "__main__":
    sys.exit(main())

"""Make mutmut write the package with all mutants below ``mutants/``, and copy the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from mutmut.__main__ import create_mutants
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir

from mutation.results import MUTANTS, PACKAGE, ROOT


def make(processes: int) -> None:
    """Write what has changed; what is gone goes here, too."""
    set_mutant_under_test("mutant_generation")
    MUTANTS.mkdir(exist_ok=True)
    shutil.rmtree(MUTANTS / "tests", ignore_errors=True)
    copy_src_dir()
    for path in (ROOT / PACKAGE).rglob("*.lua"):  # which mutmut copies once
        shutil.copy2(path, MUTANTS / path.relative_to(ROOT))
    copy_also_copy_files()
    create_mutants(processes)
    for path in list((MUTANTS / PACKAGE).rglob("*.py")):
        if not (ROOT / path.relative_to(MUTANTS)).exists():
            for each in path.parent.glob(f"{path.name}*"):
                each.unlink()


if __name__ == "__main__":
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        make(int(sys.argv[1]))

"""The result of each mutant, read from the files in ``mutants/``."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "celery_singleton_lock"
MUTANTS = ROOT / "mutants"

FAILED = frozenset({1, 3})
"""Exit codes of pytest when a test failed, or could not go on."""
OUT_OF_TIME = frozenset({-24, 24, 36, 152, -9})
"""SIGXCPU and SIGKILL, and how shells and mutmut write it: the tests did not come to their end."""
SURVIVED = 0
UNTESTED = 33
"""mutmut's code for a function that no test calls."""
CRASHED = 35
"""The process in which the tests run ended outside of a test, twice: nobody's failure, no kill."""

_SENTENCE = re.compile(r'"((?:[^"\\\n]|\\.)*)"|' + r"'((?:[^'\\\n]|\\.)*)'")


@dataclass(frozen=True)
class Mutant:
    """One change to one function.

    Args:
        name: mutmut's, for ``mutmut show``.
        module: path below the package: ``store/redis/sync.py``.
        function: ``RedisStore.acquire``.
        was: the lines as they are.
        becomes: the lines of the mutant.
        code: exit code of the tests; None if they have not run.
    """

    name: str
    module: str
    function: str
    was: str
    becomes: str
    code: int | None

    @property
    def original(self) -> str:
        """Mutmut's name of the function."""
        return self.name.rpartition("__mutmut_")[0]

    @property
    def killed(self) -> bool:
        """Whether a test failed, or the tests did not come to their end."""
        return self.code in FAILED or self.code in OUT_OF_TIME

    @property
    def judged(self) -> bool:
        """Whether the tests have run and said something."""
        return self.killed or self.code in {SURVIVED, UNTESTED, CRASHED}

    @property
    def rewords(self) -> bool:
        """Whether it only writes a sentence for people in another way."""
        return _plain(self.was) == _plain(self.becomes)


def mutants(root: Path = MUTANTS) -> Iterator[Mutant]:
    """Yield all mutants that were made, module by module."""
    for meta in sorted(root.glob(f"{PACKAGE}/**/*.py.meta")):
        codes = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
        source = meta.with_suffix("")
        lines = source.read_text(encoding="utf-8").splitlines()
        spans = json.loads(source.with_suffix(".py.spans").read_text(encoding="utf-8"))["spans"]
        module = source.relative_to(root / PACKAGE).as_posix()
        for name, code in codes.items():
            yield _mutant(name, module, lines, spans, code)


def record(codes: Mapping[str, int], module: str, root: Path = MUTANTS) -> None:
    """Write down what became of mutants of a module, as mutmut does."""
    file = root / PACKAGE / f"{module}.meta"
    told = json.loads(file.read_text(encoding="utf-8"))
    told["exit_code_by_key"] |= codes
    file.write_text(json.dumps(told, indent=4), encoding="utf-8")


def _mutant(
    name: str,
    module: str,
    lines: list[str],
    spans: Mapping[str, tuple[int, int]],
    code: int | None,
) -> Mutant:
    """Compare a mutant with the function that it was made of."""
    mangled = name.rpartition(".")[2]
    base, _, _ = mangled.rpartition("__mutmut_")
    original = f"{base}__mutmut_orig"
    function = _shown(base)
    short = function.rpartition(".")[2]
    here, there = (
        [
            line.strip().replace(which, short)
            for line in lines[spans[which][0] - 1 : spans[which][1]]
        ]
        for which in (original, mangled)
    )
    changes = [line for line in difflib.ndiff(here, there) if line[0] in "-+"]
    was = "\n".join(line[2:] for line in changes if line[0] == "-")
    becomes = "\n".join(line[2:] for line in changes if line[0] == "+")
    return Mutant(name, module, function, was, becomes, code)


def _shown(base: str) -> str:
    """Return ``Class.method`` or ``function`` for mutmut's ``xǁClassǁmethod`` or ``x_function``."""
    return base.removeprefix("xǁ").replace("ǁ", ".") if "ǁ" in base else base.removeprefix("x_")


def _plain(code: str) -> str:
    """Return code with its sentences (three words or more) in one way of writing."""
    return _SENTENCE.sub(_plain_sentence, code)


def _plain_sentence(match: re.Match[str]) -> str:
    sentence = match[1] or match[2] or ""
    if len(sentence.split()) < 3:  # less may be a word of a protocol
        return match[0]
    return sentence.removeprefix("XX").removesuffix("XX").lower()

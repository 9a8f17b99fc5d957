"""Plays every scene on every package that is installed, and writes docs/what-happens.md.

Each is played in a process of its own, with its own Redis servers and workers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.what_happens import page
from benchmarks.what_happens.packages import PACKAGES
from benchmarks.what_happens.scenes import SCENES, play

TIMEOUT = 240


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as told by the command line; return the exit code."""
    options = _parse(arguments)
    if options.play:
        print(json.dumps(play(*options.play)))
        return 0
    if options.render or options.check:
        return _render(check=options.check)
    wanted = [(s, p) for s in options.only for p in options.packages]
    played = _played(wanted, options.jobs)
    if options.json:
        print(json.dumps({"versions": page.versions(), "played": played}, indent=1))
    else:
        _show(played)
    if options.write:
        page.write(played, whole=len(wanted) == len(SCENES) * len(PACKAGES))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.what_happens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [scene.name for scene in SCENES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SCENE")
    parser.add_argument(
        "--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES), metavar="PACKAGE"
    )
    parser.add_argument("--json", action="store_true", help="print what was seen as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="how many to play at a time")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave the page")
    parser.add_argument("--render", action="store_true", help="play nothing, write the page anew")
    parser.add_argument("--check", action="store_true", help="play nothing, say what is old")
    parser.add_argument("--play", nargs=2, metavar=("SCENE", "PACKAGE"), help=argparse.SUPPRESS)
    parser.epilog = (
        f"scenes: {', '.join(names)}\npackages: {', '.join(PACKAGES)}\n"
        "With --only or --packages the page keeps what it says of the others, provided that it was "
        "written with the same versions."
    )
    options = parser.parse_args(arguments)
    lacking = [package for package in options.packages if not PACKAGES[package].version()]
    if lacking and not (options.play or options.render or options.check):
        parser.error(f"not installed: {', '.join(lacking)} (pip install --group peers)")
    return options


def _render(*, check: bool) -> int:
    if not check:
        page.rewrite()
    found = page.faults()
    print("\n".join(found))
    return bool(found)


def _played(wanted: Iterable[tuple[str, str]], jobs: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda pair: _play(*pair), wanted))


def _play(scene: str, package: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.what_happens", "--play", scene, package]
    ended = subprocess.run(
        command, cwd=page.ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if ended.returncode:
        msg = f"{scene} on {package} could not be played:\n{ended.stderr[-4000:]}"
        raise RuntimeError(msg)
    seen = json.loads(ended.stdout.splitlines()[-1])
    print(f"{scene:20} {package:17} {seen['brief']}", file=sys.stderr, flush=True)
    return dict(seen)


def _show(played: list[dict[str, Any]]) -> None:
    for seen in played:
        print(f"{seen['scene']:20} {seen['package']:17} {seen['told']}")


if __name__ == "__main__":
    sys.exit(main())

"""docs/what-happens.md, made of what was seen the last time: results.json next to this file."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.what_happens.packages import PACKAGES
from benchmarks.what_happens.scenes import SCENES, Scene
from celery_singleton_lock.demo.redis_provider import find_provider

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "what-happens.md"
RESULTS: Final = Path(__file__).with_name("results.json")

Results = Mapping[str, Any]

HEAD: Final = Path(__file__).with_name("head.md")


def versions() -> dict[str, str]:
    """Return what is installed here."""
    packages = {package.distribution: package.version() for package in PACKAGES.values()}
    libraries = {name: importlib.metadata.version(name) for name in ("celery", "kombu")}
    server = find_provider()
    servers = {"Python": platform.python_version(), server.kind: server.version}
    return {**packages, **libraries, **servers}


def stored() -> dict[str, Any]:
    """Return what was seen the last time."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8")))


def write(played: Sequence[Mapping[str, str]], *, whole: bool) -> None:
    """Write results and page.

    Args:
        played: what was seen.
        whole: all scenes on all packages; else the others stay as they were.

    Raises:
        ValueError: the others were seen with other versions, and not all packages played the scene.
    """
    seen = {f"{one['scene']} {one['package']}": one for one in played}
    results = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), "seen": seen}
    if not whole:
        results = _joined(stored(), results)
    text = json.dumps(results, indent=1, sort_keys=True) + "\n"
    RESULTS.write_text(text, encoding="utf-8")
    PAGE.write_text(render(results), encoding="utf-8")


def _joined(before: Results, now: Results) -> dict[str, Any]:
    """Return what was seen before, with some scenes played anew."""
    joined = {**before, "seen": {**before["seen"], **now["seen"]}}
    if before["versions"] == now["versions"]:
        return joined
    scenes = {one["scene"] for one in now["seen"].values()}
    if len(now["seen"]) < len(scenes) * len(PACKAGES):
        msg = "the page was written with other versions: play these scenes on all packages"
        raise ValueError(msg)
    of_now = {"date": now["date"], "versions": now["versions"]}
    joined["later"] = {**before.get("later", {}), **dict.fromkeys(sorted(scenes), of_now)}
    return joined


def render(results: Results) -> str:
    """Return the page."""
    lines = [HEAD.read_text(encoding="utf-8"), *_declarations(results), *_table(results)]
    for scene in SCENES:
        lines += _paragraph(scene, results)
    return "\n".join(lines).rstrip() + "\n"


def faults() -> list[str]:
    """Return what is wrong with the page: scenes that were not played, words that were changed."""
    results = stored()
    wanted = {f"{scene.name} {package}" for scene in SCENES for package in PACKAGES}
    played = set(results["seen"])
    found = [f"not played: {each}" for each in sorted(wanted - played)]
    found += [f"played, and there no more: {each}" for each in sorted(played - wanted)]
    if not found and PAGE.read_text(encoding="utf-8") != render(results):
        found.append(f"{PAGE.name} is not what scenes and results say: write it with --render")
    return found


def rewrite() -> None:
    """Write the page anew from what was seen the last time."""
    PAGE.write_text(render(stored()), encoding="utf-8")


def _declarations(results: Results) -> Iterator[str]:
    yield from (
        "| package | version | declared with | its lock expires, by default |",
        "|---|---|---|---|",
    )
    for package in PACKAGES.values():
        version = results["versions"][package.distribution]
        yield f"| {package.name} | {version} | {package.usage} | {package.expires} |"
    rest = [
        f"{name} {version}"
        for name, version in results["versions"].items()
        if name not in {package.distribution for package in PACKAGES.values()}
    ]
    yield f"\nPlayed on {results['date']} with {', '.join(sorted(rest))}.\n"


def _table(results: Results) -> Iterator[str]:
    yield f"| | {' | '.join(package.name for package in PACKAGES.values())} |"
    yield "|---|" + "---|" * len(PACKAGES)
    for scene in SCENES:
        cells = [_seen(results, scene, package)["brief"] for package in PACKAGES]
        yield f"| [{scene.title}](#{anchor(scene.title)}) | {' | '.join(cells)} |"
    yield ""


def _paragraph(scene: Scene, results: Results) -> Iterator[str]:
    yield f"## {scene.title}\n"
    yield f"{_wrapped(scene.description + _played_later(results, scene))}\n"
    for key, package in PACKAGES.items():
        told = f"- **{package.name}**: {_seen(results, scene, key)['told']}."
        yield _wrapped(told, indent="  ")
    yield f"\n{_wrapped(scene.remark)}\n"


def _played_later(results: Results, scene: Scene) -> str:
    """Tell with which versions a scene was played, if not with those of the page."""
    later = results.get("later", {}).get(scene.name)
    if not later:
        return ""
    other = [
        f"{name} {version}"
        for name, version in sorted(later["versions"].items())
        if results["versions"].get(name) != version
    ]
    return f" Played on {later['date']} with {' and '.join(other)}."


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def anchor(text: str) -> str:
    """Return what GitHub makes of a heading."""
    kept = [c for c in text.lower() if c.isalnum() or c in " -_"]
    return "".join(kept).replace(" ", "-")


def _seen(results: Results, scene: Scene, package: str) -> Mapping[str, str]:
    return dict(results["seen"][f"{scene.name} {package}"])

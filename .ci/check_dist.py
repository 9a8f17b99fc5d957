"""Check the files of a release: python .ci/check_dist.py DIST [SECOND_BUILD].

The wheel has every file of the package that git knows, the sdist every file that it promises, and
neither has anything else. A second build has the same bytes. Links and images of the README are
absolute, as the package index needs them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
PACKAGE = "celery_singleton_lock"

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]


def tracked(*folders: str) -> set[str]:
    """Return the files that git knows, below these paths."""
    command = ["git", "ls-files", "-z", "--", *folders]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    return {name for name in found.decode().split("\0") if name}


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern."""
    found = sorted(folder.glob(pattern))
    assert len(found) == 1, f"{folder}: not one {pattern}: {found}"
    return found[0]


def compare(what: str, found: set[str], wanted: set[str]) -> None:
    """Refuse missing and further files."""
    assert found == wanted, (
        f"{what}: missing {sorted(wanted - found)}, not expected {sorted(found - wanted)}"
    )


def check_wheel(file: Path) -> None:
    """Check the contents and the metadata of the wheel."""
    assert file.name == f"{PACKAGE}-{VERSION}-py3-none-any.whl", file.name
    info = f"{PACKAGE}-{VERSION}.dist-info"
    with ZipFile(file) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
    extra = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    compare("wheel", names, tracked(PACKAGE) | {f"{info}/{name}" for name in extra})
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "MIT"
    text = metadata.get_payload() or metadata["Description"]
    relative = re.findall(r"\]\((?!https://|#)([^)]*)\)", re.sub(r"(?s)```.*?```", "", str(text)))
    assert not relative, f"README: links that the package index cannot resolve: {relative}"


def check_sdist(file: Path) -> None:
    """Check the contents of the sdist."""
    top = f"{PACKAGE}-{VERSION}"
    assert file.name == f"{top}.tar.gz", file.name
    with tarfile.open(file) as sdist:
        members = [member for member in sdist.getmembers() if not member.isdir()]
    assert all(member.isfile() for member in members), "links in the sdist"
    promised = [
        path.lstrip("/")
        for path in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    ]
    wanted = tracked(*promised) | {"PKG-INFO", "pyproject.toml", ".gitignore"}
    compare("sdist", {m.name.removeprefix(f"{top}/") for m in members}, wanted)


def main(first: str, second: str = "") -> None:
    """Check one build, and compare it with a second one."""
    folder = Path(first)
    wheel, sdist = only(folder, "*.whl"), only(folder, "*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    for file in (wheel, sdist) if second else ():
        again = Path(second, file.name)
        assert again.read_bytes() == file.read_bytes(), f"{file.name}: the second build differs"
    print(f"{wheel.name}, {sdist.name}: complete" + (", and built twice alike" if second else ""))


if __name__ == "__main__":
    main(*sys.argv[1:])

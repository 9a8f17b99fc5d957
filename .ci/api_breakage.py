"""Compare the public API with that of a tag: python .ci/api_breakage.py TAG.

Public is what SUPPORT.md calls so: the names in ``__all__`` of the package, and of the modules
below. Other modules may change in any release. The exit status is 1 if callers would notice.
"""

from __future__ import annotations

import sys

import griffe

PACKAGE = "celery_singleton_lock"
MODULES = ("admin", "django", "errors", "events", "flower", "metrics", "testing")


def public(package: griffe.Object) -> set[str]:
    """Return the paths of all public names, where they are defined."""
    found = set()
    for module in (package, *(package[name] for name in MODULES if name in package.members)):
        names = module.exports or [name for name in module.members if not name.startswith("_")]
        for name in map(str, names):
            try:
                if not module[name].is_module:
                    found.add(module[name].canonical_path)
            except (KeyError, griffe.AliasResolutionError):
                continue  # an attribute that only __getattr__ knows, or another library's
    return found


def breakages(tag: str) -> list[str]:
    """Return what callers of the tag's public names would notice."""
    old, new = griffe.load_git(PACKAGE, ref=tag), griffe.load(PACKAGE, search_paths=["."])
    gone = sorted(
        f"{module}.{name}: removed"
        for module in ("", *MODULES)
        for name in _exports(old, module) - _exports(new, module)
    )
    names = public(old)
    changed = [
        breakage.explain(griffe.ExplanationStyle.ONE_LINE)
        for breakage in griffe.find_breaking_changes(old, new)
        if any(f"{breakage.obj.canonical_path}.".startswith(f"{name}.") for name in names)
        and breakage.obj.canonical_path not in names  # it has another home; see gone
        and not breakage.obj.name.startswith("_")
    ]
    return gone + changed


def _exports(package: griffe.Object, module: str) -> set[str]:
    if module and module not in package.members:
        return set()
    found = package[module] if module else package
    return set(map(str, found.exports or ()))


def main(tag: str) -> int:
    """Print the breakages."""
    found = breakages(tag)
    for each in found:
        print(each)
    print(f"{len(found)} breaking changes of the public API since {tag}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

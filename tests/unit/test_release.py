"""What a release promises: in the metadata, the workflows and the pages about support."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
in_checkout = pytest.mark.skipif(not WORKFLOWS, reason="the sdist has no workflows")

workflow = pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)


def pythons():
    found = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert found
    return found


@workflow
def test_each_action_is_pinned_by_hash_with_its_version(file):
    """A tag can be moved to other code."""
    uses = re.findall(r"uses: (\S+)(.*)", file.read_text(encoding="utf-8"))
    for name, comment in uses:
        if not name.startswith("./"):
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", name), name
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{name}: which version is it?"


@workflow
def test_a_job_has_only_the_rights_that_it_names(file):
    """Only publishing writes, and it runs no code of the repository."""
    flow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert flow["permissions"] == {}
    for name, job in flow["jobs"].items():
        rights = job["permissions"]
        if name == "publish":
            assert rights == {"id-token": "write", "attestations": "write"}
            assert all("run" not in step for step in job["steps"])
        else:
            assert rights == {"contents": "read"}
        for step in job.get("steps", ()):
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


@in_checkout
def test_the_workflows_run_scripts_that_are_there():
    """So each step can be repeated on any machine."""
    text = "".join(file.read_text(encoding="utf-8") for file in WORKFLOWS)
    scripts = set(re.findall(r"run: (\.ci/\w+)", text))
    assert scripts == {".ci/run", ".ci/server", ".ci/release"}
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} cannot be run"


@in_checkout
def test_classifiers_tox_ci_and_the_support_page_name_the_same_versions_of_python():
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    minors = re.search(r"py3\{([\d,]+)\}", tox["tox"]["env_list"])[1].split(",")
    assert [f"3.{minor}" for minor in minors] == pythons()
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    matrix = ci["jobs"]["python"]["strategy"]["matrix"]["include"]
    assert [m["python"] for m in matrix if m["env"].startswith("py")] == pythons()
    support = (ROOT / "SUPPORT.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| Python (3\.\d+) \| yes", support, re.MULTILINE) == pythons()
    assert PROJECT["requires-python"] == f">={pythons()[0]}"


@in_checkout
def test_the_version_is_in_one_place():
    """In pyproject.toml; uv.lock and the changelog are compared with it elsewhere.

    What was played with a version names that one.
    """
    records = ("benchmarks/what_happens/results.json", "docs/what-happens.md")
    others = ("CHANGELOG.md", "uv.lock", "pyproject.toml", *records)
    excluded = [f":(exclude){name}" for name in others]
    command = ["git", "grep", "-lF", PROJECT["version"], "--", ".", *excluded]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not on this machine")
    if found.returncode > 1:
        pytest.skip("this is no checkout")
    assert found.stdout.split() == []


def test_links_and_images_of_the_readme_work_on_the_package_index():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(?s)```.*?```", "", text)
    assert re.findall(r"\]\((?!https://|#)([^)]*)\)", text) == []


@in_checkout
def test_a_report_of_a_bug_begins_with_the_output_of_doctor():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8"))
    (doctor,) = [each for each in form["body"] if each["id"] == "doctor"]
    assert "locks doctor --json" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]


@in_checkout
@pytest.mark.parametrize("page", ["SECURITY.md", "SUPPORT.md"])
def test_links_between_the_pages_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https://)([^)#]+)", text):
        assert (ROOT / link).exists(), link

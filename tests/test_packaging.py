"""What a release needs: one version, a licence for all of the wheel, a whole sdist, workflows that run here, too."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import natgrad as ng

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def test_the_version_has_one_source() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", ng.__version__)
    assert 'dynamic = ["version"]' in PROJECT
    assert not re.search(r"^version *=", PROJECT, re.MULTILINE)
    assert "version:" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8").replace("cff-version:", "")


def test_the_licence_covers_the_data() -> None:
    expression = re.search(r'^license = "(.*?)"', PROJECT, re.MULTILINE)
    assert expression is not None
    assert expression[1] == "MIT AND CC-BY-4.0"
    assert "CC BY 4.0" in (ROOT / "natgrad" / "data" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["license"] == ["MIT", "CC-BY-4.0"]


def test_the_sdist_has_what_its_tests_read() -> None:
    include = re.search(r"\[tool\.hatch\.build\.targets\.sdist\]\ninclude = \[(.*?)\n\]", PROJECT, re.DOTALL)
    assert include is not None
    listed = set(re.findall(r'"/([^"]+)"', include[1]))
    assert not [name for name in listed if not (ROOT / name).exists()]
    kept = {"README.md", "pyproject.toml", ".gitignore"}  # hatch always adds these
    local = {".pre-commit-config.yaml"}
    if (ROOT / ".git").exists():  # an sdist has no more than what it has
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert {name.split("/")[0] for name in names.split("\n") if name} - listed - kept - local == set()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    runs = [step["run"] for step in steps(path) if "run" in step]
    assert runs
    for command in runs:
        make = re.fullmatch(r"make ([a-z]+)( [A-Z]+='\$\{\{ [\w.]+ \}\}')*", command)
        assert make is not None, f"{path.name}: {command!r} cannot be tried outside of the workflow"
        assert make[1] in targets, f"{path.name}: the Makefile has no target {make[1]}"


def test_the_matrix_has_every_python_of_the_classifiers_and_the_oldest_torch() -> None:
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    matrix = tests["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in matrix} == set(
        re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    )
    oldest = re.search(r'dependencies = \["torch>=([\d.]+)"\]', PROJECT)
    assert oldest is not None
    assert f"torch=={oldest[1]}.*" in {row["torch"] for row in matrix}
    assert "torch" in {row["torch"] for row in matrix}, "and the newest"


def test_forms_and_metadata_are_valid_yaml() -> None:
    forms = [*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".github" / "dependabot.yml"]
    assert all(isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict) for path in forms)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["cff-version"] == "1.2.0"

"""The documents run: README's code trains, and every number in docs/ is what the code prints."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_of_the_page_prints_what_it_says(page: Path) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    with torch.random.fork_rng():
        torch.manual_seed(0)
        failures, examples = doctest.testfile(str(page), module_relative=False, optionflags=flags)
    assert examples > 0
    assert failures == 0


def test_the_code_of_the_readme_trains_a_classifier() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks:
            exec(block, names)
    model, x_test, t_test = names["model"], names["x_test"], names["t_test"]
    assert float((model(x_test).argmax(1) == t_test).double().mean()) > 0.95
    assert float(names["ω"] @ names["v"]) > 0  # an ascent vector
    assert len([line for line in blocks[0].splitlines() if line.strip()]) == 10


def test_the_readme_names_only_what_exists() -> None:
    import natgrad as ng

    used = set(re.findall(r"\bng\.([A-Za-z_]+)", (ROOT / "README.md").read_text()))
    slots = set(re.findall(r"`([A-Z][A-Za-z]+)\(", (ROOT / "README.md").read_text()))
    missing = [name for name in used | slots if not hasattr(ng, name)]
    assert not missing


def test_the_measured_numbers_of_the_readme_are_those_the_benchmark_printed() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "core.json").read_text())
    printed = {target["claim"]: f"{target['measured']:.2f}" for target in results["targets"]}
    section = (ROOT / "README.md").read_text().split("## Measured")[1]
    rows = re.findall(r"^\| (.+) \| ([\d.]+) \|$", section, re.MULTILINE)
    assert dict(rows) == printed


@pytest.mark.parametrize("name", ["kfac", "kfac-cuda", "training", "training-cuda"])
def test_the_numbers_of_kfac_in_the_readme_are_those_the_benchmark_printed(name: str) -> None:
    path = f"benchmarks/results/{name}.json"
    results = json.loads((ROOT / path).read_text())
    section = (ROOT / "README.md").read_text().split(path)[1].split("benchmarks/results/")[0]
    rows = re.findall(r"^\| (.+) \| ([\d.]+) \| ([≤≥] [\d.]+)(, not met)? \|$", section, re.MULTILINE)
    printed = [
        (
            t["claim"],
            f"{t['measured']:.2f}",
            f"{'≤' if t['at_most'] else '≥'} {t['bound']:g}",
            "" if t["met"] else ", not met",
        )
        for t in results["targets"]
    ]
    assert rows == printed


@pytest.mark.parametrize("what", ["K-FAC factors, one sample", "training step"])
def test_other_libraries_on_a_gpu_stand_in_the_readme_as_the_benchmark_printed_them(what: str) -> None:
    from benchmarks.report import markdown

    tables = markdown(ROOT / "benchmarks" / "results" / "kfac-cuda.json").split("\n\n")
    (found,) = (table for table in tables if table.startswith(f"| {what} |"))
    assert found in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["training.json", "training-cuda.json"])
def test_the_training_of_the_readme_is_what_was_measured(name: str) -> None:
    from benchmarks.curves import Record, markdown

    assert markdown(Record.load(ROOT / "benchmarks" / "results" / name)) in (ROOT / "README.md").read_text()


def test_what_the_readme_says_beside_the_tables_was_printed_by_scripts() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    rows = json.loads((ROOT / "benchmarks" / "results" / "kfac.json").read_text())["rows"]
    steps = {
        (r["section"].split()[2], r["contestant"]): f"{r['ratio']['median']:.2f}"
        for r in rows
        if r["section"].startswith("training step: ")
    }
    mlp, block = (
        [steps[network, f"{name} K-FAC, 10 & 100"] for name in ("KAISA", "natgrad")]
        for network in ("MLP", "transformer")
    )
    assert f"(10 & 100: with the MLP {mlp[0]} times AdamW's, ours {mlp[1]}; with the transformer block" in readme
    assert f"with the transformer block {block[0]}, ours {block[1]})" in readme
    rows = json.loads((ROOT / "benchmarks" / "results" / "kfac-cuda-many.json").read_text())["rows"]
    factors: dict[str, list[str]] = {}
    for r in rows:
        if r["section"].startswith("K-FAC factors, one sample"):
            factors.setdefault(r["contestant"], []).append(f"{r['ratio']['median']:.2f}")
    one, two, three = factors["natgrad"]
    assert f"the factors then cost {one}, {two} and {three} times forward+backward" in readme
    assert (
        f"other libraries cost less, kronfluence {factors['kronfluence'][0]} and {factors['kronfluence'][2]} " in readme
    )
    results = json.loads((ROOT / "benchmarks" / "results" / "kfac-cuda.json").read_text())
    launches = results["microseconds_a_launch"]
    assert sum(launches.values()) / len(launches) == pytest.approx(10, abs=1)
    assert "it took about 10 µs for a kernel" in readme
    coupled = [r for r in results["rows"] if r["section"].startswith("Sobolev K-FAC: VGG16, ")]
    (vgg,) = (r["ratio"] for r in coupled if "Sobolev" in r["contestant"])
    assert f"VGG16's steps with Sobolev K-FAC has the quartiles {vgg['low']:.2f} and {vgg['high']:.2f}" in readme

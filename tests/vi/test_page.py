"""The numbers on the page are those that the benchmark printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_measured_numbers_of_the_page_are_those_of_the_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "vi.json").read_text())
    section = (ROOT / "docs" / "vi.md").read_text().split("## Measured")[1]
    found = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.–]+) \| ([\d.]+) \|$", section, re.MULTILINE)
    expected = []
    for row in results["rows"]:
        ours, like = row["ratios"]["natgrad"], row["ratios"].get("natgrad, hyperparameters by Adam")
        matched = f"{like['GPyTorch']:.3f}" if like else "–"
        expected.append((row["case"], f"{ours['Adam']:.3f}", matched, f"{ours['GPyTorch']:.3f}"))
    assert found == expected

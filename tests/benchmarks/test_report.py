"""Files of results that are measured again in part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness import Spread
from benchmarks.report import Report, Row, Target, save

SECTION = "K-FAC factors, one sample: a network"
CLAIM = "the fastest peer's factors over natgrad's, a network"


def measured(path: Path, ratios: dict[str, float], claim: Target | None) -> dict[str, float]:
    """Save a run with these ratios over what the file holds; the ratios of the file then, and the claim."""
    report = Report(torch.device("cpu"), rounds=1)
    for name, ratio in ratios.items():
        spread = Spread(ratio, ratio, ratio)
        report.rows.append(Row(SECTION, name, spread, spread, "forward+backward"))
    report.targets += [] if claim is None else [claim]
    save(report, path, 1.0, json.loads(path.read_text()) if path.exists() else None)
    content = json.loads(path.read_text())
    rows = {row["contestant"]: row["ratio"]["median"] for row in content["rows"]}
    return rows | {target["claim"]: target["measured"] for target in content["targets"]}


def test_a_library_that_is_not_installed_now_keeps_its_row_and_is_compared_with_our_new_one(tmp_path: Path) -> None:
    path = tmp_path / "kfac.json"
    measured(path, {"natgrad": 1.0, "a peer": 3.0}, Target(CLAIM, 3.0, 1.0, False, "a peer"))
    again = measured(path, {"natgrad": 1.5}, None)
    assert again["natgrad"] == 1.5
    assert again["a peer"] == 3.0
    assert again[CLAIM] == pytest.approx(2.0)

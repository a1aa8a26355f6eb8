"""The benchmark of the Laplacian at a tiny size: the contestants agree, and it says so in a table and a file."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import pde
from benchmarks.report import Report, save, table


def test_it_compares_laplacians_that_agree_and_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pde, "WIDTHS", (4, 4, 1))
    monkeypatch.setattr(pde, "peak_memory", lambda *args, device: 1)  # which starts a process
    report = Report(torch.device("cpu"), 1)
    pde.run(report, 2, 3, 3)
    save(report, tmp_path / "pde.json", 1.0)
    assert "nested autograd" in table(report)
    content = json.loads((tmp_path / "pde.json").read_text())
    assert [target["bound"] for target in content["targets"]] == [3.0, 3.0, 2.0, 3.0, 3.0]
    assert max(content["disagreement"].values()) < 1e-12

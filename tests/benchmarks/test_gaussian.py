"""The benchmark of the full Gaussian at a tiny size: it times the right step, and says so in a table and a file."""

import json
from pathlib import Path

import torch

from benchmarks import gaussian
from benchmarks.report import Report, save, table

CPU = torch.device("cpu")


def test_it_measures_the_step_of_the_textbook_and_writes_a_file(tmp_path: Path) -> None:
    report = Report(CPU, 1)
    gaussian.run(report, 20, torch.float64)
    save(report, tmp_path / "gaussian.json", 1.0)
    assert "natural step, ∇ in η" in table(report)
    content = json.loads((tmp_path / "gaussian.json").read_text())
    assert [target["bound"] for target in content["targets"]] == [1.5]
    assert max(content["disagreement"].values()) < 1e-12


def test_the_whole_step_is_taken_at_the_size_that_is_measured() -> None:
    """A step that is shortened costs an eigenvalue problem, and is not what the claim is about."""
    case = gaussian.Case.of(300, torch.float64, CPU)
    torch.testing.assert_close(gaussian.contestants(case)[gaussian.STEP](), case.textbook(), rtol=1e-9, atol=1e-9)

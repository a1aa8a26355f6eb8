"""The study of online maximum likelihood at a small size, and the figures of the page on charts."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from experiments import charts, online_mle
from experiments.online_mle import Curve, Gamma, Gaussian, Mirror, Plain, Stream

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "experiments" / "results" / "online_mle" / "record.json"


def test_mirror_descent_is_the_batch_estimate_and_beats_sgd_and_adam() -> None:
    found = online_mle.study(steps=60, replicas=60, rates=(0.03,))
    for problem in (Gamma.title, Gaussian.title):
        last = {curve.arm: curve.error[-1] for curve in found if curve.problem == problem}
        assert last["mirror descent"] < 1.5
        assert min(last["SGD"], last["Adam"]) > last["mirror descent"]


def test_an_estimator_that_leaves_the_family_has_an_infinite_error() -> None:
    x = torch.ones(14, 3, dtype=torch.float64) + torch.rand(14, 3, dtype=torch.float64)
    stream = Stream(x, first=10)
    wild = online_mle.measure(Gamma(), Plain(torch.optim.SGD, 1e6, 0.0), stream)
    assert wild[-1] == float("inf")
    assert len(wild) == len(stream.looks) == len(online_mle.measure(Gamma(), Mirror(), stream))


def test_coordinates_without_bounds_go_there_and_back() -> None:
    for problem in (Gamma(), Gaussian()):
        torch.testing.assert_close(problem.natural(problem.free(problem.eta)), problem.eta)


def test_the_record_says_that_mirror_descent_meets_the_bound() -> None:
    curves = [Curve(**curve) for curve in json.loads(RECORD.read_text())]
    for curve in curves:
        met = abs(curve.error[-1] - 1) < 0.15
        assert met == (curve.arm == "mirror descent")


def test_the_figures_are_drawn_and_small(tmp_path: Path) -> None:
    paths = charts.draw(tmp_path)
    online_mle.draw([Curve("p", "arm", "lr = 1", [1, 2], [2.0, 1.0])], tmp_path / "efficiency.svg")
    assert [path.name for path in paths] == ["bregman.svg", "mirror.svg"]
    assert all(path.stat().st_size < 100_000 for path in tmp_path.iterdir())

"""K-FAC of other libraries, where they are installed: what is timed are their factors and steps, and they are right."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from benchmarks import kfac, networks
from benchmarks import kfac_peers as peers

CPU = torch.device("cpu")
# They warn about their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")


def found(name: str, makers: dict[str, peers.Make]) -> dict[str, peers.Make]:
    """The maker of this library alone, or a skipped test."""
    return {name: makers[name]} if name in makers else pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("case", kfac.tiny(), ids=lambda case: case.make.func.__name__)
@pytest.mark.parametrize("name", ["KAISA", "kronfluence", "singd"])
def test_a_peer_makes_two_factors_of_every_layer_again_and_again(name: str, case: kfac.Case) -> None:
    problem = case.make(CPU)
    check = peers.same_inputs(problem)
    able, errors = peers.runnable(found(name, peers.factors()), problem, check)
    assert errors == {}
    weights = [m.weight for m in problem.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    made = able[name]()
    assert check(made) is None
    assert [len(G) for G in made[len(weights) :]] == [len(w) for w in weights]
    assert all(0 < float(G.trace()) < float("inf") for G in made)


@pytest.mark.parametrize("name", ["KAISA", "singd"])
def test_a_peer_without_samples_has_the_covariances_of_the_gradients_of_the_loss(name: str) -> None:
    problem = networks.autoencoder(8, CPU, widths=(6, 5, 3))
    able, _ = peers.runnable(found(name, peers.factors()), problem)
    expected: list[Tensor] = []

    def see(layer: nn.Module, inputs: object, outputs: tuple[Tensor, ...] | Tensor) -> None:
        (g,) = outputs
        expected.insert(0, g.T @ g)  # the last layer comes first

    for layer in problem.model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_full_backward_hook(see)
    networks.gradient(problem)()
    made = able[name]()[len(expected) :]
    assert len(made) == len(expected) > 0
    for G, sums in zip(made, expected, strict=True):
        torch.testing.assert_close(G / G.norm(), sums / sums.norm(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", kfac.tiny(), ids=lambda case: case.make.func.__name__)
@pytest.mark.parametrize("name", ["KAISA", "singd"])
def test_a_peer_trains_a_network_of_its_own(name: str, case: kfac.Case) -> None:
    problem = case.make(CPU)
    before = float(problem.loss(problem.model(problem.x), problem.t))
    able, errors = peers.runnable(found(name, peers.steps(1, 2, 10)), problem)  # ten steps are made to try it
    assert errors == {}
    assert float(able[name]()) < before
    assert float(problem.loss(problem.model(problem.x), problem.t)) == before


def test_the_package_called_kfac_is_not_mistaken_for_the_script_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kfac").mkdir()
    for file in ("__init__.py", "preconditioner.py"):
        (tmp_path / "kfac" / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(kfac.__file__).parent)  # as when the script runs
    path = sys.path.copy()
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "kfac"]:
            del sys.modules[name]
        assert Path(peers.kaisa().__file__).parents[1] == tmp_path
    assert sys.path == path

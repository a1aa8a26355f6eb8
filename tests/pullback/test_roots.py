"""The root of an exact metric: made when it is needed, for as many examples as fit, and never for products."""

from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad as ng
from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.structures import Structure
from tests import zoo
from tests.pullback.test_chunking import Largest
from tests.pulled import Rooted, close, normal

FISHER = ng.Fisher(ng.Categorical(axis=-1))


@final
@dataclass(frozen=True)
class Rootless(ng.OutputMetric):
    """The Euclidean metric, whose root must not be asked for."""

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return u

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        raise AssertionError("a root was made")

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        raise AssertionError("nobody asks for it here")


@final
@dataclass(frozen=True)
class Centring(ng.OutputMetric):
    """The Euclidean metric, with a root that works in place, as it must not."""

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return u

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return ng.Euclidean().root(y.sub_(y.mean()))

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        raise AssertionError("nobody asks for it here")


def language_model() -> tuple[nn.Module, Tensor]:
    """40 tokens of 200 classes: the exact root of one example has 8000 · 8000 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(200, 4), nn.Linear(4, 200)), torch.randint(200, (4, 40))


def test_implicit_of_an_exact_metric_makes_no_root() -> None:
    model, x = zoo.mlp(3, 4, 3).double(), normal(6, 3)
    G = ng.Implicit().estimate(ng.pullback(model, x, Rootless()))
    v = normal(G.layout.size)
    close(G.product(v), ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).product(v))


def test_implicit_of_a_language_model_stays_far_below_its_root() -> None:
    model, x = language_model()
    with Largest() as largest:
        pb = ng.pullback(model, x, FISHER, memory=2**26)
        ng.Implicit().estimate(pb).product(torch.ones(pb.model.size))
    assert largest.elements <= 2 * 4 * 40 * 200


LOSSES = {
    "fisher": FISHER,
    "hessian": ng.LossHessian(lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())),
    "euclidean": ng.Euclidean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_root_of_one_example_over_the_bound_is_refused_before_it_is_made(name: str) -> None:
    model, x = language_model()
    pb = ng.pullback(model, x, LOSSES[name], x, memory=2**26)
    message = (
        r"8,000 columns: for 4 examples with 8,000 outputs it needs 1,024,000,000 bytes, over the bound "
        r"memory=67,108,864.*Fisher\(family, samples=k\) or Sampled\(metric, k\), take smaller .* or use Implicit"
    )
    with Largest() as largest, pytest.raises(MemoryBoundError, match=message):
        ng.Diagonal().estimate(pb)
    assert largest.elements <= 200**2


def test_a_narrow_root_of_many_outputs_is_not_refused() -> None:
    """One column: K is found without making a root of D², though the loss holds a tensor of its own."""
    model, x = language_model()
    weight = torch.ones(200)
    loss = ng.Empirical(lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), weight=weight))
    pb = ng.pullback(model, x, loss, x, memory=2**26)
    assert pb.columns == 1
    close(ng.Diagonal().estimate(pb).diagonal(), ng.pullback(model, x, loss, x).square(), 1e-6)


@pytest.mark.parametrize("structure", [ng.Implicit(), ng.Diagonal()], ids=repr)
def test_outputs_outside_the_domain_of_a_family_are_named(structure: Structure) -> None:
    model = nn.Linear(2, 1).double()
    model.bias.data.fill_(800.0)  # e^800
    pb = ng.pullback(model, torch.ones(3, 2, dtype=torch.float64), ng.Fisher(ng.Poisson()))
    with pytest.raises(NonFiniteError, match=r"Fisher\(family=Poisson.*is not finite at the outputs"):
        structure.estimate(pb)


def test_a_root_that_changes_the_outputs_in_place_is_refused() -> None:
    """They are those that the loss is computed from."""
    model, x = zoo.mlp(3, 4, 3), torch.ones(6, 3)
    opt = ng.KFAC(model, Centring())
    with pytest.raises(ValueError, match=r"Centring\(\)\.root has changed the outputs .* in place: .* y\.clone\(\)"):
        model(x)
    assert opt.last is None


@final
class Reads(TorchDispatchMode):
    """The operations that read the numbers of a tensor; views read none."""

    def __init__(self, t: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.address, self.names = t.untyped_storage().data_ptr(), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in args if isinstance(t, Tensor)]
        if not func.is_view and any(t.untyped_storage().data_ptr() == self.address for t in given):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_root_is_read_once_to_be_checked() -> None:
    s = normal(5, 4, 3)
    with Reads(s) as reads:
        ng.pullback(nn.Linear(2, 3).double(), normal(4, 2), Rooted(s))
    assert len(reads.names) == 1


def test_an_exact_root_that_is_made_again_is_not_checked_again() -> None:
    s = normal(5, 4, 3)
    pb = ng.pullback(nn.Linear(2, 3).double(), normal(4, 2), Remade(s))
    pb.root  # noqa: B018 - it is made
    with Reads(s) as reads:
        assert torch.equal(pb.root, s)
    assert len(reads.names) == 1  # this comparison


@final
@dataclass(frozen=True)
class Remade(ng.OutputMetric):
    """A metric that is given by its exact root, which is made where it is needed."""

    s: Tensor

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        raise AssertionError("nobody asks for it here")

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self.s[:, : len(y)]

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        raise AssertionError("nobody asks for it here")


def test_a_finite_root_whose_sum_overflows_is_no_mistake() -> None:
    s = torch.full((2, 4, 3), 3e38)
    pb = ng.pullback(nn.Linear(2, 3), normal(4, 2).float(), Rooted(s))
    assert torch.equal(pb.root, s)


@pytest.mark.parametrize("broken", [[torch.nan], [torch.inf], [torch.inf, -torch.inf]])
def test_a_root_that_is_not_finite_is_refused(broken: list[float]) -> None:
    s = normal(2, 4, 3)
    s.view(-1)[: len(broken)] = torch.tensor(broken)
    with pytest.raises(NonFiniteError, match="is not finite at the outputs: they are too large, or outside its domain"):
        ng.pullback(nn.Linear(2, 3).double(), normal(4, 2), Rooted(s))

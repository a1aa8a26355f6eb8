"""Loaders of batches in the place of one batch: what is computed from all of them is that of the joint batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.structures import Structure
from tests import oracle
from tests.optim.tasks import seeded
from tests.pulled import close, normal

N = 23


def data() -> tuple[Tensor, Tensor]:
    return normal(N, 5) * torch.linspace(0.2, 2.0, N)[:, None], torch.arange(N) % 4


def loader(*tensors: Tensor, batch: int = 6, shuffle: bool = False) -> DataLoader[Any]:
    """Batches of 6, 6, 6 and 5 examples; of one tensor x, or of pairs."""
    if len(tensors) == 1:
        return DataLoader(tensors[0], batch_size=batch)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(*tensors), batch_size=batch, shuffle=shuffle, generator=generator)


def gated() -> nn.Module:
    """No ReLU, whose dead positions would count by batch."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head, self.bend = (
                nn.Linear(5, 3),
                nn.Linear(5, 3),
                nn.Linear(3, 4),
                nn.Parameter(torch.full((4,), 0.3)),
            )

        def forward(self, x: Tensor) -> Tensor:
            y = self.head(self.a(x).sigmoid() * self.b(x).tanh())
            return y + (self.bend * y).sin()

    return seeded(lambda: Gated().double())


EXACT: list[Structure] = [
    ng.Dense(),
    ng.Dense(power=0.5),
    ng.BlockDense(),
    ng.Diagonal(),
    ng.Kernel(),
    ng.Implicit(),
    ng.Kronecker(),
    ng.LowRank(49),
]


@pytest.mark.parametrize("structure", EXACT, ids=repr)
def test_the_metric_of_a_loader_is_that_of_the_joint_batch(structure: Structure) -> None:
    (x, t), model = data(), gated()
    metric = ng.LossHessian(lambda y, target: F.cross_entropy(y, target, reduction="sum"))
    whole = structure.estimate(ng.pullback(model, x, metric, t))
    close(structure.estimate(ng.pullback(model, loader(x, t), metric)).dense(), whole.dense(), 1e-10)
    fisher = ng.Fisher(ng.Categorical())
    whole = structure.estimate(ng.pullback(model, x, fisher))
    close(structure.estimate(ng.pullback(model, loader(x), fisher)).dense(), whole.dense(), 1e-10)


def test_the_eigenvectors_of_a_loader_are_those_of_all_examples() -> None:
    """For EigenKronecker the eigenvalues are measured in a second pass."""
    x, model = data()[0], seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4)).double())
    metric, structure = ng.Fisher(ng.Categorical()), ng.EigenKronecker()
    whole = structure.estimate(ng.pullback(model, x, metric)).dense()
    close(structure.estimate(ng.pullback(model, loader(x), metric)).dense(), whole, 1e-9)


def test_the_natural_gradient_and_the_spectrum_of_a_loader() -> None:
    (x, t), model = data(), gated()
    pb = ng.pullback(model, loader(x, t), nn.CrossEntropyLoss())
    G = ng.Dense().estimate(pb)
    J, h = oracle.module_jacobian(model, x), oracle.categorical(model(x))
    close(G.dense(), oracle.dense(J, h), 1e-10)
    ω = ng.differential(model, F.cross_entropy(model(x), t))
    close(ng.sharp(G, ω, damping=0.1).flatten(), oracle.damped(G.dense(), ω.flatten(), 0.1), 1e-9)
    density = ng.spectral_density(pb)
    assert density.largest == pytest.approx(float(torch.linalg.eigvalsh(G.dense())[-1]), rel=1e-9)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "function": lambda y, t: F.cross_entropy(y, t) + y.pow(4).sum(1).mean(),
    "partial": partial(F.cross_entropy, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_hessian_of_a_loader_is_that_of_the_joint_batch(name: str) -> None:
    """Batches in another order in every product."""
    (x, t), model, loss = data(), gated(), LOSSES[name]
    whole = ng.hessian(model, x, lambda y: loss(y, t))
    H = ng.hessian(model, loader(x, t, shuffle=True), loss)
    close(H.dense(), whole.dense(), 1e-10)
    close(H.differential.flatten(), whole.differential.flatten(), 1e-10)
    v = normal(H.layout.size)
    close(H.product(v), whole.product(v), 1e-10)
    of_x = ng.hessian(model, loader(x), lambda y: y.square().sum(1).mean())
    close(of_x.product(v), ng.hessian(model, x, lambda y: y.square().sum(1).mean()).product(v), 1e-10)


CLASS_WEIGHTS = torch.tensor([0.1, 3.0, 0.7, 5.0], dtype=torch.float64)
COUNTING: dict[str, Callable[..., Tensor]] = {
    "class weights": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "ignored": nn.CrossEntropyLoss(ignore_index=2),
    "both": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=2, label_smoothing=0.1),
    "partial": partial(F.cross_entropy, weight=CLASS_WEIGHTS, ignore_index=2),
}


def uneven() -> tuple[Tensor, Tensor]:
    """Sorted labels: the batches have other classes, one of them nothing but ignored labels (2)."""
    return data()[0], torch.tensor([0] * 5 + [1, 3, 2, 1, 0, 3, 3] + [2] * 6 + [0, 2, 1, 3, 3])


@pytest.mark.parametrize("structure", [*EXACT, ng.EigenKronecker()], ids=repr)
@pytest.mark.parametrize("name", COUNTING)
def test_batches_weigh_what_their_loss_divides_by(name: str, structure: Structure) -> None:
    (x, t), loss = uneven(), COUNTING[name]
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4)).double())
    whole = structure.estimate(ng.pullback(model, x, loss, t)).dense()
    close(structure.estimate(ng.pullback(model, loader(x, t), loss)).dense(), whole, 1e-10)


def test_tokens_weigh_what_their_loss_divides_by() -> None:
    """Of sequences, A is the mean over the tokens that count, and G is that of the joint batch by the oracle."""
    x, loss = normal(7, 3, 2, seed=3), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=2)
    t = torch.tensor([[0, 1, 2], [2, 2, 2], [3, 3, 0], [1, 2, 2], [0, 0, 0], [2, 2, 3], [1, 3, 3]])

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).movedim(-1, 1)

    model = seeded(lambda: Tokens().double())
    H = ng.hessian(model, x, lambda y: loss(y, t)).dense()  # that of a linear model is its metric
    batches = loader(x, t, batch=2)
    close(ng.Dense().estimate(ng.pullback(model, batches, loss)).dense(), H, 1e-10)
    close(ng.hessian(model, batches, loss).dense(), H, 1e-10)
    for memory in (2**32, 2**12):  # also where a batch is processed in parts
        whole = ng.Kronecker().estimate(ng.pullback(model, x, loss, t)).dense()
        close(ng.Kronecker().estimate(ng.pullback(model, batches, loss, memory=memory)).dense(), whole, 1e-10)


@pytest.mark.parametrize("name", COUNTING)
def test_the_hessian_of_a_loader_has_the_mean_of_its_loss(name: str) -> None:
    (x, t), model, loss = uneven(), gated(), COUNTING[name]
    whole = ng.hessian(model, x, lambda y: loss(y, t))
    H = ng.hessian(model, loader(x, t), loss)
    close(H.dense(), whole.dense(), 1e-10)
    close(H.differential.flatten(), whole.differential.flatten(), 1e-10)
    with pytest.raises(ValueError, match="no target of the loader counts in"):
        ng.hessian(model, loader(x, torch.full_like(t, 2)), nn.CrossEntropyLoss(ignore_index=2))


def test_heads_of_a_loader_count_alike_or_are_refused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y: Tensor = self.body(x)
            return y[:, :4], y[:, 4:]

    (x, t), model = uneven(), seeded(lambda: Two().double())
    targets = [(t[i], torch.zeros(2, dtype=torch.float64)) for i in range(N)]
    pairs: Any = DataLoader([(x[i], targets[i]) for i in range(N)], batch_size=6)  # type: ignore[arg-type]
    metric = ng.metric_of((nn.CrossEntropyLoss(), nn.MSELoss()))
    whole = ng.Dense().estimate(ng.pullback(model, x, metric, (t, torch.zeros(N, 2, dtype=torch.float64)))).dense()
    close(ng.Dense().estimate(ng.pullback(model, pairs, metric)).dense(), whole, 1e-10)
    metric = ng.metric_of((nn.CrossEntropyLoss(ignore_index=2), nn.MSELoss()))
    with pytest.raises(IncompatibleError, match="the mean of every head is over the labels that it has"):
        ng.Dense().estimate(ng.pullback(model, pairs, metric))


def test_the_hessian_of_a_loader_stays_where_the_parameters_were() -> None:
    (x, t), model = data(), gated()
    H = ng.hessian(model, loader(x, t), nn.CrossEntropyLoss())
    before = H.dense()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    close(H.dense(), before, 0.0)


def test_the_jacobian_of_a_loader_is_that_of_the_joint_batch() -> None:
    (x, t), model = data(), gated()
    J, whole = ng.jacobian(model, loader(x, t)), ng.jacobian(model, x)
    close(J.y, whole.y, 1e-12)
    close(J.dense(), whole.dense(), 1e-12)
    v = ng.Vector({name: torch.randn_like(p) for name, p in model.named_parameters()})
    close(J.push(v), whole.push(v), 1e-12)
    close(J.pull(J.push(v)).flatten(), whole.pull(whole.push(v)).flatten(), 1e-11)
    close(ng.pushforward(model, loader(x), v), whole.push(v), 1e-12)


def test_what_a_loader_cannot_do_is_refused_by_name() -> None:
    (x, t), model = data(), gated()
    fisher, empty = ng.Fisher(ng.Categorical()), DataLoader(TensorDataset(x[:0], t[:0]))
    with pytest.raises(TypeError, match="target= belongs to one batch x; a loader brings its targets"):
        ng.pullback(model, loader(x, t), fisher, t)
    with pytest.raises(ValueError, match="the loader has no batch"):
        ng.Dense().estimate(ng.pullback(model, empty, fisher))
    with pytest.raises(ValueError, match="the loader has no batch"):
        ng.hessian(model, empty, nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="the loader has no batch"):
        ng.jacobian(model, empty)
    with pytest.raises(
        IncompatibleError, match=r"a DataLoader does not work with Sobolev\(.*, which couples the examples"
    ):
        ng.Dense().estimate(ng.pullback(model, loader(x), ng.Sobolev(lengthscale=1.0)))
    with pytest.raises(TypeError, match="the pullback of a DataLoader has no y: give one batch x here, or do it for"):
        _ = ng.pullback(model, loader(x), fisher).y
    for loss in (
        nn.CrossEntropyLoss(reduction="sum"),
        LOSSES["partial"],
        ng.Sampled(ng.metric_of(nn.MSELoss(reduction="sum")), 2),
    ):
        with pytest.raises(IncompatibleError, match=r'the metric grows with the examples.*with reduction="mean"'):
            ng.pullback(model, loader(x, t), loss)
    with pytest.raises(TypeError, match="x is a DataLoader, where one batch of inputs belongs"):
        ng.functionspace.ntk(model, loader(x))
    with pytest.raises(TypeError, match="DataLoader"):
        ng.natural_gradient(model, loader(x), lambda y: y.sum(), fisher)
    with pytest.raises(
        TypeError, match=r"a loader must give tensors x or pairs \(x, target\), and this one gave a dict"
    ):
        ng.jacobian(model, DataLoader([{"x": 1.0}]))  # type: ignore[list-item, arg-type, var-annotated, unused-ignore]

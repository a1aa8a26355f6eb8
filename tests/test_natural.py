"""The golden network through the public functions, piece by piece and in one call."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.solve import Solver
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.golden import agrees, golden, golden_mlp, tensor
from tests.pulled import close, normal

FISHER = ng.Fisher(ng.Categorical(axis=-1))


def fisher() -> tuple[nn.Sequential, Tensor, Tensor, ng.Pullback]:
    model, x, target = golden_mlp()
    return model, x, target, ng.pullback(model, x, FISHER)


def test_jacobian_of_the_golden_network() -> None:
    """R of the Euclidean metric is J/√N, one output a column."""
    case = golden("mlp.jacobian")
    model, x, _ = golden_mlp()
    R = ng.Kernel().estimate(ng.pullback(model, x, ng.Euclidean())).rows()
    agrees(case, R.view(3, len(x), -1).transpose(0, 1) * len(x) ** 0.5, "J")


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel(), ng.Implicit(), ng.LowRank(21)], ids=repr)
def test_fisher_and_gauss_newton_of_the_golden_network(structure: Structure) -> None:
    model, x, _, pb = fisher()
    agrees(golden("mlp.fisher"), structure.estimate(pb).dense(), "F")
    euclidean = ng.pullback(model, x, ng.Euclidean())
    agrees(golden("mlp.gauss_newton"), structure.estimate(euclidean).dense(), "GN")


@pytest.mark.parametrize(
    "structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(4), ng.Kernel(), ng.Implicit()], ids=repr
)
def test_diagonal_and_trace_of_the_golden_fisher(structure: Structure) -> None:
    *_, pb = fisher()
    case = golden("mlp.fisher.diag")
    G = structure.estimate(pb)
    agrees(case, G.diagonal(), "diag")
    agrees(case, G.trace(), "trace")


def test_rank_of_the_golden_fisher_is_reported() -> None:
    *_, pb = fisher()
    rank = golden("mlp.fisher.diag")["expected"]["rank"]
    w = ng.Covector(pb.template)
    with pytest.raises(ng.errors.SingularMetricError, match=rf"rank {rank} of 21"):
        ng.sharp(ng.Dense().estimate(pb), w)
    assert ng.LowRank(21).estimate(pb).values.numel() == rank


WAYS: dict[str, tuple[Structure | None, Solver | None]] = {
    "default": (None, None),
    "Dense Pinv": (ng.Dense(), ng.Pinv()),
    "Dense CG": (ng.Dense(), ng.CG(tol=1e-14)),
    "Kernel Cholesky": (ng.Kernel(), ng.Cholesky()),
    "LowRank Cholesky": (ng.LowRank(12), ng.Cholesky()),
    "Implicit CG": (ng.Implicit(), ng.CG(tol=1e-14)),
    "Implicit CG preconditioned": (ng.Implicit(), ng.CG(tol=1e-14, preconditioner=ng.BlockDense())),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_natural_gradient_of_the_golden_network_in_one_call(way: str, as_tensor: bool) -> None:
    case = golden("mlp.natgrad.damped")
    model, x, target = golden_mlp()
    structure, solver = WAYS[way]
    loss = F.cross_entropy(model(x), target) if as_tensor else lambda y: F.cross_entropy(y, target)
    damping = case["inputs"]["damping"]
    v = ng.natural_gradient(model, x, loss, FISHER, structure=structure, solver=solver, damping=damping)
    assert isinstance(v, ng.Vector)
    assert list(v) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    agrees(case, v.flatten(), "natgrad")
    agrees(case, ng.differential(model, F.cross_entropy(model(x), target)) @ v, "quad")
    assert all(p.grad is None for p in model.parameters())


def test_natural_gradient_does_not_depend_on_the_reduction_inside_the_metric() -> None:
    """The metric never sees how the loss is reduced: twice the loss, twice the vector."""
    model, x, target = golden_mlp()
    mean = ng.natural_gradient(model, x, lambda y: F.cross_entropy(y, target), FISHER, damping=0.1)
    total = ng.natural_gradient(model, x, lambda y: F.cross_entropy(y, target, reduction="sum"), FISHER, damping=0.1)
    close(total.flatten(), len(x) * mean.flatten())


def test_empirical_fisher_of_the_golden_network() -> None:
    model, x, target = golden_mlp()
    rows = tensor(golden("mlp.forward")["expected"]["per_example_grad"])
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(reduction="sum")):
        pb = ng.pullback(model, x, ng.Empirical(loss), target)
        close(ng.Dense().estimate(pb).dense(), rows.T @ rows / len(x))


def test_natural_gradient_of_a_pure_function() -> None:
    problem = zoo.case("pure_function").make()
    assert problem.params is not None
    G = oracle.dense(problem.jacobian(), oracle.euclidean(problem.outputs()))
    u = normal(*problem.outputs().shape)
    v = ng.natural_gradient(
        problem.model, problem.x, lambda y: (u * y).sum(), ng.Euclidean(), damping=0.1, params=problem.params
    )
    w = torch.einsum("ndp,nd->p", problem.jacobian(), u)
    close(v.flatten(), oracle.damped(G, w, 0.1))


def _in_a_dict(raw: dict[str, Tensor]) -> Tensor:
    return raw["logits"]


class _Dict(nn.Module):
    """A model that returns its outputs in a dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x)}


def test_outputs_in_a_dict_are_pushed_forward_and_pulled_back_through_output() -> None:
    inner, x, target = golden_mlp()
    model = _Dict(inner)
    J = oracle.module_jacobian(inner, x)
    v = ng.natural_gradient(model, x, lambda y: F.cross_entropy(y, target), FISHER, damping=0.1, output=_in_a_dict)
    close(ng.pushforward(model, x, v, output=_in_a_dict), torch.einsum("ndp,p->nd", J, v.flatten()))
    u = normal(len(x), 3)
    close(ng.pullback_covector(model, x, u, output=_in_a_dict).flatten(), torch.einsum("ndp,nd->p", J, u))
    with pytest.raises(TypeError, match="returned a dict: pass output="):
        ng.pushforward(model, x, v)


def test_natural_gradient_step_descends() -> None:
    """⟨ω, ω♯⟩ > 0, and the loss falls along −ω♯ to first order at that rate."""
    model, x, target = golden_mlp()
    v = ng.natural_gradient(model, x, lambda y: F.cross_entropy(y, target), FISHER, damping=1e-3)
    w = ng.differential(model, F.cross_entropy(model(x), target))
    rate = float(w @ v)
    assert rate > 0
    losses = []
    for step in (1e-5, -1e-5):
        moved = {name: p.detach() for name, p in model.named_parameters()} + (-step) * v
        losses.append(float(F.cross_entropy(torch.func.functional_call(model, moved, (x,)), target)))
    assert (losses[1] - losses[0]) / 2e-5 == pytest.approx(rate, rel=1e-6)


def _one_call(model: nn.Module, x: Tensor, **slots: Any) -> ng.Vector:
    return ng.natural_gradient(model, x, lambda y: y.sum(), slots.pop("metric", FISHER), damping=0.1, **slots)


def _sharp(model: nn.Module, x: Tensor, swapped: bool = False, **slots: Any) -> ng.Vector:
    both: list[Any] = [ng.Dense().estimate(ng.pullback(model, x, FISHER)), ng.differential(model, model(x).sum())]
    return ng.sharp(*(both[::-1] if swapped else both), **slots)


REFUSED = [
    (lambda m, x: ng.natural_gradient(m, x, torch.tensor(1.0), FISHER), ValueError, "the loss has no graph"),
    (lambda m, x: ng.natural_gradient(m, x, lambda y: y, FISHER), ValueError, "the loss must be one number"),
    (lambda m, x: ng.natural_gradient(m, x[:0], lambda y: y.sum(), FISHER), ValueError, "the batch is empty"),
    (lambda m, x: ng.natural_gradient(m, x, lambda y: y.sum(), ng.Empirical(F.mse_loss)), ValueError, "target="),
    (
        lambda m, x: _one_call(m, x, solver=ng.Pinv),
        TypeError,
        r"solver must be .*Solver, got the class Pinv: write Pinv\(",
    ),
    (
        lambda m, x: _one_call(m, x, structure=ng.Dense),
        TypeError,
        r"structure must be .*the class Dense: write Dense\(",
    ),
    (lambda m, x: _one_call(m, x, metric=ng.Euclidean), TypeError, r"metric must be .* write Euclidean\("),
    (lambda m, x: _one_call(m, x, structure=ng.Pinv()), TypeError, "structure must be a natgrad Structure, got Pinv"),
    (lambda m, x: _sharp(m, x, solver=ng.CG), TypeError, r"solver must be .* write CG\("),
    (lambda m, x: _sharp(m, x, swapped=True), TypeError, "G must be a natgrad Operator, got Covector"),
    (
        lambda m, x: ng.sharp(ng.pullback(m, x, FISHER), ng.differential(m, m(x).sum())),  # type: ignore[arg-type]
        TypeError,
        r"Operator, got a Pullback: ng\.Kernel\(\)\.estimate\(pullback\) makes one",
    ),
    (
        lambda m, x: ng.natural_gradient(m, x, nn.CrossEntropyLoss(), FISHER),
        TypeError,
        r"of the outputs alone, and CrossEntropyLoss is not: write lambda y: loss\(y, target\)",
    ),
    (lambda m, x: ng.hessian(m, x, F.mse_loss), TypeError, "of the outputs alone, and mse_loss is not"),
    (lambda m, x: ng.diagnose(m), TypeError, r"got a Sequential: ng\.pullback\(model, x, metric\) makes one"),
    (lambda m, x: ng.natural_gradient(m, x / 0, lambda y: y.sum(), FISHER), ng.errors.NonFiniteError, "not finite"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_mistakes_are_named(call: object, error: type[Exception], message: str) -> None:
    model, x, _ = golden_mlp()
    assert callable(call)
    with pytest.raises(error, match=message):
        call(model, x)


def flat_hessian(model: nn.Module, of: Any) -> Tensor:
    """∇² of a function of the model's outputs, by torch's own double backward pass over flattened parameters."""
    params = oracle.parameters(model)

    def value(θ: Tensor) -> Tensor:
        return of(lambda x: torch.func.functional_call(model, oracle.unflatten(θ, params), (x,)))

    hessian: Any = torch.autograd.functional.hessian
    return hessian(value, oracle.flatten(params.values()))


def test_hessian_is_gauss_newton_and_the_curvature_of_the_model() -> None:
    """H = JᵀMJ + Σ_d (∂L/∂y_d) ∇²y_d (Johnson 2017, (40)), with JᵀMJ the Fisher metric of the logits."""
    model, x, target = golden_mlp()
    H = ng.hessian(model, x, lambda y: F.cross_entropy(y, target))
    close(H.dense(), flat_hessian(model, lambda f: F.cross_entropy(f(x), target)))
    y = model(x).detach().requires_grad_()
    (u,) = torch.autograd.grad(F.cross_entropy(y, target), y)
    curvature = flat_hessian(model, lambda f: (u * f(x)).sum())
    close(H.dense(), tensor(golden("mlp.fisher")["expected"]["F"]) + curvature, 1e-9)
    assert float(torch.linalg.eigvalsh(H.dense())[0]) < 0
    v = normal(21)
    close(H.product(v), H.dense() @ v)
    close(H.flat(H.layout.vector(v)).flatten(), H.dense() @ v)
    close(H.differential.flatten(), oracle.differential(model, F.cross_entropy(model(x), target)))


def test_hessian_of_a_transformer_layer() -> None:
    """Fused attention on a CPU has no second derivative; the library does not take it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True).double().eval()
    x, v = normal(2, 3, 4), normal(sum(p.numel() for p in layer.parameters()))
    H = ng.hessian(layer, x, lambda y: y.pow(3).mean())
    step, params = 1e-5, dict(layer.named_parameters())

    def gradient(sign: float) -> Tensor:
        moved = oracle.unflatten(oracle.flatten(params.values()) + sign * step * v, params)
        leaves = {name: t.detach().requires_grad_() for name, t in moved.items()}
        value = torch.func.functional_call(layer, leaves, (x,)).pow(3).mean()
        return oracle.flatten(torch.autograd.grad(value, list(leaves.values()), materialize_grads=True))

    close(H.product(v), (gradient(1.0) - gradient(-1.0)) / (2 * step), 1e-7)


class Scaled(nn.Module):
    """A layer times a number [], beside a parameter without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 3), nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x).tanh() * self.scale
        return scaled


def test_hessian_in_a_number_and_beside_a_parameter_without_numbers_is_that_of_autograd() -> None:
    torch.manual_seed(0)
    model, x = Scaled().double(), normal(5, 2)
    H = ng.hessian(model, x, lambda y: y.pow(4).sum())
    w, b = model.layer.weight.detach(), model.layer.bias.detach()

    def loss(θ: Tensor) -> Tensor:
        scale, weight, bias = θ[0], θ[1:7].view(3, 2), θ[7:]
        return ((x @ weight.T + bias).tanh() * scale).pow(4).sum()

    θ = torch.cat([model.scale.detach().view(1), w.flatten(), b])
    assert list(H.layout.like) == ["scale", "empty", "layer.weight", "layer.bias"]
    close(H.dense(), torch.autograd.functional.hessian(loss, θ))


def test_hessian_leaves_batch_statistics_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    before = {name: t.clone() for name, t in model.named_buffers()}
    ng.hessian(model, normal(5, 2), lambda y: y.square().mean()).product(normal(19))
    assert all(torch.equal(t, before[name]) for name, t in model.named_buffers())


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel(), ng.Kronecker(), ng.Diagonal()], ids=repr)
def test_complex_elements_wrong_dampings_and_no_pullback_are_refused(structure: Structure) -> None:
    """The imaginary part would be dropped."""
    model, x = nn.Linear(3, 2).double(), normal(6, 3)
    G = structure.estimate(ng.pullback(model, x, ng.Euclidean()))
    values = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    wave = {name: t + 1j for name, t in values.items()}
    with pytest.raises(TypeError, match=r"the metric is over real numbers, and weight is of torch.complex128"):
        G.flat(ng.Vector(wave))
    with pytest.raises(TypeError, match=r"and weight is of torch.complex128: torch.view_as_real"):
        ng.sharp(G, ng.Covector(wave), damping=0.1)
    bad: Any
    for bad in (None, "0.1", torch.ones(2), 1j):
        with pytest.raises(TypeError, match="damping must be a number ≥ 0, or Relative"):
            ng.sharp(G, ng.Covector(values), damping=bad)
    bad = G
    with pytest.raises(
        TypeError, match=r"pullback must be a natgrad Pullback, got .*: ng.pullback\(model, x, metric\)"
    ):
        structure.estimate(bad)


def test_what_has_no_hessian_is_refused() -> None:
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    with pytest.raises(TypeError, match=r"a tensor with one number, and this is shape \(5, 2\)"):
        ng.hessian(model, x, lambda y: y)
    with pytest.raises(TypeError, match="a tensor with one number, and this is a float"):
        ng.hessian(model, x, lambda y: cast(Any, 1.0))
    with pytest.raises(ValueError, match="the loss has no graph: compute it from the outputs, undetached"):
        ng.hessian(model, x, lambda y: y.detach().square().sum())
    G: Any = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean()))
    with pytest.raises(TypeError, match=r"probes and steps are whole numbers, got 4 and 2.5"):
        ng.spectral_density(G, steps=cast(Any, 2.5))
    with pytest.raises(TypeError, match=r"G must be a natgrad Operator, got None"):
        ng.spectral_density(cast(Any, None))

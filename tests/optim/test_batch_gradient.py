"""BatchGradient: every structure is the moving average of g gᵀ that plain torch formulas give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError, MemoryBoundError, NonFiniteError, UncoveredError

DECAY = 0.9


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(7, 3), nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0][:, -1])


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 2), nn.Flatten(), nn.Linear(3 * 4, 2))


def images() -> Tensor:
    return torch.randn(6, 2, 5, 5, dtype=torch.float64)


def tokens() -> Tensor:
    return torch.randint(7, (6, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), lambda: torch.randn(6, 3).double()),
    "convolution": (convolutional, images),
    "recurrent": (Recurrent, tokens),
}


def steps(
    model: nn.Module, batch: Callable[[], Tensor], opt: torch.optim.Optimizer, count: int
) -> list[dict[str, Tensor]]:
    """Steps on the loss Σ y², and the gradients that each of them had."""
    seen = []
    for _ in range(count):
        opt.zero_grad()
        model(batch()).square().sum().backward()
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        opt.step()
    return seen


def average(estimates: list[Tensor]) -> Tensor:
    """Σ_t β^{T−t} G_t / Σ_t β^{T−t}."""
    weights = [DECAY ** (len(estimates) - 1 - t) for t in range(len(estimates))]
    return torch.stack([w * e for w, e in zip(weights, estimates, strict=True)]).sum(0) / sum(weights)


def optimizer(model: nn.Module, structure: ng.structures.Structure, **options: Any) -> ng.NaturalGradient:
    given: dict[str, Any] = {"lr": 1e-3, "damping": 1e-1} | options
    return ng.NaturalGradient(model, ng.BatchGradient(), structure=ng.Refresh(structure, 1, DECAY), **given)


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradient.values()])


def factors(g: Tensor) -> tuple[Tensor, Tensor]:
    """Shampoo's two factors of a gradient [o i *k], each over the numbers that it sums."""
    k = g.flatten(2) if g.ndim > 2 else g[..., None]
    s = torch.einsum("oik,pik->op", k, k) / k[0].numel()
    return s, torch.einsum("oik,ojk->ij", k, k) / k[:, 0].numel()


@pytest.fixture(params=list(MODELS))
def model_and_batch(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model, batch = MODELS[request.param]
    return model().double(), batch


def test_diagonal_is_the_mean_of_squares(model_and_batch: tuple[nn.Module, Callable[[], Tensor]]) -> None:
    model, batch = model_and_batch
    opt = optimizer(model, ng.Diagonal())
    seen = steps(model, batch, opt, 4)
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.diagonal(), average([flat(g).square() for g in seen]))


def test_dense_is_the_mean_of_outer_products(model_and_batch: tuple[nn.Module, Callable[[], Tensor]]) -> None:
    model, batch = model_and_batch
    opt = optimizer(model, ng.Dense())
    seen = steps(model, batch, opt, 3)
    expected = average([torch.outer(flat(g), flat(g)) for g in seen])
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.dense(), expected)


def test_block_dense_is_the_mean_of_outer_products_of_every_layer() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["linear"][0]().double(), MODELS["linear"][1]
    opt = optimizer(model, ng.BlockDense())
    seen = steps(model, batch, opt, 3)
    whole = average([torch.outer(flat(g), flat(g)) for g in seen])
    first = 3 * 4 + 4
    expected = torch.block_diag(whole[:first, :first], whole[first:, first:])
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.dense(), expected)


def test_kronecker_has_the_factors_of_shampoo(model_and_batch: tuple[nn.Module, Callable[[], Tensor]]) -> None:
    model, batch = model_and_batch
    opt = optimizer(model, ng.Kronecker())
    seen = steps(model, batch, opt, 4)
    assert opt.tracker.average is not None
    found = opt.tracker.average.tensors()
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue
        for side, letter in enumerate("SA"):
            expected = average([factors(g[name])[side] for g in seen])
            torch.testing.assert_close(found[f"{name}/{letter}"], expected[None])


def test_the_offsets_of_a_kernel_share_the_factors() -> None:
    """G is S ⊗ A ⊗ 1 on a weight [o i k], row-major: product, diagonal, dense, determinant and inverses agree."""
    torch.manual_seed(0)
    model = convolutional().double()
    opt = optimizer(model, ng.Kronecker())
    seen = steps(model, images, opt, 2)
    G = opt.tracker.average
    assert G is not None
    blocks = []
    for name, p in model.named_parameters():
        if p.ndim < 2:
            blocks.append(torch.diag(average([g[name].square() for g in seen])))
            continue
        s, a = (average([factors(g[name])[side] for g in seen]) for side in (0, 1))
        blocks.append(torch.kron(torch.kron(s, a), torch.eye(p[0, 0].numel(), dtype=p.dtype)))
    expected = torch.block_diag(*blocks)
    λ, ω = 0.3, torch.randn(len(expected), dtype=torch.float64)
    damped = expected + λ * torch.eye(len(expected), dtype=torch.float64)
    torch.testing.assert_close(G.dense(), expected)
    torch.testing.assert_close(G.product(ω), expected @ ω)
    torch.testing.assert_close(G.diagonal(), expected.diagonal())
    torch.testing.assert_close(G.logdet(λ), torch.logdet(damped))
    torch.testing.assert_close(G.inverse(λ).solve(ω), torch.linalg.solve(damped, ω))


@pytest.mark.parametrize("largest", [2, 16384])
def test_factored_inverses_of_kernels(largest: int) -> None:
    """S⁻¹ W_k A⁻¹ at every offset, with the damping of K-FAC, also where a factor is a diagonal.

    Where both are, W is the matrix [o i·k], and every offset has its own entries of A.
    """
    torch.manual_seed(0)
    model = convolutional().double()
    opt = optimizer(model, ng.Kronecker(largest=largest), solver=ng.Factored(), damping=1e-2)
    steps(model, images, opt, 3)
    G = opt.tracker.average
    assert G is not None
    tensors, λ = G.tensors(), 1e-2
    ω = ng.Covector({name: torch.randn_like(p) for name, p in model.named_parameters()})
    v = ng.Factored().init(G, λ).sharp(ω)
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue
        s, a = (tensors[f"{name}/{side}"][0] for side in "SA")
        s, a = (torch.diag(f) if f.ndim == 1 else f for f in (s, a))
        assert (s.count_nonzero() == len(s)) == (len(s) > largest)
        π = ((a.trace() / len(a)) / (s.trace() / len(s))).sqrt()
        left = s + λ**0.5 / π * torch.eye(len(s), dtype=s.dtype)
        right = a + λ**0.5 * π * torch.eye(len(a), dtype=a.dtype)
        assert len(a) == (p[0].numel() if min(p.shape[:2]) > largest else p.shape[1])
        w = ω[name].reshape(len(s), len(a), -1)
        expected = torch.einsum("op,pik,ij->ojk", left.inverse(), w, right.inverse())
        torch.testing.assert_close(v[name], expected.reshape(p.shape))


def test_eigen_kronecker_has_the_second_moments_in_the_eigenvectors() -> None:
    """The basis is that of the last inverse, which is every step here, and D is carried into it."""
    torch.manual_seed(0)
    model = convolutional().double()
    opt = optimizer(model, ng.EigenKronecker())
    (gradient,) = steps(model, images, opt, 1)
    assert opt.tracker.average is not None
    found = opt.tracker.average.tensors()
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue
        s, a = factors(gradient[name])
        q, r = torch.linalg.eigh(s)[1], torch.linalg.eigh(a)[1]
        g = gradient[name].reshape(*p.shape[:2], -1)
        expected = torch.einsum("op,oik,ij->kpj", q, g, r).square()
        torch.testing.assert_close(found[f"{name}/D"], expected)


@pytest.mark.parametrize("largest", [3, 16384])
def test_second_moments_are_averaged_in_a_basis_that_stays(largest: int) -> None:
    """Matrices of one shape as one batch; the axes are the basis where only a diagonal is kept."""
    torch.manual_seed(0)
    model = nn.Sequential(convolutional(), nn.Linear(2, 2), nn.Linear(2, 2)).double()
    structure = ng.Refresh(ng.EigenKronecker(largest=largest), 1, DECAY, inverse=100, early=False)
    opt = ng.NaturalGradient(model, ng.BatchGradient(), structure=structure, lr=1e-3, damping=0.1)
    seen = steps(model, images, opt, 4)
    assert opt.tracker.average is not None
    found = opt.tracker.average.tensors()
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue
        sides = [
            torch.linalg.eigh(factor)[1] if len(factor) <= largest else torch.eye(len(factor), dtype=p.dtype)
            for factor in factors(seen[0][name])
        ]
        turned = [torch.einsum("op,oik,ij->kpj", sides[0], g[name].reshape(*p.shape[:2], -1), sides[1]) for g in seen]
        torch.testing.assert_close(found[f"{name}/D"], average([t.square() for t in turned]))
        s = average([factors(g[name])[0] for g in seen])
        torch.testing.assert_close(found[f"{name}/S"][0], s if len(s) <= largest else s.diagonal())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_half_power_of_the_diagonal_is_adam(momentum: float) -> None:
    """θ ← θ − lr m̂/√v̂, with Adam's corrections for the start of the averages."""

    def trained(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Tensor:
        torch.manual_seed(0)
        model = convolutional().double()
        steps(model, images, make(model), 5)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    expected = trained(lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, betas=(momentum, DECAY), eps=0.0))
    options: dict[str, Any] = {"momentum": momentum, "momentum_on": "gradients", "nesterov": False}
    found = trained(lambda m: optimizer(m, ng.Diagonal(power=0.5), lr=1e-2, damping=0.0, **options))
    torch.testing.assert_close(found, expected)


def test_the_first_gradient_of_a_parameter_counts_in_full_without_nesterovs_step() -> None:
    """Also where it comes in a later step."""
    model = nn.Linear(2, 2).double()
    options: dict[str, Any] = {"momentum": 0.9, "momentum_on": "gradients", "nesterov": False, "lr": 0.5}
    opt = ng.NaturalGradient(model, ng.BatchGradient(), structure=ng.Diagonal(power=0.0), **options)
    for step in range(5):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
        if step < 3:
            model.bias.grad = None
        opt.step()
        torch.testing.assert_close(model.weight.detach(), before["weight"] - 0.5)
        torch.testing.assert_close(model.bias.detach(), before["bias"] - 0.5 * (step >= 3))


@pytest.mark.parametrize("solver", [ng.Cholesky(), ng.Factored()], ids=repr)
@pytest.mark.parametrize("power", [0.5, 0.75])
def test_powers_of_the_factors_are_shampoo(power: float, solver: ng.solve.Solver) -> None:
    """(S + ε tr S/o)^-p G_k (A + ε tr A/i)^-p at every offset k."""
    torch.manual_seed(0)
    model, ε = convolutional().double(), 1e-2
    opt = optimizer(model, ng.Kronecker(power=power), damping=ng.Relative(ε), solver=solver)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (gradient,) = steps(model, images, opt, 1)
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue
        sides = []
        for factor in factors(gradient[name]):
            λ, q = torch.linalg.eigh(factor)
            sides.append(q @ torch.diag((λ + ε * λ.mean()) ** -power) @ q.T)
        g = gradient[name].reshape(*p.shape[:2], -1)
        v = torch.einsum("op,pik,ij->ojk", sides[0], g, sides[1]).reshape(p.shape)
        torch.testing.assert_close((before[name] - p.detach()) / 1e-3, v, rtol=1e-4, atol=1e-8)


STRUCTURES = (
    *(ng.Diagonal(), ng.Dense(), ng.BlockDense(), ng.Kronecker(), ng.EigenKronecker()),
    *(ng.Kronecker(power=0.5), ng.EigenKronecker(power=0.5)),  # the fallback of the vectors has the power, too
)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_resuming_is_exact(structure: ng.structures.Structure) -> None:
    def fresh() -> tuple[nn.Module, ng.NaturalGradient]:
        torch.manual_seed(0)
        model = convolutional().double()
        return model, optimizer(model, structure, momentum=0.9)

    model, opt = fresh()
    steps(model, images, opt, 3)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    resumed, again = fresh()
    resumed.load_state_dict(weights)
    again.load_state_dict(saved)
    torch.manual_seed(1)
    steps(model, images, opt, 3)
    torch.manual_seed(1)
    steps(resumed, images, again, 3)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_a_parameter_without_a_gradient_keeps_its_part(structure: ng.structures.Structure) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}).double()
    opt = optimizer(model, structure)
    x = torch.randn(5, 3, dtype=torch.float64)

    def step(*names: str) -> Tensor:
        opt.zero_grad()
        sum(model[name](x).square().sum() for name in names).backward()
        opt.step()
        assert opt.tracker.average is not None
        return opt.tracker.average.dense()

    size = 3 * 2 + 2
    before = step("a", "b").clone()
    after = step("a").clone()
    torch.testing.assert_close(after[size:, size:], before[size:, size:])
    assert not torch.allclose(after[:size, :size], before[:size, :size])
    for names in ("b", "a", "b", "ab"):  # an average of g gᵀ
        values = torch.linalg.eigvalsh(step(*names))
        assert values[0] >= -1e-12 * values[-1]


@pytest.mark.parametrize("saved", [1, 4, 6])
def test_resuming_is_exact_before_a_layer_has_had_a_gradient(saved: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "late": nn.Linear(4, 4)}).double()

    def step(model: nn.ModuleDict, opt: torch.optim.Optimizer, number: int) -> None:
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        opt.zero_grad()
        sum(model[name](x).square().sum() for name in ("a", "b", *["late"] * (number > 4))).backward()
        opt.step()

    opt = ng.SOAP(model, lr=1e-2, basis_every=3)
    for number in range(saved):
        step(model, opt, number)
    resumed = copy.deepcopy(model)
    again = ng.SOAP(resumed, lr=1e-2, basis_every=3)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for number in range(saved, 12):
        step(model, opt, number)
        step(resumed, again, number)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("preset", [ng.Natural, ng.Shampoo, ng.SOAP])
def test_squares_of_gradients_that_overflow_are_refused(preset: Any) -> None:
    linear = nn.Linear(4, 3, bias=False)
    opt = preset(linear)
    linear.weight.grad = torch.full((3, 4), 1e20)
    with pytest.raises(NonFiniteError, match="holds NaN or infinity"):
        opt.step()


def test_a_matrix_that_has_its_first_gradient_late_has_all_of_it() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}).double()
    opt = optimizer(model, ng.Kronecker())
    x = torch.randn(5, 3, dtype=torch.float64)
    for names in ("a", "a", "ab"):
        opt.zero_grad()
        sum(model[name](x).square().sum() for name in names).backward()
        opt.step()
    gradient = model.get_parameter("b.weight").grad
    assert gradient is not None
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.tensors()["b.weight/S"][0], factors(gradient)[0])


def test_accumulated_passes_are_one_gradient() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["linear"][0]().double(), MODELS["linear"][1]
    opt = optimizer(model, ng.Kronecker())
    for _ in range(2):
        model(batch()).square().sum().backward()
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    opt.step()
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.tensors()["0.weight/A"][0], factors(gradient)[1])


def test_scaled_gradients_are_seen_without_their_scale() -> None:
    """``GradScaler`` divides before the step, and a step that it leaves out is not seen."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    opt, scaler = optimizer(model, ng.Kronecker()), torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for broken in (False, True):
        opt.zero_grad()
        loss = model(x).square().sum()
        (expected,) = torch.autograd.grad(loss, model.weight, retain_graph=True)
        scaler.scale(loss * (float("inf") if broken else 1.0)).backward()
        before = opt.tracker.step
        scaler.step(opt)
        scaler.update()
        assert opt.tracker.step == before + (not broken)
        if not broken:
            assert opt.tracker.average is not None
            torch.testing.assert_close(opt.tracker.average.tensors()["weight/S"][0], factors(expected)[0])


def test_half_precision_is_summed_in_single() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).bfloat16()
    opt = optimizer(model, ng.Kronecker())
    model(torch.randn(4, 3).bfloat16()).square().sum().backward()
    assert model.weight.grad is not None
    gradient = model.weight.grad.float()
    opt.step()
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.tensors()["weight/A"][0], factors(gradient)[1])


@pytest.mark.parametrize("damping", [0.1, ng.Relative(1e-2)], ids=repr)
@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_first_gradients_of_zero_make_steps_of_zero(
    structure: ng.structures.Structure, damping: float | ng.Relative
) -> None:
    torch.manual_seed(0)
    model = convolutional().double()
    before = [p.detach().clone() for p in model.parameters()]
    opt = optimizer(model, structure, damping=damping)
    (0 * model(images()).sum()).backward()
    opt.step()
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)
    steps(model, images, opt, 1)
    assert not torch.equal(next(model.parameters()), before[0])
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_no_hook_is_put_on_the_model() -> None:
    model = nn.Linear(3, 2)
    opt = optimizer(model, ng.Kronecker())
    assert not model._forward_pre_hooks
    assert "BatchGradient()" in repr(opt)
    rows = {row.names[0]: (row.rule, row.structure) for row in opt.plan().rows}
    assert rows == {"weight": ("Matrix", "Kronecker"), "bias": (None, "Diagonal (fallback)")}
    assert "rule covers" not in str(opt.plan())


@pytest.mark.parametrize(
    "structure", [ng.LowRank(2), ng.Kernel(), ng.Implicit(), ng.Kronecker(fallback=ng.LowRank(1))], ids=repr
)
def test_structures_of_rows_refuse(structure: ng.structures.Structure) -> None:
    with pytest.raises(IncompatibleError, match=r"BatchGradient does not work with (LowRank|Kernel|Implicit)"):
        ng.NaturalGradient(nn.Linear(3, 2), ng.BatchGradient(), structure=structure)


def test_bad_input() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(UncoveredError, match="bias: fewer than two axes"):
        optimizer(model, ng.Kronecker(strict=True))
    with pytest.raises(ValueError, match="needs no layer rules"):
        optimizer(model, ng.Kronecker(), rules=[ng.rules.LinearRule()])
    with pytest.raises(IncompatibleError, match="no metric on the outputs"):
        ng.Dense().estimate(ng.pullback(model, torch.ones(1, 3), ng.BatchGradient()))
    opt = optimizer(model, ng.Kronecker())
    with pytest.raises(IncompatibleError, match="nothing to refresh"):
        opt.refresh(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"call loss\.backward"):
        opt.step()
    opt = optimizer(model, ng.Kronecker(), memory=16)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(MemoryBoundError, match="Kronecker of 8 parameters needs 52 bytes"):
        opt.step()


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = optimizer(model, ng.Kronecker())
    model(torch.randn(4, 3)).square().sum().backward()
    opt.step()
    assert opt.tracker.average is not None
    before = {key: t.clone() for key, t in opt.tracker.average.tensors().items()}
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="the gradient of weight holds NaN"):
        opt.step()
    for key, t in opt.tracker.average.tensors().items():
        assert torch.equal(t, before[key])

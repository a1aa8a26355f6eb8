"""Muon, Shampoo, SOAP and Natural, step by step beside torch.optim and beside references in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from benchmarks import rivals
from tests import oracle
from tests.optim.tasks import seeded

STEPS = 13  # a cycle of ten and its end
Optimizers = Iterable[Any]


class Net(nn.Module):
    """Tokens, a convolution with offsets, a wide and a tall matrix, gains and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.conv = nn.Embedding(7, 3), nn.Conv1d(3, 4, 2)
        self.norm, self.wide, self.tall = nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n r] to logits [n r-1 5]."""
        h = torch.tanh(self.conv(self.tokens(x).mT)).mT
        return self.tall(torch.tanh(self.wide(self.norm(h))))


MATRICES = ("conv.weight", "wide.weight", "tall.weight")


def _net(dtype: torch.dtype = torch.float64) -> Net:
    return seeded(lambda: Net().to(dtype))


def _parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What a metric steps, and what AdamW does."""
    params = dict(model.named_parameters())
    return [params[name] for name in MATRICES], [p for name, p in params.items() if name not in MATRICES]


def _train(model: nn.Module, optimizers: Optimizers, steps: int = STEPS) -> list[Tensor]:
    """θ after every step, on a task that is the same every time; the learning rates fall."""
    path = []
    for step in range(steps):
        x = seeded(lambda: torch.randint(7, (6, 5)), 100 + step)
        for p in model.parameters():
            p.grad = None
        nn.functional.cross_entropy(model(x).flatten(0, 1), x[:, 1:].flatten() % 5).backward()
        for opt in optimizers:
            opt.step()
            for group in opt.param_groups:
                group["lr"] *= 0.9
        path.append(oracle.flatten(model.parameters()))
    return path


def _adamw(params: list[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)


class Lent:
    """Kernels as matrices in the same memory, for an optimizer of matrices."""

    def __init__(self, params: list[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.pairs = [(p, nn.Parameter(p.detach().view(len(p), -1))) for p in params]
        self.optimizer = make([matrix for _, matrix in self.pairs])
        self.param_groups = self.optimizer.param_groups

    def step(self) -> None:
        """One step with the gradients of the kernels."""
        for p, matrix in self.pairs:
            assert p.grad is not None
            matrix.grad = p.grad.view(matrix.shape)
        self.optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_takes_the_steps_of_torchs_muon_and_of_its_adamw(nesterov: bool) -> None:
    """In bfloat16, where products in another order differ in the third digit; AdamW's part is equal."""
    model, hand = _net(torch.float32), _net(torch.float32)
    hidden, rest = _parts(hand)
    options: dict[str, Any] = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw", "nesterov": nesterov}
    muon = Lent(hidden, lambda params: torch.optim.Muon(params, lr=0.01, **options))
    start = oracle.flatten(model.parameters())
    found = _train(model, [ng.Muon(model, lr=0.01, weight_decay=0.1, nesterov=nesterov)])
    expected = _train(hand, [muon, _adamw(rest, 0.01, 0.1)])
    for θ, other in zip(found, expected, strict=True):
        assert (θ - other).norm() < 0.02 * (other - start).norm()


@pytest.mark.parametrize("shape", [(8, 6), (32, 48), (64, 40), (144, 128)])
def test_muon_takes_the_steps_of_torchs_muon_for_matrices_of_all_sizes(shape: tuple[int, int]) -> None:
    """A processor multiplies those of the middle in single precision, and rounds where torch does."""
    linear = seeded(lambda: nn.Linear(shape[1], shape[0], bias=False))
    hand = nn.Parameter(linear.weight.detach().clone())
    start = hand.detach().clone()
    ours = ng.Muon(linear, lr=0.01, weight_decay=0.1)
    theirs = torch.optim.Muon([hand], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        g = seeded(lambda: torch.randn(shape), step)
        linear.weight.grad, hand.grad = g.clone(), g.clone()
        ours.step()
        theirs.step()
    assert (linear.weight - hand).norm() < 0.005 * (hand - start).norm()


@pytest.mark.parametrize(
    ("smallest", "rank", "difference"),
    [(1.0, None, 0.05), (1e-3, None, 0.05), (1.0, 16, 0.3)],
    ids=["random", "decaying", "low-rank"],
)
@pytest.mark.parametrize("shape", [(256, 512), (512, 256), (384, 1536), (384, 384)])
def test_for_large_matrices_muon_is_as_near_the_polar_factor_as_torchs(
    shape: tuple[int, int], smallest: float, rank: int | None, difference: float
) -> None:
    """Both steps are P = UVᵀ up to errors: ‖ours − P‖ ≤ ‖torch's − P‖ + ‖P‖/100. P is by singular values.

    Five quintics do not converge, so that both errors are above ‖P‖/10. Their products in bfloat16 are not the same
    ones, so that the steps differ by ``difference``·‖P‖. Without the small singular values it is more, as the quintics
    enlarge the rounding in their place.
    """
    U, σ, Vh = torch.linalg.svd(seeded(lambda: torch.randn(shape)).double(), full_matrices=False)
    rank = rank or len(σ)
    U, σ, Vh = U[:, :rank], σ[:rank], Vh[:rank]
    g = ((U * (σ * torch.logspace(0.0, math.log10(smallest), rank, dtype=σ.dtype))) @ Vh).float()
    linear, hand = nn.Linear(shape[1], shape[0], bias=False), nn.Parameter(torch.zeros(shape))
    nn.init.zeros_(linear.weight)
    linear.weight.grad, hand.grad = g.clone(), g.clone()
    ng.Muon(linear, lr=1.0, weight_decay=0.0).step()
    torch.optim.Muon([hand], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    P, unit = U @ Vh, 0.2 * max(shape) ** 0.5
    ours, theirs = (-w.detach().double() / unit for w in (linear.weight, hand))
    assert (ours - theirs).norm() < difference * P.norm()
    assert (ours - P).norm() < (theirs - P).norm() + 0.01 * P.norm()
    assert (theirs - P).norm() > 0.1 * P.norm()


def test_the_parameters_that_adamw_steps_are_torchs_to_the_last_digits() -> None:
    """The gradients of the others are detached from them: the same numbers go into both."""
    model, hand = _net(), _net()
    for net in (model, hand):
        for p in _parts(net)[0]:
            p.requires_grad_(False)
    model.wide.weight.requires_grad_()  # somebody must have a metric; its steps are of length zero
    groups = [{"params": [model.wide.weight], "lr": 0.0}]
    found = _train(model, [ng.Muon(model, lr=0.01, weight_decay=0.1, groups=groups)])
    expected = _train(hand, [_adamw(_parts(hand)[1], 0.01, 0.1)])
    for θ, other in zip(found, expected, strict=True):
        torch.testing.assert_close(θ, other, rtol=1e-12, atol=1e-14)


def test_muon_that_has_converged_steps_by_the_polar_factor() -> None:
    """θ ← (1 − lr·wd)θ − lr·0.2·√max(o, i)·UVᵀ of the momentum UΣVᵀ, here by singular values."""

    class Polar:
        def __init__(self, params: list[nn.Parameter]) -> None:
            self.params, self.param_groups = params, [{"lr": 0.01}]
            self.m = [torch.zeros_like(p) for p in params]

        @torch.no_grad()
        def step(self) -> None:
            (group,) = self.param_groups
            for p, m in zip(self.params, self.m, strict=True):
                assert p.grad is not None
                m.mul_(0.95).add_(p.grad, alpha=0.05)
                u, _, vh = torch.linalg.svd((0.95 * m + 0.05 * p.grad).flatten(1), full_matrices=False)
                v = 0.2 * max(u.shape[0], vh.shape[1]) ** 0.5 * (u @ vh)
                p.mul_(1 - group["lr"] * 0.1).sub_(v.view(p.shape), alpha=group["lr"])

    model, hand = _net(), _net()
    hidden, rest = _parts(hand)
    found = _train(model, [ng.Muon(model, lr=0.01, weight_decay=0.1, iteration="minimax")])
    expected = _train(hand, [Polar(hidden), _adamw(rest, 0.01, 0.1)])
    for θ, other in zip(found, expected, strict=True):
        torch.testing.assert_close(θ, other, rtol=1e-7, atol=1e-9)


def _refreshes(step: int, every: int) -> bool:
    """Whether roots are new in the step 0, 1, …: every so often, and before that whenever the steps have doubled."""
    return step % every == 0 or (step < every and step + 1 in (1, 2, 4, 8))


class Reference:
    """Shampoo: θ ← (1 − lr·wd)θ − lr·rms·v/√mean(v²), v = (S + λ_S)^-p M (A + λ_A)^-p.

    Natural (``spectral``) has the diagonals of S and A, kernels as matrices [o i·k], momentum 0.9, and
    v = G^-p/2 polar(G^-p/2 M), as long as rms·√max(o, i·k) times polar(…), here by singular values.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        power: float,
        kl: bool,
        every: int = 10,
        spectral: bool = False,
    ) -> None:
        self.params, self.param_groups, self.power, self.kl, self.every = params, [{"lr": lr}], power, kl, every
        self.spectral, self.momentum = spectral, 0.9 if spectral else 0.95
        self.t, self.state = 0, [dict[str, Tensor]() for _ in params]

    @torch.no_grad()
    def step(self) -> None:
        """Statistics, roots if they are due, and a step."""
        (group,), μ = self.param_groups, self.momentum
        for p, state in zip(self.params, self.state, strict=True):
            assert p.grad is not None
            g = p.grad.flatten(2) if p.ndim > 2 else p.grad[..., None]  # [o i k]
            g = g.flatten(1)[..., None] if self.spectral else g
            m = state["m"] = μ * state.get("m", torch.zeros_like(g)) + (1 - μ) * g
            weight = 0.05 / (1 - 0.95 ** (self.t + 1))
            for key, new in self.factors(g, state).items():
                kept = new.diagonal().diag() if self.spectral else new
                state[key] = kept if self.t == 0 else state[key].lerp(kept, weight)
            if _refreshes(self.t, self.every):
                for key in "SA":
                    λ, Q = torch.linalg.eigh(state[key])
                    λ = λ.clamp(min=0) + 1e-2 * state[key].trace() / len(λ)
                    power = self.power / 2 if self.spectral else self.power
                    state[f"{key}^-p"], inverse = (Q * λ**-power) @ Q.T, (Q / λ) @ Q.T
                    state[f"{key}^-1"] = inverse * len(λ) / (inverse * state[key]).sum()  # the mean of xᵀF⁻¹x is d
            v = self.sharp(μ * m + (1 - μ) * g, state)
            v = self.spectral_step(v, state) if self.spectral else 0.2 * v / v.square().mean().sqrt()
            p.mul_(1 - group["lr"] * 0.1).sub_(v.reshape(p.shape), alpha=group["lr"])
        self.t += 1

    def sharp(self, m: Tensor, state: dict[str, Tensor]) -> Tensor:
        """S^-p m A^-p."""
        return torch.einsum("op,pik,ij->ojk", state["S^-p"], m, state["A^-p"])

    def spectral_step(self, whitened: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The polar factor, back from the coordinates in which it was taken."""
        u, _, vh = torch.linalg.svd(whitened.flatten(1), full_matrices=False)
        v = self.sharp((u @ vh).view_as(whitened), state)
        return 0.4 * max(u.shape[0], vh.shape[1]) ** 0.5 * (u @ vh).norm() * v / v.norm()

    def factors(self, g: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """S and A of one gradient: each by itself, or weighted by the last inverse of the other."""
        o, i, k = g.shape
        scale = g.square().mean().rsqrt() if self.kl else 1.0  # before there is an inverse
        one = {"S^-1": scale * torch.eye(o, dtype=g.dtype), "A^-1": scale * torch.eye(i, dtype=g.dtype)}
        inverse = one | state if self.kl else one
        return {
            "S": torch.einsum("oik,ij,pjk->op", g, inverse["A^-1"], g) / (i * k),
            "A": torch.einsum("oik,op,pjk->ij", g, inverse["S^-1"], g) / (o * k),
        }


def _natural(model: nn.Module, *, power: float, every: int, iteration: Any = "minimax") -> ng.NaturalGradient:
    """The slots of ``ng.Natural``, written out."""
    return ng.NaturalGradient(
        model,
        ng.BatchGradient(),
        structure=ng.Refresh(ng.Kronecker(largest=1, power=power), 1, 0.95, every),
        solver=ng.Factored(),
        step=ng.Polar(0.4, iteration),
        damping=ng.Relative(1e-2),
        lr=0.01,
        momentum=0.9,
        momentum_on="gradients",
        weight_decay=0.1,
        fallback="adamw",
    )


REFERENCES: dict[
    str, tuple[Callable[[nn.Module], torch.optim.Optimizer], Callable[[list[nn.Parameter]], Reference]]
] = {
    "natural": (
        lambda model: ng.Natural(model, lr=0.01, iteration="minimax"),
        lambda params: Reference(params, 0.01, 0.5, kl=False, every=1, spectral=True),
    ),
    "natural_slots": (
        lambda model: _natural(model, power=0.5, every=25),
        lambda params: Reference(params, 0.01, 0.5, kl=False, every=25, spectral=True),
    ),
    "kl_shampoo": (
        lambda model: ng.Shampoo(model, lr=0.01, fit="kl"),
        lambda params: Reference(params, 0.01, 0.5, kl=True),
    ),
    "kl_shampoo_75": (
        lambda model: ng.Shampoo(model, lr=0.01, power=0.75, fit="kl", inverse_every=3),
        lambda params: Reference(params, 0.01, 0.75, kl=True, every=3),
    ),
    "shampoo": (
        lambda model: ng.Shampoo(model, lr=0.01),
        lambda params: Reference(params, 0.01, 0.5, kl=False),
    ),
    "shampoo_of_2018": (
        lambda model: ng.Shampoo(model, lr=0.01, power=0.25),
        lambda params: Reference(params, 0.01, 0.25, kl=False),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_presets_take_the_steps_of_a_reference_in_plain_torch(name: str) -> None:
    ours, theirs = REFERENCES[name]
    model, hand = _net(), _net()
    hidden, rest = _parts(hand)
    found = _train(model, [ours(model)])
    expected = _train(hand, [theirs(hidden), _adamw(rest, 0.01, 0.1)])
    for θ, other in zip(found, expected, strict=True):
        torch.testing.assert_close(θ, other, rtol=1e-7, atol=1e-9)


def test_natural_is_its_slots() -> None:
    model, hand = _net(), _net()
    found = _train(model, [ng.Natural(model, lr=0.01)])
    expected = _train(hand, [_natural(hand, power=0.5, every=1, iteration="muon")])
    for θ, other in zip(found, expected, strict=True):
        torch.testing.assert_close(θ, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 1, 3, 3), (1, 6, 3, 2), (6, 3, 2, 2)])
def test_natural_steps_a_kernel_as_its_matrix(shape: tuple[int, ...]) -> None:
    kernel = nn.Conv2d(shape[1], shape[0], (shape[2], shape[3]), bias=False)
    matrix = nn.Linear(kernel.weight[0].numel(), shape[0], bias=False)
    matrix.weight.data.copy_(kernel.weight.flatten(1))
    optimizers = [ng.Natural(module, lr=0.01) for module in (kernel, matrix)]
    for step in range(4):
        g = seeded(lambda: torch.randn(shape), step)
        kernel.weight.grad, matrix.weight.grad = g.clone(), g.flatten(1).clone()
        for opt in optimizers:
            opt.step()
    assert torch.equal(kernel.weight.flatten(1), matrix.weight)


def test_shampoo_steps_along_those_of_2018() -> None:
    """Gupta, Koren and Singer (2018): v = L^-¼ G R^-¼, L = ε + Σ GGᵀ, R = ε + Σ GᵀG: with means in place of sums."""

    def root(F: Tensor) -> Tensor:
        λ, Q = torch.linalg.eigh(F)
        return (Q * λ**-0.25) @ Q.T

    linear = seeded(lambda: nn.Linear(5, 5, bias=False).double())
    options: dict[str, Any] = {"momentum": 0.0, "decay": 1 - 1e-13, "inverse_every": 1, "damping": 1e-16}
    opt = ng.Shampoo(linear, lr=0.01, power=0.25, weight_decay=0.0, **options)
    L = R = 1e-9 * torch.eye(5, dtype=torch.float64)
    for t in range(12):
        g = seeded(lambda: torch.randn(5, 5, dtype=torch.float64), t)
        L, R, before = L + g @ g.T, R + g.T @ g, linear.weight.detach().clone()
        linear.weight.grad = g.clone()
        opt.step()
        v = root(L) @ g @ root(R)
        torch.testing.assert_close(
            before - linear.weight.detach(), 0.002 * v / v.square().mean().sqrt(), rtol=1e-5, atol=1e-9
        )


class AlgorithmOfSOAP(rivals.SOAP):
    """Vyas et al. (2024), algorithm 3, as printed: the first gradient takes a step, which it does not in their code."""

    def start(self, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
        """The bases of the first gradient; the step adds it to the factors."""
        super().start(G, state, group)
        for factor in state["factors"]:
            factor.zero_()
        return False


@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("size", [4, 7])
def test_soap_as_published_takes_the_steps_of_the_paper(size: int, every: int) -> None:
    """Up to ε, which is outside of the root there. If a matrix is not square, rounding chooses the first basis."""
    torch.manual_seed(0)
    module = nn.Linear(size, size, bias=False).double()
    w = nn.Parameter(module.weight.detach().clone())
    ours = ng.SOAP(
        module,
        lr=1e-2,
        weight_decay=0.1,
        nesterov=False,
        moments="sorted",
        early=False,
        basis_every=every,
        damping=1e-16,
    )
    theirs = AlgorithmOfSOAP([w], lr=1e-2, betas=(0.95, 0.95), weight_decay=0.1, frequency=every)
    scales = torch.linspace(0.3, 3.0, size, dtype=torch.float64)
    for _ in range(40):
        g = torch.randn(size, size, dtype=torch.float64) * scales
        module.weight.grad, w.grad = g.clone(), g.clone()
        ours.step()
        theirs.step()
        torch.testing.assert_close(module.weight.detach(), w.detach(), rtol=0, atol=1e-7)


def test_soap_takes_the_steps_of_a_dense_reference_in_every_basis() -> None:
    """θ ← (1 − lr·wd)θ − lr·Q (QᵀMP/√(D + λ)) Pᵀ, Q ← QR((S + λ)Q), sorted, and D carried into the new basis."""

    def followed(F: Tensor, Q: Tensor) -> Tensor:
        F = F + 1e-6 * F.diagonal().mean() * torch.eye(5, dtype=torch.float64)
        return torch.linalg.qr(F @ Q[:, (Q * (F @ Q)).sum(0).argsort(descending=True)]).Q

    linear = seeded(lambda: nn.Linear(5, 5, bias=False).double())
    opt, θ = ng.SOAP(linear, lr=0.01), linear.weight.detach().clone()
    S = A = D = m = torch.zeros_like(θ)
    Q = P = torch.eye(5, dtype=torch.float64)
    scales = torch.tensor([[1.0], [3.0], [0.2], [5.0], [0.7]], dtype=torch.float64)
    for t in range(25):
        g = scales * seeded(lambda: torch.randn(5, 5, dtype=torch.float64), t)
        linear.weight.grad = g.clone()
        opt.step()
        weight = 0.05 / (1 - 0.95 ** (t + 1))
        S, A = S.lerp(g @ g.T / 5, weight), A.lerp(g.T @ g / 5, weight)
        if t == 0:
            Q, P = torch.linalg.eigh(S).eigenvectors, torch.linalg.eigh(A).eigenvectors
        D = D.lerp((Q.T @ g @ P).square(), weight)
        if t > 0 and _refreshes(t, 10):
            old, (Q, P) = (Q, P), (followed(S, Q), followed(A, P))
            D = (Q.T @ old[0]).square() @ D @ (old[1].T @ P).square()
        M, m = m.lerp(g, 1 - 0.95**2), m.lerp(g, 0.05)
        θ = (1 - 0.001) * θ - 0.01 * Q @ ((Q.T @ M @ P) / (D + 1e-6 * D.mean()).sqrt()) @ P.T
        torch.testing.assert_close(linear.weight.detach(), θ, rtol=1e-9, atol=1e-11)


def test_soap_trains_as_the_reference_of_the_paper_does() -> None:
    """The losses of both after each step of a small task; ours is behind at first, as its momentum starts at zero."""
    losses = []
    for ours in (True, False):
        model = _net()
        hidden, rest = _parts(model)
        soap: list[Any] = [ng.SOAP(model, lr=0.01)]
        if not ours:
            soap = [rivals.SOAP(hidden, 0.01, (0.95, 0.95), 0.1), _adamw(rest, 0.01, 0.1)]
        losses.append(_losses(model, soap))
    ours_, theirs = losses
    assert abs(ours_[-1] - theirs[-1]) < 0.1 * theirs[0]
    assert ours_[-1] < 0.8 * ours_[0]


def _losses(model: nn.Module, optimizers: Optimizers, steps: int = 120) -> list[float]:
    x = seeded(lambda: torch.randint(7, (32, 5)), 7)
    found = []
    for _ in range(steps):
        for p in model.parameters():
            p.grad = None
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x[:, 1:].flatten() % 5)
        loss.backward()
        found.append(float(loss.detach()))
        for opt in optimizers:
            opt.step()
    return found

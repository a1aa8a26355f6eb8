"""The optimizers of the races: SGD, AdamW, Muon, SOAP, KL-Shampoo and ours.

A contender is one line of ``CONTENDERS``: a function of (model, lr, weight_decay, task), where the search for its
learning rate starts, and its weight decays. Learning rates are on AdamW's scale, except those of SGD and K-FAC. The
task tells what a metric needs (``task.family()``) and which parameters are the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad as ng
from benchmarks.race_models import Task


class Stepper(Protocol):
    """What a race needs of an optimizer."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """One step with the gradients in ``p.grad``."""

    def zero_grad(self) -> None:
        """Forget the gradients."""


Make = Callable[[nn.Module, float, float, Task], Stepper]


@final
@dataclass(frozen=True)
class Contender:
    """An optimizer: how to make it, where the search for its learning rate starts, and its weight decays.

    ``kinds``: the kinds of tasks it runs on; None is all. ``hooks``: whether it looks into the passes.
    """

    make: Make
    lr: float
    weight_decays: tuple[float, ...] = (0.1, 0.01)
    kinds: tuple[str, ...] | None = None
    hooks: bool = False


# Matrices and the rest of the parameters.


def matrices(model: nn.Module, head: tuple[str, ...] = ()) -> list[nn.Parameter]:
    """The hidden weights: two axes or more, neither an embedding nor in the ``head``, which begins their names."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return [
        p
        for name, p in model.named_parameters()
        if p.ndim > 1 and id(p) not in embeddings and not name.startswith(head)
    ]


@final
class Together:
    """An optimizer of the hidden matrices and AdamW, for all other parameters, as one.

    ``lend``: parameters with more than two axes go to it as matrices [o i·…] in the same memory.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[list[nn.Parameter]], Optimizer],
        *,
        lr: float,
        weight_decay: float,
        head: tuple[str, ...] = (),
        lend: bool = False,
    ) -> None:
        hidden = matrices(model, head)
        taken = {id(p) for p in hidden}
        others = [p for p in model.parameters() if id(p) not in taken]
        self.lent = [(p, nn.Parameter(p.detach().view(len(p), -1))) for p in hidden if lend and p.ndim > 2]
        views = {id(p): matrix for p, matrix in self.lent}
        self.optimizers = [make([views.get(id(p), p) for p in hidden])]
        if others:
            self.optimizers.append(adamw(others, lr, weight_decay))
        self.parameters = list(model.parameters())
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """One step of both."""
        for p, matrix in self.lent:
            matrix.grad = None if p.grad is None else p.grad.view(matrix.shape)
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for p in self.parameters:
            p.grad = None


def adamw(params: Iterable[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019), fused on a GPU; β = (0.9, 0.95), as in language models."""
    params = list(params)
    fused = params[0].is_cuda
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay, fused=fused)


# Adam and Shampoo in an eigenbasis that follows the gradients.


def rotate(G: Tensor, bases: list[Tensor | None], *, back: bool = False) -> Tensor:
    """G ×₁ Q₁ᵀ ×₂ Q₂ᵀ …: every axis in its basis, or with ``back`` out of it; None is the identity.

    >>> G, Q = torch.randn(3, 2, 4), torch.linalg.qr(torch.randn(2, 2)).Q
    >>> torch.allclose(rotate(rotate(G, [None, Q, None]), [None, Q, None], back=True), G, atol=1e-5)
    True
    """
    for Q in bases:  # the first axis goes last, and so each comes back to its place
        G = G.movedim(0, -1) if Q is None else torch.tensordot(G, Q, dims=([0], [1 if back else 0]))
    return G


def gram(G: Tensor, axis: int) -> Tensor:
    """The products of G's slices along an axis [d d]."""
    rows = G.movedim(axis, 0).flatten(1)
    return rows @ rows.T


def eigenbasis(S: Tensor) -> Tensor:
    """Eigenvectors of S [d d], largest eigenvalue first; in double precision, as S may have a low rank."""
    return torch.linalg.eigh(S.double()).eigenvectors.flip(1).to(S.dtype)


def folded(p: Tensor) -> Tensor:
    """A kernel of a convolution as [o i k], without axes of length one."""
    return (p.flatten(2) if p.ndim > 2 else p).squeeze()


class _Eigenbasis(Optimizer):
    """An optimizer of parameters by themselves. The first gradient starts the bases and takes no step."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        frequency: int = 10,
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "frequency": frequency, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                G = folded(p.grad)
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    if self.start(G, state, group):
                        continue
                state["step"] += 1
                step = self.direction(G, state, group)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(step.reshape(p.shape), alpha=group["lr"])
        return loss

    def start(self, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
        """Create the state; whether this gradient takes no step."""
        raise NotImplementedError

    def direction(self, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """The step, without learning rate, and the state after it."""
        raise NotImplementedError


class SOAP(_Eigenbasis):
    """SOAP (Vyas et al. 2024, algorithm 3): Adam for the gradient in the eigenbasis of Shampoo's factors, any axes.

    S_a ← β₂S_a + (1 − β₂) G₍ₐ₎G₍ₐ₎ᵀ on every axis a; every ``frequency`` steps Q_a ← QR(S_a Q_a), columns sorted. An
    axis, or a parameter with one axis, that is not rotated has Adam. Kernels are [o i k].

    >>> w = nn.Parameter(torch.ones(3, 2))
    >>> optimizer = SOAP([w], lr=0.1, betas=(0.95, 0.95), weight_decay=0.0)
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     w.square().sum().backward()
    ...     optimizer.step()
    >>> bool(w.norm() < 1)
    True
    """

    largest = 10_000  # rows of a factor; longer axes are not rotated

    def start(self, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
        """Factors and bases of the first gradient."""
        axes = range(G.ndim) if G.ndim > 1 else ()
        new = 1 - group["betas"][1]
        state["factors"] = [new * gram(G, a) if G.shape[a] <= self.largest else None for a in axes]
        state["bases"] = [None if S is None else eigenbasis(S) for S in state["factors"]]
        state["first"], state["second"] = torch.zeros_like(G), torch.zeros_like(G)
        return bool(state["factors"])

    def direction(self, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Adam's step in the eigenbasis, rotated back."""
        β1, β2 = group["betas"]
        first, second, rotated = state["first"], state["second"], rotate(G, state["bases"])
        first.lerp_(rotated, 1 - β1)
        second.mul_(β2).addcmul_(rotated, rotated, value=1 - β2)
        spread = (second / (1 - β2 ** state["step"])).sqrt_().add_(group["eps"])
        step = rotate(first / spread / (1 - β1 ** state["step"]), state["bases"], back=True)
        for axis, S in enumerate(state["factors"]):
            if S is not None:
                S.lerp_(gram(G, axis), 1 - β2)
        if state["step"] % group["frequency"] == 0 and state["factors"]:
            self.refresh(state)
        return step

    @staticmethod
    def refresh(state: dict[str, Any]) -> None:
        """One power iteration on every axis. The first moment moves into the new bases, the second is reordered."""
        first = rotate(state["first"], state["bases"], back=True)
        for axis, (S, Q) in enumerate(zip(state["factors"], state["bases"], strict=True)):
            if S is None:
                continue
            moved = S @ Q
            order = torch.argsort((Q * moved).sum(0), descending=True)
            state["second"] = state["second"].index_select(axis, order)
            state["bases"][axis] = torch.linalg.qr(moved[:, order]).Q
        state["first"] = rotate(first, state["bases"])


@final
class KLShampoo(_Eigenbasis):
    """KL-Shampoo (Lin et al. 2025): M in the basis of the factors, over the roots of their eigenvalues, no grafting.

    The factors minimise the KL divergence of N(0, ⊗S) from the gradients: S_a ← β₂S_a + (1 − β₂) E over the other axes
    of G ×_{b≠a} S_b^-½. Eigenvalues λ_a follow in every step in the basis of the last refresh and start at 0.1; 1/√λ_a
    is at most max(10, min(d_a, 4000)). Q_a ← QR(S_a Q_a) every ``frequency`` steps. As in the authors' code
    (equal to it step by step for matrices), in single precision instead of bf16; they update the eigenvalues of three
    axes one after the other, here all at once.

    >>> w = nn.Parameter(torch.ones(3, 2))
    >>> optimizer = KLShampoo([w], lr=0.05, betas=(0.9, 0.98), weight_decay=0.0)
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     w.square().sum().backward()
    ...     optimizer.step()
    >>> bool(w.norm() < 2)
    True
    """

    def start(self, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
        """Factors and bases of the first gradient; a parameter of one axis is left to another optimizer."""
        if G.ndim < 2:
            raise ValueError(f"KL-Shampoo needs two axes, got {list(G.shape)}: give such parameters to AdamW")
        new = 1 - group["betas"][1]
        state["factors"] = [gram(G, a).mul_(new * d / G.numel()) for a, d in enumerate(G.shape)]
        state["bases"] = [eigenbasis(S) for S in state["factors"]]
        state["eigenvalues"] = [torch.full_like(S[0], 0.1) for S in state["factors"]]
        state["first"] = torch.zeros_like(G)
        return True

    def direction(self, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """M ×₁ S₁^-½ ×₂ S₂^-½ …, then the statistics of this gradient."""
        β1, β2 = group["betas"]
        first, bases = state["first"].lerp_(G, 1 - β1), state["bases"]
        roots = [along(λ.rsqrt(), a, G.ndim) for a, λ in enumerate(state["eigenvalues"])]
        scale = math.prod(roots[1:], start=roots[0])
        step = rotate(rotate(first, bases) * (scale / (1 + group["eps"] * scale)), bases, back=True)
        rotated = rotate(G, bases)
        for axis, S in enumerate(state["factors"]):
            d = G.shape[axis]
            others = math.prod((root for a, root in enumerate(roots) if a != axis), start=1.0)
            whitened = rotated * others
            λ = state["eigenvalues"][axis]
            λ.lerp_(whitened.square().movedim(axis, 0).flatten(1).mean(1), 1 - β2)
            λ.clamp_(min=max(10, min(d, 4000)) ** -2)
            one: list[Tensor | None] = [Q if a == axis else None for a, Q in enumerate(bases)]
            S.lerp_(gram(rotate(whitened, one, back=True), axis).mul_(d / G.numel()), 1 - β2)
        if state["step"] % group["frequency"] == 0:
            state["bases"] = [torch.linalg.qr(S @ Q).Q for S, Q in zip(state["factors"], bases, strict=True)]
        return step


def along(v: Tensor, axis: int, axes: int) -> Tensor:
    """A vector as a tensor with so many axes."""
    return v.view(*(len(v) if a == axis else 1 for a in range(axes)))


# The contenders.

_SHARE = ng.Relative(0.01)  # the damping of ng.Natural


def _sgd(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    """Momentum 0.9 (Nesterov); weight decay in the gradient, as is usual."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=weight_decay)


def _adamw(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    return adamw(model.parameters(), lr, weight_decay)


def _muon(adjust: str, times: float) -> Make:
    """torch's Muon for the hidden matrices with learning rate ``times``·lr, AdamW for the rest with lr."""

    def make(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
        decay = weight_decay / times  # of the product with the learning rate, like AdamW's
        return Together(
            model,
            lambda hidden: torch.optim.Muon(hidden, lr=times * lr, weight_decay=decay, adjust_lr_fn=adjust),
            lr=lr,
            weight_decay=weight_decay,
            head=task.head,
            lend=True,
        )

    return make


def _soap(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    """All parameters, as its authors do."""
    return SOAP(model.parameters(), lr, (0.95, 0.95), weight_decay)


def _kl_shampoo(betas: tuple[float, float]) -> Make:
    """The hidden matrices and kernels; AdamW for the rest."""

    def make(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
        return Together(
            model,
            lambda hidden: KLShampoo(hidden, lr, betas, weight_decay),
            lr=lr,
            weight_decay=weight_decay,
            head=task.head,
        )

    return make


def _kfac(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    """Classical K-FAC, with the metric of the task's outputs."""
    return ng.KFAC(model, ng.Fisher(task.family(), samples=1), lr=lr, weight_decay=weight_decay)


def _head(model: nn.Module, task: Task) -> list[dict[str, Any]]:
    """The parameter group that leaves the head to AdamW."""
    head = [p for name, p in model.named_parameters() if name.startswith(task.head)]
    return [{"params": head, "fallback": "adamw"}] if head else []


def _ng_natural(**choices: Any) -> Make:
    def make(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
        return ng.Natural(model, lr=lr, weight_decay=weight_decay, groups=_head(model, task), **choices)

    return make


def _kl(**choices: Any) -> Make:
    """KL-Shampoo, with new powers every 25 steps where a variant says nothing else."""

    def make(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
        groups = _head(model, task)
        given = {"fit": "kl", "inverse_every": 25, **choices}
        return ng.Shampoo(model, lr=lr, weight_decay=weight_decay, groups=groups, **given)

    return make


def _natural_every_25(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    """``ng.Natural`` in the slots of ``NaturalGradient``, where powers may be older."""
    return ng.NaturalGradient(
        model,
        ng.BatchGradient(),
        structure=ng.Refresh(ng.Kronecker(largest=1, power=0.5), 1, 0.95, 25),
        solver=ng.Factored(),
        step=ng.Polar(0.4),
        lr=lr,
        damping=_SHARE,
        momentum=0.9,
        momentum_on="gradients",
        weight_decay=weight_decay,
        groups=_head(model, task),
        fallback="adamw",
    )


def _natural_after(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    """``ng.Natural`` with the momentum after the metric: steps are summed, and ten times as long for the same lr."""
    return ng.NaturalGradient(
        model,
        ng.BatchGradient(),
        structure=ng.Refresh(ng.Kronecker(largest=1, power=0.5), decay=0.95),
        solver=ng.Factored(),
        step=ng.Polar(0.4),
        lr=lr,
        damping=_SHARE,
        momentum=0.9,
        momentum_on="steps",
        weight_decay=weight_decay,
        groups=_head(model, task),
        fallback="adamw",
    )


def _natural_fisher(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    """``ng.Natural`` with the factors of K-FAC, of targets that the model samples."""
    metric = ng.Fisher(task.family(), samples=1)
    return ng.Natural(model, metric, lr=lr, weight_decay=weight_decay, groups=_head(model, task))


def _natural_own(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    """``ng.Natural`` with the factors of K-FAC, of the loss's own cotangents."""
    return ng.Natural(model, ng.Empirical(), lr=lr, weight_decay=weight_decay, groups=_head(model, task))


def _ng_muon(momentum: float = 0.95) -> Make:
    def make(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
        return ng.Muon(model, lr=lr, weight_decay=weight_decay, momentum=momentum, groups=_head(model, task))

    return make


def _ng_soap(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    return ng.SOAP(model, lr=lr, weight_decay=weight_decay, groups=_head(model, task))


def _published_soap(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    """The algorithm of the paper, for the hidden matrices."""
    return ng.SOAP(
        model,
        lr=lr,
        weight_decay=weight_decay,
        nesterov=False,
        moments="sorted",
        early=False,
        damping=1e-16,
        groups=_head(model, task),
    )


def _ng_shampoo(model: nn.Module, lr: float, weight_decay: float, task: Task) -> Stepper:
    return ng.Shampoo(model, lr=lr, weight_decay=weight_decay, groups=_head(model, task))


VISION = ("image",)
CONTENDERS: dict[str, Contender] = {
    "sgd": Contender(_sgd, 0.05, (5e-4, 5e-3), VISION),
    "adamw": Contender(_adamw, 1e-3),
    "muon": Contender(_muon("match_rms_adamw", 1.0), 3e-3),
    "soap": Contender(_soap, 2e-3),
    "kl-shampoo": Contender(_kl_shampoo((0.9, 0.98)), 2e-3),
    "natural": Contender(_ng_natural(), 3e-3),
    "natural-every-25": Contender(_natural_every_25, 3e-3),
    # Variants, run when they are named: each differs from "natural" by what its name says.
    "natural-power-25": Contender(_ng_natural(power=0.25), 3e-3),
    "natural-power-75": Contender(_ng_natural(power=0.75), 3e-3),
    "natural-power-100": Contender(_ng_natural(power=1.0), 3e-3),
    "natural-momentum-95": Contender(_ng_natural(momentum=0.95), 3e-3),
    "natural-decay-90": Contender(_ng_natural(decay=0.9), 3e-3),
    "natural-decay-98": Contender(_ng_natural(decay=0.98), 3e-3),
    "natural-damping-1": Contender(_ng_natural(damping=ng.Relative(0.1)), 3e-3),
    "natural-damping-3": Contender(_ng_natural(damping=ng.Relative(1e-3)), 3e-3),
    "natural-damping-absolute-9": Contender(_ng_natural(damping=1e-9), 3e-3),
    "natural-damping-absolute-11": Contender(_ng_natural(damping=1e-11), 3e-3),
    "natural-momentum-after": Contender(_natural_after, 3e-4),
    "natural-rms-20": Contender(_ng_natural(rms=0.2), 6e-3),
    "natural-not-polar": Contender(_ng_natural(polar=False), 3e-3),
    # KL-Shampoo, and what differs from it.
    "ng-kl-shampoo": Contender(_kl(), 3e-3),
    "ng-kl-shampoo-power-25": Contender(_kl(power=0.25), 3e-3),
    "ng-kl-shampoo-power-375": Contender(_kl(power=0.375), 3e-3),
    "ng-kl-shampoo-momentum-90": Contender(_kl(momentum=0.9), 3e-3),
    "ng-kl-shampoo-mean": Contender(_kl(fit="mean"), 3e-3),
    "ng-kl-shampoo-damping-1": Contender(_kl(damping=ng.Relative(0.1)), 3e-3),
    "ng-kl-shampoo-damping-3": Contender(_kl(damping=ng.Relative(1e-3)), 3e-3),
    "ng-kl-shampoo-decay-98": Contender(_kl(decay=0.98), 3e-3),
    "ng-kl-shampoo-decay-90": Contender(_kl(decay=0.9), 3e-3),
    "ng-kl-shampoo-rms-40": Contender(_kl(rms=0.4), 1.5e-3),
    "ng-kl-shampoo-rms-10": Contender(_kl(rms=0.1), 3e-3),
    "ng-kl-shampoo-every-10": Contender(_kl(inverse_every=10), 3e-3),
    "ng-kl-shampoo-every-50": Contender(_kl(inverse_every=50), 3e-3),
    "ng-kl-shampoo-every-100": Contender(_kl(inverse_every=100), 3e-3),
    # The metric of the loss: K-FAC's factors of sampled targets, or of the loss's own cotangents.
    "natural-fisher": Contender(_natural_fisher, 3e-3, hooks=True),
    "natural-own": Contender(_natural_own, 3e-3, hooks=True),
    # Others, in our slots or theirs.
    "ng-muon": Contender(_ng_muon(), 3e-3),
    "ng-muon-momentum-90": Contender(_ng_muon(momentum=0.9), 3e-3),
    "ng-soap": Contender(_ng_soap, 2e-3),
    "ng-soap-published": Contender(_published_soap, 2e-3),
    "ng-shampoo": Contender(_ng_shampoo, 3e-3),
    "muon-original": Contender(_muon("original", 10.0), 2e-3),
    "kl-shampoo-95": Contender(_kl_shampoo((0.95, 0.95)), 2e-3),
    "kfac": Contender(_kfac, 0.1, (0.0, 0.01), hooks=True),
}
RIVALS = ("sgd", "adamw", "muon", "soap", "kl-shampoo")

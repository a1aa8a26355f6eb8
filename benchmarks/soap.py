"""SOAP (Vyas et al., 2024): Adam in the eigenbasis of Shampoo's preconditioner. A reference to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer


@final
class SOAP(Optimizer):
    """W ← W − η Q_L N̂ Q_Rᵀ, where N̂ is Adam's step for the rotated gradient Q_Lᵀ G Q_R (algorithm 3 of the paper).

    L and R are moving averages of G Gᵀ and GᵀG with rate ``shampoo_beta``. Every ``frequency`` steps their eigenbases
    are refreshed by one step of power iteration and a QR decomposition (algorithm 4), Q ← QR(L Q), with the columns
    sorted by eigenvalue, as in the authors' code. The first gradient starts the averages and takes no step. Sides
    longer than ``largest``, and parameters with one axis, are not rotated: there it is Adam. Parameters with more than
    two axes are matrices [o i·…].

    >>> w = torch.nn.Parameter(torch.ones(3, 2))
    >>> optimizer = SOAP([w], lr=0.1)
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     w.square().sum().backward()
    ...     optimizer.step()
    >>> bool(w.norm() < 0.5)
    True
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        weight_decay: float = 0.01,
        frequency: int = 10,
        largest: int = 10_000,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "shampoo_beta": shampoo_beta, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "frequency": frequency, "largest": largest, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        G = p.grad.flatten(1) if p.grad is not None and p.ndim > 1 else p.grad
        assert G is not None
        state = self.state[p]
        if not state:
            sides = [G @ G.T, G.T @ G] if p.ndim > 1 else []
            new = 1 - group["shampoo_beta"]
            state["sides"] = [new * S if len(S) <= group["largest"] else None for S in sides]
            state["bases"] = [None if S is None else _eigenbasis(S) for S in state["sides"]]
            state["first"], state["second"], state["step"] = torch.zeros_like(G), torch.zeros_like(G), 0
            if any(S is not None for S in state["sides"]):
                return
        step = _adam(G, state, group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * step.view_as(p))
        _follow(G, state, group)


def _eigenbasis(S: Tensor) -> Tensor:
    """Eigenvectors of S [d d], largest eigenvalue first; in double precision, as S may have a low rank."""
    return torch.linalg.eigh(S.double()).eigenvectors.flip(1).to(S.dtype)


def _adam(G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Adam's step in the eigenbasis, rotated back. Both moments are in the eigenbasis."""
    β1, β2 = group["betas"]
    state["step"] += 1
    first, second, rotated = state["first"], state["second"], _rotate(G, state["bases"])
    first.lerp_(rotated, 1 - β1)
    second.mul_(β2).addcmul_(rotated, rotated, value=1 - β2)
    spread = (second / (1 - β2 ** state["step"])).sqrt() + group["eps"]
    return _rotate(first / (1 - β1 ** state["step"]) / spread, state["bases"], back=True)


def _rotate(G: Tensor, bases: list[Tensor | None], back: bool = False) -> Tensor:
    """Q_Lᵀ G Q_R, or Q_L G Q_Rᵀ with ``back``; None is the identity."""
    for axis, Q in enumerate(bases):
        if Q is not None:
            G = (Q if back else Q.T) @ G if axis == 0 else G @ (Q.T if back else Q)
    return G


def _follow(G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Update the averages. When the bases are due, refresh them and rotate the first moment into the new ones."""
    sides, bases = state["sides"], state["bases"]
    for axis, S in enumerate(sides):
        if S is not None:
            S.lerp_(G @ G.T if axis == 0 else G.T @ G, 1 - group["shampoo_beta"])
    if state["step"] % group["frequency"] or not sides:
        return
    first = _rotate(state["first"], bases, back=True)
    for axis, (S, Q) in enumerate(zip(sides, bases, strict=True)):
        if S is not None:
            moved = S @ Q
            order = torch.argsort((Q * moved).sum(0), descending=True)
            state["second"] = state["second"].index_select(axis, order)
            bases[axis] = torch.linalg.qr(moved[:, order]).Q
    state["first"] = _rotate(first, bases)

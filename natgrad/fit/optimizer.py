"""Gauss–Newton steps as a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.fit.networks import LeastSquares
from natgrad.fit.residuals import Residuals
from natgrad.fit.result import Record
from natgrad.log import flat, of_groups
from natgrad.solve.solvers import Solver
from natgrad.step.base import StepRule
from natgrad.structures.base import Structure


@final
class GaussNewton(torch.optim.Optimizer):
    """``LeastSquares`` as a torch optimizer: one Gauss–Newton step at a time.

    The residuals hold the points, so that a step needs no closure and no ``.grad``; ``opt.step()`` returns ½‖r‖² where
    it started. ``opt.last`` is the record of the last step.

    Args:
        model: The module whose parameters are fitted.
        residuals: ``Residuals(function, points)``, a dict of these by name, or a function of the model alone.
        structure: How J is kept: by default ``Kernel`` for fewer residuals than parameters, ``Dense`` otherwise,
            ``Implicit`` where neither fits into ``memory``.
        solver: How the metric is inverted, for structures other than ``Kernel`` and ``Dense``.
        step: The step rule; by default ``GeodesicSearch``.
        damping: λ at the start; None is a damping that the first step chooses. A scheduler may change it.
        lr: What the step is multiplied by. A scheduler may change it.
        memory: Bytes that J or its kernel may take.

    Method:
        θ ← θ − lr·(JᵀJ + λ)⁻¹Jᵀr.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> net, x = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double(), torch.rand(50, 1).double()
        >>> opt = ng.GaussNewton(net, ng.Residuals(lambda net, x: net(x) - x.exp(), x))
        >>> losses = [float(opt.step()) for _ in range(20)]
        >>> losses[-1] < 1e-3 * losses[0]
        True
    """

    def __init__(
        self,
        model: nn.Module,
        residuals: Residuals | Callable[..., Tensor] | Mapping[str, Residuals] | Sequence[Residuals],
        *,
        structure: Structure | None = None,
        solver: Solver | None = None,
        step: StepRule | None = None,
        damping: float | None = None,
        lr: float = 1.0,
        memory: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"GaussNewton takes the model, an nn.Module, not {type(model).__name__}")
        self.problem: LeastSquares = LeastSquares(
            residuals, model, structure=structure, solver=solver, step=step, damping=damping, lr=lr, memory=memory
        )
        self.last: Record | None = None
        self._rejected = 0
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": lr, "damping": damping})

    @torch.no_grad()
    def step(self, closure: None = None) -> Tensor:  # type: ignore[override]
        """One step; returns ½‖r‖² [] where it started."""
        if closure is not None:
            raise TypeError("GaussNewton evaluates the residuals that it was given: call opt.step() without a closure")
        if len(self.param_groups) != 1:
            raise ValueError("GaussNewton has one parameter group: J couples all parameters")
        group, problem = self.param_groups[0], self.problem
        problem.lr, problem.damping = group["lr"], group["damping"]
        self.last = problem.step()
        self._rejected += not self.last.accepted
        group["damping"] = problem.damping
        return next(iter(problem.params.values())).new_tensor(self.last.cost)

    def metrics(self) -> dict[str, Tensor]:
        """Numbers for a logger, tensors [] by name, as those of ``NaturalGradient.metrics``; all are on the host.

        ``loss`` is ½‖r‖² where the last step started, ``step_rms`` = √mean(δ²), ``offset`` the cosine between the
        residuals and the tangent space (``Record``), ``rejected_steps`` how many steps were refused, and ``loss/…`` the
        share of every class of residuals if there are several.
        """
        numbers, last, step = of_groups(self.param_groups), self.last, self.problem.last
        numbers |= {"step": self.problem.steps}
        if last is not None and step is not None:
            count = sum(p.numel() for p in self.problem.params.values())
            numbers |= {"loss": last.cost, "offset": last.offset, "step_rms": last.length / count**0.5}
            numbers |= {"rejected_steps": self._rejected, "reduction_ratio": step.ratio, **step.numbers}
            numbers |= {f"loss/{name}": cost for name, cost in last.classes.items() if len(last.classes) > 1}
        return flat(numbers)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer is not copied: copy the model, make a new optimizer for it, and load_state_dict")

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim, with the state of the problem: its damping, momentum and number of steps."""
        return {**super().state_dict(), "problem": self.problem.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        self.problem.load_state_dict(rest.pop("problem"))
        super().load_state_dict(rest)

"""The solves of a step: from covectors to moves, with one factorisation."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, final

from natgrad.geometry import Covector, Vector
from natgrad.operators.base import Operator

if TYPE_CHECKING:
    from natgrad.optim.optimizer import NaturalGradient


@final
class Solves:
    """The solves of one step: the inverse is factored again only for a new metric or another damping."""

    def __init__(self, opt: NaturalGradient, operator: Operator, damping: float, refreshed: bool) -> None:
        self.opt, self.operator = opt, operator
        # A copy: an iterative inverse remembers its last solution, and the step may yet fail.
        self.inverse, self.damping = copy.copy(opt.inverse), opt.inverse_damping
        self.stale = refreshed or opt.inverse is None or opt.inverse_damping != damping
        self.velocity: Vector | None = None

    def direction(self, ω: Covector, damping: float) -> Vector:
        """−lr·(μm + (G + λ)⁻¹ω), every group with its own lr and μ."""
        v = self._sharp(ω, damping)
        velocity, moved = {}, {}
        names = {id(p): name for name, p in self.opt.keeper.model.params.items()}
        for group in self.opt.param_groups:
            for p in group["params"]:
                name = names[id(p)]
                buffer = self.opt.state.get(p, {}).get("momentum") if group["momentum"] else None
                velocity[name] = v[name] if buffer is None else v[name] + group["momentum"] * buffer
                moved[name] = -group["lr"] * velocity[name]
        self.velocity = Vector({name: velocity[name] for name in v})
        return Vector({name: moved[name] for name in v})

    def acceleration(self, δ: Vector) -> Vector:
        """−(G + λ)⁻¹Γ♭(δ, δ)."""
        assert self.inverse is not None
        # A copy: the next gradient is like the last one, and must not be solved from here.
        return -self.opt.solver.sharp(copy.copy(self.inverse), self.opt.keeper.christoffel(δ))

    def _sharp(self, ω: Covector, damping: float) -> Vector:
        if self.stale or self.inverse is None or self.damping != damping:
            warm = {} if self.inverse is None else self.inverse.tensors()
            self.inverse = self.opt.solver.init(self.operator, damping, warm)
            self.damping, self.stale = damping, False
        return self.opt.solver.sharp(self.inverse, ω)

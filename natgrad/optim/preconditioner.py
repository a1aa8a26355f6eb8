"""The solves of a step: from covectors to moves, with one factorisation."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from natgrad.accelerate.fused import add_
from natgrad.errors import FactorisationError, NatgradError, SingularMetricError
from natgrad.geometry import Covector, Vector
from natgrad.optim.update import common_damping
from natgrad.pullback.pullback import unrounded
from natgrad.solve.solvers import Solver
from natgrad.step.base import Ahead, Along, Rates, Step
from natgrad.structures.base import NOT_POSITIVE, Inverse, Operator

if TYPE_CHECKING:
    from natgrad.optim.optimizer import NaturalGradient


_log = logging.getLogger("natgrad")


@final
class Solves:
    """The solves of one step: the inverse is factored again only when it is due, for a new metric or damping."""

    def __init__(self, opt: NaturalGradient, operator: Operator, damping: float, refreshed: bool) -> None:
        self.opt, self.operator = opt, operator
        # A copy: an iterative inverse remembers its last solution, and the step may yet fail.
        self.inverse, self.damping = copy.copy(opt.inverse), opt.inverse_damping
        self.outdated = opt.outdated or refreshed or opt.inverse_damping != damping
        self._way: Along | Ahead | None = None  # the last move that was asked for
        self.inverted = opt.tracker.inverted
        if self._due(damping):
            self.operator = self._renewed(operator)

    def rates(self) -> Rates:
        """The learning rate of every group of parameters that moves."""
        return self.opt.moves.rates(self.opt)

    def sharp(self, ω: Covector, damping: float) -> Vector:
        """(G + λ)⁻¹ω, in the precision of the metric: under autocast, too."""
        with unrounded(self.opt.tracker.model.example.device):
            if self._due(damping):
                self._invert(damping)
            assert self.inverse is not None
            v = self.opt.solver.sharp(self.inverse, ω)
        # A copy where the inverse remembers its solutions: v is ours to change.
        return self.opt.moves.at_rest(v.map(torch.clone) if self.inverse.remembers else v)

    def move(self, v: Vector) -> Vector:
        """−lr·(μm + v), every group with its own lr and μ; v becomes the velocity μm + v. What rests is not moved."""
        return self.along(v).displacement()

    def along(self, v: Vector) -> Along:
        """The same, without memory for more than v."""
        state = self.opt.state
        for group in self.opt.moves.groups(self.opt):
            μ = group.options["momentum"]
            # A parameter that has not moved yet has no momentum.
            pairs = zip(group.names, group.params, strict=True)
            begun = {name: state[p]["momentum"] for name, p in pairs if "momentum" in state.get(p, {})} if μ else {}
            if begun:
                add_([v[name] for name in begun], list(begun.values()), alpha=μ)
        self._way = way = Along(v, self.rates())
        return way

    def ahead(self, v: Vector, shrink: Tensor, sign: Tensor) -> Ahead | None:
        """−lr·(μm + shrink·v), to be made in one pass over momentum and parameters; None where there is none.

        That is on a GPU, where all that moves has a momentum.
        """
        return self.rolling(v, shrink, sign) if shrink.device.type == "cuda" else None

    def rolling(self, v: Vector, shrink: Tensor, sign: Tensor) -> Ahead | None:
        """The same on any device.

        Not in double precision, as ``shrink`` is in single, and not in float16, where μm + v may be beyond its range
        though v is not: the sum must be looked at before it is used.
        """
        moves, params, state = self.opt.moves, self.opt.tracker.model.params, self.opt.state
        if moves.resting:
            return None
        persistence = {name: group.options["momentum"] for group in moves.groups(self.opt) for name in group.names}
        if any("momentum" not in state.get(p, {}) for p in params.values()) or not all(persistence.values()):
            return None
        if len(persistence) < len(v) or not {t.dtype for t in v.values()}.isdisjoint({torch.float64, torch.float16}):
            return None
        momentum = Vector({name: state[p]["momentum"] for name, p in params.items()})
        if any(momentum[name].stride() != p.stride() for name, p in params.items()):  # as loaded into another format
            return None
        self._way = way = Ahead(v, shrink.float(), sign.float(), momentum, self.rates(), persistence)
        return way

    def left(self, step: Step) -> Vector | None:
        """The velocity that the step leaves as momentum; None where there is none, or the step makes it itself.

        A constraint may have put another move in the place of one that was to be made in one pass.
        """
        return None if self._way is None or isinstance(step.way, Ahead) else self._way.velocity

    def direction(self, ω: Covector, damping: float) -> Vector:
        """−lr·(μm + (G + λ)⁻¹ω)."""
        return self.move(self.sharp(ω, damping))

    def acceleration(self, δ: Vector) -> Vector:
        """−(G + λ)⁻¹Γ♭(δ, δ)."""
        assert self.inverse is not None
        # A copy: the next gradient is like the last one, and must not be solved from here.
        bent = self.opt.tracker.batch_queries.christoffel(δ)
        with unrounded(self.opt.tracker.model.example.device):
            v = self.opt.solver.sharp(copy.copy(self.inverse), bent)
        return -self.opt.moves.at_rest(v)

    @property
    def due(self) -> bool:
        """Whether the inverse is made anew in this step."""
        return self._due(common_damping(self.opt.param_groups))

    def _due(self, damping: float) -> bool:
        if self.inverse is None:
            return True
        changed = self.outdated or self.damping != damping
        if self.opt.solver.doubtful:
            return True
        return changed and (self.opt.tracker.structure.inverse == 1 or self.opt.tracker.inverse_due)

    def _renewed(self, operator: Operator) -> Operator:
        try:
            with unrounded(self.opt.tracker.model.example.device):
                return self.opt.solver.renewed(operator)
        except FactorisationError as error:
            if self.inverse is None:  # there is nothing to go on with
                raise
            say_once(self.opt, error)
            return operator

    def _invert(self, damping: float) -> None:
        solver, last, before = self.opt.solver, self.inverse, self.opt.outdated
        # One in the memory of the last is due again if the step fails after this.
        self.opt.outdated = before or (last is not None and type(solver).again is not Solver.again)
        try:
            G = self.operator
            self.inverse = solver.init(G, damping) if last is None else solver.again(last, G, damping)
            self.inverted = self.opt.tracker.step
        except FactorisationError as error:
            if self.inverse is None:
                raise
            say_once(self.opt, error)
        except (NatgradError, ValueError):  # what is refused is refused before anything is written
            self.opt.outdated = before
            raise
        self.damping, self.outdated = damping, False


def say_once(opt: NaturalGradient, why: NatgradError | str) -> None:
    """That the last good inverse stays."""
    if not opt.warned:
        _log.warning("%s. The last good inverse is used until the next one is due", why)
    opt.warned = True


def hear(opt: NaturalGradient) -> None:
    """Of a factor that a GPU could not invert, a step or two later: its last inverse was kept, if there was one.

    It is now inverted in double precision, for which the GPU is waited for. If that fails too, the last one stays.
    """
    inverse = opt.inverse
    if inverse is None or not inverse.failed():
        return
    inverse.forgive()
    why = _mended(opt, inverse)
    if why is None:
        return
    if opt.inverted_before is None:
        if opt.tracker.world.size > 1:
            return  # its NaN are everybody's: all processes raise, and none alone
        raise SingularMetricError(why)  # made here: an error in a variable of its traceback would hold the optimizer
    opt.tracker.inverted = opt.inverted_before
    say_once(opt, why)


def _mended(opt: NaturalGradient, inverse: Inverse) -> str | None:
    """Why the inverse could not be mended; None where it was. Processes that share their inverses would differ."""
    G = opt.tracker.average
    if opt.tracker.world.size > 1 or G is None:
        return NOT_POSITIVE
    try:
        with unrounded(opt.tracker.model.example.device):
            G.mend(inverse, opt.inverse_damping)
    except FactorisationError as error:
        return str(error)
    return None

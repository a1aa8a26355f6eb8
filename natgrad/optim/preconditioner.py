"""The cached inverse of the metric: when it is computed again, and what happens if that fails."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate.devices import full_precision, is_asynchronous
from natgrad.errors import FactorisationError, NatgradError, SingularMetricError
from natgrad.geometry import Covector, Vector
from natgrad.linalg import Damping
from natgrad.optim.distributed import Processes
from natgrad.solve.cg import CGInverse
from natgrad.solve.solvers import Solver
from natgrad.step.base import SharpMap
from natgrad.structures.base import IdentityInverse, Inverse, Operator, Refresh
from natgrad.structures.kronecker import NOT_POSITIVE, ProductInverse, retry
from natgrad.structures.layered import LayerInverse

_log = logging.getLogger("natgrad")


@final
class Preconditioner:
    """(G + λ)⁻¹, which a solver computes again when the schedule says so, if G or λ has changed.

    ``world``: the processes that share the work. ``power_share`` s: the step rule needs (G + λ)^-sp of a metric G^p.
    """

    def __init__(
        self,
        solver: Solver,
        schedule: Refresh,
        *,
        damping: Damping,
        device: torch.device,
        world: Processes,
        power_share: float,
    ) -> None:
        self.solver: Solver = solver
        self.schedule: Refresh = schedule
        self.world: Processes = world
        self.power_share: float = power_share
        self.inverse: Inverse | None = None
        self.warm: dict[str, Tensor] | None = None  # what the first inverse of an iterative solver starts from
        self.damping = damping  # of the inverse
        self.outdated: bool = False  # the metric has been estimated since it was inverted
        self.inverted: int = 0  # the step in which the inverse was made
        self.inverted_before: int | None = None  # the step of the inverse before this one, if there was one
        self._device = device
        self.inversions: int = 0  # of this process
        self.failures: int = 0
        self.version: int = 0  # changes with the memory that the inverse is in
        self.unseen: frozenset[str] = frozenset()  # parameters that no pass had used when the inverse was made
        # In a step: its number, its metric, whether the last inverse has been overwritten, and whether a layer is new.
        self._step, self._overwritten, self._grown = 0, False, False
        self._operator: Operator | None = None
        self._unseen: frozenset[str] = frozenset()
        self._settled: Damping | None = None  # the damping for which the inverse is that of this step

    @contextmanager
    def attempt(
        self, G: Operator, damping: Damping, step: int, *, changed: bool, unseen: frozenset[str]
    ) -> Iterator[Operator]:
        """The context of one step. If the step raises, the last inverse is restored.

        ``changed``: the metric is not that of the last step. ``unseen``: parameters that are in no estimate. Gives G;
        if the inverse is due, with a new basis, for structures that have one. An inverse that was overwritten cannot be
        restored: it is due again in the next step.
        """
        inverse = self.inverse
        saved = self.damping, self.outdated, self.inverted, self.inverted_before
        if isinstance(inverse, CGInverse):
            self.inverse = copy.copy(inverse)  # an iterative inverse changes when it is used
        self._overwritten, self._step, self._grown = False, step, bool(self.unseen - unseen)
        self._unseen = unseen
        self.outdated |= changed or self.damping != damping
        try:
            self._operator = self._begin(G, damping)
            yield self._operator
        except BaseException:
            self.inverse = inverse
            self.damping, self.outdated, self.inverted, self.inverted_before = saved
            self.outdated |= self._overwritten
            raise
        finally:
            self._operator = self._settled = None

    def _begin(self, G: Operator, damping: Damping) -> Operator:
        """G, with a new basis if the inverse is due."""
        if not self.due(damping):
            self._settled = damping
            return G
        return self._with_new_basis(G)

    def due(self, damping: Damping) -> bool:
        """Whether the inverse is computed again in this step.

        It is if a layer is used for the first time: its inverse is zero, and until the next inversion of the schedule
        the layer would not move.
        """
        if self.inverse is None or self._grown:
            return True
        if not (self.outdated or self.damping != damping):
            return False
        return self.schedule.inverse_due(self._step)

    def inverted_metric(self, G: Operator) -> Operator:
        """The metric that is inverted for the step rule: G^p, or at its share of the power."""
        return G if self.power_share == 1 else G.with_power(self.power_share * G.power)

    def prepare(self, damping: Damping) -> Inverse:
        """(G + λ)⁻¹, computed again if that is due. If that fails, the last one is used, and a warning says so once."""
        last = self.inverse
        if last is not None and (damping == self._settled or not self.due(damping)):
            return last
        self.world.together(partial(self._make, damping, last))
        self.outdated = False
        self.damping = damping
        self.unseen, self._grown = self._unseen, False
        assert self.inverse is not None
        return self.inverse

    def _make(self, damping: Damping, last: Inverse | None) -> None:
        G, overwritten, alone = self._operator, self._overwritten, self.world.size == 1 or self.world.owners is not None
        assert G is not None
        self._overwritten |= last is not None and self.solver.works_in_place and alone
        try:
            with full_precision(self._device):
                self.inverse = self._inverse(G, damping, last)
        except FactorisationError as error:
            if last is None:
                raise
            self._warn(str(error))
        except (NatgradError, ValueError):  # refused before anything was written
            self._overwritten = overwritten
            raise
        else:
            self._count_inverse(last)
            if isinstance(last, LayerInverse) and is_asynchronous(self._device):
                # A captured step reads the inverse where the last one was, in this step already.
                self.inverse = last.copy_into(self.inverse)
            self._overwritten |= self.inverse is last
            self.version += self.inverse is not last

    def _count_inverse(self, last: Inverse | None) -> None:
        """A new inverse is made in this step."""
        if last is not None and self.inverted != self._step:
            self.inverted_before = self.inverted
        self.inversions += 1
        self.inverted, self.warm = self._step, None

    def _inverse(self, G: Operator, damping: Damping, last: Inverse | None) -> Inverse:
        return self.world.inverse(self.solver, self.inverted_metric(G), damping, last=last, warm=self.warm)

    def sharp_at(self, ω: Covector, damping: Damping) -> Vector:
        """(G + λ)⁻¹ω in the precision of the metric, under autocast too. The result may be overwritten."""
        self.prepare(damping)
        return self.sharp(ω)

    def sharp_with_pairing(self, ω: Covector) -> tuple[Vector, Tensor]:
        """(G + λ)⁻¹ω and ⟨ω, (G + λ)⁻¹ω⟩ []."""
        assert self.inverse is not None
        with full_precision(self._device):
            if self.world.owners is not None:
                return self.world.owners.sharp(self.inverse, ω)
            return self.inverse.sharp_with_pairing(ω)

    def sharp(self, ω: Covector) -> Vector:
        """(G + λ)⁻¹ω with the inverse that is there. The result may be overwritten."""
        assert self.inverse is not None
        if self.world.owners is not None:
            return self.sharp_with_pairing(ω)[0]
        with full_precision(self._device):
            return self.inverse.sharp(ω)

    def sharp_cold(self, ω: Covector) -> Vector:
        """(G + λ)⁻¹ω of a covector unlike the gradient: an iterative solver does not start the next solve from it."""
        assert self.inverse is not None
        with full_precision(self._device):
            return (copy.copy(self.inverse) if isinstance(self.inverse, CGInverse) else self.inverse).sharp(ω)

    def sharp_from(self, gradient: Covector) -> SharpMap:
        """The same, and of the gradient itself, from which the next solve starts."""
        solve = lambda ω: self.sharp(ω) if ω is gradient else self.sharp_cold(ω)  # noqa: E731
        return SharpMap(solve, isinstance(self.inverse, IdentityInverse))

    def handle_async_failure(self, G: Operator | None) -> None:
        """A GPU reports a step or two late that it could not invert a factor. Its last inverse is still there.

        The factor is inverted again in double precision, which waits for the GPU. If that fails as well, the last
        inverse is used; without one this raises.
        """
        if not isinstance(self.inverse, ProductInverse) or not self.inverse.batch.failed():
            return
        self.inverse.clear_failures()
        why = self._retry_in_double(self.inverse, G)
        if why is None:
            return
        if self.inverted_before is None:
            if self.world.size > 1:
                return  # all processes have its NaN: all of them raise, and none alone
            raise SingularMetricError(why)  # made here: an error in a variable would hold the optimizer
        self.inverted = self.inverted_before
        self._warn(why)

    def _retry_in_double(self, inverse: Inverse, G: Operator | None) -> str | None:
        """Why the inverse could not be made; None if it was. Processes that share their inverses would differ."""
        if self.world.size > 1 or G is None:
            return NOT_POSITIVE
        try:
            with full_precision(self._device):
                retry(self.inverted_metric(G), inverse, self.damping)
        except FactorisationError as error:
            return str(error)
        return None

    def _with_new_basis(self, G: Operator) -> Operator:
        return self.world.together(partial(self._renew, G)) if self.world.owners is not None else self._renew(G)

    def _renew(self, G: Operator) -> Operator:
        try:
            with full_precision(self._device):
                return self.world.with_new_basis(G)
        except FactorisationError as error:
            if self.inverse is None:  # there is nothing to go on with
                raise
            self._warn(str(error))
            return G

    def _warn(self, why: str) -> None:
        """Once: the last good inverse is used."""
        if not self.failures:
            _log.warning("%s. The last good inverse is used until the next one is due", why)
        self.failures += 1

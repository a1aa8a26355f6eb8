"""The metric of an optimizer: when it is estimated, and its moving average."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from natgrad.errors import IncompatibleError, NatgradError, UncoveredError
from natgrad.geometry import Covector
from natgrad.log import listed
from natgrad.model import Model
from natgrad.optim.distributed import Processes
from natgrad.optim.parameters import ParameterStatus, ParameterTable
from natgrad.pullbacks.gradient import GradientSample
from natgrad.pullbacks.pullback import Observer, Pullback
from natgrad.structures.base import Operator
from natgrad.structures.identity import constant
from natgrad.structures.layered import Layered
from natgrad.structures.refresh import Refresh

_STRICT = (
    "no layer rule covers {}, and strict=True: {}. Pass rules=[…] with a rule for their module, or let AdamW step them "
    "with strict=False"
)
_NONE_LEFT = (
    'no layer rule covers {}, and fallback="adamw" leaves no parameter for the metric: {}. Pass rules=[…] with a rule '
    'for their module, use torch.optim.AdamW, or a fallback= that is a structure, or groups with "fallback": None'
)
_UNLIKE = (
    "some processes have found a layer rule for {}, and in others AdamW would step them: begin with batches that use "
    "all parameters alike in all processes"
)


@final
@dataclass
class EmaWeight:
    """Weights of a bias-corrected moving average over examples (Grosse 2021), estimate by estimate.

    Ḡ = Σ_t β^{T−t} Σ_j m_tj G_tj / Σ_t β^{T−t} Σ_j m_tj, where G_tj is the estimate of pass j of step t, and m_tj is
    the number of its examples over that of the last whole step. If all steps have equally many examples this is the
    usual average with the correction for its start.

    >>> weight = EmaWeight(decay=0.5)
    >>> weight.next_step(8), weight.next_step(8), weight.next(4), weight.next(4)
    (1.0, 0.6666666666666666, 0.4, 0.2857142857142857)
    """

    decay: float
    total: float = 0.0  # Σ_t β^{T−t} Σ_j m_tj
    step_size: int = 0  # examples of the last whole step, the unit of ``total``; 0 if not known
    examples: int = 0  # of this step, so far

    def next_step(self, n: int) -> float:
        """The weight of all estimates of one step, which have been averaged before."""
        self.total, self.step_size, self.examples = self.decay * self.total + 1.0, n, 0
        return 1.0 / self.total

    def next(self, n: int) -> float:
        """The weight of an estimate from n examples; a step may have several."""
        if not self.examples:
            self.total *= self.decay
        self.examples += n
        self.step_size = self.step_size or n
        mass = n / self.step_size
        self.total += mass
        return mass / self.total

    def end_step(self) -> None:
        """What comes next belongs to the next step."""
        if self.examples and self.step_size:  # the unit changes to the size of this step
            self.total *= self.step_size / self.examples
        self.step_size, self.examples = self.examples or self.step_size, 0


@final
class MetricTracker:
    """The schedule of the metric, and its moving average; a ``Source`` puts estimates into it.

    Several forward passes between two steps (gradient accumulation) are averaged, weighted by their numbers of
    examples. If a step is never made (``GradScaler`` skips it), its estimate is averaged with the next, at the same
    parameters.

    Kronecker factors are averaged in place: the estimate never exists beside the average (``absorbed``). Estimates of
    other structures, the first estimate, and those of several processes until they are joined, are held in ``fresh``
    until a step has succeeded with them: if it fails, the average stays as it was.

    ``observer``: the model of all parameters that the metric may cover. ``parameters``: what becomes of each of them.
    """

    def __init__(
        self,
        observer: Observer,
        schedule: Refresh,
        *,
        generator: torch.Generator,
        world: Processes,
        parameters: ParameterTable,
    ) -> None:
        self.schedule, self.structure, self.world = schedule, schedule.structure, world
        self.parameters, self.device = parameters, observer.model.example.device
        self.metric, self.generator = observer.metric, generator
        self.declared = self.observer = observer  # ``declared``: before parameters are left out
        self.average: Operator | None = constant(self.structure, observer.model)
        self.constant = self.average is not None  # nothing is estimated, and no pass is looked at
        self.fresh: Operator | None = None  # the estimate of this step, where it is not in the average yet
        self.absorbed = False  # an estimate of this step is in the average
        self.weight = EmaWeight(schedule.decay)
        self.step = 0
        self.estimated = 0  # the step in which the metric was last estimated
        self.joined = False  # whether ``fresh`` is that of all processes
        self._examples = 0  # in ``fresh``
        self._unreached: frozenset[str] | None = None  # the outputs of no estimate of this step depend on them
        self._problem: Exception | None = None  # of a pass of this step, where there are several processes
        self.together = False  # all processes are in a pass together, and raise together
        # The state of the generator, if a state was loaded whose average has the passes of this step.
        self._counted: Tensor | None = None

    @property
    def model(self) -> Model:
        """The model, with the parameters of the metric."""
        return self.observer.model

    @property
    def module(self) -> nn.Module:
        """The plain module, out of its wrappers."""
        module = self.model.module
        assert module is not None
        return module

    @property
    def due(self) -> bool:
        """Whether the metric is estimated for this step."""
        if self.average is None or self.parameters.pending:
            return True
        return not self.constant and self.schedule.metric_due(self.step)

    @property
    def has_estimate(self) -> bool:
        """Whether the metric has been estimated for this step."""
        return self.fresh is not None or self.absorbed

    @property
    def averaged(self) -> bool:
        """Whether estimates of earlier passes exist, which the next must be averaged with."""
        return self.average is not None or self.fresh is not None

    # Estimates.

    @property
    def in_place(self) -> bool:
        """Whether an estimate goes into the average at once, in place. Several processes must join theirs before."""
        alone = self.fresh is None and self.world.size == 1
        return alone and self.average is not None and self.structure.in_place

    def add(self, pb: Pullback) -> None:
        """Estimate the metric from a pullback, into the average or into ``fresh``."""
        self._unreached = pb.unreached if self._unreached is None else self._unreached & pb.unreached
        if self.in_place:
            assert self.average is not None
            self.average = self.structure.absorb(pb, self.average, replace(self.weight).next(pb.n))
            self.count(pb.n)  # not before: an estimate that is refused does not count
            self._examples += pb.n
            return
        estimate = self.structure.estimate(pb, self.fresh or self.average)
        if self.chooses_basis:
            # All processes need one basis, that of all examples: what they have now is the first half of it.
            self.together = True
            self.world.raise_together(None)
            estimate = self.structure.estimate(pb, self.world.with_new_basis(self._mean(estimate, pb.n)))
            self.together = False
        self.hold(estimate, pb.n)

    def count(self, n: int) -> float:
        """The weight of an estimate from n examples that goes into the average; it is counted by this."""
        self.absorbed = True
        return self.weight.next(n)

    def hold(self, estimate: Operator, n: int) -> None:
        """Average an estimate with the other ones of this step, in ``fresh``."""
        # Those of the first step are checked on a GPU, too: there is no average that they could be kept out of.
        estimate = estimate.finite(wait=self.average is None) if self.world.size == 1 else estimate
        self.fresh = estimate if self.fresh is None else self.fresh.lerp(estimate, n / (self._examples + n))
        self._examples += n

    def sees_all(self) -> None:
        """The estimate of this step knows by itself what it has seen (``Operator.unseen``)."""
        self._unreached = frozenset()

    def merged(self) -> tuple[Operator, bool]:
        """The average with the estimate of this step, and whether there is one; ``commit`` makes it the average."""
        if self.fresh is None:
            assert self.average is not None
            return self.average, self.absorbed
        if not self.joined:
            joined = self._mean(self.fresh, self._examples)
            # Here all processes raise; one that raised alone would leave the others waiting.
            self.fresh, self.joined = joined.finite() if self.world.size > 1 else joined, True
            self._unreached = self._unreached_anywhere()
        weight = replace(self.weight).next_step(self._examples)
        if self.average is None or (self.schedule.decay == 0 and not self.fresh.unseen):
            return self.fresh, True
        average, self.fresh = self.average.merged(self.fresh, weight), None  # memory is needed for the inverse
        return average, True

    def commit(self, operator: Operator, estimated: bool) -> None:
        """After a step that succeeded: the operator becomes the average. ``estimated``: it is new in this step."""
        if estimated:
            self.parameters.see(self.unseen(operator))
        self.average = operator
        if self.absorbed:
            self.weight.end_step()
        elif estimated:
            self.weight.next_step(self._examples)
        self.estimated = self.step if estimated else self.estimated
        self.step += 1

    def discard(self) -> None:
        """Forget the estimate of this step; what is in the average stays."""
        self.fresh, self.absorbed, self.joined = None, False, False
        self._examples, self.weight.examples = 0, 0
        self._unreached, self._problem, self.together, self._counted = None, None, False, None

    def skip_counted(self) -> None:
        """Go on from a state whose average has the passes of this step: when they come again, they do not count.

        They could not be left out of the state: the average is changed in place. The numbers that they drew are not
        drawn again.
        """
        self.weight.examples, self.absorbed = self.weight.step_size, True
        self._counted = self.generator.get_state()

    def is_counted(self) -> bool:
        """Whether the pass that comes is in the average already; what it drew is put back."""
        if self._counted is not None:
            self.generator.set_state(self._counted)
        return self._counted is not None

    # Parameters.

    def unseen(self, G: Operator) -> frozenset[str]:
        """The parameters that the outputs did not depend on in any estimate in G."""
        never = self.parameters.unseen
        if self._unreached is not None:
            forgets = self.average is None or self.schedule.decay == 0  # only the last one counts
            never = self._unreached if forgets else never & self._unreached
        return G.unseen | never.difference(*(block.names for block in G.layers)) if never else G.unseen

    def _unreached_anywhere(self) -> frozenset[str] | None:
        """Those that were unreached in this step in all processes, which go on alike."""
        if self.world.size == 1 or self._unreached is None:
            return self._unreached
        names, here = list(self.model.params), self._unreached
        reached = torch.tensor([float(name not in here) for name in names], device=self.device)
        shares = self.world.mean_of([reached], 1)[0].tolist()
        return frozenset(name for name, share in zip(names, shares, strict=True) if share == 0)

    @property
    def undecided(self) -> frozenset[str]:
        """The parameters that are left out if this pass shows no layer rule for them: an average keeps its layers."""
        return frozenset() if self.averaged else self.parameters.optional - self.parameters.ruleless

    def leave(self, reasons: Mapping[str, str]) -> None:
        """Go on without these parameters, which no layer rule covers, for these reasons."""
        names, why = frozenset(reasons), "; ".join(dict.fromkeys(reasons.values()))
        if isinstance(self.structure, Layered) and self.structure.strict:
            raise UncoveredError(_STRICT.format(listed(sorted(names)), why))
        if len(names) == len(self.model.params):
            raise UncoveredError(_NONE_LEFT.format(listed(sorted(names)), why))
        self.observer = self.observer.without(names)
        self.parameters.put(ParameterStatus.RULELESS, names)

    def use_model(self, model: Model) -> None:
        """Go on with this model, of which a pass or a checkpoint tells what the examples of its outputs are."""
        self.observer = replace(self.observer, model=model)

    def gradient_sample(self, ω: Covector, without: frozenset[str]) -> GradientSample:
        """The gradient of this step; ``without``: parameters that have none, for which ω is zero."""
        observer = self.observer
        return GradientSample(ω, without, observer.blocks, observer.bound, observer.cache.graphs)

    # Several processes: an error of one is raised by all, where all of them are.

    @property
    def chooses_basis(self) -> bool:
        """Whether the next estimate is measured in a basis that several processes must choose first."""
        return self.world.size > 1 and self.structure.has_basis and not self.averaged

    @property
    def raises_now(self) -> bool:
        """Whether an error of a pass is raised at once: there is one process, or all of them raise together."""
        return self.world.size == 1 or self.together

    def keep(self, error: Exception) -> None:
        """Keep an error of a pass until ``step``: if this process raised now, the others would wait for it."""
        try:
            if self.chooses_basis:
                self.together = True
                self.world.raise_together(error)
            self.postpone(error)
        finally:
            del error  # as in ``Processes.raise_together``

    def postpone(self, error: Exception) -> None:
        """Keep an error that concerns this process alone."""
        self._problem = self._problem or error.with_traceback(None)

    def problem(self, missing: Callable[[], str]) -> Exception | None:
        """Why there is no step: an error that was kept, or no estimate where one is due; ``missing`` says what is."""
        if self._problem is None and self.due and not self.has_estimate:
            return NatgradError(missing())
        return self._problem

    def _mean(self, estimate: Operator, n: int) -> Operator:
        """The mean of the estimates of all processes, which must be of the same parameters."""
        if self.world.size > 1 and self.average is None and self.parameters.optional:
            names, left = list(self.declared.model.params), self.parameters.ruleless
            flags = torch.tensor([float(name in left) for name in names], device=self.device)
            shares = zip(names, self.world.mean_of([flags], 1)[0].tolist(), strict=True)
            if unlike := [name for name, share in shares if 0 < share < 1]:
                raise IncompatibleError(_UNLIKE.format(", ".join(unlike)))
        return self.world.mean(estimate, n, self._restored)

    def _restored(self, tensors: Mapping[str, Tensor]) -> Operator | None:
        return self.structure.restore(self.model, self.observer.blocks, tensors)

    def mean_over_ranks(self, loss: float) -> float:
        """The mean of the losses of all processes, as ``DistributedDataParallel`` takes it of their gradients."""
        if self.world.size == 1:
            return loss
        value = torch.tensor([loss], dtype=torch.float64, device=self.device)
        return float(self.world.mean_of([value], 1)[0])

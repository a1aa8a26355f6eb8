"""Where the estimates of a metric come from: outputs of a pass, the user's backward pass, or gradients.

    OutputSource    a forward pass of the user  ──(his loss, where the metric asks for it)──►  estimate
    BackwardSource  a forward pass of the user  ──his backward pass──►  estimate in ``opt.step()``
    GradientSource  the gradients in ``opt.step()``  ──►  estimate

Every source has ``begin`` (a forward pass of the user begins), ``collect`` (the gradients of the step are there) and
``operator`` (the average with the estimate of this step), and puts its estimates into a ``MetricTracker``.
"""

from __future__ import annotations

import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.autograd import frees
from natgrad.accelerate.devices import (
    can_read,
    full_precision,
    get_rng_state,
    in_backward,
    in_export,
    in_shape_inference,
    in_transform,
    refuse_compiled_backward,
    set_rng_state,
)
from natgrad.accelerate.fused import Flag
from natgrad.accelerate.modules import compiling, gather, uncompiled, without_exchange, without_saved_tensor_hooks
from natgrad.errors import IncompatibleError, LossMismatchError, NatgradError, NonFiniteError, UncoveredError
from natgrad.geometry import Covector
from natgrad.isolation import refuse_randomness, untouched
from natgrad.log import listed
from natgrad.model import (
    Arguments,
    Inputs,
    Model,
    check_inputs,
    eager,
    in_library_pass,
    is_compiled,
    library_pass,
    refuse_nested,
    returned_tensors,
    side_by_side,
)
from natgrad.optim.distributed import Processes, refuse_foreign_ddp
from natgrad.optim.parameters import ParameterStatus, ParameterTable
from natgrad.output.metric import Fisher, OutputMetric
from natgrad.pullbacks.gradient import GradientSample
from natgrad.pullbacks.pullback import Batch, NoRuleError, Observer, OperationsNeededError, Pullback
from natgrad.pullbacks.tape import Recorder, Tape
from natgrad.step.queries import BatchQueries
from natgrad.structures.base import Operator, Refresh, constant
from natgrad.structures.kronecker import Kronecker, KroneckerInBackward
from natgrad.structures.layered import Layered, LayerOperator
from natgrad.watch.base import LossHook, ModuleHook, Watcher, attach_hook, in_training, loss_in, on_cotangent
from natgrad.watch.loss import differ
from natgrad.watch.model import ModelState

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
    other structures, the first estimate, and those of several processes until they are averaged, are held in ``fresh``
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
        self.schedule: Refresh = schedule
        self.world: Processes = world
        self.structure = schedule.structure
        self.parameters: ParameterTable = parameters
        self.device: torch.device = observer.model.example.device
        self.metric: OutputMetric = observer.metric
        self.generator: torch.Generator = generator
        self.observer: Observer = observer
        self.initial_observer: Observer = observer  # before parameters are left out
        self.average: Operator | None = constant(self.structure, observer.model)
        self.constant: bool = self.average is not None  # nothing is estimated, and no pass is looked at
        self.fresh: Operator | None = None  # the estimate of this step, where it is not in the average yet
        self.absorbed: bool = False  # an estimate of this step is in the average
        self.weight: EmaWeight = EmaWeight(schedule.decay)
        self.step: int = 0
        self.estimated: int = 0  # the step in which the metric was last estimated
        self.estimates: int = 0  # steps of this process in which it was
        self.is_joint: bool = False  # whether ``fresh`` is that of all processes
        self._examples = 0  # in ``fresh``
        self._unreached: frozenset[str] | None = None  # the outputs of no estimate of this step depend on them
        self._problem: Exception | None = None  # of a pass of this step, where there are several processes
        self.together: bool = False  # all processes are in a pass together, and raise together
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

    def alone(self) -> AbstractContextManager[None]:
        """Inside, passes of the library exchange nothing with other processes, which may make more or fewer of them."""
        return without_exchange(self.module.modules()) if self.model.is_sharded else nullcontext()

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
    def like(self) -> Operator | None:
        """What an estimate will be averaged with: which layers it has, and in which basis."""
        return self.average if self.world.owners is None else self.world.owners.layers

    @property
    def averaged(self) -> bool:
        """Whether estimates of earlier passes exist, which the next must be averaged with."""
        return self.average is not None or self.fresh is not None

    # Estimates.

    @property
    def in_place(self) -> bool:
        """Whether an estimate goes into the average at once, in place. Several processes must join theirs before."""
        alone = self.fresh is None and self.world.size == 1
        return alone and self.average is not None and isinstance(self.structure, Kronecker)

    def add(self, pb: Pullback) -> None:
        """Estimate the metric from a pullback, into the average or into ``fresh``."""
        self._unreached = pb.unreached if self._unreached is None else self._unreached & pb.unreached
        if self.in_place:
            assert self.average is not None
            self.average = self.structure.absorb(pb, self.average, replace(self.weight).next(pb.n))
            self.count(pb.n)  # not before: an estimate that is refused does not count
            self._examples += pb.n
            return
        estimate = self.structure.estimate(pb, self.fresh or self.like)
        if self.chooses_basis:
            # All processes need one basis, that of all examples: what they have now is the first half of it.
            self.together = True
            self.world.raise_together(None)
            G, owners = self.world.with_new_basis(self._mean(estimate, pb.n)), self.world.owners
            if owners is not None:
                owners.tell_basis(cast(LayerOperator, G))
            estimate = self.structure.estimate(pb, G if owners is None else owners.layers)
            self.together = False
        self.hold(estimate, pb.n)

    def count(self, n: int) -> float:
        """The weight of an estimate from n examples that goes into the average; it is counted by this."""
        self.absorbed = True
        return self.weight.next(n)

    def hold(self, estimate: Operator, n: int) -> None:
        """Average an estimate with the other ones of this step, in ``fresh``."""
        # The first ones are checked on a GPU, too: there is no average that they could be kept out of.
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
        if not self.is_joint:
            mean = self._mean(self.fresh, self._examples)
            # Here all processes raise; one that raised alone would leave the others waiting.
            finite = self.world.together(mean.finite) if self.world.size > 1 else mean
            self.fresh, self.is_joint = finite, True
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
        if self.world.owners is not None:
            self.world.owners.commit(cast(LayerOperator, operator))
        self.average = operator
        if self.absorbed:
            self.weight.end_step()
        elif estimated:
            self.weight.next_step(self._examples)
        self.estimated = self.step if estimated else self.estimated
        self.estimates += estimated
        self.step += 1

    def discard(self) -> None:
        """Forget the estimate of this step; what is in the average stays."""
        if self.world.owners is not None:
            self.world.owners.discard()
        self.is_joint = False
        self.fresh, self.absorbed = None, False
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
        owners = self.world.owners
        if owners is not None:
            layers = owners.all_layers
            return layers.unseen | never.difference(*(block.names for block in layers.layers))
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
        return frozenset() if self.averaged else self.parameters.ruleless_fallback - self.parameters.ruleless

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
        return GradientSample(ω, without, observer.blocks, observer.bound)

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
        if self.world.size > 1 and self.average is None and self.parameters.ruleless_fallback:
            names, left = list(self.initial_observer.model.params), self.parameters.ruleless
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


NOTHING_SEEN = (
    "the metric is due, and no forward pass with gradients was seen since the last step: call model(x) outside "
    "torch.no_grad() and torch.func, or opt.refresh(x) where the forward pass is opaque. If it was called so, either "
    "the model is called compiled, and the optimizer was made with the plain one (give torch.compile(model) to the "
    "optimizer), or its hooks were removed (make a new optimizer)"
)
_CONSTANT = (
    "the step rule asks for the batch, and a structure with power=0 looks at none: use Fixed(), KLClip(), Normalised() "
    "or Polar(), or power > 0"
)
NEEDS_TARGET = "the metric is due and needs the targets: call opt.refresh(x, target) before opt.step()"
NEEDS_CALL = (
    "the metric is due and needs the targets: call the loss that the optimizer was given, {}, on the outputs of the "
    "model, loss(model(x), target), or opt.refresh(x, target) before opt.step()"
)
_USED_OTHERWISE = (
    "this pass uses its layers in another way than the first one did, and Empirical(), which waits for your backward "
    'pass, cannot run it again to look: begin with a batch of several examples, and pass examples="inputs" if the '
    "model flattens its outputs to [n·t *out]"
)
NO_COTANGENT = (
    "the metric is due, and no backward pass came through the outputs of a forward pass of the model since the last "
    "step: the loss must be computed from what model(x) returns, called outside torch.no_grad(), and "
    "torch.utils.checkpoint needs use_reentrant=False. Where the forward pass is opaque call opt.refresh(x, target)"
)
_IN_PLACE = (
    "the outputs of the model were changed in place before backward() (y /= 2, y[mask] = 0), and the metric, which "
    "waits for the cotangents of the loss, needs them as they were: write y = y / 2, y = y.masked_fill(mask, 0)"
)
_ALL_TERMS = (
    "the cotangent of the loss cannot be seen at the outputs (a compiled model, an output= that makes a new tensor, "
    "opt.refresh(x) without targets): all terms count, also ignored labels. If there are such, call "
    "opt.refresh(x, target)"
)
NO_BACKWARD = (
    "the metric is due, and no backward pass came through a forward pass of the model since the last step: Empirical() "
    "takes the cotangents of loss.backward(), with a loss that is computed from model(x), called outside "
    "torch.no_grad(). Else give it the loss, Empirical(loss), and call opt.refresh(x, target)"
)
COMPILED_BACKWARD = (
    "Empirical() takes the cotangents of the layers in the user's own backward pass, and a compiled model shows none: "
    "give it the loss, Empirical(loss), and call opt.refresh(x, target), or use BatchGradient()"
)
NO_OUTPUTS = (
    "{} is made of gradients, and is no metric on outputs: there is nothing to refresh, and no divergence for a step "
    "rule. Use a rule that only scales (Fixed, KLClip, Normalised, Polar) with it, or a metric on the outputs (Fisher, "
    "Empirical(loss))"
)
_TWO_THREADS = (
    "two threads call the model at once, both with gradients, and the metric is that of one pass: "
    "call it under torch.no_grad() in one thread, or let the passes wait for each other (threading.Lock)"
)
_TWO_MODES = (
    "between two steps the metric saw a forward pass in evaluation mode beside one in training mode: call the model "
    "under torch.no_grad() to evaluate it, so that the metric is that of the training passes alone"
)
_TERMS = (
    "the outputs have %d terms an example (tokens, pixels, targets): Fisher(family, reduction='sum') is the metric of "
    "a loss that is a sum over them. For a loss that is their mean give Fisher(family, reduction='mean'), or the steps "
    "are too short"
)
_NOT_COMPILED = (
    "an optimizer of natgrad looks at the inputs of this call. With fullgraph=True compile the model by "
    "torch.compile(model) and give the compiled model to the optimizer"
)
_log = logging.getLogger("natgrad")


@final
class AtStep:
    """Reports NaN and infinity inside with the number of the step.

    Where all processes must raise an error, it is kept until they do. Not a generator: from Python 3.12 on, an error
    that leaves ``contextlib.contextmanager`` as another one keeps all frames it passed in a reference cycle, and with
    them the optimizer.
    """

    def __init__(self, tracker: MetricTracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        tracker, told = self._tracker, error
        try:
            if isinstance(error, NonFiniteError) and "at step" not in str(error):
                told = NonFiniteError(f"at step {tracker.step}: {error}")
            if not isinstance(told, Exception):
                return False
            if not tracker.raises_now:
                tracker.keep(told)
                return True
            if told is not error:
                raise told from error
            return False
        finally:
            del error, told  # as in ``Processes.raise_together``


class Source(ABC):
    """Where estimates come from. Each puts them into the ``tracker``, whose average ``operator`` returns.

    ``watchers``: are told what passes return. The list is the user's, who may take them away.
    """

    def __init__(self, tracker: MetricTracker, watchers: Sequence[Watcher]) -> None:
        self.tracker: MetricTracker = tracker
        self.watchers: Sequence[Watcher] = watchers

    def refresh(self, x: Inputs, target: Any) -> None:
        """Estimate the metric in a forward pass of our own."""
        raise IncompatibleError(NO_OUTPUTS.format(repr(self.tracker.metric)))

    @property
    def batch_queries(self) -> BatchQueries:
        """What a step rule may ask about the batch of this step."""
        raise IncompatibleError(NO_OUTPUTS.format(repr(self.tracker.metric)))

    @property
    def has_pending_pass(self) -> bool:
        """Whether a pass of this step waits for the user's backward pass, or that has come."""
        return False

    @abstractmethod
    def collect(self, ω: Covector, without: Names, grads: Tensors) -> None:
        """The gradients of the step: ω, zero for the parameters ``without`` one, and ``grads`` of all others."""

    def operator(self) -> tuple[Operator, bool]:
        """The average with the estimate of this step, and whether there is one; an error says what is missing."""
        return self.tracker.merged()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The forward passes inside are no training passes, though the user's code runs them."""
        yield

    def abandon(self) -> None:  # noqa: B027 - most sources record nothing
        """Stop recording a pass that never ended: no hook hears of a KeyboardInterrupt."""

    def discard(self) -> None:
        """The step is over, or there is none: forget its estimate, and wait for no pass."""
        self.tracker.discard()


Names: TypeAlias = frozenset[str]
Tensors: TypeAlias = Mapping[str, Tensor]


@final
class GradientSource(Source):
    """g gᵀ of the gradients of every step (``BatchGradient``), whatever the passes and processes they were summed over.

    No pass is looked at. Every step counts once.
    """

    def collect(self, ω: Covector, without: Names, grads: Tensors) -> None:
        tracker = self.tracker
        if not tracker.due:
            return
        if can_read(next(iter(ω.values()))):  # on a GPU the average leaves out what is not finite
            Flag().check(grads, "the gradient")  # of AdamW's parameters, too: a step is refused as a whole
        tracker.sees_all()
        structure, sample = tracker.structure, tracker.gradient_sample(ω, without)
        with full_precision(tracker.device):
            tracker.hold(structure.of_gradient(sample, tracker.average), 1)
            tracker.is_joint = True  # it is that of all processes


# Forward passes of the user.


class PassSource(Source):
    """Records the forward passes of the user in the steps in which the metric is due.

    A compiled pass shows nothing of its layers: there an eager pass of our own before it is recorded. ``model_state``:
    which passes are at the parameters of the optimizer. ``wrapping``: the model as it was handed over and what it
    wraps, down to the plain module. ``queried``: whether the step rule asks about the batch (``batch_queries``), so
    that the random state of its pass is kept.
    """

    def __init__(
        self,
        tracker: MetricTracker,
        watchers: Sequence[Watcher],
        *,
        model_state: ModelState,
        wrapping: Sequence[nn.Module],
        queried: bool,
    ) -> None:
        super().__init__(tracker, watchers)
        self._model_state, self._queried = model_state, queried
        self._by_refresh = tracker.metric.needs_target and not tracker.metric.pending_loss  # no pass is looked at
        self._refreshed = self._suspended = False  # passes are ignored: until the next step; until it ends
        # Of this step, or of the last one until there is another pass; the last pass alone if no rule asks about them.
        self._passes: list[tuple[Batch, OutputMetric]] = []
        self._passes_of = -1  # the step that they belong to
        self._recorder: Recorder | None = None  # of the pass that is being recorded
        self._handle: RemovableHandle | None = None  # of the hook at its end
        self._depth = 0  # calls of the model inside of that pass
        self._thread = 0  # that it runs in; others may evaluate the model meanwhile
        self._rng_state = get_rng_state(tracker.device)
        self._modes: set[bool] = set()  # of the passes of this step
        self._warned_modes = self._measured_terms = False
        # A hook on a compiled module itself runs outside of the compiled code.
        self.watched: nn.Module = next((module for module in wrapping if is_compiled(module)), tracker.module)
        self._follow()

    def _follow(self) -> None:
        """Look at the model as the tracker has it: a pass, or a checkpoint, may have told more of it."""
        observer = self._observer = self.tracker.observer
        self._metric_of_pass = observer.output_metric  # with the shapes of the last pass that was estimated
        self._recorders = {
            eagerly: Recorder(observer.model, observer.blocks, of_user=not eagerly) for eagerly in (False, True)
        }

    @abstractmethod
    def take(self, batch: Batch, tape: Tape, raw: Any, of_user: bool) -> Any:
        """A pass has returned ``raw``: estimate the metric, now or later.

        Returns what the user gets in place of ``raw``, or None for no change. ``of_user``: the pass is the user's own.
        """

    @abstractmethod
    def add(self, pb: Pullback) -> None:
        """Estimate the metric from this pullback, now or in a backward pass."""

    @property
    def needs_operations(self) -> bool:
        """Whether the operations of a pass are recorded, beside its layers."""
        return self._observer.operations

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> None:
        """Before a forward pass of the user, ``compiled`` or not: if the metric is due, start to record the pass.

        Among others, these passes are ignored: passes without gradients, passes after ``refresh``, all passes if the
        metric gets its targets by ``refresh``, passes inside a backward pass, which recompute activations, passes
        inside ``torch.func``, whose tensors have no values to look at: they are for derivatives by the inputs, and
        passes for shapes, whose values mean nothing.
        """
        if in_library_pass():
            return
        if self._recorder is not None:
            if threading.get_ident() == self._thread:  # the model calls itself
                self._depth += 1
            elif torch.is_grad_enabled():
                raise NatgradError(_TWO_THREADS)
            return
        if not torch.is_grad_enabled() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return
        if in_transform() or in_shape_inference():
            return
        tracker = self.tracker
        due = tracker.due
        if due:
            refuse_foreign_ddp(tracker.world)
            tracker.world.check()
        tracker.together = False
        if self._refreshed or self._suspended or self._by_refresh or not (due or self._queried):
            return
        if in_backward() or self._model_state.moved(certain=due):
            return
        x = Arguments(args, kwargs)
        if self._observer is not tracker.observer:
            self._follow()
        state = get_rng_state(tracker.device) if self._queried else None
        self._note_pass(Batch(tracker.model, x, rng_state=state), self._metric_of_pass)
        if due:
            refuse_nested(x, "the inputs")
            self._record(x, eagerly=self._is_compiled(compiled))
        elif self._queried and not self._is_compiled(compiled):
            self._forget_if_it_raises()

    def _record(self, x: Arguments, *, eagerly: bool) -> None:
        """Record the pass that begins or, ``eagerly``, one of our own before it."""
        tracker, one_pass = self.tracker, self.tracker.structure.by_layer
        self._note_mode()
        if not one_pass:
            tracker.model.check_separable()
        operations = self.needs_operations
        if eagerly:
            self.refuse_compiled()
        self._recorder, self._thread = self._recorders[eagerly], threading.get_ident()
        self._recorder.start(x, operations=operations)
        if eagerly or not one_pass:
            self._rng_state = get_rng_state(tracker.device)
        if eagerly:
            self._run_eagerly(x)
        else:
            # Registered after the recorder's hooks, so that it runs after them, also where the model is one layer.
            self._handle = tracker.module.register_forward_hook(self._after_pass, with_kwargs=True, always_call=True)

    def refuse_compiled(self) -> None:
        """Raise if a compiled pass of the user shows nothing that an eager one of our own could show."""

    def _is_compiled(self, here: bool) -> bool:
        """Whether hooks of this pass would be compiled; ``here``: the caller of the module is."""
        return here or self.watched is not self.tracker.module or self._model_state.compiled()

    def _forget_if_it_raises(self) -> None:
        """The pass that begins is not recorded; one that raises (out of memory, say) is no pass of this step."""

        def after(module: nn.Module, args: tuple[Any, ...], raw: Any) -> None:
            handle.remove()
            if raw is None:
                self._passes.pop()

        handle = self.tracker.module.register_forward_hook(after, always_call=True)

    def _run_eagerly(self, x: Arguments) -> None:
        """Record an eager pass of our own before the user's compiled pass, which draws the same random numbers."""
        raw, module = None, self.tracker.module
        try:
            with library_pass(), without_saved_tensor_hooks(), untouched(module), eager(module):
                raw = module(*x.args, **x.kwargs)
        finally:
            try:
                self._after_pass(module, x.args, x.kwargs, raw)
            finally:
                set_rng_state(self.tracker.device, self._rng_state)

    def _after_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], raw: Any) -> Any:
        """The forward hook of a recorded pass, which has returned ``raw``; None if it raised."""
        if self._handle is not None and (in_library_pass() or threading.get_ident() != self._thread):
            return None  # another optimizer, or another thread, runs a pass of its own during the one that is recorded
        if self._depth:  # a pass that the model makes itself, inside of the one that is recorded
            self._depth -= 1
            return None
        of_user, recorder = self._handle is not None, self._stop()
        if raw is not None and self.tracker.model.is_sharded:  # before anything can fail in one process alone
            gather(module.modules())
        with AtStep(self.tracker), without_saved_tensor_hooks():
            return self._finish_pass(Arguments(args, kwargs), raw, recorder, of_user)
        return None

    def _finish_pass(self, x: Arguments, raw: Any, recorder: Recorder, of_user: bool) -> Any:
        """Make the tape, and ``take`` it. Returns what the user gets in place of ``raw``, or None for no change."""
        tracker = self.tracker
        try:
            if raw is None:  # the forward pass raised
                self._passes.pop()
                return None
            if not tracker.structure.by_layer and not torch.equal(self._rng_state, get_rng_state(tracker.device)):
                refuse_randomness()
            tape = recorder.tape(*tracker.model.read(raw, x))
        finally:
            recorder.forget()
        batch = Batch(tracker.model, x, rng_state=self._passes.pop()[0].rng_state)
        self._note_pass(batch, self._metric_of_pass)
        return self.take(batch, tape, raw, of_user)

    def show(self, raw: Any, of_user: bool) -> None:
        """Tell the watchers what a pass has returned."""
        model = self.tracker.model
        for watcher in self.watchers:
            if of_user:
                watcher.outputs(raw, model.returned(raw), model.leaves)
            else:
                watcher.hidden()

    def estimate(self, batch: Batch, tape: Tape, observer: Observer | None = None) -> None:
        """Estimate the metric from a recorded pass: ``_assemble`` makes the pullback, ``add`` the estimate."""
        observer = observer or self.tracker.observer
        with AtStep(self.tracker), ExitStack() as paused:
            for watcher in self.watchers:
                paused.enter_context(watcher.paused())
            paused.enter_context(self.tracker.alone())
            try:
                pb = self._assemble(batch, tape, observer)
            except OperationsNeededError:  # once for a model: its modules do not show all uses of its parameters
                pb = self.again_with_operations(batch, observer)
            self._add(pb)

    def _assemble(self, batch: Batch, tape: Tape, observer: Observer) -> Pullback:
        """The pullback of a recorded pass, all examples at once."""
        tracker = self.tracker
        fleeting, averaged = tracker.in_place, tracker.averaged
        try:
            return observer.assemble(batch, tape, fleeting=fleeting, averaged=averaged, optional=self.undecided)
        except NoRuleError as uncovered:
            tracker.leave(uncovered.reasons)
        params, blocks = tracker.model.params, tracker.observer.blocks
        modules = {module for block in blocks for module in block.owners}
        uses = tuple(use for use in tape.uses if use.module in modules)
        tape = replace(tape, uses=uses, leaves={name: tape.leaves[name] for name in params})
        model = replace(observer.model, params=params)  # a pass may have had some of the heads only
        observer = replace(observer, model=model, blocks=blocks, cache=tracker.observer.cache)
        return observer.assemble(batch, tape, fleeting=fleeting, averaged=averaged)

    @property
    def undecided(self) -> frozenset[str]:
        """The parameters that are left out if this pass shows no layer rule for them."""
        return self.tracker.undecided

    def again_with_operations(self, batch: Batch, observer: Observer) -> Pullback:
        """The pullback at a batch in another pass, whose operations are recorded. The random stream is put back."""
        tracker, recorder, rng_state = self.tracker, self._recorders[True], get_rng_state(self.tracker.device)
        recorder.start(batch.x, operations=True)
        try:
            with library_pass(), untouched(tracker.module), eager(tracker.module):
                raw = tracker.module(*batch.x.args, **batch.x.kwargs)
        finally:
            recorder.stop()
            set_rng_state(tracker.device, rng_state)
        return self._assemble(batch, recorder.tape(*observer.model.read(raw, batch.x)), observer)

    def _add(self, pb: Pullback) -> None:
        """Estimate the metric from this pullback, unless it is in the average already."""
        tracker = self.tracker
        if pb.model is not tracker.model and pb.model.heads == tracker.model.heads:
            tracker.use_model(pb.model)
        if self._observer is not tracker.observer:
            self._follow()
        self._metric_of_pass = pb.metric
        self._note_pass(pb.batch, pb.metric)
        self._note_terms(pb.y)
        if not tracker.is_counted():
            self.add(pb)
            pb.release()  # the graph belongs to the user's backward pass

    def operator(self) -> tuple[Operator, bool]:
        tracker = self.tracker
        if not tracker.is_joint and (tracker.due or tracker.fresh is not None):
            # The problem is in no variable here: an error would hold the optimizer, which its frames hold.
            tracker.world.raise_together(tracker.problem(self.missing))
        return super().operator()

    @abstractmethod
    def missing(self) -> str:
        """What the user can do where the metric is due, and no pass was estimated."""

    @contextmanager
    def suspended(self) -> Iterator[None]:
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def abandon(self) -> None:
        if self._recorder is not None:
            self._stop().forget()

    def _stop(self) -> Recorder:
        recorder, handle = self._recorder, self._handle
        assert recorder is not None
        self._recorder, self._handle, self._depth = None, None, 0
        if handle is not None:
            handle.remove()
        recorder.stop()
        return recorder

    def discard(self) -> None:
        if self._recorder is not None:
            self.abandon()
        self.tracker.discard()
        self._refreshed = False
        self._modes.clear()

    def _note_pass(self, batch: Batch, metric: OutputMetric) -> None:
        """A pass of this step, or what its estimate knows of it: the same inputs are the same pass."""
        if self._passes_of != self.tracker.step or not self._queried:
            self._passes, self._passes_of = [], self.tracker.step
        same = [at for at, (other, _) in enumerate(self._passes) if other.x is batch.x]
        if same:
            self._passes[same[0]] = batch, metric
        else:
            self._passes.append((batch, metric))

    # What is said once, in the log.

    def _note_mode(self) -> None:
        self._modes.add(self.tracker.module.training)
        if len(self._modes) == 2 and not self._warned_modes:
            self._warned_modes = True
            _log.warning(_TWO_MODES)

    def _note_terms(self, y: Tensor) -> None:
        """How many terms an example has in the first outputs y [n *out]."""
        metric = self._metric_of_pass
        if self._measured_terms or not isinstance(metric, Fisher) or metric.reduction != "sum":
            return
        self._measured_terms = True
        terms = metric.terms(y)
        if terms > 1:
            _log.info(_TERMS, terms)


@final
class BackwardSource(PassSource):
    """The cotangents of the layers in the user's own backward pass (``Empirical()``): a pass leaves hooks in its graph.

    Hooks count what they get; ``collect`` makes the estimates of it.
    """

    _estimates: Sequence[tuple[int, KroneckerInBackward]] = ()  # of this step, with their numbers of examples
    _graphs: Mapping[KroneckerInBackward, tuple[Tape, Any]] = {}  # of those that wait for the outputs' cotangents

    def take(self, batch: Batch, tape: Tape, raw: Any, of_user: bool) -> None:
        self.show(raw, of_user)
        self.estimate(batch, tape)

    @property
    def needs_operations(self) -> bool:
        """Also of the first pass, which is not run again to see them."""
        return self._observer.operations or self.tracker.average is None

    def refuse_compiled(self) -> None:
        raise IncompatibleError(COMPILED_BACKWARD)

    def again_with_operations(self, batch: Batch, observer: Observer) -> Pullback:
        raise UncoveredError(_USED_OTHERWISE) from None

    @property
    def undecided(self) -> frozenset[str]:
        return frozenset() if self._estimates else self.tracker.undecided

    def add(self, pb: Pullback) -> None:
        """Estimate the metric of this pass in the backward pass that the user is going to run."""
        tracker, n = self.tracker, pb.n
        itself = weakref.ref(tracker)  # which holds the estimate

        def weigh() -> float:
            tracker = itself()
            assert tracker is not None
            return tracker.count(n)

        kronecker = cast(Kronecker, tracker.structure)  # as ``check_source`` has seen
        estimate = kronecker.in_backward(pb, tracker.like, in_place=tracker.in_place, weigh=weigh)
        self._estimates = (*self._estimates, (n, estimate))
        if estimate.asks_outputs:
            self._wait_for_outputs(estimate, pb.tape)

    def _wait_for_outputs(self, estimate: KroneckerInBackward, tape: Tape) -> None:
        """When the user's backward pass begins, show the estimate which outputs the loss sees.

        It comes to y, or to what y divides into examples. The graph is held here, not by those whom it holds.
        """
        node: Any = tape.y.grad_fn
        number, itself = tape.y.output_nr, weakref.ref(self)
        self._graphs = {**self._graphs, estimate: (tape, node)}

        def arrived(cotangent: Tensor | None) -> None:
            source = itself()
            if source is None or estimate not in source._graphs or cotangent is None:
                return
            tape, node = source._graphs[estimate]
            source._graphs = {key: held for key, held in source._graphs.items() if key is not estimate}
            if tape.y.grad_fn is not node:
                raise NatgradError(_IN_PLACE)
            estimate.see_outputs(tape, cotangent)

        hook = in_training(tuple(self.tracker.model.leaves.values()), arrived)
        if self.tracker.model.examples is not None:
            node, number = node.next_functions[0]
        node.register_prehook(lambda cotangents: hook(cotangents[number]))

    @property
    def has_pending_pass(self) -> bool:
        return bool(self._estimates)

    def collect(self, ω: Covector, without: Names, grads: Tensors) -> None:
        """The estimates of the passes of this step that the user's backward pass came through."""
        if not self._estimates:
            return
        tracker = self.tracker
        tracker.sees_all()
        sample = tracker.gradient_sample(ω, without)
        # Before there is an average, the last pass decides what has a layer: it knows the layers of all others.
        passes = self._estimates if tracker.average is not None else self._estimates[::-1]
        arrived = [(n, estimate) for n, estimate in passes if estimate.arrived]
        for at, (n, estimate) in enumerate(arrived, 1):
            # Passes before the last one may be of a step that a GradScaler left out; the last is one of this step.
            try:
                with full_precision(tracker.device):
                    G = estimate.finish(sample, tracker.fresh)
            except NonFiniteError:
                if not tracker.absorbed or at == len(arrived):
                    raise
                continue
            if tracker.absorbed:
                tracker.average = G
                continue
            try:
                tracker.hold(G, n)
            except NonFiniteError:
                if tracker.fresh is None:
                    raise
        self._forget()

    def missing(self) -> str:
        return NO_BACKWARD

    def discard(self) -> None:
        super().discard()
        self._forget()

    def _forget(self) -> None:
        """Wait for no backward pass."""
        for _, estimate in self._estimates:
            estimate.remove()
        self._estimates, self._graphs = (), {}


@final
@dataclass(frozen=True, eq=False)
class PendingLoss:
    """A pass whose metric is estimated when the cotangents of the user's loss come to its outputs."""

    number: int
    batch: Batch
    tape: Tape
    outputs: tuple[Tensor, ...]  # one, or those of the heads
    handle: RemovableHandle | None = None  # of the hook at the only one
    heads: tuple[Tensor, ...] = ()  # what the outputs are copies of, where their cotangents come together
    node: Any = None  # of the only output: another one if the user changes it in place
    provisional: frozenset[int] = frozenset()  # outputs whose targets are those of a call that does not train

    def target(self, at: int) -> Any:
        """Of this output, so far."""
        if not self.heads:
            return self.batch.target
        return None if self.batch.target is None else self.batch.target[at]

    def with_target(self, at: int, target: Any, *, trains: bool) -> PendingLoss:
        """The pass with the target of this output; one of a call that does not train is provisional."""
        if self.heads:  # also where there is one alone
            targets = self.batch.target or (None,) * len(self.outputs)
            target = (*targets[:at], target, *targets[at + 1 :])
        provisional = self.provisional - {at} if trains else self.provisional | {at}
        return replace(self, batch=replace(self.batch, target=target), provisional=provisional)

    def forget(self) -> None:
        """Wait no more."""
        if self.handle is not None:
            self.handle.remove()


@final
class HeadCopies(torch.autograd.Function):
    """Copies of the heads, whose cotangents come together, before any backward pass below them."""

    @staticmethod
    def forward(ctx: Any, arrived: Callable[[Sequence[Tensor | None]], None], *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)  # the parameters of a head without a loss have no gradient
        return tuple(head.clone() for head in heads)  # views could not be changed in place

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.arrived(cotangents)
        return None, *cotangents


@final
class OutputSource(PassSource):
    """The root of a metric at the outputs of a pass, in the pass itself or, for most losses, when the loss was seen.

    After ``refresh`` the forward passes until the next step are ignored, so they may be in training mode. A pass that
    waits for the user's own loss holds its graph until the cotangents of the loss come to its outputs, or to the step.
    """

    _pending: Sequence[PendingLoss] = ()  # passes of this step whose loss the metric must see first
    _dropped = False  # a pass of this step waits no more: a backward pass that does not train freed its graph
    _count = 0  # of passes that waited

    def refresh(self, x: Inputs, target: Any) -> None:
        tracker = self.tracker
        check_inputs(tracker.model, x)
        tracker.metric.check_target(target)
        if target is None and tracker.metric.pending_loss:
            tracker.observer.cache.logger.log_once(logging.INFO, _ALL_TERMS)
        if not tracker.structure.by_layer:
            tracker.model.check_separable()
        for watcher in self.watchers:
            watcher.gradients({}, whole=False, due=tracker.due)
        with AtStep(tracker), tracker.alone():
            self._add(self._observed(Batch(tracker.model, x, target)))
        self._refreshed = True

    def _observed(self, batch: Batch) -> Pullback:
        """The pullback at a batch, by a pass of our own."""
        tracker = self.tracker
        try:
            return tracker.observer.of(batch, averaged=tracker.averaged, optional=tracker.undecided)
        except NoRuleError as uncovered:
            tracker.leave(uncovered.reasons)
        return tracker.observer.of(replace(batch, model=tracker.model), averaged=tracker.averaged)

    @property
    def batch_queries(self) -> BatchQueries:
        tracker = self.tracker
        if not self._passes:
            raise NatgradError(_CONSTANT if tracker.constant else NOTHING_SEEN)
        if self._observer is not tracker.observer:
            self._follow()
        unshaped = self._observer.output_metric
        if tracker.model.heads is not None and self._metric_of_pass is unshaped:
            # No pass was estimated since a state was loaded.
            with torch.no_grad():
                shapes = tracker.model.evaluated(None, self._passes[-1][0].x)[1]
            self._metric_of_pass = unshaped.shaped(shapes)
        passes = [(batch, self._metric_of_pass if metric is unshaped else metric) for batch, metric in self._passes]
        return BatchQueries(passes, tracker.world.mean_of)

    def take(self, batch: Batch, tape: Tape, raw: Any, of_user: bool) -> Any:
        defers, changed = self._defers(batch, tape, raw, of_user)
        self.show(raw if changed is None else changed, of_user)
        if not defers:
            self.estimate(batch, tape)
        return changed

    def add(self, pb: Pullback) -> None:
        self.tracker.add(pb)

    def collect(self, ω: Covector, without: Names, grads: Tensors) -> None:
        """The estimates are there since the passes, or the backward passes, of this step."""

    def missing(self) -> str:
        metric = self.tracker.metric
        if losses := metric.pending_losses:
            return NEEDS_CALL.format(", ".join(map(repr, losses)))
        if metric.needs_target:
            return NEEDS_TARGET
        return NO_COTANGENT if self._pending or self._dropped else NOTHING_SEEN

    @property
    def has_pending_pass(self) -> bool:
        return bool(self._pending)

    def discard(self) -> None:
        super().discard()
        for pending in self._pending:
            pending.forget()
        self._pending, self._dropped = (), False

    def _defers(self, batch: Batch, tape: Tape, raw: Any, of_user: bool) -> tuple[bool, Any]:
        """Wait with this pass for the cotangent of the user's loss at its outputs, if the metric asks for it.

        The cotangents of several heads come one after the other, and the graph below the first is freed before the
        last: there the user gets what the pass returned with heads whose cotangents come together, the second result.
        """
        tracker = self.tracker
        if not tracker.metric.pending_loss:
            return False, None
        outputs, everything = tracker.model.returned(raw), returned_tensors(raw)
        visible = of_user and all(y.requires_grad and any(t is y for t in everything) for y in outputs)
        loss, several = loss_in(raw, outputs), tracker.model.heads is not None
        if several:  # a loss of the model's own is made of the heads before they are copied
            visible = visible and loss is None and tracker.model.output is None
        itself = weakref.ref(self)  # the graph holds the hook, and this the graph: the hook holds neither
        number = self._count = self._count + 1

        def arrived(cotangents: Sequence[Tensor | None]) -> None:
            refuse_compiled_backward()
            source = itself()
            if source is not None:
                source.cotangents_arrived(number, cotangents)

        def untrained() -> None:
            source = itself()
            if source is not None:
                source.drop_if_freed(number)

        params = tuple(tracker.model.leaves.values())
        single = in_training(params, lambda cotangent: arrived([cotangent]), untrained)
        handle = None if several or not visible else on_cotangent(outputs[0], loss, single)
        if not visible or (handle is None and not several):
            if tracker.metric.needs_target:
                return True, None  # never estimated: ``step`` will say what is missing
            tracker.observer.cache.logger.log_once(logging.INFO, _ALL_TERMS)
            return False, None
        if several:
            copies = HeadCopies.apply(in_training(params, arrived, untrained), *outputs)  # type: ignore[no-untyped-call]
            self._pending = (*self._pending, PendingLoss(number, batch, tape, copies, heads=tuple(outputs)))
            return True, tracker.model.with_heads(raw, copies)
        pending = PendingLoss(number, batch, tape, tuple(outputs), handle, node=outputs[0].grad_fn)
        self._pending = (*self._pending, pending)
        return True, None

    @torch.enable_grad()  # a backward pass has it off, and what is computed here is read as in the forward pass
    def cotangents_arrived(self, number: int, cotangents: Sequence[Tensor | None]) -> None:
        """The user's backward pass begins at the outputs of a pass that waits: estimate the metric of this pass.

        Of several heads only those that have a cotangent are in it: tasks may take turns, and the layers of the others
        keep their average.
        """
        pending = next((each for each in self._pending if each.number == number), None)
        if pending is None or self._suspended:
            return
        self._drop(pending)
        if self._refreshed:
            return
        if not pending.heads and pending.outputs[0].grad_fn is not pending.node:
            raise NatgradError(_IN_PLACE)
        model, observer, batch, tape = self.tracker.model, self.tracker.observer, pending.batch, pending.tape
        there = [(at, c.detach()) for at, c in enumerate(cotangents) if c is not None]
        if pending.heads and len(there) < len(pending.heads):
            assert model.heads is not None
            keys = tuple(model.heads[at] for at, _ in there)
            observer = replace(observer, model=replace(model, heads=keys), metric=observer.metric.only(keys))
            y = side_by_side([pending.heads[at] for at, _ in there])
            tape = replace(tape, y=y, shapes=tuple(tape.shapes[at] for at, _ in there))
            if batch.target is not None:
                batch = replace(batch, target=tuple(batch.target[at] for at, _ in there))
        if observer.metric.lacks(batch.target):
            return
        cotangent = side_by_side([c for _, c in there]) if pending.heads else there[0][1]
        self.estimate(replace(batch, cotangent=cotangent), tape, observer)

    def drop_if_freed(self, number: int) -> None:
        """A backward pass that does not train came to the outputs of a pass that waits.

        If it frees the graph, as that of an adversarial example, none that trains can follow: keep nothing of the pass.
        """
        for pending in self._pending:
            if pending.number == number and frees(pending.node or pending.outputs[0].grad_fn):
                self._drop(pending)
                self._dropped = True

    def _drop(self, pending: PendingLoss) -> None:
        pending.forget()
        self._pending = tuple(each for each in self._pending if each is not pending)

    def loss_called(self, y: Tensor, target: Any, *, trains: bool) -> None:
        """The user's loss is called on these outputs, or on a view of them: their pass has these targets.

        The targets of a call that does not train, as for a log, are taken only if there are no others.
        """
        for at, pending in enumerate(self._pending):
            for head, mine in enumerate(pending.outputs):
                if y.numel() != mine.numel() or y.data_ptr() != mine.data_ptr():
                    continue
                settled = pending.target(head) is not None and head not in pending.provisional
                if settled and not trains:
                    continue
                if settled and differ(pending.target(head), target):
                    self._note_two_targets()
                pending = pending.with_target(head, target, trains=trains)
                self._pending = (*self._pending[:at], pending, *self._pending[at + 1 :])

    def _note_two_targets(self) -> None:
        try:
            for watcher in self.watchers:
                watcher.two_targets()
        except LossMismatchError as error:
            if self.tracker.raises_now:
                raise
            self.tracker.postpone(error)  # the targets of other processes may be equal


# The hook on the model.


@final
class ForwardHook(ModuleHook):
    """Tells a source of every call of its module."""

    def __init__(self, source: PassSource) -> None:
        self._source = weakref.ref(source)
        # ``_look`` itself is not compiled, and so sees whether its caller is.
        self._look = uncompiled(_look, recursive=False, reason=_NOT_COMPILED)
        self._tell = uncompiled(_tell)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch.export refuses functions that are not compiled: ``_look`` is not reached there.
        if not in_export():
            self._look(self, args, kwargs)


def _look(hook: ForwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    source = hook._source()
    if source is not None:
        hook._tell(source, args, kwargs, compiling())


def _tell(source: PassSource, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> None:
    source.begin(args, kwargs, compiled)


def attach(source: PassSource, owner: object) -> None:
    """Tell the source of the model's forward passes, and of calls of the loss that it waits for, until ``owner`` dies.

    The owner is the optimizer. Not until the source is freed: the traceback of an error in a pass holds it, and an
    interactive session holds its last error. The optimizer that the message of the error advises must not find the old
    one at work.
    """
    attach_hook(source.watched, ForwardHook(source), owner)
    if isinstance(source, OutputSource):
        for loss in source.tracker.metric.pending_losses:
            attach_hook(loss, LossHook(source), owner)

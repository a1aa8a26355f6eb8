"""The metric of an optimizer: when it is estimated, from which forward passes, and its moving average."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.autograd_nodes import frees
from natgrad.accelerate.devices import (
    full_precision,
    get_rng_state,
    in_backward,
    in_export,
    in_shape_inference,
    in_transform,
    refuse_compiled_backward,
    set_rng_state,
)
from natgrad.accelerate.modules import compiling, uncompiled, without_saved_tensor_hooks
from natgrad.accelerate.replay import Scalar
from natgrad.errors import IncompatibleError, LossMismatchError, NatgradError, NonFiniteError, UncoveredError
from natgrad.geometry import Covector
from natgrad.isolation import refuse_randomness, untouched
from natgrad.log import listed
from natgrad.model import (
    Arguments,
    Inputs,
    Model,
    eager,
    in_library_pass,
    is_compiled,
    library_pass,
    refuse_nested,
    returned_tensors,
    side_by_side,
)
from natgrad.optim.distributed import World, refuse_strangers
from natgrad.optim.loss_check import LossCheck, differ, in_training, loss_in, on_cotangent
from natgrad.optim.model_check import ModelCheck
from natgrad.optim.module_hooks import LossHook, ModuleHook, attach_hook
from natgrad.output.fisher import Fisher
from natgrad.output.metric import OutputMetric
from natgrad.pullbacks.chunks import check_inputs
from natgrad.pullbacks.gradient import GradientSample
from natgrad.pullbacks.pullback import Batch, NoRuleError, Observer, OperationsNeededError, Pullback
from natgrad.pullbacks.tape import Recorder, Tape
from natgrad.step.queries import BatchQueries
from natgrad.structures.base import BackwardEstimate, Operator
from natgrad.structures.identity import constant
from natgrad.structures.layered import Layered
from natgrad.structures.refresh import Refresh

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
_log = logging.getLogger("natgrad")


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
class AtStep:
    """Reports NaN and infinity inside with the number of the step.

    Not a generator: from Python 3.12 on, an error that leaves ``contextlib.contextmanager`` as another one keeps all
    frames it passed in a reference cycle, and with them the optimizer.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NonFiniteError) and "at step" not in str(error):
            raise NonFiniteError(f"at step {self._step}: {error}") from error


@final
@dataclass(frozen=True, eq=False)
class Waiting:
    """A pass whose metric is estimated when the cotangents of the user's loss come to its outputs."""

    number: int
    batch: Batch
    tape: Tape
    outputs: tuple[Tensor, ...]  # one, or those of the heads
    handle: RemovableHandle | None = None  # of the hook at the only one
    heads: tuple[Tensor, ...] = ()  # what the outputs are copies of, where they are joined
    node: Any = None  # of the only output: another one if the user changes it in place
    provisional: frozenset[int] = frozenset()  # outputs whose targets are those of a call that does not train

    def target(self, at: int) -> Any:
        """Of this output, so far."""
        if not self.heads:
            return self.batch.target
        return None if self.batch.target is None else self.batch.target[at]

    def with_target(self, at: int, target: Any, *, trains: bool) -> Waiting:
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
class JoinedHeads(torch.autograd.Function):
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


def _gradient_sample(observer: Observer, ω: Covector, without: frozenset[str]) -> GradientSample:
    return GradientSample(ω, without, observer.blocks, observer.bound, observer.cache.graphs)


@final
class MetricTracker:
    """Estimates G in a hook on the model's forward pass when it is due, and holds its moving average.

    Several forward passes between two steps (gradient accumulation) are averaged, weighted by their numbers of
    examples. After ``refresh`` the forward passes until the next step are ignored, so they may be in training mode. If
    a step is never made (``GradScaler`` skips it), its estimate is averaged with the next, at the same parameters.

    With ``BatchGradient`` no pass is looked at, and every step's gradient is one estimate. With ``Empirical()`` a pass
    leaves hooks in its graph, and the user's backward pass makes the estimate.

    Kronecker factors are averaged in place during the pass: the estimate never exists beside the average. Estimates of
    other structures, the first estimate, and those of several processes until they are joined, are held in ``fresh``
    until a step has succeeded with them: if it fails, the average stays as it was.

    A compiled pass shows nothing of its layers: there the estimate is made in an eager pass before it.
    ``wrapping``: the model as it was handed over and what it wraps, down to the plain module. ``whole``: the model with
    all parameters, also those that the optimizer steps without a metric. ``queried``: whether the step rule asks about
    the batch (``batch_queries``), so that the random state of its pass is kept. ``optional``: parameters that have no
    metric if the first pass that is estimated uses them without a layer rule; from then on they are in ``left``.
    """

    def __init__(
        self,
        observer: Observer,
        schedule: Refresh,
        *,
        generator: torch.Generator,
        wrapping: Sequence[nn.Module],
        world: World,
        whole: Model,
        loss_check: LossCheck,
        queried: bool,
        optional: frozenset[str],
    ) -> None:
        self._queried = queried
        self.schedule, self.generator = schedule, generator
        self._metric_of_pass = observer.output_metric  # with the shapes of the last pass that was estimated
        self.optional, self.declared = optional, observer  # ``declared``: before parameters are left out
        self.structure = schedule.structure
        self.world = world
        self.metric = observer.metric
        self.use_observer(observer, frozenset())
        self.average: Operator | None = constant(self.structure, self.model)
        self.constant = self.average is not None  # nothing is estimated, and no pass is looked at
        self.fresh: Operator | None = None  # the estimate of this step, where it is not in the average yet
        self.absorbed = False  # an estimate of this step is in the average
        self.weight = EmaWeight(schedule.decay)
        self._next_weight: EmaWeight | None = None  # after the gradient of this step, if it is added in a captured step
        self.step = 0
        self.estimated = 0  # the step in which the metric was last estimated
        self.pending_params: frozenset[str] = frozenset()  # trained but not in the metric: it is due until they are
        self.outside: frozenset[str] = frozenset()  # trained, but not through the outputs: an estimate has looked
        self.unreached: frozenset[str] = frozenset()  # the outputs of no estimate so far depend on them
        self._unreached: frozenset[str] | None = None  # of the estimates of this step
        # Of this step, or of the last one until there is another pass; the last pass alone if no rule asks about them.
        self.passes: list[tuple[Batch, OutputMetric]] = []
        self._passes_of = -1  # the step that they belong to
        self._examples = 0  # in ``fresh``
        self._problem: Exception | None = None  # of a pass of this step, where there are several processes
        self._agreed = False  # all processes are in a pass together, and raise together
        self._joined = False  # whether ``fresh`` is that of all processes
        self._refreshed = False  # passes until the next step are ignored
        # The state of the generator, if a state was loaded whose average has the passes of this step.
        self._counted: Tensor | None = None
        self._suspended = False
        self._in_backward: list[tuple[int, BackwardEstimate]] = []  # of this step, with their numbers of examples
        self._waiting: list[Waiting] = []  # passes of this step whose loss the metric must see first
        self._dropped = False  # a pass of this step waits no more: a backward pass that does not train freed its graph
        self._numbers = itertools.count()  # of passes that wait
        self._recorder: Recorder | None = None  # of the pass that is being recorded
        self._handle: RemovableHandle | None = None  # of the hook at its end
        self._depth = 0  # calls of the model inside of that pass
        self._thread = 0  # that it runs in; others may evaluate the model meanwhile
        self._rng_state = get_rng_state(self.model.example.device)
        self.loss_check = loss_check
        # A metric of gradients sees no forward pass.
        layers = [] if self.metric.source == "gradients" else observer.blocks
        self._check = ModelCheck(whole, self.module, layers)
        self._modes: set[bool] = set()  # of the passes of this step
        self._warned_modes = self._measured_terms = False
        # A hook on a compiled module itself runs outside of the compiled code.
        self.watched = next((module for module in wrapping if is_compiled(module)), self.module)

    @property
    def module(self) -> nn.Module:
        """The plain module, out of its wrappers."""
        module = self.model.module
        assert module is not None
        return module

    @property
    def due(self) -> bool:
        """Whether the metric is estimated for this step."""
        due = self.average is None or self.schedule.metric_due(self.step) or bool(self.pending_params)
        return due and not self.constant

    @property
    def has_estimate(self) -> bool:
        """Whether the metric has been estimated for this step."""
        return self.fresh is not None or self.absorbed

    @property
    def batch_queries(self) -> BatchQueries:
        """What a step rule may ask about the batch of this step."""
        if self.metric.source != "outputs":
            raise IncompatibleError(NO_OUTPUTS.format(repr(self.metric)))
        if not self.passes:
            raise NatgradError(_CONSTANT if self.constant else NOTHING_SEEN)
        if self.model.heads is not None and self._metric_of_pass is self.observer.output_metric:
            # No pass was estimated since a state was loaded.
            with torch.no_grad():
                shapes = self.model.evaluated(None, self.passes[-1][0].x)[1]
            self._metric_of_pass = self._metric_of_pass.shaped(shapes)
        unshaped = self.observer.output_metric
        passes = [(batch, self._metric_of_pass if metric is unshaped else metric) for batch, metric in self.passes]
        return BatchQueries(passes, self.world.mean_of)

    def _note_pass(self, batch: Batch, metric: OutputMetric) -> None:
        """A pass of this step, or what its estimate knows of it: the same inputs are the same pass."""
        if self._passes_of != self.step or not self._queried:
            self.passes, self._passes_of = [], self.step
        same = [at for at, (other, _) in enumerate(self.passes) if other.x is batch.x]
        if same:
            self.passes[same[0]] = batch, metric
        else:
            self.passes.append((batch, metric))

    def mean_over_ranks(self, loss: float) -> float:
        """The mean of the losses of all processes, as ``DistributedDataParallel`` takes it of their gradients."""
        if self.world.size == 1:
            return loss
        value = torch.tensor([loss], dtype=torch.float64, device=self.model.example.device)
        return float(self.world.mean_of([value], 1)[0])

    # The average.

    def average_with_new(self) -> tuple[Operator, bool]:
        """The average with the estimate of this step, and whether there is one; ``commit`` makes it the average."""
        # In no variable here: an error would hold the optimizer, which its frames hold.
        if self.metric.source == "gradients":  # of all processes, and the same in each
            World().agree(self._what_failed())
        elif not self._joined and (self.due or self.fresh is not None):
            self.world.agree(self._what_failed())
        if self.fresh is None:
            assert self.average is not None
            return self.average, self.absorbed
        if not self._joined:
            joined = self._mean(self.fresh, self._examples)
            # Here all processes raise; one that raised alone would leave the others waiting.
            self.fresh, self._joined = joined.finite() if self.world.size > 1 else joined, True
            self._unreached = self._unreached_anywhere()
        weight = replace(self.weight).next_step(self._examples)
        if self.average is None or (self.schedule.decay == 0 and not self.fresh.unseen):
            return self.fresh, True
        average, self.fresh = self.average.merged(self.fresh, weight), None  # memory is needed for the inverse
        return average, True

    def _what_failed(self) -> Exception | None:
        """Why there is no step with the passes since the last one."""
        if self._problem is None and self.due and not self.has_estimate:
            return NatgradError(self._what_is_missing())
        return self._problem

    def _what_is_missing(self) -> str:
        if awaited := self.metric.awaited:
            return NEEDS_CALL.format(", ".join(map(repr, awaited)))
        if self.metric.needs_target:
            return NEEDS_TARGET
        if self.metric.source == "backward":
            return NO_BACKWARD
        return NO_COTANGENT if self._waiting or self._dropped else NOTHING_SEEN

    def commit(self, operator: Operator, estimated: bool) -> None:
        """After a step that succeeded: the operator becomes the average. ``estimated``: it is new in this step."""
        unseen = self.unseen(operator)
        self.pending_params, self.outside = self.pending_params & unseen, self.outside & unseen
        if self._unreached is not None:
            self.unreached = self._never_reached
        self.average = operator
        self.weight = self._next_weight or self.weight  # a graph that is replayed does not run ``add``
        if self.absorbed:
            self.weight.end_step()
        elif estimated:
            self.weight.next_step(self._examples)
        self.estimated = self.step if estimated else self.estimated
        self.step += 1
        self.discard()

    def skip_counted(self) -> None:
        """Go on from a state whose average has the passes of this step: when they come again, they do not count.

        They could not be left out of the state: the average is changed in place. The numbers that they drew are not
        drawn again.
        """
        self.weight.examples, self.absorbed = self.weight.step_size, True
        self._counted = self.generator.get_state()

    def discard(self) -> None:
        """Forget the estimate of this step; what is in the average stays."""
        self.abandon()
        self.loss_check.forget()
        self.fresh, self._examples, self._refreshed, self._joined = None, 0, False, False
        self._counted = None
        self.absorbed, self.weight.examples, self._next_weight = False, 0, None
        self._problem, self._agreed = None, False
        self._unreached = None
        self._modes.clear()
        self._forget_backward()
        for waiting in self._waiting:
            waiting.forget()
        self._waiting.clear()
        self._dropped = False

    # Parameters that the metric knows nothing of.

    def unseen(self, G: Operator) -> frozenset[str]:
        """The parameters that the outputs did not depend on in any estimate in G."""
        never = self._never_reached
        if not never:
            return G.unseen
        return G.unseen | never.difference(*(block.names for block in G.layers))

    @property
    def _never_reached(self) -> frozenset[str]:
        """Those that the outputs of no estimate depend on; of the last one only, where there is no average."""
        if self._unreached is None:
            return self.unreached
        forgets = self.average is None or self.schedule.decay == 0
        return self._unreached if forgets else self.unreached & self._unreached

    def _unreached_anywhere(self) -> frozenset[str] | None:
        """Those that were unreached in this step in all processes, which go on alike."""
        if self.world.size == 1 or self._unreached is None:
            return self._unreached
        names, here = list(self.model.params), self._unreached
        reached = torch.tensor([float(name not in here) for name in names], device=self.model.example.device)
        shares = self.world.mean_of([reached], 1)[0].tolist()
        return frozenset(name for name, share in zip(names, shares, strict=True) if share == 0)

    # Where estimates come from.

    def report_loss(self) -> None:
        """Compare the loss that is trained with the one given: other shards may show nothing of what is wrong here."""
        try:
            self.loss_check.report()
        except LossMismatchError as error:
            if self.world.size == 1:
                raise
            self._problem = self._problem or error.with_traceback(None)  # as in ``_keep_problem``

    def finish_backward(self, ω: Covector, without: frozenset[str]) -> None:
        """The estimates of the passes of this step that the user's backward pass came through."""
        if not self._in_backward:
            return
        self.loss_check.report_scale(self.model.params, ω)
        sample = _gradient_sample(self.observer, ω, without)
        # Before there is an average, the last pass decides what has a layer: it knows the layers of all others.
        passes = self._in_backward if self.average is not None else self._in_backward[::-1]
        arrived = [(n, estimate) for n, estimate in passes if estimate.arrived]
        for at, (n, estimate) in enumerate(arrived, 1):
            try:
                with full_precision(self.model.example.device):
                    G = estimate.finish(sample, self.fresh)
            except NonFiniteError:
                if not self.absorbed or at == len(arrived):
                    raise
                continue  # of a step that a GradScaler left out: the last pass is one of this step
            if self.absorbed:
                self.average = G
            else:
                try:
                    self._hold_estimate(G, n)
                except NonFiniteError:
                    if self.fresh is None:
                        raise
                    continue  # as above
            self._examples += n
        self._forget_backward()

    def _wait_for_backward(self, pb: Pullback) -> None:
        """Estimate the metric of this pass in the backward pass that the user is going to run."""
        itself, n = weakref.ref(self), pb.n  # not the tracker, which holds the estimate

        def weigh() -> float:
            tracker = itself()
            assert tracker is not None
            weight = replace(tracker.weight).next(n)
            tracker.weight.next(n)
            tracker.absorbed = True
            return weight

        estimate = self.structure.in_backward(pb, self.average, in_place=self._absorbs(), weigh=weigh)
        self._in_backward.append((pb.n, estimate))
        self.loss_check.watch_scale(self.model.params)
        pb.release()

    @property
    def awaits_backward(self) -> bool:
        """Whether a pass of this step waits for the user's backward pass, or that has come."""
        return bool(self._in_backward or self._waiting)

    def _forget_backward(self) -> None:
        """Wait for no backward pass."""
        for _, estimate in self._in_backward:
            estimate.remove()
        self._in_backward.clear()

    @property
    def sees_gradients(self) -> bool:
        """Whether the metric is estimated from the gradient of this step."""
        return self.metric.source == "gradients" and self.due

    def see_gradient(self, ω: Covector, without: frozenset[str]) -> None:
        """Estimate g gᵀ of the gradient of this step.

        It is that of all examples, whatever the passes and processes that it was summed over: every step counts once.
        """
        alone = self.average is not None and self.structure.gradient_in_place
        sample = _gradient_sample(self.observer, ω, without)
        with full_precision(self.model.example.device):
            if alone:
                assert self.average is not None
                weight = replace(self.weight)
                self.average = self.structure.absorb_gradient(sample, self.average, weight.next(1))
                self.weight, self.absorbed = weight, True
            else:
                estimate = self.structure.of_gradient(sample, self.average)
                # The first one is checked on a GPU, too, as in ``_hold``.
                self.fresh, self._examples, self._joined = estimate.finite(wait=self.average is None), 1, True

    def gradient_average(self) -> tuple[Callable[[Covector, Scalar], None], float]:
        """A function that adds g gᵀ of a gradient to the moving average, in place, and the weight of this step.

        For a captured step: the caller calls it there with the gradient and the weight. Every parameter has a gradient.
        """
        assert self.average is not None
        observer, average, structure = self.observer, self.average, self.structure
        next_weight = replace(self.weight)
        number = next_weight.next(1)
        self._next_weight, self.absorbed = next_weight, True

        def add(ω: Covector, weight: Scalar) -> None:
            sample = _gradient_sample(observer, ω, frozenset())
            with full_precision(observer.model.example.device):
                structure.absorb_gradient(sample, average, weight)
            self.weight = next_weight  # not before: a step that fails has added nothing

        return add, number

    def refresh(self, x: Inputs, target: Any = None) -> None:
        """Estimate the metric in a forward pass of our own, unless it is constant."""
        if self.constant:
            return
        if self.metric.source != "outputs":
            raise IncompatibleError(NO_OUTPUTS.format(repr(self.metric)))
        check_inputs(self.model, x)
        self.metric.check_target(target)
        if target is None and self.metric.awaits:
            self.observer.cache.logger.log_once(logging.INFO, _ALL_TERMS)
        if not self.structure.one_pass:
            self.model.check_separable()
        with self.checked(trained=False):
            batch = Batch(self.model, x, target)
            try:
                self._add(self._observed(batch))
            except Exception as error:
                if self._raises_now:
                    raise
                self._keep_problem(error)
        self._refreshed = True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The forward passes inside are no training passes, though the user's code runs them."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def checked(self, *, trained: bool) -> AtStep:
        """The model has the parameters of the optimizer; NaN and infinity inside are reported with the step.

        ``trained``: all of them have a gradient.
        """
        self._check.check(trained=trained, estimates=self.due)
        return AtStep(self.step)

    def before_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> None:
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
        refuse_strangers(self.world)
        self.world.check()
        self._agreed = False
        if self._refreshed or self._suspended or (self.metric.needs_target and not self.metric.awaits):
            return
        due = self.due
        if in_backward() or self._check.moved(certain=due):
            return
        state = get_rng_state(self.model.example.device) if self._queried else None
        x = Arguments(args, kwargs)
        self._note_pass(Batch(self.model, x, rng_state=state), self._metric_of_pass)
        if not due:
            if self._queried and not self._is_compiled(compiled):
                self._forget_if_it_raises()
            return
        refuse_nested(x, "the inputs")
        self._note_mode()
        if not self.structure.one_pass:
            self.model.check_separable()
        eagerly = self._is_compiled(compiled)
        # The first pass that waits for a backward pass is not run again to see its operations.
        waits = self.metric.source == "backward"
        if waits and eagerly:
            raise IncompatibleError(COMPILED_BACKWARD)
        operations = self.observer.operations or (waits and self.average is None)
        self._recorder, self._thread = self._recorders[eagerly], threading.get_ident()
        self._recorder.start(x, operations=operations)
        if eagerly or not self.structure.one_pass:
            self._rng_state = get_rng_state(self.model.example.device)
        if eagerly:
            self._run_eagerly(args, kwargs)
        else:
            # Registered after the recorder's hooks, so that it runs after them, also where the model is one layer.
            self._handle = self.module.register_forward_hook(self._after_pass, with_kwargs=True, always_call=True)

    def _is_compiled(self, here: bool) -> bool:
        """Whether hooks of this pass would be compiled; ``here``: the caller of the module is."""
        return here or self.watched is not self.module or self._check.compiled()

    def _forget_if_it_raises(self) -> None:
        """The pass that begins is not recorded; one that raises (out of memory, say) is no pass of this step."""

        def after(module: nn.Module, args: tuple[Any, ...], raw: Any) -> None:
            handle.remove()
            if raw is None:
                self.passes.pop()

        handle = self.module.register_forward_hook(after, always_call=True)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record an eager pass of our own before the user's compiled pass, which draws the same random numbers."""
        raw = None
        try:
            with library_pass(), without_saved_tensor_hooks(), untouched(self.module), eager(self.module):
                raw = self.module(*args, **kwargs)
        finally:
            try:
                self._after_pass(self.module, args, kwargs, raw)
            finally:
                set_rng_state(self.model.example.device, self._rng_state)

    def _after_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], raw: Any) -> Any:
        """The forward hook of a recorded pass, which has returned ``raw``; None if it raised."""
        if self._handle is not None and (in_library_pass() or threading.get_ident() != self._thread):
            return None  # another optimizer, or another thread, runs a pass of its own during the one that is recorded
        if self._depth:  # a pass that the model makes itself, inside of the one that is recorded
            self._depth -= 1
            return None
        of_user, recorder = self._handle is not None, self._stop()
        try:
            with without_saved_tensor_hooks():
                return self._finish_pass(Arguments(args, kwargs), raw, recorder, of_user)
        except Exception as error:
            if self._raises_now:
                raise
            self._keep_problem(error)
            return None

    def _finish_pass(self, x: Arguments, raw: Any, recorder: Recorder, of_user: bool) -> Any:
        """Make the tape, and estimate the metric now, or later if it waits for the user's loss.

        Returns what the user gets in place of ``raw``, or None for no change. ``of_user``: the pass is the user's own.
        """
        try:
            if raw is None:  # the forward pass raised
                self.passes.pop()
                return None
            if not self.structure.one_pass and not torch.equal(
                self._rng_state, get_rng_state(self.model.example.device)
            ):
                refuse_randomness()
            tape = recorder.tape(*self.model.read(raw, x))
        finally:
            recorder.forget()
        batch = Batch(self.model, x, rng_state=self.passes.pop()[0].rng_state)
        self._note_pass(batch, self._metric_of_pass)
        waits, changed = self._waits(batch, tape, raw, of_user)
        if of_user:
            raw = raw if changed is None else changed
            self.loss_check.watch(raw, self.model.returned(raw), tuple(self.model.params.values()))
        else:
            self.loss_check.pass_unseen()
        if not waits:
            self._estimate(batch, tape)
        return changed

    def _estimate(self, batch: Batch, tape: Tape, observer: Observer | None = None) -> None:
        """Estimate the metric from a recorded pass: ``_assemble`` makes the pullback, ``_add`` the estimate."""
        observer = observer or self.observer
        try:
            with AtStep(self.step), self.loss_check.paused():  # the parameters have been checked before the pass
                try:
                    pb = self._assemble(batch, tape, observer)
                except OperationsNeededError:  # once for a model: its modules do not show all uses of its parameters
                    if self.metric.source == "backward":
                        raise UncoveredError(_USED_OTHERWISE) from None
                    pb = self._with_operations(batch, observer)
                self._add(pb)
        except Exception as error:
            if self._raises_now:
                raise
            self._keep_problem(error)

    @property
    def _raises_now(self) -> bool:
        """Whether an error of a pass is raised at once: there is one process, or all of them raise together."""
        return self.world.size == 1 or self._agreed

    def _keep_problem(self, error: Exception) -> None:
        """Keep an error of a pass until ``step``, where all processes raise.

        If this process raised now, the others would wait for it.
        """
        try:
            if self._chooses_basis:
                self._agreed = True
                self.world.agree(error)
            self._problem = self._problem or error.with_traceback(None)
        finally:
            del error  # as in ``World.agree``

    # Passes that wait for the user's own loss. Their graph is held until then, or until the step.

    def _waits(self, batch: Batch, tape: Tape, raw: Any, of_user: bool) -> tuple[bool, Any]:
        """Wait with this pass for the cotangent of the user's loss at its outputs, if the metric asks for it.

        The cotangents of several heads come one after the other, and the graph below the first is freed before the
        last: there the user gets what the pass returned with heads whose cotangents come together, the second result.
        """
        if not self.metric.awaits:
            return False, None
        outputs, everything = self.model.returned(raw), returned_tensors(raw)
        visible = of_user and all(y.requires_grad and any(t is y for t in everything) for y in outputs)
        loss, several = loss_in(raw, outputs), self.model.heads is not None
        if several:  # a loss of the model's own is made of the heads before they are joined
            visible = visible and loss is None and self.model.output is None
        itself = weakref.ref(self)  # the graph holds the hook, and the tracker the graph: the hook holds neither
        number = next(self._numbers)

        def arrived(cotangents: Sequence[Tensor | None]) -> None:
            refuse_compiled_backward()
            tracker = itself()
            if tracker is not None:
                tracker.cotangents_arrived(number, cotangents)

        def untrained() -> None:
            tracker = itself()
            if tracker is not None:
                tracker.drop_if_freed(number)

        params = tuple(self.model.params.values())
        single = in_training(params, lambda cotangent: arrived([cotangent]), untrained)
        handle = None if several or not visible else on_cotangent(outputs[0], loss, single)
        if not visible or (handle is None and not several):
            if self.metric.needs_target:
                return True, None  # never estimated: ``step`` will say what is missing
            self.observer.cache.logger.log_once(logging.INFO, _ALL_TERMS)
            return False, None
        if several:
            joined = JoinedHeads.apply(in_training(params, arrived, untrained), *outputs)  # type: ignore[no-untyped-call]
            self._waiting.append(Waiting(number, batch, tape, joined, heads=tuple(outputs)))
            return True, self.model.with_heads(raw, joined)
        self._waiting.append(Waiting(number, batch, tape, tuple(outputs), handle, node=outputs[0].grad_fn))
        return True, None

    @torch.enable_grad()  # a backward pass has it off, and what is computed here is read as in the forward pass
    def cotangents_arrived(self, number: int, cotangents: Sequence[Tensor | None]) -> None:
        """The user's backward pass begins at the outputs of a pass that waits: estimate the metric of this pass.

        Of several heads only those that have a cotangent are in it: tasks may take turns, and the layers of the others
        keep their average.
        """
        waiting = next((each for each in self._waiting if each.number == number), None)
        if waiting is None or self._suspended:
            return
        waiting.forget()
        self._waiting.remove(waiting)
        if self._refreshed:
            return
        if not waiting.heads and waiting.outputs[0].grad_fn is not waiting.node:
            raise NatgradError(_IN_PLACE)
        observer, batch, tape = self.observer, waiting.batch, waiting.tape
        there = [(at, c.detach()) for at, c in enumerate(cotangents) if c is not None]
        if waiting.heads and len(there) < len(waiting.heads):
            assert self.model.heads is not None
            keys = tuple(self.model.heads[at] for at, _ in there)
            observer = replace(observer, model=replace(self.model, heads=keys), metric=self.metric.only(keys))
            y = side_by_side([waiting.heads[at] for at, _ in there])
            tape = replace(tape, y=y, shapes=tuple(tape.shapes[at] for at, _ in there))
            if batch.target is not None:
                batch = replace(batch, target=tuple(batch.target[at] for at, _ in there))
        if observer.metric.lacks(batch.target):
            return
        cotangent = side_by_side([c for _, c in there]) if waiting.heads else there[0][1]
        self._estimate(replace(batch, cotangent=cotangent), tape, observer)

    def drop_if_freed(self, number: int) -> None:
        """A backward pass that does not train came to the outputs of a pass that waits.

        If it frees the graph, as that of an adversarial example, none that trains can follow: keep nothing of the pass.
        """
        for waiting in [each for each in self._waiting if each.number == number]:
            if frees(waiting.node or waiting.outputs[0].grad_fn):
                waiting.forget()
                self._waiting.remove(waiting)
                self._dropped = True

    def loss_called(self, y: Tensor, target: Any, *, trains: bool) -> None:
        """The user's loss is called on these outputs, or on a view of them: their pass has these targets.

        Those of a call that does not train, as for a log, are taken only if there are no others.
        """
        for at, waiting in enumerate(self._waiting):
            for head, mine in enumerate(waiting.outputs):
                if y.numel() != mine.numel() or y.data_ptr() != mine.data_ptr():
                    continue
                settled = waiting.target(head) is not None and head not in waiting.provisional
                if settled and not trains:
                    continue
                if settled and differ(waiting.target(head), target):
                    self._note_two_targets()
                self._waiting[at] = waiting.with_target(head, target, trains=trains)

    def _note_two_targets(self) -> None:
        try:
            self.loss_check.two_targets()
        except LossMismatchError as error:
            if self._raises_now:
                raise
            # Until ``step``, as in ``_keep_problem``: the targets of other processes may be equal.
            self._problem = self._problem or error.with_traceback(None)

    @property
    def _averaged(self) -> bool:
        """Whether estimates of earlier passes exist, which the next must be averaged with."""
        return self.average is not None or self.fresh is not None

    def _assemble(self, batch: Batch, tape: Tape, observer: Observer) -> Pullback:
        """The pullback of a recorded pass, all examples at once."""
        fleeting = self._absorbs()
        try:
            return observer.assemble(batch, tape, fleeting=fleeting, averaged=self._averaged, optional=self._undecided)
        except NoRuleError as uncovered:
            self._leave(uncovered.reasons)
        params, blocks = self.model.params, self.observer.blocks
        modules = {module for block in blocks for module in block.owners}
        uses = tuple(use for use in tape.uses if use.module in modules)
        tape = replace(tape, uses=uses, leaves=params)
        model = replace(observer.model, params=params)  # a pass may have had some of the heads only
        observer = replace(observer, model=model, blocks=blocks, cache=self.observer.cache)
        return observer.assemble(batch, tape, fleeting=fleeting, averaged=self._averaged)

    def _observed(self, batch: Batch) -> Pullback:
        """The pullback at a batch, by a pass of our own."""
        try:
            return self.observer.of(batch, averaged=self._averaged, optional=self._undecided)
        except NoRuleError as uncovered:
            self._leave(uncovered.reasons)
        return self.observer.of(replace(batch, model=self.model), averaged=self._averaged)

    @property
    def _undecided(self) -> frozenset[str]:
        """The parameters that are left out if this pass shows no layer rule for them: an average keeps its layers."""
        return frozenset() if self._averaged or self._in_backward else self.optional - self.left

    def _leave(self, reasons: Mapping[str, str]) -> None:
        """Go on without these parameters, which no layer rule covers, for these reasons."""
        names, why = frozenset(reasons), "; ".join(dict.fromkeys(reasons.values()))
        if isinstance(self.structure, Layered) and self.structure.strict:
            raise UncoveredError(_STRICT.format(listed(sorted(names)), why))
        if len(names) == len(self.model.params):
            raise UncoveredError(_NONE_LEFT.format(listed(sorted(names)), why))
        self.use_observer(self.observer.without(names), self.left | names)

    def use_observer(self, observer: Observer, left: frozenset[str]) -> None:
        """Go on with an observer of the parameters that are not ``left`` out."""
        self.observer, self.model, self.left = observer, observer.model, left
        self._metric_of_pass = observer.output_metric
        self._recorders = {
            eagerly: Recorder(observer.model, observer.blocks, of_user=not eagerly) for eagerly in (False, True)
        }

    def use_model(self, model: Model) -> None:
        """Go on with this model, of which a pass or a checkpoint tells what the examples of its outputs are."""
        self.model, self.observer = model, replace(self.observer, model=model)
        self._metric_of_pass = self.observer.output_metric

    def _with_operations(self, batch: Batch, observer: Observer) -> Pullback:
        """The pullback at a batch in another pass, whose operations are recorded. The random stream is put back."""
        recorder, rng_state = self._recorders[True], get_rng_state(self.model.example.device)
        recorder.start(batch.x, operations=True)
        try:
            with library_pass(), untouched(self.module), eager(self.module):
                raw = self.module(*batch.x.args, **batch.x.kwargs)
        finally:
            recorder.stop()
            set_rng_state(self.model.example.device, rng_state)
        return self._assemble(batch, recorder.tape(*observer.model.read(raw, batch.x)), observer)

    def abandon(self) -> None:
        """Stop recording a pass that never ended: no hook hears of a KeyboardInterrupt."""
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

    def _add(self, pb: Pullback) -> None:
        """Estimate the metric from this pullback, into the average or into ``fresh``."""
        if pb.model is not self.model and pb.model.heads == self.model.heads:
            self.use_model(pb.model)
        self._metric_of_pass = pb.metric
        self._note_pass(pb.batch, pb.metric)
        self._note_terms(pb.y)
        if self._counted is not None:  # the step rule may ask about the batch
            self.generator.set_state(self._counted)
            return
        if self.metric.source == "backward":
            self._wait_for_backward(pb)
            return
        self._unreached = pb.unreached if self._unreached is None else self._unreached & pb.unreached
        if self._absorbs():
            assert self.average is not None
            self.average = self.structure.absorb(pb, self.average, replace(self.weight).next(pb.n))
            self.weight.next(pb.n)  # not before: an estimate that is refused does not count
            self.absorbed = True
        else:
            self._hold(pb)
        self._examples += pb.n
        pb.release()  # the graph belongs to the user's backward pass

    def _absorbs(self) -> bool:
        """Whether an estimate goes into the average at once, in place. Several processes must join theirs before."""
        alone = self.fresh is None and self.world.size == 1
        return alone and self.average is not None and self.structure.in_place

    def _hold(self, pb: Pullback) -> None:
        """Estimate the metric, and average it with the other estimates of this step, in ``fresh``."""
        like = self.fresh or self.average
        estimate = self.structure.estimate(pb, like)
        if self._chooses_basis:
            # All processes need one basis, that of all examples: what they have now is the first half of it.
            self._agreed = True
            self.world.agree(None)
            common = self._mean(estimate, pb.n)
            estimate = self.structure.estimate(pb, self.world.with_new_basis(common))
            self._agreed = False
        self._hold_estimate(estimate, pb.n)

    @property
    def _chooses_basis(self) -> bool:
        """Whether the next estimate is measured in a basis that several processes must choose first."""
        return self.world.size > 1 and self.structure.has_basis and self.fresh is None and self.average is None

    def _hold_estimate(self, estimate: Operator, n: int) -> None:
        # Those of the first step are checked on a GPU, too: there is no average that they could be kept out of.
        first = self.average is None
        estimate = estimate.finite(wait=first) if self.world.size == 1 else estimate
        self.fresh = estimate if self.fresh is None else self.fresh.lerp(estimate, n / (self._examples + n))

    def _mean(self, estimate: Operator, n: int) -> Operator:
        """The mean of the estimates of all processes, which must be of the same parameters."""
        if self.world.size > 1 and self.average is None and self.optional:
            names = list(self.declared.model.params)
            flags = torch.tensor([float(name in self.left) for name in names], device=self.model.example.device)
            shares = zip(names, self.world.mean_of([flags], 1)[0].tolist(), strict=True)
            if unlike := [name for name, share in shares if 0 < share < 1]:
                raise IncompatibleError(_UNLIKE.format(", ".join(unlike)))
        return self.world.mean(estimate, n, self._restored)

    def _restored(self, tensors: Mapping[str, Tensor]) -> Operator | None:
        return self.structure.restore(self.model, self.observer.blocks, tensors)

    # What is said once, in the log.

    def _note_mode(self) -> None:
        self._modes.add(self.module.training)
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


# The hook on the model.


@final
class ForwardHook(ModuleHook):
    """Tells a tracker of every call of its module."""

    def __init__(self, tracker: MetricTracker) -> None:
        self._tracker = weakref.ref(tracker)
        # ``_look`` itself is not compiled, and so sees whether its caller is.
        self._look = uncompiled(_look, recursive=False, reason=_NOT_COMPILED)
        self._tell = uncompiled(_tell)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch.export refuses functions that are not compiled: ``_look`` is not reached there.
        if not in_export():
            self._look(self, args, kwargs)


def _look(hook: ForwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tracker = hook._tracker()
    if tracker is not None:
        hook._tell(tracker, args, kwargs, compiling())


def _tell(tracker: MetricTracker, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> None:
    tracker.before_pass(args, kwargs, compiled)


def attach(tracker: MetricTracker, owner: object) -> None:
    """Tell the tracker of the model's forward passes, and of calls of the loss that it waits for, until ``owner`` dies.

    The owner is the optimizer. Not until the tracker is freed: the traceback of an error in a pass holds it, and an
    interactive session holds its last error. The optimizer that the message of the error advises must not find the old
    one at work.
    """
    attach_hook(tracker.watched, ForwardHook(tracker), owner)
    for awaited in tracker.metric.awaited:
        attach_hook(awaited, LossHook(tracker), owner)

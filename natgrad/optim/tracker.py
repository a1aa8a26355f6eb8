"""The tracker of the metric: it is told of the model's own forward passes and averages what it estimates."""

from __future__ import annotations

import gc
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.devices import compiling, in_export
from natgrad.errors import BatchStatisticsError, DomainError, NatgradError, NonFiniteError
from natgrad.geometry import Covector, Vector
from natgrad.isolation import put_back, random_stream, refuse_chance, untouched
from natgrad.model import (
    Arguments,
    Inputs,
    eager,
    evaluating,
    is_compiled,
    is_ours,
    ours,
    tensors_of,
    without_chance,
)
from natgrad.optim.distributed import Alone, World, refuse_strangers
from natgrad.optim.frozen import Parameters
from natgrad.output.fisher import Fisher
from natgrad.output.metric import OutputMetric
from natgrad.pullback.chunks import check_inputs
from natgrad.pullback.pullback import Batch, OperationsNeededError, Pullback, View
from natgrad.pullback.tape import Recorder
from natgrad.step.geodesic import christoffel_at
from natgrad.step.self_tuned import quadratic_forms
from natgrad.structures.base import Operator
from natgrad.structures.refresh import Refresh

# How much every estimate counts in a moving average to which they come one by one.


@final
@dataclass
class EmaWeight:
    """The weights of Ḡ = Σ_t β^{T−t} Σ_j m_tj G_tj / Σ_t β^{T−t} Σ_j m_tj, estimate by estimate (002 (32)).

    G_tj is the estimate of the pass j of step t, and m_tj the number of its examples over that of the last whole step:
    the average is over examples, and older steps count less. Where all steps have as many examples it is the usual
    average, corrected for its start (ERRATA, section D).

    >>> mass = EmaWeight(decay=0.5)
    >>> mass.whole(8), mass.whole(8), mass.part(4), mass.part(4)
    (1.0, 0.6666666666666666, 0.4, 0.2857142857142857)
    """

    decay: float
    total: float = 0.0  # Σ_t β^{T−t} Σ_j m_tj
    usual: int = 0  # examples of the last whole step, in which the total is counted; 0 where that is not known
    seen: int = 0  # examples of this step, so far

    def whole(self, n: int) -> float:
        """The weight of all estimates of one step, averaged before."""
        self.total, self.usual, self.seen = self.decay * self.total + 1.0, n, 0
        return 1.0 / self.total

    def part(self, n: int) -> float:
        """The weight of an estimate from n examples, of which a step may have several."""
        if not self.seen:
            self.total *= self.decay
        self.seen += n
        self.usual = self.usual or n
        own = n / self.usual
        self.total += own
        return own / self.total

    def end(self) -> None:
        """Of the step: what comes next is newer."""
        if self.seen and self.usual:  # what was counted in steps of the old size is now in those of the new one
            self.total *= self.usual / self.seen
        self.usual, self.seen = self.seen or self.usual, 0


# Models that call themselves.


def nested(module: nn.Module) -> bool:
    """Whether the call of a module, in whose hook this is asked, is inside another call of the same module.

    Nothing else tells that from a call after one that was interrupted: of a KeyboardInterrupt no hook hears.
    """
    calls, frame = 0, sys._getframe()
    while frame.f_back is not None and calls < 2:
        frame = frame.f_back
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module
    return calls == 2


# What an optimizer says of passes: why a metric is missing and, in the log and once, what its author hardly meant.


NOTHING_SEEN = (
    "the metric is due, and no forward pass with gradients was seen since the last step: call model(x) outside "
    "torch.no_grad(), or opt.refresh(x) where the forward pass is opaque. If it was called so, either the model is "
    "called compiled, and the optimizer was made with the plain one (give torch.compile(model) to the optimizer), or "
    "its hooks were removed (make a new optimizer)"
)
NEEDS_TARGET = "the metric is due and needs the targets: call opt.refresh(x, target) before opt.step()"
_log = logging.getLogger("natgrad")
_MODES = (
    "between two steps the metric saw a forward pass in evaluation mode beside one in training mode: call the model "
    "under torch.no_grad() to evaluate it, so that the metric is that of the training passes alone"
)
_TERMS = (
    "the outputs have %d terms an example (tokens, pixels, targets): Fisher(family, reduction='sum') is the metric of "
    "a loss that is a sum over them. For a loss that is their mean give Fisher(family, reduction='mean'), or the steps "
    "are too short"
)


@final
class Notices:
    """Remembers what was said.

    >>> notices = Notices()
    >>> notices.seen(0, True)
    >>> notices.seen(1, False)  # another step: no warning
    """

    def __init__(self) -> None:
        self._modes: set[bool] = set()  # of the passes of this step
        self._step = 0
        self._warned = False
        self._measured = False

    def seen(self, step: int, training: bool) -> None:
        """A pass whose metric is going to be averaged with those of the same step."""
        if step != self._step:
            self._step, self._modes = step, set()
        self._modes.add(training)
        if len(self._modes) == 2 and not self._warned:
            self._warned = True
            _log.warning(_MODES)

    def outputs(self, metric: OutputMetric, y: Tensor) -> None:
        """Outputs y [n *out], of which the first are looked at: how many terms an example they have."""
        if self._measured or not isinstance(metric, Fisher) or metric.reduction != "sum":
            return
        self._measured = True
        terms = metric.terms(y)
        if terms > 1:
            _log.info(_TERMS, terms)


# What a step rule may ask of the batch of its step.


@final
@dataclass(frozen=True)
class BatchQueries:
    """About the model and its metric on the batch of this step, the mean over the batches of all processes."""

    batch: Batch
    metric: OutputMetric
    world: World

    def christoffel(self, v: Vector) -> Covector:
        """Γ♭(v, v) at the parameters and the batch of this step."""
        with self._separable():
            own = christoffel_at(self.batch, self.metric, v)
        return Covector(dict(zip(own, self.world.mean_of(list(own.values()), self._examples), strict=True)))

    def divergence(self, params: Mapping[str, Tensor]) -> float:
        """Mean divergence of the outputs at other parameters from the outputs now; infinite outside their domain."""
        model, x = self.batch.model, self.batch.x
        with torch.no_grad(), self._separable():
            y0, y = model(None, x), model(params, x)
            try:
                own = self.metric.divergence(y, y0, self.batch.target).mean()
            except DomainError:  # the outputs have left the family: no distribution is there, and none is near
                own = y0.new_tensor(math.inf)
            return float(self._mean(own))

    def curvature(self, vectors: Sequence[Vector], fraction: float) -> Tensor:
        """⟨v, G w⟩ [v w] with the exact metric, on a part of the batch.

        Of the function that is trained: statistics of the batch move with the parameters, and need all of the batch.
        """
        whole = any(m.training for m in self.batch.model.batch_norms.values())
        with without_chance(self._module):
            return self._mean(quadratic_forms(self.batch, self.metric, vectors, 1.0 if whole else fraction))

    def _mean(self, own: Tensor) -> Tensor:
        return self.world.mean_of([own], self._examples)[0]

    @property
    def _module(self) -> nn.Module:
        module = self.batch.model.module
        assert module is not None
        return module

    @property
    def _examples(self) -> int:
        """How many the batch of this process has."""
        sizes = [t.shape[0] for t in tensors_of(self.batch.x) if t.ndim]
        return sizes[0] if sizes else 1

    @contextmanager
    def _separable(self) -> Iterator[None]:
        """Evaluation mode where the examples would mix or dropout would draw: the metric was taken there, too."""
        try:
            self.batch.model.check_separable()
        except BatchStatisticsError:
            with evaluating(self._module):
                yield
        else:
            yield


@final
class MetricTracker:
    """Estimates G in a hook on the model's forward pass when it is due, and holds its moving average.

    Several forward passes between two steps (gradient accumulation) are averaged by their numbers of examples. After a
    ``refresh`` the forward passes until the next step are not looked at, so they may be in training mode. One that is
    never made (``GradScaler`` skips it) leaves the estimate to be averaged with the next, at the same parameters.

    Kronecker factors are averaged in place, during the pass, so that an estimate is never held beside its average. Of
    other structures an estimate is ``fresh`` until a step has succeeded with it: a step that fails leaves their average
    as it was. The first estimate is fresh, too, and those of several processes, until they have been joined.

    A compiled pass shows nothing of its layers: there the estimate is made in an eager pass before it.
    ``wrapping``: the model as it was handed over and what it wraps, the last of which is the plain module.
    """

    def __init__(
        self,
        view: View,
        structure: Refresh,
        generator: torch.Generator,
        wrapping: Sequence[nn.Module] = (),
        world: World | None = None,
    ) -> None:
        self.view, self.structure, self.generator = view, structure, generator
        self.world = Alone() if world is None else world
        self.model, self.metric = view.model, view.metric
        self.average: Operator | None = None
        self.count = 0  # steps whose estimates are in the average
        self.mass = EmaWeight(structure.decay)
        self.step = 0
        self.estimated = self.inverted = 0  # the steps in which the metric last was
        self.pending_params: frozenset[str] = (
            frozenset()
        )  # trained, and not in the metric yet: it is due until they are
        self.fresh: Operator | None = None
        self.batch: Batch | None = None  # the last one seen
        self._examples = 0
        self.absorbed = False  # an estimate of this step is in the average
        self._told = False  # by refresh, what the metric of this step is
        self._recorder: Recorder | None = None  # in the pass that is watched
        self._recorders = {eagerly: Recorder(view.model, view.blocks, of_user=not eagerly) for eagerly in (False, True)}
        self._handle: RemovableHandle | None = None
        self._inner = 0  # calls of the model inside of that pass
        self._stream = random_stream(self.model.example.device)
        self._suspended = False
        self._parameters, self._notices = Parameters(self.model, self.module, view.blocks), Notices()
        self._joint = False  # whether ``fresh`` is that of all processes
        # A hook on a compiled module itself runs outside of what is compiled.
        self.watched = next((module for module in wrapping if is_compiled(module)), self.module)

    @property
    def module(self) -> nn.Module:
        """The plain module, out of its wrappers."""
        module = self.model.module
        assert module is not None
        return module

    @property
    def due(self) -> bool:
        return self.average is None or self.step % self.structure.every == 0 or bool(self.pending_params)

    @property
    def inverse_due(self) -> bool:
        """Whether an inverse that is out of date is made anew in this step."""
        return self.step % self.structure.inverse == 0

    @property
    def renewed(self) -> bool:
        """Whether the metric has been estimated for this step."""
        return self.fresh is not None or self.absorbed

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The forward passes inside are not training passes, though the user's code runs them."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    @contextmanager
    def checked(self) -> Iterator[None]:
        """The model has the parameters of the optimizer; NaN and infinity inside are reported with the step."""
        self._parameters.check()
        with self._numbered():
            yield

    @contextmanager
    def _numbered(self) -> Iterator[None]:
        """NaN and infinity inside are reported with the number of the step."""
        try:
            yield
        except NonFiniteError as error:
            raise NonFiniteError(f"at step {self.step}: {error}") from error

    def refresh(self, x: Inputs, target: Any = None) -> None:
        """Estimate in a forward pass of our own."""
        check_inputs(self.model, x)
        self.metric.check_target(target)
        if not self.structure.one_pass:
            self.model.check_separable()
        with self.checked():
            batch = Batch(self.model, x, target)
            pb = self.view.of(batch)
            self.batch = batch
            self._add(pb)
        self._told = True

    @property
    def batch_queries(self) -> BatchQueries:
        """What a step rule may ask of the batch of this step."""
        if self.batch is None:
            raise NatgradError(NOTHING_SEEN)
        return BatchQueries(self.batch, self.metric, self.world)

    def mean_over_ranks(self, loss: float) -> float:
        """The mean of the losses of all processes, as ``DistributedDataParallel`` takes it of their gradients."""
        if self.world.size == 1:
            return loss
        own = torch.tensor([loss], dtype=torch.float64, device=self.model.example.device)
        return float(self.world.mean_of([own], 1)[0])

    def average_with_new(self) -> tuple[Operator, bool]:
        """The average with the estimate of this step, and whether there is one; ``commit`` makes it the average."""
        if self.due and not self.renewed:
            raise NatgradError(NEEDS_TARGET if self.metric.needs_target else NOTHING_SEEN)
        if self.fresh is None:
            assert self.average is not None
            return self.average, self.absorbed
        if not self._joint:
            joint = self.world.mean(self.fresh, self._examples, self._restored)
            # Here all processes raise; one that raised alone would leave the others waiting.
            self.fresh, self._joint = joint.finite() if self.world.size > 1 else joint, True
        weight = replace(self.mass).whole(self._examples)
        if self.average is None or (self.structure.decay == 0 and not self.fresh.unseen):
            return self.fresh, True
        average, self.fresh = self.average.merged(self.fresh, weight), None  # not needed while the average is inverted
        return average, True

    def _restored(self, tensors: Mapping[str, Tensor]) -> Operator | None:
        return self.structure.restore(self.model, self.view.blocks, tensors)

    def commit(self, operator: Operator, refreshed: bool) -> None:
        """A step has succeeded with this operator."""
        self.average, self.pending_params = operator, self.pending_params & operator.unseen
        self.count += refreshed
        if self.absorbed:
            self.mass.end()
        elif refreshed:
            self.mass.whole(self._examples)
        self.estimated = self.step if refreshed else self.estimated
        self.step += 1
        self.discard()

    def discard(self) -> None:
        """Forget the fresh estimate; what has been absorbed stays."""
        self.fresh, self._examples, self._told, self._joint = None, 0, False, False
        self.absorbed, self.mass.seen = False, 0

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> None:
        """A forward pass begins, ``compiled`` or not.

        A metric with targets sees only the batches of ``refresh``, which have them. A pass inside a backward pass is
        the recomputation of one that was seen (activation checkpointing).
        """
        if self._recorder is not None and not is_ours():
            if nested(self.module):
                self._inner += 1
                return
            self._end().forget()  # a pass that was interrupted
        if is_ours() or not torch.is_grad_enabled():
            return
        refuse_strangers(self.world)
        if self._told or self._suspended or self.metric.needs_target:
            return
        if torch._C._current_graph_task_id() != -1 or self._parameters.moved(certain=self.due):
            return
        self.batch = Batch(self.model, Arguments(args, kwargs))
        if not self.due:
            return
        self._notices.seen(self.step, self.module.training)
        if not self.structure.one_pass:
            self.model.check_separable()
        eagerly = compiled or self.watched is not self.module or self._parameters.compiled()
        self._recorder = self._recorders[eagerly]
        self._recorder.start(Arguments(args, kwargs), operations=self.view.operations)
        if eagerly or not self.structure.one_pass:
            self._stream = random_stream(self.model.example.device)
        if eagerly:
            self._run(args, kwargs)
        else:
            # Registered after the recorder's hooks, so that it runs after them, also where the model is one layer.
            self._handle = self.module.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The pass that begins, run eagerly and ahead of it. What it draws is drawn again by the pass itself."""
        raw = None
        try:
            with ours(), untouched(self.module), eager(self.module):
                raw = self.module(*args, **kwargs)
        finally:
            try:
                self._after(self.module, args, kwargs, raw)
            finally:
                put_back(self.model.example.device, self._stream)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], raw: Any) -> None:
        if self._handle is not None and is_ours():
            return  # a pass that another optimizer makes, inside the one that is watched
        if self._inner:  # one that the model makes itself, and a part of it
            self._inner -= 1
            return
        recorder = self._end()
        try:
            if raw is None:  # always_call: the forward pass raised
                return
            if not self.structure.one_pass and not torch.equal(self._stream, random_stream(self.model.example.device)):
                refuse_chance()
            tape = recorder.tape(self.model.outputs(raw))
        finally:
            recorder.forget()
        with self._numbered():  # the parameters have been checked before the pass
            batch = Batch(self.model, Arguments(args, kwargs))
            try:
                pb = self.view.assemble(batch, tape, [(0, tape.y.shape[0])], fleeting=self._absorbs())
            except OperationsNeededError:  # once for a model: its modules do not tell all
                pb = self._again(batch)
            self._add(pb)

    def _again(self, batch: Batch) -> Pullback:
        """The pullback at a batch, in another pass, whose operations are recorded; the random stream is put back."""
        recorder, stream = self._recorders[True], random_stream(self.model.example.device)
        recorder.start(batch.x, operations=True)
        try:
            with torch.enable_grad(), ours(), untouched(self.module), eager(self.module):
                raw = self.module(*batch.x.args, **batch.x.kwargs)
        finally:
            recorder.stop()
            put_back(self.model.example.device, stream)
        tape = recorder.tape(self.model.outputs(raw))
        return self.view.assemble(batch, tape, [(0, tape.y.shape[0])], fleeting=self._absorbs())

    def _end(self) -> Recorder:
        """The pass is not watched any longer."""
        recorder, handle = self._recorder, self._handle
        assert recorder is not None
        self._recorder, self._handle, self._inner = None, None, 0
        if handle is not None:
            handle.remove()
        recorder.stop()
        return recorder

    def _add(self, pb: Pullback) -> None:
        self._notices.outputs(self.metric, pb.y)
        if self._absorbs():
            assert self.average is not None
            self.average = self.structure.absorb(pb, self.average, replace(self.mass).part(pb.n))
            self.mass.part(pb.n)  # not before: an estimate that is refused does not count
            self.absorbed = True
        else:
            self._hold(pb)
        self._examples += pb.n
        pb.passes.tapes.clear()  # the graph belongs to the user's backward pass

    def _absorbs(self) -> bool:
        """Whether estimates go into the average at once: several processes must join theirs before."""
        alone = self.fresh is None and self.world.size == 1
        return alone and self.average is not None and self.structure.absorbs(self.average)

    def _hold(self, pb: Pullback) -> None:
        """Average with the other estimates of this step."""
        like = self.fresh or self.average
        estimate = self.structure.estimate_like(pb, like)
        if like is None and self.world.size > 1 and type(estimate).renewed is not Operator.renewed:
            # All processes need one basis, that of all examples: what they have now is the first half of it.
            common = self.world.mean(estimate, pb.n, self._restored)
            estimate = self.structure.estimate_like(pb, self.world.renewed(common))
        # The first one is looked at on a GPU, too: there is no average yet that it could be kept out of (``merged``).
        estimate = estimate.finite(wait=like is None) if self.world.size == 1 else estimate
        self.fresh = estimate if self.fresh is None else self.fresh.lerp(estimate, pb.n / (self._examples + pb.n))


# The hook on the model's forward pass. It is imported where an optimizer is made: torch's compiler loads slowly.


_WHY = (
    "an optimizer of natgrad looks at the inputs of this call. With fullgraph=True compile the model by "
    "torch.compile(model) and give the compiled model to the optimizer"
)


@final
class Watch:
    """Tells a tracker of every call. It does not keep the tracker alive, and copies of the model are not watched."""

    def __init__(self, tracker: MetricTracker | None = None) -> None:
        self._tracker = None if tracker is None else weakref.ref(tracker)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # No training pass, and torch.export refuses what is not compiled: it is not reached there.
        if not in_export():
            self._look(args, kwargs)

    # The call itself is not compiled, and so sees whether its caller is.
    @torch.compiler.disable(recursive=False, reason=_WHY)  # type: ignore[untyped-decorator]
    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tracker = None if self._tracker is None else self._tracker()
        if tracker is not None:
            _tell(tracker, args, kwargs, compiling())

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tell(tracker: MetricTracker, args: tuple[Any, ...], kwargs: dict[str, Any], inside: bool) -> None:
    tracker.before(args, kwargs, inside)


# An optimizer watches its model for as long as it is held, and not until Python next looks for cycles.


def load_compiler() -> None:
    """Load torch's compiler, as any optimizer of torch does when it is made, and leave nothing of that behind.

    While it is loaded, ``torch.fx.wrap`` takes its own frame into a variable. That cycle, which is torch's own, holds
    all frames that were active with their variables: the optimizer that is being made, and the user's own function, in
    which it is. So the garbage of the import is collected at once, one time in a process.
    """
    if "torch._dynamo" not in sys.modules:
        import_module("torch._dynamo")
        gc.collect()


def watch(tracker: MetricTracker, owner: object) -> None:
    """Tell the tracker of the model's forward passes until its owner, the optimizer, is let go.

    Not until the tracker is: the traceback of an error in a pass holds it, and an interactive session holds its last
    error. The optimizer that the message of the error advises must not find the old one at work.
    """
    from natgrad.optim.tracker import Watch

    handle = tracker.watched.register_forward_pre_hook(Watch(tracker), with_kwargs=True)
    weakref.finalize(owner, handle.remove)


# The loss where a step would land.


@final
class Trial:
    """The closure's loss where parameters land, or, for None, as it was computed here. Nothing stays changed.

    The closure draws the same random numbers again (dropout has the same masks), from the ``stream`` as it was before
    the first time; buffers, such as running statistics, do not see where the step was only tried.
    """

    def __init__(self, tracker: MetricTracker, closure: Callable[[], Any], value: Any, stream: Tensor) -> None:
        self._tracker, self._closure, self._value, self._stream = tracker, closure, value, stream

    def __call__(self, landing: Mapping[str, Tensor] | None) -> float:
        if landing is None:
            return self._tracker.mean_over_ranks(_number(self._value))
        params, device = self._tracker.model.params, self._tracker.model.example.device
        saved = {name: (p.detach().clone(), p.grad) for name, p in params.items()}
        now = random_stream(device)
        try:
            for name, p in params.items():
                p.copy_(landing[name])
                p.grad = None
            put_back(device, self._stream)
            with torch.enable_grad(), self._tracker.suspended(), untouched(self._tracker.module):
                return self._tracker.mean_over_ranks(_number(self._closure()))
        finally:
            put_back(device, now)
            for name, p in params.items():
                p.copy_(saved[name][0])
                p.grad = saved[name][1]


def _number(loss: Any) -> float:
    if loss is None:
        raise TypeError("the closure must return the loss")
    return float(loss.detach() if isinstance(loss, Tensor) else loss)

"""The keeper of the metric: it is told of the model's own forward passes and averages what it estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from natgrad.errors import NatgradError, NonFiniteError
from natgrad.model import Arguments, Inputs, is_ours, ours
from natgrad.operators.base import Operator
from natgrad.optim.distributed import Alone, World, refuse_strangers
from natgrad.optim.mass import Mass
from natgrad.optim.nested import nested
from natgrad.optim.notices import NEEDS_TARGET, NOTHING_SEEN, Notices
from natgrad.optim.parameters import Parameters
from natgrad.optim.questions import Questions
from natgrad.pullback import Pullback
from natgrad.pullback.assemble import View
from natgrad.pullback.batch import Batch
from natgrad.pullback.parts import check_inputs
from natgrad.pullback.tape import Recorder
from natgrad.structures import Refresh
from natgrad.untouched import put_back, random_stream, refuse_chance, untouched
from natgrad.wrapped import eager, is_compiled


@final
class Keeper:
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
        self.mass = Mass(structure.decay)
        self.step = 0
        self.estimated = self.inverted = 0  # the steps in which the metric last was
        self.wanted: frozenset[str] = frozenset()  # trained, and not in the metric yet: it is due until they are
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
        return self.average is None or self.step % self.structure.every == 0 or bool(self.wanted)

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
    def located(self) -> Iterator[None]:
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
        with self.located():
            batch = Batch(self.model, x, target)
            pb = self.view.of(batch)
            self.batch = batch
            self._add(pb)
        self._told = True

    @property
    def asked(self) -> Questions:
        """What a step rule may ask of the batch of this step."""
        if self.batch is None:
            raise NatgradError(NOTHING_SEEN)
        return Questions(self.batch, self.metric, self.world)

    def agreed(self, loss: float) -> float:
        """The mean of the losses of all processes, as ``DistributedDataParallel`` takes it of their gradients."""
        if self.world.size == 1:
            return loss
        own = torch.tensor([loss], dtype=torch.float64, device=self.model.example.device)
        return float(self.world.mean_of([own], 1)[0])

    def candidate(self) -> tuple[Operator, bool]:
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
        self.average, self.wanted = operator, self.wanted & operator.unseen
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
            self._end().uses = []  # a pass that was interrupted
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
        self._recorder.start()
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
            recorder.uses = []  # they hold the graph
        with self._numbered():  # the parameters have been checked before the pass
            batch = Batch(self.model, Arguments(args, kwargs))
            self._add(self.view.assemble(batch, tape, [(0, tape.y.shape[0])], fleeting=self._absorbs()))

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

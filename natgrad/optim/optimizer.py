"""The natural gradient as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.accelerate import fused
from natgrad.accelerate.devices import get_rng_state, is_asynchronous, set_rng_state
from natgrad.accelerate.fused import Flag
from natgrad.accelerate.modules import load_compiler, uncompiled
from natgrad.accelerate.replay import GraphCache
from natgrad.errors import IncompatibleError, LossMismatchError, NonFiniteError
from natgrad.geometry import Covector, Vector, refuse_sparse
from natgrad.isolation import untouched
from natgrad.linalg import Damping, Relative, number_of
from natgrad.log import flat, nbytes, of_groups
from natgrad.model import Inputs, Model, check_slots, check_types, unwrapped
from natgrad.optim import metrics as told
from natgrad.optim.checkpoint import RunState, blank, check_torch, gather_state, reading, restore
from natgrad.optim.distributed import processes_of, refuse_flat_shards
from natgrad.optim.estimates import (
    BackwardSource,
    GradientSource,
    MetricTracker,
    OutputSource,
    PassSource,
    Source,
    attach,
)
from natgrad.optim.parameters import ParameterStatus, ParameterTable, without_metric
from natgrad.optim.preconditioner import Preconditioner
from natgrad.optim.report import Diagnostics, Plan, diagnostics, plan, share_of
from natgrad.optim.update import (
    AdamWUpdate,
    Members,
    MomentumOn,
    ParamUpdate,
    PlainStep,
    Rate,
    begin_moments,
    check_momentum_on,
    check_numbers,
    common_damping,
    complete,
    corrected_weight,
    displacement,
    like,
    plain_step,
    refuse_two_momenta,
)
from natgrad.output.losses import NO_LOSS, Criterion, metric_of
from natgrad.output.metric import OutputMetric
from natgrad.pullbacks.pullback import Observer, layers_of, memory_bound
from natgrad.rules.base import Rule
from natgrad.sharding import divided_as, gradient_of, local
from natgrad.solve.cg import CGInverse
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.step.base import Fixed, KLClip, Loss, PlainRule, Step, StepContext, StepRule
from natgrad.step.normalised import Normalised
from natgrad.step.polar import Polar
from natgrad.structures.base import Operator, Refresh, Structure
from natgrad.structures.dense import Dense
from natgrad.structures.diagonal import Diagonal
from natgrad.structures.kronecker import check_source
from natgrad.structures.layered import Layered
from natgrad.watch.base import Watcher
from natgrad.watch.loss import LossWatch, ScaleWatch, has_loss
from natgrad.watch.model import ModelState, ModelWatch

_log = logging.getLogger("natgrad")
_DENSE, _CHOLESKY, _FIXED = Dense(), Cholesky(), Fixed()
_EAGER = "a step of natgrad is not compiled. With fullgraph=True compile the model alone, and call opt.step() outside"
Owning: TypeAlias = Literal["one", "all"] | float | None
Fallback: TypeAlias = Structure | Literal["adamw"] | None

_DIVIDED = frozenset(("momentum", "exp_avg", "exp_avg_sq"))  # in a state, as the parameters are
_OUTSIDE = "the gradients of {} of {} parameters do not come through the outputs that the metric is on: {}"
_LEFT = 'do not move: give them a group with "fallback": "adamw" and a learning rate'


@final
class NaturalGradient(torch.optim.Optimizer):
    """Natural-gradient steps with any metric, structure, solver and step rule.

    The training loop stays as it is. Call the model under ``torch.no_grad()`` to evaluate it. ``KFAC``, ``EKFAC`` and
    others are presets of this optimizer.

    Args:
        model: The module to train; compiled and DDP-wrapped ones as they are.
        metric: The loss you train, or a metric on the outputs. Metrics that depend on the targets (``Empirical(loss)``)
            need ``opt.refresh(x, target)`` before the step. ``Empirical()`` is estimated in your own backward pass.
            ``BatchGradient()`` has no hook: G is the average of ∇L ∇Lᵀ over the steps.
        structure: How the metric is held: ``Dense()``, ``Kronecker()``, …; in ``Refresh(structure, every, decay)`` it
            is estimated now and then, and averaged.
        solver: How the metric is inverted: ``Cholesky()``, ``Pinv()`` for singular ones, ``CG()``, or ``Factored()``
            for Kronecker factors.
        step: The step rule: ``Fixed()``, ``TrustRegion(radius)``, ``LevenbergMarquardt()``, … Rules that evaluate the
            loss again need ``opt.step(closure)``: ``opt.needs_closure`` says so.
        lr: Learning rate.
        damping: λ ≥ 0, added to the metric, the same in all groups. With ``Relative(ε)`` λ is ε times the mean
            eigenvalue, factor by factor.
        momentum: μ, how much of the last step is added to this one; 0 for none.
        momentum_on: "steps" averages steps; "gradients" averages gradients, and applies the current metric to the
            average. Use "gradients" if the gradient is noisy: a sum of steps that were computed with different metrics
            is a descent direction of none of them.
        nesterov: With momentum on gradients: Nesterov's step; False is the momentum of Adam, corrected for its start.
        weight_decay: Decoupled weight decay: θ ← (1 − lr·wd)θ in every step.
        groups: Parameter groups as in torch.optim; parameters that no group names form the first one. Every number in a
            group may change between steps. ``"fallback": "adamw"`` or ``None`` chooses for all parameters of a group.
        fallback: "adamw" has AdamW step gains, biases, embeddings and what has no layer rule. A structure keeps
            parameters without a layer rule in it.
        rules: Layer rules for your own modules; they take precedence over those of the library.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        examples: "inputs" if the model flattens its outputs over positions, [n·t *out], and the examples are the n rows
            of its first input.
        generator: Random numbers of sampled metrics; by default the optimizer has its own, so that the global random
            state is not used.
        memory: The largest number of bytes that the metric may occupy; None is half of those of the device.
        owners: How many of several processes keep the metric of a layer: "one", "all", or the share of them, such as
            1/4. By default one where the parameters are divided (``fully_shard``), and all with
            ``DistributedDataParallel``, so that one process alone may write a checkpoint.
        strict: Make an error of warnings: parameters without a layer rule, and a loss other than the one given.

    Method:
        θ ← θ − lr·(G + λ)⁻¹∇L (Amari 1998). In the steps in which the metric is estimated, a hook on the model's
        forward pass estimates it from that pass.

        ``momentum_on="steps"``: m ← μm + v, θ ← θ − lr·m.

        ``momentum_on="gradients"``: m ← μm + (1 − μ)ω, v = (μm + (1 − μ)ω)♯, θ ← θ − lr·v (Nesterov 1983); with
        ``nesterov=False``, v = (m/(1 − μᵗ))♯ in step t (Kingma and Ba 2015), where t counts all steps, and the first
        gradient of a parameter counts in full.

        A parameter whose ``.grad`` is None does not move in that step; the steps of the others are those with a zero
        gradient there.

        When a step raises an error, parameters and momentum are unchanged. Kronecker factors and their inverses are
        updated in place: those of some layers may have changed, and the inverses are then computed again in the next
        step. A step that the step rule rejects (``opt.last.accepted`` is False) changes no parameter and resets the
        momentum.

        With ``fallback="adamw"`` AdamW has the learning rate and the weight decay of the group. The metric covers the
        other parameters, among them a head that is not tied to an embedding.

        With ``BatchGradient()`` or ``Polar``, AdamW also steps parameters with three axes outside of ``nn.Conv1d``,
        which may be stacks of matrices (experts). ``opt.last`` and rules that evaluate the loss cover the parameters of
        the metric only.

        Parameters that the loss reaches, but not through the outputs (another head, outside of ``output``), have no
        metric: with ``fallback="adamw"`` AdamW steps them, otherwise they do not move. A warning names them.

        If the metric is given as a loss, the first step compares the gradient at the outputs with that of this loss,
        and a warning reports another loss. ``opt.watchers`` lists what looks for such mistakes (``natgrad.watch``);
        ``opt.watchers.clear()`` takes them away.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model, x, t = nn.Linear(4, 3), torch.randn(32, 4), torch.randint(3, (32,))
        >>> opt = ng.NaturalGradient(model, ng.Fisher(ng.Categorical()), lr=0.5, damping=1e-2)
        >>> for _ in range(3):
        ...     opt.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(x), t)
        ...     loss.backward()
        ...     opt.step()
    """

    def __init__(
        self,
        model: nn.Module,
        metric: OutputMetric | Criterion = NO_LOSS,
        *,
        structure: Structure | Refresh = _DENSE,
        solver: Solver = _CHOLESKY,
        step: StepRule = _FIXED,
        lr: float = 1.0,
        damping: Damping = 1e-2,
        momentum: float = 0.0,
        momentum_on: MomentumOn = "steps",
        nesterov: bool = True,
        weight_decay: float = 0.0,
        groups: Iterable[dict[str, Any]] = (),
        fallback: Fallback = None,
        rules: Sequence[Rule] = (),
        output: Callable[[Any], Tensor] | None = None,
        examples: Literal["inputs"] | None = None,
        generator: torch.Generator | None = None,
        memory: int | None = None,
        owners: Owning = None,
        strict: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"NaturalGradient takes the model, an nn.Module, not {type(model).__name__}: give the model itself, "
                "and parameter groups as groups=[…]"
            )
        check_types(
            groups=(groups, Iterable, 'a list of dicts, [{"params": layer.parameters(), "lr": 0.1}]'),
            output=(output, (Callable, type(None)), "a function of what the model returns"),
            generator=(generator, (torch.Generator, type(None)), "a torch.Generator"),
            memory=(memory, (Real, type(None)), "a number of bytes"),
            strict=(strict, bool, "True or False"),
            nesterov=(nesterov, bool, "True or False"),
        )
        refuse_flat_shards(model)
        load_compiler()
        self._take_uncompiled = uncompiled(_take, reason=_EAGER)
        metric = metric_of(metric)
        of_gradients = metric.source == "gradients"
        whole = Model.of(model, output=output, examples=examples, heads=metric.heads, mixed=of_gradients)
        wrapping = unwrapped(model)
        numbers = {"lr": lr, "damping": number_of(damping), "momentum": momentum, "weight_decay": weight_decay}
        names = {id(p): name for name, p in whole.params.items()}
        given, by_adamw, backups = without_metric(
            whole,
            complete(whole.params.values(), groups, names, pairs=False),
            fallback == "adamw",
            of_gradients=of_gradients,
            polar=isinstance(step, Polar),
        )
        super().__init__(given, numbers)
        wrapped = replace(whole, params={name: p for name, p in whole.params.items() if name not in by_adamw})
        common_damping(self.param_groups)
        check_momentum_on(momentum_on)
        check_slots(solver=(solver, Solver), step=(step, StepRule))
        schedule = _with_fallback(structure if isinstance(structure, Refresh) else Refresh(structure), fallback)
        step.admit(wrapped.params)
        refuse_two_momenta(step, self.param_groups)
        if step.adapts_damping and isinstance(damping, Relative):
            raise IncompatibleError(
                f"{type(step).__name__} does not work with damping={damping!r}: it adapts the number λ of G + λ·1. "
                "Give damping a number, or take another step rule"
            )
        device = wrapped.example.device
        share = _share(owners, wrapped, schedule, step, metric)
        world = processes_of(wrapping, wrapped.params, _cause_of_drift(metric, schedule, step), share)
        if world.owners is not None:  # of what this process keeps
            memory = memory_bound(memory, device) * world.owners.teams
        generator = generator or _generator(device, world.rank)
        wrapped = replace(wrapped, constant_statistics=schedule.structure.by_layer)
        blocks = layers_of(wrapped, rules)
        if of_gradients:
            if rules:
                raise ValueError(f"{metric!r} needs no layer rules, and reads none: leave out rules=")
            blocks = schedule.structure.gradient_blocks(blocks)
        else:
            check_source(schedule.structure, metric.source)
        observer = Observer(wrapped, metric, blocks, generator, memory, deferred=is_asynchronous(device), rules=rules)
        self.rule: StepRule = step
        self.nesterov: bool = nesterov
        self.momentum_on = momentum_on
        queried = not isinstance(step, PlainRule)
        ruled = not of_gradients and schedule.structure.uncovered() is not None  # rules matter
        self.parameters: ParameterTable = ParameterTable(whole.params, by_adamw=by_adamw, backups=backups, ruled=ruled)
        self.tracker: MetricTracker = MetricTracker(
            observer, schedule, generator=generator, world=world, parameters=self.parameters
        )
        # A metric of gradients sees no forward pass.
        state = ModelState(whole, self.tracker.module, [] if of_gradients else blocks)
        self.watchers: list[Watcher] = [ModelWatch(state)]
        scale_free, silent = isinstance(step, Normalised | Polar), world.rank > 0
        if has_loss(metric):
            self.watchers.append(LossWatch(metric, scale_free=scale_free, strict=strict, silent=silent))
        if metric.source == "backward" and not scale_free:
            self.watchers.append(ScaleWatch(strict=strict, silent=silent))
        self.source: Source = GradientSource(self.tracker, self.watchers)
        if not of_gradients:
            kind = BackwardSource if metric.source == "backward" else OutputSource
            self.source = kind(self.tracker, self.watchers, model_state=state, wrapping=wrapping, queried=queried)
        self.preconditioner: Preconditioner = Preconditioner(
            solver,
            schedule,
            damping=damping,
            device=device,
            world=world,
            power_share=step.power_share,
        )
        self.flag: Flag = Flag()
        # Gradients that are too many to copy lie in few places: those of passes with and without an estimate.
        self._graphs: GraphCache[tuple[PlainStep, Tensor | None]] = GraphCache(capacity=4)
        self._params, self._is_sharded = whole.params, whole.is_sharded
        self._of_groups: Members = [[(names[id(p)], p) for p in group["params"]] for group in self.param_groups]
        self._divided: tuple[frozenset[str] | None, Members, Members] = (None, (), ())  # see ``_division``
        self._strict = strict
        self._zeros: dict[str, Tensor] = {}  # gradients of parameters that the metric does not see
        self._last: Step | _PlainReport | None = None
        self._loss: Any = None  # of the closure
        self._taken = self._rejected = 0  # steps of this process
        # How many of them a rule has shortened.
        self._clipped: Tensor | int = torch.zeros((), device=device) if is_asynchronous(device) else 0
        self._logged: set[tuple[str, str]] = set()  # messages, with the parameter that they are about
        if isinstance(self.source, PassSource) and not self.tracker.constant:
            attach(self.source, self)
        if self.rule.needs_closure:
            _log.info("%s evaluates the loss again: call opt.step(closure)", type(self.rule).__name__)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim while the optimizer is constructed. Later the set of parameters is fixed."""
        if hasattr(self, "tracker"):
            raise ValueError("the metric is over the parameters that were trainable at first: make a new optimizer")
        check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer is not copied: copy the model, make a new optimizer for it, and load_state_dict")

    def __repr__(self) -> str:
        first, rest = super().__repr__().split("\n", 1)
        closure = ", which evaluates the loss again: opt.step(closure)" if self.needs_closure else ""
        tracker, solver = self.tracker, self.preconditioner.solver
        parts = [f"solver: {solver!r}", f"step: {self.rule!r}{closure}"]
        if isinstance(self.preconditioner.damping, Relative):
            parts.append("damping: relative to the mean eigenvalue of every factor")
        parts.append(f"momentum: on {self._momentum}")
        if count := sum(map(len, self._division[1])):
            parts.append(f"fallback: AdamW for {count} of {len(self._params)} parameters")
        slots = [f"metric: {tracker.metric!r}", f"structure: {tracker.schedule!r}", "; ".join(parts)]
        return "\n".join([first, *slots, rest])

    @property
    def needs_closure(self) -> bool:
        """Whether ``step`` must be given a closure that zeroes the gradients, computes the loss and calls backward."""
        return self.rule.needs_closure

    def refresh(self, x: Inputs, target: Any = None) -> None:
        """Estimate the metric now, in a forward pass of its own (opaque models, metrics that need targets).

        The forward passes until the next step are then ignored; those that came before it in this step count, too. So a
        model with batch normalisation or dropout can train in training mode with its metric in evaluation mode:

        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.1)), torch.randn(32, 4)
        >>> opt = ng.NaturalGradient(model, ng.Euclidean())
        >>> with ng.evaluating(model):
        ...     opt.refresh(x)
        >>> model(x).square().mean().backward()
        >>> opt.step()
        """
        if not self.tracker.constant:
            self.source.refresh(x, target)

    def plan(self, *, world: int | None = None) -> Plan:
        """What becomes of every parameter, and the memory for it: ``print(opt.plan())`` before training.

        ``world``: a number of processes, of which each layer is to have an owner: what the busiest keeps, computes and
        sends, also of a model on the meta device.
        """
        tracker, damping = self.tracker, self.preconditioner.damping
        result = plan(tracker, self.preconditioner.solver, self.rule, self.param_groups, damping, self._momentum)
        if world is not None:
            result = replace(
                result, share=share_of(result.rows, world, result.element, tracker.model.example.element_size())
            )
        names = [name for pairs in self._division[1] for name, _ in pairs]
        return replace(result, notes=(*result.notes, f"AdamW steps {', '.join(names)}")) if names else result

    def diagnostics(self) -> Diagnostics:
        """Conditions, damping, staleness and the last step, layer by layer; it waits for the device.

        Where layers have owners each process tells of those that it keeps, and all of them call this together.
        """
        return diagnostics(self.tracker, self.preconditioner, self.last)

    def metrics(self, *, layers: bool = False) -> dict[str, Tensor]:
        """Numbers for a logger, tensors [] by name; nothing waits for the device (``ng.log_to`` does not either).

        What the host knows is in its memory: ``natgrad/step``, the number of steps; the numbers of the parameter groups
        (``natgrad/lr``, of further groups ``natgrad/lr/1``, …); ``params_metric``, ``params_adamw`` and
        ``params_still``, by what steps them; ``state_bytes``; ``rejected_steps``; and of the metric ``metric_age`` and
        ``inverse_age`` (0: it is of the last step), ``metric_updates``, ``inverse_updates`` and ``failed_inversions``.
        Counts are those of this process.

        Of the last step: ``loss`` of the closure; ``step_rms`` = √mean(δ²), without weight decay and what AdamW steps;
        ``step_length`` = √⟨lr·ω, lr·v⟩ and ``predicted_decrease`` = ⟨lr·ω, v⟩ − ½⟨lr·ω, lr·v⟩ of the natural gradient
        v = (G + λ)⁻¹ω before momentum, which is what the quadratic model promises for one learning rate;
        ``clip_scale``, by which a rule shortens v, and ``clipped_share``, in how many steps; ``lr_effective`` and
        ``momentum_effective``, those of ``SelfTuned`` among them; ``reduction_ratio``. A number that the step rule does
        not compute in this step is left out.

        ``layers=True`` adds the numbers of ``diagnostics()`` for every layer, ``natgrad/layer/0.weight/cond_S`` and
        the like: these take eigenvalues, and wait for the device.
        """
        last, params = self._last, self.tracker.model.params
        state = (t for of_param in self.state.values() for t in of_param.values())
        numbers = of_groups(self.param_groups) | told.of_parameters(self.parameters, self._params)
        numbers |= told.of_metric(self.tracker, self.preconditioner)
        numbers |= {"step": self.tracker.step, "rejected_steps": self._rejected, "loss": self._loss}
        kept = (self.tracker.average, self.preconditioner.inverse)
        numbers["state_bytes"] = nbytes([*state, *(t for of in kept if of for t in of.tensors().values())])
        if isinstance(last, _PlainReport):
            rates, found = self._update(last.idle, last.rates).rates, last.found
            v = {name: self.state[params[name]].get("momentum") for names, _ in rates for name in names}
            v |= found.velocities
            lengths = [(fused.norms([v[name] for name in names]), lr) for names, lr in rates]
            numbers["step_rms"] = told.step_rms(lengths, sum(v[name].numel() for names, _ in rates for name in names))
            numbers |= told.of_natural_step(found.pairings, rates, found.scale)
            if found.scale is not None:
                numbers |= {"clip_scale": found.scale, "clipped_share": self._clipped / self._taken}
            numbers["lr_effective"] = numbers["lr"] if found.scale is None else numbers["lr"] * found.scale
            numbers["momentum_effective"] = numbers["momentum"]
        elif last is not None:
            δ = last.displacement
            numbers["step_rms"] = told.step_rms(
                [(fused.norms(list(δ.values())), 1.0)], sum(map(torch.numel, δ.values()))
            )
            numbers |= {"reduction_ratio": last.ratio, **last.numbers}
        if layers and last is not None:
            numbers |= self.diagnostics().numbers()
        return flat(numbers)

    @property
    def last(self) -> Step | None:
        """The last step. Its displacement is computed when it is read."""
        if not isinstance(self._last, _PlainReport):
            return self._last
        params, velocity = self.tracker.model.params, dict(self._last.found.velocities)
        parts = {name: local(p) for name, p in params.items()} if self._is_sharded else params
        rates = self._update(self._last.idle, self._last.rates).rates
        for names, _ in rates:
            velocity |= {name: self.state[params[name]]["momentum"] for name in names if name not in velocity}
        return Step(displacement(rates, velocity, parts), self._last.damping)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim. A forward pass that was interrupted (KeyboardInterrupt) is forgotten."""
        self.source.abandon()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns the loss of the closure, detached, if there is one."""
        # Not always: where the step is called eagerly, a compiled model in the closure stays compiled.
        return self._take_uncompiled(self, closure) if torch.compiler.is_compiling() else self._take(closure)

    def _take(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None and not self.tracker.step and self._prepared():
            return None
        if closure is not None and not callable(closure):
            raise TypeError(
                f"opt.step takes a closure, a function that computes the loss and its gradient, not a "
                f"{type(closure).__name__}: call loss.backward() and opt.step()"
            )
        if self.rule.needs_closure and closure is None:
            raise TypeError(f"{type(self.rule).__name__} evaluates the loss again: call opt.step(closure)")
        self.tracker.world.check()
        self.preconditioner.handle_async_failure(self.tracker.average)
        self.flag.raise_pending()
        loss, loss_at = None, None
        try:
            if closure is not None:
                rng_state = get_rng_state(self.tracker.device)
                with torch.enable_grad():
                    loss = closure()
                loss_at = _loss_at(self.source, self._params, closure, loss, rng_state)
            grads = self._gradients()
            self._step(grads, loss_at)
        except BaseException as error:
            self.preconditioner.outdated |= self.tracker.absorbed  # a step that failed has changed the average
            self._discard()
            if isinstance(error, NonFiniteError) and "at step" not in str(error):
                raise NonFiniteError(f"at step {self.tracker.step}: {error}") from error
            raise
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss
        return self._loss

    def _step(self, grads: Mapping[str, Tensor], loss_at: Loss | None) -> None:
        """ω from the gradients, G from the tracker, the step rule with the inverse of G, then ``commit`` of G."""
        try:
            due, whole = self.tracker.due, len(grads) == len(self._params)
            for watcher in self.watchers:
                watcher.gradients(grads, whole=whole, due=due)
        except LossMismatchError as error:  # other shards may show nothing of what is wrong here
            if self.tracker.raises_now:
                raise
            self.tracker.postpone(error)
        if self.tracker.step == 0:
            for of_param in self.state.values():
                of_param.pop("momentum", None)  # zeros, to load into
            self._mark()
        ω, without_grad = self._differential(grads)
        damping = like(self.preconditioner.damping, common_damping(self.param_groups))
        self.source.collect(ω, without_grad, grads)
        G, estimated = self.source.operator()
        idle = without_grad
        if blind := (self.tracker.unseen(G) if estimated else self.parameters.unseen) - without_grad:
            idle = without_grad | blind
            self._put_aside(ω, blind, estimated)
            ω = self._metered(ω, blind)
        owners = self.tracker.world.owners
        unseen = G.unseen if owners is None else owners.all_layers.unseen
        with self.preconditioner.attempt(G, damping, self.tracker.step, changed=estimated, unseen=unseen) as G:
            if isinstance(self.rule, PlainRule):
                self._last = self._plain_step(self.rule, ω, grads, idle, damping)
            else:
                self._last = self._general_step(self.rule, ω, grads, idle, G, damping, loss_at)
        self._taken += 1
        self.flag.send("the step", self.tracker.step)
        self.tracker.commit(G, estimated)
        self._discard()

    def _discard(self) -> None:
        """The step is over: wait for nothing that belongs to it."""
        self.source.discard()
        for watcher in self.watchers:
            watcher.step_ended()

    def _plain_step(
        self,
        rule: PlainRule,
        ω: Covector,
        grads: Mapping[str, Tensor],
        idle: frozenset[str],
        damping: Damping,
    ) -> _PlainReport:
        """Solve, scale, add momentum and move, in place; on a GPU from a CUDA graph if the same step comes again.

        ``grads``: also of the parameters that AdamW steps. ``idle``: parameters that the metric does not move in this
        step.
        """
        flag, adamw = self.flag, self._adamw() if self.parameters.adamw else None
        inverse = self.preconditioner.prepare(damping)
        of_adamw, complete = ({}, True) if adamw is None else adamw.gradients(grads)
        of_metric = dict(ω.items())
        names, count, groups = [*of_metric, *of_adamw], len(of_metric), len(self.param_groups)

        def run(gradients: Sequence[Tensor], numbers: Sequence[Rate]) -> tuple[PlainStep, Tensor | None]:
            rates, weights = numbers[:groups], numbers[groups : groups + len(of_momenta)]
            update = self._update(idle, rates, weights)
            named = list(zip(names, gradients, strict=True))
            of_step, others = Covector(dict(named[:count])), dict(named[count:])
            found = plain_step(of_step, update, inverse=self.preconditioner, rule=rule, flag=flag, beside=others)
            if found.scale is not None:
                self._clipped += found.scale < 1  # a tensor keeps its place
            if adamw is not None:
                adamw.step(others, rates, flag.value)
            return found, flag.value

        gradients, rates = [*of_metric.values(), *of_adamw.values()], [group["lr"] for group in self.param_groups]
        of_momenta = self._momentum_weights()
        changing = (
            self.tracker.world.owners is not None
            or bool(idle - self.parameters.outside)
            or not complete
            or isinstance(inverse, CGInverse)
        )
        if changing or not is_asynchronous(self.tracker.device):
            found, _ = run(gradients, [*rates, *of_momenta])
        else:
            numbers, key = [*(float(rate) for rate in rates), *of_momenta], self._graph_key()
            found, flag.value = self._graphs.run(run, gradients, numbers, key, may_copy=True, shaped=True)
        rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        return _PlainReport(rates, idle, found, number_of(damping))

    def _update(
        self,
        without_grad: frozenset[str],
        rates: Sequence[Rate] | None = None,
        weights: Sequence[Rate] | None = None,
    ) -> ParamUpdate:
        members, state = self._here(self._division[0])
        return ParamUpdate(
            self.param_groups,
            members,
            state,
            momentum_on=self.momentum_on,
            without_grad=without_grad,
            rates=rates,
            weights=weights,
        )

    def _momentum_weights(self) -> list[float]:
        """The weight of this step's gradient in the momentum of every group, if that is corrected for its start."""
        if self.nesterov or self.momentum_on == "steps":
            return []
        return [corrected_weight(float(group["momentum"]), self.tracker.step + 1) for group in self.param_groups]

    @property
    def _momentum(self) -> str:
        """What the momentum is on, in words."""
        return (
            self.momentum_on if self.nesterov or self.momentum_on == "steps" else "gradients, without Nesterov's step"
        )

    def _adamw(self) -> AdamWUpdate:
        return AdamWUpdate(self.param_groups, *self._here(self._division[1]))

    def _here(self, members: Members) -> tuple[Members, MutableMapping[Tensor, Any]]:
        """What this process has of parameters, with their states, in which it keeps as much."""
        if not self._is_sharded:
            return members, self.state
        parts = [[(name, p, local(p).detach()) for name, p in pairs] for pairs in members]
        states = {part: self.state[p] for triples in parts for _, p, part in triples}
        return [[(name, part) for name, _, part in triples] for triples in parts], states

    @property
    def _division(self) -> tuple[Members, Members]:
        """By group, the parameters of the metric, and those that AdamW steps; one outside of the outputs is in both."""
        adamw, members, of_adamw = self._divided
        if adamw is not self.parameters.adamw:
            adamw, without = self.parameters.adamw, self.parameters.without_metric
            members = [[pair for pair in pairs if pair[0] not in without] for pairs in self._of_groups]
            of_adamw = [[pair for pair in pairs if pair[0] in adamw] for pairs in self._of_groups]
            self._divided = adamw, members, of_adamw
        return members, of_adamw

    def _graph_key(self) -> Hashable:
        """The key of a captured step: all that it depends on, except for gradients and learning rates."""
        # Not state[p]: torch hashes a tensor in Python, and this is asked in every step.
        states = [t for of_param in self.state.values() for t in of_param.values() if isinstance(t, Tensor)]
        addresses = *map(Tensor.data_ptr, self._params.values()), *map(Tensor.data_ptr, states)
        options = tuple([(group["momentum"], group["weight_decay"]) for group in self.param_groups])
        # A method is equal to another one of the same object: a rule itself may have no hash.
        return self.rule.take, self.preconditioner.version, options, addresses, self.parameters.outside

    def _general_step(
        self,
        rule: StepRule,
        ω: Covector,
        grads: Mapping[str, Tensor],
        idle: frozenset[str],
        G: Operator,
        damping: Damping,
        loss_at: Loss | None,
    ) -> Step:
        """Any rule: a displacement is formed, checked and applied."""
        tracker, inverse = self.tracker, self.preconditioner
        params = {name: p.detach() for name, p in tracker.model.params.items()}
        update = self._update(idle, weights=self._momentum_weights())
        remembered: Vector | Covector | None = None
        self.flag.check(ω, "the gradient")  # a rule may make a finite step of one that is not: sign(NaN) = 0
        adamw = self._adamw()
        of_adamw, _ = adamw.gradients(grads)
        if of_adamw:
            self.flag.check(of_adamw, "the gradient")

        def smooth(ω: Covector) -> Covector:
            nonlocal remembered
            smoothed = update.smoothed(ω)
            remembered = update.momentum_input(ω, smoothed) if self.momentum_on == "gradients" else remembered
            return smoothed

        def move(v: Vector) -> Vector:
            nonlocal remembered
            update.add_momentum(v)
            remembered = v if self.momentum_on == "steps" else remembered
            return displacement(update.rates, v, params)

        context = StepContext(
            step=tracker.step,
            params=params,
            differential=ω,
            operator=G,
            damping=number_of(damping),
            rates=update.rates,
            decay=lambda: update.decayed(params),
            smooth=smooth,
            sharp=lambda ω, λ: update.zero_idle(inverse.sharp_at(ω, like(damping, λ))),
            move=move,
            velocity=lambda: update.velocity(tracker.model.params),
            acceleration=lambda δ: -update.zero_idle(inverse.sharp_cold(self.source.batch_queries.christoffel(δ))),
            queries=lambda: self.source.batch_queries,
            loss_at=loss_at,
            zero_idle=update.zero_idle,
        )
        refuse_two_momenta(rule, self.param_groups)  # a group may have changed
        step = rule.take(context)
        if not isinstance(step, Step):
            raise TypeError(f"{type(rule).__name__}.take must return a Step, got {type(step).__name__}")
        if step.velocity is not None and self.momentum_on == "gradients":
            raise ValueError(
                f'{type(rule).__name__} decides the velocity itself, and momentum_on="gradients" keeps none: '
                'use momentum_on="steps"'
            )
        if idle:  # a constraint may have moved them
            landing = {name: t for name, t in step.landing.items() if name not in idle}
            step = replace(step, displacement=update.zero_idle(step.displacement), landing=landing)
        self.flag.check(step.displacement, "the step")
        update.apply(step, remembered, self.flag)
        self._rejected += not step.accepted
        if step.accepted:
            adamw.step(of_adamw, [group["lr"] for group in self.param_groups], self.flag.value)
        for group in self.param_groups:
            group["damping"] = step.damping
        return step

    def _gradients(self) -> dict[str, Tensor]:
        """The gradients of the parameters that have one, by name."""
        grads = {name: grad for name, p in self._params.items() if (grad := p.grad) is not None}
        refuse_sparse(grads)
        return {name: gradient_of(self._params[name]) for name in grads} if self._is_sharded else grads

    def _differential(self, grads: Mapping[str, Tensor]) -> tuple[Covector, frozenset[str]]:
        """ω, with zeros for parameters without a gradient, and the names of these parameters."""
        params = self.tracker.model.params
        without: list[str] = []
        if len(grads) < len(self._params):
            if not grads:
                raise ValueError("no parameter has a gradient: call loss.backward() before opt.step()")
            without = [name for name in params if name not in grads]
            self._log_once(without, "no gradient. A parameter is left alone in a step in which it has none")
            grads = {**grads, **{name: torch.zeros_like(local(params[name])) for name in without}}
        return Covector({name: grads[name] for name in params}), frozenset(without)

    def _put_aside(self, ω: Covector, names: frozenset[str], estimated: bool) -> None:
        """``names``: parameters with a gradient that are in no estimate. G is 0 there, and their step would be ω/λ.

        If the metric was estimated in this step, the loss reaches them, but not through the outputs: AdamW steps them
        if it is their fallback, otherwise they do not move. If it was not, a pass has used them for the first time:
        they do not move until the metric has been estimated with them.
        """
        table = self.parameters
        if estimated and self.tracker.metric.source != "gradients":
            table.put(ParameterStatus.OUTSIDE, names)
            self._name_outside(ω, [name for name in ω if name in names])
        news = names - table.outside
        table.put(ParameterStatus.PENDING, news)
        self._log_once(
            sorted(news),
            "a gradient, but no forward pass that the metric was estimated from has used them. They are left alone, "
            "and the metric is estimated in every step, until one has",
        )

    def _name_outside(self, ω: Covector, names: Sequence[str]) -> None:
        """Warn once of parameters that the loss reaches, but not through the outputs. Zero gradients do not count."""
        new = [name for name in names if (name, _OUTSIDE) not in self._logged]
        if not new or not (named := [name for name in new if bool(ω[name].any())]):
            return
        self._logged.update((name, _OUTSIDE) for name in named)
        taken = [name for name in named if name in self.parameters.backups]
        left = [name for name in named if name not in self.parameters.backups]
        ends = [f"AdamW steps {', '.join(taken)}"] if taken else []
        ends += [f"{', '.join(left)} {_LEFT}"] if left else []
        message = _OUTSIDE.format(len(named), len(self._params), "; ".join(ends))
        if self._strict:
            raise LossMismatchError(message)
        _log.warning(message)

    def _metered(self, ω: Covector, blind: frozenset[str]) -> Covector:
        """ω, with zeros for parameters that have a gradient and are not moved by the metric (``blind``).

        The zeros are cached: a captured step must find them at the same address.
        """
        for name in blind:
            if name not in self._zeros:
                self._zeros[name] = torch.zeros_like(ω[name])
        return Covector({name: self._zeros[name] if name in blind else g for name, g in ω.items()})

    def _log_once(self, names: Sequence[str], what: str) -> None:
        if news := [name for name in names if (name, what) not in self._logged]:
            self._logged.update((name, what) for name in news)
            _log.info("%s: %s", ", ".join(news), what)

    def state_dict(self) -> dict[str, Any]:
        """The state of torch.optim, in which every parameter has its part of the metric under "natgrad".

        All of it is tensors where ``torch.optim`` keeps its own, so that ``torch.distributed.checkpoint`` and all that
        builds on it save and load it. Before the first step there is a place for what will be there after it, but for
        matrices that the first pass leaves to AdamW (``fallback="adamw"``): make one step, then load.
        """
        state, device = super().state_dict(), self.tracker.model.example.device
        # A snapshot: torch hands out its own dictionaries, in which the next step would put its momentum.
        plain = _copied(state["state"])
        run = RunState.of(self.tracker, self.preconditioner, self._momentum)
        places = blank(self.tracker, self.preconditioner)
        if (owners := self.tracker.world.owners) is not None:
            run = replace(run, operator=owners.collected(run.operator), inverse=owners.collected(run.inverse))
            places = {which: owners.divided(tensors) for which, tensors in places.items()}
        keys = [key for group in state["param_groups"] for key in group["params"]]
        names = {id(p): name for name, p in self._params.items()}
        ordered = [names[id(p)] for group in self.param_groups for p in group["params"]]
        states = {name: plain.setdefault(key, {}) for name, key in zip(ordered, keys, strict=True)}
        began = states if self.tracker.step else {name: {} for name in states}
        mine = run.by_parameter(places, began, device)
        self._fill(states)
        for name, of_param in states.items() if self._is_sharded else ():
            of_param |= {what: divided_as(self._params[name], t) for what, t in of_param.items() if what in _DIVIDED}
        for name, of_param in mine.items():
            states[name]["natgrad"] = of_param
        state["state"] = plain
        return state

    def _fill(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Put zeros where the first step would put momentum, into the states of parameters without momentum."""
        of_metric, of_adamw = self._division
        for group, members in zip(self.param_groups, of_metric, strict=True):
            for name, p in members:
                if group["momentum"] and "momentum" not in states[name]:
                    states[name]["momentum"] = torch.zeros_like(p, requires_grad=False)
        for name, p in (pair for members in of_adamw for pair in members):
            begin_moments(states[name], p)

    def _prepared(self) -> bool:
        """Whether this call of ``step`` is that of ``torch.distributed.checkpoint``; if so, fill the state with zeros.

        Before it loads a state, it calls ``step`` once with zero gradients and zero learning rates, so that the
        optimizer creates the tensors to load into. There was no forward pass, and there is nothing to estimate.
        """
        began = self.state or self.tracker.has_estimate or self.source.has_pending_pass
        if began or any(float(group["lr"]) for group in self.param_groups):
            return False
        grads = [p.grad for p in self._params.values() if p.grad is not None]
        if len(grads) < len(self._params) or any(bool(local(grad).any()) for grad in grads):
            return False
        states: dict[str, dict[str, Any]] = {name: {"natgrad": {}} for name in self._params}
        self._fill(states)
        here = {
            name: {what: local(t) if isinstance(t, Tensor) else t for what, t in of.items()}
            for name, of in states.items()
        }
        self.state.update({p: here[name] for name, p in self._params.items()})
        return True

    def _mark(self) -> None:
        """Create the keys of the state: ``torch.distributed.checkpoint`` loads a flat state by existing keys only."""
        for p in self._params.values():
            self.state[p].setdefault("natgrad", {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume exactly: the next steps are, bit for bit, those of the run that was saved.

        A state that does not fit is refused with the difference, before anything is changed. If it was saved with
        another solver, the metric is loaded, and the next step inverts it anew.
        """
        with reading():
            state_dict = gather_state(state_dict)
            go_on = restore(state_dict["natgrad"], self.tracker, self.preconditioner, self._momentum)
            check_torch(state_dict, self.param_groups, {id(p): name for name, p in self._params.items()})
        plain = {key: value for key, value in state_dict.items() if key != "natgrad"}
        # Copies: torch would go on in the tensors of the dictionary, which could then be loaded once only.
        super().load_state_dict(plain | {"state": _copied(plain["state"])})
        for p in self.state:
            for what in _DIVIDED & self.state[p].keys() if self._is_sharded else ():
                self.state[p][what] = local(divided_as(p, self.state[p][what])).clone()
            if "step" in self.state[p]:  # torch leaves it where it was saved
                self.state[p]["step"] = self.state[p]["step"].to(p.device, torch.float32)
        self.source.discard()  # passes before belong to no step
        go_on()
        self._mark()
        self._last = None
        self._graphs.clear()


@final
@dataclass(frozen=True)
class _PlainReport:
    """The report of a plain step, from which ``last`` computes the displacement.

    Groups with momentum on steps have no velocities in ``found``: theirs are the momenta in the state.
    """

    rates: Sequence[Rate]  # of every group
    idle: frozenset[str]  # parameters that did not move by the metric
    found: PlainStep
    damping: float


def _share(owners: Owning, model: Model, schedule: Refresh, step: StepRule, metric: OutputMetric) -> float | None:
    """Of the processes, the part that keeps a layer, by the argument ``owners``; None for all of them."""
    if owners not in (None, "one", "all") and (not isinstance(owners, float) or not 0 < owners <= 1):
        raise ValueError(
            f'owners= is "one", "all", the share of the processes that keep a layer, or None, got {owners!r}'
        )
    if owners == "all" and model.is_sharded:
        raise IncompatibleError(
            'owners="all" keeps the whole metric in every process, and the parameters are divided: use "one", or less'
        )
    if owners in (None, "all") and not model.is_sharded:
        return None
    structure, why = schedule.structure, None
    if metric.source == "gradients" or not isinstance(structure, Layered) or structure.power == 0:
        why = f"{structure!r} is not estimated layer by layer from passes: use KFAC, EKFAC or SobolevKFAC"
        why += ", and for gradients alone ng.Natural, ng.Muon, ng.Shampoo or ng.SOAP" if model.is_sharded else ""
    elif model.is_sharded and metric.source == "backward":
        why = f"{metric!r} reads layers in the user's own backward pass: give it the loss, Empirical(loss)"
    elif not isinstance(step, Fixed | KLClip):
        why = f"{type(step).__name__} asks for the whole metric or for whole parameters: use KLClip() or Fixed()"
    if why is None:
        return 0.0 if owners in (None, "one") else float(owners)
    what = "the parameters are divided over processes" if model.is_sharded else f"owners={owners!r}"
    raise IncompatibleError(f"{what}, so that every layer has an owner, and {why}")


def _with_fallback(schedule: Refresh, fallback: Fallback) -> Refresh:
    """The schedule, with the ``fallback`` of the optimizer for the parameters without a layer rule if it is one."""
    if fallback is None or fallback == "adamw":
        return schedule
    if isinstance(fallback, type) and issubclass(fallback, Structure):
        check_slots(fallback=(fallback, Structure))
    if not isinstance(fallback, Structure):
        raise ValueError(
            'fallback= is "adamw", the structure of parameters without a layer rule, such as Diagonal(), or '
            f"None, got {fallback!r}"
        )
    inner = schedule.structure
    if not isinstance(inner, Layered):
        raise IncompatibleError(
            f"fallback={fallback!r} is for parameters without a layer rule, and {inner!r} is one structure for all "
            'parameters: use Kronecker or EigenKronecker, or fallback="adamw"'
        )
    if inner.fallback not in (Diagonal(), fallback):
        raise ValueError(f"fallback={fallback!r}, and {inner!r} has another one: leave one of them out")
    return replace(schedule, structure=replace(inner, fallback=fallback))


def _loss_at(
    source: Source, params: Mapping[str, Tensor], closure: Callable[[], Any], value: Any, rng_state: Tensor
) -> Loss:
    """The closure's loss at other parameters, or, for None, the ``value`` that it had here. Nothing stays changed.

    ``params``: of the model, also those that have no metric, which stay where they are.

    The closure draws the same random numbers again (dropout has the same masks), from the random state before its
    first call. Buffers, such as running statistics, do not see the parameters that were only tried.
    """

    tracker = source.tracker

    def loss_at(landing: Mapping[str, Tensor] | None) -> float:
        if landing is None:
            return tracker.mean_over_ranks(_number(value))
        device = tracker.device
        saved = {name: (p.detach().clone(), p.grad) for name, p in params.items()}
        now = get_rng_state(device)
        try:
            for name, p in params.items():
                p.copy_(landing.get(name, p))
                p.grad = None
            set_rng_state(device, rng_state)
            with torch.enable_grad(), source.suspended(), untouched(tracker.module):
                return tracker.mean_over_ranks(_number(closure()))
        finally:
            set_rng_state(device, now)
            for name, p in params.items():
                p.copy_(saved[name][0])
                p.grad = saved[name][1]

    return loss_at


def _take(optimizer: NaturalGradient, closure: Callable[[], Any] | None) -> Any:
    return optimizer._take(closure)


def _number(loss: Any) -> float:
    if loss is None:
        raise TypeError("the closure must return the loss")
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


def _copied(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The state of every parameter in torch.optim, with copies of its tensors."""
    items = ((key, value.items()) for key, value in state.items())
    return {key: {what: t.clone() if isinstance(t, Tensor) else t for what, t in pairs} for key, pairs in items}


def _cause_of_drift(metric: OutputMetric, schedule: Refresh, step: StepRule) -> str | None:
    """What decides the steps of one process, and is another in every process that trains the same model.

    None if gradients decide alone: they may have been averaged.
    """
    if metric.source != "gradients" and schedule.structure.power != 0:
        return "a metric of its own batch"
    if step.needs_closure:
        return "the loss of its own batch"
    return None


def _generator(device: torch.device, rank: int) -> torch.Generator:
    """For sampled metrics: every process draws its own targets."""
    return torch.Generator(device=device).manual_seed((torch.initial_seed() + rank) % 2**63)

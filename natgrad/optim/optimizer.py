"""The natural gradient as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.flags import Flag
from natgrad.geometry import Covector
from natgrad.isolation import random_stream
from natgrad.model import Inputs, Model, check_slots, unwrapped
from natgrad.optim.checkpoint import Solved, check_plain, export, restore
from natgrad.optim.distributed import world_of
from natgrad.optim.graphed import Graphed
from natgrad.optim.preconditioner import Solves, hear
from natgrad.optim.report import Diagnostics, Plan, diagnostics, plan
from natgrad.optim.tracker import MetricTracker, Trial, load_compiler, watch
from natgrad.optim.update import Moves, check_numbers, common_damping, complete
from natgrad.output.metric import OutputMetric
from natgrad.pullback.pullback import MEMORY, View, layers_of
from natgrad.rules.base import Rule
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.step.base import Look, Proposal, Step, StepRule
from natgrad.step.rules import Fixed
from natgrad.structures.base import Inverse, Structure
from natgrad.structures.dense import Dense
from natgrad.structures.refresh import Refresh

_log = logging.getLogger("natgrad")
_DENSE, _CHOLESKY, _FIXED = Dense(), Cholesky(), Fixed()


@final
class NaturalGradient(torch.optim.Optimizer):
    """θ ← θ − lr·(G + λ)⁻¹∇L: one choice for each of metric, structure, solver and step rule (004 (17), 002 (4)).

    Drop-in: the loop stays as it is. When the metric is due (every step, or as ``Refresh(structure, every, decay)``
    says), a hook on the model's forward pass estimates it from that pass; call the model under ``torch.no_grad()`` to
    evaluate. Metrics made from the loss need ``opt.refresh(x, target)`` before the step.

    Momentum is kept in the space of vectors, m ← μm + v, θ ← θ − lr·m; weight decay is decoupled,
    θ ← (1 − lr·wd)θ. Every number in a parameter group may be changed between steps; λ must be the same in all.
    A parameter whose ``.grad`` is None is left alone in that step; for the others, its gradient is zero.
    When a step raises, parameters and momentum are as they were. Kronecker factors and their inverses, which are made
    in the memory of the last ones, may be newer, of some layers only; the inverses are then due again. A step that its
    rule refuses (``opt.last.accepted``) changes no parameter, and starts the momentum anew: along a velocity that
    ascends, every later step would be refused too. A rule that needs the loss again (``LevenbergMarquardt``) is told by
    ``opt.needs_closure``, by ``repr(opt)`` and by a message of the logger "natgrad" at construction: then
    ``opt.step(closure)``.

    ``groups`` are parameter groups as in torch.optim; parameters that no group names form the first one. ``rules``:
    layer rules for modules of your own. ``output`` takes what the model returns to its output tensor. With
    ``examples="inputs"`` outputs that the model flattens over positions, [n·t *out], belong to the n examples that its
    first input has on its first axis. ``generator`` is for sampled metrics; by default the optimizer has its own, so
    the random stream of the user does not move. ``memory`` bounds, in bytes, what the structure may occupy.

    >>> import natgrad as ng
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
        metric: OutputMetric,
        *,
        structure: Structure = _DENSE,
        solver: Solver = _CHOLESKY,
        step: StepRule = _FIXED,
        lr: float = 1.0,
        damping: float = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        groups: Iterable[dict[str, Any]] = (),
        rules: Sequence[Rule] = (),
        output: Callable[[Any], Tensor] | None = None,
        examples: Literal["inputs"] | None = None,
        generator: torch.Generator | None = None,
        memory: int = MEMORY,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"NaturalGradient takes the model, an nn.Module, not {type(model).__name__}")
        load_compiler()
        wrapped, wrapping = Model.of(model, output=output, examples=examples), unwrapped(model)
        world = world_of(wrapping)
        defaults = {"lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(complete(wrapped, groups), defaults)
        common_damping(self.param_groups)
        self.solver, self.rule = solver, step
        check_slots(
            metric=(metric, OutputMetric),
            structure=(structure, Structure),
            solver=(self.solver, Solver),
            step=(self.rule, StepRule),
        )
        generator = generator or _generator(wrapped.example.device, world.rank)
        refresh = structure if isinstance(structure, Refresh) else Refresh(structure)
        blocks = layers_of(wrapped, rules)
        on_gpu = wrapped.example.device.type == "cuda"
        view = View(wrapped, metric, blocks, generator, memory, deferred=on_gpu)
        self.tracker = MetricTracker(view, refresh, generator, wrapping, world)
        self.solver = world.divided(self.solver)
        self.inverse: Inverse | None = None
        self.inverse_damping = damping
        self.outdated = False  # the metric has been estimated since it was inverted
        self.inverted_before: int | None = None  # the step of the inverse before this one, if there was one
        self.warned = False  # of a factorisation that failed
        self.last: Step | None = None
        self.moves, self._graphed = Moves(self, Flag()), Graphed(self)
        self._stream = torch.empty(0)  # the random stream before the closure was called
        watch(self.tracker, self)
        if self.rule.needs_closure:
            _log.info("%s evaluates the loss again: call opt.step(closure)", type(self.rule).__name__)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim while the optimizer is made; after that the metric is over the parameters it has."""
        if hasattr(self, "tracker"):
            raise ValueError("the metric is over the parameters that were trainable at first: make a new optimizer")
        check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer is not copied: copy the model, make a new optimizer for it, and load_state_dict")

    def __repr__(self) -> str:
        tracker = self.tracker
        first, rest = super().__repr__().split("\n", 1)
        closure = ", which evaluates the loss again: opt.step(closure)" if self.needs_closure else ""
        slots = {"metric": tracker.metric, "structure": tracker.structure, "solver": self.solver, "step": self.rule}
        return "\n".join([first, *(f"{slot}: {value!r}" for slot, value in slots.items())]) + f"{closure}\n{rest}"

    @property
    def needs_closure(self) -> bool:
        """Whether ``step`` must be given a closure that zeroes the gradients, computes the loss and calls backward."""
        return self.rule.needs_closure

    def refresh(self, x: Inputs, target: Any = None) -> None:
        """Estimate the metric now, in a forward pass of its own (opaque models, metrics that need targets).

        The forward passes until the next step are then not looked at. So a model with batch normalisation or dropout
        trains in training mode, with its metric in evaluation mode:

        >>> import natgrad as ng
        >>> model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.1)), torch.randn(32, 4)
        >>> opt = ng.NaturalGradient(model, ng.Euclidean())
        >>> with ng.evaluating(model):
        ...     opt.refresh(x)
        >>> model(x).square().mean().backward()
        >>> opt.step()
        """
        self.tracker.refresh(x, target)

    def plan(self) -> Plan:
        """What becomes of every parameter and what it costs: ``print(opt.plan())`` before training."""
        return plan(self.tracker, solver=self.solver, rule=self.rule, groups=self.param_groups)

    def diagnostics(self) -> Diagnostics:
        """Conditions, damping, staleness and the last step, layer by layer; it waits for the device."""
        return diagnostics(
            self.tracker,
            solver=self.solver,
            inverse_damping=self.inverse_damping,
            inverted=self.tracker.inverted,
            last=self.last,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns the loss of the closure, if there is one."""
        if self.rule.needs_closure and closure is None:
            raise TypeError(f"{type(self.rule).__name__} evaluates the loss again: call opt.step(closure)")
        hear(self)
        self.moves.flag.raise_pending()
        value = None
        try:
            if closure is not None:
                self._stream = random_stream(self.tracker.model.example.device)
                with torch.enable_grad():
                    value = closure()
            with self.tracker.checked():
                self._step(closure, value)
        finally:
            self.outdated |= self.tracker.absorbed  # in a step that failed: the average has changed all the same
            self.tracker.discard()
        return value

    def _step(self, closure: Callable[[], Any] | None, value: Any) -> None:
        if closure is None and self._replayed():
            return
        ω = self.moves.differential(self.tracker.model.params)
        if self.tracker.model.example.device.type != "cuda":  # there, what is in the gradient shows in the step
            self.moves.flag.check(ω, "the gradient", self.tracker.step)
        operator, refreshed = self.tracker.average_with_new()
        self.tracker.pending_params |= self.moves.waiting(operator.unseen)
        damping = common_damping(self.param_groups)
        solve = Solves(self, operator, damping, refreshed)
        step = None if closure is not None or self.moves.resting else self._graphed.step(solve, ω)
        if step is None:
            step = self.propose(solve, ω, closure, value)
            self.moves.flag.check(step.numbers, "the step", self.tracker.step)
            self.moves.apply(self, step, solve.left(step))
        else:
            self.moves.flag.send("the step", self.tracker.step)
        self._put(solve)
        for group in self.param_groups:
            group["damping"] = step.damping
        self.tracker.commit(solve.operator, refreshed)
        self.last = self.moves.kept(self, step).stamped()

    def _replayed(self) -> bool:
        """Most steps on a GPU: neither the metric nor its inverse is due, and all the rest has been recorded."""
        tracker = self.tracker
        if not self._graphed.recorded or tracker.renewed or tracker.due or tracker.inverse_due:
            return False
        if self.solver.doubtful:
            return False
        step = self._graphed.quick(self, [p.grad for p in tracker.model.params.values()])
        if step is None or tracker.average is None:
            return False
        self.moves.flag.send("the step", tracker.step)
        tracker.commit(tracker.average, False)
        self.last = step
        return True

    def propose(self, solve: Solves, ω: Covector, closure: Callable[[], Any] | None, value: Any) -> Step:
        """What the rule makes of the gradient. Nothing is changed."""
        look = Look(
            step=self.tracker.step,
            divergence=lambda δ: self.tracker.batch_queries.divergence(
                self.moves.decayed(self) + δ
            ),  # not proposal: a cycle
            acceleration=solve.acceleration,
            curvature=lambda vs, fraction: self.tracker.batch_queries.curvature(vs, fraction),
            velocity=lambda: self.moves.velocity(self),
            trial=None if closure is None else Trial(self.tracker, closure, value, self._stream),
        )
        proposal = Proposal(
            params={name: p.detach() for name, p in self.tracker.model.params.items()},
            decay=lambda: self.moves.decayed(self),
            differential=ω,
            operator=solve.operator,
            damping=common_damping(self.param_groups),
            solve=solve,
            model=look,
        )
        return self.moves.possible(self.rule.take(proposal))

    def _put(self, solve: Solves) -> None:
        """The inverse of this step is that of the next ones; a recorded step finds it where the last one was."""
        if self._graphed.recorded and self.inverse is not None and solve.inverse is not None:
            solve.inverse = self.inverse.overwritten(solve.inverse)
        if solve.inverted != self.tracker.inverted or self.inverse is None:
            self.inverted_before = None if self.inverse is None else self.tracker.inverted
        self.inverse, self.inverse_damping, self.outdated = solve.inverse, solve.damping, solve.outdated
        self.tracker.inverted = solve.inverted

    def state_dict(self) -> dict[str, Any]:
        """The state of torch.optim, and under "natgrad" the metric, kept out of the way of its casts."""
        state = super().state_dict()
        # A snapshot: torch hands out its own dictionaries, in which the next step would put its momentum.
        state["state"] = _copied(state["state"])
        own = export(self.tracker, self.solver, Solved(self.inverse, self.inverse_damping, self.outdated))
        state["natgrad"] = own | {
            what: {k: t.clone() for k, t in own[what].items()} for what in ("operator", "inverse")
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume exactly: the next steps are, bit for bit, those of the run that was saved.

        What does not fit is refused with the difference, before anything is changed. With another solver than the one
        that was saved, the metric is kept and inverted anew in the next step.
        """
        if "natgrad" not in state_dict:
            raise ValueError('this is not the state of a NaturalGradient: it has no "natgrad" entry')
        restored = restore(state_dict["natgrad"], self.tracker, self.solver)
        check_plain(state_dict, self.param_groups, {id(p): name for name, p in self.tracker.model.params.items()})
        plain = {key: value for key, value in state_dict.items() if key != "natgrad"}
        # Copies: torch would go on in the tensors of the dictionary, which could then be loaded once only.
        super().load_state_dict(plain | {"state": _copied(plain["state"])})
        restored.put(self.tracker)
        solved = restored.solved
        self.inverse, self.inverse_damping, self.outdated = solved.inverse, solved.damping, solved.outdated
        self._graphed.forget()


def _copied(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """What torch.optim knows of every parameter, in memory of its own."""
    own = ((key, value.items()) for key, value in state.items())
    return {key: {what: t.clone() if isinstance(t, Tensor) else t for what, t in items} for key, items in own}


def _generator(device: torch.device, rank: int) -> torch.Generator:
    """For sampled metrics: every process draws targets of its own."""
    return torch.Generator(device=device).manual_seed((torch.initial_seed() + rank) % 2**63)

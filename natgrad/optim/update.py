"""From the natural gradient to new parameters and momentum; AdamW for the parameters that no metric suits."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.accelerate.devices import is_asynchronous
from natgrad.accelerate.fused import Flag
from natgrad.geometry import Covector, Vector
from natgrad.linalg import Damping, Relative, is_number
from natgrad.optim.distributed import Processes
from natgrad.optim.preconditioner import Preconditioner
from natgrad.sharding import is_sharded, local
from natgrad.step.base import PlainRule, Rates, Step, StepRule, pairings, rescale_, squared_length

Members: TypeAlias = Sequence[Sequence[tuple[str, Tensor]]]  # names and parameters of every group
Rate: TypeAlias = float | Tensor  # a tensor [] on the device in a captured step, so that a schedule may change it

_log = logging.getLogger("natgrad")
_BETAS, _EPSILON = (0.9, 0.95), 1e-8


@final
class AdamWUpdate:
    """One step of AdamW for the parameters of every group that have a gradient; the others are left alone."""

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], members: Members, state: MutableMapping[Tensor, Any]
    ) -> None:
        self._groups, self._members, self._state = groups, members, state

    def gradients(self, grads: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """The gradients of its parameters, in the order of the groups, and whether none is missing."""
        names = [name for pairs in self._members for name, _ in pairs]
        mine = {name: grads[name] for name in names if name in grads}
        return mine, len(mine) == len(names)

    def step(self, gradients: Mapping[str, Tensor], rates: Sequence[Rate], gate: Tensor | None) -> None:
        """Move the parameters that have gradients, each group with its rate; nothing where the gate is closed."""
        for group, of_group, rate in zip(self._groups, self._members, rates, strict=True):
            moving = [(p, gradients[name], self._state[p]) for name, p in of_group if name in gradients]
            adamw(moving, rate, weight_decay=group["weight_decay"], gate=gate)


def adamw(
    moving: Sequence[tuple[Tensor, Tensor, MutableMapping[str, Any]]],
    rate: Rate,
    *,
    weight_decay: float,
    gate: Tensor | None,
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019), equal to that of ``torch.optim.AdamW``, by its fused kernel.

        m ← β₁m + (1 − β₁)ω,  s ← β₂s + (1 − β₂)ω²,  θ ← (1 − lr·wd)θ − lr·m̂/(√ŝ + ε)

    with m̂ = m/(1 − β₁ᵗ), ŝ = s/(1 − β₂ᵗ), β = (0.9, 0.95) and ε = 10⁻⁸. m, s and t lie in the state of every parameter
    under the names that torch gives them, t as a tensor on the device, so that the step can be captured. ``moving``:
    parameters with their gradients and states.
    """
    for p, _, state in moving:
        begin_moments(state, p)
    if not moving:
        return
    columns = [(p, g, state["exp_avg"], state["exp_avg_sq"], state["step"]) for p, g, state in moving]
    params, gradients, means, squares, counts = zip(*columns, strict=True)
    if any(map(is_sharded, params)):
        params, means, squares = (tuple(map(local, tensors)) for tensors in (params, means, squares))
    fused.adamw_(
        params,
        gradients,
        means,
        squares,
        counts,
        rate=rate,
        betas=_BETAS,
        epsilon=_EPSILON,
        weight_decay=weight_decay,
        gate=gate,
    )


def begin_moments(state: MutableMapping[str, Any], p: Tensor) -> None:
    """t = 0, m = 0 and s = 0 of a parameter that has none."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, requires_grad=False) for _ in range(2))


MomentumOn: TypeAlias = Literal["gradients", "steps"]


# Arguments of optimizers that hold for all parameters, and two of AdamW that no optimizer here has. Other keys of a
# group, such as a name, are the user's own.
_COMMON = frozenset(
    (
        *("power", "rms", "polar", "fit", "factors", "decay", "metric_every", "inverse_every", "basis_every", "early"),
        *("structure", "solver", "step", "momentum_on", "nesterov", "sharing", "largest", "strict", "rules", "moments"),
        *("metric", "output", "examples", "generator", "memory", "iteration", "owners"),
        *("nu", "lengthscale", "jitter", "features"),
        *("betas", "eps"),
    )
)
_MEANT = {"learning_rate": "lr", "wd": "weight_decay"}


def complete(
    params: Iterable[Any] | None, groups: Iterable[Mapping[str, Any]], names: Mapping[int, str], *, pairs: bool
) -> list[dict[str, Any]]:
    """Parameter groups that hold all ``params`` once; those in no given group form the first one.

    None: the groups hold all there are. ``names``: by id. ``pairs``: parameters may come with their names.
    """
    given = []
    for group in groups:
        entries = group.get("params") if isinstance(group, Mapping) else None
        entries = [entries] if isinstance(entries, Tensor) else list(entries) if isinstance(entries, Iterable) else None
        if entries is None or not all(isinstance(tensor_of(entry) if pairs else entry, Tensor) for entry in entries):
            raise TypeError(
                f'groups= is a list of dicts {{"params": layer.parameters(), "lr": 0.1}}, and one of them is {group!r}'
            )
        check_keys(group)
        given.append({**group, "params": entries})
    counts = Counter(id(p) for group in given for p in tensors_of(group))
    if several := [names.get(at, "a parameter") for at, count in counts.items() if count > 1]:
        raise ValueError(f"{', '.join(several)}: in several parameter groups, or twice in one. Leave it in one of them")
    if params is None:
        return given
    entries = list(params)
    if strange := counts.keys() - {id(tensor_of(entry)) for entry in entries}:
        raise ValueError(
            f"a parameter group holds {len(strange)} tensors that are not trainable parameters of the model: take "
            "them from this model, and leave frozen ones out"
        )
    rest = [entry for entry in entries if id(tensor_of(entry)) not in counts]
    return ([{"params": rest}] if rest else []) + given


def tensors_of(group: Mapping[str, Any]) -> list[Tensor]:
    """The parameters of a group, without their names."""
    params = group["params"]
    return [params] if isinstance(params, Tensor) else [tensor_of(entry) for entry in params]


def tensor_of(entry: Any) -> Any:
    """The parameter of a pair with its name."""
    return entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry


def check_keys(group: Mapping[str, Any]) -> None:
    """Refuse what a parameter group cannot have of its own."""
    if wrong := sorted(_COMMON.intersection(group)):
        raise ValueError(
            f"a parameter group holds {', '.join(wrong)}, which all parameters share: a group may have lr, "
            "weight_decay, momentum and fallback. Give it to the optimizer, make a second optimizer, or call a key "
            "of your own otherwise"
        )
    if meant := [f"{key}, which is called {name} here" for key, name in _MEANT.items() if key in group]:
        raise ValueError(f"a parameter group holds {', and '.join(meant)}")


def check_numbers(group: Mapping[str, Any]) -> None:
    """Refuse numbers that no step can be made with."""
    if isinstance(group["damping"], Relative):
        raise ValueError(
            f"a parameter group holds the number ε of {group['damping']!r}: give damping=ng.Relative(…) to the "
            "optimizer, for all groups"
        )
    for key in ("lr", "damping", "momentum", "weight_decay"):
        if not is_number(group[key]) and not (isinstance(group[key], Tensor) and group[key].ndim == 0):
            raise TypeError(f"{key} must be a number, got {group[key]!r}")
        if not 0 <= group[key] < (1 if key == "momentum" else float("inf")):
            raise ValueError(
                f"{key} must be {'in [0, 1)' if key == 'momentum' else 'finite and ≥ 0'}, got {group[key]}"
            )


def like(damping: Damping, number: float) -> Damping:
    """The number that a group holds, and a scheduler may change, as damping of the same kind."""
    return Relative(number) if isinstance(damping, Relative) else number


def check_momentum_on(momentum_on: str) -> None:
    """Refuse a momentum that is neither of covectors nor of vectors."""
    if momentum_on not in ("gradients", "steps"):
        raise ValueError(f'momentum_on must be "gradients" (before the metric) or "steps" (after), got {momentum_on!r}')


def corrected_weight(momentum: float, step: int) -> float:
    """(1 − μ)/(1 − μᵗ), the weight of the gradient number t = 1, 2, … in an average that is corrected for its start.

    >>> [round(corrected_weight(0.5, t), 4) for t in (1, 2, 3)]
    [1.0, 0.6667, 0.5714]
    """
    return (1 - momentum) / (1 - momentum**step) if momentum < 1 else 1 / step


def refuse_two_momenta(rule: StepRule, groups: Iterable[Mapping[str, Any]]) -> None:
    """A rule that has a momentum of its own would ignore that of a group."""
    if rule.has_momentum and any(group["momentum"] for group in groups):
        raise ValueError(
            f"{type(rule).__name__} has a momentum of its own, decay=, and a parameter group has momentum=: set the "
            "momentum of all groups to 0"
        )


def common_damping(groups: Iterable[Mapping[str, Any]]) -> float:
    """λ, which all groups share: the metric is one."""
    dampings = {float(group["damping"]) for group in groups}
    if len(dampings) > 1:
        raise ValueError(f"the damping must be the same in all parameter groups, got {sorted(dampings)}")
    return dampings.pop()


@final
@dataclass(frozen=True)
class GroupUpdate:
    """The parameters of one group that move in a step."""

    names: Sequence[str]
    params: Sequence[Tensor]
    rate: Rate
    momentum: float
    weight_decay: float
    state: MutableMapping[Tensor, Any]  # of torch.optim
    momentum_on: MomentumOn
    weight: Rate | None  # w of a gradient in a corrected average; None: 1 − μ, and Nesterov's step

    @property
    def momenta(self) -> dict[str, Tensor]:
        """The momentum of every parameter that has one: before its first step it has none."""
        if not self.momentum:
            return {}
        states = ((name, self.state.get(p, {})) for name, p in zip(self.names, self.params, strict=True))
        return {name: state["momentum"] for name, state in states if "momentum" in state}

    def remember(self, values: Sequence[Tensor], gate: Tensor | None) -> None:
        """On steps m ← ``values``, the velocities, which are overwritten; on gradients m ← μm + (1 − μ)·``values``.

        A corrected average has been computed before (``smoothed``): m ← ``values``.
        """
        for p in self.params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum"] for p in self.params]
        if self.momentum_on == "steps":
            fused.move_(momenta, values, gate=gate)
        elif self.weight is None:
            fused.average_(momenta, values, 1 - self.momentum, gate=gate)
        else:
            fused.copy_(momenta, values, gate=gate)

    def decay(self, gate: Tensor | None) -> None:
        """θ ← (1 − lr·wd)θ."""
        if self.weight_decay:
            fused.scale_(self.params, 1 - self.rate * self.weight_decay, gate=gate)


@final
class ParamUpdate:
    """Learning rates, weight decay and momentum in one step: θ ← (1 − lr·wd)θ − lr·m.

    ``momentum_on`` "steps": m ← μm + v. On "gradients", m ← μm + (1 − μ)ω, and the step is (μm + (1 − μ)ω)♯; with
    ``weights`` w, one for each group, m ← (1 − w)m + wω, and the step is m♯ (``corrected_weight``). A parameter
    ``without_grad`` does not move, has no weight decay and keeps its momentum, as in torch.optim. ``members``: names
    and parameters of every group, those that have a metric. ``rates`` take the place of the learning rates of the
    groups.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        members: Members,
        state: MutableMapping[Tensor, Any],
        *,
        momentum_on: MomentumOn,
        without_grad: frozenset[str] = frozenset(),
        rates: Sequence[Rate] | None = None,
        weights: Sequence[Rate] | None = None,
    ) -> None:
        self.without_grad: frozenset[str] = without_grad
        self.state: MutableMapping[Tensor, Any] = state
        self.groups: list[GroupUpdate] = list[GroupUpdate]()
        self.momentum_on = momentum_on
        rates = rates or [group["lr"] for group in groups]
        of_momenta: Sequence[Rate | None] = weights or [None] * len(groups)
        for group, of_group, rate, weight in zip(groups, members, rates, of_momenta, strict=True):
            moving = [(name, p) for name, p in of_group if name not in without_grad] if without_grad else of_group
            if moving:
                names, params = zip(*moving, strict=True)
                numbers = group["momentum"], group["weight_decay"]
                self.groups.append(GroupUpdate(names, params, rate, *numbers, state, momentum_on, weight))

    @property
    def rates(self) -> list[tuple[Sequence[str], Rate]]:
        """Names and learning rate of every group."""
        return [(group.names, group.rate) for group in self.groups]

    def zero_idle(self, v: Vector) -> Vector:
        """v, with zeros for parameters without a gradient: a metric that couples parameters would move them."""
        if not self.without_grad:
            return v
        return Vector({name: torch.zeros_like(t) if name in self.without_grad else t for name, t in v.items()})

    def decayed(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(1 − lr·wd)θ."""
        out = {name: p.detach() for name, p in params.items()}
        for group in self.groups:
            if group.weight_decay:
                factor = 1 - group.rate * group.weight_decay
                out.update(zip(group.names, fused.scaled([out[name] for name in group.names], factor), strict=True))
        return out

    def velocity(self, params: Mapping[str, Tensor]) -> Vector | None:
        """The momentum after the last step, zero for parameters without one; None if no parameter has one."""
        if self.momentum_on == "gradients":
            return None
        momenta = {name: self.state.get(p, {}).get("momentum") for name, p in params.items()}
        if all(m is None for m in momenta.values()):
            return None
        whole = {name: torch.zeros_like(params[name]) if m is None else m for name, m in momenta.items()}
        return self.zero_idle(Vector(whole))

    def smoothed(self, ω: Covector) -> Covector:
        """What the metric acts on: ω, or with momentum on gradients the new m, or μm + (1 − μ)ω (Nesterov 1983)."""
        if self.momentum_on == "steps":
            return ω
        out = dict(ω)
        for group in self.groups:
            momenta = group.momenta
            old, new = list(momenta.values()), [ω[name] for name in momenta]
            if group.weight is not None:  # where there is no momentum yet, the first gradient counts in full
                out.update(zip(momenta, fused.averaged(old, new, group.weight) if momenta else [], strict=True))
                continue
            weight = 1 - group.momentum**2  # μ(μm + (1 − μ)ω) + (1 − μ)ω = μ²m + (1 − μ²)ω
            first = [name for name in group.names if name not in momenta]
            if momenta:
                out.update(zip(momenta, fused.lerp(old, new, weight), strict=True))
            if first and group.momentum:
                out.update(zip(first, fused.scaled([ω[name] for name in first], weight), strict=True))
        return Covector(out)

    def momentum_input(self, ω: Covector, smoothed: Covector) -> Covector:
        """What ``remember`` needs for momentum on gradients: ω, or a corrected average, which ``smoothed`` is."""
        return smoothed if any(group.weight is not None for group in self.groups) else ω

    def add_momentum(self, v: Mapping[str, Tensor]) -> None:
        """v ← μm + v; v stays as it is where the momentum is of gradients."""
        for group in self.groups:
            momenta = group.momenta
            if momenta and self.momentum_on == "steps":
                fused.add_([v[name] for name in momenta], list(momenta.values()), alpha=group.momentum)

    def apply(self, step: Step, remembered: Vector | Covector | None, flag: Flag) -> None:
        """Change parameters and momentum. Everything has been computed and checked.

        ``remembered``: the velocity, or the ``momentum_input`` of gradients.

        A step that was refused starts the momentum anew: along a velocity that ascends every later step would be
        refused too.
        """
        momentum = step.velocity if step.velocity is not None else remembered
        if momentum is step.displacement:
            momentum = momentum.map(torch.clone)  # it is overwritten
        for group in self.groups:
            if not step.accepted:
                for p in group.params:
                    group.state[p].pop("momentum", None)
                continue
            group.decay(flag.value)
            fused.add_(group.params, [step.displacement[name] for name in group.names], gate=flag.value)
            pairs = zip(group.names, group.params, strict=True)
            landed = [(p, step.landing[name]) for name, p in pairs if name in step.landing]
            if landed:
                fused.copy_([p for p, _ in landed], [value for _, value in landed], gate=flag.value)
            if momentum is not None and (group.momentum or step.velocity is not None):
                group.remember([momentum[name] for name in group.names], flag.value)


def displacement(rates: Rates, velocity: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Vector:
    """−lr·m of the names in ``rates``, each with its lr, in memory of its own; zero for the others.

    >>> one = {"a": torch.ones(1), "b": torch.ones(1)}
    >>> displacement([(["a"], 0.5)], one, one)["a"]
    tensor([-0.5000])
    """
    moved: dict[str, Tensor] = {}
    for names, rate in rates:
        moved.update(zip(names, fused.scaled([velocity[name] for name in names], -rate), strict=True))
    return Vector({name: moved[name] if name in moved else torch.zeros_like(t) for name, t in like.items()})


@final
@dataclass(frozen=True)
class PlainStep:
    """What a plain step leaves for ``NaturalGradient.last`` and ``metrics``.

    ``velocities``: of groups whose velocity is not their momentum. ``pairings``: ⟨ω, v⟩ [] of every group, if they were
    computed and v is the natural gradient. ``scale``: the number of the rule for all parameters.
    """

    velocities: Mapping[str, Tensor]
    pairings: Sequence[Tensor]
    scale: Tensor | float | None  # on the host where it was needed there


def plain_step(
    ω: Covector,
    update: ParamUpdate,
    *,
    inverse: Preconditioner,
    rule: PlainRule,
    flag: Flag,
    beside: Mapping[str, Tensor],
) -> PlainStep:
    """v = ω♯, m ← μm + c·v, θ ← (1 − lr·wd)θ − lr·m with the numbers c of the rule: everything in place.

    With momentum on gradients v = (μm + (1 − μ)ω)♯ or m♯ for the new m, and θ ← (1 − lr·wd)θ − lr·c·v.

    On a CPU NaN and infinity raise before anything is changed. On a GPU nothing waits for the device: ``flag`` is set
    there, the old values stay, and the kernels can be captured. ``beside``: gradients that are not in ω and must be
    finite, too.
    """
    asynchronous = is_asynchronous(next(iter(ω.values())).device)
    world = inverse.world
    if beside and not asynchronous:
        world.together(partial(flag.check, beside, "the gradient"))
    smoothed, on_steps, rates = update.smoothed(ω), update.momentum_on == "steps", update.rates
    entering = update.momentum_input(ω, smoothed)
    v, pairing = _direction(smoothed, inverse, rule, measured=rule.measured or not asynchronous)
    if pairing is None:
        terms, square = list[Tensor](), torch.zeros(())  # nobody reads it
    elif len(rates) <= 1:
        terms, square = [pairing], pairing * rates[0][1] ** 2 if rates else pairing
    else:  # also where the rates are equal: a resumed run must add in the same order
        terms = pairings(smoothed, v, rates) if world.owners is None else world.owners.pairings(smoothed, v, rates)
        square = squared_length(terms, rates)
    scale = rule.scale(v, square)
    natural = type(rule).direction is PlainRule.direction
    of_all = scale if isinstance(scale, Tensor) else None
    found = terms if natural else [], of_all if of_all is None or asynchronous else float(of_all)
    indicators = {} if pairing is None else {"⟨ω, v⟩": pairing}  # finite only if ω, v and c are
    if isinstance(scale, Tensor):
        indicators = {**(indicators or v), "c": scale}
    elif scale is not None:
        rescale_(v, scale)  # a number for each parameter
        indicators |= {f"c of {name}": number for name, number in scale.items()}
        scale = None
    indicators = {**(indicators or v), **beside}
    if asynchronous and on_steps and _can_fuse(v, update):
        _look(indicators, flag, world)
        _fused_update(v, scale, update, flag)
        return PlainStep({}, *found)
    if pairing is not None and not asynchronous and not math.isfinite(float(pairing)):
        world.together(partial(flag.check, ω, "the gradient"))
        world.together(partial(flag.check, v, "the step"))  # else the sum has overflowed, and no number in it
    if scale is not None and (asynchronous or found[1] != 1.0):
        fused.scale_(list(v.values()), scale)
    velocities = dict(v.items())  # a ``Vector`` is looked up in Python
    update.add_momentum(velocities)
    moving = _overflow_candidates({name: velocities[name] for names, _ in rates for name in names}, rates)
    if not asynchronous and moving:
        world.together(partial(flag.check, moving, "the step"))
    elif asynchronous:
        half = any(t.dtype is torch.float16 for t in moving.values())
        _look(indicators if rule.bounded and not on_steps and not half else {**indicators, **moving}, flag, world)
    for group in update.groups:
        velocity = [velocities[name] for name in group.names]
        fused.descend_(group.params, velocity, group.rate, decay=group.weight_decay, gate=flag.value)
        if group.momentum:
            group.remember(velocity if on_steps else [entering[name] for name in group.names], flag.value)
    without_velocity = (group for group in update.groups if not (on_steps and group.momentum))
    return PlainStep({name: velocities[name] for group in without_velocity for name in group.names}, *found)


def _look(tensors: Mapping[str, Tensor], flag: Flag, world: Processes) -> None:
    """Set the flag on the device, in all processes if they have parts of the parameters."""
    flag.look(tensors)
    if world.owners is not None and flag.value is not None:
        flag.value = world.owners.largest(flag.value)


def _direction(
    ω: Covector, inverse: Preconditioner, rule: PlainRule, *, measured: bool
) -> tuple[Vector, Tensor | None]:
    """v and, if it is ``measured``, ⟨ω, v⟩ []."""
    if type(rule).direction is not PlainRule.direction:
        v = rule.direction(ω, inverse.sharp_from(ω))
        return v, fused.pairing([(ω[name], t) for name, t in v.items()]) if measured else None
    return inverse.sharp_with_pairing(ω) if measured else (inverse.sharp(ω), None)


def _can_fuse(v: Vector, update: ParamUpdate) -> bool:
    """Whether the fused kernel can do ``_fused_update``.

    Not in float16, where μm + v may leave the range though v does not, nor in double precision, as c is in single.
    """
    for group in update.groups:
        momenta = group.momenta
        dtypes = {v[name].dtype for name in group.names}
        if len(momenta) < len(group.names) or not dtypes <= {torch.float32, torch.bfloat16}:
            return False
        if any(m.stride() != p.stride() for m, p in zip(momenta.values(), group.params, strict=True)):
            return False
    return True


def _fused_update(v: Vector, scale: Tensor | None, update: ParamUpdate, flag: Flag) -> None:
    """m ← μm + c·v, θ ← θ − lr·m in one pass over all three."""
    divisor = None if scale is None else scale.float().reciprocal()
    for group in update.groups:
        group.decay(flag.value)
        fused.momentum_update_(
            group.params,
            [v[name] for name in group.names],
            list(group.momenta.values()),
            rate=group.rate,
            momentum=group.momentum,
            divisor=divisor,
            gate=flag.value,
        )


def _overflow_candidates(velocity: dict[str, Tensor], rates: Rates) -> Mapping[str, Tensor]:
    """What is checked for overflow: m, or −lr·m where it may overflow though m does not (lr > 1, float16)."""
    longer = any(not isinstance(rate, Tensor) and abs(rate) > 1 for _, rate in rates)
    half = any(t.dtype is torch.float16 for t in velocity.values())
    return displacement(rates, velocity, velocity) if longer or half else velocity

"""From a step that was decided to parameters and momentum that have changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.accelerate.flags import Flag
from natgrad.geometry import Covector, Vector, require_all
from natgrad.model import Model
from natgrad.step.base import Ahead, Along, Step

if TYPE_CHECKING:
    from natgrad.optim.optimizer import NaturalGradient


# Parameter groups: what they may hold.


def complete(model: Model, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups that cover every trainable parameter once; those nobody named come first."""
    names = {id(p): name for name, p in model.params.items()}
    given = []
    for group in groups:
        params = group["params"]
        given.append({**group, "params": [params] if isinstance(params, Tensor) else list(params)})
    for group in given:
        strange = [p for p in group["params"] if id(p) not in names]
        if strange:
            raise ValueError(
                f"a parameter group holds {len(strange)} tensors that are not trainable parameters of the model"
            )
    taken = {id(p) for group in given for p in group["params"]}
    rest = [p for p in model.params.values() if id(p) not in taken]
    return ([{"params": rest}] if rest else []) + given


def check_numbers(group: Mapping[str, Any]) -> None:
    """Refuse numbers that no step can be made with."""
    for key in ("lr", "damping", "momentum", "weight_decay"):
        if not 0 <= group[key] < (1 if key == "momentum" else float("inf")):
            raise ValueError(
                f"{key} must be {'in [0, 1)' if key == 'momentum' else 'finite and ≥ 0'}, got {group[key]}"
            )


def common_damping(groups: Iterable[Mapping[str, Any]]) -> float:
    """λ, which all groups share: the metric is one."""
    dampings = {float(group["damping"]) for group in groups}
    if len(dampings) > 1:
        raise ValueError(f"the damping must be the same in all parameter groups, got {sorted(dampings)}")
    return dampings.pop()


Rate: TypeAlias = float | Tensor  # a number on the device where a recorded step must find it changed
_log = logging.getLogger("natgrad")


@final
@dataclass(frozen=True)
class Moving:
    """The parameters of a group that move in this step, with their names and their learning rate."""

    options: Mapping[str, Any]
    names: Sequence[str]
    params: Sequence[Tensor]
    rate: Rate

    def without(self, names: frozenset[str]) -> Moving:
        """All but these parameters."""
        pairs = [(name, p) for name, p in zip(self.names, self.params, strict=True) if name not in names]
        return replace(self, names=[name for name, _ in pairs], params=[p for _, p in pairs])


@final
class Moves:
    """Learning rates, weight decay and momentum of the parameter groups. ``flag`` keeps what is not finite out.

    A parameter without a gradient is at rest: in this step it does not move, has no weight decay and keeps its
    momentum, as in torch.optim. The optimizer, which holds this, is handed to every call: held here, it would stay on
    the model, and watch it, until Python next looks for cycles.
    """

    def __init__(self, opt: NaturalGradient, flag: Flag) -> None:
        self.flag = flag
        names = {id(p): name for name, p in opt.tracker.model.params.items()}
        self._names = [[names[id(p)] for p in group["params"]] for group in opt.param_groups]
        self.recorded: list[Tensor] | None = None  # the learning rates on the device, while a step is recorded
        self.resting: frozenset[str] = frozenset()
        self._told: set[str] = set()
        self._waited: set[str] = set()

    def differential(self, params: Mapping[str, Tensor]) -> Covector:
        """The gradient of this step, zero where there is none; the parameters of which there is none rest."""
        missing = [name for name, p in params.items() if p.grad is None]
        if len(missing) == len(params):
            raise ValueError("no parameter has a gradient: call loss.backward() before opt.step()")
        self.resting = frozenset(missing)
        if news := [name for name in missing if name not in self._told]:
            self._told.update(news)
            _log.info("%s: no gradient. A parameter is left alone in a step in which it has none", ", ".join(news))
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}
        return Covector(require_all(found))

    def waiting(self, unseen: frozenset[str]) -> frozenset[str]:
        """The parameters that have a gradient and no metric yet, as no estimate has seen them: they rest, too.

        In a metric that is zero their step would be that of the damping alone, ω/λ.
        """
        found = unseen - self.resting
        if news := sorted(found - self._waited):
            self._waited.update(news)
            _log.info(
                "%s: a gradient, but no forward pass that the metric was estimated from has used them. They are left "
                "alone, and the metric is estimated in every step, until one has",
                ", ".join(news),
            )
        self.resting |= found
        return found

    def groups(self, opt: NaturalGradient) -> Iterator[Moving]:
        """What moves of the parameter groups."""
        rates: Sequence[Rate] = self.recorded or [group["lr"] for group in opt.param_groups]
        for group, names, rate in zip(opt.param_groups, self._names, rates, strict=True):
            moving = Moving(group, names, group["params"], rate).without(self.resting)
            if moving.names:
                yield moving

    def at_rest(self, v: Vector) -> Vector:
        """v, with zeros for what rests: a metric that couples parameters would move it."""
        if not self.resting:
            return v
        return Vector({name: torch.zeros_like(t) if name in self.resting else t for name, t in v.items()})

    def possible(self, step: Step) -> Step:
        """The step, without what a rule (a constraint) would do to parameters that rest."""
        if not self.resting:
            return step
        landing = {name: t for name, t in step.landing.items() if name not in self.resting}
        way = self.at_rest(step.way) if isinstance(step.way, Vector) else step.way
        return replace(step, way=way, landing=landing)

    def rates(self, opt: NaturalGradient) -> list[tuple[Sequence[str], Rate]]:
        """Names and learning rate of every group."""
        return [(group.names, group.rate) for group in self.groups(opt)]

    def decayed(self, opt: NaturalGradient) -> dict[str, Tensor]:
        """(1 − lr·wd)θ."""
        out = {name: p.detach() for name, p in opt.tracker.model.params.items()}
        for group in self.groups(opt):
            if group.options["weight_decay"]:
                factor = 1 - group.rate * group.options["weight_decay"]
                scaled = fused.scaled([out[name] for name in group.names], factor)
                out.update(zip(group.names, scaled, strict=True))
        return out

    def velocity(self, opt: NaturalGradient) -> Vector | None:
        """What the last step left as momentum; zero where there is none, and for what rests."""
        params, state = opt.tracker.model.params, opt.state
        if not any("momentum" in state.get(p, {}) for p in params.values()):
            return None
        own = {name: state.get(p, {}).get("momentum") for name, p in params.items()}
        return self.at_rest(
            Vector({name: torch.zeros_like(params[name]) if m is None else m for name, m in own.items()})
        )

    def apply(self, opt: NaturalGradient, step: Step, velocity: Vector | None) -> None:
        """Everything has been computed and checked: change parameters and momentum."""
        kept = step.velocity if step.velocity is not None else velocity
        if kept is step.way:
            kept = kept.map(torch.clone)  # what is kept as momentum is used up
        for group in self.groups(opt):
            params, names, gate = group.params, group.names, self.flag.value
            if not step.accepted:
                for p in params:
                    opt.state.pop(p, None)
                continue
            if group.options["weight_decay"]:
                fused.scale_(params, 1 - group.rate * group.options["weight_decay"], gate=gate)
            if isinstance(step.way, Ahead):
                v, m = ([side[name] for name in names] for side in (step.way.v, step.way.momentum))
                fused.momentum_update_(
                    params,
                    v,
                    m,
                    rate=group.rate,
                    momentum=group.options["momentum"],
                    divisor=step.way.shrink.reciprocal(),
                    gate=gate,
                )
            elif isinstance(step.way, Along):
                fused.descend_(params, [step.way.velocity[name] for name in names], group.rate, gate=gate)
            else:
                fused.add_(params, [step.way[name] for name in names], gate=gate)
            landed = [(p, step.landing[name]) for p, name in zip(params, names, strict=True) if name in step.landing]
            if landed:
                fused.copy_([p for p, _ in landed], [value for _, value in landed], gate=gate)
            if kept is not None and (group.options["momentum"] or step.velocity is not None):
                self._remember(opt.state, params, [kept[name] for name in names])

    def kept(self, opt: NaturalGradient, step: Step) -> Step:
        """The step, after it was applied, without memory of its own: along the momentum, which is its velocity now."""
        if isinstance(step.way, Ahead):
            return replace(step, way=step.way.made())
        if not isinstance(step.way, Along):
            return step
        velocity = dict(step.way.velocity)
        for group in self.groups(opt):
            for name, p in zip(group.names, group.params, strict=True):
                if group.options["momentum"] and "momentum" in opt.state.get(p, {}):
                    velocity[name] = opt.state[p]["momentum"]
        return replace(step, way=replace(step.way, velocity=Vector(velocity)))

    def _remember(
        self, state: MutableMapping[Tensor, Any], params: Sequence[Tensor], velocity: Sequence[Tensor]
    ) -> None:
        for p in params:
            if "momentum" not in state[p]:
                state[p]["momentum"] = torch.zeros_like(p)
        fused.move_([state[p]["momentum"] for p in params], velocity, gate=self.flag.value)

"""From a step that was decided to parameters and momentum that have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.geometry import Vector
from natgrad.optim.guard import Guard
from natgrad.step import Step

if TYPE_CHECKING:
    from natgrad.optim.optimizer import NaturalGradient

Rate: TypeAlias = float | Tensor  # a number on the device where a recorded step must find it changed


@final
class Moves:
    """Learning rates, weight decay and momentum of the parameter groups. ``guard`` keeps what is not finite out."""

    def __init__(self, opt: NaturalGradient, guard: Guard) -> None:
        self._opt, self.guard = opt, guard
        names = {id(p): name for name, p in opt.keeper.model.params.items()}
        self._names = [[names[id(p)] for p in group["params"]] for group in opt.param_groups]
        self.recorded: list[Tensor] | None = None  # the learning rates on the device, while a step is recorded

    @property
    def groups(self) -> Iterator[tuple[dict[str, Any], list[str], Rate]]:
        """The parameter groups, with the names of their parameters and their learning rate."""
        rates: Sequence[Rate] = self.recorded or [group["lr"] for group in self._opt.param_groups]
        return zip(self._opt.param_groups, self._names, rates, strict=True)

    def rates(self) -> list[tuple[list[str], Rate]]:
        """Names and learning rate of every group."""
        return [(names, rate) for _, names, rate in self.groups]

    def decayed(self) -> dict[str, Tensor]:
        """(1 − lr·wd)θ."""
        out = {name: p.detach() for name, p in self._opt.keeper.model.params.items()}
        for group, names, rate in self.groups:
            if group["weight_decay"]:
                factor = 1 - rate * group["weight_decay"]
                out.update(zip(names, torch._foreach_mul([out[name] for name in names], factor), strict=True))
        return out

    def velocity(self) -> Vector | None:
        """What the last step left as momentum."""
        params, state = self._opt.keeper.model.params, self._opt.state
        if not all("momentum" in state.get(p, {}) for p in params.values()):
            return None
        return Vector({name: state[p]["momentum"] for name, p in params.items()})

    def apply(self, step: Step, velocity: Vector | None) -> None:
        """Everything has been computed and checked: change parameters and momentum."""
        kept = step.velocity if step.velocity is not None else velocity
        if kept is step.displacement:
            kept = kept.map(torch.clone)  # what is kept as momentum is used up
        for group, names, rate in self.groups:
            params: list[Tensor] = group["params"]
            if not step.accepted:
                for p in params:
                    self._opt.state.pop(p, None)
                continue
            if group["weight_decay"]:
                self.guard.scale(params, 1 - rate * group["weight_decay"])
            self.guard.add(params, [step.displacement[name] for name in names])
            landed = [(p, step.landing[name]) for p, name in zip(params, names, strict=True) if name in step.landing]
            if landed:
                self.guard.put([p for p, _ in landed], [value for _, value in landed])
            if kept is not None and (group["momentum"] or step.velocity is not None):
                self._remember(params, [kept[name] for name in names])

    def _remember(self, params: Sequence[Tensor], velocity: Sequence[Tensor]) -> None:
        state = self._opt.state
        for p in params:
            if "momentum" not in state[p]:
                state[p]["momentum"] = torch.zeros_like(p)
        self.guard.move([state[p]["momentum"] for p in params], velocity)

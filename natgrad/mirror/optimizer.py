"""Mirror descent and natural gradient of members of exponential families, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import can_read
from natgrad.accelerate.fused import Flag, copy_
from natgrad.linalg import is_number
from natgrad.mirror.charts import Boundary, Move, Shorten, mirror_step, per_member
from natgrad.mirror.member import Member
from natgrad.model import check_slots

_log = logging.getLogger("natgrad")
_VELOCITY = "velocity"
_SHORTEN = Shorten()


@final
class MirrorDescent(torch.optim.Optimizer):
    """Train distributions (``Member`` modules) by steps that never leave their domain.

    Closures and schedulers work as in torch. A member without a gradient is skipped. For maximum likelihood from a
    stream, lr = 1/(k + 1) makes every iterate the estimate of all data so far.

    Args:
        members: The ``Member`` modules to train, or parameter groups with members as ``params``.
        lr: Step size, 1/λ of the proximal step.
        momentum: μ of the moving sum of gradients, 0 for none.
        descent: ``mirror_step`` or ``natural_step``, see Method.
        boundary: What happens to a step that would leave the domain. ``reasons()`` explains those of the last step, and
            the logger "natgrad" warns of the first one of every member.

    Raises:
        DomainError: if a step leaves the domain and ``boundary`` refuses it. Parameters and velocities are then
            unchanged.

    Method:
        ``descent=mirror_step``: the gradient in the chart of a member moves its other chart, and no metric is inverted.
        A member in the natural chart steps by ξ ← ξ − lr ∇_ηJ; one in the mean chart by η ← η − lr ∇_ξJ, which is
        natural gradient in η.

        ``descent=natural_step``: the chart of the member moves along its natural gradient.

        Momentum m ← μm + ∇J lives in the chart that moves: its coordinates are affine, so that velocities of different
        points may be added; with ``natural_step`` m is a covector, raised to a vector at every step.

        Where a step is shortened, so is its velocity: otherwise every later step would press against the boundary. See
        Grosse (2021), section 4.1.

    Example:
        >>> import natgrad as ng
        >>> rate = ng.mirror.Member(ng.families.Poisson(), torch.tensor(0.0))
        >>> opt = MirrorDescent([rate], lr=0.5)
        >>> x = torch.tensor([2.0, 4.0])
        >>> (-rate.family.log_prob(rate.natural(), x)).mean().backward()
        >>> opt.step()
        >>> rate.mean()  # half way from 1 to the mean of the data, 3
        tensor(2., grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        members: Member | Iterable[Member] | Iterable[dict[str, Any]],
        lr: float = 1.0,
        momentum: float = 0.0,
        descent: Callable[..., Move] = mirror_step,
        boundary: Boundary = _SHORTEN,
    ) -> None:
        check_slots(boundary=(boundary, Boundary))
        if not callable(descent):
            raise TypeError(f"descent must be mirror_step, natural_step, or a function as they are, got {descent!r}")
        self.boundary: Boundary = boundary
        self.descent = descent
        self.last: tuple[tuple[str, Move], ...] = ()
        self._members: dict[int, Member] = {}
        self._warned: set[str] = set()
        self._flag, self._steps = Flag(), 0
        listed: Any = [members] if isinstance(members, Member) else list(members)
        super().__init__(listed, {"lr": lr, "momentum": momentum})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim, with members as ``params``."""
        group = dict(param_group)
        members = [group["params"]] if isinstance(group["params"], Member) else list(group["params"])
        for member in members:
            if not isinstance(member, Member):
                kind = f"a tensor of shape {tuple(member.shape)}" if isinstance(member, Tensor) else repr(member)
                raise TypeError(
                    f"MirrorDescent trains members of families, got {kind}: wrap it as "
                    "ng.mirror.Member(family, eta), and give NaturalGradient or torch.optim the other parameters"
                )
        _check_numbers({**self.defaults, **group})
        group["params"] = [member.point for member in members]
        super().add_param_group(group)
        self._members.update({id(member.point): member for member in members})

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an optimizer is not copied: copy the members, make a new optimizer for them, and load_state_dict"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every member that has a gradient. Returns the loss of the closure, detached, if given."""
        self._flag.raise_pending()
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        moves: dict[str, Move] = {}
        points: list[Tensor] = []
        velocities: list[tuple[Tensor, Tensor]] = []
        for g, group in enumerate(self.param_groups):
            _check_numbers(group)
            for i, x in enumerate(group["params"]):
                if x.grad is not None:
                    member = self._members[id(x)]
                    name = f"member {i} of group {g} ({type(member.family).__name__})"
                    moves[name], velocity = self._move(name, member, group)
                    points.append(x.detach())
                    velocities += [] if velocity is None else [(x, velocity)]
        if moves:
            self._apply(moves, points, velocities)
        self.last = tuple(moves.items())
        self._steps += 1
        return value.detach() if isinstance(value, Tensor) else value

    def reasons(self) -> tuple[str, ...]:
        """Why steps of the last call were shortened; empty if all were whole. Waits for the device."""
        return tuple(f"{name}: {reason}" for name, move in self.last for reason in move.reasons)

    def _move(self, name: str, member: Member, group: Mapping[str, Any]) -> tuple[Move, Tensor | None]:
        """The next step of a member, and its velocity after it."""
        x, ω = member.point.detach(), member.point.grad
        assert ω is not None
        if can_read(ω):  # on a GPU a bad gradient shows in the step
            self._flag.check({name: ω}, "the gradient")
        if group["momentum"] and _VELOCITY in self.state.get(member.point, {}):
            ω = group["momentum"] * self.state[member.point][_VELOCITY] + ω
        move = self.descent(member.family, x, ω, group["lr"], member.chart, self.boundary)
        return move, per_member(move.share, x) * ω if group["momentum"] else None

    def _apply(self, moves: dict[str, Move], points: list[Tensor], velocities: list[tuple[Tensor, Tensor]]) -> None:
        """Move all members, or none."""
        targets = {name: move.point for name, move in moves.items()}
        self._flag.check(targets, "the step")
        self._flag.send("the step", self._steps)
        copy_(points, list(targets.values()), gate=self._flag.value)
        for x, velocity in velocities:
            old = self.state[x].setdefault(_VELOCITY, torch.zeros_like(velocity))
            copy_([old], [velocity], gate=self._flag.value)
        for name, move in moves.items():  # on a GPU this would wait: there, only ``reasons`` tells
            if name not in self._warned and can_read(move.share) and bool(move.shortened.any()):
                self._warned.add(name)
                _log.warning("%s: %s (later ones: opt.reasons())", name, move.reasons[0])


def _check_numbers(group: Mapping[str, Any]) -> None:
    lr, momentum = group["lr"], group["momentum"]
    if not isinstance(lr, Tensor) and not (is_number(lr) and 0 <= lr < math.inf):
        raise ValueError(f"lr={lr!r} must be a finite number, at least 0: 1/λ of the proximal step")
    if not is_number(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r} must be at least 0 and below 1")

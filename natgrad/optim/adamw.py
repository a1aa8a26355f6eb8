"""AdamW for parameters that no metric suits (embeddings, gains, biases, heads), inside the same optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate import fused

Members: TypeAlias = Sequence[Sequence[tuple[str, Tensor]]]  # names and parameters of every group

_log = logging.getLogger("natgrad")
_BETAS, _EPSILON = (0.9, 0.95), 1e-8


@final
class AdamWUpdate:
    """One step of AdamW (Loshchilov and Hutter 2019), equal to that of ``torch.optim.AdamW``, by its fused kernel.

        m ← β₁m + (1 − β₁)ω,  s ← β₂s + (1 − β₂)ω²,  θ ← (1 − lr·wd)θ − lr·m̂/(√ŝ + ε)

    with m̂ = m/(1 − β₁ᵗ), ŝ = s/(1 − β₂ᵗ), β = (0.9, 0.95) and ε = 10⁻⁸. m, s and t lie in the state of every parameter
    under the names that torch gives them, t as a tensor on the device, so that the step can be captured. A parameter
    without a gradient is left alone.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], members: Members, state: MutableMapping[Tensor, Any]
    ) -> None:
        self._groups, self._members, self._state = groups, members, state

    def gradients(self, grads: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """The gradients of its parameters, in the order of the groups, and whether none is missing."""
        names = [name for pairs in self._members for name, _ in pairs]
        mine = {name: grads[name] for name in names if name in grads}
        return mine, len(mine) == len(names)

    def step(self, gradients: Mapping[str, Tensor], rates: Sequence[float | Tensor], gate: Tensor | None) -> None:
        """Move the parameters that have gradients, each group with its rate; nothing where the gate is closed."""
        for group, of_group, rate in zip(self._groups, self._members, rates, strict=True):
            moving = [(name, p) for name, p in of_group if name in gradients]
            if not moving:
                continue
            params = [p for _, p in moving]
            states = [self._state_of(p) for p in params]
            fused.adamw_(
                params,
                [gradients[name] for name, _ in moving],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                rate=rate,
                betas=_BETAS,
                epsilon=_EPSILON,
                weight_decay=group["weight_decay"],
                gate=gate,
            )

    def _state_of(self, p: Tensor) -> Any:
        begin_moments(self._state[p], p)
        return self._state[p]


def begin_moments(state: MutableMapping[str, Any], p: Tensor) -> None:
    """t = 0, m = 0 and s = 0 of a parameter that has none."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, requires_grad=False) for _ in range(2))

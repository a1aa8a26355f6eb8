"""The metric and the solver in a checkpoint: what a run needs to go on bit for bit, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from natgrad.operators.base import Inverse, Operator
from natgrad.optim.keeper import Keeper
from natgrad.solve import Solver


@final
@dataclass(frozen=True)
class Restored:
    """What was read from a checkpoint and checked; nothing has been changed by reading it."""

    step: int
    count: int
    average: Operator | None
    inverse: Inverse | None
    inverse_damping: float
    outdated: bool
    generator: Tensor
    times: tuple[int, int]  # the steps in which the metric was estimated and inverted

    def put(self, keeper: Keeper) -> None:
        """Give the keeper its part."""
        keeper.step, keeper.count, keeper.average = self.step, self.count, self.average
        keeper.estimated, keeper.inverted = self.times
        keeper.generator.set_state(self.generator)
        keeper.discard()


def export(keeper: Keeper, inverse: Inverse | None, inverse_damping: float, outdated: bool) -> dict[str, Any]:
    """Tensors and numbers only, so that ``torch.load(weights_only=True)`` reads them."""
    return {
        **_signature(keeper),
        "step": keeper.step,
        "count": keeper.count,
        "estimated": keeper.estimated,
        "inverted": keeper.inverted,
        "operator": {} if keeper.average is None else keeper.average.tensors(),
        "inverse": {} if inverse is None else inverse.tensors(),
        "inverse_damping": inverse_damping,
        "outdated": outdated,
        "generator": keeper.generator.get_state(),
    }


def restore(state: dict[str, Any], keeper: Keeper, solver: Solver) -> Restored:
    """Check that the state belongs to this model and structure, and build what it holds."""
    for what, mine in _signature(keeper).items():
        if state[what] != mine:
            raise ValueError(f"this is the state of another optimizer: its {what} is {state[what]}, here it is {mine}")
    device = keeper.model.example.device
    tensors = {name: t.to(device) for name, t in state["operator"].items()}
    warm = {name: t.to(device) for name, t in state["inverse"].items()}
    average = keeper.structure.restore(keeper.model, keeper.view.blocks, tensors) if tensors else None
    inverse: Inverse | None = _Warm(warm) if warm else None
    if average is not None:
        # An inverse may be older than the average: it is kept, where it has tensors, and made again where it has none.
        kept = average.inverse_from(warm) if warm else None
        inverse = kept or solver.init(average, state["inverse_damping"], warm)
    generator = state["generator"].cpu()
    numbers = (state["inverse_damping"], state["outdated"])
    times = (state["estimated"], state["inverted"])
    return Restored(state["step"], state["count"], average, inverse, *numbers, generator, times)


def _signature(keeper: Keeper) -> dict[str, Any]:
    return {
        "structure": type(keeper.structure.structure).__name__,
        "parameters": {name: list(p.shape) for name, p in keeper.model.params.items()},
    }


@final
class _Warm(Inverse):
    """Only what an iterative solver can start from, until the metric is estimated again."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def solve(self, ω: Tensor) -> Tensor:
        raise AssertionError("the metric is estimated before it is solved with")

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors

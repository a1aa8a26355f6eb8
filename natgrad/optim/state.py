"""The metric and the solver in a checkpoint: what a run needs to go on bit for bit, and whether it fits."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from natgrad.operators.base import Inverse, Operator
from natgrad.optim.described import metric_in_words, solver_in_words
from natgrad.optim.fitting import (
    ENTRIES,
    check_entries,
    check_finite,
    check_generator,
    check_guess,
    check_signature,
    inverse_of,
    operator_of,
)
from natgrad.optim.keeper import Keeper
from natgrad.solve import Solver

_log = logging.getLogger("natgrad")


@final
@dataclass(frozen=True)
class Restored:
    """What was read from a checkpoint and checked; nothing has been changed by reading it."""

    clock: Clock
    mass: tuple[float, int]  # the weight of what is in the average, and the examples of a usual step, 0 if unknown
    average: Operator | None
    solved: Solved
    stream: Stream
    wanted: frozenset[str]  # parameters that wait for the metric to see them

    def put(self, keeper: Keeper) -> None:
        """Give the keeper its part."""
        self.clock.put(keeper)
        keeper.average, keeper.wanted = self.average, self.wanted
        keeper.mass.total, keeper.mass.usual = self.mass
        self.stream.put(keeper)
        keeper.discard()


@final
@dataclass(frozen=True)
class Clock:
    """The steps so far, those whose estimates are in the average, and in which the metric was last ``estimated``."""

    step: int
    count: int
    estimated: int
    inverted: int

    def put(self, keeper: Keeper) -> None:
        """Go on from here."""
        keeper.step, keeper.count = self.step, self.count
        keeper.estimated, keeper.inverted = self.estimated, self.inverted


@final
@dataclass(frozen=True)
class Solved:
    """The inverse, its damping, and whether the metric has changed since."""

    inverse: Inverse | None
    damping: float
    outdated: bool


@final
@dataclass(frozen=True)
class Stream:
    """The random numbers of a sampled metric: the state of a generator, and of which process it was."""

    state: Tensor
    rank: int

    def put(self, keeper: Keeper) -> None:
        """Go on with these numbers; other processes, or another kind of device, go on with their own from here."""
        generator = keeper.generator
        if self.rank == keeper.world.rank and self.state.shape == generator.get_state().shape:
            generator.set_state(self.state)
            return
        digest = hashlib.sha256(bytes(self.state.tolist()) + keeper.world.rank.to_bytes(8, "big")).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "big") % 2**63)


def export(keeper: Keeper, solver: Solver, solved: Solved) -> dict[str, Any]:
    """Tensors, numbers and words only, so that ``torch.load(weights_only=True)`` reads them."""
    # One of several processes has seen a part of the examples: it says nothing of how many there were.
    usual = keeper.mass.usual if keeper.world.size == 1 else 0
    return {
        **_signature(keeper),
        "solver": solver_in_words(solver),
        "dtype": str(keeper.model.example.dtype),
        "step": keeper.step,
        "count": keeper.count,
        "mass": (keeper.mass.total, usual),
        "estimated": keeper.estimated,
        "inverted": keeper.inverted,
        "wanted": sorted(keeper.wanted),
        "operator": {} if keeper.average is None else keeper.average.tensors(),
        "inverse": {} if solved.inverse is None else solved.inverse.tensors(),
        "inverse_damping": solved.damping,
        "outdated": solved.outdated,
        "generator": keeper.generator.get_state(),
        "rank": keeper.world.rank,
    }


def restore(state: dict[str, Any], keeper: Keeper, solver: Solver) -> Restored:
    """Check that the state belongs to this model, structure and metric, whole, and build what it holds.

    The metric keeps the precision that it was saved in; where the model has another one than the model that was saved,
    it takes that of the metrics of this model. An inverse that another solver has made is not kept: the next step makes
    it anew. States of before metric and solver were saved are taken for those of this optimizer.
    """
    check_entries(state, ENTRIES, 'the "natgrad" entry of the state')
    check_signature("optimizer", state, _signature(keeper))
    for what, entry in (("the metric", "operator"), ("the inverse of the metric", "inverse")):
        check_finite(what, state[entry])
    check_guess(keeper.model.size, state["inverse"])
    check_generator(state["generator"], keeper.generator)
    example = keeper.model.example
    dtype = None if state["dtype"] == str(example.dtype) else torch.promote_types(example.dtype, torch.float32)

    def placed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Copies: the average and its inverse are changed in place.
        kinds = {name: dtype if t.is_floating_point() else None for name, t in tensors.items()}
        return {name: t.to(example.device, kinds[name], copy=True) for name, t in tensors.items()}

    tensors = placed(state["operator"])
    structure = keeper.structure.structure
    average = operator_of(structure, keeper.model, keeper.view.blocks, tensors) if tensors else None
    inverse = None if _solved_otherwise(state, solver) else _inverse(state, average, solver, placed(state["inverse"]))
    stream = Stream(state["generator"].cpu(), state["rank"])
    # A state of before there was a mass has as much as its number of estimates says.
    total, usual = state.get("mass", (0.0 if not state["count"] else 1 / keeper.structure.weight(state["count"]), 0))
    return Restored(
        clock=Clock(state["step"], state["count"], state["estimated"], state["inverted"]),
        mass=(total, usual),
        average=average,
        solved=Solved(inverse, state["inverse_damping"], state["outdated"]),
        stream=stream,
        wanted=frozenset(state.get("wanted", ())),
    )


def _inverse(
    state: Mapping[str, Any], average: Operator | None, solver: Solver, warm: dict[str, Tensor]
) -> Inverse | None:
    """An inverse may be older than the average: it is kept, where it has tensors, and made again where it has none."""
    if average is None:
        return _Warm(warm) if warm else None
    kept = inverse_of(average, warm) if warm else None
    return kept or solver.init(average, state["inverse_damping"], warm)


def _solved_otherwise(state: Mapping[str, Any], solver: Solver) -> bool:
    """Whether another solver has made the inverse in the state, which is said in the log."""
    mine = solver_in_words(solver)
    saved = state.get("solver", mine)
    if saved != mine:
        _log.info("the state was saved with the solver %s, here it is %s: the next step inverts anew", saved, mine)
    return bool(saved != mine)


def _signature(keeper: Keeper) -> dict[str, Any]:
    """What must be the same for a state to mean the same."""
    return {
        "metric": metric_in_words(keeper.metric),
        "structure": repr(keeper.structure.structure),
        "parameters": {name: list(p.shape) for name, p in keeper.model.params.items()},
        "layers": {b.title: "no rule" if b.rule is None else type(b.rule).__name__ for b in keeper.view.blocks},
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

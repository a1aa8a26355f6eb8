"""The plain step as a CUDA graph: what follows the gradient, recorded once and then replayed in one launch.

Most steps of K-FAC refresh neither the metric nor its inverse. What is left is a product of small matrices a layer, a
clip, the momentum and the change of the parameters: on a GPU the processor that starts these kernels takes longer than
the kernels. The learning rates are read from the device, so that a schedule may change them; anything else that
changes (another inverse, momentum or weight decay, parameters that were moved) is recorded anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from natgrad.accelerate.fused import copy_
from natgrad.accelerate.replay import capturing
from natgrad.geometry import Covector
from natgrad.optim.preconditioner import Solves
from natgrad.step.base import Step
from natgrad.structures.base import Inverse

if TYPE_CHECKING:
    from natgrad.optim.optimizer import NaturalGradient

_log = logging.getLogger("natgrad")
_ALIKE = 3  # steps that must have been alike before one is recorded


@final
@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    gradients: list[Tensor]  # where the recorded kernels read them
    rates: list[Tensor]
    found: Tensor | None  # the value of the flag
    step: Step
    inverse: Inverse  # held, so that no other can lie where it lay


@final
class Graphed:
    """Records a step that has come several times in the same form, and replays it.

    As ``Moves``, it is handed the optimizer that holds it, by itself or in the solves of a step.
    """

    def __init__(self, opt: NaturalGradient) -> None:
        device = opt.tracker.model.example.device
        self._device = device
        self._possible = device.type == "cuda" and opt.rule.capturable
        self._key: object = None
        self._alike = 0
        self._recording: _Recording | None = None
        self._rates: list[float] = []
        self._quick: object = None

    @property
    def recorded(self) -> bool:
        """Whether there is a step to replay, which reads the inverse that the optimizer holds."""
        return self._recording is not None

    def quick(self, opt: NaturalGradient, gradients: Sequence[Tensor | None]) -> Step | None:
        """Replay, where nothing has changed since the last replay; None where that must be looked into."""
        recording = self._recording
        if recording is None or recording.inverse is not opt.inverse or self._quick != self._state(opt):
            return None
        if any(g is None for g in gradients):
            return None
        return self._replay(opt, recording, [g for g in gradients if g is not None])

    def step(self, solve: Solves, ω: Covector) -> Step | None:
        """Replay the step for this gradient; None where it must be made kernel by kernel."""
        if not self._possible or solve.due or torch.cuda.is_current_stream_capturing():
            return None
        if solve.inverse is not solve.opt.inverse:  # one that remembers is copied in every step
            return None
        key = self._signature(solve, ω)
        if key != self._key or (self._recording is not None and self._recording.inverse is not solve.inverse):
            self._key, self._alike, self._recording = key, 0, None
        self._alike += 1
        if self._alike <= _ALIKE:
            return None
        if self._recording is None:
            self._recording = self._record(solve, ω)
        if self._recording is None:
            return None
        self._quick = self._state(solve.opt)
        return self._replay(solve.opt, self._recording, list(ω.values()))

    def forget(self) -> None:
        """The tensors that were recorded are no longer those of the optimizer."""
        self._key, self._recording = None, None

    def _replay(self, opt: NaturalGradient, recording: _Recording, gradients: list[Tensor]) -> Step:
        self._load(opt, recording, gradients)
        recording.graph.replay()
        opt.moves.flag.value = recording.found
        return recording.step

    def _state(self, opt: NaturalGradient) -> object:
        """What tells, in passing, that a recording still holds."""
        groups = [(group["momentum"], group["weight_decay"], group["damping"]) for group in opt.param_groups]
        return groups, [p.data_ptr() for p in opt.tracker.model.params.values()]

    def _load(self, opt: NaturalGradient, recording: _Recording, gradients: list[Tensor]) -> None:
        copy_(recording.gradients, gradients)
        rates = [float(group["lr"]) for group in opt.param_groups]
        if rates != self._rates:
            for rate, value in zip(recording.rates, rates, strict=True):
                rate.fill_(value)
            self._rates = rates

    def _signature(self, solve: Solves, ω: Covector) -> object:
        """What the recorded kernels depend on: numbers that are not read from the device, and where tensors lie."""
        groups = tuple((group["momentum"], group["weight_decay"]) for group in solve.opt.param_groups)
        state = solve.opt.state
        places = tuple(
            (p.data_ptr(), state[p]["momentum"].data_ptr() if "momentum" in state.get(p, {}) else 0)
            for p in solve.opt.tracker.model.params.values()
        )
        return groups, places, solve.damping, tuple(t.shape for t in ω.values())

    def _record(self, solve: Solves, ω: Covector) -> _Recording | None:
        assert solve.inverse is not None
        opt = solve.opt
        gradients = [torch.empty_like(t) for t in ω.values()]
        rates = [torch.zeros((), device=self._device) for _ in opt.param_groups]
        moves, self._rates = opt.moves, []
        moves.recorded = rates
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._device):
                step = opt.propose(solve, Covector(dict(zip(ω, gradients, strict=True))), None, None)
                moves.flag.look(step.numbers)
                moves.apply(opt, step, solve.left(step))
                found = moves.flag.value
        except RuntimeError as error:  # something in the step cannot be recorded: a structure, or a rule of the user
            _log.info("the step cannot be recorded as a CUDA graph (%s): it is made kernel by kernel", error)
            self._possible = False
            return None
        finally:
            moves.recorded = None
            moves.flag.value = None
        return _Recording(graph, gradients, rates, found, moves.kept(opt, step), solve.inverse)

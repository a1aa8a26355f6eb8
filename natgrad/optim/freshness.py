"""When a metric without a period is inverted again: its factors have moved since the last time, and there is time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low
from typing import Any, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import full_precision
from natgrad.accelerate.flags import Readback
from natgrad.accelerate.sketch import Sketch, signs
from natgrad.accelerate.stopwatch import Mark, Stopwatch
from natgrad.linalg import Damping, Relative, number_of
from natgrad.optim.distributed import World
from natgrad.structures.base import Operator
from natgrad.structures.refresh import Refresh

_EIGHTHS = 8  # an inverse grows older by an eighth of its age until its drift is measured again
READINGS = 4  # that are on their way at most: one a step
_LATER = READINGS  # steps after which the host reads a drift: a device that is not that far behind is not waited for


@final
class Freshness:
    """How far the metric has moved since its last inverse, and how long the next one must wait for.

    The drift is computed on the device and sent to the host, which reads it a fixed number of steps later: what is
    decided does not depend on the speed of the device. The first of several processes sends its numbers to the others,
    so that all of them decide alike. It is measured when the inverse is older by an eighth than at the last time, and
    not before it can matter: a step of a metric that changes every time costs nothing in between.

    ``schedule``: one without a period. With a budget b, inverses that take the time c are c/(b t) steps apart at least,
    where t is the time of the forward and backward pass after an inverse. Both times are the medians of the last three,
    so that an interruption is forgotten.
    """

    def __init__(self, schedule: Refresh, *, device: torch.device, world: World) -> None:
        self.schedule, self.world, self._device = schedule, world, device
        self.since = 0  # the step of the last inverse
        self.sketch: Tensor | None = None  # of the metric that was inverted
        self.drift = 0.0  # since then, as far as the host has read
        self.wait = 0.0  # steps from one inverse to the next, at least
        self.measured = 0  # the step in which the drift was last measured
        self._readings: Readback[int] = Readback()  # drift and wait, with the step
        self._watch = Stopwatch(device)
        self._start: Mark | None = None  # of the inverse that is being made
        self._inverse: tuple[Mark, Mark] | None = None  # start and end of the last one
        self._left: Mark | None = None  # the end of the step that it was made in
        self._passes: tuple[Mark, Mark] | None = None  # the forward and backward pass after that
        self._times: tuple[tuple[float, float], ...] = ()  # of inverses, and of the passes after them

    def enter(self, step: int) -> None:
        """A step begins, after its forward and backward pass: read what was sent long enough ago."""
        if self._left is not None:
            self._passes, self._left = (self._left, self._watch.mark()), None
        while self._readings and self._readings.first + _LATER <= step:
            (drift, wait), at = self._readings.take()
            if at > self.since:
                self.drift, self.wait = drift, wait

    def due(self, step: int, damping: Damping, inverted: Damping) -> bool:
        """Whether the metric is inverted again; ``inverted``: the damping of the last inverse."""
        if self.sketch is None or self.since == step:  # in this step, and now with another damping
            return True
        moved = max(self.drift, _moved(damping, inverted)) >= self.schedule.drift
        return moved and step - self.since >= self.wait

    def measure(self, G: Operator, step: int) -> None:
        """The metric has changed, and is not inverted in this step: send how far it has moved, if it is time to."""
        age = step - self.since
        if age + _LATER < self.wait or _EIGHTHS * (step - self.measured) < age:
            return
        self.measured = step
        now, wait = self._sketch(G), self._measured_wait()
        if self.sketch is None or now.values.shape != self.sketch.shape:  # there are new layers
            drift = torch.full((), math.inf, device=self._device)
        else:
            drift = now.drift(self.sketch).float().nan_to_num(nan=math.inf)
        self._readings.send(self.world.of_first(torch.stack([drift, torch.full_like(drift, wait)])), step)

    def begin(self) -> None:
        """The work on an inverse begins."""
        if self.schedule.budget is not None:
            self._start = self._watch.mark()

    def leave(self, step: int) -> None:
        """A step ends."""
        if self._inverse is not None and self.since == step:
            self._left = self._watch.mark()

    def inverted(self, G: Operator, step: int) -> None:
        """The inverse of G has been made, or could not be made and is not tried again before G has moved."""
        if self._start is not None:
            self._inverse, self._start = (self._start, self._watch.mark()), None
        self.since, self.measured, self.drift, self.sketch = step, step, 0.0, self._sketch(G).values

    def _sketch(self, G: Operator) -> Sketch:
        """Of the factors; of the metric itself where it has none that are averaged."""
        factors = G.averaged()
        with full_precision(self._device):
            if factors is not None:
                return Sketch.of(list(factors.values()))
            z = signs(G.layout.size, G.layout.dtype, self._device, columns=1)
            return Sketch.of([G.product(z.squeeze(1))])

    def _measured_wait(self) -> float:
        """From the times of the last inverses, as far as they are known."""
        if self._inverse is not None and self._passes is not None:
            inverse, passes = (self._watch.seconds(*marks) for marks in (self._inverse, self._passes))
            if inverse is not None and passes is not None:
                self._times = (*self._times[-2:], (inverse, passes))
                self._inverse = self._passes = None
        if not self._times or self.schedule.budget is None:
            return self.wait
        inverse, passes = (median_low(times) for times in zip(*self._times, strict=True))
        return inverse / (self.schedule.budget * passes) if passes > 0 else self.wait

    # Checkpoints.

    def blank(self, G: Operator) -> Tensor:
        """As large as the sketch of a metric like G."""
        return self._sketch(G).values

    def state(self) -> dict[str, Any] | None:
        """All that decides, but for the clock, None before the first inverse. The device is waited for."""
        if self.sketch is None:
            return None
        readings = [(at, drift, wait) for (drift, wait), at in self._readings.all()]
        numbers = {"since": self.since, "measured": self.measured, "drift": self.drift, "wait": self.wait}
        return numbers | {"sketch": self.sketch.clone(), "readings": readings}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a state; from None (of a run that had a period) the metric is inverted when it has changed."""
        self._readings.clear()
        self._start = self._inverse = self._left = self._passes = None
        self._times = ()
        if state is None:
            self.since, self.measured, self.drift, self.wait, self.sketch = 0, 0, 0.0, 0.0, None
            return
        self.since, self.measured, self.drift, self.wait = (state[n] for n in ("since", "measured", "drift", "wait"))
        self.sketch = state["sketch"].to(self._device, copy=True)
        for at, drift, wait in state["readings"]:
            self._readings.send(torch.tensor([drift, wait]), at)


def _moved(new: Damping, old: Damping) -> float:
    """By which part of it a damping has changed."""
    if new == old:
        return 0.0
    if isinstance(new, Relative) != isinstance(old, Relative):
        return math.inf
    λ, last = float(number_of(new)), float(number_of(old))
    return abs(λ - last) / last if last else math.inf

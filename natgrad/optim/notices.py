"""What an optimizer says of passes: why a metric is missing and, in the log and once, what its author hardly meant."""

from __future__ import annotations

import logging
from typing import final

from torch import Tensor

from natgrad.output import Fisher, OutputMetric

NOTHING_SEEN = (
    "the metric is due, and no forward pass with gradients was seen since the last step: call model(x) outside "
    "torch.no_grad(), or opt.refresh(x) where the forward pass is opaque. If it was called so, either the model is "
    "called compiled, and the optimizer was made with the plain one (give torch.compile(model) to the optimizer), or "
    "its hooks were removed (make a new optimizer)"
)
NEEDS_TARGET = "the metric is due and needs the targets: call opt.refresh(x, target) before opt.step()"
_log = logging.getLogger("natgrad")
_MODES = (
    "between two steps the metric saw a forward pass in evaluation mode beside one in training mode: call the model "
    "under torch.no_grad() to evaluate it, so that the metric is that of the training passes alone"
)
_TERMS = (
    "the outputs have %d terms an example (tokens, pixels, targets): Fisher(family, reduction='sum') is the metric of "
    "a loss that is a sum over them. For a loss that is their mean give Fisher(family, reduction='mean'), or the steps "
    "are too short"
)


@final
class Notices:
    """Remembers what was said.

    >>> notices = Notices()
    >>> notices.seen(0, True)
    >>> notices.seen(1, False)  # another step: no warning
    """

    def __init__(self) -> None:
        self._modes: set[bool] = set()  # of the passes of this step
        self._step = 0
        self._warned = False
        self._measured = False

    def seen(self, step: int, training: bool) -> None:
        """A pass whose metric is going to be averaged with those of the same step."""
        if step != self._step:
            self._step, self._modes = step, set()
        self._modes.add(training)
        if len(self._modes) == 2 and not self._warned:
            self._warned = True
            _log.warning(_MODES)

    def outputs(self, metric: OutputMetric, y: Tensor) -> None:
        """Outputs y [n *out], of which the first are looked at: how many terms an example they have."""
        if self._measured or not isinstance(metric, Fisher) or metric.reduction != "sum":
            return
        self._measured = True
        terms = metric.terms(y)
        if terms > 1:
            _log.info(_TERMS, terms)

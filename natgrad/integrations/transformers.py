"""transformers: optimizers that its Trainer makes from the model, and a callback that writes their numbers.

``Trainer(optimizer_cls_and_kwargs=(cls, kwargs))`` gives a class of torch's its groups of parameters; a *factory*, a
class whose instances are called with the model, it gives the model. ``ng.KFAC`` needs the model, and ``ng.Natural``
finds in it which parameters are embeddings and heads.
"""

from __future__ import annotations

from typing import Any, final

from torch import nn
from transformers import TrainerCallback

from natgrad.gradients import Natural
from natgrad.integrations.writers import Log, log_to
from natgrad.optim import KFAC


@final
class NaturalFactory:
    """``ng.Natural`` of the Trainer's model: ``optimizer_cls_and_kwargs=(NaturalFactory, {"lr": 3e-3})``.

    The keywords are those of ``ng.Natural``.
    """

    def __call__(self, model: nn.Module, **arguments: Any) -> Any:
        return Natural(model, **arguments)


@final
class KFACFactory:
    """``ng.KFAC`` of the Trainer's model and its own loss: ``optimizer_cls_and_kwargs=(KFACFactory, {"lr": 0.1})``.

    The keywords are those of ``ng.KFAC``, ``metric`` among them; by default it is the model, which computes its loss.
    """

    def __call__(self, model: nn.Module, **arguments: Any) -> Any:
        return KFAC(model, **{"metric": model, **arguments})


@final
class TrainerMetrics(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """``ng.log_to`` with a Trainer's optimizer: ``Trainer(callbacks=[TrainerMetrics(writer)])``."""

    def __init__(self, writer: Any, *, every: int = 50, layers: bool = False) -> None:
        self.writer, self.every, self.layers = writer, every, layers
        self._log: Log | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin."""
        self._log = log_to(kwargs["optimizer"], self.writer, every=self.every, layers=self.layers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what is left."""
        if self._log is not None:
            self._log.close()

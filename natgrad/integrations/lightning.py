"""Lightning: optimizers work as they are; a callback writes their numbers into the loggers of the trainer."""

from __future__ import annotations

from typing import Any, final

try:
    from lightning.pytorch import Callback  # type: ignore[import-not-found, unused-ignore]
except ModuleNotFoundError:
    from pytorch_lightning import Callback

from natgrad.integrations.writers import Log, log_to


@final
class LightningMetrics(Callback):  # type: ignore[misc, unused-ignore]
    """``ng.log_to`` for every optimizer and every logger of a trainer: ``Trainer(callbacks=[LightningMetrics()])``."""

    def __init__(self, every: int = 50, *, layers: bool = False) -> None:
        self.every, self.layers, self._logs = every, layers, list[Log]()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin."""
        natural = [opt for opt in trainer.optimizers if hasattr(opt, "metrics")]
        pairs = ((opt, logger) for opt in natural for logger in trainer.loggers)
        self._logs = [log_to(opt, logger, every=self.every, layers=self.layers) for opt, logger in pairs]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what is left."""
        for log in self._logs:
            log.close()

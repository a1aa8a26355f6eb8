"""What a check beside an optimizer is told."""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from natgrad.errors import LossMismatchError

_log = logging.getLogger("natgrad")


class Watcher(ABC):  # noqa: B024 - a watcher writes what it wants to be told
    """The base class of checks beside an optimizer, which say once what they find.

    An error that a watcher raises refuses the step.

    Args:
        strict: Make an error of a warning.
        silent: Say nothing: one of several processes speaks for all.
    """

    def __init__(self, *, strict: bool = False, silent: bool = False) -> None:
        self.strict, self.silent = strict, silent
        self._said: set[str] = set()

    def outputs(self, raw: Any, tensors: Sequence[Tensor], params: Mapping[str, Tensor]) -> None:  # noqa: B027
        """A pass that is estimated has returned ``raw``, and in it these outputs of the parameters."""

    def hidden(self) -> None:  # noqa: B027
        """A pass that is estimated shows nothing of what comes back to it: it is compiled."""

    def paused(self) -> AbstractContextManager[None]:
        """Backward passes inside are those of the library, which start at the outputs, too."""
        return nullcontext()

    def two_targets(self) -> None:  # noqa: B027
        """The given loss was called with two targets that train, and the metric depends on them."""

    def gradients(self, grads: Mapping[str, Tensor], *, whole: bool, due: bool) -> None:  # noqa: B027
        """A step begins. ``whole``: every parameter has a gradient. ``due``: the metric is estimated for this step."""

    def step_ended(self) -> None:  # noqa: B027
        """The step was made, or refused."""

    def note(self, message: str) -> None:
        """Say what needs no action, once."""
        if message not in self._said and not self.silent:
            _log.info(message)
        self._said.add(message)

    def warn(self, message: str) -> None:
        """Say what is wrong, once, or raise it."""
        if self.strict:
            raise LossMismatchError(message)
        if message not in self._said and not self.silent:
            _log.warning(message)
        self._said.add(message)

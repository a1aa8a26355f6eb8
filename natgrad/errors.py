"""The errors natgrad raises, and its warning. A message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from torch import Tensor


class NatgradError(Exception):
    """The base class of errors about mathematics or data.

    Wrong calls raise ``TypeError`` or ``ValueError``.
    """


class NatgradWarning(UserWarning):
    """Something that a user should do or know of, though the computation goes on.

    ``warnings.filterwarnings("error", category=ng.errors.NatgradWarning)`` makes an error of it. What needs no action
    goes to the log named "natgrad" alone.
    """


class SingularMetricError(NatgradError):
    """A metric that must be inverted has no inverse (or is not positive)."""


class FactorisationError(NatgradError):
    """A factorisation did not converge. An optimizer keeps the last good inverse and warns once."""


class LossMismatchError(NatgradError):
    """The loop trains something else than the metric was made for, and checks are strict.

    Without ``strict=True`` it is a warning.
    """


class UncoveredError(NatgradError):
    """Parameters have no layer rule where one is required.

    That is with ``strict=True``, or where a structure needs rules.
    """


class NonFiniteError(NatgradError):
    """NaN or infinity in a gradient, factor or loss. Parameters and state are unchanged."""


class MemoryBoundError(NatgradError):
    """A result would exceed the memory bound. Raised before anything is allocated."""


class IncompatibleError(NatgradError, TypeError):
    """Two slots that cannot work together, for example ``Cholesky`` of an ``Implicit`` operator."""


class BatchStatisticsError(NatgradError):
    """A module mixes examples or is random, so that the outputs have no per-example Jacobian."""


class NoDerivativeError(NatgradError, TypeError):
    """``natgrad.pde`` cannot propagate input derivatives through an operation of the model."""


class DomainError(NatgradError, ValueError):
    """A point lies outside a domain; the message names the entry and its bound."""


class UnsolvedError(NatgradError):
    """The solver for natural parameters did not converge.

    Args:
        message: What did not converge.
        solved: For which members it did [*batch], booleans.
    """

    def __init__(self, message: str, solved: Tensor) -> None:
        super().__init__(message)
        self.solved = solved


class GuaranteeError(NatgradError):
    """A step decreased the objective by less than guaranteed: the constant is too small."""

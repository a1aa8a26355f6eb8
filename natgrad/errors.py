"""The errors natgrad raises. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from torch import Tensor


class NatgradError(Exception):
    """Base of the errors that are about mathematics or data, not about a wrong call."""


class SingularMetricError(NatgradError):
    """A metric that must be inverted has no inverse (or is not positive)."""


class FactorisationError(NatgradError):
    """A factorisation did not converge. An optimizer goes on with the last good inverse and says so once."""


class UncoveredError(NatgradError):
    """Parameters that no layer rule covers, where the user asked to be told."""


class NonFiniteError(NatgradError):
    """NaN or infinity where a number is needed. Parameters and state are as they were before."""


class MemoryBoundError(NatgradError):
    """Something would not fit into the memory bound. Raised before anything is allocated."""


class IncompatibleError(NatgradError, TypeError):
    """Two slots that cannot work together, for example ``Cholesky`` of an ``Implicit`` operator."""


class BatchStatisticsError(NatgradError):
    """A module mixes examples or is random, so that the outputs have no per-example Jacobian."""


class DomainError(NatgradError, ValueError):
    """A point lies outside the domain of a convex function: the message names the entry and the bound."""


class UnsolvedError(NatgradError):
    """Newton's method found no natural parameters; ``solved`` [*batch] marks the members for which it did."""

    def __init__(self, message: str, solved: Tensor) -> None:
        super().__init__(message)
        self.solved = solved


class GuaranteeError(NatgradError):
    """A step fell short of the decrease that it was promised: a constant of smoothness is too small."""

"""The errors natgrad raises. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from torch import Tensor


class NatgradError(Exception):
    """Base class of errors about mathematics or data (wrong calls raise ``TypeError`` or ``ValueError``)."""


class SingularMetricError(NatgradError):
    """A metric that must be inverted has no inverse (or is not positive)."""


class FactorisationError(NatgradError):
    """A factorisation did not converge. An optimizer keeps the last good inverse and warns once."""


class LossMismatchError(NatgradError):
    """What the loop trains is not what the metric was made for, with ``strict=True``; else it is a warning."""


class UncoveredError(NatgradError):
    """Parameters without a layer rule, with ``strict=True`` or where a rule is required."""


class NonFiniteError(NatgradError):
    """NaN or infinity in a gradient, factor or loss. Parameters and state are unchanged."""


class MemoryBoundError(NatgradError):
    """A result would exceed the memory bound. Raised before anything is allocated."""


class IncompatibleError(NatgradError, TypeError):
    """Two slots that cannot work together, for example ``Cholesky`` of an ``Implicit`` operator."""


class BatchStatisticsError(NatgradError):
    """A module mixes examples or is random, so that the outputs have no per-example Jacobian."""


class NoDerivativeError(NatgradError, TypeError):
    """An operation of a model through which no derivative by the inputs can be propagated (``natgrad.pde``)."""


class DomainError(NatgradError, ValueError):
    """A point lies outside a domain; the message names the entry and its bound."""


class UnsolvedError(NatgradError):
    """The solver for natural parameters did not converge; ``solved`` [*batch] marks the members for which it did."""

    def __init__(self, message: str, solved: Tensor) -> None:
        super().__init__(message)
        self.solved = solved


class GuaranteeError(NatgradError):
    """A step decreased the objective by less than guaranteed: the smoothness constant is too small."""

"""Shapes that do not fit each other: which, whose, and what would fit."""

from __future__ import annotations

import torch
from torch import Tensor


def check_alike(name: str, axes: int, eta: Tensor, other: Tensor, what: str) -> None:
    """Refuse a second point [*batch p] whose batch does not broadcast, or whose entries are others.

    >>> check_alike("Gamma", 1, torch.zeros(3, 2), torch.zeros(2), "eta2")
    """
    mine, theirs = eta.shape[: eta.ndim - axes], other.shape[: other.ndim - axes]
    try:
        torch.broadcast_shapes(mine, theirs)
    except RuntimeError:
        raise ValueError(
            f"eta of {name} has the batch {tuple(mine)} and {what} has {tuple(theirs)}, which do not broadcast: give "
            "them the same batch, or 1 where one is shared"
        ) from None
    if axes and eta.shape[-1] != other.shape[-1]:
        raise ValueError(
            f"eta of {name} has {eta.shape[-1]} entries on the last axis and {what} has {other.shape[-1]}: they must "
            "be of one size"
        )


def check_event(name: str, event: tuple[int, ...], x: Tensor) -> None:
    """Refuse data whose trailing axes are not those of one datum."""
    if tuple(x.shape[max(0, x.ndim - len(event)) :]) != event:
        raise ValueError(
            f"the data of {name} must have the shape [*batch, {', '.join(map(str, event))}], as the parameters say, "
            f"got shape {tuple(x.shape)}"
        )


def check_event_axes(name: str, axes: int, x: Tensor) -> None:
    """Refuse data with fewer axes than one datum has."""
    if x.ndim < axes:
        raise ValueError(f"a datum of {name} has {axes} axes: data must be [*batch *event], got shape {tuple(x.shape)}")


def broadcast(name: str, vector: Tensor, other: Tensor, axes: int) -> tuple[Tensor, Tensor]:
    """A vector [*batch d] and another, or with two axes a matrix [*batch d d], of one batch; else refused.

    >>> [tuple(part.shape) for part in broadcast("FullGaussian", torch.zeros(4, 2), torch.eye(2), 2)]
    [(4, 2), (4, 2, 2)]
    """
    fits = vector.ndim > 0 and tuple(other.shape[max(0, other.ndim - axes) :]) == (vector.shape[-1],) * axes
    try:
        batch = torch.broadcast_shapes(vector.shape[:-1], other.shape[: other.ndim - axes]) if fits else None
    except RuntimeError:
        batch = None
    if batch is None:
        raise ValueError(
            f"{name} needs a vector [*batch d] and {'a matrix [*batch d d]' if axes == 2 else 'another [*batch d]'} "
            f"whose batches broadcast, got shapes {tuple(vector.shape)} and {tuple(other.shape)}"
        )
    return vector.expand(*batch, -1), other.expand(*batch, *[-1] * axes)


def check_vector(m: Tensor, what: str) -> None:
    """Refuse what is not one vector of floating-point numbers."""
    if m.ndim != 1 or not m.is_floating_point():
        raise ValueError(
            f"{what} must be one vector [d] of floating-point numbers, got {m.dtype} of shape {tuple(m.shape)}"
        )

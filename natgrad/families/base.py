"""Output families: what a model's outputs say about the distribution of the targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

# Shapes that do not fit each other: which, whose, and what would fit.


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


# Draws from ``torch.distributions`` with a generator of one's own.


@contextmanager
def seeded(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Inside, the global streams start where ``generator`` stands, which moves on; afterwards they are as they were.

    torch.distributions draw from the global stream only. Nothing is seeded on other devices, which torch.manual_seed
    would do. Without a generator the global stream itself is used.
    """
    if generator is None:
        yield
        return
    seed = _seed(generator)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def _seed(generator: torch.Generator) -> int:
    """A number from where the generator stands, which moves on. None is drawn and read, for which a GPU would wait."""
    stands = bytes(generator.get_state().tolist())
    torch.rand((), generator=generator, device=generator.device)
    return int.from_bytes(blake2b(stands, digest_size=7).digest(), "little")


class Family(ABC):
    """p(t | y) for outputs y [n *out]; several independent terms an example (pixels, tokens) multiply.

    The Fisher metric in the chart y is F = E[∇log p ∇log pᵀ], targets drawn from the model (002 (8), 004 (19)).
    """

    @property
    def needs_target(self) -> bool:
        """Whether the target of a batch says something about its outputs that they do not say, as a mask does."""
        return False

    def given(self, target: Any) -> Family:
        """The family of the outputs of a batch with this target."""
        return self

    @abstractmethod
    def check(self, y: Tensor) -> None:
        """Raise if the shape of the outputs does not fit the family."""

    @abstractmethod
    def terms(self, y: Tensor) -> int:
        """The number of independent distributions an example has."""

    @abstractmethod
    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        """F_y u [n *out]."""

    @abstractmethod
    def root(self, y: Tensor) -> Tensor:
        """s [k n *out] with Σ_k s sᵀ = F, exactly."""

    @abstractmethod
    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """∇_y log p(t | y) [k n *out] at targets t drawn from the model itself; their mean is 0, their covariance F."""

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor | None:
        """Σ_d ε_kd s_d [k n *out] over the columns of the root, ε ~ N(0, 1) the same for all n, if it needs no root."""
        return None

    @abstractmethod
    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        """KL(p_y ‖ p_y2) [n], in nats, summed over the terms."""


def check_terms(family: Family, y: Tensor, smallest: int, meaning: str) -> None:
    """Refuse outputs whose last axis cannot hold the parameters of one term."""
    if y.ndim < 2 or y.shape[-1] < smallest:
        raise ValueError(
            f"{type(family).__name__} needs {meaning} on the last axis, outputs [n … {smallest} or more], "
            f"got outputs of shape {tuple(y.shape)}"
        )


def drawn_once(y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """ε [k 1 *out], standard normal: a number for every column of a root with as many columns as outputs."""
    return torch.randn(samples, 1, *y.shape[1:], generator=generator, dtype=y.dtype, device=y.device)


def diagonal_root(y: Tensor, information: Tensor) -> Tensor:
    """Columns of √F for a diagonal F [n *out]: column d is output d of every example."""
    d = y[0].numel()
    columns = torch.zeros(d, y.shape[0], d, dtype=y.dtype, device=y.device)
    each = torch.arange(d, device=y.device)
    columns[each, :, each] = information.sqrt().reshape(-1, d).T
    return columns.view(d, *y.shape)


def by_terms(columns: Tensor) -> Tensor:
    """Columns [k n *terms c] that act on all terms at once → [(terms k) n *terms c], one term a column.

    Terms are independent, so h has no entries between them: a column may touch one term only.
    """
    k, n, *terms, c = columns.shape
    flat = columns.reshape(k, n, -1, c)
    t = flat.shape[2]
    if t == 1:
        return columns
    alone = torch.diag_embed(flat.permute(0, 1, 3, 2))  # [k n c t t']
    return alone.permute(3, 0, 1, 4, 2).reshape(t * k, n, *terms, c)


def over_terms(values: Tensor) -> Tensor:
    """Sum [n *terms] over the terms of each example."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values

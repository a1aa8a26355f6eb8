"""A product of exponential families, side by side: again an exponential family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.base import ExponentialFamily, expect
from natgrad.families.domains import DomainProduct
from natgrad.families.information import Information


@final
class ProductDistribution(D.Distribution):
    """Independent distributions with one batch shape; a draw is the concatenation of their flattened draws."""

    arg_constraints: Any = {}  # noqa: RUF012 (torch's convention)
    support: ClassVar[C.Constraint] = C.real_vector

    def __init__(self, blocks: Sequence[D.Distribution]) -> None:
        self.blocks = tuple(blocks)
        self.sizes: list[int] = [block.event_shape.numel() for block in self.blocks]
        super().__init__(self.blocks[0].batch_shape, torch.Size([sum(self.sizes)]), validate_args=False)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return all(block.has_rsample for block in self.blocks)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's signature)
        return self._flat([block.rsample(sample_shape) for block in self.blocks])

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's signature)
        return self._flat([block.sample(sample_shape) for block in self.blocks])

    def log_prob(self, value: Tensor) -> Tensor:
        pairs = zip(self.blocks, value.split(self.sizes, -1), strict=True)
        each = [block.log_prob(x.reshape((*x.shape[:-1], *block.event_shape))) for block, x in pairs]
        return torch.stack(torch.broadcast_tensors(*each)).sum(0)

    def _flat(self, draws: list[Tensor]) -> Tensor:
        pairs = zip(draws, self.blocks, strict=True)
        return torch.cat([x.reshape(*x.shape[: x.ndim - len(b.event_shape)], -1) for x, b in pairs], -1)


@final
@dataclass(frozen=True)
class Product(ExponentialFamily):
    """Independent blocks, each of its own exponential family, as one family.

    Args:
        families: The families of the blocks.
        sizes: The number of entries that the points of each block take on the last axis.

    Method:
        Π_b p_b(x_b | η_b), with the points of the blocks concatenated on the last axis.

        log Z, entropy and KL add up, and F is block-diagonal. A one-parameter family with size k stands for k
        independent copies. Data are the flattened data of the blocks, concatenated.

    Example:
        >>> from natgrad.families import Exponential, Gamma
        >>> Product((Gamma(), Exponential()), (2, 1)).mean(torch.tensor([0.0, -2.0, -4.0]))
        tensor([-1.2704,  0.5000,  0.2500])
    """

    families: tuple[ExponentialFamily, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.families) != len(self.sizes) or not self.families or min(self.sizes) < 1:
            raise ValueError(
                f"Product needs a size ≥ 1 for every family, got {len(self.families)} families and sizes {self.sizes}"
            )

    @property
    def natural_domain(self) -> DomainProduct:
        return DomainProduct(tuple(family.natural_domain for family in self.families), self.sizes)

    @property
    def mean_domain(self) -> DomainProduct:
        return DomainProduct(tuple(family.mean_domain for family in self.families), self.sizes)

    @property
    def support(self) -> C.Constraint:
        """All vectors: ``check_data`` checks the blocks one by one."""
        return C.real_vector

    def check_data(self, x: Tensor) -> None:
        for family, block in self._data(x):
            family.check_data(block)

    def statistics(self, x: Tensor) -> Tensor:
        return torch.cat([family.statistics(block) for family, block in self._data(x)], -1)

    def log_base(self, x: Tensor) -> Tensor:
        return _sum([family.log_base(block) for family, block in self._data(x)], x.ndim - 1)

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (sum(prod(event) for event in self._events()),)

    def _distribution(self, eta: Tensor) -> D.Distribution:
        blocks = self._blocks(eta)
        each = [(family, family.distribution(block)) for family, block in blocks]
        return ProductDistribution([D.Independent(d, 1) if family.axes == 0 else d for family, d in each])

    def sample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        blocks = self._blocks(self._inside(eta, self.natural_domain, "eta"))
        return self._flat([family.sample(block, shape, generator) for family, block in blocks])

    def rsample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        blocks = self._blocks(self._inside(eta, self.natural_domain, "eta"))
        return self._flat([family.rsample(block, shape, generator) for family, block in blocks])

    def from_distribution(self, d: D.Distribution) -> Tensor:
        blocks = expect(self, d, ProductDistribution).blocks
        bases = [b.base_dist if isinstance(b, D.Independent) else b for b in blocks]
        return torch.cat([f.from_distribution(b) for f, b in zip(self.families, bases, strict=True)], -1)

    def _wrong_size(self, p: int) -> str:
        if p != sum(self.sizes):
            return f"the points of its blocks, {' + '.join(map(str, self.sizes))} entries,"
        return "".join(f._wrong_size(size) for f, size in zip(self.families, self.sizes, strict=True) if f.axes)

    def _log_partition(self, eta: Tensor) -> Tensor:
        return _sum([family._log_partition(block) for family, block in self._blocks(eta)], eta.ndim - 1)

    def _mean(self, eta: Tensor) -> Tensor:
        return torch.cat([family._mean(block) for family, block in self._blocks(eta)], -1)

    def _natural(self, xi: Tensor) -> Tensor:
        return torch.cat([family._natural(block) for family, block in self._blocks(xi)], -1)

    def _fisher(self, eta: Tensor) -> Information:
        blocks = [family._fisher(block) for family, block in self._blocks(eta)]

        def flat(v: Tensor) -> Tensor:
            return torch.cat([F.flat(x) for F, x in zip(blocks, v.split(self.sizes, -1), strict=True)], -1)

        def sharp(w: Tensor) -> Tensor:
            return torch.cat([F.sharp(x) for F, x in zip(blocks, w.split(self.sizes, -1), strict=True)], -1)

        return Information(eta, 1, flat, sharp, divides=any(F.divides for F in blocks))

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return _sum([family._expected_log_base(block) for family, block in self._blocks(eta)], eta.ndim - 1)

    def _blocks(self, point: Tensor) -> list[tuple[ExponentialFamily, Tensor]]:
        return list(zip(self.families, point.split(self.sizes, -1), strict=True))

    def _events(self) -> list[tuple[int, ...]]:
        pairs = zip(self.families, self.sizes, strict=True)
        return [family.event_shape(size) if family.axes else (size,) for family, size in pairs]

    def _flat(self, draws: list[Tensor]) -> Tensor:
        """Draws [*batch *event] of the blocks → [*batch e]."""
        pairs = zip(draws, self._events(), strict=True)
        return torch.cat([x.reshape(*x.shape[: x.ndim - len(event)], prod(event)) for x, event in pairs], -1)

    def _data(self, x: Tensor) -> list[tuple[ExponentialFamily, Tensor]]:
        events = self._events()
        sizes = [prod(event) for event in events]
        if x.ndim == 0 or x.shape[-1] != sum(sizes):
            raise ValueError(
                f"the data of Product must have {' + '.join(map(str, sizes))} entries on the last axis, those of its "
                f"blocks side by side, got shape {tuple(x.shape)}"
            )
        blocks = [b.reshape((*x.shape[:-1], *event)) for b, event in zip(x.split(sizes, -1), events, strict=True)]
        return list(zip(self.families, blocks, strict=True))


def _sum(values: list[Tensor], batch: int) -> Tensor:
    """The sum over the blocks, whose values are [*batch], or [*batch k] for k copies of a one-parameter family."""
    return torch.stack([v if v.ndim == batch else v.sum(-1) for v in values]).sum(0)

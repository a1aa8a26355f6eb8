"""Independent blocks side by side: a product of exponential families is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C

from natgrad.families.domains import Domain, Parts
from natgrad.families.exponential import ExponentialFamily, expect
from natgrad.families.information import Blocks, Diagonal, Information, Scalar


@final
class ProductDistribution(D.Distribution):
    """Independent distributions with one batch shape: a draw is their flattened draws side by side."""

    arg_constraints: Any = {}  # noqa: RUF012 (torch's own way)
    support = C.real_vector

    def __init__(self, blocks: Sequence[D.Distribution]) -> None:
        self.blocks = tuple(blocks)
        self.sizes = [block.event_shape.numel() for block in self.blocks]
        super().__init__(self.blocks[0].batch_shape, torch.Size([sum(self.sizes)]), validate_args=False)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return all(block.has_rsample for block in self.blocks)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        return self._flat([block.rsample(sample_shape) for block in self.blocks])

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        return self._flat([block.sample(sample_shape) for block in self.blocks])

    def log_prob(self, value: Tensor) -> Tensor:
        parts = value.split(self.sizes, -1)
        found = [
            block.log_prob(part.reshape((*part.shape[:-1], *block.event_shape)))
            for block, part in zip(self.blocks, parts, strict=True)
        ]
        return torch.stack(torch.broadcast_tensors(*found)).sum(0)

    def _flat(self, draws: list[Tensor]) -> Tensor:
        pairs = zip(draws, self.blocks, strict=True)
        return torch.cat([x.reshape(*x.shape[: x.ndim - len(b.event_shape)], -1) for x, b in pairs], -1)


@final
@dataclass(frozen=True)
class Product(ExponentialFamily):
    """Π_b p_b(x_b | η_b): the points of the blocks, ``sizes`` entries each, side by side on the last axis.

    log Z, entropy and KL add up, and F is block-diagonal. A one-parameter family with size k is k independent ones.
    Data are the flattened data of the blocks side by side.

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
    def natural_domain(self) -> Domain:
        return Parts(tuple(family.natural_domain for family in self.families), self.sizes)

    @property
    def mean_domain(self) -> Domain:
        return Parts(tuple(family.mean_domain for family in self.families), self.sizes)

    @property
    def support(self) -> C.Constraint:
        """Of the blocks side by side, every one of which ``check_data`` looks at by itself."""
        return C.real_vector

    def check_data(self, x: Tensor) -> None:
        for family, part in self._data(x):
            family.check_data(part)

    def statistics(self, x: Tensor) -> Tensor:
        return torch.cat([family.statistics(part) for family, part in self._data(x)], -1)

    def log_base(self, x: Tensor) -> Tensor:
        return _added([family.log_base(part) for family, part in self._data(x)], x.ndim - 1)

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (sum(prod(event) for event in self._events()),)

    def distribution(self, eta: Tensor) -> D.Distribution:
        blocks = [
            family.distribution(part) for family, part in self._parts(self._inside(eta, self.natural_domain, "eta"))
        ]
        paired = zip(blocks, self.families, strict=True)
        return ProductDistribution([D.Independent(b, 1) if f.axes == 0 else b for b, f in paired])

    def sample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        parts = self._parts(self._inside(eta, self.natural_domain, "eta"))
        return self._flat([family.sample(part, shape, generator) for family, part in parts])

    def rsample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        parts = self._parts(self._inside(eta, self.natural_domain, "eta"))
        return self._flat([family.rsample(part, shape, generator) for family, part in parts])

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, ProductDistribution)
        assert isinstance(d, ProductDistribution)
        bases = [b.base_dist if isinstance(b, D.Independent) else b for b in d.blocks]
        return torch.cat([f.from_distribution(b) for f, b in zip(self.families, bases, strict=True)], -1)

    def _width(self, p: int) -> str:
        if p != sum(self.sizes):
            return f"the points of its blocks, {' + '.join(map(str, self.sizes))} entries,"
        wrong = [f._width(size) for f, size in zip(self.families, self.sizes, strict=True) if f.axes]
        return "".join(wrong)

    def _log_partition(self, eta: Tensor) -> Tensor:
        return _added([family._log_partition(part) for family, part in self._parts(eta)], eta.ndim - 1)

    def _mean(self, eta: Tensor) -> Tensor:
        return torch.cat([family._mean(part) for family, part in self._parts(eta)], -1)

    def _natural(self, xi: Tensor) -> Tensor:
        return torch.cat([family._natural(part) for family, part in self._parts(xi)], -1)

    def _fisher(self, eta: Tensor) -> Information:
        found = [family._fisher(part) for family, part in self._parts(eta)]
        return Blocks(tuple(Diagonal(F.variance) if isinstance(F, Scalar) else F for F in found), self.sizes)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return _added([family._expected_log_base(part) for family, part in self._parts(eta)], eta.ndim - 1)

    def _parts(self, point: Tensor) -> list[tuple[ExponentialFamily, Tensor]]:
        return list(zip(self.families, point.split(self.sizes, -1), strict=True))

    def _events(self) -> list[tuple[int, ...]]:
        pairs = zip(self.families, self.sizes, strict=True)
        return [family.event_shape(size) if family.axes else (size,) for family, size in pairs]

    def _flat(self, draws: list[Tensor]) -> Tensor:
        """Draws [*batch *event] of the blocks → [*batch e]."""
        pairs = zip(draws, self._events(), strict=True)
        return torch.cat([x.reshape(*x.shape[: x.ndim - len(event)], -1) for x, event in pairs], -1)

    def _data(self, x: Tensor) -> list[tuple[ExponentialFamily, Tensor]]:
        events = self._events()
        sizes = [prod(event) for event in events]
        if x.ndim == 0 or x.shape[-1] != sum(sizes):
            raise ValueError(
                f"the data of Product must have {' + '.join(map(str, sizes))} entries on the last axis, those of its "
                f"blocks side by side, got shape {tuple(x.shape)}"
            )
        parts = [part.reshape((*x.shape[:-1], *event)) for part, event in zip(x.split(sizes, -1), events, strict=True)]
        return list(zip(self.families, parts, strict=True))


def _added(values: list[Tensor], batch: int) -> Tensor:
    """The sum of the values of the blocks [*batch], those of k one-parameter families [*batch k] among them."""
    return torch.stack([v if v.ndim == batch else v.sum(-1) for v in values]).sum(0)

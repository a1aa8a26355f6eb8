"""The rules of normalisations: their scale γ and shift β are one layer, z = γ x̂ + β, entry by entry.

Every entry is a group c of its own with one output and the two inputs (x̂, 1): the gradient of example n is
Σ_r g (x̂, 1). The second moments are sums over positions; no a [n r c 2] is formed for them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from natgrad.accelerate.moments import column_moments, column_squares, rows, single
from natgrad.errors import BatchStatisticsError
from natgrad.rules.base import Call, Keys, Moment, Rule, plain

_NAMES = ("weight", "bias")
_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class NormRule(Rule):
    """γ and β, packed as W [c 1 i] with i the two of them, or one where the other is frozen."""

    @property
    def pure(self) -> bool:
        return True

    @abstractmethod
    def normal(self, module: nn.Module, call: Call) -> Tensor:
        """x̂ [n r c]."""

    def normalised_entries(self, module: nn.Module, keys: Keys, call: Call) -> Tensor | None:
        return self.normal(module, call) if "weight" in keys else None

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        return _homogeneous(self.normal(module, call), keys)

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        return cast(Tensor, module.weight).numel(), 1, len(keys)

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return torch.cat(list(self.columns(module, block).values()), dim=-1)

    def columns(self, module: nn.Module, block: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: block[key].reshape(-1, 1, 1) for key in _NAMES if key in block}

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        shape = cast(Tensor, module.weight).shape
        present = [key for key in _NAMES if key in keys]
        return {key: packed[..., 0, at].unflatten(-1, shape) for at, key in enumerate(present)}


class TrailingNormRule(NormRule):
    """x̂ has the mean and the variance of an example's trailing axes: x [n *r *shape], c = numel(shape)."""

    @abstractmethod
    def normalised(self, module: nn.Module, x: Tensor) -> Tensor:
        """x̂, without γ and β."""

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        return len(shape) - cast(Tensor, module.weight).ndim

    def normal(self, module: nn.Module, call: Call) -> Tensor:
        return self.normalised(module, self._positions(module, single(call.x))).flatten(2)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        parts = self._positions(module, g.flatten(0, 1))
        return parts.reshape(*g.shape[:2], parts.shape[1], -1, 1)

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        x = rows(single(self._apart(module, call.x)), cast(Tensor, module.weight).ndim)
        if "weight" not in keys:
            return Moment(x.new_full((x[0].numel(), 1, 1), x.shape[0]), x.shape[0])
        a = self.normalised(module, x).flatten(1)
        return Moment(_second(*column_moments(a), x.shape[0], keys), x.shape[0])

    def input_mean(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        x = self._positions(module, single(call.x))
        return _homogeneous(self.normalised(module, x).mean(1).flatten(1), keys)

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return column_squares(rows(single(g), cast(Tensor, module.weight).ndim).flatten(1)).view(-1, 1, 1)

    def _positions(self, module: nn.Module, x: Tensor) -> Tensor:
        """x [n r *shape]."""
        lead = self.leading(module, x.shape)
        return self._apart(module, x).reshape(x.shape[0], math.prod(x.shape[1:lead]), *x.shape[lead:])

    def _apart(self, module: nn.Module, x: Tensor) -> Tensor:
        """x, which must have an axis of examples."""
        if self.leading(module, x.shape) == 0:
            raise BatchStatisticsError(
                f"{module} normalises over the axis of the examples, x {list(x.shape)}: the outputs of one depend on "
                "the others, and there is no per-example Jacobian. Give it the trailing axes of an example only"
            )
        return x


@final
class LayerNormRule(TrailingNormRule):
    """z = γ (x − μ)/√(σ² + ε) + β over the axes ``normalized_shape``.

    Shapes: input [n *r *shape] gives a [n r c 2], output cotangents [k n *r *shape] give g [k n r c 1].
    """

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.LayerNorm, *_NAMES) and cast(nn.LayerNorm, module).elementwise_affine

    def normalised(self, module: nn.Module, x: Tensor) -> Tensor:
        layer = cast(nn.LayerNorm, module)
        return F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)


@final
class RMSNormRule(TrailingNormRule):
    """z = γ x/√(mean x² + ε) over the axes ``normalized_shape``; there is no shift."""

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.RMSNorm, "weight") and cast(nn.RMSNorm, module).elementwise_affine

    def normalised(self, module: nn.Module, x: Tensor) -> Tensor:
        layer = cast(nn.RMSNorm, module)
        # torch too computes in single precision at least, so that its default ε is that of the wider type.
        return F.rms_norm(x, layer.normalized_shape, None, layer.eps)


class ChannelNormRule(NormRule):
    """x̂ = (x − μ)/√(σ² + ε) with a mean and a variance for every channel, x [n c *spatial], r = spatial positions.

    All that is needed of x are its mean and variance over the positions of every example and channel.
    """

    @abstractmethod
    def constants(self, module: nn.Module, call: Call, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """μ and σ², [n c] or [c], from those of every example and channel [n c]."""

    def normal(self, module: nn.Module, call: Call) -> Tensor:
        x = self._batched(module, single(call.x))
        x = x.reshape(*x.shape[:2], -1)  # [n c r]
        scale, shift = self._affine(module, call, *mean_and_variance(x, [2]))
        return torch.addcmul(shift.unsqueeze(-1), x, scale.unsqueeze(-1)).transpose(1, 2)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        g = self._roots(module, g)
        return g.reshape(*g.shape[:3], -1).transpose(2, 3).unsqueeze(-1)

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        x = self._batched(module, single(call.x))
        count = x.numel() // x.shape[1]
        if "weight" not in keys:
            return Moment(x.new_full((x.shape[1], 1, 1), count), count)
        r = count // x.shape[0]
        mean, variance = self._moments(module, call, x)
        return Moment(_second((variance + mean.square()).sum(0) * r, mean.sum(0) * r, count, keys), count)

    def input_mean(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        mean, _ = self._moments(module, call, self._batched(module, single(call.x)))
        return _homogeneous(mean, keys)

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        g = single(self._roots(module, g))
        return g.square().sum([axis for axis in range(g.ndim) if axis != 2]).view(-1, 1, 1)

    def _moments(self, module: nn.Module, call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of x̂ over the positions of every example and channel [n c]."""
        mean, variance = mean_and_variance(x, list(range(2, x.ndim)))
        scale, shift = self._affine(module, call, mean, variance)
        return mean * scale + shift, variance * scale.square()

    def _affine(self, module: nn.Module, call: Call, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """x̂ = scale x + shift, both [n c] or [1 c]."""
        μ, σ2 = self.constants(module, call, mean, variance)
        scale = (σ2 + cast(float, module.eps)).rsqrt()
        return (scale, -μ * scale) if scale.ndim == 2 else (scale.unsqueeze(0), (-μ * scale).unsqueeze(0))

    def _batched(self, module: nn.Module, x: Tensor) -> Tensor:
        """x [n c *spatial]."""
        return x

    def _roots(self, module: nn.Module, g: Tensor) -> Tensor:
        """g [k n c *spatial]."""
        return g


@final
class BatchNormRule(ChannelNormRule):
    """z = γ (x − μ)/√(σ² + ε) + β with the statistics of the batch in training mode, else the running ones.

    The statistics of the batch count as constants (``natgrad.pullback.batch_norm``). Shapes: input [n c *spatial] gives
    a [n r c 2], output cotangents [k n c *spatial] give g [k n r c 1].
    """

    def covers(self, module: nn.Module) -> bool:
        return any(plain(module, kind, *_NAMES) for kind in _BATCH) and cast(_BatchNorm, module).affine

    def constants(self, module: nn.Module, call: Call, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        layer = cast(_BatchNorm, module)
        if batch_statistics(layer, call.training):
            return pooled(mean, variance, 0)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        return layer.running_mean.to(mean.dtype), layer.running_var.to(mean.dtype)


@final
class InstanceNormRule(ChannelNormRule):
    """z = γ (x − μ)/√(σ² + ε) + β with the statistics of one example and channel, or with running ones."""

    def covers(self, module: nn.Module) -> bool:
        return any(plain(module, kind, *_NAMES) for kind in _INSTANCE) and cast(_InstanceNorm, module).affine

    def axis(self, module: nn.Module, call: Call) -> int | None:
        return None if call.x.ndim == _spatial(module) + 1 else 0

    def constants(self, module: nn.Module, call: Call, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        layer = cast(_InstanceNorm, module)
        if call.training or not layer.track_running_stats:
            return mean, variance
        assert layer.running_mean is not None
        assert layer.running_var is not None
        return layer.running_mean.to(mean.dtype), layer.running_var.to(mean.dtype)

    def _batched(self, module: nn.Module, x: Tensor) -> Tensor:
        return x.unsqueeze(0) if x.ndim == _spatial(module) + 1 else x

    def _roots(self, module: nn.Module, g: Tensor) -> Tensor:
        return g.unsqueeze(1) if g.ndim == _spatial(module) + 2 else g


@final
class GroupNormRule(ChannelNormRule):
    """z = γ (x − μ)/√(σ² + ε) + β with the statistics of one example and group of channels."""

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.GroupNorm, *_NAMES) and cast(nn.GroupNorm, module).affine

    def constants(self, module: nn.Module, call: Call, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        groups = cast(nn.GroupNorm, module).num_groups
        μ, σ2 = pooled(mean.unflatten(1, (groups, -1)), variance.unflatten(1, (groups, -1)), 2)
        channels = mean.shape[1] // groups
        return μ.repeat_interleave(channels, dim=1), σ2.repeat_interleave(channels, dim=1)


def batch_statistics(layer: _BatchNorm, training: bool) -> bool:
    """Whether a batch normalisation uses the statistics of its batch in this mode."""
    return training or layer.running_mean is None


def mean_and_variance(x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance over some axes. The fused function of torch is slow on a processor."""
    if not axes:
        return x, torch.zeros_like(x)
    if x.device.type != "cpu":
        variance, mean = torch.var_mean(x, axes, correction=0)
        return mean, variance
    mean = x.mean(axes, keepdim=True)
    variance = (x - mean).square_().mean(axes)
    return mean.view_as(variance), variance


def pooled(mean: Tensor, variance: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of the union of equally large sets, along an axis of theirs."""
    μ = mean.mean(axis, keepdim=True)
    return μ.squeeze(axis), (variance + (mean - μ).square()).mean(axis)


def _spatial(module: nn.Module) -> int:
    """How many spatial axes an instance normalisation has."""
    return next(d for d, kind in enumerate(_INSTANCE, start=1) if isinstance(module, kind))


def _homogeneous(a: Tensor, keys: Keys) -> Tensor:
    """(x̂, 1) [* c i] as far as γ and β are trained."""
    parts = {"weight": a, "bias": torch.ones_like(a)}
    return torch.stack([parts[key] for key in _NAMES if key in keys], dim=-1)


def _second(squares: Tensor, sums: Tensor, count: int, keys: Keys) -> Tensor:
    """Σ a aᵀ [c i i] from Σ x̂² [c], Σ x̂ [c] and the number of terms; γ takes part."""
    if "bias" not in keys:
        return squares.view(-1, 1, 1)
    return torch.stack([squares, sums, sums, torch.full_like(sums, count)], dim=-1).view(-1, 2, 2)

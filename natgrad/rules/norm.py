"""The rules of normalisations, which multiply entry by entry.

Scale γ and shift β of a normalisation are one layer, z = γ x̂ + β.

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

from natgrad.accelerate.modules import parameters_in
from natgrad.accelerate.moments import single
from natgrad.errors import BatchStatisticsError
from natgrad.rules.base import Call, Keys, Rule, plain
from natgrad.rules.features import DenseFeatures, Entries, Features

_NAMES = ("weight", "bias")
STATISTICS = "statistics"  # in a ``Call``: the mean and the variance that were used, where they are not those of x
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class NormRule(Rule):
    """γ and β, packed as W [c 1 i] with i the two of them, or one where the other is frozen."""

    capturable = True

    @abstractmethod
    def normalise(self, module: nn.Module, call: Call, x: Tensor) -> Tensor:
        """x̂, like x, without γ and β."""

    @abstractmethod
    def normalised(self, module: nn.Module, call: Call, ones: bool) -> Entries:
        """x̂ [n r c], with the homogeneous coordinate or without."""

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        features = self.normalised(module, call, "bias" in keys)
        if "weight" in keys:
            return features
        return DenseFeatures(single(call.x).new_ones(()).expand(*features.shape[:3], 1))

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        return cast(Tensor, module.weight).numel(), 1, len(keys)

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        """Zeros have mean zero: they stay zero, unless they are divided by it."""
        return "weight" in keys and cast(float | None, module.eps) != 0

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([block[key].reshape(-1, 1, 1) for key in _NAMES if key in block], dim=-1)

    def columns(self, module: nn.Module, block: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: block[key].reshape(-1, 1, 1) for key in _NAMES if key in block}

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        shape = cast(Tensor, module.weight).shape
        present = [key for key in _NAMES if key in keys]
        return {key: packed[..., 0, at].unflatten(-1, shape) for at, key in enumerate(present)}


class TrailingNormRule(NormRule):
    """x̂ has the mean and the variance of an example's trailing axes: x [n *r *shape], c = numel(shape)."""

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        return len(shape) - cast(Tensor, module.weight).ndim

    def normalised(self, module: nn.Module, call: Call, ones: bool) -> Entries:
        x = single(call.x)
        if self.leading(module, x.shape) == 0:
            if x.shape[0] > 1:
                raise BatchStatisticsError(
                    f"{module} normalises over the axis of the examples, x {list(x.shape)}: the outputs of one depend "
                    "on the others, and there is no per-example Jacobian. Give it the trailing axes of an example only"
                )
            x = x.unsqueeze(0)
        lead = self.leading(module, x.shape)
        return Entries(self.normalise(module, call, x).reshape(x.shape[0], math.prod(x.shape[1:lead]), -1), ones)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Entries:
        if self.leading(module, g.shape) == 1:  # of one example, which was given without a batch axis
            g = g.unsqueeze(1)
        lead = self.leading(module, g.shape)
        return Entries(g.reshape(*g.shape[:2], math.prod(g.shape[2:lead]), -1))


@final
class LayerNormRule(TrailingNormRule):
    """The layer rule of layer normalisation.

    Method:
        z = γ (x − μ)/√(σ² + ε) + β over the axes ``normalized_shape``.

        Shapes: input [n *r *shape] gives a [n r c 2], output cotangents [k n *r *shape] give g [k n r c 1].
    """

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.LayerNorm, *_NAMES) and cast(nn.LayerNorm, module).elementwise_affine

    def normalise(self, module: nn.Module, call: Call, x: Tensor) -> Tensor:
        layer = cast(nn.LayerNorm, module)
        return F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)


@final
class RMSNormRule(TrailingNormRule):
    """The layer rule of ``nn.RMSNorm``.

    Method:
        z = γ x/√(mean x² + ε) over the axes ``normalized_shape``; there is no shift.
    """

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.RMSNorm, "weight") and cast(nn.RMSNorm, module).elementwise_affine

    def normalise(self, module: nn.Module, call: Call, x: Tensor) -> Tensor:
        layer = cast(nn.RMSNorm, module)
        # As in torch, which computes in single precision at least, the default ε is that of the wider type.
        return F.rms_norm(x, layer.normalized_shape, None, layer.eps)


class ChannelNormRule(NormRule):
    """x̂ = (x − μ)/√(σ² + ε) with a mean and a variance for every channel, x [n c *spatial], r = spatial positions."""

    pixels = True

    def normalised(self, module: nn.Module, call: Call, ones: bool) -> Entries:
        x = self.normalise(module, call, self._batched(module, single(call.x), 0))
        return Entries(x.flatten(2).transpose(1, 2) if x.ndim > 2 else x.unsqueeze(1), ones)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Entries:
        g = self._batched(module, g, 1)
        return Entries(g.reshape(*g.shape[:3], -1).transpose(2, 3))

    def _batched(self, module: nn.Module, x: Tensor, examples: int) -> Tensor:
        """x [*k n c *spatial]; ``examples`` is the index of the axis n, which one example may not have."""
        return x


@final
class BatchNormRule(ChannelNormRule):
    """The layer rule of batch normalisation.

    Method:
        z = γ (x − μ)/√(σ² + ε) + β with the statistics of the batch in training mode, else the running ones.

        The statistics of the batch count as constants (``natgrad.pullbacks.batch_norm``). Shapes: input [n c *spatial]
        gives a [n r c 2], output cotangents [k n c *spatial] give g [k n r c 1].
    """

    def covers(self, module: nn.Module) -> bool:
        # Also with a forward of its own: what counts is its call of ``torch.batch_norm``.
        params = parameters_in(module)
        return isinstance(module, _BatchNorm) and params.get("weight") is not None and params.keys() <= set(_NAMES)

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        return False  # its constants are not those of an example

    def normalise(self, module: nn.Module, call: Call, x: Tensor) -> Tensor:
        layer, given = cast(_BatchNorm, module), call.kwargs.get(STATISTICS)
        if given is None and batch_statistics(layer, call.training):
            return F.batch_norm(x, None, None, training=True, eps=layer.eps)
        mean, variance = cast(
            tuple[Tensor, Tensor], (layer.running_mean, layer.running_var) if given is None else given
        )
        return F.batch_norm(x, mean.to(x.dtype), variance.to(x.dtype), eps=layer.eps)


@final
class InstanceNormRule(ChannelNormRule):
    """The layer rule of instance normalisation.

    Method:
        z = γ (x − μ)/√(σ² + ε) + β with the statistics of one example and channel, or with running ones.
    """

    def covers(self, module: nn.Module) -> bool:
        return any(plain(module, kind, *_NAMES) for kind in _INSTANCE) and cast(_InstanceNorm, module).affine

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        return super().paddable(module, keys) and not cast(_InstanceNorm, module).track_running_stats

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        return None if call.x.ndim == _spatial(module) + 1 else 0

    def normalise(self, module: nn.Module, call: Call, x: Tensor) -> Tensor:
        layer = cast(_InstanceNorm, module)
        if call.training or not layer.track_running_stats:
            return F.instance_norm(x, eps=layer.eps)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        return F.batch_norm(x, layer.running_mean.to(x.dtype), layer.running_var.to(x.dtype), eps=layer.eps)

    def _batched(self, module: nn.Module, x: Tensor, examples: int) -> Tensor:
        return x.unsqueeze(examples) if x.ndim == _spatial(module) + 1 + examples else x


@final
class GroupNormRule(ChannelNormRule):
    """The layer rule of group normalisation.

    Method:
        z = γ (x − μ)/√(σ² + ε) + β with the statistics of one example and group of channels.
    """

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.GroupNorm, *_NAMES) and cast(nn.GroupNorm, module).affine

    def normalise(self, module: nn.Module, call: Call, x: Tensor) -> Tensor:
        layer = cast(nn.GroupNorm, module)
        return F.group_norm(x, layer.num_groups, eps=layer.eps)


def batch_statistics(layer: _BatchNorm, training: bool) -> bool:
    """Whether a batch normalisation uses the statistics of its batch in this mode."""
    return training or layer.running_mean is None


def _spatial(module: nn.Module) -> int:
    """How many spatial axes an instance normalisation has."""
    return next(d for d, kind in enumerate(_INSTANCE, start=1) if isinstance(module, kind))

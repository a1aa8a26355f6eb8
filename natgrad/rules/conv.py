"""The rules of convolutions and transposed convolutions, in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.accelerate.moments import bordered, homogeneous, output_moment, single, symmetric_product
from natgrad.accelerate.patches import Axis, example_gradients, patch_mean, patch_moment, patch_product, patches
from natgrad.rules.base import Call, Keys, Moment, Rule, plain

_Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
_Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_GRADIENTS = 2**26  # numbers, of the gradients of all examples
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@final
class ConvRule(Rule):
    """z_r = W̄ ā_r with ā_r the patch that output position r reads, and a 1: Σ_r g āᵀ (003 (4.1)–(4.5), ERRATA 43, 47).

    Any stride, padding, dilation and groups. Zero padding is part of the patches, and so of A (ERRATA D). Groups are
    independent layers c. The second moment of the patches is a correlation and needs no patches.
    """

    def covers(self, module: nn.Module) -> bool:
        return any(plain(module, kind, "weight", "bias") for kind in _CONVS)

    @property
    def pure(self) -> bool:
        return True

    @property
    def linear(self) -> bool:
        return True

    def groups(self, module: nn.Module, keys: Keys) -> int:
        return cast(_Conv, module).groups

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        x, axes = _padded(cast(_Conv, module), call.x)
        return homogeneous(patches(x, axes, self.groups(module, keys)), "weight" in keys, "bias" in keys)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return g.flatten(3).unflatten(2, (self.groups(module, keys), -1)).permute(0, 1, 4, 2, 3)

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        x, axes = _padded(cast(_Conv, module), call.x)
        c, count = self.groups(module, keys), _positions(x, axes)
        if "weight" not in keys:
            return Moment(single(x).new_full((c, 1, 1), count), count)
        if c == 1 and x.device.type == "cuda":
            return Moment(patch_product(x, axes, "bias" in keys).unsqueeze(0), count)
        found = patch_moment(x, axes, c)
        return Moment(bordered(found.products, found.sums, count) if "bias" in keys else found.products, count)

    def input_mean(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        x, axes = _padded(cast(_Conv, module), call.x)
        return homogeneous(patch_mean(x, axes, self.groups(module, keys)), "weight" in keys, "bias" in keys)

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return output_moment(g, self.groups(module, keys))

    def projected(self, module: nn.Module, keys: Keys, call: Call, w: Tensor) -> Tensor:
        layer = cast(_Conv, module)
        if "weight" not in keys or layer.groups > 1:
            return super().projected(module, keys, call, w)
        size = layer.weight[0].numel()
        filters = w[:size].T.reshape(-1, *layer.weight.shape[1:])
        x = _batched(layer, call.x).to(w.dtype)
        if x.ndim == 4 and x.device.type == "cuda":  # the fast kernels want it so, and what comes out is wanted so
            x = x.contiguous(memory_format=torch.channels_last)
        out = layer._conv_forward(x, filters, None).flatten(2).transpose(1, 2)
        return out + w[size] if "bias" in keys else out

    def gradients(self, module: nn.Module, keys: Keys, call: Call, g: Tensor) -> Tensor | None:
        x, axes = _padded(cast(_Conv, module), call.x)
        numbers = x.shape[0] * cast(_Conv, module).weight.numel()
        alone = keys == ("weight",) and self.groups(module, keys) == 1 and numbers <= _GRADIENTS
        if not alone or len(axes) != 2 or x.device.type != "cpu" or x.dtype != torch.float32:
            return None
        return example_gradients(x, axes, g).unsqueeze(1)


@final
class TransposedConvRule(Rule):
    """z[p·s + u] += W_u x_p: the layer maps every input position p to a patch of the output, W [c (o·kernel) i].

    So a is the input itself, r counts input positions, and g is the patch of cotangents around each of them. The bias
    is added at output positions: it is a layer of its own. How many positions there are follows from the size
    of the output, ⌊(size + 2·padding − span − 1)/s⌋ + 1 − ⌊q/s⌋ with output padding q. A call with ``output_size``
    replaces q by one below s, and is refused where q ≥ s.

    >>> layer = nn.ConvTranspose1d(2, 3, kernel_size=2, dilation=2, output_padding=1)
    >>> y = layer(torch.randn(4, 2, 5))
    >>> y.shape[2], TransposedConvRule().cotangents(layer, ("weight",), y.unsqueeze(0)).shape  # [k n r c o]
    (8, torch.Size([1, 4, 5, 1, 6]))
    """

    def covers(self, module: nn.Module) -> bool:
        return any(plain(module, kind, "weight", "bias") for kind in _TRANSPOSED)

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        return tuple((key,) for key in self.parameters(module))

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        layer = cast(_Transposed, module)
        if keys == ("bias",):
            return 1, layer.out_channels, 1
        return layer.groups, layer.weight[0].numel(), layer.in_channels // layer.groups

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        layer = cast(_Transposed, module)
        x = _batched(layer, call.x)
        if keys == ("bias",):
            sizes = _output_sizes(layer, call)
            return x.new_ones(x.shape[0], sizes.numel(), 1, 1)
        _check_padding(layer, call)
        return x.flatten(2).unflatten(1, (layer.groups, -1)).permute(0, 3, 1, 2)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        layer = cast(_Transposed, module)
        if keys == ("bias",):
            return g.flatten(3).transpose(2, 3).unsqueeze(3)
        read, axes = _read(layer, g.flatten(0, 1))
        return patches(read, axes, layer.groups).unflatten(0, g.shape[:2])

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        layer = cast(_Transposed, module)
        x = _batched(layer, call.x)
        if keys == ("bias",):
            count = x.shape[0] * _output_sizes(layer, call).numel()
            return Moment(single(x).new_full((1, 1, 1), count), count)
        _check_padding(layer, call)
        return Moment(output_moment(x.unsqueeze(0), layer.groups), x.shape[0] * x.shape[2:].numel())

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        layer = cast(_Transposed, module)
        if keys == ("bias",):
            return symmetric_product(g.flatten(3).transpose(2, 3).reshape(-1, g.shape[2])).unsqueeze(0)
        read, axes = _read(layer, g.flatten(0, 1))
        if layer.groups == 1 and g.device.type == "cuda":
            return patch_product(read, axes, bias=False).unsqueeze(0)
        return patch_moment(read, axes, layer.groups).products

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        if "bias" in block:
            return block["bias"].view(1, -1, 1)
        c = cast(_Transposed, module).groups
        return block["weight"].flatten(1).unflatten(0, (c, -1)).transpose(1, 2)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        lead = packed.shape[:-3]
        if keys == ("bias",):
            return {"bias": packed.reshape(*lead, -1)}
        weight = cast(_Transposed, module).weight
        return {"weight": packed.transpose(-1, -2).reshape(*lead, *weight.shape)}


def _batched(layer: _Conv | _Transposed, x: Tensor) -> Tensor:
    return x if x.ndim == layer.weight.ndim else x.unsqueeze(0)


def _padded(layer: _Conv, x: Tensor) -> tuple[Tensor, tuple[Axis, ...]]:
    """The input, padded where that is not with zeros, and how the axes are read."""
    x = _batched(layer, x)
    given = layer._reversed_padding_repeated_twice  # (before, after) of the last axis, of the one before it, …
    pairs = [(given[at], given[at + 1]) for at in range(len(given) - 2, -1, -2)]
    if layer.padding_mode != "zeros":
        x = F.pad(x, given, mode=layer.padding_mode)
        pairs = [(0, 0)] * len(pairs)
    sizes = zip(layer.kernel_size, layer.stride, layer.dilation, pairs, strict=True)
    return x, tuple(Axis(k, s, d, before, after) for k, s, d, (before, after) in sizes)


def _positions(x: Tensor, axes: tuple[Axis, ...]) -> int:
    """N·R."""
    count = x.shape[0]
    for axis, size in zip(axes, x.shape[2:], strict=True):
        count *= axis.outputs(size)
    return count


def _read(layer: _Transposed, g: Tensor) -> tuple[Tensor, tuple[Axis, ...]]:
    """Cotangents g [n o *spatial] of the output, and how they are read: a patch for every input position."""
    axes = []
    padding, extra = cast(tuple[int, ...], layer.padding), layer.output_padding
    sizes = zip(layer.kernel_size, layer.stride, layer.dilation, padding, extra, strict=True)
    for at, (k, s, d, p, q) in enumerate(sizes):
        size, span = g.shape[2 + at], (k - 1) * d
        inputs = (size + 2 * p - span - 1) // s + 1 - q // s
        if inputs < 1:
            raise _replaced(layer)
        last = (inputs - 1) * s + span + 1 - p  # the outputs that some input reaches
        g = g.narrow(2 + at, 0, min(last, size))
        axes.append(Axis(k, s, d, p, max(last - size, 0)))
    return g, tuple(axes)


def _check_padding(layer: _Transposed, call: Call) -> None:
    """Refuse a call whose output may be that of another number of inputs, with the output padding of the layer."""
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("output_size")
    if given is not None and any(q >= s for q, s in zip(layer.output_padding, layer.stride, strict=True)):
        raise _replaced(layer)


def _replaced(layer: _Transposed) -> ValueError:
    return ValueError(
        f"{layer} was called with output_size, and its output_padding is not below its stride: the size of the output "
        "does not say how many inputs there were. Make it with output_padding=0, which output_size replaces in any case"
    )


def _output_sizes(layer: _Transposed, call: Call) -> torch.Size:
    """From a call with one example, in the type of the weight: under autocast the input may have another one."""
    one = call.map(lambda t: _batched(layer, t)[:1].to(layer.weight.dtype))
    with torch.no_grad():
        return torch.Size(layer(*one.args, **one.kwargs).shape[2:])

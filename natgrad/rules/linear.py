"""The rules of layers that multiply by a weight: linear layers, embeddings, convolutions, transposed convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.accelerate.patches import Axis
from natgrad.rules.base import Call, Keys, Rule, matrices, matrices_shape, pack_matrices, plain
from natgrad.rules.features import DenseFeatures, Features, OneHot, Patches, Rows


@final
class LinearRule(Rule):
    """The layer rule of ``nn.Linear``.

    Method:
        z = W̄ ā with W̄ = [W b] and ā = (a, 1): the gradient of example n is Σ_r g āᵀ (Martens and Grosse 2015).

        Shapes: input [n *r in] gives a [n r 1 i], output cotangents [k n *r out] give g [k n r 1 o].

        Called with a ``Jet``, the layer sees value, derivatives and Laplacian as positions. The bias is added to the
        value alone: the homogeneous coordinate, 1 there and 0 elsewhere, is the second argument of the call.
    """

    capturable = True
    takes_jets = True

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.Linear, "weight", "bias")

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        return len(shape) - 1

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        return True

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        x = positions_in_one_axis(call.x if call.x.ndim > 1 else call.x.unsqueeze(0), 0)
        x, homogeneous = x if "weight" in keys else x[..., :0], call.argument(1, "homogeneous")
        if homogeneous is None or "bias" not in keys:
            return Rows(x, "bias" in keys)
        return Rows(torch.cat([x, positions_in_one_axis(homogeneous, 0)], -1))

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        return Rows(positions_in_one_axis(g if g.ndim > 2 else g.unsqueeze(1), 1))


def positions_in_one_axis(x: Tensor, examples: int) -> Tensor:
    """[*k n r d] of x [*k n *r d]; ``examples`` is the index of the axis n. A view if possible."""
    if x.ndim == examples + 3:
        return x
    return x.unsqueeze(examples + 1) if x.ndim == examples + 2 else x.flatten(examples + 1, -2)


# Embeddings: a linear layer W [d V] without bias whose inputs are one-hot vectors of the vocabulary.


class LookupRule(Rule):
    """z = W a with W [1 d V], the transpose of the table, and a ∈ ℝ^V."""

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        v, d = cast(Tensor, module.weight).shape
        return 1, d, v

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        return Rows(g.reshape(*g.shape[:2], -1, g.shape[-1]))

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return block["weight"].T.unsqueeze(0)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        return {"weight": packed.squeeze(-3).mT}


@final
class EmbeddingRule(LookupRule):
    """The layer rule of ``nn.Embedding``.

    Method:
        z = W a with a one-hot: the gradient of example n is Σ_r g aᵀ, whose column v sums g over the places of v.

        Shapes: indices [n *r] give a [n r 1 V], output cotangents [k n *r d] give g [k n r 1 d]. Σ a aᵀ is diagonal,
        the counts [1 V]. Positions that hold ``padding_idx`` have no gradient: their a is zero, and they are not
        counted.
    """

    one_hot = True
    capturable = True

    def covers(self, module: nn.Module) -> bool:
        # With max_norm the forward pass changes the table; gradients scaled by frequency are those of no function.
        return plain(module, nn.Embedding, "weight") and _constant(cast(nn.Embedding, module))

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        return len(shape) - 1

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> OneHot:
        layer, index = cast(nn.Embedding, module), call.x.long().reshape(call.x.shape[0], -1)
        values = _counted(layer, index, _number_type(layer))
        return OneHot(index, layer.num_embeddings, values, masked=layer.padding_idx is not None)


@final
class EmbeddingBagRule(LookupRule):
    """The layer rule of ``nn.EmbeddingBag``.

    Method:
        z = W a with a ∈ ℝ^V the number of times that the bag of example n has every word, or its mean.

        Shapes: indices [n b], or [m] with offsets [n], give a [n 1 1 V]; output cotangents [k n d] give g [k n 1 1 d].
    """

    def covers(self, module: nn.Module) -> bool:
        if not plain(module, nn.EmbeddingBag, "weight"):
            return False
        layer = cast(nn.EmbeddingBag, module)
        return _constant(layer) and layer.mode in ("sum", "mean")

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        layer = cast(nn.EmbeddingBag, module)
        index, offsets, weights = _bags(*call.args, **call.kwargs)
        bag, bags = _membership(layer, index, offsets)
        words = index.long().reshape(-1)
        ones = _counted(layer, words, _number_type(layer))
        counts = ones if weights is None else ones * weights.detach().reshape(-1).to(ones.dtype)
        a = ones.new_zeros(bags, layer.num_embeddings).index_put_((bag, words), counts, accumulate=True)
        if layer.mode == "mean":
            a = a / a.sum(1, keepdim=True).clamp(min=1)  # an empty bag has output zero
        return Rows(a.unsqueeze(1))


def _constant(layer: nn.Embedding | nn.EmbeddingBag) -> bool:
    return layer.max_norm is None and not layer.scale_grad_by_freq


def _number_type(layer: nn.Embedding | nn.EmbeddingBag) -> torch.dtype:
    """Counts go in single precision at least, as half stops at 2¹¹."""
    return torch.promote_types(layer.weight.dtype, torch.float32)


def _counted(layer: nn.Embedding | nn.EmbeddingBag, index: Tensor, dtype: torch.dtype) -> Tensor:
    """One at every index, zero at the padding."""
    if layer.padding_idx is None:
        return torch.ones_like(index, dtype=dtype)
    return (index != layer.padding_idx).to(dtype)


def _bags(
    input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The arguments of ``nn.EmbeddingBag``, by position or by name."""
    return input, offsets, per_sample_weights


def _membership(layer: nn.EmbeddingBag, index: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
    """The bag of every index, and the number of bags."""
    if offsets is None:
        n, size = index.shape
        return torch.arange(n, device=index.device).repeat_interleave(size), n
    starts = offsets[:-1] if layer.include_last_offset else offsets
    positions = torch.arange(index.numel(), device=index.device, dtype=starts.dtype)
    return torch.searchsorted(starts, positions, right=True) - 1, starts.numel()


# Convolutions and transposed convolutions, in one, two and three dimensions.


_Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
_Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@final
class ConvRule(Rule):
    """The layer rule of convolutions.

    Method:
        z_r = W̄ ā_r with ā_r the patch that output position r reads, and a 1: Σ_r g āᵀ (Grosse and Martens 2016).

        Any stride, padding, dilation and groups. Zero padding is part of the patches, and so of A. Groups are
        independent layers c.

        Shapes: input [n ch *spatial] gives a [n r c i], output cotangents [k n (c o) *spatial] give g [k n r c o].
    """

    capturable = True
    pixels = True

    def covers(self, module: nn.Module) -> bool:
        return any(plain(module, kind, "weight", "bias") for kind in _CONVS)

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        return _batch_axis(cast(_Conv, module), call)

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        return "weight" in keys

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        layer = cast(_Conv, module)
        patches = Patches(*_padded(layer, call.x), layer.groups, "bias" in keys)
        return patches if "weight" in keys else _ones(patches.x, *patches.shape[:3])

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Patches:
        layer = cast(_Conv, module)
        return Patches(_batched_cotangents(layer, g), _pixels(layer), layer.groups)

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        return matrices_shape(module, keys, cast(_Conv, module).groups)

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return pack_matrices(block, cast(_Conv, module).groups)

    def columns(self, module: nn.Module, block: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return matrices(block, cast(_Conv, module).groups)


@final
class TransposedConvRule(Rule):
    """The layer rule of transposed convolutions.

    Method:
        z[p·s + u] += W_u x_p: the layer maps every input position p to a patch of the output, W [c (o·kernel) i].

        So a is the input itself, r counts input positions, and g is the patch of cotangents around each of them. The
        bias is added at output positions: it is a layer of its own.

        How many positions there are follows from the size of the output, ⌊(size + 2·padding − span − 1)/s⌋ + 1 − ⌊q/s⌋
        with output padding q. A call with ``output_size`` replaces q by one below s, and is refused where q ≥ s.

    Example:
        >>> layer = nn.ConvTranspose1d(2, 3, kernel_size=2, dilation=2, output_padding=1)
        >>> y = layer(torch.randn(4, 2, 5))
        >>> y.shape[2], TransposedConvRule().cotangents(layer, ("weight",), y.unsqueeze(0)).shape  # [k n r c o]
        (8, (1, 4, 5, 1, 6))
    """

    pixels = True

    def covers(self, module: nn.Module) -> bool:
        return any(plain(module, kind, "weight", "bias") for kind in _TRANSPOSED)

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        return _batch_axis(cast(_Transposed, module), call)

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        return tuple((key,) for key in self.parameters(module))

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        layer = cast(_Transposed, module)
        if keys == ("bias",):
            return 1, layer.out_channels, 1
        return layer.groups, layer.weight[0].numel(), layer.in_channels // layer.groups

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        layer = cast(_Transposed, module)
        x = _batched(layer, call.x)
        if keys == ("bias",):
            return _ones(x, x.shape[0], _output_sizes(layer, call).numel(), 1)
        _check_padding(layer, call)
        return Patches(x, _pixels(layer), layer.groups)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Patches:
        layer = cast(_Transposed, module)
        g = _batched_cotangents(layer, g)
        if keys == ("bias",):
            return Patches(g, _pixels(layer))
        read, axes = _read(layer, g.flatten(0, 1))
        return Patches(read.unflatten(0, g.shape[:2]), axes, layer.groups)

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


def _ones(x: Tensor, n: int, r: int, c: int) -> DenseFeatures:
    """The inputs of a bias alone."""
    return DenseFeatures(x.new_ones(()).expand(n, r, c, 1))


def _pixels(layer: _Conv | _Transposed) -> tuple[Axis, ...]:
    """Every position reads itself alone."""
    return (Axis(1),) * len(layer.kernel_size)


def _batch_axis(layer: _Conv | _Transposed, call: Call) -> int | None:
    """None for one example without a batch axis: its first axis is that of the channels."""
    return 0 if call.argument(0, "input").ndim == layer.weight.ndim else None


def _batched(layer: _Conv | _Transposed, x: Tensor) -> Tensor:
    return x if x.ndim == layer.weight.ndim else x.unsqueeze(0)


def _batched_cotangents(layer: _Conv | _Transposed, g: Tensor) -> Tensor:
    """g [k n o *spatial]."""
    return g if g.ndim == layer.weight.ndim + 1 else g.unsqueeze(1)


def padding(layer: _Conv) -> list[int]:
    """The numbers of zeros before and after the last axis, then the axis before it, …, as ``F.pad`` takes them.

    >>> padding(nn.Conv2d(1, 1, (3, 4), padding="same"))
    [1, 2, 1, 1]
    """
    if layer.padding == "valid":
        around = [(0, 0) for _ in layer.kernel_size]
    elif layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        around = [(n // 2, n - n // 2) for n in total]
    else:
        around = [(int(n), int(n)) for n in layer.padding]
    return [n for pair in reversed(around) for n in pair]


def _padded(layer: _Conv, x: Tensor) -> tuple[Tensor, tuple[Axis, ...]]:
    """The input, padded where that is not with zeros, and how the axes are read."""
    x = _batched(layer, x)
    given = padding(layer)
    pairs = [(given[at], given[at + 1]) for at in range(len(given) - 2, -1, -2)]
    if layer.padding_mode != "zeros":
        x = F.pad(x, given, mode=layer.padding_mode)
        pairs = [(0, 0)] * len(pairs)
    sizes = zip(layer.kernel_size, layer.stride, layer.dilation, pairs, strict=True)
    return x, tuple(Axis(k, s, d, before, after) for k, s, d, (before, after) in sizes)


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

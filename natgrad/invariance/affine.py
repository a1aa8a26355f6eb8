"""A layer in other affine bases of its activations and pre-activations (Luk & Grosse 2018)."""

from __future__ import annotations

import copy
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.rules.linear import padding
from natgrad.rules.replayed import State, unit_of
from natgrad.show import brief

AffineLayer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@final
@dataclass(frozen=True)
class Space:
    """The activations or pre-activations of a layer, as groups of coordinates.

    Args:
        groups: The number c of groups.
        size: The number d of coordinates in a group.
        movable: Whether the layer can absorb another origin. A layer with a trainable weight and no trainable bias
            cannot: it is linear, not affine, and its bases change linearly.
    """

    groups: int
    size: int
    movable: bool = True


@final
@dataclass(frozen=True)
class Change:
    """A change of coordinates of a layer's activations.

    Args:
        matrix: M [c d d], invertible, one for every group.
        shift: s [c d].

    Method:
        u ↦ Mu + s in every group.

    Example:
        >>> Change.scaled(Space(groups=1, size=2), 3.0, -1.0)(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
        tensor([[2., 5.]], dtype=torch.float64)
    """

    matrix: Tensor
    shift: Tensor

    __repr__ = brief

    @staticmethod
    def scaled(space: Space, scale: float = 1.0, shift: float = 0.0) -> Change:
        """u ↦ scale·u + shift, by default the identity."""
        eye = scale * torch.eye(space.size, dtype=torch.float64)
        shifts = torch.full((space.groups, space.size), shift, dtype=torch.float64)
        return Change(eye.repeat(space.groups, 1, 1), shifts)

    @property
    def inverse(self) -> Tensor:
        """M⁻¹ [c d d]."""
        return torch.linalg.inv(self.matrix)

    def exact(self) -> Change:
        """The same change in float64 on the CPU, where parameters are transformed."""
        return Change(*(t.detach().to("cpu", torch.float64) for t in (self.matrix, self.shift)))

    def __call__(self, u: Tensor) -> Tensor:
        """Mu + s on the last axis of u [* (c d)]."""
        grouped = u.unflatten(-1, self.shift.shape)
        return (torch.einsum("...ci,coi->...co", grouped, self.matrix) + self.shift).flatten(-2)

    def check(self, space: Space, what: str) -> None:
        """Refuse a change that does not fit, that has no inverse, or that moves an origin that must stay."""
        c, d = space.groups, space.size
        if self.matrix.shape != (c, d, d) or self.shift.shape != (c, d):
            raise ValueError(
                f"{what}: the change of basis has matrix {list(self.matrix.shape)} and shift {list(self.shift.shape)}, "
                f"the space needs [{c}, {d}, {d}] and [{c}, {d}]"
            )
        if int(torch.linalg.matrix_rank(self.matrix).min()) < d:
            raise ValueError(f"{what}: the matrix of the change of basis is singular, take an invertible one")
        if not space.movable and bool(self.shift.any()):
            raise ValueError(f"{what}: the layer trains no bias that could absorb a shift, make the shift zero")


@final
@dataclass(frozen=True)
class Coordinates:
    """The coordinates of one layer: those of its inputs, and those of its outputs.

    Args:
        inputs: The change a† = Ωa + γ.
        outputs: The change z = Φz† + τ; note the direction.
    """

    inputs: Change
    outputs: Change


class Bases(ABC):
    """A choice of bases for every layer."""

    @abstractmethod
    def of(self, name: str, inputs: Space, outputs: Space) -> Coordinates:
        """The bases of the layer called ``name``."""


@final
@dataclass(frozen=True)
class Original(Bases):
    """The identity: the network as it is, in the form of a transformed one."""

    def of(self, name: str, inputs: Space, outputs: Space) -> Coordinates:
        return Coordinates(Change.scaled(inputs), Change.scaled(outputs))


@final
@dataclass(frozen=True)
class Random(Bases):
    """Random coordinates for every layer, which mix all activations.

    A layer's bases depend on its name and the seed alone.

    Args:
        seed: The seed of the random numbers.
        stretch: The singular values lie between 1/stretch and stretch.
        shift: The standard deviation of the shifts.

    Method:
        M = U diag(σ) Vᵀ with U, V orthogonal.
    """

    seed: int = 0
    stretch: float = 2.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        if not self.stretch >= 1:
            raise ValueError(f"stretch must be at least 1, got {self.stretch}")

    def of(self, name: str, inputs: Space, outputs: Space) -> Coordinates:
        generator = torch.Generator().manual_seed(self.seed * 2**32 + zlib.crc32(name.encode()))
        return Coordinates(self._draw(inputs, generator), self._draw(outputs, generator))

    def _draw(self, space: Space, generator: torch.Generator) -> Change:
        c, d = space.groups, space.size
        u, v = torch.linalg.qr(torch.randn(2, c, d, d, generator=generator, dtype=torch.float64)).Q
        exponent = 2 * torch.rand(c, 1, d, generator=generator, dtype=torch.float64) - 1
        shift = self.shift * torch.randn(c, d, generator=generator, dtype=torch.float64)
        matrix = u * torch.exp(exponent * math.log(self.stretch)) @ v.mT
        return Change(matrix, shift if space.movable else torch.zeros_like(shift))


@final
@dataclass(frozen=True)
class Chosen(Bases):
    """Explicit bases for the named layers; the others keep theirs.

    >>> tanh_of_logistic = {"2": Coordinates(Change.scaled(Space(1, 3), 2.0, -1.0), Change.scaled(Space(1, 1)))}
    >>> Chosen(tanh_of_logistic).of("2", Space(1, 3), Space(1, 1)).inputs.shift
    tensor([[-1., -1., -1.]], dtype=torch.float64)
    """

    layers: Mapping[str, Coordinates] = field(default_factory=dict)

    __repr__ = brief

    def of(self, name: str, inputs: Space, outputs: Space) -> Coordinates:
        return self.layers.get(name) or Original().of(name, inputs, outputs)


@final
class FixedAffine(nn.Module):
    """The fixed map u ↦ Mu + s on one axis: it belongs to the transformed activation function and is not trained."""

    matrix: Tensor
    shift: Tensor

    def __init__(self, change: Change, axis: int, like: Tensor) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("matrix", change.matrix.to(like))
        self.register_buffer("shift", change.shift.to(like))

    def forward(self, u: Tensor) -> Tensor:
        return Change(self.matrix, self.shift)(u.movedim(self.axis, -1)).movedim(-1, self.axis)


@final
class Transformed(nn.Module):
    """A layer in other bases: z = Φ(W†a† + b†) + τ on a† = Ωa + γ, the same map of a as before.

    W† = Φ⁻¹WΩ⁻¹ and b† = Φ⁻¹(b − τ) − W†γ (Luk & Grosse 2018, (3.3)). ``layer`` is an ordinary layer with the
    parameters W†, b† that maps a† to z†. Between two layers Ωφ(Φ· + τ) + γ is the transformed activation function,
    which mixes coordinates. For a convolution Ω and Φ act on channels, within each group; a patch has one homogeneous
    coordinate, so that b† has W†γ summed over the offsets; zero padding precedes the change of basis, so that the
    transformed layer is padded with γ: otherwise the two networks would differ at the borders.

    >>> layer = nn.Conv2d(2, 3, 3, padding=1).double()
    >>> x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    >>> z = layer(x)
    >>> other = Transformed("conv", layer, Random(seed=1))
    >>> torch.allclose(other(x), z), torch.allclose(other.layer.weight, layer.weight)
    (True, False)
    """

    def __init__(self, name: str, layer: AffineLayer, bases: Bases) -> None:
        super().__init__()
        spaces = _spaces(layer)
        drawn = bases.of(name, *spaces)
        coordinates = Coordinates(drawn.inputs.exact(), drawn.outputs.exact())
        coordinates.inputs.check(spaces[0], f"the inputs of {name or 'the model'}")
        coordinates.outputs.check(spaces[1], f"the outputs of {name or 'the model'}")
        axis = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.ndim  # of the channels, in [n c *space]
        self.before: FixedAffine = FixedAffine(coordinates.inputs, axis, layer.weight)
        self.layer = _in_coordinates(layer, coordinates)
        self.after: FixedAffine = FixedAffine(coordinates.outputs, axis, layer.weight)
        self.padding: list[int] = _zeros_around(layer)

    def forward(self, a: Tensor) -> Tensor:
        padded = F.pad(a, self.padding) if any(self.padding) else a
        return cast(Tensor, self.after(self.layer(self.before(padded))))

    @property
    def weight(self) -> Tensor:
        """Refused: it would be W†, where code outside the layer expects W."""
        raise TypeError(
            "a weight is used outside its layer's forward, where its basis cannot be changed: call the layer instead, "
            "or keep it as it is, keep=(name,)"
        )


def _spaces(layer: AffineLayer) -> tuple[Space, Space]:
    """The spaces of the inputs and of the outputs."""
    weight, bias = layer.weight, layer.bias
    # With a trained W and a fixed b, a shift γ of the inputs would let a step of W act like a step of b.
    absorbs = bias is not None and (bias.requires_grad or not weight.requires_grad)
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    return Space(groups, weight.shape[1], absorbs), Space(groups, weight.shape[0] // groups, bias is not None)


def _in_coordinates(layer: AffineLayer, coordinates: Coordinates) -> AffineLayer:
    """A layer of the same type with W† and b†, without zero padding."""
    Ω, Φ = coordinates.inputs, coordinates.outputs
    result = copy.deepcopy(layer)  # a new layer would be initialised, which moves the user's random stream
    if not isinstance(result, nn.Linear) and result.padding_mode == "zeros":
        result.padding = (0,) * len(result.kernel_size)
    weight = layer.weight.detach().to("cpu", torch.float64)
    grouped = weight.reshape(Φ.matrix.shape[0], Φ.matrix.shape[1], Ω.matrix.shape[1], -1)  # [c o i k]
    W = torch.einsum("cpo,coik,cij->cpjk", Φ.inverse, grouped, Ω.inverse)
    result.weight = _parameter(W.reshape(weight.shape), layer.weight)
    if layer.bias is not None:
        b = layer.bias.detach().to(weight).reshape(Φ.shift.shape)
        b = torch.einsum("cpo,co->cp", Φ.inverse, b - Φ.shift) - torch.einsum("cpjk,cj->cp", W, Ω.shift)
        result.bias = _parameter(b.reshape(-1), layer.bias)
    return result


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    # empty_like keeps the memory format, which multi-tensor kernels require.
    return nn.Parameter(torch.empty_like(like, requires_grad=False).copy_(value), requires_grad=like.requires_grad)


def _zeros_around(layer: AffineLayer) -> list[int]:
    """The zero padding as F.pad takes it. The other modes repeat activations, which commutes with Ω· + γ."""
    if isinstance(layer, nn.Linear) or layer.padding_mode != "zeros":
        return []
    return padding(layer)


# Fused recurrent modules as linear layers that are called once per time step, so that their bases can be changed.


@final
class TransformedRecurrent(nn.Module):
    """An ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU`` with the same arguments and outputs, in other bases.

    The recurrent layer reads Ωa_{t−1} + γ at every step, also at the first: a_0 is transformed like the rest. The two
    layers that add up to one pre-activation have bases of their own; the network of Luk & Grosse (2018), section 5,
    with V† = Φ⁻¹V beside W† = Φ⁻¹WΩ⁻¹, is the case where they share Φ. Layer l of the module called ``rnn`` has the
    names ``rnn.inputs_l`` and ``rnn.recurrent_l`` for its bases, with ``_reverse`` in the other direction.

    >>> from natgrad.invariance import Random
    >>> rnn, x = nn.RNN(3, 4, batch_first=True).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    >>> torch.allclose(TransformedRecurrent("rnn", rnn, Random(seed=1))(x)[0], rnn(x)[0])
    True
    """

    def __init__(self, name: str, rnn: nn.RNNBase, bases: Bases) -> None:
        super().__init__()
        self.batch_first: bool = rnn.batch_first
        self.hidden: int = rnn.hidden_size
        self.has_cell: bool = isinstance(rnn, nn.LSTM)
        self.directions = 2 if rnn.bidirectional else 1
        suffixes = [f"{layer}{end}" for layer in range(rnn.num_layers) for end in ("", "_reverse")[: self.directions]]
        prefix = f"{name}." if name else ""
        self.unit = unit_of(rnn)
        self.inputs, self.recurrent = (
            nn.ModuleList(Transformed(f"{prefix}{side}_{s}", _linear(rnn, f"{key}_l{s}"), bases) for s in suffixes)
            for side, key in (("inputs", "ih"), ("recurrent", "hh"))
        )

    def forward(
        self, x: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise TypeError("a recurrent network in other bases takes sequences of one length as a tensor, 3 axes")
        time = 1 if self.batch_first else 0
        sequence, last = list(x.unbind(time)), []
        for first in range(0, len(self.inputs), self.directions):
            runs = []
            for reverse in range(self.directions):
                layer = first + reverse
                inputs, hidden = self.inputs[layer], self.recurrent[layer]
                state, outputs = self._start(layer, sequence[0], hx), []
                for x_t in reversed(sequence) if reverse else sequence:
                    state = self.unit(inputs(x_t), hidden(state[0]), state)
                    outputs.append(state[0])
                runs.append(outputs[::-1] if reverse else outputs)
                last.append(state)
            sequence = [torch.cat(at_t, dim=-1) for at_t in zip(*runs, strict=True)]
        h, y = torch.stack([h for h, _ in last]), torch.stack(sequence, dim=time)
        return (y, (h, torch.stack([c for _, c in last if c is not None]))) if self.has_cell else (y, h)

    def _start(self, index: int, x: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None) -> State:
        if hx is None:
            zeros = x.new_zeros(x.shape[0], self.hidden)
            return zeros, zeros if self.has_cell else None
        return (hx[0][index], hx[1][index]) if isinstance(hx, tuple) else (hx[index], None)


def _linear(rnn: nn.RNNBase, suffix: str) -> nn.Linear:
    """The parameters of one matrix of the module as a linear layer."""
    weight = rnn.get_parameter(f"weight_{suffix}")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=rnn.bias, device="meta")
    layer.weight = weight
    if rnn.bias:
        layer.bias = rnn.get_parameter(f"bias_{suffix}")
    return layer

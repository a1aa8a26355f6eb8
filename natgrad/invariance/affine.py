"""One layer in other affine bases of its inputs and outputs (Luk and Grosse (2018), section 3)."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AffineLayer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@final
@dataclass(frozen=True)
class Space:
    """The activations or pre-activations of a layer: c groups of d coordinates each.

    ``movable``: whether the layer can absorb a shift of the origin. It needs a trainable bias if its weight is
    trainable; otherwise the change of basis is linear.
    """

    groups: int
    size: int
    movable: bool = True


@final
@dataclass(frozen=True)
class Change:
    """A change of affine basis u ↦ Mu + s in every group: ``matrix`` [c d d], invertible, and ``shift`` [c d].

    >>> Change.scaled(Space(groups=1, size=2), 3.0, -1.0)(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    tensor([[2., 5.]], dtype=torch.float64)
    """

    matrix: Tensor
    shift: Tensor

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
        """Refuse a change of the wrong size, without inverse, or with a shift that the layer cannot absorb."""
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
    """The bases of one layer: ``inputs`` is a† = Ωa + γ, ``outputs`` is z = Φz† + τ (the opposite direction)."""

    inputs: Change
    outputs: Change


class Bases(ABC):
    """Chooses the bases of each layer."""

    @abstractmethod
    def of(self, name: str, inputs: Space, outputs: Space) -> Coordinates:
        """The bases of the layer called ``name``."""


@final
@dataclass(frozen=True)
class Original(Bases):
    """Every layer keeps its bases: the original network in the form of a transformed one."""

    def of(self, name: str, inputs: Space, outputs: Space) -> Coordinates:
        return Coordinates(Change.scaled(inputs), Change.scaled(outputs))


@final
@dataclass(frozen=True)
class Random(Bases):
    """Random bases that mix all coordinates: M = U diag(σ) Vᵀ with U, V orthogonal and σ between 1/``stretch`` and
    ``stretch``, shifts normal with standard deviation ``shift``. A layer's bases depend on its name and the seed alone.
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
    """Given bases for the named layers; the others keep theirs.

    >>> tanh_of_logistic = {"2": Coordinates(Change.scaled(Space(1, 3), 2.0, -1.0), Change.scaled(Space(1, 1)))}
    >>> Chosen(tanh_of_logistic).of("2", Space(1, 3), Space(1, 1)).inputs.shift
    tensor([[-1., -1., -1.]], dtype=torch.float64)
    """

    layers: Mapping[str, Coordinates] = field(default_factory=dict)

    def of(self, name: str, inputs: Space, outputs: Space) -> Coordinates:
        return self.layers.get(name) or Original().of(name, inputs, outputs)


@final
class Affine(nn.Module):
    """The fixed map u ↦ Mu + s on one axis: a piece of the transformed activation function, without parameters."""

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
    """A layer in other bases: z = Φ(W†a† + b†) + τ with a† = Ωa + γ, the same function of a as before.

    W† = Φ⁻¹WΩ⁻¹ and b† = Φ⁻¹(b − τ) − W†γ. ``layer`` is an ordinary layer with the parameters W†, b†; it maps a† to
    z†. Between two layers the transformed activation function is Ω φ(Φ· + τ) + γ, which mixes coordinates. For a
    convolution, Ω and Φ act on channels, within each group. A patch has a single homogeneous coordinate, so b†
    contains W†γ summed over the offsets. Zero padding precedes the change of basis, so the transformed layer is padded
    with γ; otherwise the two networks would differ at the borders.

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
        self.before = Affine(coordinates.inputs, axis, layer.weight)
        self.layer = _moved(layer, coordinates)
        self.after = Affine(coordinates.outputs, axis, layer.weight)
        self.padding = _zeros_around(layer)

    def forward(self, a: Tensor) -> Tensor:
        padded = F.pad(a, self.padding) if any(self.padding) else a
        return cast(Tensor, self.after(self.layer(self.before(padded))))

    @property
    def weight(self) -> Tensor:
        """Refused: it would be W†, and code outside expects W."""
        raise TypeError(
            "a weight is used outside its layer's forward, where its basis cannot be changed: call the layer instead, "
            "or keep it as it is, keep=(name,)"
        )


def _spaces(layer: AffineLayer) -> tuple[Space, Space]:
    """The spaces of the inputs and of the outputs."""
    weight, bias = layer.weight, layer.bias
    # If W is trained and b is not, a shift γ of the inputs would let a step of W act like one of b.
    absorbs = bias is not None and (bias.requires_grad or not weight.requires_grad)
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    return Space(groups, weight.shape[1], absorbs), Space(groups, weight.shape[0] // groups, bias is not None)


def _moved(layer: AffineLayer, coordinates: Coordinates) -> AffineLayer:
    """A layer of the same type with W† and b†, without zero padding."""
    Ω, Φ = coordinates.inputs, coordinates.outputs
    moved = _empty(layer)
    weight = layer.weight.detach().to("cpu", torch.float64)
    grouped = weight.reshape(Φ.matrix.shape[0], Φ.matrix.shape[1], Ω.matrix.shape[1], -1)  # [c o i k]
    W = torch.einsum("cpo,coik,cij->cpjk", Φ.inverse, grouped, Ω.inverse)
    moved.weight = _parameter(W.reshape(weight.shape), layer.weight)
    if layer.bias is not None:
        b = layer.bias.detach().to(weight).reshape(Φ.shift.shape)
        b = torch.einsum("cpo,co->cp", Φ.inverse, b - Φ.shift) - torch.einsum("cpjk,cj->cp", W, Ω.shift)
        moved.bias = _parameter(b.reshape(-1), layer.bias)
    return moved


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    # empty_like keeps the strides, which foreach kernels require
    return nn.Parameter(torch.empty_like(like, requires_grad=False).copy_(value), requires_grad=like.requires_grad)


def _empty(layer: AffineLayer) -> AffineLayer:
    # On the meta device, because initialisation would advance the user's random stream.
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, layer.out_features, bias=bias, device="meta")
    return type(layer)(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        padding=0 if layer.padding_mode == "zeros" else layer.padding,  # type: ignore[arg-type]
        dilation=layer.dilation,  # type: ignore[arg-type]
        groups=layer.groups,
        bias=bias,
        padding_mode=layer.padding_mode,
        device="meta",
    )


def _zeros_around(layer: AffineLayer) -> list[int]:
    """The zero padding in the form of F.pad. Other padding modes repeat activations and commute with Ω· + γ."""
    if isinstance(layer, nn.Linear) or layer.padding_mode != "zeros":
        return []
    return list(layer._reversed_padding_repeated_twice)


# Fused recurrent modules as linear layers that are called once for each time step, so that their bases can be changed.

State: TypeAlias = tuple[Tensor, ...]  # (h,) or (h, c), each [n h]


class Cell(ABC):
    """The equations of a recurrent cell after its matrix products; no parameters."""

    @abstractmethod
    def __call__(self, z: Tensor, u: Tensor, state: State) -> State:
        """The next state from z = Vx_t + b, u = Wa_{t−1} + b′ [n (gates h)] and the state before."""


@final
@dataclass(frozen=True)
class Elman(Cell):
    """a_t = φ(z + u)."""

    φ: Callable[[Tensor], Tensor]

    def __call__(self, z: Tensor, u: Tensor, state: State) -> State:
        return (self.φ(z + u),)


@final
@dataclass(frozen=True)
class LongShortTerm(Cell):
    """c_t = f∘c_{t−1} + i∘g and a_t = o∘tanh(c_t), with the gates i, f, g, o."""

    def __call__(self, z: Tensor, u: Tensor, state: State) -> State:
        i, f, g, o = (z + u).chunk(4, dim=-1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


@final
@dataclass(frozen=True)
class Gated(Cell):
    """a_t = (1 − s)∘tanh(z_n + r∘u_n) + s∘a_{t−1}, with the gates r, s, n."""

    def __call__(self, z: Tensor, u: Tensor, state: State) -> State:
        (z_r, z_s, z_n), (u_r, u_s, u_n) = z.chunk(3, dim=-1), u.chunk(3, dim=-1)
        s = (z_s + u_s).sigmoid()
        return ((1 - s) * (z_n + (z_r + u_r).sigmoid() * u_n).tanh() + s * state[0],)


@final
class Direction(nn.Module):
    """One layer of a recurrent network in one direction of time."""

    def __init__(self, cell: Cell, inputs: Transformed, recurrent: Transformed) -> None:
        super().__init__()
        self.cell, self.inputs, self.recurrent = cell, inputs, recurrent

    def forward(self, x: list[Tensor], state: State) -> tuple[list[Tensor], State]:
        """From x_1 … x_T [n i] and the first state to a_1 … a_T [n h] and the last state."""
        outputs = []
        for x_t in x:
            state = self.cell(self.inputs(x_t), self.recurrent(state[0]), state)
            outputs.append(state[0])
        return outputs, state


@final
class Unrolled(nn.Module):
    """An ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU`` with the same arguments and outputs, in other bases.

    The recurrent layer reads Ωa_{t−1} + γ at every step, including the first: a_0 is transformed as well, or the two
    networks would differ. The two layers that add up to one pre-activation have separate bases; Luk and Grosse (2018)
    have the special case that they share Φ. The bases of layer l of a module called ``rnn`` are named ``rnn.inputs_l``
    and ``rnn.recurrent_l``, with the suffix ``_reverse`` for the reverse direction.

    >>> from natgrad.invariance.affine import Random
    >>> rnn, x = nn.RNN(3, 4, batch_first=True).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    >>> torch.allclose(Unrolled("rnn", rnn, Random(seed=1))(x)[0], rnn(x)[0])
    True
    """

    def __init__(self, name: str, rnn: nn.RNNBase, bases: Bases) -> None:
        super().__init__()
        self.batch_first, self.hidden, self.states = rnn.batch_first, rnn.hidden_size, 1 + isinstance(rnn, nn.LSTM)
        self.per_layer = 2 if rnn.bidirectional else 1
        ends = ("", "_reverse")[: self.per_layer]
        suffixes = [f"{layer}{end}" for layer in range(rnn.num_layers) for end in ends]
        prefix = f"{name}." if name else ""
        cell = _cell(rnn)
        self.directions = nn.ModuleList(
            Direction(
                cell,
                Transformed(f"{prefix}inputs_{s}", _linear(rnn, f"ih_l{s}"), bases),
                Transformed(f"{prefix}recurrent_{s}", _linear(rnn, f"hh_l{s}"), bases),
            )
            for s in suffixes
        )

    def forward(self, x: Tensor, hx: Tensor | State | None = None) -> tuple[Tensor, Tensor | State]:
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise TypeError("a recurrent network in other bases takes sequences of one length as a tensor, 3 axes")
        time = 1 if self.batch_first else 0
        sequence, last = list(x.unbind(time)), []
        for layer in range(0, len(self.directions), self.per_layer):
            both = []
            for reverse in range(self.per_layer):
                start = self._start(layer + reverse, sequence[0], hx)
                outputs, state = self.directions[layer + reverse](sequence[::-1] if reverse else sequence, start)
                both.append(outputs[::-1] if reverse else outputs)
                last.append(state)
            sequence = [torch.cat(at_t, dim=-1) for at_t in zip(*both, strict=True)]
        final_states = tuple(torch.stack(states) for states in zip(*last, strict=True))
        return torch.stack(sequence, dim=time), final_states if self.states == 2 else final_states[0]

    def _start(self, direction: int, x: Tensor, hx: Tensor | State | None) -> State:
        if hx is None:
            return (x.new_zeros(x.shape[0], self.hidden),) * self.states
        return tuple(h[direction] for h in (hx if isinstance(hx, tuple) else (hx,)))


def _cell(rnn: nn.RNNBase) -> Cell:
    if isinstance(rnn, nn.LSTM):
        return LongShortTerm()
    if isinstance(rnn, nn.GRU):
        return Gated()
    return Elman(torch.tanh if rnn.nonlinearity == "tanh" else torch.relu)


def _linear(rnn: nn.RNNBase, suffix: str) -> nn.Linear:
    """One matrix of the module, and its bias, as a linear layer."""
    weight = rnn.get_parameter(f"weight_{suffix}")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=rnn.bias, device="meta")
    layer.weight = weight
    if rnn.bias:
        layer.bias = rnn.get_parameter(f"bias_{suffix}")
    return layer

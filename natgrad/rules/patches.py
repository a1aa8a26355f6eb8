"""The patches a convolution reads, in any number of dimensions, and sums of them that need no patch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.rules.precision import single, summed
from natgrad.rules.products import channels_last

_FEW = 2  # examples


@final
@dataclass(frozen=True)
class Axis:
    """One spatial axis: output r reads the inputs r·stride + u·dilation − before for u < kernel, zeros outside.

    >>> Axis(kernel=3, stride=2, before=1, after=1).outputs(32)
    16
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def span(self) -> int:
        """The distance from the first input of a patch to its last."""
        return (self.kernel - 1) * self.dilation

    def outputs(self, size: int) -> int:
        """How many outputs an axis of ``size`` inputs gives."""
        room = size + self.before + self.after - self.span - 1
        if room < 0:
            raise ValueError(
                f"a kernel of {self.kernel} with dilation {self.dilation} spans {self.span + 1} inputs, but there are "
                f"{size} and {self.before} + {self.after} of padding: use a smaller kernel or pad more"
            )
        return room // self.stride + 1


def patches(x: Tensor, axes: Sequence[Axis], groups: int = 1) -> Tensor:
    """a [n r c i]: what output position r of a convolution sees of x [n (c ch) *spatial] (003 (4.2), transposed).

    i is channel-major, as the weight [o ch *kernel] flattens; the homogeneous coordinate is not among them.

    >>> patches(torch.arange(4.0).reshape(1, 1, 4), (Axis(kernel=2),)).squeeze()
    tensor([[0., 1.],
            [1., 2.],
            [2., 3.]])
    """
    d = len(axes)
    w = windows(padded(x, axes), axes).unflatten(1, (groups, -1))  # [n c ch *out *kernel]
    a = w.movedim((1, 2), (1 + d, 2 + d))  # [n *out c ch *kernel]
    return a.reshape(x.shape[0], prod(a.shape[1 : 1 + d]), groups, prod(a.shape[2 + d :]))


def patch_mean(x: Tensor, axes: Sequence[Axis], groups: int = 1) -> Tensor:
    """ā [n c i] = (1/R) Σ_r a[n r c i], the mean patch of every example, without its patches.

    A sum over a box of positions is a sum along one axis after the other. Half precision is summed in float32.

    >>> x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    >>> axes = (Axis(kernel=3, before=1, after=1),) * 2
    >>> torch.allclose(patch_mean(x, axes), patches(x, axes).mean(1))
    True
    """
    s = single(x)
    if len(x) <= _FEW and x.device.type == "cuda":  # few numbers, and few launches
        return _window_sums(s, axes).view(len(x), groups, -1) / positions(x, axes)
    for axis in axes:  # the axis at place 2 leaves, its kernel goes to the end
        s = s.movedim(2, -1) @ _reads(axis, s.shape[2], s)
    return s.flatten(1).unflatten(1, (groups, -1)) / positions(x, axes)


def patch_sum(x: Tensor, axes: Sequence[Axis], groups: int = 1) -> Tensor:
    """Σ_{n,r} a[n r c i] as [c i], from the sum of the examples."""
    wide = summed(x.dtype)
    total = x.movedim(1, -1).sum(0, dtype=wide).movedim(-1, 0) if channels_last(x) else x.sum(0, dtype=wide)
    return _window_sums(total.unsqueeze(0), axes).view(groups, -1)


def _window_sums(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """[n (c ch) *kernel]: sums over the positions, of every place of a kernel."""
    w = windows(padded(x, axes), axes)  # [n (c ch) *out *kernel]
    return w.sum(tuple(range(2, 2 + len(axes)))).contiguous()


def positions(x: Tensor, axes: Sequence[Axis]) -> int:
    """R, the number of outputs of one example."""
    return prod(axis.outputs(size) for axis, size in zip(axes, x.shape[2:], strict=True))


def padded(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """x with its zeros around it."""
    pads = [side for axis in reversed(axes) for side in (axis.before, axis.after)]
    return functional.pad(x, pads) if any(pads) else x


def windows(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """A view [n ch *out *kernel] of x that is padded already."""
    for place, axis in enumerate(axes, start=2):
        x = x.unfold(place, axis.span + 1, axis.stride)[..., :: axis.dilation]
    return x


def _reads(axis: Axis, size: int, like: Tensor) -> Tensor:
    """[size kernel]: 1 where some output reads this input through this place of the kernel."""
    inputs = torch.arange(axis.before, axis.before + size, device=like.device).unsqueeze(1)
    steps = inputs - torch.arange(0, axis.span + 1, axis.dilation, device=like.device)
    outputs = axis.outputs(size)
    hit = (steps >= 0) & (steps % axis.stride == 0) & (steps < outputs * axis.stride)
    return hit.to(like.dtype)

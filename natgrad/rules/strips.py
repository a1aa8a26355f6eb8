"""The second moment of the patches of a convolution from products of strips: few products, and large ones.

A strip f(p) [m q] is what the outputs n, r' along all axes but the first read at place p of the first: m runs over
channels and places w of the kernel along the other axes, q over n and r'. The patch of output (r, r') is made of the
strips r + u, so with places u, v of the kernel along the first axis

    A[u, v] = Σ_r f(r + u) f(r + v)ᵀ = Σ_p f(p) f(p + v − u)ᵀ,  start(u, v) ≤ p < stop(u, v).

Places with one v − u differ by few p at the borders: one long product is enough for all of them, 3 in place of 9 for a
kernel of 3 × 3. Strips lie side by side in memory, [m p q], so that every such sum is one product of two matrices whose
rows are contiguous, as tensor cores like it, and only a third of the patches is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import final

from torch import Tensor

from natgrad.rules.patches import Axis, padded, windows
from natgrad.rules.precision import multiply, multiply_add, summed

_STRIPS = 2**25  # numbers; of strips at a time
_ROUND = 8  # times the span: so many strips, and cuBLAS is faster for one round number of them and some zeros


@final
@dataclass(frozen=True)
class Span:
    """The p, from ``start`` to before ``stop``, at which two places of the kernel, ``shift`` apart, both see input.

    >>> Span.of(Axis(kernel=3, before=1, after=1), size=8, u=2, v=2)  # the last place sees all but the first input
    Span(start=1, stop=8, shift=0)
    """

    start: int
    stop: int
    shift: int

    @staticmethod
    def of(axis: Axis, size: int, u: int, v: int) -> Span:
        """Of places u ≤ v, on ``size`` inputs; the stride is 1."""
        shift = (v - u) * axis.dilation
        first, end = u * axis.dilation - axis.before, max(size - shift, 0)
        return Span(min(max(first, 0), end), min(max(first + axis.outputs(size), 0), end), shift)

    def beyond(self, other: Span) -> tuple[tuple[Span, float], ...]:
        """What to add to a sum over ``other``, of the same shift, to have this one; or take away, where it is −1."""
        parts = []
        for mine, its, sign in ((self.start, other.start, 1.0), (self.stop, other.stop, -1.0)):
            if mine != its:
                parts.append((Span(min(mine, its), max(mine, its), self.shift), sign if mine < its else -sign))
        return tuple(parts)

    @property
    def count(self) -> int:
        """How many p."""
        return self.stop - self.start


def strip_product(x: Tensor, axes: Sequence[Axis], limit: int = _STRIPS) -> Tensor:
    """Σ_nr a aᵀ as a view [ch *kernel ch *kernel] of what is in memory [u v (ch w) (ch w)]; the first stride is 1.

    Examples are taken so few at a time that their strips are no more than ``limit`` numbers, if it can be.

    >>> import torch
    >>> strip_product(torch.arange(4.0).reshape(1, 1, 4), (Axis(kernel=2),)).squeeze()
    tensor([[ 5.,  8.],
            [ 8., 14.]])
    """
    first, *rest = axes
    ch, places = x.shape[1], [axis.kernel for axis in rest]
    numbers = ch * prod(places) * x.shape[2]
    numbers *= prod(axis.outputs(size) for axis, size in zip(rest, x.shape[3:], strict=True))
    head, *others = x.split(max(1, limit // max(1, numbers)))
    A = _products(head, first, rest)
    for part in others:
        A += _products(part, first, rest)
    d = len(axes)
    A = A.unflatten(3, (ch, *places)).unflatten(2, (ch, *places))  # [u v ch *w ch *w]
    return A.permute(2, 0, *range(3, 2 + d), 2 + d, 1, *range(3 + d, 2 + 2 * d))


def strips(x: Tensor, rest: Sequence[Axis], zeros: int = 0) -> Tensor:
    """f [(ch w) p (n r')] of x [n ch p *others], whose axes from the second on are read as ``rest`` says.

    ``zeros`` strips of zeros come after the others.
    """
    d, size, axes = len(rest), x.shape[2], (Axis(1), *rest)
    w = windows(padded(x, axes), axes)  # [n ch p *out 1 *kernel], a view
    w = w.permute(1, *range(3 + d, 4 + 2 * d), 2, 0, *range(3, 3 + d))
    f = x.new_empty(prod(w.shape[: 2 + d]), size + zeros, prod(w.shape[3 + d :]))
    f[:, size:].zero_()
    f[:, :size].unflatten(2, w.shape[3 + d :]).unflatten(0, w.shape[: 2 + d]).copy_(w)
    return f


def _products(x: Tensor, axis: Axis, rest: Sequence[Axis]) -> Tensor:
    """A [u v m m] from the strips of all examples at once."""
    size = x.shape[2]
    zeros = axis.span if axis.span * _ROUND <= size else 0
    f = strips(x, rest, zeros)
    m, _, q = f.shape
    rows = f.flatten(1)
    A = f.new_empty(axis.kernel, axis.kernel, m, m, dtype=summed(f.dtype))
    for shift in range(axis.kernel):
        spans = [Span.of(axis, size, u, u + shift) for u in range(axis.kernel - shift)]
        longest = max(range(len(spans)), key=lambda u: spans[u].count)
        end = size if zeros and spans[longest].stop == size - shift * axis.dilation else spans[longest].stop
        multiply(*_factors(rows, q, replace(spans[longest], stop=end)), A[longest, longest + shift])
        for u in (*range(longest - 1, -1, -1), *range(longest + 1, len(spans))):
            near = u + 1 if u < longest else u - 1
            _moved(A[u, u + shift], A[near, near + shift], spans[u], spans[near], rows, q)
        if shift:
            A.diagonal(-shift).copy_(A.diagonal(shift).transpose(0, 1))
    return A


def _moved(out: Tensor, base: Tensor, span: Span, near: Span, rows: Tensor, q: int) -> None:
    """Σ_p f(p) f(p + shift)ᵀ over a span, from the sum over one that is near where that is less work."""
    parts = span.beyond(near)
    if sum(part.count for part, _ in parts) > span.count:
        multiply(*_factors(rows, q, span), out)
        return
    if not parts:
        out.copy_(base)
    for part, sign in parts:
        multiply_add(base, *_factors(rows, q, part), out, sign)
        base = out


def _factors(rows: Tensor, q: int, span: Span) -> tuple[Tensor, Tensor]:
    """f(p) [m (p q)] and f(p + shift)ᵀ [(p q) m] for the p of a span."""
    start, stop, shift = span.start * q, span.stop * q, span.shift * q
    return rows[:, start:stop], rows[:, start + shift : stop + shift].T

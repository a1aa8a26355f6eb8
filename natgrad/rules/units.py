"""The equations of recurrent units, forwards and backwards.

Cotangents go back through a step linearly. What they are multiplied with is made for all times at once, so that a step
back is a matrix product and a few products of numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State: TypeAlias = tuple[Tensor, Tensor | None]  # h [n h], and for an LSTM c [n u]; u is the number of units


@final
@dataclass(frozen=True)
class Trace:
    """A recurrence at all times: its sums with the inputs, what the unit kept, and its states before and after."""

    ih: Tensor  # W_ih x + b_ih [n t o]
    kept: Tensor  # [n t ·]
    before: Tensor  # h [n t h]
    c_before: Tensor | None = None  # [n t u]
    c: Tensor | None = None
    mask: Tensor | None = None  # [n t 1], one where there is a step

    def here(self, k: Tensor) -> Tensor:
        """k [n t ·], zero where there is no step."""
        return k if self.mask is None else k * self.mask

    def stays(self, k: Tensor) -> Tensor:
        """k [n t ·], one where there is no step: the state stays."""
        return k if self.mask is None else torch.where(self.mask > 0, k, 1.0)


@final
@dataclass(frozen=True)
class Adjoint:
    """One step back: from the cotangents of h' and c' to those of the sums, and on to those of h and c.

    dz = k dh' for units without c. With it dc' ← dc' + p dh', dz = k (dc', dc', dc', dh') and dc = f dc'. In every case
    dh = W_hhᵀ dz + stay dh'. With a projection dh' is W_hrᵀ of that of h'.
    """

    k: Tensor  # [n t gates u], to the sum W_hh h + b_hh
    k_ih: Tensor | None = None  # [n t gates u], to the sum W_ih x + b_ih, where it is another
    stay: Tensor | None = None  # [n t u], or [n t 1]
    p: Tensor | None = None  # [n t u]
    f: Tensor | None = None  # [n t u]

    def pull(
        self, times: Sequence[int], g: Tensor, last: State, weights: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """dz [k n t o] of W_hh h + b_hh and dh' [k n t h] from cotangents g [k n t h] and of the last state [k n ·].

        ``weights`` are W_hh and W_hr, and ``times`` the steps in their order.
        """
        dh, dc = last
        all_dz, all_dh = g.new_empty(*g.shape[:3], *self.k.shape[2:]), torch.empty_like(g)
        rows, dz, into, k = g.unbind(2), all_dz.unbind(2), all_dh.unbind(2), self.k.unbind(1)
        p, f, stay = (() if t is None else t.unbind(1) for t in (self.p, self.f, self.stay))
        for t in reversed(times):
            dh = torch.add(dh, rows[t], out=into[t])
            dm = dh if weights[1] is None else dh @ weights[1]
            if dc is None:
                torch.mul(dm.unsqueeze(2), k[t], out=dz[t])
            else:
                dc = torch.addcmul(dc, dm, p[t])
                torch.mul(dc.unsqueeze(2), k[t][:, :3], out=dz[t][:, :, :3])
                torch.mul(dm, k[t][:, 3], out=dz[t][:, :, 3])
                dc = dc * f[t]
            past = dz[t].flatten(2) @ weights[0]
            dh = past if self.stay is None else torch.addcmul(past, stay[t], dh)
        return all_dz.flatten(3), all_dh

    def from_inputs(self, dz: Tensor, dh: Tensor) -> Tensor:
        """dz [k n t o] of W_ih x + b_ih, from what ``pull`` gives."""
        return dz if self.k_ih is None else (dh.unsqueeze(3) * self.k_ih).flatten(3)


@final
@dataclass(frozen=True)
class Affine:
    """h ↦ W h + b."""

    weight: Tensor
    bias: Tensor | None

    def of(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight, self.bias)

    def added(self, z: Tensor, h: Tensor) -> Tensor:
        """z + W h, where b is in z already."""
        return torch.addmm(z, h, self.weight.T)


class Unit(ABC):
    """One step of a recurrence: its equations, and their derivatives at all times."""

    @abstractmethod
    def step(self, ih: Tensor, hh: Affine, state: State) -> tuple[Tensor, State]:
        """What the adjoint needs, and the next state, from W_ih x + b_ih [n o] and the way to W_hh h + b_hh."""

    @abstractmethod
    def adjoint(self, trace: Trace) -> Adjoint:
        """The derivatives of all steps."""


@final
class Tanh(Unit):
    """h' = tanh(W_ih x + b_ih + W_hh h + b_hh) (003 (5.1))."""

    def step(self, ih: Tensor, hh: Affine, state: State) -> tuple[Tensor, State]:
        h = hh.added(ih, state[0]).tanh()
        return h, (h, None)

    def adjoint(self, trace: Trace) -> Adjoint:
        return Adjoint(trace.here(1 - trace.kept.square()).unsqueeze(2), stay=_gone(trace))


@final
class Relu(Unit):
    """h' = max(0, W_ih x + b_ih + W_hh h + b_hh)."""

    def step(self, ih: Tensor, hh: Affine, state: State) -> tuple[Tensor, State]:
        h = hh.added(ih, state[0]).relu()
        return h, (h, None)

    def adjoint(self, trace: Trace) -> Adjoint:
        slope = (trace.kept > 0).to(trace.kept.dtype)
        return Adjoint(trace.here(slope).unsqueeze(2), stay=_gone(trace))


@final
class Lstm(Unit):
    """c' = f c + i g and h' = o tanh c' with (i, f, g, o) = (σ, σ, tanh, σ)(W_ih x + b_ih + W_hh h + b_hh)."""

    def step(self, ih: Tensor, hh: Affine, state: State) -> tuple[Tensor, State]:
        z, c = hh.added(ih, state[0]), state[1]
        assert c is not None
        i, f, _, o = z.sigmoid().chunk(4, dim=-1)
        c = torch.addcmul(f * c, i, z.chunk(4, dim=-1)[2].tanh())
        return z, (o * c.tanh(), c)

    def adjoint(self, trace: Trace) -> Adjoint:
        assert trace.c is not None
        assert trace.c_before is not None
        i, f, _, o = trace.kept.sigmoid().chunk(4, dim=-1)
        g, t = trace.kept.chunk(4, dim=-1)[2].tanh(), trace.c.tanh()
        k = (g * i * (1 - i), trace.c_before * f * (1 - f), i * (1 - g * g), t * o * (1 - o))
        p = trace.here(o * (1 - t * t))
        return Adjoint(torch.stack([trace.here(part) for part in k], 2), None, _gone(trace), p, trace.stays(f))


@final
class Gru(Unit):
    """h' = n + u (h − n), n = tanh(z_in + r z_hn), with r, u = σ(z_i + z_h): the two sums have their own cotangents."""

    def step(self, ih: Tensor, hh: Affine, state: State) -> tuple[Tensor, State]:
        h, z = state[0], hh.of(state[0])
        _, u, n = _gates(ih, z)
        return z, (torch.lerp(n, h, u), None)

    def adjoint(self, trace: Trace) -> Adjoint:
        r, u, n = _gates(trace.ih, trace.kept)
        z_n = trace.kept.chunk(3, dim=-1)[2]
        slope = (1 - u) * (1 - n * n)
        same = [trace.here(slope * z_n * r * (1 - r)), trace.here((trace.before - n) * u * (1 - u))]
        k, k_ih = (torch.stack([*same, trace.here(last)], dim=2) for last in (slope * r, slope))
        return Adjoint(k, k_ih, trace.stays(u))


def unit_of(module: nn.Module) -> Unit:
    """The unit of a recurrent module."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return Lstm()
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return Gru()
    return Relu() if module.nonlinearity == "relu" else Tanh()


def _gates(ih: Tensor, hh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """r, u and n of a GRU from its two sums [· 3u]."""
    units = ih.shape[-1] // 3
    r, u = (ih[..., : 2 * units] + hh[..., : 2 * units]).sigmoid().chunk(2, dim=-1)
    return r, u, torch.addcmul(ih[..., 2 * units :], r, hh[..., 2 * units :]).tanh()


def _gone(trace: Trace) -> Tensor | None:
    """What goes past a step: all where there is none."""
    return None if trace.mask is None else 1 - trace.mask

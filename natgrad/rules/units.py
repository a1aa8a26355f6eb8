"""The equations of recurrent units, forwards and backwards.

A step back is linear in the cotangents. Its coefficients are computed for all times at once, so that one step back is a
matrix product and a few elementwise products.
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
class UnitTrace:
    """A recurrence at all times: the input sums, what the unit saved for its adjoint, and the states."""

    ih: Tensor  # W_ih x + b_ih [n t o]
    saved: Tensor  # [n t ·]
    before: Tensor  # h [n t h]
    c_before: Tensor | None = None  # [n t u]
    c: Tensor | None = None
    mask: Tensor | None = None  # [n t 1], one where there is a step

    def here(self, k: Tensor) -> Tensor:
        """k [n t ·], zero where there is no step."""
        return k if self.mask is None else k * self.mask

    def stays(self, k: Tensor) -> Tensor:
        """k [n t ·], one where there is no step: the state does not change."""
        return k if self.mask is None else torch.where(self.mask > 0, k, 1.0)


@final
@dataclass(frozen=True)
class Adjoint:
    """One step back: from the cotangents of h' and c' to those of the sums, and from there to those of h and c.

    Without c, dz = k dh'. With c, dc' ← dc' + p dh', dz = k (dc', dc', dc', dh') and dc = f dc'. In both cases
    dh = W_hhᵀ dz + stay dh'. With a projection, dh' is W_hrᵀ times the cotangent of h'.
    """

    k: Tensor  # [n t gates u], to the sum W_hh h + b_hh
    k_ih: Tensor | None = None  # [n t gates u], to the sum W_ih x + b_ih, where it differs
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


class HiddenMap(ABC):
    """h ↦ W_hh h + b_hh, however it is computed."""

    @abstractmethod
    def of(self, h: Tensor) -> Tensor:
        """The sum by itself [n o]."""

    @abstractmethod
    def added(self, z: Tensor, h: Tensor) -> Tensor:
        """z + W_hh h, plus b_hh unless z has it already."""


@final
@dataclass(frozen=True)
class LinearMap(HiddenMap):
    """h ↦ W h + b; ``added`` expects b in z, where it is added for all times at once."""

    weight: Tensor
    bias: Tensor | None

    def of(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight, self.bias)

    def added(self, z: Tensor, h: Tensor) -> Tensor:
        return torch.addmm(z, h, self.weight.T)


class Unit(ABC):
    """One step of a recurrence: its equations, and their derivatives at all times."""

    @abstractmethod
    def step(self, ih: Tensor, hh: HiddenMap, state: State) -> tuple[Tensor, State]:
        """What the adjoint needs, and the next state, from W_ih x + b_ih [n o] and the map to W_hh h + b_hh."""

    @abstractmethod
    def adjoint(self, trace: UnitTrace) -> Adjoint:
        """The derivatives of all steps."""


@final
class Tanh(Unit):
    """h' = tanh(W_ih x + b_ih + W_hh h + b_hh)."""

    def step(self, ih: Tensor, hh: HiddenMap, state: State) -> tuple[Tensor, State]:
        h = hh.added(ih, state[0]).tanh()
        return h, (h, None)

    def adjoint(self, trace: UnitTrace) -> Adjoint:
        return Adjoint(trace.here(1 - trace.saved.square()).unsqueeze(2), stay=_bypass(trace))


@final
class Relu(Unit):
    """h' = max(0, W_ih x + b_ih + W_hh h + b_hh)."""

    def step(self, ih: Tensor, hh: HiddenMap, state: State) -> tuple[Tensor, State]:
        h = hh.added(ih, state[0]).relu()
        return h, (h, None)

    def adjoint(self, trace: UnitTrace) -> Adjoint:
        slope = (trace.saved > 0).to(trace.saved.dtype)
        return Adjoint(trace.here(slope).unsqueeze(2), stay=_bypass(trace))


@final
class Lstm(Unit):
    """c' = f c + i g and h' = o tanh c' with (i, f, g, o) = (σ, σ, tanh, σ)(W_ih x + b_ih + W_hh h + b_hh)."""

    def step(self, ih: Tensor, hh: HiddenMap, state: State) -> tuple[Tensor, State]:
        z, c = hh.added(ih, state[0]), state[1]
        assert c is not None
        i, f, _, o = z.sigmoid().chunk(4, dim=-1)
        c = torch.addcmul(f * c, i, z.chunk(4, dim=-1)[2].tanh())
        return z, (o * c.tanh(), c)

    def adjoint(self, trace: UnitTrace) -> Adjoint:
        assert trace.c is not None
        assert trace.c_before is not None
        i, f, _, o = trace.saved.sigmoid().chunk(4, dim=-1)
        g, t = trace.saved.chunk(4, dim=-1)[2].tanh(), trace.c.tanh()
        k = (g * i * (1 - i), trace.c_before * f * (1 - f), i * (1 - g * g), t * o * (1 - o))
        p = trace.here(o * (1 - t * t))
        return Adjoint(torch.stack([trace.here(gate) for gate in k], 2), None, _bypass(trace), p, trace.stays(f))


@final
class Gru(Unit):
    """h' = n + u (h − n), n = tanh(z_in + r z_hn), with r, u = σ(z_i + z_h): the two sums have their own cotangents."""

    def step(self, ih: Tensor, hh: HiddenMap, state: State) -> tuple[Tensor, State]:
        h, z = state[0], hh.of(state[0])
        _, u, n = _gates(ih, z)
        return z, (torch.lerp(n, h, u), None)

    def adjoint(self, trace: UnitTrace) -> Adjoint:
        r, u, n = _gates(trace.ih, trace.saved)
        z_n = trace.saved.chunk(3, dim=-1)[2]
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


def _bypass(trace: UnitTrace) -> Tensor | None:
    """The fraction of dh' that bypasses a step: all of it where there is no step."""
    return None if trace.mask is None else 1 - trace.mask

"""Inverses refreshed by Newton's iteration: matrix products only, from an inverse that is nearly right."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from natgrad.operators.factor import aligned, inverse
from natgrad.operators.sent import sent

_LONGEST = 64  # refreshes


@final
class Newton:
    """X ← X(2 − MX), ``steps`` times: the error E = 1 − MX is squared in every step (Schulz 1933).

    It converges where ‖E‖ < 1, that is where M has changed little since X was its inverse. The guard is the norm of E
    before the last step, ‖E‖_F ≤ ``tolerance``, so that ‖E‖² is left after it. Where it fails, Cholesky inverts: at
    once on a CPU. A GPU is not waited for: there the last inverse is kept, and Cholesky inverts as soon as the host
    has heard of it (``failed``), a step or two later. After a failure the next refresh is Cholesky's, after another one
    the next two, then four, up to 64: where the metric moves too far between two refreshes, attempts are wasted.
    Matrices with fewer than ``smallest`` rows, or more than ``largest``, are left to Cholesky: a GPU makes small ones
    from a recording, and for large ones Newton's four products take as long as Cholesky does, and more memory.

    >>> M = torch.tensor([[[2.0, 0.0], [0.0, 4.0]]])
    >>> X, error = Newton(smallest=1).refreshed(M, 0.9 * torch.linalg.inv(M))
    >>> X.diagonal(dim1=-2, dim2=-1), bool(error < 0.05)
    (tensor([[0.4999, 0.2500]]), True)
    """

    def __init__(self, steps: int = 2, tolerance: float = 0.05, smallest: int = 2048, largest: int = 4096) -> None:
        self.steps, self.tolerance, self.smallest, self.largest = steps, tolerance, smallest, largest
        if steps < 1 or not 0 < tolerance < 1 or not 1 <= smallest <= largest:
            raise ValueError(f"Newton needs steps ≥ 1, 0 < tolerance < 1 and 1 ≤ smallest ≤ largest, got {self}")
        self._errors: list[Tensor] = []  # of the last refresh, on the host or on their way there
        self._resting, self._rest = 0, 1  # refreshes that are Cholesky's from now on, and after the next failure

    def __repr__(self) -> str:
        sizes = f"smallest={self.smallest}, largest={self.largest}"
        return f"Newton(steps={self.steps}, tolerance={self.tolerance}, {sizes})"

    def takes(self, size: int) -> bool:
        """Whether it refreshes inverses of matrices with so many rows."""
        return self.smallest <= size <= self.largest

    def failed(self) -> bool:
        """Whether the guard has said no in the last refresh, as far as the host has heard."""
        return any(float(error) > self.tolerance for error in self._errors)

    def trusted(self) -> bool:
        """Whether to go on from the last inverse; asked once before each refresh, which begins anew."""
        failed, tried, self._errors = self.failed(), bool(self._errors), []
        if failed:
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST)
            return False
        if tried:
            self._rest = 1
        self._resting -= 1
        return self._resting < 0

    def refreshed(self, M: Tensor, last: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """X [b d d] from M + shift, shift [b], and the last inverse, and the norm of E before the last step [b].

        Beside M and the last inverse three of their size are held, or on a GPU, where they are not ``aligned``, four.
        M and X are symmetric and read by their rows: tensor cores want both factors contiguous along the index that is
        summed, and rows of whole vectors.
        """
        d, norm = M.shape[-1], M.new_zeros(len(M))
        N, X = aligned(M), aligned(last)
        E, made = torch.empty_like(N), torch.empty_like(N)
        spare = X if X is not last else torch.empty_like(N)
        for step in range(self.steps):
            if shift is None:
                torch.baddbmm(E, X, N.mT, beta=0, alpha=-1, out=E)
            else:
                torch.mul(X, -shift[:, None, None], out=E).baddbmm_(X, N.mT, alpha=-1)
            E.diagonal(dim1=-2, dim2=-1)[:, :d].add_(1.0)  # E is zero where X is no more than aligned
            if step == self.steps - 1:
                norm = torch.linalg.vector_norm(E, dim=(-2, -1))
            torch.baddbmm(X, E, X.mT, out=made)
            X, made, spare = made, spare, made
        return torch.add(X, X.mT, out=E).mul_(0.5)[:, :d, :d], norm

    def inverse(self, M: Tensor, last: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The inverses of M + shift [b d d], every matrix by itself, and which succeeded [b]; by Cholesky where the
        guard says no and the host may know it.
        """
        X, error = self.refreshed(M, last, shift)
        good = error <= self.tolerance
        if M.device.type != "cuda":
            if not bool(good.all()):
                damped = M[~good]
                damped.diagonal(dim1=-2, dim2=-1).add_(shift[~good].unsqueeze(-1))
                X[~good], good[~good] = inverse(damped)
            return X, good
        self._errors.append(sent(error.amax()))
        return X, good

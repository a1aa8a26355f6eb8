"""Damped inverses of many factors, made into memory that is already there, a stack of one size at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import FactorisationError, SingularMetricError
from natgrad.operators.factor import Factor, aligned, by_size, full, inverse, room, stacked
from natgrad.operators.newton import Newton

_NEWTON = 4  # stacks that it holds, for one of Cholesky's
_NOT_POSITIVE = (
    "{} is not positive after damping, in double precision neither: raise the damping, or use a larger batch"
)


@final
@dataclass(frozen=True)
class Task:
    """(F + shift)⁻¹ of layers of one shape, one after the other into ``into`` [b·c d d], or [b·c d] of diagonals.

    >>> task = Task([torch.tensor([[3.0, 1.0]])], [torch.tensor([1.0])], torch.empty(1, 2))
    >>> invert([task])
    []
    >>> task.into
    tensor([[0.2500, 0.5000]])
    """

    factors: Sequence[Factor]  # F [c d d], or [c d], of every layer
    shifts: Sequence[Tensor]  # [c] of every layer
    into: Factor
    titles: Sequence[str] = ()  # of the factor of every layer, for those who must be told

    def runs(self, held: int = 1) -> Iterator[Task]:
        """The task, cut where there is no room for all of its layers at once, ``held`` times over."""
        c, factor = self.factors[0].shape[0], self.factors[0]
        several = max(1, room(factor) // (held * factor.nbytes))
        for at in range(0, len(self.factors), several):
            to = at + several
            yield Task(self.factors[at:to], self.shifts[at:to], self.into[at * c : to * c], self.titles[at:to])

    @property
    def each(self) -> list[str]:
        """The titles of all matrices."""
        groups, size = self.factors[0].shape[0], self.into.shape[-1]
        titles = self.titles or [f"a factor of size {size} of the metric"] * len(self.factors)
        return [title for title in titles for _ in range(groups)]


def invert(tasks: Sequence[Task], warm: bool = False, newton: Newton | None = None, wait: bool = False) -> list[Tensor]:
    """Do the tasks. What is held beside their results is one damped stack and, on a GPU, its triangular inverse.

    A matrix that Cholesky cannot invert is tried in double precision. ``warm``: the last inverses are there, and that
    of a matrix which cannot be inverted stays; all others are made, and then it raises. Without one it raises at once.
    A GPU is not waited for, unless it is to be: there nothing is tried again, and what comes back are numbers on it,
    above 0 if there is such a matrix, whose inverse stays, or is NaN. With ``newton`` inverses are refreshed where the
    last is near enough. Every stack is looked at before it is written.
    """
    for task in tasks:
        if not full(task.into):
            torch.add(stacked(task.factors), torch.cat(list(task.shifts)).unsqueeze(-1), out=task.into).reciprocal_()
    refresh = newton if warm else None

    def held(size: int) -> int:
        return _NEWTON if refresh is not None and refresh.takes(size) else 1

    runs = [run for task in tasks if full(task.into) for run in task.runs(held(task.into.shape[-1]))]
    failed: list[str] = []
    flags: list[Tensor] = []
    for stack in by_size([run.into for run in runs], held):
        failed += _invert([runs[at] for at in stack], warm, refresh, None if wait else flags)
    if failed:
        raise FactorisationError(_NOT_POSITIVE.format(", ".join(failed)))
    return [torch.stack(flags).sum().float()] if flags else []


def _invert(runs: Sequence[Task], warm: bool, newton: Newton | None, flags: list[Tensor] | None) -> list[str]:
    """Invert a stack; the titles of matrices that could not be. On a GPU a flag is added, above 0 if there are any.

    ``flags``: None where a GPU is waited for.
    """
    found, good, certain = _inverses(runs, newton)
    failed: list[str] = []
    if found.device.type == "cpu" or flags is None:
        _try_again(runs, found, good)
    if found.device.type != "cpu" and flags is not None:
        flags += [] if certain else [(~good).sum()]
    elif not bool(good.all()):
        titles = [title for run in runs for title in run.each]
        failed = [title for title, ok in zip(titles, good.tolist(), strict=True) if not ok]
        if not warm:
            raise SingularMetricError(_NOT_POSITIVE.format(", ".join(failed)))
    _write(runs, found, good, warm)
    return failed


def _inverses(runs: Sequence[Task], newton: Newton | None) -> tuple[Tensor, Tensor, bool]:
    """The inverses [b d d], which succeeded [b], and whether somebody else looks after those that did not."""
    d = runs[0].into.shape[-1]
    refreshed = newton is not None and newton.takes(d)
    if newton is not None and refreshed:
        factors = stacked([factor for run in runs for factor in run.factors])
        found, good = newton.inverse(factors, stacked([run.into for run in runs]), _shifts(runs))
    else:
        found, good = inverse(_damped(runs))
        found = found[:, :d, :d]
    return found, good, refreshed


def _try_again(runs: Sequence[Task], found: Tensor, good: Tensor) -> None:
    """Those that could not be inverted, in double precision."""
    if found.dtype == torch.float64 or bool(good.all()):
        return
    again, better = inverse(_damped(runs, torch.float64)[~good])
    found[~good], good[~good] = again[:, : found.shape[-1], : found.shape[-1]].to(found.dtype), better


def _write(runs: Sequence[Task], found: Tensor, good: Tensor, warm: bool) -> None:
    counts, certain = [run.into.shape[0] for run in runs], found.device.type == "cpu" and bool(good.all())
    for run, new, ok in zip(runs, found.split(counts), good.split(counts), strict=True):
        if certain:
            run.into.copy_(new)
        else:  # without a last inverse there is nothing to go on with, and a step with NaN is not made
            last = run.into if warm else torch.full_like(run.into[:, :1, :1], torch.nan)
            torch.where(ok[:, None, None], new, last, out=run.into)


def _shifts(runs: Sequence[Task]) -> Tensor:
    return torch.cat([shift for run in runs for shift in run.shifts])


def _damped(runs: Sequence[Task], dtype: torch.dtype | None = None) -> Tensor:
    """F + shift [b d d] in memory of its own; where it is ``aligned``, with a unit matrix below."""
    factors = [factor for run in runs for factor in run.factors]
    stack = stacked(factors).to(dtype or factors[0].dtype)
    M, d = aligned(stack), stack.shape[-1]
    M = M.clone(memory_format=torch.contiguous_format) if M is factors[0] else M
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    diagonal[:, :d].add_(_shifts(runs).unsqueeze(-1))
    if M.shape[-1] > d:
        diagonal[:, d:].fill_(1.0)
    return M

"""Damped inverses of many factors, made into memory that is already there, a stack of one size at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import SingularMetricError
from natgrad.operators.factor import Factor, aligned, by_size, full, inverse, room, stacked
from natgrad.operators.newton import Newton


@final
@dataclass(frozen=True)
class Task:
    """(F + shift)⁻¹ of layers of one shape, one after the other into ``into`` [b·c d d], or [b·c d] of diagonals.

    >>> task = Task([torch.tensor([[3.0, 1.0]])], [torch.tensor([1.0])], torch.empty(1, 2))
    >>> invert([task])
    >>> task.into
    tensor([[0.2500, 0.5000]])
    """

    factors: Sequence[Factor]  # F [c d d], or [c d], of every layer
    shifts: Sequence[Tensor]  # [c] of every layer
    into: Factor

    def runs(self) -> Iterator[Task]:
        """The task, cut where there is no room for all of its layers at once."""
        c, factor = self.factors[0].shape[0], self.factors[0]
        several = max(1, room(factor) // factor.nbytes)
        for at in range(0, len(self.factors), several):
            to = at + several
            yield Task(self.factors[at:to], self.shifts[at:to], self.into[at * c : to * c])


def invert(tasks: Sequence[Task], warm: bool = False, newton: Newton | None = None) -> None:
    """Do the tasks. What is held beside their results is one damped stack and, on a GPU, its triangular inverse.

    ``warm``: the last inverses are there. That of a matrix which Cholesky cannot invert stays; without one it raises,
    on a CPU: a GPU is not waited for. With ``newton`` they are refreshed where that is near enough. Every stack is
    looked at before it is written: if a later one raises, those before it are new and the others as they were.
    """
    for task in tasks:
        if not full(task.into):
            torch.add(stacked(task.factors), torch.cat(list(task.shifts)).unsqueeze(-1), out=task.into).reciprocal_()
    runs = [run for task in tasks if full(task.into) for run in task.runs()]
    for stack in by_size([run.into for run in runs]):
        _invert([runs[at] for at in stack], warm, newton)


def _invert(runs: Sequence[Task], warm: bool, newton: Newton | None) -> None:
    d = runs[0].into.shape[-1]
    if warm and newton is not None and d >= newton.smallest:
        factors = stacked([factor for run in runs for factor in run.factors])
        found, good = newton.inverse(factors, stacked([run.into for run in runs]), _shifts(runs))
    else:
        found, good = inverse(_damped(runs))
        found = found[:, :d, :d]
    failed = found.device.type == "cpu" and not bool(good.all())
    if failed and not warm:
        raise SingularMetricError(
            f"a factor of size {d} of the metric is not positive after damping: raise the damping"
        )
    counts = [run.into.shape[0] for run in runs]
    for run, new, ok in zip(runs, found.split(counts), good.split(counts), strict=True):
        if failed or (warm and found.device.type != "cpu"):
            torch.where(ok[:, None, None], new, run.into, out=run.into)
        else:
            run.into.copy_(new)


def _shifts(runs: Sequence[Task]) -> Tensor:
    return torch.cat([shift for run in runs for shift in run.shifts])


def _damped(runs: Sequence[Task]) -> Tensor:
    """F + shift [b d d] in memory of its own; where it is ``aligned``, with a unit matrix below."""
    factors = [factor for run in runs for factor in run.factors]
    stack = stacked(factors)
    M, d = aligned(stack), stack.shape[-1]
    M = M.clone(memory_format=torch.contiguous_format) if M is factors[0] else M
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    diagonal[:, :d].add_(_shifts(runs).unsqueeze(-1))
    if M.shape[-1] > d:
        diagonal[:, d:].fill_(1.0)
    return M

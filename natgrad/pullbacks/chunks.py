"""Ranges of examples whose forward pass fits into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from natgrad.accelerate.devices import is_asynchronous
from natgrad.accelerate.temporaries import CHUNK_BYTES
from natgrad.errors import BatchStatisticsError
from natgrad.model import Inputs, Model, map_tensors, refuse_nested, tensors_of
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.neighbours import number_examples
from natgrad.pullbacks.rows import agree
from natgrad.pullbacks.tape import Tape, TapeOverflow, activations, record

ExampleRange: TypeAlias = tuple[int, int]  # examples start to stop
_EXPANSION = 64  # outputs of a layer over inputs of the model, at the most, before memory is looked after


def examples(x: Inputs, chunk: ExampleRange, n: int) -> Inputs:
    """The inputs of a range of examples."""
    if chunk == (0, n):
        return x
    return map_tensors(x, lambda t: t[chunk[0] : chunk[1]])


def check_inputs(model: Model, x: Inputs) -> None:
    """Refuse an empty batch, nested tensors, and inputs that lie on another device than the parameters."""
    if isinstance(x, DataLoader):
        raise TypeError("x is a DataLoader, where one batch of inputs belongs: call this for every batch of it")
    refuse_nested(x, "the inputs")
    for t in tensors_of(x):
        if t.ndim and t.shape[0] == 0:
            raise ValueError("the batch is empty: an input has no example on its first axis")
        if t.ndim and t.device != model.example.device:  # a number may come from anywhere
            raise ValueError(
                f"an input is on {t.device} and the parameters are on {model.example.device}: move it there, "
                f"x.to({str(model.example.device)!r})"
            )


def ranges(start: int, stop: int, step: int) -> list[ExampleRange]:
    """From start to stop in steps."""
    return [(a, min(a + step, stop)) for a in range(start, stop, step)]


def chunk_bytes(memory: int) -> int:
    """What a temporary may occupy: an eighth of the bound, and no more than stays fast."""
    return max(1, min(memory // 8, CHUNK_BYTES))


def pass_bytes(memory: int, device: torch.device) -> int:
    """What the activations of a pass may occupy: half of the bound on a GPU, which is slow where a batch is cut.

    >>> pass_bytes(2**32, torch.device("cpu")) == 2**28, pass_bytes(2**32, torch.device("cuda")) == 2**31
    (True, True)
    """
    return max(1, memory // 2) if is_asynchronous(device) else chunk_bytes(memory)


def separable(x: Inputs, n: int) -> bool:
    """Whether every input has the n examples on its first axis, so that a range of them can be taken."""
    tensors = tensors_of(x)
    return bool(tensors) and all(t.ndim and t.shape[0] == n for t in tensors)


_UNCUT = (
    "the batch of {} examples does not fit into memory= whole and cannot be cut: {}. Raise memory= so that it fits{}"
)


def check_cut(model: Model, x: Inputs, n: int) -> None:
    """Refuse to cut a batch whose examples are numbered, before an example looks for one that is not there."""
    if number_examples(model, x):
        why = (
            "integers among the inputs number its examples, or integers of the model do (a table of neighbours, edges)"
        )
        raise BatchStatisticsError(_UNCUT.format(n, why, " whole"))


@contextmanager
def _on_part(step: int, n: int) -> Iterator[None]:
    """An error of the model on ``step`` of n examples is about the others, which it looks for."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if step == n:
            raise
        raise BatchStatisticsError(
            _UNCUT.format(n, f"on {step} of them the model fails ({error})", " whole")
        ) from error


def check_independent(model: Model, x: Inputs, step: int, n: int, y: Tensor | None = None) -> None:
    """Raise if the first examples have other outputs in a batch of ``step`` (y, if known) than in one of another size.

    A batch that is cut into ranges must give the outputs of the whole one.
    """
    few = 2 if step > 2 else min(step + 1, n)
    if y is None:
        check_cut(model, x, n)
    with torch.no_grad(), _on_part(min(few, step), n):
        y = model(None, examples(x, (0, step), n)) if y is None else y.detach()
        other = model(None, examples(x, (0, few), n))
    same = min(few, step)
    if other.shape[0] == few and (agree(other[:same], y[:same]) or not bool(y[:same].isfinite().all())):
        return  # what is not finite is reported with its origin
    why = (
        f"in batches of {few} and {step} the first examples have different outputs, so examples influence each other, "
        "or the model is random"
    )
    independent = " whole, or evaluate the model so that its examples are independent"
    raise BatchStatisticsError(_UNCUT.format(n, why, independent))


def forward(
    model: Model, blocks: Sequence[Block], x: Inputs, bound: int, operations: bool = False
) -> tuple[Tape, list[ExampleRange]]:
    """The tape of the batch, or, if that is too large, of its first range, with all ranges.

    A batch can be cut where every input has the same number of examples on its first axis and the outputs follow.
    """
    sizes = {t.shape[0] if t.ndim else 0 for t in tensors_of(x)}
    n = sizes.pop() if len(sizes) == 1 else 0
    row = 0 if operations else sum(b.size for b in blocks if b.rule is None) * model.example.element_size()
    step = n if row == 0 else min(n, max(1, bound // row))
    if step < n:
        check_cut(model, x, n)
    # The pass that is cut short has made one layer's outputs already: do not try it where inputs alone come close.
    large = step > 1 and _EXPANSION * sum(t.numel() * t.element_size() for t in tensors_of(x)) > bound
    if large and not number_examples(model, x):
        with _on_part(1, n):
            step = min(step, max(1, bound // max(1, activations(model, examples(x, (0, 1), n)))))
    while step > 0:
        try:
            with _on_part(step, n):
                tape = record(model, blocks, examples(x, (0, step), n), bound if step > 1 else None, operations)
        except TapeOverflow:
            if step == n:
                check_cut(model, x, n)
            step //= 2
            continue
        if step == n:
            return tape, [(0, tape.y.shape[0])]  # outputs may have more examples than inputs: tokens, for one
        if tape.y.shape[0] == step:
            check_independent(model, x, step, n, tape.y)
            return tape, ranges(0, n, step)
        break
    tape = record(model, blocks, x, operations=operations)
    return tape, [(0, tape.y.shape[0])]

"""Ranges of the examples of a batch: whether it can be taken apart, and the size of temporaries."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.utils.data import DataLoader

from natgrad.accelerate.temporaries import CHUNK_BYTES
from natgrad.errors import BatchStatisticsError
from natgrad.model import Inputs, Model, map_tensors, refuse_nested, tensors_of
from natgrad.pullbacks.neighbours import number_examples
from natgrad.pullbacks.rows import agree

ExampleRange: TypeAlias = tuple[int, int]  # examples start to stop


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


def chunk_bytes(memory: int) -> int:
    """What a temporary may occupy: an eighth of the bound, and no more than stays fast."""
    return max(1, min(memory // 8, CHUNK_BYTES))


def separable(x: Inputs, n: int) -> bool:
    """Whether every input has the n examples on its first axis, so that a range of them can be taken."""
    tensors = tensors_of(x)
    return bool(tensors) and all(t.ndim and t.shape[0] == n for t in tensors)


_WHOLE = "the batch of {} examples cannot be taken apart: {}. Give all of them at once"


def check_independent(model: Model, x: Inputs, step: int, n: int) -> None:
    """Raise if the first examples have other outputs in a batch of ``step`` than in one of another size.

    A batch that is taken apart must give the outputs of the whole one. Examples that are numbered are refused before
    one of them looks for another that is not there.
    """
    if number_examples(model, x):
        why = (
            "integers among the inputs number its examples, or integers of the model do (a table of neighbours, edges)"
        )
        raise BatchStatisticsError(_WHOLE.format(n, why))
    few = 2 if step > 2 else min(step + 1, n)
    same = min(few, step)
    try:
        with torch.no_grad():
            y, other = (model(None, examples(x, (0, count), n)) for count in (step, few))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if step == n:
            raise
        raise BatchStatisticsError(_WHOLE.format(n, f"on {same} of them the model fails ({error})")) from error
    if other.shape[0] == few and (agree(other[:same], y[:same]) or not bool(y[:same].isfinite().all())):
        return  # what is not finite is reported with its origin
    why = (
        f"in batches of {few} and {step} the first examples have different outputs, so examples influence each other, "
        "or the model is random"
    )
    raise BatchStatisticsError(_WHOLE.format(n, why) + ", or evaluate the model so that its examples are independent")

"""Per-example rows R[k n p] = J_nᵀ s_kn for parameters that no layer rule covers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.accelerate.devices import is_asynchronous, outside_inference_mode
from natgrad.errors import BatchStatisticsError
from natgrad.log import OnceLogger
from natgrad.model import Inputs, Model, map_tensors, tensors_of
from natgrad.pullbacks.neighbours import number_examples
from natgrad.pullbacks.tape import Tape

# Whether examples give the same outputs in batches of different sizes, to rounding.


# Relative to the largest output of an example, by the bytes of a number. On a GPU products are done in tf32, in an
# order that depends on the batch.
_TOLERANCE = {8: 1e-8, 4: 1e-4, 2: 5e-2}
_TOLERANCE_GPU = {8: 1e-8, 4: 5e-3, 2: 5e-2}


def agree(here: Tensor, there: Tensor) -> bool:
    """Whether two tensors of outputs [n *out] are those of the same examples, each by itself.

    >>> import torch
    >>> agree(torch.ones(2, 3), torch.ones(2, 3) + 1e-7), agree(torch.ones(2, 3), torch.ones(2, 3) + 1e-3)
    (True, False)
    """
    if here.shape != there.shape:
        return False
    tolerance = _tolerance(there)
    gap, size = ((t.reshape(len(there), -1).norm(dim=1)).amax() for t in (here - there, there))
    return bool(gap <= tolerance * size)


def _tolerance(t: Tensor) -> float:
    return (_TOLERANCE_GPU if is_asynchronous(t.device) else _TOLERANCE)[t.element_size()]


_MIXED = (
    "an example alone has other outputs, or derivatives, than in its batch: one example depends on others (z @ z.T, "
    "F.batch_norm(…, training=True), a table of neighbours), the examples are not on the first axis of the inputs, or "
    "torch.func.vmap has another derivative (torch.cdist). One backward pass an example instead, which is slow"
)
_OF_PASS = (
    "the forward pass has batch statistics or drew random numbers, which belong to it alone: parameters without a rule "
    "are differentiated in its graph, by one backward pass an example, which is slow"
)
_UNMAPPED = (
    "torch.func.vmap cannot follow the model on one example (%s): the outputs of one example depend on the others, or "
    "an operation has no rule for vmap. One backward pass an example instead, which is slow"
)


def rows(
    model: Model, tape: Tape, names: Sequence[str], x: Inputs, s: Tensor, logger: OnceLogger, limit: int
) -> Tensor:
    """R [k n p] for the named parameters, flattened in that order; s [k n *out] are cotangents of the outputs.

    Every example is evaluated as a batch of one under ``vmap``. That is not the function of the pass on ``tape`` if its
    examples mix, if it drew random numbers or has batch statistics, or if inputs have no examples on their first axis.
    Then, and where vmap cannot follow the model, the graph of the pass itself is differentiated, one cotangent an
    example: its masks and its statistics are constants, and it is more work. ``limit``: elements of cotangents in
    flight. ``logger`` says once why it is slow.
    """
    inputs, n = tensors_of(x), s.shape[1]
    if inputs and all(t.ndim > 0 and t.shape[0] == n for t in inputs):
        try:
            model.check_separable()
            if not number_examples(model, x):
                alone, mapped = _rows_by_example(model, names, x, s)
                if agree(alone, tape.y.detach().to(alone.dtype)) and _adds_up(tape, names, mapped, s):
                    return mapped.to(s.dtype)
            logger.log_once(logging.INFO, _MIXED)
        except BatchStatisticsError:
            logger.log_once(logging.INFO, _OF_PASS)
        except (RuntimeError, ValueError, IndexError) as error:  # a mistake in the model is raised again below
            logger.log_once(logging.INFO, _UNMAPPED, error)
    if not tape.y.requires_grad or not all(name in tape.leaves for name in names):
        tape = _passed(model, names, x)
    return _rows_on_tape(tape, names, s, limit).to(s.dtype)


@outside_inference_mode()
def _rows_by_example(model: Model, names: Sequence[str], x: Inputs, s: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [n *out] of every example alone, and R [k n p]."""
    params = {name: model.params[name].detach() for name in names}

    def one(inputs: list[Tensor], cotangents: Tensor) -> tuple[Tensor, Tensor]:
        supply = iter(inputs)
        x_n = map_tensors(x, lambda _: next(supply).unsqueeze(0))
        y_n, vjp = torch.func.vjp(lambda θ: model(θ, x_n)[0], params)[:2]
        (grads,) = torch.func.vmap(vjp)(cotangents.to(y_n.dtype))
        return y_n, torch.cat([grads[name].reshape(len(cotangents), -1) for name in names], dim=1)

    # Outside the transforms nothing is differentiated: the other trainable parameters must not hold a graph.
    with torch.no_grad():
        y, mapped = torch.func.vmap(one, in_dims=(0, 1))(tensors_of(x), s)
    return y, mapped.transpose(0, 1)


def _adds_up(tape: Tape, names: Sequence[str], mapped: Tensor, s: Tensor) -> bool:
    """Whether Σ_n R_n of a sum of all columns is Jᵀs by the graph of the pass, if that is there.

    If not, an operation has a wrong derivative under vmap (as ``torch.cdist``, in torch 2.13), examples mix, or the
    model reads a parameter that it holds elsewhere than in a module, where other values cannot be put.
    """
    if not tape.y.requires_grad or not all(name in tape.leaves for name in names):
        return True
    weights = torch.linspace(1, 2, len(s), dtype=s.dtype, device=s.device)  # columns do not cancel
    whole = tape.leaf_cotangents([tape.leaves[name] for name in names], torch.tensordot(weights, s, 1).unsqueeze(0))
    total = torch.tensordot(weights.to(mapped), mapped, 1)  # [n p]
    gap = (total.sum(0) - torch.cat([g.flatten() for g in whole]).to(total)).norm()
    return bool(gap <= _tolerance(total) * mapped.norm(dim=2).sum())


def _passed(model: Model, names: Sequence[str], x: Inputs) -> Tape:
    """A pass with a graph of the named parameters."""
    leaves = {name: model.params[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        return Tape(model(leaves, x), (), leaves=leaves)


def _rows_on_tape(tape: Tape, names: Sequence[str], s: Tensor, limit: int) -> Tensor:
    """R [k n p] through the graph of a pass: the cotangent of a row is that of one example, s[k n], and zero else."""
    k, n = s.shape[:2]
    leaves = [tape.leaves[name] for name in names]
    out = s.new_zeros(k * n, sum(p.numel() for p in leaves))
    if not tape.y.requires_grad:
        return out.reshape(k, n, -1)
    in_flight = max(tape.y.numel(), sum(shape.numel() for use in tape.uses for shape in use.shapes))
    pairs = torch.arange(k * n, device=s.device)
    for some in pairs.split(max(1, limit // in_flight)):
        column, example = some // n, some % n
        alone = s.new_zeros(len(some), *s.shape[1:])
        alone[torch.arange(len(some), device=s.device), example] = s[column, example]
        out[some] = torch.cat([g.reshape(len(g), -1).to(s.dtype) for g in tape.leaf_cotangents(leaves, alone)], dim=1)
    return out.reshape(k, n, -1)

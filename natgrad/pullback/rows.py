"""Per-example rows R[k n p] = J_nᵀ s_kn by ``torch.func``, for parameters that no layer rule covers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.accelerate.devices import is_asynchronous
from natgrad.errors import BatchStatisticsError
from natgrad.log import OnceLogger
from natgrad.model import Inputs, Model, evaluating, map_tensors, tensors_of

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
    tolerance = (_TOLERANCE_GPU if is_asynchronous(there.device) else _TOLERANCE)[here.element_size()]
    gap, size = ((t.reshape(len(there), -1).norm(dim=1)).amax() for t in (here - there, there))
    return bool(gap <= tolerance * size)


_MIXED = (
    "an example alone has other outputs than in its batch: the outputs of one example depend on the others (z @ z.T, "
    "F.batch_norm(…, training=True)), or the examples are not on the first axis of the inputs. One backward pass an "
    "example instead, which is slow"
)
_UNMAPPED = (
    "torch.func.vmap cannot follow the model on one example (%s): the outputs of one example depend on the others, or "
    "an operation has no rule for vmap. One backward pass an example instead, which is slow"
)


def rows(model: Model, names: Sequence[str], x: Inputs, y: Tensor, s: Tensor, logger: OnceLogger) -> Tensor:
    """R [k n p] for the named parameters, flattened in that order; s [k n *out] are cotangents of the outputs y.

    Every example is evaluated as a batch of one under ``vmap``. Inputs without examples on their first axis (then an
    example alone gives other outputs), and models that vmap cannot follow, are differentiated as a whole batch
    instead, one cotangent an example: the same numbers, more work.

    A model whose examples mix, or that draws random numbers, in training mode is differentiated in evaluation mode: it
    runs here once more, and batch statistics and masks cannot be those of the pass that y is from.
    ``logger`` says once why it is slow.
    """
    module = model.module
    if module is None or not any(m.training for m in module.modules()):
        return _rows(model, names, x, y, s, logger)
    try:
        model.check_separable()
        return _rows(model, names, x, y, s, logger)
    except BatchStatisticsError:
        with evaluating(module):
            with torch.no_grad():
                y = model(None, x)
            return _rows(model, names, x, y, s, logger)


def _rows(model: Model, names: Sequence[str], x: Inputs, y: Tensor, s: Tensor, logger: OnceLogger) -> Tensor:
    n = s.shape[1]
    inputs = tensors_of(x)
    if inputs and all(t.ndim > 0 and t.shape[0] == n for t in inputs):
        try:
            alone, mapped = _rows_by_example(model, names, x, s)
            if agree(alone, y):
                return mapped.to(s.dtype)
            logger.log_once(logging.INFO, _MIXED)
        except (RuntimeError, ValueError) as error:  # a genuine mistake in the model is raised again below
            logger.log_once(logging.INFO, _UNMAPPED, error)
    return _rows_by_batch(model, names, x, s).to(s.dtype)


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


def _rows_by_batch(model: Model, names: Sequence[str], x: Inputs, s: Tensor) -> Tensor:
    k, n = s.shape[:2]
    leaves = {name: model.params[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        y = model(leaves, x)
    if not y.requires_grad:
        return s.new_zeros(k, n, sum(p.numel() for p in leaves.values()))
    # One example a cotangent: s[k n] on the diagonal of [n n].
    alone = torch.diag_embed(s.movedim(1, -1)).movedim((-2, -1), (1, 2)).flatten(0, 1).to(y.dtype)
    values = list(leaves.values())
    grads = torch.autograd.grad(y, values, alone, is_grads_batched=True, allow_unused=True)
    flat = [
        s.new_zeros(k * n, p.numel()) if g is None else g.reshape(k * n, -1) for g, p in zip(grads, values, strict=True)
    ]
    return torch.cat(flat, dim=1).reshape(k, n, -1)

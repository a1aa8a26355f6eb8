"""Examples by themselves: rows R[k n p] of parameters without a layer rule, and whether a batch can be taken apart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.autograd import OperationMode, storage
from natgrad.accelerate.devices import is_asynchronous, outside_inference_mode
from natgrad.errors import BatchStatisticsError
from natgrad.log import OnceLogger
from natgrad.model import Inputs, Model, count_examples, examples, map_tensors, tensors_of
from natgrad.pullbacks.tape import Tape

# Integers that number examples: tables of neighbours [n k], lists of edges [n 2], given or held by the model.
#
# Examples with such numbers cannot be taken apart. An example alone has no neighbour number 7: on a CPU that is an
# ``IndexError``, on a GPU a failed assertion, after which the process can do nothing more; and where the numbers happen
# to fit, they name other examples than they did. So it is found out before, from a pass over all examples.


# Operations that pick rows of data, or write to rows of what may be new: (data, axis, index), (data, an index for every
# axis) and (data, an index of the first axis).
_PICK_ALONG = frozenset(("index_select", "gather"))
_WRITE_ALONG = frozenset(
    f"{name}{how}"
    for name, hows in (("index", ("_add", "_copy", "_reduce", "_fill")), ("scatter", ("", "_add", "_reduce")))
    for how in hows
)
_PICK_BY_AXIS = frozenset(("index", "_unsafe_index"))
_WRITE_BY_AXIS = frozenset(("index_put", "_index_put_impl", "_unsafe_index_put"))
_PICK_FIRST = frozenset(("embedding", "embedding_bag"))
# Their results number places that are there, however many examples there are.
_ORDERS = frozenset(("sort", "argsort", "topk", "nonzero", "argmax", "argmin", "max", "min", "unique", "_unique2"))


def number_examples(model: Model, x: Inputs) -> bool:
    """Whether integers that the pass does not make are used as numbers of examples.

    They are among the inputs, or the model holds them. A pass over x is made if there may be such integers.

    >>> x, at, w = torch.randn(3, 2), torch.tensor([1, 2, 0]), {"w": torch.ones(5, 2)}
    >>> by_neighbour, by_token = (Model.of(f, w) for f in (lambda θ, x: x[0][x[1]], lambda θ, x: θ["w"][x[1]]))
    >>> number_examples(by_neighbour, (x, at)), number_examples(by_token, (x, at))
    (True, False)
    >>> number_examples(Model.of(lambda θ, x: x[at], w), x)
    True
    """
    inputs = tensors_of(x)
    if not _has_integers(inputs) and model.module is not None and not _holds_integers(model.module):
        return False
    mode = _Numbers(inputs)
    mode.enter()
    try:
        with torch.no_grad():
            model(None, x)
    finally:
        mode.leave()
    return mode.indexed


@final
class _Numbers(OperationMode):
    """Follows the memory that depends on the inputs, and integers that were there before, or are made of such alone."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.indexed = False
        self._n = count_examples(list(inputs))
        self._data = {storage(t) for t in inputs}
        self._integers = set[int]()  # made of integers that were there before
        self._of_pass = set[int]()  # all that the pass makes

    def see(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain = name.rstrip("_") if not name.startswith("_") else "_" + name.strip("_")
        self.indexed = self.indexed or self._numbers_rows(plain, args)
        each = (t for a in (*args, *kwargs.values()) for t in (a if isinstance(a, (list, tuple)) else (a,)))
        tensors = [t for t in each if isinstance(t, Tensor)]
        given = {storage(t) for t in tensors}
        data, integers = not given.isdisjoint(self._data), any(map(self._is_number, tensors))
        out = run(*args, **kwargs)
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, Tensor):
                at = storage(t)
                _put(self._data, at, data)
                _put(self._integers, at, integers and _is_integer(t) and plain not in _ORDERS)
                if at not in given:
                    self._of_pass.add(at)
        return out

    def _is_number(self, t: Tensor) -> bool:
        """Whether a tensor holds integers that were there before the pass, or are made of such alone."""
        return _is_integer(t) and (storage(t) in self._integers or storage(t) not in self._of_pass)

    def _numbers_rows(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether an operation picks rows of the examples, or writes to them, by integers that were there before."""
        if not args or not isinstance(args[0], Tensor) or not args[0].ndim or args[0].shape[0] % self._n:
            return False
        of_examples = storage(args[0]) in self._data  # and no table that is always there
        if name in _WRITE_ALONG or (of_examples and name in _PICK_ALONG):
            index = args[2] if args[1] % args[0].ndim == 0 else None
        elif name in _WRITE_BY_AXIS or (of_examples and name in _PICK_BY_AXIS):
            index = args[1][0] if args[1] else None
        else:
            index = args[1] if of_examples and name in _PICK_FIRST else None
        return isinstance(index, Tensor) and self._is_number(index)


def _put(addresses: set[int], at: int, member: bool) -> None:
    """Memory is given out again: what was there before is forgotten."""
    (addresses.add if member else addresses.discard)(at)


def _has_integers(tensors: Iterable[Tensor]) -> bool:
    return any(_is_integer(t) and t.ndim for t in tensors)


def _holds_integers(module: nn.Module) -> bool:
    """Whether a buffer or another attribute of a module is a tensor of integers, or a collection with one."""
    return any(_has_integers(_tensors_in(vars(m), depth=3)) for m in module.modules())


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    """The tensors in a collection and those in it. Collections of other types may do anything when asked."""
    if isinstance(value, Tensor):
        yield value
    elif depth and type(value) in (dict, list, tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each, depth - 1)


def _is_integer(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex() and t.dtype is not torch.bool


# Rows, by ``vmap`` over the examples or, where these do not stand alone, in the graph of the pass.


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
    """A pass with a graph of the named parameters: in inference mode the pass that was recorded has none."""
    leaves = {name: model.params[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        return Tape(model(leaves, x), (), leaves=leaves)


def _rows_on_tape(tape: Tape, names: Sequence[str], s: Tensor, limit: int) -> Tensor:
    """R [k n p] through the graph of a pass: the cotangent of a row is that of one example, s[k n], and zero else."""
    k, n = s.shape[:2]
    leaves = [tape.leaves[name] for name in names]
    out = s.new_zeros(k * n, sum(p.numel() for p in leaves))
    if not tape.y.requires_grad:  # the outputs depend on none of these parameters
        return out.reshape(k, n, -1)
    in_flight = max(tape.y.numel(), sum(shape.numel() for use in tape.uses for shape in use.shapes))
    pairs = torch.arange(k * n, device=s.device)
    for some in pairs.split(max(1, limit // in_flight)):
        column, example = some // n, some % n
        alone = s.new_zeros(len(some), *s.shape[1:])
        alone[torch.arange(len(some), device=s.device), example] = s[column, example]
        out[some] = torch.cat([g.reshape(len(g), -1).to(s.dtype) for g in tape.leaf_cotangents(leaves, alone)], dim=1)
    return out.reshape(k, n, -1)


# Whether a batch can be taken apart.


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

"""Integers that number examples: tables of neighbours [n k], lists of edges [n 2], given or held by the model.

Examples with such numbers cannot be taken apart. An example alone has no neighbour number 7: on a CPU that is an
``IndexError``, on a GPU a failed assertion, after which the process can do nothing more; and where the numbers happen
to fit, they name other examples than they did. So it is found out before, from a pass over all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.autograd import OperationMode, storage
from natgrad.model import Inputs, Model, count_examples, tensors_of

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

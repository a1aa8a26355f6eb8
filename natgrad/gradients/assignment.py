"""Which parameters are matrices, and which AdamW steps: from the modules of a model, never from names.

A gain, a bias, an embedding and a head are no maps between activations, and a metric S ⊗ A says little of them. All
else is a matrix, or several: a stack of experts, a projection of queries, keys and values. ``plan()`` shows what was
decided, and why; a parameter group decides otherwise.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from natgrad.errors import IncompatibleError
from natgrad.log import listed
from natgrad.model import unwrapped
from natgrad.optim.parameters import embeddings_in, kernels_in
from natgrad.optim.update import complete
from natgrad.show import as_html, brief

_log = logging.getLogger("natgrad")


@final
@dataclass(frozen=True)
class Assignment:
    """What steps one parameter, and why. A matrix is seen as W [n k o i]: n matrices with k offsets each.

    ``stack``: its first axis counts matrices. ``offsets``: of a kernel [o i *k] they share the factors; without, the
    kernel is the matrix [o i·k]. ``blocks`` (r, c): every matrix is r × c matrices.

    >>> import torch
    >>> qkv = Assignment("qkv", (6, 2), "Muon", "a group says so", blocks=(3, 1))
    >>> qkv.sizes, qkv.split(torch.arange(12.0).view(6, 2))[1]
    ((3, 1, 2, 2), tensor([[[4., 5.],
             [6., 7.]]]))
    """

    name: str
    shape: tuple[int, ...]
    optimizer: str
    why: str
    stack: bool = field(default=False, kw_only=True)
    offsets: bool = field(default=False, kw_only=True)
    blocks: tuple[int, int] = field(default=(1, 1), kw_only=True)

    @cached_property
    def is_matrix(self) -> bool:
        """Whether a metric steps it."""
        return self.optimizer != "AdamW"

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """n, k, o and i."""
        n, (o, i, *rest) = (self.shape[0], self.shape[1:]) if self.stack else (1, self.shape)
        k, (r, c) = math.prod(rest), self.blocks
        return (n, k, o, i) if self.offsets else (n * r * c, 1, o // r, i * k // c)

    def split(self, t: Tensor) -> Tensor:
        """[n k o i] of a tensor like the parameter."""
        n, k, o, i = self.sizes
        if k > 1:
            return t.reshape(o, i, k).movedim(2, 0).unsqueeze(0)
        if self.blocks == (1, 1):
            return t.reshape(n, k, o, i)
        r, c = self.blocks
        return t.reshape(n // (r * c), r, o, c, i).transpose(2, 3).reshape(n, k, o, i)

    def join(self, W: Tensor) -> Tensor:
        """A tensor like the parameter from W [n k o i]."""
        n, k, o, i = self.sizes
        if k > 1:
            W = W.squeeze(0).movedim(0, 2)
        elif self.blocks != (1, 1):
            r, c = self.blocks
            W = W.reshape(n // (r * c), r, c, o, i).transpose(2, 3)
        return W.reshape(self.shape)

    def __str__(self) -> str:
        n, _, o, i = self.sizes if self.is_matrix else (1, 1, 0, 0)
        matrices = f", as {n} matrices {[o, i]}" if n > 1 else ""
        return f"{self.name} {list(self.shape)}: {self.optimizer}{matrices}, {self.why}"


@final
@dataclass(frozen=True)
class GradientPlan:
    """What steps every parameter: ``print(opt.plan())`` before training."""

    assignments: tuple[Assignment, ...]

    __repr__ = brief
    _repr_html_ = as_html

    def __str__(self) -> str:
        adamw = [a.name for a in self.assignments if not a.is_matrix]
        ends = [f"AdamW steps {', '.join(adamw)}"] if adamw else []
        return "\n".join([*map(str, self.assignments), *ends])


@final
class Modules:
    """What the modules of a model tell of its parameters: the names, and who is an embedding, a head, a kernel."""

    def __init__(self, model: nn.Module | None) -> None:
        wrapping = [] if model is None else unwrapped(model)
        self.model: nn.Module | None = wrapping[-1] if wrapping else None
        ddp = (module for module in wrapping if isinstance(module, DistributedDataParallel))
        self.ddp: DistributedDataParallel | None = next(
            (module for module in ddp if module.process_group.size() > 1), None
        )
        modules = [] if self.model is None else list(self.model.modules())
        params = {} if self.model is None else dict(self.model.named_parameters())
        self.names: dict[int, str] = {id(p): name for name, p in params.items()}
        self.reasons = dict.fromkeys(embeddings_in(modules), "an embedding")
        self.kernels: set[int] = kernels_in(modules)
        getters = [m.get_output_embeddings for m in modules if hasattr(m, "get_output_embeddings")]
        if getters:  # the model says itself which head it has, or that it has none
            heads = [head for get in getters for head in _heads(get)]
            self.reasons |= {id(p): "a head: get_output_embeddings()" for p in heads if id(p) not in self.reasons}
            return
        for size in {m.num_embeddings for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)}:
            sides = {name: p for name, p in params.items() if p.ndim == 2 and size in p.shape}
            self._take_head(size, {name: p for name, p in sides.items() if id(p) not in self.reasons})

    def _take_head(self, size: int, params: Mapping[str, Tensor]) -> None:
        """Of the matrices with a side as long as a vocabulary, the one that is nearest to the root of the model."""
        by_depth: dict[int, list[str]] = defaultdict(list)
        for name in params:
            by_depth[name.count(".")].append(name)
        nearest = by_depth[min(by_depth)] if by_depth else []
        if len(nearest) == 1:
            self.reasons[id(params[nearest[0]])] = f"a head: {size} is the vocabulary of an embedding"
        elif nearest:
            _log.info(
                "%s: as long as the vocabulary of an embedding, %d. If one of them is the head, give it a group with "
                '"fallback": "adamw"',
                listed(nearest),
                size,
            )


def _heads(get: Any) -> list[Tensor]:
    with suppress(NotImplementedError):
        weight = getattr(get(), "weight", None)
        return [weight] if isinstance(weight, Tensor) else []
    return []


def assigned(
    params: Sequence[Tensor],
    names: Sequence[str],
    modules: Modules,
    group: Mapping[str, Any],
    *,
    optimizer: str,
    vectors: bool,
    largest: float,
) -> list[Assignment]:
    """What steps the parameters of a group, of which ``fallback`` and ``blocks`` decide otherwise than the modules.

    ``vectors``: a matrix with one row or column is a matrix, too. ``largest``: rows of a factor that is more than a
    diagonal; a kernel of which only diagonals are kept is the matrix [o i·k].
    """
    fallback, blocks = group.get("fallback", "auto"), _grid(group.get("blocks", 1))
    if fallback not in ("auto", "adamw", None):
        raise ValueError(
            f'"fallback" of a parameter group is "adamw" or None, for matrices, got {fallback!r}: leave it out'
        )
    if fallback is None and (flat := [name for name, p in zip(names, params, strict=True) if p.ndim < 2]):
        raise IncompatibleError(
            f'"fallback": None is for matrices, and these have fewer than two axes: {", ".join(flat)}. Leave them out '
            "of the group: AdamW steps them"
        )

    def why_adamw(p: Tensor, stack: bool) -> str | None:
        if fallback == "adamw":
            return "a group says so"
        if p.ndim < 2 or not p.numel():
            return "a vector" if p.ndim < 2 else "no entries"
        if fallback is None:
            return None
        vector = not vectors and min(p.shape[1:] if stack else (len(p), p.shape[1:].numel())) == 1
        return modules.reasons.get(id(p)) or ("one row or column" if vector else None)

    out = []
    for p, name in zip(params, names, strict=True):
        shape, stack = tuple(p.shape), p.ndim == 3 and id(p) not in modules.kernels and fallback is not None
        reason = why_adamw(p, stack)
        if reason is not None:
            out.append(Assignment(name, shape, "AdamW", reason))
            continue
        offsets = p.ndim > 2 and not stack and blocks == (1, 1) and min(shape[:2]) <= largest and largest > 1
        what = "a stack of matrices" if stack else "a matrix" if p.ndim == 2 else "a kernel"
        one = Assignment(name, shape, optimizer, what, stack=stack, offsets=offsets, blocks=blocks)
        o, i = shape[1:] if stack else (shape[0], math.prod(shape[1:]))
        if o % blocks[0] or i % blocks[1]:
            raise ValueError(f'"blocks": {blocks} do not divide {name}, of matrices {[o, i]}: give what divides them')
        out.append(one)
    return out


def _grid(blocks: object) -> tuple[int, int]:
    """Blocks of rows and of columns."""
    pair = (blocks, 1) if isinstance(blocks, int) else blocks
    if isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int and n > 0 for n in pair):
        return pair
    raise ValueError(f'"blocks" of a parameter group is a number of blocks of rows, or (rows, columns), got {blocks!r}')


# What optimizers of torch are given.


def groups_of(params: Any, groups: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], Modules]:
    """Parameter groups, and what is known of the model: from a module, parameters, pairs with names, or dicts of these.

    What the ``groups`` do not name forms the first one. ``model.parameters()`` and ``model.named_parameters()`` know
    their model as long as nobody has made a list of them.
    """
    params = list(params.items()) if isinstance(params, Mapping) else params
    modules = Modules(_model_of(params))
    if isinstance(params, nn.Module):
        params = [p for p in params.parameters() if p.requires_grad]
    params = [params] if isinstance(params, Tensor) else list(params)
    given = [dict(group) for group in params if isinstance(group, Mapping)]
    if given and len(given) < len(params):
        raise TypeError("parameters and parameter groups are mixed: put the parameters into a group of their own")
    for group in given:
        if modules.model is None and (model := _model_of(group.get("params"))) is not None:
            modules = Modules(model)
    more = list(groups)
    if modules.model is None and not more:
        _log.info(
            "of parameters without their model it is not known which are embeddings and heads, and a parameter with "
            "three axes is a stack of matrices: give the model, model.named_parameters(), or groups with "
            '"fallback": "adamw"'
        )
    return complete(None if given else params, [*given, *more], modules.names, pairs=True), modules


def _model_of(params: Any) -> nn.Module | None:
    """The module, or that of which a generator gives the parameters: ``nn.Module.parameters`` has it as ``self``."""
    if isinstance(params, nn.Module):
        return params
    held = inspect.getgeneratorlocals(params).get("self") if inspect.isgenerator(params) else None
    return held if isinstance(held, nn.Module) else None

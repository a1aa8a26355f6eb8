"""Whether what a checkpoint holds fits the model: every message names the tensor, and nothing has been changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError
from natgrad.model import Model
from natgrad.operators import (
    BlockDenseOperator,
    DenseOperator,
    DiagonalOperator,
    EigenKroneckerOperator,
    KernelOperator,
    KroneckerOperator,
    LowRankOperator,
    Operator,
)
from natgrad.operators.base import Inverse
from natgrad.operators.layers import UNSEEN, LayerOperator
from natgrad.operators.subset import REST
from natgrad.optim.groups import check_numbers, common_damping
from natgrad.pullback.blocks import Block
from natgrad.structures import EigenKronecker, Kronecker, Structure

T = TypeVar("T")
_NOTHING = "Nothing was loaded"
Kinds: TypeAlias = Mapping[str, type | tuple[type, ...]]
ENTRIES: Kinds = {  # all that ``export`` writes
    "structure": str,
    "parameters": dict,
    "layers": dict,
    "dtype": str,
    "step": int,
    "count": int,
    "estimated": int,
    "inverted": int,
    "operator": dict,
    "inverse": dict,
    "inverse_damping": (int, float),
    "outdated": bool,
    "generator": Tensor,
    "rank": int,
}


def check_entries(state: Mapping[str, Any], entries: Kinds, where: str) -> None:
    """All these are there, and of their kind; what later versions added may be missing."""
    missing = [name for name in entries if name not in state]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}: it is incomplete. {_NOTHING}")
    for name, kind in entries.items():
        if not isinstance(state[name], kind):
            raise ValueError(f'"{name}" of the state is a {type(state[name]).__name__}: it is damaged. {_NOTHING}')


def check_signature(whose: str, state: Mapping[str, Any], signature: Mapping[str, Any]) -> None:
    """What must be the same for a state to mean the same is so, names in their order too."""
    for what, mine in signature.items():
        saved = state.get(what, mine)
        if saved != mine or (isinstance(mine, dict) and list(saved) != list(mine)):
            raise ValueError(f"this is the state of another {whose}: {_difference(what, saved, mine)}. {_NOTHING}")


def _difference(what: str, saved: Any, mine: Any) -> str:
    """In words, and of many names only those that differ."""
    if not isinstance(saved, dict) or not isinstance(mine, dict):
        return f"its {what} is {saved}, here it is {mine}"
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    if not names:
        return f"its {what} are in the order {', '.join(saved)}, here it is {', '.join(mine)}"
    shown = [f"{name} is {saved.get(name, 'not there')} and here {mine.get(name, 'not there')}" for name in names[:5]]
    more = f", and {len(names) - 5} others" if len(names) > 5 else ""
    return f"of its {what}, {', '.join(shown)}{more}"


def check_finite(what: str, tensors: Mapping[str, Any]) -> None:
    """Only tensors, of finite numbers."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} of {what} in the state is a {type(t).__name__}, not a tensor. {_NOTHING}")
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise NonFiniteError(
                f"{name} of {what} in the state holds NaN or infinity. {_NOTHING}: take an earlier checkpoint"
            )


def check_generator(saved: Tensor, generator: torch.Generator) -> None:
    """The numbers of a sampled metric can be gone on with; those of another kind of device need not."""
    if saved.dtype != torch.uint8 or saved.ndim != 1:
        raise ValueError(f'"generator" of the state is no state of a torch.Generator: it is damaged. {_NOTHING}')
    if saved.shape == generator.get_state().shape:
        _made("the generator", lambda: torch.Generator(generator.device).set_state(saved.cpu()))


def check_plain(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
    """What torch.optim keeps: parameter groups like these ``groups``, and momentum like the parameters, by id named."""
    for entry in ("state", "param_groups"):
        if entry not in state:
            raise ValueError(f'the state has no "{entry}": it is incomplete. {_NOTHING}')
    saved = state["param_groups"]
    sizes, here = ([len(group["params"]) for group in side] for side in (saved, groups))
    if sizes != here:
        raise ValueError(
            f"this is the state of another optimizer: its parameter groups have {sizes} parameters, here they have "
            f"{here}. {_NOTHING}"
        )
    for at, group in enumerate(saved):
        missing = [key for key in ("lr", "damping", "momentum", "weight_decay") if key not in group]
        if missing:
            raise ValueError(f"parameter group {at} of the state has no {', '.join(missing)}. {_NOTHING}")
        check_numbers(group)
    common_damping(saved)
    keys, own = ([p for group in side for p in group["params"]] for side in (saved, groups))
    params = dict(zip(keys, own, strict=True))
    for key, entry in state["state"].items():
        if key not in params:
            raise ValueError(f"the state has momentum of a parameter number {key}, which no group has. {_NOTHING}")
        name = names[id(params[key])]
        tensors = {what: t for what, t in entry.items() if isinstance(t, Tensor)}
        if "momentum" in tensors:  # what a hook of the user's keeps may have any shape
            _same(f"momentum of {name}", tensors["momentum"], tuple(params[key].shape))
        check_finite(name, tensors)


def operator_of(
    structure: Structure, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]
) -> Operator | None:
    """The metric with these tensors, each of which is what it must be."""
    if isinstance(structure, Kronecker | EigenKronecker):
        for block in blocks:
            _check_layer(structure, block, tensors)
    found = _made("the metric", lambda: structure.restore(model, blocks, tensors))
    if found is not None:
        _check_operator(found, tensors, "")
    return found


def check_guess(size: int, tensors: Mapping[str, Tensor]) -> None:
    """What an iterative solver starts from is over all parameters."""
    if "guess" in tensors:
        _same("guess of the inverse of the metric", tensors["guess"], (size,))


def inverse_of(G: Operator, tensors: Mapping[str, Tensor]) -> Inverse | None:
    """The inverse of G, or of an earlier metric, with these tensors; None if it must be made again."""
    what, like = "the inverse of the metric", next(iter(tensors.values()))
    if isinstance(G, LayerOperator):
        for key, shape in _layer_shapes(G).items():
            if key in tensors:
                _same(f"{key} of {what}", tensors[key], shape)

    def attempt() -> Inverse | None:
        found = G.inverse_from(tensors)
        if found is not None:  # once, for nothing: matrices of other sizes cannot be multiplied
            found.solve(like.new_zeros(G.layout.size))
        return found

    return _made(what, attempt)


def _made(what: str, make: Callable[[], T]) -> T:
    """What is made of the tensors of a state; where that fails, some are missing, or do not belong together."""
    try:
        return make()
    except KeyError as error:
        raise ValueError(f"{error.args[0]} of {what} is missing in the state. {_NOTHING}") from error
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the tensors of {what} in the state do not fit the model ({error}). {_NOTHING}") from error


def _same(name: str, t: Tensor, shape: Sequence[int]) -> None:
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{name} in the state has the shape {list(t.shape)}, here it is {list(shape)}. {_NOTHING}")


def _check_layer(structure: Kronecker | EigenKronecker, block: Block, tensors: Mapping[str, Tensor]) -> None:
    """S and A of a layer: both, and of its size, or of the size of those parameters that are a layer by themselves."""
    whole = (block.size, 1, 1)
    for name, place in zip(block.names, block.places, strict=True):
        own = {side: tensors[f"{name}/{side}"] for side in "SA" if f"{name}/{side}" in tensors}
        if not own:
            continue
        for side in "SA":
            if side not in own:
                raise ValueError(f"{name}/{side} of the metric is missing in the state. {_NOTHING}")
        alone = (place.shape.numel(), 1, 1)
        choices = (
            [(alone, alone)] if name != block.names[0] else [structure.shapes(block), (whole, whole), (alone, alone)]
        )
        if tuple(tuple(t.shape) for t in own.values()) not in choices:
            for (side, t), shape in zip(own.items(), choices[0], strict=True):
                _same(f"{name}/{side} of the metric", t, shape)


def _check_operator(G: Operator, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Every tensor that G must have is there, with its shape, and no other."""
    expected = _shapes(G)
    if expected is None:
        return
    below = G.rest if isinstance(G, LayerOperator) else None
    rest = {key.removeprefix(REST): t for key, t in tensors.items() if below is not None and key.startswith(REST)}
    own = {key: t for key, t in tensors.items() if below is None or not key.startswith(REST)}
    for key, shape in expected.items():
        if key not in own:
            raise ValueError(f"{prefix}{key} of the metric is missing in the state. {_NOTHING}")
        _same(f"{prefix}{key} of the metric", own[key], shape)
    strange = [prefix + key for key in own if key not in expected]
    if strange:
        raise ValueError(f"the metric in the state has {', '.join(strange)}, for which there is no layer. {_NOTHING}")
    if below is not None:
        _check_operator(below, rest, prefix + REST)


def _shapes(G: Operator) -> dict[str, tuple[int, ...]] | None:
    """Of its tensors, without those of what is over other parameters; None of a structure that is not known here."""
    p = G.layout.size
    match G:
        case KroneckerOperator() | EigenKroneckerOperator():
            _check_covered(G)
            letters = ("S", "A") if isinstance(G, KroneckerOperator) else ("S", "A", "Q", "P", "D")
            shapes = _layer_shapes(G)
            kept = {key: shape for key, shape in shapes.items() if key.rpartition("/")[2] in letters}
            return kept | {f"{b.names[0]}/{UNSEEN}": (0,) for b in G.blocks if b.names[0] in G.unseen}
        case DiagonalOperator():
            return {"values": (p,)}
        case DenseOperator():
            return {"matrix": (p, p)}
        case BlockDenseOperator():
            if len(G.names) != len(G.indices):
                raise ValueError(
                    f"the metric in the state has {len(G.names)} blocks, here it has {len(G.indices)}. {_NOTHING}"
                )
            return {name: (len(index),) * 2 for name, index in zip(G.names, G.indices, strict=True)}
        case LowRankOperator():
            r = G.values.numel()
            return {"vectors": (p, r), "values": (r,), "floor": (p,)}
        case KernelOperator():
            k, n = G.factors[0].g.shape[:2]
            shapes = {}
            for block, f in zip(G.blocks, G.factors, strict=True):
                packed = (f.a.shape[2], f.g.shape[4], f.a.shape[3])  # of parameters that are spread, a group each
                (c, o, i), r = packed if math.prod(packed) == block.size else block.shape, f.g.shape[2]
                shapes |= {f"{block.names[0]}/a": (n, r, c, i), f"{block.names[0]}/g": (k, n, r, c, o)}
            return shapes if G.K is None else shapes | {"K": tuple(G.K.whole.shape)}
        case _:
            return None


def _check_covered(G: KroneckerOperator | EigenKroneckerOperator) -> None:
    """Every parameter is in a layer, or in the rest."""
    found = {name for block in G.blocks for name in block.names} | set(G.rest.layout.like if G.rest is not None else ())
    missing = [name for name in G.layout.like if name not in found]
    if missing:
        raise ValueError(f"the factors of {', '.join(missing)} are missing in the metric of the state. {_NOTHING}")


def _layer_shapes(G: LayerOperator) -> dict[str, tuple[int, ...]]:
    """Of everything that a metric by layers, or an inverse of it, may keep of the layers that were seen."""
    shapes: dict[str, tuple[int, ...]] = {}
    assert isinstance(G, KroneckerOperator | EigenKroneckerOperator)
    for block, s, a in zip(G.blocks, G.left, G.right, strict=True):
        if block.names[0] in G.unseen:
            continue
        c, o, i = block.shape
        found = {"S": tuple(s.shape), "A": tuple(a.shape), "D": (c, o, i), "d": (c, o, i)}
        found |= {"Q": (c, o, o)} if s.ndim == 3 else {}
        found |= {"P": (c, i, i)} if a.ndim == 3 else {}
        shapes |= {f"{block.names[0]}/{letter}": shape for letter, shape in found.items()}
    return shapes

"""The metric and the solver in a checkpoint: what a run needs to go on bit for bit, and whether it fits."""

from __future__ import annotations

import ast
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError
from natgrad.linalg import Relative, number_of
from natgrad.model import Model
from natgrad.optim.parameters import ParameterStatus
from natgrad.optim.preconditioner import Preconditioner
from natgrad.optim.tracker import MetricTracker
from natgrad.optim.update import check_numbers, common_damping, like
from natgrad.output.losses import TermLoss, described
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.operation_layers import loaded, with_layers
from natgrad.solve.cg import CGInverse
from natgrad.structures.base import Inverse, Operator, StateError, Structure, check_shape
from natgrad.structures.identity import constant
from natgrad.structures.kronecker import with_roots_of

T = TypeVar("T")
Kinds: TypeAlias = Mapping[str, type | tuple[type, ...]]

_log = logging.getLogger("natgrad")
_NOTHING = "Nothing was loaded"
_ENTRIES: Kinds = {  # those of 0.1.0; newer ones ("operations", "examples", "counted", …) may be absent
    "metric": str,
    "structure": str,
    "solver": str,
    "parameters": dict,
    "layers": dict,
    "dtype": str,
    "step": int,
    "mass": (list, tuple),
    "estimated": int,
    "inverted": int,
    "wanted": (list, tuple),
    "operator": dict,
    "inverse": dict,
    "inverse_damping": (int, float),
    "outdated": bool,
    "generator": Tensor,
    "rank": int,
}


def export(tracker: MetricTracker, preconditioner: Preconditioner) -> dict[str, Any]:
    """Tensors, numbers and words only, so that ``torch.load(weights_only=True)`` reads them."""
    weight = replace(tracker.weight)
    if tracker.absorbed:  # passes of a step that is to be made, as after it
        weight.end_step()
    # One of several processes has seen a part of the examples: it says nothing of how many there were.
    step_size = weight.step_size if tracker.world.size == 1 else 0
    inverse = preconditioner.inverse
    return {
        **_signature(tracker, preconditioner),
        "solver": _solver(preconditioner, tracker.structure.power),
        "dtype": str(tracker.model.example.dtype),
        "step": tracker.step,
        "mass": (weight.total, step_size),
        "counted": tracker.absorbed,
        "estimated": tracker.estimated,
        "inverted": preconditioner.inverted,
        "wanted": sorted(tracker.parameters.pending),
        "outside": sorted(tracker.parameters.outside),
        "unreached": sorted(tracker.parameters.unseen),
        "operations": tracker.observer.cache.operations.state(),
        "examples": tracker.model.examples,
        "left": sorted(tracker.parameters.ruleless),
        "operator": {} if tracker.average is None else tracker.average.tensors(),
        "inverse": (preconditioner.warm or {}) if inverse is None else inverse.tensors(),
        "inverse_damping": number_of(preconditioner.damping),
        "outdated": preconditioner.outdated,
        "generator": tracker.generator.get_state(),
        "rank": tracker.world.rank,
    }


WORDS = ("metric", "structure", "solver", "damping", "parameters", "layers", "dtype", "momentum_on")


def blank(tracker: MetricTracker, preconditioner: Preconditioner) -> dict[str, dict[str, Tensor]]:
    """Before the first step: tensors as large as those of the metric and its inverse later, where that is known.

    ``torch.distributed.checkpoint`` loads in place.
    """
    nothing: dict[str, dict[str, Tensor]] = {"operator": {}, "inverse": {}}
    if tracker.step or tracker.average is not None:
        return nothing
    model, blocks, solver = tracker.model, tracker.observer.blocks, preconditioner.solver
    dtype = torch.promote_types(model.example.dtype, torch.float32)
    cost = tracker.structure.cost(blocks, exact=not solver.damps_factors, iterative=solver.iterative)
    fits = cost is not None and cost.numbers * dtype.itemsize <= tracker.observer.bound
    G = tracker.structure.identity(model, blocks, dtype) if fits else None
    if G is None:
        return nothing
    λ, inverted = preconditioner.damping, preconditioner.inverted_metric(G)
    inverse = solver.init(inverted, λ)
    if isinstance(inverse, CGInverse):  # what it starts from, once it has been used
        inverse.solve(torch.ones(model.size, dtype=G.layout.dtype, device=model.example.device))
    return {"operator": with_roots_of(G, inverse, λ).tensors(), "inverse": inverse.tensors()}


def restore(state: dict[str, Any], tracker: MetricTracker, preconditioner: Preconditioner) -> Callable[[], None]:
    """Check that the state belongs to this model, structure and metric, whole, and build what it holds.

    Nothing is changed until the function that is returned is called. The metric keeps the precision that it was saved
    in; where the model has another one than the model that was saved, it takes that of the metrics of this model. The
    inverse of another solver is not used: the next step inverts anew.
    """
    check_entries(state, _ENTRIES, 'the "natgrad" entry of the state')
    state = state | {"structure": structure_in_words(tracker.structure, state["structure"])}
    check_signature("optimizer", state, _signature(tracker, preconditioner))
    for what, entry in (("the metric", "operator"), ("the inverse of the metric", "inverse")):
        check_finite(what, state[entry])
    left, table = frozenset(state.get("left", ())), tracker.parameters
    if not left <= table.optional:
        names = ", ".join(sorted(left - table.optional))
        raise ValueError(
            f"this is the state of another optimizer: AdamW steps {names}, which no layer rule covered, and here it "
            f'has a metric. Give fallback="adamw". {_NOTHING}'
        )
    observer = tracker.observer if left == table.ruleless else tracker.declared.without(left)
    model, solver = observer.model, preconditioner.solver
    if "guess" in state["inverse"]:  # what an iterative solver starts from is over all parameters
        _check_shape("guess of the inverse of the metric", state["inverse"]["guess"], (model.size,))
    check_generator(state["generator"], tracker.generator)
    example, λ = model.example, like(preconditioner.damping, state["inverse_damping"])
    dtype = None if state["dtype"] == str(example.dtype) else torch.promote_types(example.dtype, torch.float32)

    def placed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Copies: the average and its inverse are changed in place.
        dtypes = {name: dtype if t.is_floating_point() else None for name, t in tensors.items()}
        return {name: t.to(example.device, dtypes[name], copy=True) for name, t in tensors.items()}

    tensors = placed(state["operator"])
    layers = loaded(model, observer.blocks, state.get("operations", ()))
    blocks = with_layers(observer.blocks, layers)
    average: Operator | None = constant(tracker.structure, model)
    if average is None and tensors:
        average = operator_of(tracker.structure, model, blocks, tensors)
    inverse: Inverse | None = None
    warm: dict[str, Tensor] | None = None
    if state["solver"] != _solver(preconditioner, tracker.structure.power):
        words = state["solver"], _solver(preconditioner, tracker.structure.power)
        _log.info("the state was saved with the solver %s, here it is %s: the next step inverts anew", *words)
    elif average is None:
        warm = placed(state["inverse"])
    else:  # its inverse may be older than it, and is computed again only where it has no tensors
        saved = placed(state["inverse"])
        G = preconditioner.inverted_metric(average)
        inverse = _inverse_of(G, saved) if saved else None
        inverse = inverse or preconditioner.world.inverse(solver, G, λ, warm=saved)

    def go_on() -> None:
        tracker.observer = observer
        if state.get("examples") == "inputs":  # of outputs that were found to be flattened
            tracker.use_model(replace(model, examples="inputs"))
        observer.cache.operations.put(layers, observer.blocks)
        tracker.step, tracker.estimated = state["step"], state["estimated"]
        tracker.average = average
        tracker.weight.total, tracker.weight.step_size = state["mass"]
        tracker.discard()
        statuses = {
            ParameterStatus.UNSEEN: state.get("unreached", ()),
            ParameterStatus.PENDING: state["wanted"],
            ParameterStatus.OUTSIDE: state.get("outside", ()),
            ParameterStatus.RULELESS: left,
        }
        table.reset(statuses)
        if average is not None:
            table.see(tracker.unseen(average))
        preconditioner.inverse, preconditioner.warm, preconditioner.damping = inverse, warm, λ
        preconditioner.inverted, preconditioner.outdated = state["inverted"], state["outdated"]
        preconditioner.unseen = frozenset() if average is None else average.unseen
        _seed(tracker.generator, state["generator"].cpu(), state["rank"], tracker.world.rank)
        if state.get("counted", False):
            tracker.skip_counted()

    return go_on


def _signature(tracker: MetricTracker, preconditioner: Preconditioner) -> dict[str, Any]:
    """What must be the same for a state to mean the same. How many samples estimate the metric does not matter."""
    observer = tracker.declared
    declared = observer.cache.operations.declared(observer.blocks)  # whatever operations have shown since
    return {
        "metric": in_words(tracker.metric.unsampled()),
        "structure": structure_in_words(tracker.structure),
        "damping": "relative" if isinstance(preconditioner.damping, Relative) else "absolute",
        "parameters": {name: list(p.shape) for name, p in observer.model.params.items()},
        "layers": {b.title: "no rule" if b.rule is None else type(b.rule).__name__ for b in declared},
    }


def structure_in_words(structure: Structure, saved: str | None = None) -> str:
    """``repr`` without ``power``: the stored average is that of G, whatever the power.

    If the words that were ``saved`` lack only defaults that were added later, they are those of today.

    >>> import natgrad as ng
    >>> structure_in_words(ng.Kronecker(fallback=ng.BlockDense()), "Kronecker(fallback=BlockDense(), strict=False)")
    "Kronecker(sharing='expand', fallback=BlockDense(), strict=False, largest=16384, bias='joint')"
    """
    words = re.sub(r", power=[^,)]*|power=[^,)]*(, )?", "", repr(structure))
    if saved is None or saved == words:
        return words
    kinds = {type(each).__name__: each for each in _dataclasses_in(structure)}
    try:
        mine, theirs = (_abbreviated(ast.parse(each, mode="eval").body, kinds) for each in (words, saved))
    except SyntaxError:  # a function, or another thing without words
        return saved
    return words if mine == theirs else saved


def _dataclasses_in(value: Any) -> Iterator[Any]:
    """A dataclass, and those in its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        yield value
        for each in fields(value):
            yield from _dataclasses_in(getattr(value, each.name))


def _abbreviated(words: ast.expr, kinds: Mapping[str, Any]) -> str:
    """The words without what has its default in one of these dataclasses, by the names of their types."""
    if not isinstance(words, ast.Call) or not isinstance(words.func, ast.Name):
        try:
            return in_words(ast.literal_eval(words))
        except ValueError:
            return ast.unparse(words)
    kind = words.func.id
    defaults = {f.name: in_words(_default(f)) for f in fields(kinds[kind])} if kind in kinds else {}
    given = {each.arg or "": _abbreviated(each.value, kinds) for each in words.keywords}
    entries = [f"{name}={value}" for name, value in given.items() if value != defaults.get(name)]
    return f"{kind}({', '.join(entries)})"


def _solver(preconditioner: Preconditioner, power: float) -> str:
    """In words, with the power of the metric that it inverts."""
    power *= preconditioner.power_share
    return in_words(preconditioner.solver) + ("" if power == 1 else f" at the power {power:g}")


def _seed(generator: torch.Generator, saved: Tensor, saved_rank: int, rank: int) -> None:
    """Go on with the random numbers; another process or kind of device goes on with its own from here."""
    if saved_rank == rank and saved.shape == generator.get_state().shape:
        generator.set_state(saved)
        return
    digest = hashlib.sha256(bytes(saved.tolist()) + rank.to_bytes(8, "big")).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "big") % 2**63)


# Whether what a checkpoint holds fits the model: every message names the tensor, and nothing has been changed.


def check_entries(state: Mapping[str, Any], entries: Kinds, where: str) -> None:
    """All these are there, and of their kind."""
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


def _check_nonnegative(what: str, tensors: Mapping[str, Tensor]) -> None:
    """No second moment is negative, but for rounding: its square root would be NaN, or a step would ascend."""
    for name, t in tensors.items():
        rounding = torch.finfo(t.dtype).eps ** 0.5
        if t.numel() and bool(t.min() < -rounding * t.abs().max()):
            raise ValueError(
                f"{name} of {what} in the state has a negative second moment, {float(t.min()):.3g}: it is damaged. "
                f"{_NOTHING}: take an earlier checkpoint"
            )


def check_generator(saved: Tensor, generator: torch.Generator) -> None:
    """The numbers of a sampled metric can be gone on with; those of another kind of device need not."""
    if saved.dtype != torch.uint8 or saved.ndim != 1:
        raise ValueError(f'"generator" of the state is no state of a torch.Generator: it is damaged. {_NOTHING}')
    if saved.shape == generator.get_state().shape:
        _built("the generator", lambda: torch.Generator(generator.device).set_state(saved.cpu()))


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
    keys, values = ([p for group in side for p in group["params"]] for side in (saved, groups))
    params = dict(zip(keys, values, strict=True))
    for key, entry in state["state"].items():
        if key not in params:
            raise ValueError(f"the state has momentum of a parameter number {key}, which no group has. {_NOTHING}")
        name = names[id(params[key])]
        tensors = {what: t for what, t in entry.items() if isinstance(t, Tensor)}
        for what in ("momentum", "exp_avg", "exp_avg_sq"):  # what a hook of the user's keeps may have any shape
            if what in tensors:
                _check_shape(f"{what} of {name}", tensors[what], tuple(params[key].shape))
        check_finite(name, tensors)
        _check_nonnegative(name, {what: t for what, t in tensors.items() if what == "exp_avg_sq"})


def operator_of(
    structure: Structure, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]
) -> Operator | None:
    """The metric with these tensors, each of which has the shape that it must have."""
    G = _built("the metric", lambda: structure.restore(model, blocks, tensors))
    if G is None:
        return None
    expected = _built("the metric", G.shapes)
    for key, shape in expected.items():
        if key not in tensors:
            raise ValueError(f"{key} of the metric is missing in the state. {_NOTHING}")
        _check_shape(f"{key} of the metric", tensors[key], shape)
    strange = [key for key in tensors if key not in expected]
    if strange:
        raise ValueError(f"the metric in the state has {', '.join(strange)}, for which there is no layer. {_NOTHING}")
    _check_nonnegative("the metric", G.nonnegative())
    return G


def _inverse_of(G: Operator, tensors: Mapping[str, Tensor]) -> Inverse | None:
    """The inverse of G, or of an earlier metric, with these tensors; None if it must be computed again."""

    def attempt() -> Inverse | None:
        inverse = G.inverse_from(tensors)
        if inverse is not None:  # once, for nothing: matrices of other sizes cannot be multiplied
            inverse.solve(next(iter(tensors.values())).new_zeros(G.layout.size))
        return inverse

    inverse = _built("the inverse of the metric", attempt)
    if inverse is not None:
        _check_nonnegative("the inverse of the metric", inverse.nonnegative())
    return inverse


def _built(what: str, build: Callable[[], T]) -> T:
    """What is built from the tensors of a state; an error says which of them are missing, or do not fit."""
    try:
        return build()
    except StateError as error:
        raise ValueError(f"{error}. {_NOTHING}") from error
    except KeyError as error:
        raise ValueError(f"{error.args[0]} of {what} is missing in the state. {_NOTHING}") from error
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the tensors of {what} in the state do not fit the model ({error}). {_NOTHING}") from error


def _check_shape(name: str, t: Tensor, shape: Sequence[int]) -> None:
    _built(name, lambda: check_shape(name, t, shape))


# What a metric or a solver is, in words.


def in_words(value: Any) -> str:
    """As ``repr`` of a dataclass, without what has its default, and without addresses, or tensors but for numbers.

    It is the same in every process. A default is left out so that one that is added later does not make another thing
    of what was saved before.

    >>> import natgrad as ng
    >>> in_words(ng.Fisher(ng.Categorical(), reduction="mean")), in_words(ng.Factored())
    ("Fisher(family=Categorical(), reduction='mean')", 'Factored()')
    """
    if is_dataclass(value) and not isinstance(value, type):
        entries = {f.name: in_words(getattr(value, f.name)) for f in fields(value) if _tells(f, value)}
        if isinstance(value, TermLoss):
            entries["loss"] = described(value.loss)
        return f"{type(value).__name__}({', '.join(f'{name}={words}' for name, words in entries.items())})"
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0):
        number = float(value)
        return repr(int(number)) if number.is_integer() else repr(number)  # 1 and 1.0 are the same
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {in_words(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(in_words, value))}]"
    return "…" if callable(value) else type(value).__name__


def _tells(field: Field[Any], value: Any) -> bool:
    """Whether this field of a dataclass says something about it."""
    entry = getattr(value, field.name)
    if not field.repr:
        return False
    default = _default(field)
    return default is MISSING or in_words(entry) != in_words(default)


def _default(field: Field[Any]) -> Any:
    """Of a field of a dataclass; ``MISSING`` if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()

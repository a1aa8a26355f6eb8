"""The metric and the solver in a checkpoint: what a run needs to go on bit for bit, and whether it fits."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from numbers import Real
from typing import Annotated, Any, TypeAlias, TypeVar, cast, final, get_origin, get_type_hints

import torch
from torch import Tensor

from natgrad.errors import NatgradError, NonFiniteError
from natgrad.linalg import Relative, number_of
from natgrad.model import Model
from natgrad.optim.distributed import Processes
from natgrad.optim.estimates import MetricTracker
from natgrad.optim.parameters import ParameterStatus
from natgrad.optim.preconditioner import Preconditioner
from natgrad.optim.update import check_numbers, common_damping, like
from natgrad.output.losses import TermLoss, described
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.operation_layers import loaded, with_layers
from natgrad.sharding import whole
from natgrad.solve.cg import CGInverse
from natgrad.structures.base import Inverse, Operator, StateError, Structure, check_shape, constant
from natgrad.structures.layered import LayerOperator

T = TypeVar("T")
Entry: TypeAlias = dict[str, Any]
Kinds: TypeAlias = Mapping[str, Any]  # types, also of containers

_log = logging.getLogger("natgrad")
_NOTHING = "Nothing was loaded"
KEY = "natgrad"
_HALF = f"it is incomplete. {_NOTHING}"
IN_PLACE = (
    "torch.distributed.checkpoint loads what the optimizer has a place for, and here it has one after its first step "
    f"only: make one step, on any batch, and then load. {_NOTHING}"
)


@final
@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run needs to go on bit for bit, beside the state of torch.optim; the layout of a checkpoint.

    A checkpoint of torch (``torch.distributed.checkpoint``, ``get_state_dict``) knows the state of a parameter, in
    ``state_dict()["state"]``, and nothing beside it. There every parameter has a dictionary "natgrad" of tensors, and
    the place of a field says what becomes of it:

        tensors    operator/S, inverse/A, … at the first parameter of their layer
        names      a bit in the ``flags`` of every parameter
        number     a tensor [] at the first parameter
        words      bytes at the first parameter: what is the same in every state of such an optimizer
        found      bytes there, too, if there is something

    A name has no dot in it, since torch joins names by dots. Version 0.1.0 had all fields in one dictionary, beside
    the state of torch.optim: ``gather_state`` makes it from either.
    """

    metric: Annotated[str, "words"]
    structure: Annotated[str, "words"]
    solver: Annotated[str, "words"]
    damping: Annotated[str | None, "words"] = None
    parameters: Annotated[dict[str, list[int]], "words"]
    layers: Annotated[dict[str, str], "words"]
    dtype: Annotated[str, "words"]
    momentum_on: Annotated[str | None, "words"] = None
    wanted: Annotated[Sequence[str], "names"]
    outside: Annotated[Sequence[str], "names"] = ()
    unreached: Annotated[Sequence[str], "names"] = ()
    step: Annotated[int, "number"]
    estimated: Annotated[int, "number"]
    inverted: Annotated[int, "number"]
    inverse_damping: Annotated[float, "number"]
    outdated: Annotated[bool, "number"]
    rank: Annotated[int, "number"]
    mass: Annotated[Sequence[float], "mass"]  # two numbers: the weight of the average, and the examples of a step
    counted: Annotated[bool, "flag"] = False  # a bit of all: other numbers have no place in older states
    operator: Annotated[dict[str, Tensor], "tensors"]
    inverse: Annotated[dict[str, Tensor], "tensors"]
    generator: Annotated[Tensor, "generator"]
    operations: Annotated[Any, "found"] = ()
    examples: Annotated[str | None, "found"] = None
    left: Annotated[Sequence[str], "found"] = ()

    @staticmethod
    def at(place: str) -> list[str]:
        """The fields that have this place."""
        return [name for name, hint in _hints().items() if place in hint.__metadata__]

    @staticmethod
    def of(tracker: MetricTracker, preconditioner: Preconditioner, momentum_on: str) -> RunState:
        """As it is now: tensors, numbers and words, so that ``torch.load(weights_only=True)`` reads them."""
        weight, table, inverse = replace(tracker.weight), tracker.parameters, preconditioner.inverse
        if tracker.absorbed:  # passes of a step that is to be made, as after it
            weight.end_step()
        return RunState(
            **_signature(tracker, preconditioner),
            solver=_solver(preconditioner, tracker.structure.power),
            dtype=str(tracker.model.example.dtype),
            momentum_on=momentum_on,
            step=tracker.step,
            # One of several processes has seen a part of the examples: it says nothing of how many there were.
            mass=(weight.total, weight.step_size if tracker.world.size == 1 else 0),
            counted=tracker.absorbed,
            estimated=tracker.estimated,
            inverted=preconditioner.inverted,
            wanted=sorted(table.pending),
            outside=sorted(table.outside),
            unreached=sorted(table.unseen),
            operations=tracker.observer.cache.operations.state(),
            examples=tracker.model.examples,
            left=sorted(table.ruleless),
            operator={} if tracker.average is None else tracker.average.tensors(),
            inverse=(preconditioner.warm or {}) if inverse is None else inverse.tensors(),
            inverse_damping=number_of(preconditioner.damping),
            outdated=preconditioner.outdated,
            generator=tracker.generator.get_state(),
            rank=tracker.world.rank,
        )

    @staticmethod
    def read(entry: Mapping[str, Any]) -> RunState:
        """From the dictionary of 0.1.0; an error says what is missing or damaged."""
        hints = _hints()
        kinds = {f.name: hints[f.name].__origin__ for f in fields(RunState) if f.default is MISSING}
        check_entries(entry, kinds, f'the "{KEY}" entry of the state')
        return RunState(**{name: entry[name] for name in hints if name in entry})

    def by_parameter(
        self, blank: Mapping[str, Mapping[str, Tensor]], states: Mapping[str, Mapping[str, Any]], device: torch.device
    ) -> dict[str, dict[str, Tensor]]:
        """By the names of the parameters, whose ``states`` torch.optim has. Tensors are copied.

        ``blank``: tensors that have the place of those that there are none of before the first step.
        """
        out: dict[str, dict[str, Tensor]] = {name: {} for name in states}
        first = out[next(iter(states))]
        for which in RunState.at("tensors"):
            for key, t in (getattr(self, which) or blank[which]).items():
                owner, slash, rest = key.partition("/")
                owned = slash and owner in out
                place = f"{which}/{rest}" if owned else f"{which}//{key}"
                (out[owner] if owned else first)[_without_dots(place)] = t.clone()
            first[f"has_{which}"] = torch.tensor(bool(getattr(self, which)))
        for name, state in states.items():
            bits = [name in getattr(self, each) for each in RunState.at("names")]
            bits += ["momentum" in state, "exp_avg" in state, self.counted]
            out[name]["flags"] = torch.tensor(sum(bit << at for at, bit in enumerate(bits)))
        total, step_size = self.mass
        numbers = {name: getattr(self, name) for name in RunState.at("number")}
        numbers |= {"inverse_damping": float(self.inverse_damping), "mass": float(total), "step_size": step_size}
        for name, number in numbers.items():  # floats exactly: an integer that is loaded into would cut them
            first[name] = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)
        first["generator"] = self.generator.to(device, copy=True)
        words = {name: getattr(self, name) for name in RunState.at("words")}
        first["words"] = _bytes(words | {"names": list(states)}, device)
        if found := {name: value for name in RunState.at("found") if (value := getattr(self, name))}:
            first["found"] = _bytes(found, device)
        return out


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
    return {"operator": G.tensors(), "inverse": inverse.tensors()}


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(RunState, include_extras=True)


@contextmanager
def reading() -> Iterator[None]:
    """Reading changes nothing; where it stumbles over something that no check has a name for, this says so."""
    try:
        yield
    except NatgradError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if _NOTHING in str(error):
            raise
        raise ValueError(f"the state is damaged, and cannot be read: {error}. {_NOTHING}") from error


def gather_state(state: Mapping[str, Any]) -> Entry:
    """A state with its ``RunState`` in one dictionary beside those of torch.optim, as in 0.1.0, from either layout."""
    if KEY in state:
        return {**state, KEY: renamed(state[KEY])}
    keys = [key for group in state.get("param_groups", ()) for key in group["params"]]
    plain = {key: dict(of_param) for key, of_param in state.get("state", {}).items()}
    mine = [plain.get(key, {}).pop(KEY, {}) for key in keys]
    for place, t in (pair for of_param in mine for pair in of_param.items()):
        if not isinstance(t, Tensor) or t.is_complex():
            raise ValueError(f'{place} of the "natgrad" entry is a {type(t).__name__}, not a real tensor. {_NOTHING}')
    if not mine or "words" not in mine[0]:
        raise ValueError(f'this is not the state of a NaturalGradient: it has no "natgrad" entry. {_NOTHING}')
    words = _read(mine[0], "words")
    names, first, tensors, sets = words.pop("names"), mine[0], RunState.at("tensors"), RunState.at("names")
    needed = [*RunState.at("number"), *(f"has_{which}" for which in tensors), "mass", "step_size", "generator"]
    if missing := [name for name in needed if name not in first]:
        raise ValueError(f'the "natgrad" entry of the state has no {", ".join(missing)}: {_HALF}')
    entry: Entry = {which: {} for which in tensors} | {of: [] for of in sets}
    entry |= {name: first[name].item() for name in RunState.at("number")} | words
    entry |= {"mass": (first["mass"].item(), first["step_size"].item()), "generator": first["generator"].cpu()}
    entry |= _read(first, "found") if "found" in first else {}
    if len(names) != len(keys):
        raise ValueError(
            f"the state has {len(keys)} parameters in its groups, and was saved with {len(names)}: {_HALF}"
        )
    if missing := [name for name, of_param in zip(names, mine, strict=True) if "flags" not in of_param]:
        raise ValueError(f"the state of {', '.join(missing)} is missing: {_HALF}")
    for name, key, of_param in zip(names, keys, mine, strict=True):
        bits = int(of_param["flags"])
        has_momentum, has_moments, entry["counted"] = (bool(bits >> len(sets) + at & 1) for at in range(3))
        for at, of in enumerate(sets):
            entry[of] += [name] if bits >> at & 1 else []
        if not has_momentum:
            plain.get(key, {}).pop("momentum", None)
        for what, there in (("momentum", has_momentum), ("exp_avg", has_moments)):
            if there and what not in plain.get(key, {}):
                raise ValueError(f"{what} of {name} is missing in the state. {IN_PLACE}")
        for place, t in of_param.items():
            which, _, rest = _with_dots(place).partition("/")
            if which in tensors and first[f"has_{which}"]:
                entry[which][rest[1:] if rest.startswith("/") else f"{name}/{rest}"] = t
    for which in tensors:
        if first[f"has_{which}"] and not entry[which]:
            raise ValueError(f"the metric is missing in the state ({which}). {IN_PLACE}")
    return {**state, "state": {key: of_param for key, of_param in plain.items() if of_param}, KEY: entry}


def renamed(entry: Mapping[str, Any]) -> Entry:
    """An entry of version 0.1.0, where the fallback was called the rest, under the names of today."""
    if "rest" in entry.get("parameters", ()):
        return dict(entry)
    present = [which for which in RunState.at("tensors") if isinstance(entry.get(which), dict)]
    return dict(entry) | {
        which: {re.sub(r"^rest/", "fallback/", key): t for key, t in entry[which].items()} for which in present
    }


def _bytes(content: Mapping[str, Any], device: torch.device) -> Tensor:
    return torch.tensor(list(json.dumps(content, ensure_ascii=False).encode()), dtype=torch.uint8, device=device)


def _read(first: Mapping[str, Tensor], name: str) -> Entry:
    try:
        content: Entry = json.loads(bytes(first[name].tolist()).decode())
    except ValueError as error:
        raise ValueError(f'"{name}" of the state cannot be read: it is damaged. Nothing was loaded') from error
    return content


def _without_dots(place: str) -> str:
    return place.replace("%", "%25").replace(".", "%2E")


def _with_dots(place: str) -> str:
    return place.replace("%2E", ".").replace("%25", "%")


def restore(
    entry: Mapping[str, Any], tracker: MetricTracker, preconditioner: Preconditioner, momentum_on: str
) -> Callable[[], None]:
    """Check that the state belongs to this model, structure and metric, whole, and build what it holds.

    Nothing is changed until the function that is returned is called. The metric keeps the precision that it was saved
    in; where the model has another one than the model that was saved, it takes that of the metrics of this model. The
    inverse of another solver is not used: the next step inverts anew.
    """
    state = RunState.read(entry)
    of_metric, of_inverse = ({key: whole(t) for key, t in each.items()} for each in (state.operator, state.inverse))
    state = replace(state, operator=of_metric, inverse=of_inverse)
    words = vars(state) | {"structure": structure_in_words(tracker.structure, state.structure)}
    check_signature("optimizer", words, _signature(tracker, preconditioner) | {"momentum_on": momentum_on})
    check_finite("the metric", state.operator)
    check_finite("the inverse of the metric", state.inverse)
    left, table = frozenset(state.left), tracker.parameters
    if not left <= table.ruleless_fallback:
        names = ", ".join(sorted(left - table.ruleless_fallback))
        raise ValueError(
            f"this is the state of another optimizer: AdamW steps {names}, which no layer rule covered, and here it "
            f'has a metric. Give fallback="adamw". {_NOTHING}'
        )
    observer = tracker.observer if left == table.ruleless else tracker.initial_observer.without(left)
    model, solver = observer.model, preconditioner.solver
    if "guess" in state.inverse:  # what an iterative solver starts from is over all parameters
        check_tensor("guess of the inverse of the metric", state.inverse["guess"], (model.size,))
    check_generator(state.generator, tracker.generator)
    example, λ = model.example, like(preconditioner.damping, state.inverse_damping)
    dtype = None if state.dtype == str(example.dtype) else torch.promote_types(example.dtype, torch.float32)

    def placed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Copies: the average and its inverse are changed in place.
        dtypes = {name: dtype if t.is_floating_point() else None for name, t in tensors.items()}
        return {name: t.to(example.device, dtypes[name], copy=True) for name, t in tensors.items()}

    tensors = placed(state.operator)
    layers = loaded(model, observer.blocks, state.operations)
    blocks = with_layers(observer.blocks, layers)
    average: Operator | None = constant(tracker.structure, model)
    if average is None and tensors:
        average = operator_of(tracker.structure, model, blocks, tensors)
    whole_metric, owners = average, tracker.world.owners
    if owners is not None and average is not None:
        average = owners.loaded(cast(LayerOperator, average))
    inverse: Inverse | None = None
    warm: dict[str, Tensor] | None = None
    if state.solver != _solver(preconditioner, tracker.structure.power):
        solvers = state.solver, _solver(preconditioner, tracker.structure.power)
        _log.info("the state was saved with the solver %s, here it is %s: the next step inverts anew", *solvers)
    elif average is None:
        warm = placed(state.inverse)
    else:  # its inverse may be older than it, and is computed again only where it has no tensors
        saved = placed(state.inverse)
        G = preconditioner.inverted_metric(average)
        if owners is not None:  # a process may keep nothing
            saved = owners.named(saved, cast(LayerOperator, average))
        inverse = _inverse_of(G, saved) if saved else None
        world = preconditioner.world if owners is None else Processes()
        inverse = inverse or world.inverse(solver, G, λ, warm=saved)

    def go_on() -> None:
        tracker.observer = observer
        if state.examples == "inputs":  # of outputs that were found to be flattened
            tracker.use_model(replace(model, examples="inputs"))
        observer.cache.operations.put(layers, observer.blocks)
        tracker.step, tracker.estimated = state.step, state.estimated
        tracker.average = average
        if owners is not None and average is not None:
            owners.adopt(cast(LayerOperator, whole_metric), cast(LayerOperator, average))
        tracker.weight.total, tracker.weight.step_size = state.mass[0], int(state.mass[1])
        statuses = {
            ParameterStatus.UNSEEN: state.unreached,
            ParameterStatus.PENDING: state.wanted,
            ParameterStatus.OUTSIDE: state.outside,
            ParameterStatus.RULELESS: left,
        }
        table.reset(statuses)
        if average is not None:
            table.see(tracker.unseen(average))
        preconditioner.inverse, preconditioner.warm, preconditioner.damping = inverse, warm, λ
        preconditioner.inverted, preconditioner.outdated = state.inverted, state.outdated
        preconditioner.unseen = frozenset() if whole_metric is None else whole_metric.unseen
        _seed(tracker.generator, state.generator.cpu(), state.rank, tracker.world.rank)
        if state.counted:
            tracker.skip_counted()

    return go_on


def _signature(tracker: MetricTracker, preconditioner: Preconditioner) -> dict[str, Any]:
    """What must be the same for a state to mean the same. How many samples estimate the metric does not matter."""
    observer = tracker.initial_observer
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
    """The solver in words, with the power of the metric that it inverts."""
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
        plain: Any = get_origin(kind)
        if not isinstance(state[name], (int, float) if kind is float else plain or kind):
            raise ValueError(f'"{name}" of the state is a {type(state[name]).__name__}: it is damaged. {_NOTHING}')


def check_signature(whose: str, state: Mapping[str, Any], signature: Mapping[str, Any]) -> None:
    """What must be the same for a state to mean the same is so, names in their order too."""
    for what, mine in signature.items():
        saved = mine if state.get(what) is None else state[what]
        if saved != mine or (isinstance(mine, dict) and list(saved) != list(mine)):
            raise ValueError(f"this is the state of another {whose}: {_difference(what, saved, mine)}. {_NOTHING}")


def _difference(what: str, saved: Any, mine: Any) -> str:
    """The difference in words; of many names only those that differ."""
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


def check_nonnegative(what: str, tensors: Mapping[str, Tensor]) -> None:
    """No second moment or count of steps is negative, but for rounding: roots would be NaN, or a step would ascend."""
    for name, t in tensors.items():
        rounding = torch.finfo(t.dtype).eps ** 0.5
        if t.numel() and bool(t.min() < -rounding * t.abs().max()):
            raise ValueError(
                f"{name} of {what} in the state has negative entries, {float(t.min()):.3g}: it is damaged. "
                f"{_NOTHING}: take an earlier checkpoint"
            )


def check_generator(saved: Tensor, generator: torch.Generator) -> None:
    """The numbers of a sampled metric can be gone on with; those of another kind of device need not."""
    if saved.dtype != torch.uint8 or saved.ndim != 1:
        raise ValueError(f'"generator" of the state is no state of a torch.Generator: it is damaged. {_NOTHING}')
    if saved.shape == generator.get_state().shape:
        _built("the generator", lambda: torch.Generator(generator.device).set_state(saved.cpu()))


def check_torch(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
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
        shape = params[key].shape
        for what, kept in {"momentum": shape, "exp_avg": shape, "exp_avg_sq": shape, "step": torch.Size()}.items():
            if what in entry:  # what a hook of the user's keeps may have any shape
                check_tensor(f"{what} of {name}", entry[what], kept)
        check_finite(name, tensors)
        check_nonnegative(name, {what: whole(t) for what, t in tensors.items() if what in ("exp_avg_sq", "step")})


def operator_of(
    structure: Structure, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]
) -> Operator | None:
    """The metric with these tensors, which are all that it has."""
    G = _built("the metric", lambda: structure.restore(model, blocks, tensors))
    if G is None:
        return None
    expected = G.tensors()
    for key in expected:
        if key not in tensors:
            raise ValueError(f"{key} of the metric is missing in the state. {_NOTHING}")
    strange = [key for key in tensors if key not in expected]
    if strange:
        raise ValueError(f"the metric in the state has {', '.join(strange)}, for which there is no layer. {_NOTHING}")
    check_nonnegative("the metric", G.nonnegative())
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
        check_nonnegative("the inverse of the metric", inverse.nonnegative())
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


def check_tensor(name: str, t: Tensor, shape: Sequence[int]) -> None:
    """Raise unless this is a tensor of such a shape."""
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

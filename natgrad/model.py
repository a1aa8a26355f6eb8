"""A model as a smooth function of named parameters, θ ↦ y = f(θ, x): a module or a pure function."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from numbers import Real
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader
from typing_extensions import Self

from natgrad.accelerate.modules import (
    COMPILED_CHILD,
    children_in,
    compiles_calls,
    gathered,
    is_compiled_function,
    parameters_in,
    with_own_calls,
    without_checkpoints,
)
from natgrad.errors import BatchStatisticsError
from natgrad.isolation import deterministic, unfused, untouched
from natgrad.jet import Jet
from natgrad.log import listed
from natgrad.sharding import is_sharded, shape_of

# Wrappers: torch.compile and DistributedDataParallel.
#
# Hooks inside a compiled region do not fire, and its graph is a single node without layers. So the library runs its own
# forward passes eagerly, on the wrapped module, whose parameters have plain names.


def unwrapped(module: nn.Module) -> list[nn.Module]:
    """The module, the module that it wraps, and so on; the plain module is last.

    >>> net = nn.Linear(1, 1)
    >>> unwrapped(torch.compile(net, backend="eager"))[-1] is net
    True
    """
    chain = [module]
    while isinstance(module, DistributedDataParallel) or COMPILED_CHILD in children_in(module):
        module = module.get_submodule("module" if isinstance(module, DistributedDataParallel) else COMPILED_CHILD)
        chain.append(module)
    return chain


NETWORK_CHILD = "_natgrad_network"  # the name under which a module of the library keeps the user's
_INSERTED = frozenset({COMPILED_CHILD, NETWORK_CHILD})


def plain_name(name: str) -> str:
    """The name of a parameter in the user's module: without the prefixes that torch.compile and the library insert.

    >>> plain_name("encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(piece for piece in name.split(".") if piece not in _INSERTED)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module (not of its children) are compiled.

    By ``torch.compile(module)``, by ``module.compile()``, or because its ``forward`` is a compiled function.
    """
    return is_compiled_function(module.forward) or compiles_calls(module)


def any_compiled(modules: Sequence[nn.Module]) -> bool:
    """Whether one of the modules is compiled. An optimizer asks before every estimate, so this must be fast."""
    # Modules of one type share a forward, except those with a forward of their own.
    special = with_own_calls(modules)
    of_types = dict(zip(map(type, modules), modules, strict=True))
    if special:
        numbers = set(map(id, special))
        of_types = {type(m): m for m in modules if id(m) not in numbers}
    return any(map(is_compiled, special)) or any(map(is_compiled, of_types.values()))


@contextmanager
def eager(module: nn.Module) -> Iterator[None]:
    """Inside the block, compiled modules run eagerly."""
    if not any_compiled(list(module.modules())):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def placed(module: nn.Module, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters by the full names of all their places: each place once, though a module may have several names.

    ``torch.func.functional_call`` would exchange a parameter as often as its module has names, and leave behind what it
    put there last.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> list(placed(nn.Sequential(layer, nn.Tanh(), layer), {"0.weight": torch.ones(1, 1)}))
    ['0.weight']
    """
    names: dict[int, str] = {}
    out: dict[str, Tensor] = {}
    for prefix, m in module.named_modules():
        for key, p in parameters_in(m).items():
            full = f"{prefix}.{key}" if prefix else key
            name = names.setdefault(id(p), plain_name(full))
            if p is not None and name in params:
                out[full] = params[name]
    unknown = params.keys() - set(names.values())
    return out | {name: params[name] for name in unknown}  # which torch refuses


Shapes: TypeAlias = tuple[torch.Size, ...]  # [n *out] of the heads of a model; none where it has one output
Inputs: TypeAlias = Any  # a tensor, a tuple of positional inputs, a dict of keyword inputs, or None


@final
@dataclass(frozen=True)
class Model:
    """f(θ, x) with its trainable parameters by name, in flattening order.

    ``Model.of(module)`` removes wrappers (``torch.compile``, ``DistributedDataParallel``) and reads the trainable
    parameters of an ``nn.Module``, each tied parameter once. ``Model.of(f, params)`` wraps a pure function
    ``f(params, x)``. ``output`` extracts the output tensor y [n *out] if the model returns something else, such as a
    dict. With ``examples="inputs"`` the outputs are flattened over positions, [n·t *out], for the n examples that the
    first input has on its first axis: y is [n t *out]. With ``heads``, keys of a dict or places in a tuple, the outputs
    are several tensors [n *out]: y [n d] holds them side by side. A model that returns an object with ``logits``
    (``transformers``) has these as its output. ``constant_statistics``: to a metric, batch statistics in functions are
    constants, as are those in modules.
    """

    function: Callable[..., Any]
    params: dict[str, Tensor]
    output: Callable[[Any], Any] | None = None
    examples: Literal["inputs"] | None = None
    heads: tuple[Any, ...] | None = None
    constant_statistics: bool = False

    @staticmethod
    def of(
        model: nn.Module | Callable[..., Any] | Model,
        params: Mapping[str, Tensor] | None = None,
        output: Callable[[Any], Any] | None = None,
        examples: Literal["inputs"] | None = None,
        heads: tuple[Any, ...] | None = None,
        *,
        mixed: bool = False,
    ) -> Model:
        """``mixed``: the parameters may be of several dtypes."""
        if examples not in (None, "inputs"):
            raise ValueError(f'examples= is None or "inputs", not {examples!r}')
        if examples is not None and heads is not None:
            raise ValueError('examples="inputs" is for one output: return heads [n *out] with the examples first')
        if isinstance(model, Model):
            return model
        if isinstance(model, nn.Module):
            if params is not None:
                raise TypeError("params= belongs to a pure function f(params, x); a module has its own parameters")
            model = unwrapped(model)[-1]
            _check_eager(model)
            named: dict[str, Tensor] = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
            _check_parameters(named, f"the module {type(model).__name__}", mixed)
            return Model(model, named, output, examples, heads)
        if not callable(model):
            raise TypeError(
                f"the model is an nn.Module or a function f(params, x), not a {type(model).__name__}: give the model "
                "first, then the inputs"
            )
        if params is None:
            raise TypeError("a pure function f(params, x) needs params=, a mapping from names to tensors")
        _check_parameters(params, "params=")
        return Model(model, dict(params), output, examples, heads)

    def copied(self) -> Model:
        """The same model with a module of its own, which ``at`` may move; a function needs none."""
        if self.module is None:
            return self
        other = Model.of(copy.deepcopy(self.module))
        return replace(self, function=other.function, params=other.params)

    def at(self, params: Mapping[str, Tensor]) -> Model:
        """The model at other parameters. A module is moved itself, since layer rules read its parameters.

        >>> twice = Model.of(nn.Linear(1, 1, bias=False)).copied().at({"weight": torch.tensor([[2.0]])})
        >>> twice(None, torch.tensor([[3.0]]))
        tensor([[6.]], grad_fn=<MmBackward0>)
        """
        if self.module is None:
            return replace(self, params=dict(params))
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(params[name])
        return self

    @property
    def module(self) -> nn.Module | None:
        return self.function if isinstance(self.function, nn.Module) else None

    @cached_property
    def is_sharded(self) -> bool:
        """Whether processes have parts of parameters."""
        return any(map(is_sharded, self.params.values()))

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The parameters as they are in the graph of a pass: ``fully_shard`` gathers shards."""
        if not self.is_sharded or self.module is None:
            return self.params
        whole = gathered(self.module.modules())
        return {name: whole.get(id(p), p) for name, p in self.params.items()}

    @cached_property
    def like(self) -> dict[str, Tensor]:
        """The parameters on the meta device, without values."""
        return {name: shape_of(p) for name, p in self.params.items()}

    @cached_property
    def batch_norms(self) -> dict[str, nn.Module]:
        """The modules that may normalise by batch statistics, by name."""
        if self.module is None:
            return {}
        return {name: m for name, m in self.module.named_modules() if isinstance(m, _BatchNorm)}

    @property
    def size(self) -> int:
        """P, the number of trainable parameters."""
        return sum(p.numel() for p in self.params.values())

    @property
    def example(self) -> Tensor:
        """A parameter, for its dtype and device."""
        return next(iter(self.params.values()))

    def __call__(self, params: Mapping[str, Tensor] | None, x: Inputs) -> Tensor:
        """y [n *out] at ``params``; missing ones keep their values, and ``None`` keeps all."""
        return self.evaluated(params, x)[0]

    def evaluated(self, params: Mapping[str, Tensor] | None, x: Inputs) -> tuple[Tensor, Shapes]:
        """y at ``params``, and the shapes of its heads."""
        if isinstance(x, DataLoader):
            raise TypeError("x is a DataLoader, where one batch of inputs belongs: call this for every batch of it")
        device = self.example.device
        with unfused(self.function, device), without_checkpoints(), library_pass():
            return deterministic(partial(self._run, params, x), self.function, device)

    def _run(self, params: Mapping[str, Tensor] | None, x: Inputs) -> tuple[Tensor, Shapes]:
        if not isinstance(self.function, nn.Module):
            return self.read(self.function({**self.params, **(params or {})}, x), x)
        args, kwargs = arguments(x)
        with untouched(self.function), eager(self.function):
            if params is None:
                return self.read(self.function(*args, **kwargs), x)
            moved = placed(self.function, params)
            return self.read(torch.func.functional_call(self.function, moved, args, kwargs, tie_weights=False), x)

    def read(self, raw: Any, x: Inputs) -> tuple[Tensor, Shapes]:
        """The output tensor y of what the model returned for x, checked, and the shapes [n *out] of its heads."""
        tensors = self.returned(raw)
        if self.heads is None:
            return (tensors[0] if self.examples is None else self.by_example(tensors[0], x)), ()
        if len({tensor.shape[0] for tensor in tensors}) > 1:
            sizes = ", ".join(f"{key!r} {tensor.shape[0]}" for key, tensor in zip(self.heads, tensors, strict=True))
            raise ValueError(f"all heads need the n examples on their first axis, and have {sizes}")
        return side_by_side(tensors), tuple(tensor.shape for tensor in tensors)

    def given_to_loss(self, y: Tensor, shapes: Shapes) -> Tensor | dict[Any, Tensor]:
        """The outputs as a loss is given them: y, or its heads by their keys, in their shapes."""
        if self.heads is None:
            return y
        pieces = y.split([shape[1:].numel() for shape in shapes], dim=1)
        return {key: t.reshape(shape) for key, t, shape in zip(self.heads, pieces, shapes, strict=True)}

    def outputs(self, raw: Any, x: Inputs) -> Tensor:
        """Extract the output tensor y from what the model returned for x, and check it."""
        return self.read(raw, x)[0]

    def returned(self, raw: Any) -> list[Tensor]:
        """The tensors that the model returned, those of its heads or the only one, before any change of their shape."""
        y = raw if self.output is None else self.output(raw)
        if self.heads is None:
            logits = None if isinstance(y, Tensor) else getattr(y, "logits", None)
            return [_checked(logits if self.output is None and isinstance(logits, Tensor) else y, "the outputs")]
        return [_checked(_head(y, key), f"the head {key!r}") for key in self.heads]

    def with_heads(self, raw: Any, tensors: Sequence[Tensor]) -> Any:
        """What the model returned, with these tensors in the place of its heads."""
        assert self.heads is not None
        if isinstance(raw, tuple):
            by_key = dict(zip(self.heads, tensors, strict=True))
            items = [by_key.get(at, by_key.get(at - len(raw), each)) for at, each in enumerate(raw)]
            return type(raw)(*items) if hasattr(raw, "_fields") else tuple(items)
        changed = copy.copy(raw)
        for key, tensor in zip(self.heads, tensors, strict=True):
            if isinstance(raw, Mapping):  # those of transformers take numbers, too
                changed[key if key in raw else list(raw)[key]] = tensor
            elif isinstance(raw, list):
                changed[key] = tensor
            else:
                try:
                    setattr(changed, str(key), tensor)
                except AttributeError:  # of a frozen dataclass
                    object.__setattr__(changed, str(key), tensor)
        return changed

    def by_example(self, t: Tensor, x: Inputs) -> Tensor:
        """[n t *rest] of a tensor [n·t *rest] that is flattened over the positions of the n examples of x."""
        first = next((t for t in tensors_of(x) if t.ndim), None)
        if first is None or t.shape[0] % first.shape[0]:
            given = "no input has a first axis" if first is None else f"the first input has {first.shape[0]} examples"
            raise ValueError(
                f'examples="inputs": outputs of {t.shape[0]} rows cannot be given to examples, {given}. Return '
                "outputs [n t *out] with the examples first"
            )
        return t.unflatten(0, (first.shape[0], -1))

    def check_separable(self) -> None:
        """Refuse, by name, modules that mix the examples of a batch or are random."""
        if self.module is None:
            return
        if names := mixing(self.module):
            raise BatchStatisticsError(
                f"{', '.join(names)}: in training mode the outputs of one example depend on the others or on chance, "
                "so there is no per-example Jacobian. Take the metric in evaluation mode: model.eval(), or "
                "with natgrad.evaluating(model): ... around it"
            )


def side_by_side(heads: Sequence[Tensor]) -> Tensor:
    """y [n d] of heads [n *out]; a head [n] has one number an example."""
    return torch.cat([head.unsqueeze(-1).flatten(1) for head in heads], 1)


def _head(y: Any, key: Any) -> Any:
    """One of the outputs: the value of a key, at a place, or under a name."""
    try:
        return y[key] if isinstance(y, Mapping | Sequence) else getattr(y, str(key))
    except (KeyError, IndexError, TypeError, AttributeError):
        keys = f"{', '.join(map(repr, y))}" if isinstance(y, Mapping) else f"a {type(y).__name__}"
        raise ValueError(f"the losses name a head {key!r}, and the model returned {keys}") from None


def _checked(y: Any, what: str) -> Tensor:
    if isinstance(y, Jet):
        raise TypeError(
            "the model was called by natgrad.pde, which takes derivatives by its inputs: its outputs are not what is "
            "trained then. Give the optimizer or the pullback a module whose forward returns the residual, or call "
            "natgrad.pde under torch.no_grad() if the derivatives are not trained"
        )
    if not isinstance(y, Tensor):
        raise TypeError(
            f"the model returned a {type(y).__name__}: pass output=, a function from it to the tensor [n *out], or a "
            "dict or tuple of losses, one for every head"
        )
    refuse_nested(y, what)
    if y.ndim == 0:
        raise ValueError(
            f"the model returned one number: outputs need the examples on their first axis, [n *out] ({what})"
        )
    if y.shape[0] == 0:
        raise ValueError(f"the batch is empty: {what} have no example on their first axis")
    if not y.is_floating_point():
        advice = ". Give output=torch.view_as_real for the real and the imaginary part" if y.is_complex() else ""
        raise TypeError(f"{what} are {y.dtype}: a metric needs real, differentiable outputs{advice}")
    return y


def mixing(module: nn.Module) -> list[str]:
    """The modules that mix the examples of a batch, or are random, by name and type.

    >>> mixing(nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
    ['1 (Dropout)']
    """
    named = ((plain_name(name) or "the model", m) for name, m in module.named_modules())
    return [f"{name} ({type(m).__name__})" for name, m in named if _mixes(m)]


def _mixes(module: nn.Module) -> bool:
    if isinstance(module, _InstanceNorm):
        return False  # statistics of one example; running averages do not enter the Jacobian in training mode
    if isinstance(module, _BatchNorm):
        return module.training or not module.track_running_stats
    return _draws(module)


def _draws(module: nn.Module) -> bool:
    """Whether a module is random in its current mode."""
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0
    if isinstance(module, nn.RReLU):
        return module.training and module.lower < module.upper
    dropout = getattr(module, "dropout", 0.0)  # nn.LSTM, nn.MultiheadAttention keep theirs as a number
    return module.training and isinstance(dropout, (int, float)) and dropout > 0


def _check_eager(module: nn.Module) -> None:
    """Refuse, by name, scripted modules (their layers are invisible) and lazy parameters (they have no shape)."""
    for name, m in module.named_modules():
        if isinstance(m, ScriptModule) and any(p.requires_grad for p in m.parameters()):
            raise TypeError(
                f"{name or 'the model'} is a torch.jit module ({type(m).__name__}), inside which no layer can be "
                "seen: natgrad needs the eager module. Train that, and script or trace it afterwards, or freeze it"
            )
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy)}: lazy parameters of the module {type(module).__name__}, which have no shape before the "
            "first input. Run a batch through the model first, model(x), then make the optimizer"
        )


def _check_parameters(params: Mapping[str, Tensor], where: str, mixed: bool = False) -> None:
    if all(isinstance(p, Tensor) and not p.numel() for p in params.values()):
        raise ValueError(
            f"{where} has no trainable parameters, or none with entries: set requires_grad_(True) on those to train"
        )
    first_name, first = next(iter(params.items()))
    for name, p in params.items():
        if not isinstance(p, Tensor) or not p.is_floating_point():
            raise TypeError(f"{where}: parameter {name} must be a real floating-point tensor")
        if p.device != first.device:
            raise ValueError(
                f"{where} mixes devices: {first_name} is {first.device} and {name} is {p.device}; move all with "
                "model.to(...)"
            )
        if p.dtype != first.dtype and not mixed:
            raise ValueError(
                f"{where} mixes dtypes: {first_name} is {first.dtype} and {name} is {p.dtype}; move all with "
                "model.to(...) and train under torch.autocast, or take an optimizer whose metric is that of the "
                "gradients (Natural, Muon, SOAP, Shampoo, BatchGradient()), which takes them as they are"
            )
    if first.is_meta:
        raise ValueError(
            f"{where}: {listed(params)} on the meta device, where a tensor has a shape but no numbers. Give them "
            "memory and values first, model.to_empty(device=…) and load_state_dict, then make the optimizer"
        )


def arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a module call: a tuple, a dict, an (args, kwargs) pair or one input."""
    if isinstance(x, Arguments):
        return x.args, x.kwargs
    if isinstance(x, tuple):
        return x, {}
    if isinstance(x, dict):
        return (), x
    return (() if x is None else (x,)), {}


@final
@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of a module, as a forward hook receives them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def tensors_of(x: Inputs) -> list[Tensor]:
    """All tensors inside the inputs, in order."""
    return list(_walk(x))


def count_examples(x: Inputs) -> int:
    """The size of the first axis of the first input that has one; 1 where none has.

    >>> count_examples((torch.tensor(2.0), torch.ones(3, 2)))
    3
    """
    return next((t.shape[0] for t in tensors_of(x) if t.ndim), 1)


def examples(x: Inputs, chunk: tuple[int, int], n: int) -> Inputs:
    """The inputs of the examples start to stop, of n."""
    if chunk == (0, n):
        return x
    return map_tensors(x, lambda t: t[chunk[0] : chunk[1]])


def returned_tensors(raw: Any) -> list[Tensor]:
    """All tensors in what a model returned, also those under the names of an object, such as a dataclass."""
    if is_dataclass(raw) and not isinstance(raw, Mapping):
        return tensors_of([getattr(raw, each.name) for each in fields(raw)])
    return tensors_of(raw if isinstance(raw, Tensor | Mapping | Sequence) else getattr(raw, "__dict__", ()))


def _walk(x: Inputs) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Arguments):
        yield from _walk((x.args, x.kwargs))
    elif isinstance(x, (Mapping, Sequence)) and not isinstance(x, str):
        for value in x.values() if isinstance(x, Mapping) else x:
            yield from _walk(value)


def refuse_nested(x: Inputs, what: str) -> None:
    """Refuse nested tensors among these; ``what`` they are.

    >>> refuse_nested(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "the inputs")
    Traceback (most recent call last):
    TypeError: the inputs hold a nested tensor, and a metric on outputs needs tensors with one size on every axis...
    """
    if any(t.is_nested for t in tensors_of(x)):
        raise TypeError(
            f"{what} hold a nested tensor, and a metric on outputs needs tensors with one size on every axis: pad it, "
            "torch.nested.to_padded_tensor(x, 0.0), and give the model a mask, or take an optimizer whose metric is "
            "that of the gradients (Natural, Muon, SOAP, Shampoo, BatchGradient())"
        )


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


def map_tensors(x: Inputs, function: Callable[[Tensor], Any]) -> Inputs:
    """Apply a function to every tensor of the inputs."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Arguments):
        return Arguments(map_tensors(x.args, function), map_tensors(x.kwargs, function))
    if isinstance(x, dict):
        return {key: map_tensors(value, function) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        values = [map_tensors(value, function) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)  # a named tuple, a packed sequence
    return x


def batches_of(model: Model, loader: DataLoader[Any]) -> Iterator[tuple[Inputs, Any]]:
    """The batches (x, target) of a loader of x or of pairs (x, target), on the device of the model."""
    for item in loader:
        batch = map_tensors(item, lambda t: t.to(model.example.device))
        if isinstance(batch, Tensor):
            yield batch, None
        elif isinstance(batch, (list, tuple)) and 1 <= len(batch) <= 2:
            yield batch[0], batch[1] if len(batch) == 2 else None
        else:
            raise TypeError(
                f"a loader must give tensors x or pairs (x, target), and this one gave a {type(item).__name__}: put "
                "several inputs into a tuple x of their own"
            )


_inside: ContextVar[bool] = ContextVar("natgrad evaluates a model", default=False)


@contextmanager
def library_pass() -> Iterator[None]:
    """Forward passes inside the block belong to the library, not to training."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def in_library_pass() -> bool:
    """Whether the current forward pass belongs to the library; optimizers ignore such passes."""
    return _inside.get()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside a block: running statistics, no dropout; restored afterwards.

    Args:
        module: The module; all its children are switched to evaluation mode.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> with evaluating(net):
        ...     net[1].training
        False
        >>> net[1].training
        True
    """
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode


def check_types(**arguments: tuple[Any, Any, str]) -> None:
    """Refuse arguments of another type: by name, the value, the type and what it is in words.

    >>> check_types(strict=("yes", bool, "True or False"))
    Traceback (most recent call last):
    TypeError: strict must be True or False, got 'yes'
    """
    for name, (value, kind, words) in arguments.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {words}, got {value!r}")


def check_slots(**slots: tuple[Any, type]) -> None:
    """Refuse what does not belong into a slot: a class instead of an instance, a name, two slots swapped.

    ``slots``: by the name of the argument, its value and the type it must have.
    """
    for slot, (value, kind) in slots.items():
        if isinstance(value, kind):
            continue
        raise TypeError(f"{slot} must be a natgrad {kind.__name__}, got {_described(slot, value, kind)}")


_ORIGINS = {  # what is computed, and so cannot be written down in its place
    "Pullback": "ng.pullback(model, x, metric)",
    "Operator": "ng.Kernel().estimate(pullback)",
    "Covector": "ng.differential(model, loss)",
}
_SLOTS = {"OutputMetric": "metric", "Structure": "structure", "Solver": "solver", "StepRule": "step"}


def _described(slot: str, value: Any, kind: type) -> str:
    """What was given, with the fix."""
    if isinstance(value, type):
        return f"the class {value.__name__}: write {value.__name__}(…)"
    text = repr(value)
    if isinstance(value, (Tensor, nn.Module)) or len(text) > 200:  # a dataclass of tensors would fill the screen
        text = f"a {type(value).__name__}"
    if kind.__name__ in _ORIGINS:
        return f"{text}: {_ORIGINS[kind.__name__]} makes one"
    belongs = next((_SLOTS[base.__name__] for base in type(value).__mro__ if base.__name__ in _SLOTS), slot)
    if belongs != slot:
        return f"{text}, which belongs to {belongs}="
    if kind.__name__ != "OutputMetric":
        return text
    hint = getattr(value, "as_metric", None)  # a family knows the metric that it was meant to be
    if hint is not None:
        return f"{text}, {hint}"
    if isinstance(value, Tensor):
        return f"{text}: give the loss itself, such as nn.CrossEntropyLoss(), and not its value"
    if isinstance(value, Real):
        return f"{text}: if this is the learning rate, write lr={text}"
    if callable(value):
        return f"{text}, a function: write Empirical(…), or Fisher(family) of the distribution whose −log p is the loss"
    return f"{text}: give a metric, such as Fisher(Categorical()), or the loss, such as nn.CrossEntropyLoss()"


class OpaqueNetwork(nn.Module, ABC):
    """A network whose parameters are those of this module, by other names, and whose layers no optimizer sees.

    Subclasses compute with it in ``forward``; its own parameters stay where they were.
    """

    def __init__(self, network: nn.Module, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.training = network.training
        self._hidden = (copy.deepcopy(network).requires_grad_(False),)  # in a tuple it is no module of this one
        self._names = {name: name.replace(".", "/") for name in params}
        for name, t in params.items():
            self.register_parameter(self._names[name], nn.Parameter(t.detach().clone()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._hidden[0]._apply(fn, recurse)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Self:
        self._hidden[0].train(mode)
        return super().train(mode)

    @property
    def network(self) -> nn.Module:
        """The network, whose modules have the modes that they had, until this one changes its own."""
        return self._hidden[0]

    @property
    def point(self) -> dict[str, Tensor]:
        """The parameters by the names of the network."""
        return {name: getattr(self, own) for name, own in self._names.items()}

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network computes with the parameters of this module."""

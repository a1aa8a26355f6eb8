"""What a check beside an optimizer is told, and the hooks on modules and outputs of the user by which it is."""

from __future__ import annotations

import copy
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.autograd import computes_gradient, nodes
from natgrad.accelerate.devices import in_transform
from natgrad.accelerate.modules import forward_pre_hooks_in, has_pre_hooks, uncompiled, without_pre_hooks
from natgrad.errors import LossMismatchError
from natgrad.model import returned_tensors

_log = logging.getLogger("natgrad")


class Watcher(ABC):  # noqa: B024 - a watcher writes what it wants to be told
    """The base class of checks beside an optimizer, which say once what they find.

    An error that a watcher raises refuses the step.

    Args:
        strict: Make an error of a warning.
        silent: Say nothing: one of several processes speaks for all.
    """

    def __init__(self, *, strict: bool = False, silent: bool = False) -> None:
        self.strict: bool = strict
        self.silent: bool = silent
        self._said: set[str] = set()

    def outputs(self, raw: Any, tensors: Sequence[Tensor], params: Mapping[str, Tensor]) -> None:  # noqa: B027
        """A pass that is estimated has returned ``raw``, and in it these outputs of the parameters."""

    def hidden(self) -> None:  # noqa: B027
        """A pass that is estimated shows nothing of what comes back to it: it is compiled."""

    def paused(self) -> AbstractContextManager[None]:
        """Backward passes inside are those of the library, which start at the outputs, too."""
        return nullcontext()

    def two_targets(self) -> None:  # noqa: B027
        """The given loss was called with two targets that train, and the metric depends on them."""

    def gradients(self, grads: Mapping[str, Tensor], *, whole: bool, due: bool) -> None:  # noqa: B027
        """A step begins. ``whole``: every parameter has a gradient. ``due``: the metric is estimated for this step."""

    def step_ended(self) -> None:  # noqa: B027
        """The step was made, or refused."""

    def note(self, message: str) -> None:
        """Say what needs no action, once."""
        if message not in self._said and not self.silent:
            _log.info(message)
        self._said.add(message)

    def warn(self, message: str) -> None:
        """Say what is wrong, once, or raise it."""
        if self.strict:
            raise LossMismatchError(message)
        if message not in self._said and not self.silent:
            _log.warning(message)
        self._said.add(message)


_GETSTATE, _PREPARE = "__getstate__", "__prepare_scriptable__"
_NOT_COMPILED = (
    "an optimizer of natgrad takes the targets from calls of this loss, in Python: compile the model, and call the "
    "loss outside, or compile without fullgraph=True"
)


class ModuleHook(ABC):
    """Runs before every call of a module."""

    @abstractmethod
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...


class LossListener(Protocol):
    """Is told of calls of the user's loss."""

    def loss_called(self, y: Tensor, target: Any, *, trains: bool) -> None:
        """The loss is called on these outputs and targets; ``trains``: a backward pass may follow from this call."""


@final
class LossHook(ModuleHook):
    """Tells a listener of calls of the user's loss, and whether they train.

    A call without gradients is for a log, or inside of a ``torch.autograd.Function``. A call inside of ``torch.func``
    is ignored: it does not train, and its tensors have no values to look at.
    """

    def __init__(self, listener: LossListener) -> None:
        self._listener = weakref.ref(listener)
        self._tell = uncompiled(_tell, reason=_NOT_COMPILED)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tell(self._listener, args, kwargs)


def _tell(of: weakref.ref[LossListener], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    listener = of()
    if listener is None or in_transform():
        return
    y, target = _read_by(args, kwargs)
    if isinstance(y, Tensor):
        listener.loss_called(y, target, trains=torch.is_grad_enabled() and y.requires_grad)


def _read_by(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The outputs and the targets that a loss of torch, or one of two arguments, is called with."""
    given = dict(zip(("input", "target"), args, strict=False)) | dict(kwargs)
    return given.get("input"), given.get("target")


def attach_hook(module: nn.Module, hook: ModuleHook, owner: object) -> Callable[[], object]:
    """Put a hook on a module until its owner is freed. Returns a function that removes it before.

    ``pickle``, ``copy.deepcopy`` and ``torch.save`` ask a module for its state by ``__getstate__``, and
    ``torch.jit.script`` for a module to compile by ``__prepare_scriptable__``. While the hook is there, the module has
    its own versions of both, which leave the hook out: a saved model loads where natgrad is not installed.
    """
    itself = weakref.ref(module)  # not the module: it would be in a reference cycle

    def state() -> Any:
        module = itself()
        assert module is not None
        return _state_without_hooks(module)

    def scriptable() -> nn.Module | None:
        return copy.copy(itself())

    vars(module).update({_GETSTATE: state, _PREPARE: scriptable})
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    return weakref.finalize(owner, _detach, itself, handle)


def _detach(itself: Callable[[], nn.Module | None], handle: RemovableHandle) -> None:
    handle.remove()
    module = itself()
    if module is not None and not any(isinstance(hook, ModuleHook) for hook in forward_pre_hooks_in(module).values()):
        vars(module).pop(_GETSTATE, None)
        vars(module).pop(_PREPARE, None)


def _state_without_hooks(module: nn.Module) -> Any:
    """What the class of the module says its state is, without what ``attach_hook`` has put there."""
    of_class = getattr(type(module), _GETSTATE, None)  # before Python 3.11 a class may have none
    state: Any = vars(module) if of_class is None else of_class(module)
    if not has_pre_hooks(state):
        return state
    ids = [at for at, hook in forward_pre_hooks_in(module).items() if isinstance(hook, ModuleHook)]
    return without_pre_hooks({key: value for key, value in state.items() if key not in (_GETSTATE, _PREPARE)}, ids)


# Outputs.


def loss_in(raw: Any, outputs: Sequence[Tensor]) -> Tensor | None:
    """The loss that the model has computed itself, of these outputs, among what it returned.

    A number that is made of other tensors (the loss of a router, a norm) is none, unless it is named so or comes first.
    """
    numbers = [t for t in returned_tensors(raw) if t.ndim == 0 and t.grad_fn is not None]
    for t in numbers:
        graph = set(nodes([t.grad_fn]))
        if any(_source(y, graph) is not None for y in outputs):
            return t
    named = raw.get("loss") if isinstance(raw, Mapping) else getattr(raw, "loss", None)
    first = raw[0] if isinstance(raw, tuple | list) else None
    return next((t for t in numbers if t is named or t is first), None)


def _source(y: Tensor, graph: set[Any]) -> tuple[Any, int] | None:
    """The node in the graph that returns y, or what y is a copy of, and which of its results that is."""
    node, number = y.grad_fn, y.output_nr
    while node is not None and node not in graph and node.name() == "ToCopyBackward0":
        node, number = node.next_functions[0]
    return None if node is None or node not in graph else (node, number)


def on_cotangent(y: Tensor, loss: Tensor | None, hook: Callable[[Tensor], None]) -> RemovableHandle | None:
    """Call the hook when a backward pass comes to the output y, with its cotangent; None where it will not be seen.

    A model that computes its ``loss`` itself may return a copy of y in another precision, as ``accelerate`` makes it
    do: there the cotangent comes to what y is a copy of.
    """
    if loss is None:
        return y.register_hook(hook)
    source = _source(y, set(nodes([loss.grad_fn])))
    if source is None:
        return None
    node, number = source
    if node is y.grad_fn:
        return y.register_hook(hook)
    handle: RemovableHandle = node.register_prehook(lambda cotangents: hook(cotangents[number]))
    return handle


def in_training(
    params: Sequence[Tensor], hook: Callable[[Any], None], otherwise: Callable[[], None] = lambda: None
) -> Callable[[Any], None]:
    """The hook, called in backward passes that compute a gradient of the parameters; in others, ``otherwise``.

    One for the inputs alone (``torch.autograd.grad(y.sum(), x)``, for a gradient penalty) is not that of the loss.
    """
    return partial(uncompiled(_in_training), params, hook, otherwise)


def _in_training(
    params: Sequence[Tensor], hook: Callable[[Any], None], otherwise: Callable[[], None], cotangent: Any
) -> None:
    hook(cotangent) if computes_gradient(params) else otherwise()


def weakly(owner: Any, method: Callable[..., None]) -> Callable[..., None]:
    """The method as a hook that does not hold its owner: the graph holds the hook, and the owner the graph."""
    itself = weakref.ref(owner)

    def hook(*args: Any) -> None:
        owner = itself()
        if owner is not None:
            method(owner, *args)

    return hook

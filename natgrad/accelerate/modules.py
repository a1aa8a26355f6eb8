"""What torch keeps of modules, read directly: public methods walk the whole tree, too slow for every pass."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as checkpoints


def parameters_in(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by key, without those of its children. It is the module's dictionary, not a copy."""
    return module._parameters


def buffers_in(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by key. It is the module's dictionary, not a copy."""
    return module._buffers


def buffers_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The own buffers of modules, one after the other."""
    return [t for module in modules for t in module._buffers.values() if t is not None]


def children_in(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's children by key; a child that is there twice is there twice. It is not a copy."""
    return module._modules


def children_of(modules: Iterable[nn.Module]) -> list[nn.Module | None]:
    """The children of modules, one after the other."""
    return [child for module in modules for child in module._modules.values()]


def replaced(
    children: Iterable[tuple[nn.Module, str, nn.Module | None]],
    parameters: Iterable[tuple[nn.Module, str, Tensor | None]],
) -> bool:
    """Whether modules have another child or parameter under a key than they had."""
    # Lists: generators take twice as long, in every step.
    gone = [key for module, key, child in children if module._modules.get(key) is not child]
    return bool(gone or [key for module, key, p in parameters if module._parameters.get(key) is not p])


def forward_pre_hooks_in(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The hooks that run before a call of the module, by their number. It is not a copy."""
    return module._forward_pre_hooks


_PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


def has_pre_hooks(state: Any) -> bool:
    """Whether this is the state of a module, as it is pickled, with the hooks that run before a call."""
    return isinstance(state, dict) and _PRE_HOOKS[0] in state


def without_pre_hooks(state: dict[str, Any], numbers: Iterable[int]) -> dict[str, Any]:
    """A copy of that state without the hooks of these numbers."""
    gone = set(numbers)
    left = {key: copy.copy(state[key]) for key in _PRE_HOOKS}
    for hooks in left.values():
        for number in gone.intersection(hooks):
            del hooks[number]
    return {**state, **left}


def load_compiler() -> None:
    """Load torch's compiler, as every optimizer of torch does when it is made, and collect its garbage.

    While it is loaded, ``torch.fx.wrap`` stores its own frame in a variable. That reference cycle, which is torch's,
    holds all active frames with their variables: the optimizer that is being made, and the function of the user. So
    the garbage of the import is collected at once, one time in a process.
    """
    if "torch._dynamo" not in sys.modules:
        import_module("torch._dynamo")
        gc.collect()


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function, *, reason: str | None = None, recursive: bool = True) -> Function:
    """``torch.compiler.disable(function)``, for the place where it is needed first.

    Above the function, as a decorator, it would load torch's compiler, which takes longer than all of natgrad.
    """
    wrapped: Function = _uncompiled(function, recursive, reason)
    return wrapped


@cache
def _uncompiled(function: Any, recursive: bool, reason: str | None) -> Any:
    return torch.compiler.disable(function, recursive=recursive, reason=reason)


COMPILED_CHILD = "_orig_mod"  # the name under which torch.compile keeps the module


def compiled_from(function: Any) -> Any | None:
    """The function that ``torch.compile``, or ``torch.compiler.disable``, has wrapped; None if neither has."""
    return getattr(function, "_torchdynamo_orig_callable", None)


def is_compiled_function(function: Any) -> bool:
    """Whether this is a function that ``torch.compile`` has made.

    >>> import torch
    >>> is_compiled_function(torch.compile(abs, backend="eager")), is_compiled_function(torch.compiler.disable(abs))
    (True, False)
    """
    return compiled_from(function) is not None and not hasattr(function, "_torchdynamo_disable")


def compiles_calls(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def with_own_calls(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules whose calls were compiled by ``module.compile()``, or that have a forward of their own."""
    return [m for m in modules if m._compiled_call_impl is not None or "forward" in m.__dict__]


def compiling() -> bool:
    """Whether the caller, which is not compiled itself, was called from compiled code."""
    callback: Any = get_eval_frame_callback()
    return callback is not None and callback is not False


def active_ddp() -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` whose forward pass is running."""
    return DistributedDataParallel._active_ddp_module


def gathered(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """By the id of a shard of ``fully_shard``, the parameter that stands for it in passes, once there was one.

    It is always the same one; between passes it has no memory.
    """
    groups = _groups_in(modules)
    each = [param for group in groups for param in group.fsdp_params]
    return {id(p.sharded_param): p._unsharded_param for p in each if hasattr(p, "_unsharded_param")}


def _groups_in(modules: Iterable[nn.Module]) -> list[Any]:
    """The parameters that ``fully_shard`` gathers together, in modules: at first a state had one group."""
    found: list[Any] = [m for m in modules if hasattr(m, "_get_fsdp_state")]
    states = {id(m._get_fsdp_state()): m._get_fsdp_state() for m in found}
    groups = [
        group
        for state in states.values()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    ]
    return [group for group in groups if group is not None]


_SETTINGS = {"reduce_grads": False, "reshard_after_backward": False, "post_forward_mesh_info": None}


def gather(modules: Iterable[nn.Module]) -> list[Any]:
    """Gather the parameters that ``fully_shard`` divides, until the next backward pass; all processes call this."""
    inside = list(modules)
    for module in inside:  # as its first pass would: a module before those in it
        if hasattr(module, "_get_fsdp_state"):
            cast(Any, module)._get_fsdp_state()._lazy_init()
    groups = _groups_in(inside)
    for group in groups:
        group.unshard()
        group.wait_for_unshard()
    return groups


@contextmanager
def without_exchange(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, passes with gathered parameters give and take nothing, however many of them a process makes."""
    groups = gather(modules)  # where a backward pass came between
    before = [{name: getattr(group, name) for name in _SETTINGS} for group in groups]
    for group in groups:
        vars(group).update(_SETTINGS)
    try:
        yield
    finally:
        for group, settings in zip(groups, before, strict=True):
            vars(group).update(settings)


def in_join(ddp: DistributedDataParallel) -> bool:
    """Whether it runs inside of ``with model.join():``."""
    return ddp._join_config.enable


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Inside, the hooks of an active ``torch.autograd.graph.saved_tensors_hooks`` do not see what is saved.

    In ``checkpoint(model, x)`` these hooks count what the forward pass saves, and the pass that computes it again must
    save as much. What is saved for a metric in the middle of the forward pass is not saved again.

    >>> import torch
    >>> x, seen = torch.ones(1, requires_grad=True), []
    >>> with torch.autograd.graph.saved_tensors_hooks(seen.append, seen.append):
    ...     with without_saved_tensor_hooks():
    ...         y = x.sin()
    >>> seen
    []
    """
    autograd: Any = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


class _Uncheckpointed:
    """In place of the Function that ``checkpoint(…, use_reentrant=True)`` applies."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of what ``checkpoint(…, use_reentrant=False)`` does before and after the function."""
    yield


# The function of torch that does so: from 2.15 on the first.
_BEFORE_AND_AFTER = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Inside, ``torch.utils.checkpoint.checkpoint(function, *args)`` is ``function(*args)``.

    What a checkpoint computes again, it computes in the backward pass, without the settings of the forward pass, such
    as unfused attention. And no transform of ``torch.func`` takes its hooks.

    >>> import torch
    >>> x = torch.ones(1)
    >>> with without_checkpoints():
    ...     torch.func.grad(lambda x: checkpoints.checkpoint(torch.sin, x, use_reentrant=False).sum())(0 * x)
    tensor([1.])
    """
    generator = next(name for name in _BEFORE_AND_AFTER if hasattr(checkpoints, name))
    names = {generator: _nothing, "CheckpointFunction": _Uncheckpointed}
    before = {name: getattr(checkpoints, name) for name in names}
    vars(checkpoints).update(names)
    try:
        yield
    finally:
        vars(checkpoints).update(before)

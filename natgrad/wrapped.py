"""Modules inside wrappers: compiled ones, and those that are trained in several processes.

Hooks inside a compiled region do not fire, and its graph is one node that no layer can be found in. So the library
runs its own forward passes eagerly, on the module inside, whose parameters have plain names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_PREFIX = "_orig_mod"  # where torch.compile keeps the module


def unwrapped(module: nn.Module) -> list[nn.Module]:
    """The module, what it wraps, what that wraps, and so on to the plain one.

    >>> net = nn.Linear(1, 1)
    >>> unwrapped(torch.compile(net, backend="eager"))[-1] is net
    True
    """
    found = [module]
    while isinstance(module, DistributedDataParallel) or _PREFIX in module._modules:
        module = module.get_submodule("module" if isinstance(module, DistributedDataParallel) else _PREFIX)
        found.append(module)
    return found


def plain_name(name: str) -> str:
    """The name of a parameter, as if nothing on its way were compiled.

    >>> plain_name("encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != _PREFIX) if _PREFIX in name else name


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this very module are compiled.

    By ``torch.compile(module)``, by ``module.compile()``, or because its ``forward`` is a compiled function.
    """
    forward = module.forward
    by_forward = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return by_forward or module._compiled_call_impl is not None


def any_compiled(modules: Sequence[nn.Module]) -> bool:
    """Whether one of the modules is compiled. An optimizer asks before every estimate, so it is asked in few words."""
    if [m for m in modules if m._compiled_call_impl is not None]:
        return True
    # Modules of one type have one forward, but for those that were given their own.
    of_types = {type(m): m for m in modules if "forward" not in m.__dict__}
    return any(map(is_compiled, of_types.values())) or any(
        is_compiled(m) for m in [m for m in modules if "forward" in m.__dict__]
    )


@contextmanager
def eager(module: nn.Module) -> Iterator[None]:
    """Calls of compiled modules inside the block run as they were written."""
    if not any_compiled(list(module.modules())):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def paths(module: nn.Module) -> dict[str, str]:
    """Where the module has the parameters whose plain names are not their paths."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False) if _PREFIX in name]
    return {plain_name(name): name for name in names}


def compiling() -> bool:
    """Whether the caller, which is not compiled itself, was called by something that is."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    callback: Any = get_eval_frame_callback()
    return callback is not None and callback is not False

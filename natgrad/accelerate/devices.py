"""What a device can do, asked by meaning instead of by name: the rest of the library never looks at a device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from natgrad.errors import IncompatibleError


def is_asynchronous(device: torch.device) -> bool:
    """Whether kernels run behind the host's back, so that reading a value makes the host wait (a GPU)."""
    return device.type != "cpu"


def in_nested_forward_mode() -> bool:
    """Whether ``torch.func.jvp`` runs inside of ``torch.func.jvp``.

    There torch takes all that ``Function.jvp`` computes for constant, and a second derivative would silently be zero.
    """
    functorch = torch._C._functorch
    levels = functorch.get_interpreter_stack() or ()
    return sum(level.key() == functorch.TransformType.Jvp for level in levels) > 1


def in_transform() -> bool:
    """Whether a ``torch.func`` transform (vmap, jvp, grad) is active: tensors then have no values to look at."""
    return torch._C._are_functorch_transforms_active()


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """For derivatives by ``torch.func``: in inference mode they are zero in torch 2.11, and nothing says so.

    No graph is made for a caller in inference mode, who wants none.

    >>> with torch.inference_mode(), outside_inference_mode():
    ...     torch.func.grad(torch.sin)(torch.zeros(()))
    tensor(1.)
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # the first alone would enable graphs
        yield


def refuse_inference_mode(what: str) -> None:
    """Raise in ``torch.inference_mode()``, where a forward pass makes no graph that ``what`` could read."""
    if torch.is_inference_mode_enabled():
        raise IncompatibleError(
            f"{what} needs the graph of a forward pass, and torch.inference_mode() makes none: leave it, or put "
            "torch.no_grad() in its place"
        )


def in_shape_inference() -> bool:
    """Whether the pass that begins is run for the shapes of its outputs, by a ``FakeTensorMode`` or a pipeline stage.

    A stage (``torch.distributed.pipelining``) calls its module on memory that nothing was written to, from torch 2.13
    on with gradients: only its caller tells this pass from one that is trained.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    frame = None if stages is None else sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(stages) and "inference" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False


def in_backward() -> bool:
    """Whether a backward pass is running: a forward pass inside it is a recomputation (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


def refuse_compiled_backward() -> None:
    """Refuse a backward pass of compiled autograd, whose hooks run outside of the pass."""
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if autograd is not None and (autograd.compiled_autograd_enabled or autograd.in_compiled_autograd_region):
        raise IncompatibleError(
            "this backward pass is compiled (torch._dynamo.config.compiled_autograd), and the metric waits for what "
            "the loss sends into the outputs: call loss.backward() outside of compiled functions, or use a metric that "
            "does not wait, Fisher(family) or BatchGradient()"
        )


def in_export() -> bool:
    """Whether ``torch.export`` traces the model.

    ``torch.compiler.is_exporting()`` does not tell: in code that ``torch.compile`` compiles, torch 2.11 says True.
    """
    return torch.compiler._is_exporting_flag


def device_bytes(device: torch.device) -> int:
    """The memory of the device: of a GPU its own, else that of the machine.

    >>> device_bytes(torch.device("cpu")) > 2**29
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def can_read(t: Tensor) -> bool:
    """Whether the host may look at the values of ``t`` without waiting for a device, and there are values.

    >>> can_read(torch.ones(2))
    True
    >>> torch.func.vmap(lambda row: row if can_read(row) else 2 * row)(torch.ones(1, 2))
    tensor([[2., 2.]])
    """
    return not is_asynchronous(t.device) and not in_transform()


def to_device_async(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, which is not waited for: a copy from pageable memory would."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


def fake_tensors() -> FakeTensorMode:
    """Inside, tensors that the mode converts have shapes and no values: an operation costs no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def rng_devices(device: torch.device) -> list[torch.device]:
    """The devices, beside the CPU, whose random stream ``torch.random.fork_rng`` has to protect."""
    return [device] if device.type == "cuda" else []


@contextmanager
def seeded_streams(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global random streams of the CPU and of ``device``, and restore them afterwards.

    Streams of other devices are left alone, which ``torch.manual_seed`` would not do.
    """
    devices = rng_devices(device)
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def get_rng_state(device: torch.device) -> Tensor:
    """The state of the random stream that a model on this device draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Restore the random stream that a model on this device draws from."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def without_fused_recurrence(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, recurrent layers on a GPU do not run in cuDNN."""
    return torch.backends.cudnn.flags(enabled=False) if device.type == "cuda" else nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for the device."""
    return torch.is_autocast_enabled(device.type)


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, autocast rounds nothing. Switching autocast off takes time, so nothing happens where it is not on."""
    if not autocasts(device):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)

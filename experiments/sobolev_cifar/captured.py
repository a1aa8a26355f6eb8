"""Forward and backward pass of a batch as one CUDA graph: a small network waits for the host to launch its kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
_WARM_UP = 5  # passes before the capture: cuDNN chooses its algorithms, and a compiled pass is compiled


def cuda_graph(kernels: Callable[[], None]) -> Callable[[], None]:
    """Capture the kernels of a function without running them; what is returned runs them again.

    On the current stream, which must not be the default one: gradients are accumulated on the stream that parameters
    were used on first, and all passes of a run share it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kernels()
    return graph.replay


def own_stream(capture: Capture | None) -> AbstractContextManager[object]:
    """A stream that graphs can be captured on; the device must be idle before and after."""
    return torch.cuda.stream(torch.cuda.Stream()) if capture is cuda_graph else nullcontext()


def twin(model: nn.Module) -> nn.Module:
    """The same network with the same tensors, but without the hooks that the model gets later.

    >>> model = nn.Linear(2, 1)
    >>> twin(model).weight is model.weight
    True
    """
    return copy.deepcopy(model, {id(one): one for one in (*model.parameters(), *model.buffers())})


@final
class CapturedPass:
    """The loss of a batch and its gradients, for batches of one size, where no optimizer's hook has to see the pass.

    The kernels are those of the pass itself, and so are the numbers. With ``fuse`` they are those of ``torch.compile``,
    which normalises, rectifies and pools in one kernel: fewer passes over memory, and sums that are rounded otherwise.
    """

    def __init__(self, model: nn.Module, capture: Capture = cuda_graph, *, fuse: bool = False) -> None:
        def loss(x: Tensor, t: Tensor) -> Tensor:
            return F.cross_entropy(model(x), t)

        self._loss_of = torch.compile(loss, fullgraph=True, dynamic=False) if fuse else loss
        self._capture = capture
        self._params = list(model.parameters())
        self._replay: Callable[[], None] | None = None
        self._before = _WARM_UP

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """The loss; every parameter has its gradient, in memory that the next call overwrites."""
        if self._before > 0:
            self._before -= 1
            self._x, self._t = x, t
            self._pass()
            return self._loss
        if self._replay is None:
            self._x, self._t = x.clone(), t.clone()  # the format of the memory is kept
            self._replay = self._capture(self._pass)
        self._x.copy_(x)
        self._t.copy_(t)
        self._replay()
        for p, grad in zip(self._params, self._grads, strict=True):
            p.grad = grad  # the optimizer may have put it away
        return self._loss

    def _pass(self) -> None:
        for p in self._params:
            p.grad = None
        loss = self._loss_of(self._x, self._t)
        loss.backward()
        self._loss, self._grads = loss.detach(), [p.grad for p in self._params]

# mypy: ignore-errors
# Most of what is replaced here are names that torch's types do not have.
"""A GPU that is none: tensors "on" it lie in the memory of the processor, and what is different on a GPU is enforced.

Inside ``emulated_gpu()`` torch has one device, "cuda:0". ``Numbers`` (below Python's functions) and ``Kernels`` (below
autograd) know which memory is the device's. What a GPU would refuse, or would do otherwise, they do here:

- operations on tensors of both devices raise, but for copies and numbers [];
- what makes the host wait (``item``, ``nonzero``, a copy from or to memory that is not pinned) raises in a capture, and
  where ``torch.cuda.set_sync_debug_mode("error")`` says so;
- a copy to pinned memory arrives later, with a wait or some hundred kernels;
- new memory holds NaN.

A captured graph is a list of kernels with the addresses that they read and write, as CUDA's. Nothing of a capture is
executed: what it wrote is put back, and what it allocated is NaN. A replay runs the kernels, and no Python, on whatever
lies at these addresses by then; where nothing does, it raises (a GPU would compute with garbage). Memory that the graph
allocated and nobody holds is NaN again afterwards, as other graphs share it. Numbers, and tensors [] of the host, are
those of the capture.

Not emulated: rounding (tf32, sums in another order), cuDNN, several streams and devices, Triton.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten
EMULATED = not torch.cuda.is_available()  # whether the tests of this folder run so
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
_BEHIND = 300  # kernels that the device is behind the host
_WAITING = {  # operations for which the host reads the device
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.repeat_interleave, aten._unique2),
    *(aten.unique_consecutive, aten.unique_dim, aten.bincount, aten.histc),
    *(aten.linalg_eig, aten._linalg_eigh, aten.linalg_eigvals, aten._linalg_svd, aten.linalg_lstsq, aten.linalg_inv),
    *(aten._linalg_check_errors, aten.linalg_cholesky, aten.cholesky),
}
_COPIES = {aten.copy_, aten._foreach_copy_, aten._to_copy}
_RANDOM = {
    *(aten.normal_, aten.uniform_, aten.bernoulli_, aten.bernoulli, aten.multinomial, aten.exponential_, aten.random_),
    *(aten.randn, aten.rand, aten.randint, aten.randperm, aten.normal, aten.native_dropout, aten.poisson),
}
_UNWRITTEN = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_plain = torch._C.DisableTorchFunction


def on_gpu(t: Tensor) -> bool:
    """Whether a tensor lies in the memory of the device."""
    with _plain():
        return _is_there(t)


def _unwrapped(t: Tensor) -> Tensor:
    """The tensor below ``torch.func``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def _is_there(t: Tensor) -> bool:
    t = _unwrapped(t)
    if t.is_meta or t.layout is not torch.strided or t._is_zerotensor():
        return False
    return getattr(t.untyped_storage(), "on_gpu", False)


def _tensors(*trees: Any) -> list[Tensor]:
    out: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            out.append(tree)
        elif isinstance(tree, (list, tuple)):
            out += _tensors(*tree)
        elif isinstance(tree, dict):
            out += _tensors(*tree.values())
    return out


def _mapped(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(fn, each) for each in tree)
    return {key: _mapped(fn, each) for key, each in tree.items()} if isinstance(tree, dict) else tree


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    schema = func._schema.arguments
    names = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    return _tensors([given[name] for name in names if given.get(name) is not None])


def _poison(storage: torch.UntypedStorage) -> None:
    """NaN, whatever the type; as whole numbers −1."""
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # type: ignore[call-overload]


class Device:
    """What the modes know of the device: its memory, and what it is doing."""

    def __init__(self) -> None:
        self.memory: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by address
        self.capture: Graph | None = None
        self.launches = 0
        self.late: deque[tuple[int, Tensor, Tensor]] = deque()  # copies to pinned memory, and when they began
        self.sync = "default"
        self.stream: Any = Stream()  # the current one
        self.default = self.stream

    def put(self, t: Tensor, there: bool = True) -> None:
        """Say whether a tensor is on the device."""
        with _plain():
            storage = _unwrapped(t).untyped_storage()
        storage.on_gpu = there
        with suppress(RuntimeError):  # a tensor of ``torch.func`` may have no memory
            if there and storage.data_ptr():
                self.memory[storage.data_ptr()] = storage
            else:
                self.memory.pop(storage.data_ptr(), None)

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if self.capture is not None:
            self.capture.broken = True
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        if self.sync == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
        self.arrive(0)

    def arrive(self, behind: int = _BEHIND) -> None:
        """What was sent to the host some kernels ago is there."""
        while self.late and self.launches - self.late[0][0] >= behind:
            _, host, values = self.late.popleft()
            host.copy_(values)


class Kernels(TorchDispatchMode):
    """Below autograd: every operation is a kernel of the device if one of its tensors is there."""

    def __init__(self, device: Device, numbers: Numbers) -> None:
        super().__init__()
        self.device, self.numbers = device, numbers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled here, and to ask takes time
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, device = _tensors(args, kwargs), self.device
        if types and any(issubclass(t, torch._subclasses.FakeTensor) for t in types):
            return func(*args, **kwargs)
        with _plain():
            there = [_is_there(t) for t in given]
            if not any(there) and (given or not self.numbers.makes_on_gpu()):
                return func(*args, **kwargs)
            packet = func._overloadpacket
            if packet is aten.copy_ and len(set(there)) > 1 and not self._copies_at_once(given, args, kwargs):
                return args[0]
            self._refuse(packet, given, there, kwargs)
            device.launches += 1
            device.arrive()
            run = _INSTEAD.get(func, func)
            graph = device.capture
            out = run(*args, **kwargs) if graph is None else graph.record(func, run, args, kwargs)
            before = {t.untyped_storage()._cdata for t in map(_unwrapped, given)}
            for t in map(_unwrapped, _tensors(out)):
                if t.untyped_storage()._cdata not in before:  # else a view, or written in place
                    device.put(t)
                    if packet in _UNWRITTEN:  # a capture may run on it, for shapes: indices must be some
                        t.fill_(torch.nan if t.is_floating_point() else 0)
        return out

    def _copies_at_once(self, given: list[Tensor], args: Any, kwargs: Any) -> bool:
        """A copy between the devices; False where it arrives later."""
        to, source = given
        if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
            if to.ndim or source.ndim or on_gpu(source):
                self.device.wait("a copy between devices")
            return True
        host = source if on_gpu(to) else to
        if not getattr(host.untyped_storage(), "pinned", False) or self.device.capture is not None:
            self.device.wait("a copy of memory that is not pinned")
        elif host is to:
            self.device.late.append((self.device.launches, to, source.clone()))
            return False
        return True

    def _refuse(self, packet: Any, given: list[Tensor], there: list[bool], kwargs: Any) -> None:
        """Raise what torch would for a GPU."""
        device = self.device
        if not all(there) and packet not in _COPIES:
            several = packet in (aten.cat, aten.stack) or packet.__name__.startswith("_fused")
            if any(not here and (t.ndim or several) for t, here in zip(given, there, strict=True)):
                if packet not in (aten.index, aten.index_put, aten.index_put_):
                    raise RuntimeError(f"Expected all tensors to be on the same device, cuda:0 and cpu ({packet})")
                device.wait("an index from the host")
        if packet.__name__.startswith(("_fused", "_amp")):
            for name in ("found_inf", "grad_scale", "lr", "inv_scale"):
                t = kwargs.get(name)
                if isinstance(t, Tensor) and t.dtype != torch.float32:
                    raise RuntimeError(f"expected scalar type Float but found {t.dtype} ({name} of {packet})")
        by_mask = packet in (aten.index, aten.index_put, aten.index_put_) and any(
            t.dtype in (torch.bool, torch.uint8) for t in given[1:]
        )
        counts = packet is aten.repeat_interleave and kwargs.get("output_size") is not None
        if (packet in _WAITING and not counts) or (by_mask and not _fills(packet, given)):
            device.wait(str(packet))
        if packet is aten._foreach_copy_ and len(set(there)) > 1:
            device.wait(str(packet))
        if packet in _RANDOM and device.capture is not None:
            device.wait(f"random numbers of {packet}")


def _fills(packet: Any, given: list[Tensor]) -> bool:
    """Whether to put a number where a mask is true: no index is made then."""
    return packet in (aten.index_put, aten.index_put_) and len(given) == 3 and given[2].numel() == 1


class Numbers(TorchFunctionMode):
    """At the functions of torch: "cuda" is a device, and tensors say that they are there."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.calls: list[tuple[Any, Any, torch.device | None]] = []  # that are running, with the device asked for
        there = {
            torch.Tensor.device.__get__: lambda t: GPU if on_gpu(t) else _device_of(t),
            torch.Tensor.is_cuda.__get__: on_gpu,
            torch.Tensor.is_cpu.__get__: lambda t: not on_gpu(t),
            torch.Tensor.get_device: lambda t: 0 if on_gpu(t) else -1,
            torch.Tensor.pin_memory: self._pinned,
            torch.Tensor.is_pinned: lambda t, *_: getattr(t.untyped_storage(), "pinned", False),
            torch.Tensor.cuda: lambda t, device=None, non_blocking=False, **_: self._to(t, GPU, non_blocking),
            torch.Tensor.cpu: lambda t, **_: self._to(t, HOST, False),
            torch.Tensor.to: self._parsed_to,
            torch.Tensor.tolist: self._read("tolist", torch.Tensor.tolist),
            torch.Tensor.numpy: self._refused("numpy", torch.Tensor.numpy),
            torch.Tensor.__deepcopy__: self._deepcopy,
            torch.Tensor.new_tensor: lambda t, data, **options: self._made(
                torch.tensor, data, **{"dtype": t.dtype, "device": GPU if on_gpu(t) else HOST, **options}
            ),
            torch.tensor: lambda *args, **options: self._made(torch.tensor, *args, **options),
            torch.as_tensor: lambda data, dtype=None, device=None: (
                self._to(data, None if device is None else torch.device(device), False, dtype=dtype)
                if isinstance(data, Tensor)
                else self._made(torch.as_tensor, data, dtype=dtype, device=device)
            ),
        }
        self.instead: dict[Any, Callable[..., Any]] = there

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (instead := self.instead.get(func)) is not None:
            return instead(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if kwargs:
            return self._run(func, args, kwargs)
        self.calls.append((args, kwargs, None))
        try:
            return func(*args)
        finally:
            self.calls.pop()

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        device = None if device is None else torch.device(device)
        if (generator := kwargs.get("generator")) is not None:
            there = device.type == "cuda" if device is not None else any(map(on_gpu, _tensors(args)))
            if (generator.device.type == "cuda") != there:
                raise RuntimeError(f"Expected another device type for generator but found {generator.device}")
        if device is not None and device.type == "cuda":
            kwargs = {**kwargs, "device": HOST}
        self.calls.append((args, kwargs, device))
        try:
            out = func(*args, **kwargs)
        finally:
            self.calls.pop()
        if isinstance(out, Tensor) and (device is not None or pinned):
            if device is not None and device.type in ("cuda", "cpu") and type(out) in (Tensor, torch.nn.Parameter):
                self.device.put(out, device.type == "cuda")
            if pinned:
                out.untyped_storage().pinned = True
        return out

    def makes_on_gpu(self) -> bool:
        """Whether memory that is made now is on the device: torch makes it inside of an operation there."""
        if not self.calls:
            return True  # in a backward pass
        args, kwargs, device = self.calls[-1]
        if device is not None:
            return device.type == "cuda"
        return any(map(on_gpu, _tensors(args, kwargs)))

    def _parsed_to(self, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            other, *args = args
            return self._to(t, GPU if on_gpu(other) else HOST, False, dtype=other.dtype)
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        return self._to(t, device, non_blocking, dtype=dtype, memory_format=layout, copy=copy)

    def _to(self, t: Tensor, device: torch.device | None, non_blocking: bool, **options: Any) -> Tensor:
        options = {key: value for key, value in options.items() if value}
        if device is not None and device.type not in ("cuda", "cpu"):
            return self._run(torch.Tensor.to, (t, device), options)
        there = on_gpu(t)
        moves = device is not None and (device.type == "cuda") != there
        if moves and type(t) in (Tensor, torch.nn.Parameter):
            if not (non_blocking and getattr(t.untyped_storage(), "pinned", False)):
                self.device.wait("a copy between devices")
            options["copy"] = True
        options.setdefault("dtype", t.dtype)
        out = self._run(torch.Tensor.to, (t,), options)
        if moves and type(t) in (Tensor, torch.nn.Parameter):
            self.device.put(out, not there)
        return out

    def _made(self, make: Any, *args: Any, **options: Any) -> Tensor:
        """From numbers of the host, which are copied there."""
        out = self._run(make, args, options)
        if on_gpu(out):
            self.device.wait(f"{make.__name__} of numbers of the host")
        return out

    def _read(self, name: str, read: Any) -> Callable[..., Any]:
        def reading(t: Tensor, *args: Any) -> Any:
            if on_gpu(t):
                self.device.wait(name)
            with _plain():
                return read(t, *args)

        return reading

    def _pinned(self, t: Tensor, *_: Any) -> Tensor:
        out = t.clone()
        out.untyped_storage().pinned = True
        return out

    def _refused(self, name: str, read: Any) -> Callable[..., Any]:
        def refusing(t: Tensor, *args: Any, **options: Any) -> Any:
            if on_gpu(t):
                raise TypeError(f"can't convert cuda:0 device type tensor to numpy ({name})")
            with _plain():
                return read(t, *args, **options)

        return refusing

    def _deepcopy(self, t: Tensor, memo: Any) -> Tensor:
        out = self._run(torch.Tensor.__deepcopy__, (t, memo), {})
        if on_gpu(t):
            self.device.put(out)
        return out


def _device_of(t: Tensor) -> torch.device:
    with _plain():
        return t.device


class Graph:
    """``torch.cuda.CUDAGraph``."""

    device: Device  # the only one

    def __init__(self, *_: Any, **__: Any) -> None:
        self.kernels: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.own: dict[int, torch.UntypedStorage] = {}  # memory that it allocates, by its storage
        self.held: dict[int, int] = {}  # how many tensors of ours hold it
        self.read: dict[int, tuple[int, str]] = {}  # addresses of others: how many bytes, and in which operation
        self.before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # and what lay there
        self.saved: set[int] = set()
        self.broken = False

    def capture_begin(self, *_: Any, **__: Any) -> None:
        if self.device.capture is not None:
            raise RuntimeError("a capture is under way")
        if self.device.stream is self.device.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.device.capture = self

    def capture_end(self) -> None:
        self.device.capture = None
        with _plain(), _disable_current_modes():
            for storage, was in self.before:
                storage.copy_(was)
            for storage in self.own.values():
                _poison(storage)
        self.before = []
        if self.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def record(self, func: Any, run: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation for the shapes of its results."""
        for t in _written(func, args, kwargs):
            storage = t.untyped_storage()
            if storage._cdata not in self.own and storage._cdata not in self.saved and on_gpu(t):
                self.saved.add(storage._cdata)
                self.before.append((storage, storage.clone()))
        at = _mapped(lambda t: self._address(t, str(func)), [args, kwargs])
        try:
            out = run(*args, **kwargs)
        except (IndexError, RuntimeError):  # what is read as indices may be anything by now
            none = _mapped(lambda t: t if t.is_floating_point() else torch.zeros_like(t), [args, kwargs])
            out = run(*none[0], **none[1])
        given = {t.untyped_storage()._cdata for t in _tensors(args, kwargs)}
        for t in _tensors(out):
            if t.untyped_storage()._cdata not in given:
                self.own[t.untyped_storage()._cdata] = t.untyped_storage()
        results = [self._address(t, str(func)) for t in _tensors(out)]
        self.kernels.append((run, *at, results))
        return out

    def _address(self, t: Tensor, what: str) -> Tensor:
        """A tensor that holds an address, and of others no memory."""
        if not on_gpu(t) and t.untyped_storage()._cdata not in self.own:
            return t.clone()  # a number of the host
        storage = t.untyped_storage()
        if storage._cdata in self.own:
            self.held[storage._cdata] = self.held.get(storage._cdata, 0) + 1
        elif address := storage.data_ptr():
            self.read.setdefault(address, (storage.nbytes(), what))
            storage = torch._C._construct_storage_from_data_pointer(address, HOST, storage.nbytes())
        out = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.size(), t.stride())
        return out.conj() if t.is_conj() else out

    def replay(self) -> None:
        device = self.device
        if device.capture is not None:
            raise RuntimeError("a graph is replayed in a capture")
        for address, (nbytes, what) in self.read.items():
            there = device.memory.get(address)
            if there is None or there.nbytes() < nbytes or there.data_ptr() != address:
                raise AssertionError(f"a graph reads or writes memory that has been freed, first in {what}")
        with _plain(), _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad():
            for run, args, kwargs, results in self.kernels:
                for t, new in zip(results, _tensors(run(*args, **kwargs)), strict=True):
                    if new.data_ptr() != t.data_ptr():
                        t.copy_(new)
            for key, storage in self.own.items():
                if torch._C._storage_Use_Count(key) <= self.held[key] + 1:  # ours, and ``storage``
                    _poison(storage)
        device.launches += len(self.kernels)
        device.arrive()


class Stream:
    """``torch.cuda.Stream``: there is one queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = GPU

    def wait_stream(self, other: Any) -> None:
        """Everything is in order."""

    def query(self) -> bool:
        Graph.device.arrive(0)
        return True


class Capturing:
    """``torch.cuda.graph``."""

    def __init__(self, graph: Graph, *_: Any, **__: Any) -> None:
        self.graph, self.capture_stream = graph, Stream()

    def __enter__(self) -> None:
        self.inside = _on_stream(self.capture_stream)
        self.inside.__enter__()
        self.graph.capture_begin()

    def __exit__(self, *_: Any) -> None:
        self.graph.capture_end()
        self.inside.__exit__(None, None, None)


class Generator(torch.Generator):
    """``torch.Generator``, which knows its device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        out = super().__new__(cls, HOST)
        out.there = torch.device(device)
        return out

    @property
    def device(self) -> torch.device:
        return GPU if self.there.type == "cuda" else self.there


class Autocast(torch.autocast):
    """``torch.autocast``."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    device = Graph.device
    before, device.stream = device.stream, stream
    try:
        yield
    finally:
        device.stream = before


def _wider(packet: Any, matrices: int) -> Callable[..., Any]:
    """Products of halves that are summed in another type, which only a GPU has."""

    def run(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        dtype = args[matrices]
        product = packet(*(t.to(dtype) for t in args[:matrices]), *args[matrices + 1 :], **kwargs)
        return product if out is None else out.copy_(product)

    return run


def _column_sums(g: Tensor, x: Tensor, mean: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    axes = [axis for axis in range(g.ndim) if axis != 1]
    shape = [1, -1, *[1] * (g.ndim - 2)]
    sums = g.sum(axes), (g * (x - mean.view(shape))).sum(axes)
    return *sums, g.new_empty(0), g.new_empty(0)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    getattr(getattr(aten, name), overload): _wider(getattr(aten, name), matrices)
    for name, matrices in (("mm", 2), ("bmm", 2), ("addmm", 3), ("baddbmm", 3))
    for overload in ("dtype", "dtype_out")
} | {aten.batch_norm_backward_reduce.default: _column_sums}
Graph.device = Device()  # for ever: the library keeps constants in its memory


@contextmanager
def emulated_gpu() -> Iterator[Device]:
    """Inside, torch has a GPU."""
    device = Graph.device
    numbers = Numbers(device)

    def synchronize(*_: Any) -> None:
        if device.capture is not None:
            device.wait("synchronize")
        device.arrive(0)

    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_initialized": lambda: True,
        "synchronize": synchronize,
        "set_sync_debug_mode": lambda mode: setattr(device, "sync", mode),
        "is_current_stream_capturing": lambda: device.capture is not None,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph,
        "graph": Capturing,
        "Stream": Stream,
        "stream": _on_stream,
        "current_stream": lambda *_: device.stream,
        "device": lambda *_: nullcontext(),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**37, name="emulated", major=9, minor=0),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    }
    enabled, backward = torch.is_autocast_enabled, torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        """Functions of torch that are written in Python run without the mode that they were called in; not hooks."""
        with nullcontext() if numbers in _get_current_function_mode_stack() else numbers:
            return backward(*args, **kwargs)

    names = {
        "Generator": Generator,
        "autocast": Autocast,
        "is_autocast_enabled": lambda kind="cpu": enabled("cpu" if kind == "cuda" else kind),
    }
    passes = patch.object(torch.autograd, "_engine_run_backward", run_backward)
    with patch.multiple(torch.cuda, **cuda), patch.multiple(torch, **names), passes, numbers, Kernels(device, numbers):
        yield device

"""Kernels for matrices on a GPU, in Triton: one pass over memory where torch needs two to five.

The factors of a language model have thousands of rows. Rows are rounded before they are multiplied; on the way it costs
nothing to see which of them are zero, or to leave some out. Without Triton, which comes with torch's builds for CUDA on
Linux and compiles with the C compiler of the system, torch's operations do the same.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
except Exception:  # there is none, or a broken one
    triton = None

_log = logging.getLogger("natgrad")
_ENTRIES = 4096  # of a matrix that one program reads at once
_COLUMNS = 1024  # the same, of a row
_MOST = 2**30  # entries that 32 bits can count, with a column of ones beside them
_WIDEST = 2**15  # columns: the loop over them is unrolled
_COMPILES: dict[torch.device, bool] = {}  # whether Triton does so for a device, as far as it was tried
_RAN: set[Hashable] = set()  # kernels that have run
_ALIGNMENT = 16  # bytes: what lies there is read as whole vectors


def round_rows(x: Tensor, dtype: torch.dtype, nonzero: Tensor) -> Tensor:
    """x [m d] in another type; ``nonzero`` [m] is set to where a row is not all zero (NaN is not zero).

    >>> nonzero = torch.empty(2, dtype=torch.bool)
    >>> round_rows(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.bfloat16, nonzero)
    tensor([[0., 2.],
            [0., 0.]], dtype=torch.bfloat16)
    >>> nonzero
    tensor([ True, False])
    """
    kernel = "round", x.shape[1], x.shape[1], dtype, x.device
    if dtype == x.dtype or not _can_pass_rows(x, nonzero, kernel):
        torch.any(x, 1, out=nonzero)
        return x.to(dtype)
    out = x.new_empty(x.shape, dtype=dtype)
    columns, rows = _block(x.shape[1])
    with torch.cuda.device(x.device):
        _round[(triton.cdiv(len(x), rows),)](
            x, out, nonzero.view(torch.uint8), len(x), d=x.shape[1], rows=rows, columns=columns
        )
    return out


def keep_rows(x: Tensor, counted: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """[m width] in another type: x [m d] beside ones where a row is ``counted`` [m], else 0, whatever x holds there.

    >>> keep_rows(torch.tensor([[2.0], [torch.nan]]), torch.tensor([True, False]), torch.float32, 3)
    tensor([[2., 1., 1.],
            [0., 0., 0.]])
    """
    m, d = x.shape
    out = x.new_empty(m, width, dtype=dtype)
    if not _can_pass_rows(x, counted, ("keep", d, width, dtype, x.device)):
        out[:, d:] = counted.unsqueeze(1)
        # x where counted > ½, else 0, rounded on the way.
        torch.ops.aten.threshold_backward.grad_input(x, counted.unsqueeze(1), 0.5, grad_input=out[:, :d])
        return out
    columns, rows = _block(width)
    with torch.cuda.device(x.device):
        _keep[(triton.cdiv(m, rows),)](
            x, counted.view(torch.uint8), out, m, d=d, width=width, rows=rows, columns=columns
        )
    return out


def _can_pass_rows(x: Tensor, flags: Tensor, kernel: tuple[str, int, int, torch.dtype, torch.device]) -> bool:
    """Whether a Triton kernel (its name, columns that are read and written, type, device) can work on these.

    A kernel that would be compiled while a graph is captured would end the capture. So it must have run before, and it
    is compiled for addresses and sizes of one kind only.
    """
    if triton is None or type(x) is not Tensor or not x.is_cuda or x.dtype != torch.float32:
        return False
    plain = x.is_contiguous() and flags.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0
    if not plain or not 0 < x.numel() < _MOST or kernel[2] > _WIDEST:
        return False
    return _is_ready(kernel, x.device)


def _is_ready(kernel: Hashable, device: torch.device) -> bool:
    """Whether a kernel may run now; outside of a capture it then does."""
    if torch.cuda.is_current_stream_capturing():
        return kernel in _RAN
    if device not in _COMPILES:
        _COMPILES[device] = _try_out(device)
    if _COMPILES[device]:
        _RAN.add(kernel)
    return _COMPILES[device]


def _try_out(device: torch.device) -> bool:
    """Whether Triton compiles for the device."""
    try:
        with torch.cuda.device(device):
            x, flags = torch.zeros(1, 1, device=device), torch.ones(1, dtype=torch.uint8, device=device)
            _round[(1,)](x, x.clone(), flags, 1, d=1, rows=1, columns=1)
    except Exception as error:  # of many kinds: no compiler, an old driver, a GPU that it does not know
        _log.info("Triton compiles no kernels here (%s): torch's operations are used", error)
        return False
    return True


def _block(width: int) -> tuple[int, int]:
    """How many columns and rows a program reads at once, powers of two."""
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    return columns, max(1, _ENTRIES // columns)


if triton is not None:

    @triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["nonzero"])  # type: ignore[untyped-decorator]
    def _round(x, out, nonzero, m, d: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0) * rows + tl.arange(0, rows)
        some = tl.zeros([rows], tl.int32)
        for start in tl.static_range(0, d, columns):
            column = start + tl.arange(0, columns)
            inside = (row < m)[:, None] & (column < d)[None, :]
            value = tl.load(x + row[:, None] * d + column[None, :], mask=inside, other=0.0)
            tl.store(out + row[:, None] * d + column[None, :], value.to(out.dtype.element_ty), mask=inside)
            some = tl.maximum(some, tl.max((value != 0.0).to(tl.int32), 1))
        tl.store(nonzero + row, some.to(tl.uint8), mask=row < m)

    @triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["counted"])  # type: ignore[untyped-decorator]
    def _keep(x, counted, out, m, d: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0) * rows + tl.arange(0, rows)
        counts = tl.load(counted + row, mask=row < m, other=0) != 0
        for start in tl.static_range(0, width, columns):
            column = start + tl.arange(0, columns)
            read = counts[:, None] & (column < d)[None, :]
            value = tl.load(x + row[:, None] * d + column[None, :], mask=read, other=0.0)
            one = (counts[:, None] & (column >= d)[None, :]).to(tl.float32)
            inside = (row < m)[:, None] & (column < width)[None, :]
            tl.store(out + row[:, None] * width + column[None, :], (value + one).to(out.dtype.element_ty), mask=inside)

"""Kernels for matrices on a GPU, in Triton: one pass over memory where torch needs two to five.

The factors of a language model have thousands of rows. Rows are rounded before they are multiplied; on the way it costs
nothing to see which of them are zero, or to leave some out. The matrices of a polar step are scaled, rounded, put into
one stack, and taken out of it again. Without Triton, which comes with torch's builds for CUDA on Linux and compiles
with the C compiler of the system, torch's operations do the same.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
except Exception:  # there is none, or a broken one
    triton = None

Sides: TypeAlias = tuple[Tensor | None, Tensor | None]  # l [o] and r [i] of a matrix M [o i] that becomes l M r

_log = logging.getLogger("natgrad")
_ENTRIES = 4096  # of a matrix that one program reads at once
_COLUMNS = 1024  # the same, of a row
_MOST = 2**30  # entries that 32 bits can count, with a column of ones beside them
_WIDEST = 2**15  # columns: the loop over them is unrolled
_COMPILES: dict[torch.device, bool] = {}  # whether Triton does so for a device, as far as it was tried
_RAN: set[Hashable] = set()  # kernels that have run
_ALIGNMENT = 16  # bytes: what lies there is read as whole vectors
_TOGETHER = 8  # matrices of one launch: their addresses are arguments of the kernel
_TILE, _WARPS = 32, 8  # rows and columns that a program scales, and how many threads, by 32, do it


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


def scale_matrices_(out: Tensor, matrices: Tensor | Sequence[Tensor], sides: Sequence[Sides]) -> None:
    """out[b] ← l_b M_b r_b for matrices M_b [o i], in the precision and with the strides of ``out`` [b o i].

    Either all matrices have sides, or none; None stands for ones.

    >>> out = torch.empty(1, 2, 2)
    >>> scale_matrices_(out, [torch.ones(2, 2)], [(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))])
    >>> out
    tensor([[[1., 3.],
             [2., 6.]]])
    """
    if not _can_scale(out, matrices, sides):
        M = matrices if isinstance(matrices, Tensor) else _stacked(matrices)
        left, right = ([side for side in of_side if side is not None] for of_side in zip(*sides, strict=True))
        M = M * _stacked(left).unsqueeze(2) if left else M
        out.copy_(M * _stacked(right).unsqueeze(1) if right else M)
        return
    (o, i), scaled = matrices[0].shape, sides[0][0] is not None
    numbers = [[side[k] for side in sides] for k in (0, 1)] if scaled else [matrices, matrices]
    with torch.cuda.device(out.device):
        for start in range(0, len(matrices), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            addresses = [address for of_kind in (matrices, *numbers) for address in _addresses(of_kind[some])]
            grid = triton.cdiv(i, _TILE), triton.cdiv(o, _TILE), len(matrices[some])
            strides = *matrices[0].stride(), *out.stride()
            single = matrices[0].dtype == torch.float32
            _scale[grid](
                *addresses, out[some], o, i, *strides, single=single, scaled=scaled, tile=_TILE, num_warps=_WARPS
            )


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """As many as a kernel takes."""
    addresses = [t.data_ptr() for t in tensors if t is not None]
    return addresses + [addresses[-1]] * (_TOGETHER - len(addresses))


def _can_scale(out: Tensor, matrices: Tensor | Sequence[Tensor], sides: Sequence[Sides]) -> bool:
    """Whether the kernel can work on these: aligned matrices of one layout, with both sides or none."""
    first, vectors = matrices[0], [side for pair in sides for side in pair]
    if triton is None or not first.is_cuda or type(first) is not Tensor:
        return False
    numbers = [side for side in vectors if side is not None]
    aligned = all(t.data_ptr() % _ALIGNMENT == 0 for t in (*matrices, out))
    suited = (
        {first.dtype, out.dtype} <= {torch.float32, torch.bfloat16},
        all(M.stride() == first.stride() and M.dtype == first.dtype for M in matrices),
        all(side.dtype == torch.float32 and side.is_contiguous() for side in numbers),
        len(numbers) in (0, len(vectors)),
        1 in first.stride() and 1 in out.stride()[1:],  # one side of a matrix is read in long runs
        aligned and out.stride(0) * out.element_size() % _ALIGNMENT == 0,
        first.numel() > 0 and _span(first) < _MOST and _span(out[0]) < _MOST,
    )
    if not all(suited):
        return False
    kernel = "scale", first.dtype, out.dtype, bool(numbers), first.shape, first.stride(), out.stride(), out.device
    return _is_ready(kernel, out.device)


def _span(matrix: Tensor) -> int:
    """How far its last entry is from the first."""
    return sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True))


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

    @triton.jit(do_not_specialize=["o", "i", *(f"{letter}{k}" for letter in "mlr" for k in range(8))])  # type: ignore[untyped-decorator]
    def _scale(  # type: ignore[no-untyped-def]
        m0, m1, m2, m3, m4, m5, m6, m7, l0, l1, l2, l3, l4, l5, l6, l7, r0, r1, r2, r3, r4, r5, r6, r7,
        out, o, i, row_step, column_step, out_step, out_row_step, out_column_step,
        single: tl.constexpr, scaled: tl.constexpr, tile: tl.constexpr,
    ):  # fmt: skip
        b = tl.program_id(2)
        # A list of addresses on the device would have to be copied there, which a graph cannot do.
        m, left, right = m0, l0, r0
        if b == 1:
            m, left, right = m1, l1, r1
        if b == 2:
            m, left, right = m2, l2, r2
        if b == 3:
            m, left, right = m3, l3, r3
        if b == 4:
            m, left, right = m4, l4, r4
        if b == 5:
            m, left, right = m5, l5, r5
        if b == 6:
            m, left, right = m6, l6, r6
        if b == 7:
            m, left, right = m7, l7, r7
        source = tl.multiple_of(m, 16).to(tl.pointer_type(tl.float32 if single else tl.bfloat16))
        row, column = tl.program_id(1) * tile + tl.arange(0, tile), tl.program_id(0) * tile + tl.arange(0, tile)
        inside = (row < o)[:, None] & (column < i)[None, :]
        value = tl.load(source + row[:, None] * row_step + column[None, :] * column_step, mask=inside, other=0.0)
        value = value.to(tl.float32)
        if scaled:
            left_numbers = tl.load(left.to(tl.pointer_type(tl.float32)) + row, mask=row < o, other=0.0)
            right_numbers = tl.load(right.to(tl.pointer_type(tl.float32)) + column, mask=column < i, other=0.0)
            value = value * left_numbers[:, None] * right_numbers[None, :]
        place = out + b.to(tl.int64) * out_step + row[:, None] * out_row_step + column[None, :] * out_column_step
        tl.store(place, value.to(out.dtype.element_ty), mask=inside)

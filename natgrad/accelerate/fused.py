"""In-place updates of many tensors in few kernel launches, gated by a number on the device.

``gate`` is None, or a tensor [] on the device. Where it holds something other than zero the update changes nothing: a
GPU then keeps NaN and infinity out of the parameters while the host knows nothing of them yet. The host reads the
number later (``Flag``), and never stalls the queue. The kernels are those of ``torch.optim`` and of ``GradScaler``.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import is_asynchronous
from natgrad.errors import NonFiniteError

_HALF = torch.float16, torch.bfloat16
_SMALL = 2**14  # numbers; for smaller tensors a launch costs more than a copy


def add_(
    tensors: Sequence[Tensor], others: Sequence[Tensor], *, alpha: float = 1.0, gate: Tensor | None = None
) -> None:
    """x ← x + α y.

    >>> x = torch.zeros(2)
    >>> add_([x], [torch.ones(2)], alpha=0.5)
    >>> add_([x], [torch.full((2,), torch.nan)], gate=torch.ones(()))
    >>> x
    tensor([0.5000, 0.5000])
    """
    if gate is None:
        torch._foreach_add_(list(tensors), list(others), alpha=alpha)
    else:
        _sgd(tensors, others, [], rate=-alpha, gate=gate)


def descend_(
    tensors: Sequence[Tensor],
    others: Sequence[Tensor],
    rate: float | Tensor,
    *,
    decay: float = 0.0,
    gate: Tensor | None = None,
) -> None:
    """x ← (1 − rate·decay) x − rate·y; with a gate the rate may be a tensor [] of single precision on the device.

    >>> x = torch.ones(1)
    >>> descend_([x], [torch.ones(1)], 0.5, decay=0.5)
    >>> x
    tensor([0.2500])
    """
    if gate is not None:
        _sgd(tensors, others, [], rate=rate, gate=gate, decay=decay)
        return
    if decay:
        torch._foreach_mul_(list(tensors), 1 - float(rate) * decay)
    torch._foreach_add_(list(tensors), list(others), alpha=-float(rate))


def momentum_update_(
    tensors: Sequence[Tensor],
    directions: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    rate: float | Tensor,
    momentum: float,
    divisor: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """m ← μ m + v/divisor, x ← x − rate·m: on a GPU one pass over all three. The directions v are overwritten."""
    if gate is not None:
        _sgd(tensors, directions, momenta, rate=rate, gate=gate, momentum=momentum, divisor=divisor)
        return
    if divisor is not None:
        torch._foreach_div_(list(directions), divisor)
    torch._foreach_mul_(list(momenta), momentum)
    torch._foreach_add_(list(momenta), list(directions))
    torch._foreach_add_(list(tensors), list(momenta), alpha=-float(rate))


def average_(
    tensors: Sequence[Tensor],
    totals: Sequence[Tensor],
    weight: float | Tensor,
    *,
    count: float | Tensor = 1.0,
    gate: Tensor | None = None,
) -> None:
    """x ← (1 − w) x + w y/count: a moving average; with a gate, w and count may be tensors [] of single precision.

    Where the count is a tensor, y is overwritten.

    >>> x = torch.zeros(2)
    >>> average_([x], [torch.ones(2)], 0.25)
    >>> x
    tensor([0.2500, 0.2500])
    """
    if gate is None:
        torch._foreach_mul_(list(tensors), 1 - float(weight))
        torch._foreach_add_(list(tensors), list(totals), alpha=float(weight) / float(count))
    elif isinstance(count, Tensor):
        _sgd(tensors, totals, [], rate=weight, gate=gate, decay=1.0, divisor=count, ascend=True)
    else:  # x + (w/count)(y − count·x): ascent along y with weight decay
        rate = weight if count == 1 else weight / count
        _sgd(tensors, totals, [], rate=rate, gate=gate, decay=count, ascend=True)


def adamw_(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    counts: Sequence[Tensor],
    *,
    rate: float | Tensor,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    gate: Tensor | None = None,
) -> None:
    """torch's fused step of AdamW; ``counts`` of steps are tensors [] of single precision on the device.

    >>> x, m, s, t = torch.ones(1), torch.zeros(1), torch.zeros(1), torch.zeros(())
    >>> adamw_([x], [torch.ones(1)], [m], [s], [t], rate=0.5, betas=(0.9, 0.95), epsilon=0.0, weight_decay=0.0)
    >>> x, t
    (tensor([0.5000]), tensor(1.))
    """
    # A list: with a single tensor torch waits for its value.
    torch._foreach_add_(list(counts), [1.0 - gate] * len(counts) if gate is not None else 1.0)
    for x, g, m, s, t in _of_one_dtype(tensors, _laid_out_like(tensors, gradients), means, squares, counts):
        torch._fused_adamw_(
            x,
            g,
            m,
            s,
            [],
            t,
            lr=rate,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=gate,
        )


def copy_(tensors: Sequence[Tensor], values: Sequence[Tensor], *, gate: Tensor | None = None) -> None:
    """x ← y, bit for bit."""
    old = list(tensors)
    if gate is not None:
        bad = gate > 0
        values = [torch.where(bad, t, new) for t, new in zip(old, values, strict=True)]
    torch._foreach_copy_(old, list(values))


def pad_copy_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """The rows of y, and zeros after them, into x, which has at least as many.

    >>> x = torch.ones(3, 1)
    >>> pad_copy_([x], [torch.full((2, 1), 5.0)])
    >>> x.flatten()
    tensor([5., 5., 0.])
    """
    pairs = [(x, y, y.shape[0]) for x, y in zip(tensors, values, strict=True)]
    for dtype in {y.dtype for y in values}:  # in one launch, where all have one type
        alike = [(x[:m], y) for x, y, m in pairs if y.dtype == dtype]
        torch._foreach_copy_([x for x, _ in alike], [y for _, y in alike])
    tails = [x[m:] for x, _, m in pairs if x.shape[0] > m]
    if tails:
        torch._foreach_zero_(tails)


def move_(tensors: Sequence[Tensor], values: Sequence[Tensor], *, gate: Tensor | None = None) -> None:
    """x ← y up to rounding, with fewer launches than ``copy_`` where there is a gate. The values are overwritten."""
    if gate is None:
        torch._foreach_copy_(list(tensors), list(values))
    else:
        torch._foreach_sub_(list(values), list(tensors))
        add_(tensors, values, gate=gate)


def scale_(tensors: Sequence[Tensor], factor: float | Tensor, *, gate: Tensor | None = None) -> None:
    """x ← factor·x."""
    torch._foreach_mul_(list(tensors), factor if gate is None else torch.where(gate > 0, 1.0, factor))


def scale_each_(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """x ← factor·x, with a factor [] for each tensor; on a GPU in one launch for those that lie side by side.

    >>> x = torch.ones(2, 3)
    >>> scale_each_(x.unbind(), torch.tensor([2.0, 3.0]).unbind())
    >>> x[:, 0]
    tensor([2., 3.])
    """
    if not is_asynchronous(tensors[0].device):
        torch._foreach_mul_(list(tensors), list(factors))
        return
    for run in _runs(tensors):
        first, size = tensors[run[0]], tensors[run[0]].numel()
        if len(run) == 1:
            first.mul_(factors[run[0]])
        else:
            numbers = torch.stack([factors[at] for at in run])
            first.as_strided((len(run), size), (size, 1)).mul_(numbers.unsqueeze(1))


def _runs(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The positions of tensors of one shape that lie one after the other in memory."""
    runs: list[list[int]] = []
    for at in sorted(range(len(tensors)), key=lambda at: tensors[at].data_ptr()):
        t, last = tensors[at], tensors[runs[-1][-1]] if runs else None
        alike = last is not None and last.shape == t.shape and last.dtype == t.dtype
        if last is not None and alike and _follows(last, t):
            runs[-1].append(at)
        else:
            runs.append([at])
    return runs


def _follows(one: Tensor, other: Tensor) -> bool:
    within = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    dense = one.is_contiguous() and other.is_contiguous()
    return within and dense and other.data_ptr() == one.data_ptr() + one.nbytes


def scaled(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """factor·x of every tensor."""
    return list(torch._foreach_mul(list(tensors), factor))


def lerp(old: Sequence[Tensor], new: Sequence[Tensor], weight: float) -> list[Tensor]:
    """(1 − w) x + w y of every pair."""
    return list(torch._foreach_lerp(list(old), list(new), weight))


def averaged(old: Sequence[Tensor], new: Sequence[Tensor], weight: float | Tensor) -> list[Tensor]:
    """``lerp`` with a weight that may be a tensor [] in single precision: both round in the same way.

    >>> averaged([torch.zeros(1)], [torch.ones(1)], torch.tensor(0.25))
    [tensor([0.2500])]
    """
    x, y = ([t.float() if t.dtype in _HALF else t for t in side] for side in (old, new))
    out = list(torch._foreach_sub(y, x))
    torch._foreach_mul_(out, weight)
    torch._foreach_add_(out, x)
    return [t.to(before.dtype) for t, before in zip(out, old, strict=True)]


def divided(tensors: Sequence[Tensor], divisors: Sequence[float]) -> list[Tensor]:
    """x/d of every tensor with its own number."""
    return list(torch._foreach_div(list(tensors), list(divisors)))


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """max |x| [b] of every tensor; NaN where it holds NaN."""
    return torch.stack(torch._foreach_norm(list(tensors), float("inf")))


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Σ ‖x‖ [] over the tensors: a number that is finite only if they are.

    >>> total_norm([torch.tensor([3.0, 4.0]), torch.ones(1)])
    tensor(6.)
    """
    return torch.stack(torch._foreach_norm(list(tensors))).sum()


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """‖x‖ [] of every tensor, in double precision: squares in single precision leave its range from 10¹⁹ on.

    >>> norms([torch.tensor([3e30, 4e30])])[0].log10().round(decimals=3)
    tensor(30.6990, dtype=torch.float64)
    """
    return list(torch._foreach_norm(list(tensors), dtype=torch.float64))


def nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """A gate [] that closes if a tensor holds NaN or infinity, without waiting for the device.

    >>> nonfinite([torch.ones(2), torch.tensor([torch.nan])])
    tensor(1.)
    """
    gate = torch.zeros((), dtype=torch.float32, device=tensors[0].device)  # whatever the user's default is
    # GradScaler looks at all gradients like this, in one launch.
    for (alike,) in _of_one_dtype(tensors):
        torch._amp_foreach_non_finite_check_and_unscale_(alike, gate, torch.ones_like(gate))
    return gate


def pairing(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ ⟨x, y⟩ over pairs of tensors, in single precision at least: sums in half precision soon leave its range.

    >>> pairing([(torch.ones(3), torch.arange(3.0)), (torch.ones(2), torch.arange(2.0))])
    tensor(4.)
    """
    flat = [(x.flatten(), y.flatten()) for x, y in pairs]
    if is_asynchronous(pairs[0][1].device):  # biases and scales as one vector
        small = [pair for pair in flat if len(pair[1]) <= _SMALL]
        if len(small) > 1:
            x, y = (torch.cat(side) for side in zip(*small, strict=True))
            flat = [*(pair for pair in flat if len(pair[1]) > _SMALL), (x, y)]
    precise = ((x, y.float() if y.dtype in _HALF else y) for x, y in flat)
    return torch.stack([torch.dot(x.to(y.dtype), y) for x, y in precise]).sum()


def _laid_out_like(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The others with the strides of the tensors: fused kernels read both side by side, whatever their strides."""
    pairs = zip(tensors, others, strict=True)
    return [y if y.stride() == x.stride() else torch.empty_like(x).copy_(y) for x, y in pairs]


def _of_one_dtype(*sides: Sequence[Tensor]) -> list[list[list[Tensor]]]:
    """These columns of tensors, row by row of one dtype: most often as they are. Fused kernels take one dtype."""
    rows_of: dict[torch.dtype, list[tuple[Tensor, ...]]] = {}
    for row in zip(*sides, strict=True):
        rows_of.setdefault(row[0].dtype, []).append(row)
    return [[list(side) for side in zip(*rows, strict=True)] for rows in rows_of.values()]


def _sgd(
    tensors: Sequence[Tensor],
    others: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    rate: float | Tensor,
    gate: Tensor,
    momentum: float = 0.0,
    decay: float = 0.0,
    divisor: Tensor | None = None,
    ascend: bool = False,
) -> None:
    """torch's fused step of stochastic gradient descent, x − rate·(y + decay·x), or ascent, x + rate·(y − decay·x)."""
    sides = (tensors, _laid_out_like(tensors, others), *([momenta] if momenta else []))
    for x, y, *m in _of_one_dtype(*sides):
        torch._fused_sgd_(
            x,
            y,
            m[0] if m else [],
            weight_decay=decay,
            momentum=momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=ascend,
            is_first_step=False,
            grad_scale=divisor,
            found_inf=gate,
        )


Note = TypeVar("Note")

_AHEAD = 8  # steps that the host may run ahead of what it has read
_PAUSE = 2e-5  # seconds between two looks


def to_host_async(number: Tensor) -> Tensor:
    """A number [] on its way to the host: NaN until it arrives, and infinity where it is NaN itself.

    >>> float(to_host_async(torch.tensor(2.0))), float(to_host_async(torch.tensor(math.nan)))
    (2.0, inf)
    """
    return _host_memory((), pinned=number.is_cuda).copy_(number.nan_to_num(nan=math.inf), non_blocking=True)


def _host_memory(shape: Sequence[int], *, pinned: bool) -> Tensor:
    """NaN, whatever the user's default device and precision are; pinned, as a copy to other memory would wait."""
    return torch.full(tuple(shape), math.nan, dtype=torch.float32, device="cpu", pin_memory=pinned)


@final
class Readback(Generic[Note]):
    """Numbers on their way to the host, each with a note; they arrive in the order in which they were sent.

    On a CPU they are there at once; for a GPU the host may wait, or come again. What has not arrived is NaN, so that
    NaN cannot be sent. An event would tell the same, and takes the host longer to record than a number to look at.

    >>> readback = Readback[str]()
    >>> readback.send(torch.tensor([1.0, 2.0]), "a note")
    >>> readback.take(), readback.take_arrived(), len(readback)
    (([1.0, 2.0], 'a note'), None, 0)
    """

    def __init__(self) -> None:
        self._sent: deque[tuple[Tensor, torch.device, Note]] = deque()
        self._spare: list[Tensor] = []  # in pinned memory

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, numbers: Tensor, note: Note) -> None:
        """Send a tensor [b] or [], which may change afterwards; all have the same shape."""
        spare = self._spare.pop() if numbers.is_cuda and self._spare else None
        host = _host_memory(numbers.shape or (1,), pinned=numbers.is_cuda) if spare is None else spare.fill_(math.nan)
        host.copy_(numbers, non_blocking=True)
        self._sent.append((host, numbers.device, note))

    def take(self) -> tuple[list[float], Note]:
        """The first one, with its note; the device is waited for until it has sent it."""
        host, device, _ = self._sent[0]
        return self._taken(_awaited(host, device))

    def take_arrived(self) -> tuple[list[float], Note] | None:
        """The first one, with its note, if it is there."""
        if not self._sent:
            return None
        numbers = self._sent[0][0].tolist()
        return self._taken(numbers) if _are_there(numbers) else None

    def _taken(self, numbers: list[float]) -> tuple[list[float], Note]:
        host, device, note = self._sent.popleft()
        if device.type == "cuda":
            self._spare.append(host)
        return numbers, note

    def clear(self) -> None:
        """Forget what has been sent."""
        self._sent.clear()


def _are_there(numbers: list[float]) -> bool:
    return not any(map(math.isnan, numbers))


def _awaited(host: Tensor, device: torch.device) -> list[float]:
    while not _are_there(numbers := host.tolist()):
        torch.cuda.current_stream(device).query()  # raises where the device has failed
        time.sleep(_PAUSE)
    return numbers


@final
class Flag:
    """Whether something in a step was not finite.

    On a CPU ``check`` raises at once, by name. On a GPU asking would stall the queue: there ``value`` becomes a tensor
    [] on the device, 1.0 if something was not finite, which gates the updates of ``natgrad.accelerate.fused``. The
    error is raised by a later step, in ``raise_pending``.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._readings: Readback[tuple[str, int]] = Readback()  # what was not finite, and in which step

    def check(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Raise (CPU), or set the flag (GPU), if a tensor is not finite."""
        values = list(tensors.values())
        if is_asynchronous(values[0].device):
            self.look(tensors)
            return
        # A norm is quick, and finite only if every number is; one that overflows is looked at again.
        if math.isfinite(float(total_norm(values))):
            return
        held = {name: t for name, t in tensors.items() if t.numel()}  # a shard may have no rows
        finite = torch.isfinite(largest(list(held.values()))).tolist()
        bad = [name for name, good in zip(held, finite, strict=True) if not good]
        if bad:
            half = any(tensors[name].dtype is torch.float16 for name in bad)
            ends = ": float16 ends at 65504, use bfloat16 or float32 parameters (autocast)" if half else ""
            raise NonFiniteError(f"{what} of {', '.join(bad)} holds NaN or infinity. Nothing was changed{ends}")

    def look(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the flag on the device. What was found before in this step stays."""
        value = nonfinite(list(tensors.values()))
        self.value = value if self.value is None else torch.maximum(self.value, value)

    def send(self, what: str, step: int) -> None:
        """Send the flag to the host, for ``raise_pending``; on a CPU there is none, as ``check`` has raised."""
        if self.value is not None:
            self._readings.send(self.value, (what, step))

    def raise_pending(self) -> None:
        """Raise the error of an earlier step, which was not applied, and begin a new one.

        Readings that have not arrived are left for later, up to eight of them.
        """
        self.value, readings = None, self._readings
        if not readings:
            return
        while reading := readings.take() if len(readings) > _AHEAD else readings.take_arrived():
            (flag,), (what, step) = reading
            if flag > 0:
                self._readings.clear()
                raise NonFiniteError(f"{what} held NaN or infinity at step {step}: that step changed nothing")

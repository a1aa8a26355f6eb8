"""Whether the loss that is trained is the one that the metric was made from: a look at the first backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from natgrad.accelerate.autograd import nodes
from natgrad.model import tensors_of
from natgrad.output.heads import Heads
from natgrad.output.losses import ClassLoss, HessianLoss, TermLoss, described
from natgrad.output.metric import DerivedMetric, OutputMetric
from natgrad.watch.base import LossHook, Watcher, attach_hook, in_training, loss_in, on_cotangent, weakly

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_FEW = 0.05  # of the terms may have no gradient by chance: where an output equals its target
_SCALES = 10  # GradScaler's factors are powers of two: those of losses are rarely as large as 2¹⁰

_REDUCTION = (
    "the gradient at {} is that of the {} over {} terms, and the metric that of the {}: give the loss with "
    'reduction="{}"'
)


@final
@dataclass(frozen=True)
class LossCall:
    """A call of the user's loss on a view of the outputs: sizes, strides and start of what it read, and the target."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    target: Any
    trains: bool


@final
@dataclass
class Watched:
    """One output y [n *out] in a pass of the user, the loss that it was given, and what comes back to it."""

    key: Any  # of a head
    loss: TermLoss | HessianLoss | None  # None for a metric that was made from none
    weight: float
    y: Tensor  # a copy: the user may change the outputs in place
    outputs: Tensor  # without their graph: while they are here, no other tensor has their address
    cotangent: Tensor | None = None
    calls: list[LossCall] = field(default_factory=list)  # of the loss, on the outputs
    paused: bool = False

    @property
    def title(self) -> str:
        return "the outputs" if self.key is None else f"the head {self.key!r}"

    def arrive(self, cotangent: Tensor | None) -> None:
        """Several backward passes through one forward pass add up."""
        if self.paused or cotangent is None:
            return
        self.cotangent = cotangent.detach() if self.cotangent is None else self.cotangent + cotangent.detach()

    def loss_called(self, y: Tensor, target: Any, *, trains: bool) -> None:
        """The user's loss is called, on the outputs or on a view of them."""
        mine = self.outputs
        if not self.paused and y.numel() == mine.numel() and y.data_ptr() == mine.data_ptr():
            start = int(y.storage_offset() - mine.storage_offset())
            self.calls.append(LossCall(tuple(y.shape), tuple(y.stride()), start, target, trains))


@final
@dataclass(frozen=True)
class Factor:
    """A gradient over that of a loss, which is a mean or a sum of so many ``terms``."""

    value: float
    name: str  # of the loss
    reduction: str | None  # of the loss; None: unknown
    terms: int
    tol: float


@final
class LossWatch(Watcher):
    """Checks that the loss of the training loop is the one that the metric was made for.

    What it finds is an INFO in the log where the steps are as they should be (gradient accumulation, a ``GradScaler``),
    else a warning.

    Args:
        metric: The metric that was made of the given loss.
        scale_free: Whether the steps do not depend on the scale of the loss.
        strict: Make an error of a warning.
        silent: Say nothing: one of several processes speaks for all.

    Method:
        It compares the cotangent that the user's ``backward()`` sends into the outputs with that of the loss given, in
        one pass of the first step, and in one of the first step in which the outputs have another number of axes: hooks
        at the outputs keep what arrives, and ``opt.step()`` compares. After that it costs nothing.

        The targets are those that the loss was called with, where it is a module. Of cross entropy, coins and absolute
        errors the cotangent itself tells them; of other losses, without the targets, only what is certainly that of
        another loss does.
    """

    def __init__(
        self, metric: OutputMetric, *, scale_free: bool = False, strict: bool = False, silent: bool = False
    ) -> None:
        super().__init__(strict=strict, silent=silent)
        self._metric, self._scale_free = metric, scale_free
        self._checked: set[tuple[int, ...]] = set()  # numbers of axes
        self._removers: list[Callable[[], object]] = []  # of hooks
        self._passes = 0  # since the one that is looked at, with it
        self._watched: list[Watched] = []
        self._other: dict[Any, bool] = {}  # outputs beside them: whether they are trained
        self._later: set[int] = set()  # later passes, by number, that a backward pass has come to

    def hidden(self) -> None:
        self.note("the loss cannot be compared with the one given: a compiled pass does not show its gradients")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside are those of the library, which start at the outputs, too."""
        for each in self._watched:
            each.paused = True
        try:
            yield
        finally:
            for each in self._watched:
                each.paused = False

    def outputs(self, raw: Any, tensors: Sequence[Tensor], params: Mapping[str, Tensor]) -> None:
        """Look at what comes back to them."""
        training = partial(in_training, tuple(params.values()))
        if self._watched or tuple(t.ndim for t in tensors) in self._checked:
            self._passes += 1
            if self._watched:
                came = weakly(self, lambda watch, _, number=self._passes: watch._came(number))
                self._removers.extend(y.register_hook(training(came)).remove for y in tensors if y.requires_grad)
            return
        self._watched, self._passes, loss = list(_by_head(self._metric, tensors)), 1, loss_in(raw, tensors)
        for each, y in zip(self._watched, tensors, strict=True):
            if not y.requires_grad:
                continue
            handle = on_cotangent(y, loss, training(weakly(each, Watched.arrive)))
            if handle is None:
                self.step_ended()
                self._checked.add(tuple(t.ndim for t in tensors))
                self.note("the loss cannot be compared with the one given: the model makes it from other tensors")
                return
            self._removers.append(handle.remove)
            if each.loss is not None and isinstance(each.loss.loss, nn.Module):
                self._removers.append(attach_hook(each.loss.loss, LossHook(each), each))
        self._watch_others(raw, tensors, tuple(params.values()))

    def _watch_others(self, raw: Any, tensors: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        """Watch other returned tensors, of which the outputs are not made: a gradient there belongs to another loss."""
        items = raw.items() if isinstance(raw, Mapping) else enumerate(raw) if isinstance(raw, tuple | list) else ()
        others = [(key, t) for key, t in items if isinstance(t, Tensor) and t.ndim and t.grad_fn is not None]
        others = [(key, t) for key, t in others if not any(t is mine for mine in tensors)]
        below = set(nodes([t.grad_fn for t in tensors])) if others else set()
        for key, t in others:
            if t.grad_fn not in below:
                self._other[key] = False
                trained = weakly(self, lambda watch, _, key=key: watch._trained(key))
                self._removers.append(t.register_hook(in_training(params, trained)).remove)

    def _trained(self, key: Any) -> None:
        self._other[key] = True

    def _came(self, number: int) -> None:
        if not any(each.paused for each in self._watched):
            self._later.add(number)

    def step_ended(self) -> None:
        for remove in self._removers:
            remove()
        self._removers.clear()
        self._watched, self._other, self._later = [], {}, set()

    def gradients(self, grads: Mapping[str, Tensor], *, whole: bool, due: bool) -> None:
        """Say what the step that is to be made has shown, or raise where it must not be made."""
        if not self._watched:
            return
        watched, others = self._watched, [key for key, trained in self._other.items() if trained]
        passes = 1 + len(self._later)
        arrived = [each.cotangent for each in watched if each.cotangent is not None]
        finite = all(bool(c.isfinite().all()) for c in arrived)
        self.step_ended()
        if not (finite and any(bool(c.any()) for c in arrived)):  # a GradScaler skips this step, or no loss came here
            return
        self._checked.add(tuple(each.y.ndim for each in watched))
        for key in others:
            self.warn(
                f"the output {key!r} is trained, too, and the metric does not see it: give it a loss, "
                "{key: loss, …} for all outputs"
            )
        factors: list[tuple[Watched, Factor]] = []
        for each in watched:
            if each.cotangent is None or not bool(each.cotangent.any()):
                self.warn(f"no gradient comes to {each.title}: its loss is not in what backward() was called on")
            elif each.loss is not None and (factor := self._compare(each, each.loss, each.cotangent)) is not None:
                factors.append((each, factor))
        if passes > 1 and any(isinstance(each.loss, TermLoss) and each.loss.reduction == "sum" for each in watched):
            self._loud(
                f"the loss is a sum over the examples, and the gradient that of {passes} passes: the metric is that of "
                'one of them. Give the loss with reduction="mean", and train its mean over all passes'
            )
        alike = all(abs(factor.value / factors[0][1].value - 1) <= 2 * factor.tol for _, factor in factors)
        for each, factor in factors:
            if abs(factor.value - 1) > factor.tol:
                self._tell_factor(each.title, factor, alike)

    def _compare(self, each: Watched, loss: TermLoss | HessianLoss, cotangent: Tensor) -> Factor | None:
        """The gradient over that of the loss, where it is a multiple; else say what it is."""
        y, c, name, tol = _wide(each.y), _wide(cotangent), _title(loss.loss), _TOLERANCES[cotangent.dtype]
        # Labels that are mixed in the loss are several calls. The metric of a loss that needs targets is that of one.
        calls = [call for call in each.calls if call.trains] or each.calls
        if loss.needs_target and any(differ(call.target, calls[-1].target) for call in calls[:-1]):
            self.two_targets()
            return None
        calls = calls[-1:] if loss.needs_target else calls
        candidates = [[_of_target(each, call, loss, y) for call in calls]] if calls else _of_cotangent(loss, y, c)
        fits = [fit for es in candidates if (fit := _fitted(c, [each.weight * e for e in es], tol)) is not None]
        if fits:
            return Factor(fits[0], name, getattr(loss.loss, "reduction", None), _terms(loss, y, c), tol)
        for other, e, fix in _others(loss, y, c) if c.numel() > 1 else ():  # one number fits any loss
            if _fitted(c, [e], tol) is not None:
                what = f"the gradient at {each.title} is that of {other}"
                self.warn(f"{what}, and the metric was made from {name}: {fix}")
                return None
        if (share := _without_gradient(loss, y, cotangent)) > _FEW:
            self.warn(
                f"{share:.0%} of the terms of {each.title} have no gradient (a mask, a part of the outputs), and in "
                f"the metric of {name} all terms count: return only what is trained, or give the loss with its mask "
                "as a function loss(y, t), and call opt.refresh(x, target)"
            )
        elif candidates and (calls or not _may_be_soft(loss, c, tol)):
            self.warn(
                f"the gradient at {each.title} is not that of {name}, from which the metric was made: give the loss "
                "that is trained, or one for every output"
            )
        elif (span := _weights(loss, y, c, tol)) is not None:
            self.note(
                f"the terms of the gradient at {each.title} have {span[0]:.2g} to {span[1]:.2g} times the weights that "
                f"they have in {name}, from which the metric was made"
            )
        return None

    def _tell_factor(self, title: str, factor: Factor, alike: bool) -> None:
        """What has made it. One that heads do not have ``alike`` is a weight, on which the metric depends."""
        α, name, terms, given = factor.value, factor.name, factor.terms, factor.reduction
        power, k = math.log2(abs(α)), round(1 / α) if abs(α) < 1 else 0
        of_scaler = power > _SCALES - 0.1 and abs(power - round(power)) < 1e-2
        loud = self._loud if alike else self.warn
        if alike and of_scaler and (round(power) == 16 or abs(α - terms) > 1e-2 * α):  # 2¹⁶ is its first factor
            self.note(f"the gradient at {title} is {α:g} times that of {name}, as a GradScaler makes it")
        elif terms > 1 and given != "sum" and abs(α - terms) < 1e-2 * terms:
            loud(_REDUCTION.format(title, "sum", terms, "mean", "sum"))
        elif terms > 1 and given != "mean" and abs(α * terms - 1) < 1e-2:
            loud(_REDUCTION.format(title, "mean", terms, "sum", "mean"))
        elif alike and k > 1 and abs(α * k - 1) < 1e-2:
            self.note(f"the gradient at {title} is 1/{k} of that of {name}, as in accumulation over {k} passes")
        elif alike and 0 < α < 1 and self._passes > 1:
            self.note(f"the gradient at {title} is {α:.3g} of that of {name}, one of {self._passes} unequal passes")
        else:
            loud(
                f"the gradient at {title} is {α:.3g} times that of {name}, and the metric is not: metric_of({{…}}, "
                "weights=…) gives a loss its weight"
            )

    def _loud(self, message: str) -> None:
        """Warn, or only log if the step does not depend on the loss's scale."""
        (self.note if self._scale_free else self.warn)(message)

    def two_targets(self) -> None:
        """The loss has been called with two targets that train, and the metric depends on them."""
        self.warn(
            "the loss that the optimizer was given is called with two targets on the outputs of one pass, and its "
            "metric depends on them: the last one is taken. Call it under torch.no_grad() where it is not trained. If "
            "both are trained, use Empirical(), whose metric comes from your backward pass"
        )


@final
class ScaleWatch(Watcher):
    """Checks that the gradient is not divided after the backward pass, as a ``GradScaler`` does.

    ``Empirical()`` has the scale of the cotangents.

    Args:
        strict: Make an error of a warning.
        silent: Say nothing: one of several processes speaks for all.

    Method:
        It keeps the length of the last parameter's gradient when the backward pass is over, and compares it once with
        that of a step.
    """

    def __init__(self, *, strict: bool = False, silent: bool = False) -> None:
        super().__init__(strict=strict, silent=silent)
        self._arrived: Tensor | None = None  # the norm of the last parameter's gradient
        self._name = ""
        self._arrival: RemovableHandle | None = None  # of the hook that keeps it

    def outputs(self, raw: Any, tensors: Sequence[Tensor], params: Mapping[str, Tensor]) -> None:
        if self._arrival is None:
            self._name, last = list(params.items())[-1]
            self._arrival = last.register_post_accumulate_grad_hook(weakly(self, ScaleWatch._keep))

    def _keep(self, param: Tensor) -> None:
        if param.grad is not None and param.grad.layout == torch.strided:
            self._arrived = torch.linalg.vector_norm(param.grad.detach())

    def gradients(self, grads: Mapping[str, Tensor], *, whole: bool, due: bool) -> None:
        if self._arrived is None or self._arrival is None or self._name not in grads:
            return
        before, now = float(self._arrived), float(torch.linalg.vector_norm(grads[self._name]))
        if not (0 < now < math.inf and 0 < before < math.inf):
            return
        self._arrival.remove()
        self._arrived = None  # the handle stays: it is not looked at again
        if before > 2**_SCALES * now:
            self.warn(
                f"the gradient of the step is {before / now:.0f} times smaller than that of the backward pass, as a "
                "GradScaler makes it, and the metric of Empirical() has the scale of the latter, squared: its steps "
                "are too short. Give the loss, Empirical(loss), or use autocast in bfloat16, without a GradScaler"
            )


def has_loss(metric: OutputMetric) -> bool:
    """Whether a metric, or that of a head, was made from a loss."""
    return any(isinstance(each, TermLoss | HessianLoss) for each in _metrics(metric).values())


def _base(metric: OutputMetric) -> OutputMetric:
    """The metric that others are made of."""
    while isinstance(metric, DerivedMetric):
        metric = metric.base
    return metric


def _metrics(metric: OutputMetric) -> dict[Any, OutputMetric]:
    """The metric of every head, by its key; None is the key of the only output."""
    whole = _base(metric)
    return {key: _base(each) for key, each in whole.metrics.items()} if isinstance(whole, Heads) else {None: whole}


def differ(one: Any, other: Any) -> bool:
    """Whether targets have tensors that are not equal. Those in the same memory are, and need no look inside."""
    pairs = list(zip_longest(tensors_of(one), tensors_of(other)))
    return any(a is None or b is None or (not _in_one_place(a, b) and not _equal(a, b)) for a, b in pairs)


def _in_one_place(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype


def _equal(a: Tensor, b: Tensor) -> bool:
    """Up to their shapes; a NaN, for a value that is missing, equals another."""
    if a.numel() != b.numel():
        return False
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = a.flatten().to(dtype), b.flatten().to(a.device, dtype)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _by_head(metric: OutputMetric, tensors: Sequence[Tensor]) -> Iterator[Watched]:
    whole = _base(metric)
    for (key, each), y in zip(_metrics(metric).items(), tensors, strict=True):
        loss = each if isinstance(each, TermLoss | HessianLoss) else None
        weight = whole.weight(key) if isinstance(whole, Heads) else 1.0
        yield Watched(key, loss, weight, y.detach().clone(), y.detach())


def _title(loss: object) -> str:
    return described(loss) if isinstance(loss, nn.Module) else repr(loss)


# What the cotangent of a loss would be.


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _gradient(loss: Callable[..., Tensor], y: Tensor, target: Any) -> Tensor:
    with torch.enable_grad():
        leaf = y.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(leaf, target), leaf)
    return g


def _of_target(each: Watched, call: LossCall, loss: TermLoss | HessianLoss, y: Tensor) -> Tensor:
    """∂L/∂y at the targets that the loss was called with, on the same view of y."""
    assert isinstance(loss.loss, nn.Module)
    forward, size, stride, start = loss.loss.forward, call.size, call.stride, call.start
    strides = each.outputs.stride()  # y may be a copy without gaps
    if (size, stride, start) == (tuple(y.shape), strides, 0):
        return _gradient(forward, y, call.target)
    # In memory as the outputs are: they may be a part of a larger tensor.
    memory = y.new_zeros(1 + sum((n - 1) * by for n, by in zip(y.shape, strides, strict=True)))
    memory.as_strided(y.shape, strides).copy_(y)
    g = _gradient(lambda leaf, target: forward(leaf.as_strided(size, stride, start), target), memory, call.target)
    return g.as_strided(y.shape, strides)


def _of_cotangent(loss: TermLoss | HessianLoss, y: Tensor, c: Tensor) -> list[list[Tensor]]:
    """∂L/∂y at the targets that a cotangent shows, if it is one of this loss: for every axis that may hold classes."""
    module = loss.loss
    if isinstance(module, nn.CrossEntropyLoss | nn.NLLLoss):
        return [[_of_classes(module, y, c, axis)] for axis in _class_axes(loss, y)]
    if isinstance(module, nn.BCEWithLogitsLoss | nn.BCELoss):
        labels = (c < 0) | ((c == 0) & (y > 0))  # a coin that is certain to come up so has no cotangent
        return [[_gradient(module.forward, y, labels.to(y.dtype))]]
    if isinstance(module, nn.L1Loss):
        return [[_gradient(module.forward, y, y - c.sign())]]
    return []


def _class_axes(loss: TermLoss | HessianLoss, y: Tensor) -> set[int]:
    """The axes of the outputs that may hold the classes."""
    given: int | None = getattr(loss, "axis", None)
    return {1, y.ndim - 1} if given is None else {given % y.ndim}


def _of_classes(loss: nn.CrossEntropyLoss | nn.NLLLoss, y: Tensor, c: Tensor, axis: int) -> Tensor:
    """The only class with a negative cotangent is the label; a term without any is ignored."""
    there, labels = (c != 0).any(axis), c.argmin(axis)
    labels = labels.masked_fill(~there, loss.ignore_index)
    return _gradient(lambda leaf, t: loss.forward(leaf.movedim(axis, 1), t), y, labels)


def _others(loss: TermLoss | HessianLoss, y: Tensor, c: Tensor) -> Iterator[tuple[str, Tensor, str]]:
    """What it may be in place of the loss given, with the way out: cross entropy over another axis, or coins."""
    module, given = loss.loss, getattr(loss, "axis", None)
    for axis in range(1, y.ndim):
        if y.shape[axis] < 2:
            continue
        e = _of_classes(nn.CrossEntropyLoss(), y, c, axis)
        if isinstance(module, nn.CrossEntropyLoss):
            if given is not None and axis != given % y.ndim:
                fix = f"give it as metric_of(loss, axis={axis})"
                yield f"cross entropy with the classes on axis {axis} of {y.ndim}", e, fix
        else:
            yield f"cross entropy over axis {axis}", e, "give nn.CrossEntropyLoss()"
    if not isinstance(module, nn.BCEWithLogitsLoss):
        e = _gradient(nn.BCEWithLogitsLoss(), y, (c < 0).to(y.dtype))
        yield "binary cross entropy", e, "give nn.BCEWithLogitsLoss()"


def _fitted(c: Tensor, gradients: Sequence[Tensor], tolerance: float) -> float | None:
    """Σ_j α_j with c = Σ_j α_j e_j for the ``gradients`` e_j, if there are such α: the factor of their Hessian."""
    numbers = [[float((e * other).sum()) for other in gradients] for e in gradients]
    products = torch.tensor(numbers, dtype=torch.float64)
    if not (bool(products.isfinite().all()) and bool(products.any())):
        return None
    slopes = torch.tensor([float((c * e).sum()) for e in gradients], dtype=torch.float64)
    α = torch.linalg.pinv(products, rtol=1e-6, hermitian=True) @ slopes  # calls with the same targets are one
    rest = c - sum(float(a) * e for a, e in zip(α, gradients, strict=True))
    factor = float(α.sum())
    return factor if factor != 0 and float(rest.norm()) <= tolerance * float(c.norm()) else None


def _weights(loss: TermLoss | HessianLoss, y: Tensor, c: Tensor, tolerance: float) -> tuple[float, float] | None:
    """The smallest and the largest weight of a term, if hard labels with such weights explain the cotangent."""
    module = loss.loss
    if not isinstance(module, nn.CrossEntropyLoss):
        return None
    for axis in _class_axes(loss, y):
        e = _of_classes(module, y, c, axis)
        square = (e * e).sum(axis, keepdim=True)
        w = (c * e).sum(axis, keepdim=True) / square.clamp(min=torch.finfo(e.dtype).tiny)
        if float((c - w * e).norm()) <= tolerance * float(c.norm()):
            there = w[square > 0]
            return float(there.min()), float(there.max())
    return None


def _without_gradient(loss: TermLoss | HessianLoss, y: Tensor, cotangent: Tensor) -> float:
    """The share of terms that the loss that is trained leaves out, where the loss given counts them.

    An output of zero, or at an end of its range, may equal its target (behind a ReLU or a clamp). In half precision
    small cotangents are zero, and outputs that fit well equal their targets.
    """
    if isinstance(loss, ClassLoss | HessianLoss) or cotangent.dtype in (torch.float16, torch.bfloat16):
        return 0.0
    inside = y != 0
    for end in (y.min(), y.max()):
        at_end = y == end
        inside = inside & ~at_end if int(at_end.sum()) > 1 else inside
    return float(((cotangent == 0) & inside).double().mean())


def _may_be_soft(loss: TermLoss | HessianLoss, c: Tensor, tolerance: float) -> bool:
    """Whether a cotangent that no hard labels explain may be that of probabilities as targets."""
    if not isinstance(loss.loss, nn.CrossEntropyLoss):
        return True
    return min(float(c.sum(axis).norm()) for axis in _class_axes(loss, c)) <= tolerance * float(c.norm())


def _terms(loss: TermLoss | HessianLoss, y: Tensor, c: Tensor) -> int:
    """How many terms the loss is a mean or a sum of."""
    if not isinstance(loss.loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return y.numel()
    return int((c != 0).any(min(_class_axes(loss, y), key=lambda axis: float(c.sum(axis).norm()))).sum())

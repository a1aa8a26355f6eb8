"""Jets: a function's value, its derivatives along m directions and one second-order operator, in one forward pass.

The forward Laplacian (Li et al. 2023): with u = f(a), directions i and a symmetric matrix D,

    ∂_i u = Df[∂_i a],        L u = Σ_ij D_ij ∂_ij u = Df[L a] + Σ_ij D_ij D²f[∂_i a, ∂_j a],

so value, m first derivatives and L go through a network together, as m + 2 channels. A ``Jet`` takes the place of a
tensor in a module's own forward pass. Linear operations act on all channels alike, a bias on the value alone; functions
of every number by itself need f′ and f″; products have the product rule; any other torch function is differentiated
twice by nested forward-mode automatic differentiation (Taylor mode), which costs about three times as much.

All is done with torch operations on tensors [c *shape], c = 1 + m or 2 + m, so the results can be differentiated by
parameters with autograd and ``torch.func``. A linear layer multiplies its weight once with all channels: they are
positions that share the weight (Dangel et al. 2024).
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad.accelerate.devices import outside_inference_mode
from natgrad.accelerate.jets import Slopes, activated, activated_layer, composed, is_fused, weighted
from natgrad.errors import BatchStatisticsError, NoDerivativeError
from natgrad.log import OnceLogger


@final
@dataclass(frozen=True)
class Directions:
    """What is propagated: derivatives along m directions and, with ``second``, L = Σ_ij D_ij ∂_ij.

    ``weights``: D as its diagonal [m] or as a matrix [m m]; None for the identity. ``graph``: whether gradients were
    enabled when the pass began. ``suspect``: a point at which the derivatives are not finite; an operation that made
    them so is refused.
    """

    m: int
    second: bool
    weights: Tensor | None
    graph: bool
    suspect: str = ""


def _operator(function: Any) -> Callable[..., Any]:
    return lambda *operands: apply(function, operands, {})


def _reflected(function: Any) -> Callable[..., Any]:
    return lambda right, left: apply(function, (left, right), {})


@final
class Memory:
    """What the views of one tensor share: how often it was changed in place."""

    version = 0


class Jet:
    """Stands for a tensor of ``shape`` in a forward pass, with its derivatives.

    ``channels`` [c *shape]: value, m derivatives and, unless it is zero by its form, L. ``shift``: a constant that is
    still to be added to the value, such as the bias of a linear layer, broadcast to ``shape``. It has no derivative, so
    a cotangent of ``channels`` is one of the sum, too.

    torch functions, operators and methods of tensors work on jets, and on jets with tensors.

    >>> x = torch.tensor([2.0, 3.0])
    >>> z = Jet(torch.stack([x, torch.ones(2)]), Directions(1, True, None, True))
    >>> y = torch.exp(z) * z + 1
    >>> y.laplacian / x.exp()  # (x eˣ)″ = (x + 2) eˣ
    tensor([4., 5.])
    """

    def __init__(self, channels: Tensor, of: Directions, shift: Tensor | float | None = None) -> None:
        self.channels, self.of, self.shift = channels, of, shift
        self.memory = Memory()
        self.version = 0

    def check_current(self, called: str) -> None:
        """Refuse a jet whose tensor was changed in place through another view of it: the jet does not know."""
        if self.version != self.memory.version:
            raise NoDerivativeError(
                f"the model {called} a tensor after an operation in place on another view of its memory: derivatives "
                "do not follow that. Do it out of place, and join the parts with torch.cat"
            )

    def view_of(self, other: Jet) -> None:
        """Say that the tensor shares its memory with that of another jet."""
        self.memory, self.version = other.memory, other.version

    def overwrite(self, new: Jet) -> None:
        """An operation in place."""
        self.channels, self.shift = new.channels, new.shift
        self.memory.version += 1
        self.version = self.memory.version

    def components(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Value [*shape], derivatives [m *shape], and L [*shape] or None where it is zero."""
        second = self.channels.shape[0] - 1 - self.of.m
        value, first, *rest = self.channels.split([1, self.of.m, *[1] * second])
        return self._shifted(value.squeeze(0)), first, rest[0].squeeze(0) if rest else None

    def whole(self, c: int | None = None) -> Tensor:
        """All channels with the shift added, once; ``c``: so many, the last one zero where L is by its form."""
        if self.shift is not None:
            value, rest = self.channels.split([1, self.channels.shape[0] - 1])
            self.channels, self.shift = torch.cat([self._shifted(value), rest]), None
        z = self.channels
        return z if c in (None, z.shape[0]) else torch.cat([z, torch.zeros_like(z[:1])])

    def detached(self) -> Tensor:
        """All channels, without a graph."""
        return self.whole().detach()

    def _shifted(self, value: Tensor) -> Tensor:
        return value if self.shift is None else value + self.shift

    @property
    def value(self) -> Tensor:
        """[*shape]."""
        return self._shifted(self.channels[0])

    @property
    def gradient(self) -> Tensor:
        """[m *shape]."""
        return self.channels[1 : 1 + self.of.m]

    @property
    def laplacian(self) -> Tensor:
        """L [*shape]."""
        return self.channels[-1] if self.channels.shape[0] > 1 + self.of.m else torch.zeros_like(self.channels[0])

    @property
    def shape(self) -> torch.Size:
        return self.channels.shape[1:]

    @property
    def ndim(self) -> int:
        return self.channels.ndim - 1

    __add__, __radd__ = _operator(torch.add), _reflected(torch.add)
    __sub__, __rsub__ = _operator(torch.sub), _reflected(torch.sub)
    __mul__, __rmul__ = _operator(torch.mul), _reflected(torch.mul)
    __truediv__, __rtruediv__ = _operator(torch.div), _reflected(torch.div)
    __pow__, __rpow__ = _operator(torch.pow), _reflected(torch.pow)
    __matmul__, __rmatmul__ = _operator(torch.matmul), _reflected(torch.matmul)
    __mod__, __rmod__ = _operator(torch.remainder), _reflected(torch.remainder)
    __iadd__, __isub__, __imul__, __itruediv__, __ipow__ = map(
        _operator, (Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_, Tensor.pow_)
    )
    __neg__, __abs__ = _operator(torch.neg), _operator(torch.abs)
    __float__, __int__ = _operator(Tensor.item), _operator(Tensor.item)  # refused
    __getitem__, __setitem__ = _operator(operator.getitem), _operator(operator.setitem)
    __lt__, __le__, __gt__, __ge__ = map(_operator, (torch.lt, torch.le, torch.gt, torch.ge))
    __eq__, __ne__ = _operator(torch.eq), _operator(torch.ne)
    __hash__ = object.__hash__
    __array_ufunc__ = None  # a number of numpy leaves the operation to the jet, instead of making an array of it

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def __len__(self) -> int:
        if not self.shape:
            raise NoDerivativeError(
                "the model takes the length of a tensor without axes, as torch.tensor(x) does, whose result has no "
                "derivative. Keep the tensor, or join several with torch.stack"
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[Jet]:
        return iter(self.unbind())

    def __bool__(self) -> bool:
        return bool(self.value)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return apply(Tensor.__array__, (self,), {})  # refused

    def __getattr__(self, name: str) -> Any:
        member = getattr(Tensor, name, None)
        if name.startswith("__") or member is None:
            raise AttributeError(f"a Jet has no attribute {name!r}")
        if callable(member):
            return lambda *args, **kwargs: apply(member, (self, *args), kwargs)
        if name in _ATTRIBUTES:
            return getattr(self.inner.channels if isinstance(self, Composition) else self.channels, name)
        if name == "T":
            return self.permute(*reversed(range(self.ndim)))
        if name == "mT":
            return self.transpose(-2, -1)
        if name in ("real", "imag"):
            return apply(getattr(torch, name), (self,), {})
        raise AttributeError(f"a Jet has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return apply(func, args, kwargs or {})


@final
class Composition(Jet):
    """f of every number of a jet, whose channels are formed when something other than a linear layer asks for them."""

    def __init__(self, inner: Jet, slopes: Slopes) -> None:
        # What the jet is now: it may be changed in place.
        self.inner, self.slopes = Jet(inner.channels, inner.of, inner.shift), slopes
        self.of, self.shift = inner.of, None
        self.memory, self.version = Memory(), 0
        self._formed: Tensor | None = None

    @property
    def channels(self) -> Tensor:
        if self._formed is None:
            self._formed = _composed(self.inner, self.slopes).channels
        return self._formed

    @channels.setter
    def channels(self, new: Tensor) -> None:
        self._formed = new

    @property
    def is_formed(self) -> bool:
        """Whether the channels have been asked for."""
        return self._formed is not None

    def detached(self) -> Tensor:
        if self._formed is not None:
            return self._formed.detach()
        z, of = self.inner, self.of
        with torch.no_grad():
            return activated(z.channels, z.shift, of.weights, self.slopes, of.m, of.second)

    @property
    def shape(self) -> torch.Size:
        return self.inner.shape if self._formed is None else self._formed.shape[1:]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def homogeneous(channels: Tensor) -> Tensor:
    """What a bias is multiplied with, [c *rows 1] for channels [c *rows i]: 1 for the value and 0 for derivatives."""
    value = channels.new_zeros(channels.shape[0], *[1] * (channels.ndim - 1))
    value[0] = 1
    return value.expand(*channels.shape[:-1], 1)


# Calls of torch functions.

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[Any, Arguments, Keywords], Any]  # NotImplemented where it does not apply


def apply(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A torch function of jets: by its rule, or by nested forward-mode differentiation."""
    called = getattr(func, "__name__", str(func))
    name = called.strip("_")
    jets = _jets((args, kwargs))
    of = jets[0].of
    if name in _WITHOUT:
        return func(*_map(args, lambda jet: jet.value.detach()), **_map(kwargs, lambda jet: jet.value.detach()))
    if of.graph and not torch.is_grad_enabled():
        raise NoDerivativeError(
            f"the model calls {name} where gradients are switched off, in torch.no_grad() or in an autograd.Function "
            "of its own: no derivative passes there. Write that part with plain torch operations"
        )
    for jet in jets:
        jet.check_current(f"calls {name} on")
    if name in _REFUSED or kwargs.get("out") is not None:
        raise NoDerivativeError(f"the model calls {name}: {_REFUSED.get(name, 'out= cannot hold a derivative')}")
    if name in _KINKED and of.second:
        _once.log_once(logging.WARNING, f"{name} {_KINK}")
    if name in _BENT and of.second:
        _once.log_once(logging.WARNING, f"{name} {_JUMP}")
    writes = called.endswith("_") and not called.startswith("__")
    in_place, kwargs = writes or bool(kwargs.get("inplace")), {k: v for k, v in kwargs.items() if k != "inplace"}
    if writes:
        func = getattr(torch, name, None) or getattr(F, name, None)
    if func is None:
        raise NoDerivativeError(f"the model calls {called}, which is not for derivatives: leave it out")
    if in_place and not isinstance(args[0], Jet):
        raise NoDerivativeError(
            f"the model calls {called} on a tensor, which cannot hold derivatives: do it out of place"
        )
    rule = _RULES.get(name)
    result = NotImplemented if rule is None else rule(func, args, kwargs)
    if result is NotImplemented:
        result = _nested(func, args, kwargs)
    if of.suspect:
        _refuse_singular(name, jets, result)
    if in_place:
        args[0].overwrite(result)
        return args[0]
    if _is_view(name, args):
        for each in _jets(result):
            each.view_of(jets[0])
    return result


def _refuse_singular(name: str, jets: Sequence[Jet], result: Any) -> None:
    """Refuse an operation that has finite values and derivatives that are not; large inputs may have overflowed."""
    large = torch.finfo(jets[0].dtype).max ** 0.25
    if not all(bool((jet.whole().abs() < large).all()) for jet in jets):
        return
    for z in (jet.whole() for jet in _jets(result)):
        if bool((z[0].isfinite() & ~z[1:].isfinite().all(0)).any()):
            raise NoDerivativeError(
                f"at {jets[0].of.suspect} the model calls {name} where it has a value and no derivatives, such as a "
                "root, a norm or an angle at zero. Leave out that point, or write a smooth function: "
                "x.square().sum(-1) for the square of a norm, (x.square().sum(-1) + ε).sqrt() for a norm"
            )


def _is_view(name: str, args: Arguments) -> bool:
    """Whether the result may share its memory with the argument."""
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(at is None or at is Ellipsis or isinstance(at, (int, slice)) for at in index)
    return name in _VIEWS


def _jets(x: Any) -> list[Jet]:
    if isinstance(x, Jet):
        return [x]
    if isinstance(x, (tuple, list, dict)):
        return [jet for item in (x.values() if isinstance(x, dict) else x) for jet in _jets(item)]
    return []


def _map(x: Any, function: Callable[[Jet], Any]) -> Any:
    """The same arguments with something else in the place of every jet."""
    if isinstance(x, Jet):
        return function(x)
    if isinstance(x, dict):
        return {key: _map(value, function) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return (list if isinstance(x, list) else tuple)(_map(value, function) for value in x)
    return x


def _replaced(tree: Any, new: Iterator[Any]) -> Any:
    """What a function returned, with new things in the places of its real and complex tensors."""
    if isinstance(tree, (tuple, list)):
        items = tuple(_replaced(item, new) for item in tree)
        return items if type(tree) in (tuple, list) else type(tree)(items)
    return next(new) if _has_derivatives(tree) else tree


def _inexact(tree: Any) -> tuple[Tensor, ...]:
    """The real and complex tensors of what a function returned."""
    if isinstance(tree, (tuple, list)):
        return tuple(t for item in tree for t in _inexact(item))
    return (tree,) if _has_derivatives(tree) else ()


def _has_derivatives(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _function_of(func: Any, args: Arguments, kwargs: Keywords) -> Callable[..., Any]:
    """The function of the tensors in the places of the jets, in order."""

    def function(*tensors: Tensor) -> Any:
        each = iter(tensors)
        return func(*_map(args, lambda _: next(each)), **_map(kwargs, lambda _: next(each)))

    return function


def _joined(value: Tensor, first: Tensor, second: Tensor | None, of: Directions) -> Jet:
    channels = [value.unsqueeze(0), first.expand(of.m, *value.shape)]
    return Jet(torch.cat(channels if second is None else [*channels, second.expand_as(value).unsqueeze(0)]), of)


@outside_inference_mode()
def _nested(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Any function: Df[J_i] and D²f[J_i, (D J)_i] by forward mode over forward mode, all i in one vmap."""
    jets = _jets((args, kwargs))
    of, returned = jets[0].of, _function_of(func, args, kwargs)
    values, firsts, seconds = zip(*(jet.components() for jet in jets), strict=True)

    def function(*points: Tensor) -> tuple[Tensor, ...]:
        return _inexact(returned(*points))

    def along(tangents: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *points: torch.func.jvp(function, points, tangents)[1]

    out = returned(*values)
    try:
        if not of.second:
            first = torch.func.vmap(lambda s: along(s)(*values))(firsts)
            return _replaced(out, (_joined(v, J, None, of) for v, J in zip(_inexact(out), first, strict=True)))
        others = tuple(weighted(J, of.weights) for J in firsts)
        both: Any = torch.func.vmap(lambda s, t: torch.func.jvp(along(s), values, t))(firsts, others)
        first, curved = both
        tangents = tuple(torch.zeros_like(v) if L is None else L for v, L in zip(values, seconds, strict=True))
        second = (L + c.sum(0) for L, c in zip(along(tangents)(*values), curved, strict=True))
    except (RuntimeError, NotImplementedError) as error:
        raise NoDerivativeError(
            f"{getattr(func, '__name__', func)} has no rule, and torch cannot differentiate it twice in forward mode "
            f"({str(error).splitlines()[0]}): write it with smooth operations of torch"
        ) from error
    _check_once(func, function, values, firsts)
    return _replaced(out, (_joined(v, J, L, of) for v, J, L in zip(_inexact(out), first, second, strict=True)))


Tensors: TypeAlias = Sequence[Tensor]


def _check_once(func: Any, function: Callable[..., Tensors], at: Tensors, firsts: Tensors) -> None:
    """Compare D²f[s, t] with reverse mode where a function is met for the first time, s and t mixtures of all J_i.

    Some functions of torch keep what they computed inside (statistics, factors) without its derivative: their second
    derivative in forward mode is wrong, and nothing says so. Along one J_i alone it may be zero, as that of a product.
    """
    name = getattr(func, "__name__", str(func))
    if name in _checked:
        return

    def weighed(tensors: Tensors) -> Tensor:
        random = torch.Generator().manual_seed(0)
        # Weights of the dtype of y: of a complex y the real part of the product has both of its parts.
        dtypes = (torch.complex128 if y.is_complex() else torch.float64 for y in tensors)
        weights = (torch.rand(y.shape, generator=random, dtype=d).to(y) for y, d in zip(tensors, dtypes, strict=True))
        return torch.stack([(w * y).sum().real for w, y in zip(weights, tensors, strict=True)]).sum()

    def along(f: Callable[..., Tensor], tangents: Tensors) -> Callable[..., Tensor]:
        """The derivative of f in reverse mode; torch.func has one inside of other transforms, and without a graph."""
        slopes = torch.func.grad(f, argnums=tuple(range(len(tangents))))
        return lambda *x: torch.stack(
            [(g.conj() * d).real.sum() for g, d in zip(slopes(*x), tangents, strict=True)]
        ).sum()

    try:
        x = tuple(v.detach() for v in at)
        mixtures = torch.randn(2, len(firsts[0]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        s, t = (tuple(torch.tensordot(c.to(J), J.detach(), dims=1) for J in firsts) for c in mixtures)
        both: Any = torch.func.jvp(lambda *points: torch.func.jvp(function, points, s)[1], x, t)
        first, ours = both
        right = float(along(along(lambda *points: weighed(function(*points)), s), t)(*x).detach())
        forward = float(weighed(ours).detach())
        size, slope = (float(weighed([y.abs() for y in each]).detach()) for each in (ours, first))
        length, reach = (max(float(v.abs().max()) for v in each) for each in (x, t))
    except (RuntimeError, NotImplementedError):
        return  # in a vmap numbers cannot be read, and some functions have no second derivative in reverse mode
    if math.isnan(forward - right):
        return  # at a point without derivatives nothing is compared, and nothing is known about others
    # Next to Df[s]·|t|/|x| a second derivative of rounding errors is zero
    scale = size + abs(right) + (slope * reach / length if length else 0.0)
    if abs(forward - right) > torch.finfo(at[0].dtype).eps ** 0.5 * scale:
        raise NoDerivativeError(
            f"{name} has no rule, and its second derivative by torch in forward mode is wrong ({forward:.6g} where "
            f"reverse mode has {right:.6g}): write it with smooth operations of torch"
        )
    _checked.add(name)


_checked: set[str] = set()


# Linear operations: all channels alike.


def _linear(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A function that is linear in all jets together."""
    jets = _jets((args, kwargs))
    c = max(jet.channels.shape[0] for jet in jets)
    out = torch.func.vmap(_function_of(func, args, kwargs))(*(jet.whole(c) for jet in jets))
    return _replaced(out, (Jet(z, jets[0].of) for z in _inexact(out)))


def _joins(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """cat, stack: also of jets with tensors."""
    if not args:
        return NotImplemented
    of = _jets(args)[0].of
    jets = [_constant(t, of) for t in args[0]]
    if func.__name__ == "column_stack":  # which has no vmap
        return _linear(torch.cat, ([jet.unsqueeze(-1) if jet.ndim == 1 else jet for jet in jets], 1), {})
    return _linear(func, (jets, *args[1:]), kwargs)


def _constant(t: Any, of: Directions) -> Jet:
    return t if isinstance(t, Jet) else Jet(torch.cat([t.unsqueeze(0), t.new_zeros(of.m, *t.shape)]), of)


def _difference(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """diff, also beside tensors: they are constants, and not linear in the jet."""
    x, n, dim, start, end = _named(("input", "n", "dim", "prepend", "append"), args, kwargs)
    of = _jets((x, start, end))[0].of
    x, start, end = (t if t is None else _constant(t, of) for t in (x, start, end))
    return _linear(func, (x, 1 if n is None else n, -1 if dim is None else dim, start, end), {})


def _layer(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """W x + b: one product with all channels, and the bias for the value alone."""
    x, weight, bias = _named(("input", "weight", "bias"), args, kwargs)
    if isinstance(weight, Jet) or isinstance(bias, Jet):
        return NotImplemented
    if isinstance(x, Composition) and not x.is_formed and is_fused(weight):
        z, of = x.inner, x.of
        shift = z.shift if isinstance(z.shift, Tensor) or z.shift is None else z.channels.new_full((), z.shift)
        out = activated_layer(z.channels, shift, of.weights, weight, x.slopes, of.m, of.second)
        return Jet(out, of, bias)
    return Jet(F.linear(x.whole(), weight), x.of, bias)


_OPERANDS = "input", "other"


def _named(names: Sequence[str], args: Arguments, kwargs: Keywords) -> list[Any]:
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(names)]


def _aligned(jet: Jet, ndim: int) -> Tensor:
    """The channels, to be broadcast with those of a tensor that has so many axes."""
    z = jet.channels
    return z if jet.ndim >= ndim else z.reshape(z.shape[0], *[1] * (ndim - jet.ndim), *jet.shape)


def _sum(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """a + αb and a − αb; a tensor or number is a shift."""
    a, b = _named(_OPERANDS, args, kwargs)
    factor = kwargs.get("alpha", 1) * (-1 if "sub" in func.__name__ else 1)
    if func.__name__ == "rsub":
        a, b = b, a
    if isinstance(a, Jet) and isinstance(b, Jet):
        ndim, c = max(a.ndim, b.ndim), max(a.channels.shape[0], b.channels.shape[0])
        a, b = Jet(a.whole(c), a.of), Jet(b.whole(c), b.of)
        return Jet(torch.add(_aligned(a, ndim), _aligned(b, ndim), alpha=factor), a.of)
    jet, other = (a, b) if isinstance(a, Jet) else (b, a)
    z, shift = jet.channels, jet.shift
    if jet is b and factor != 1:
        z, shift, factor = factor * z, None if shift is None else factor * shift, 1
    other = other if factor == 1 else factor * other
    if isinstance(other, Tensor):
        shape = torch.broadcast_shapes(jet.shape, other.shape)
        z = _aligned(Jet(z, jet.of), other.ndim).expand(z.shape[0], *shape)
        # It is added later, and until then the model may write into it; torch itself refuses to write into a parameter.
        other = other if other.is_leaf and other.requires_grad else other.clone()
    return Jet(z, jet.of, other if shift is None else shift + other)


# Products.


def _mul(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    a, b = _named(_OPERANDS, args, kwargs)
    if a is b and (of_root := _under_root(a)) is not None:
        return of_root
    if isinstance(a, Jet) and isinstance(b, Jet):
        ndim = max(a.ndim, b.ndim)
        a, b = (Jet(_aligned(jet, ndim), jet.of, jet.shift) for jet in (a, b))
        return _product(torch.mul, a, b, lambda mul, _: mul)
    jet, other = (a, b) if isinstance(a, Jet) else (b, a)
    z = _aligned(jet, other.ndim) if isinstance(other, Tensor) else jet.channels
    return Jet(z * other, jet.of, None if jet.shift is None else jet.shift * other)


def _bilinear(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A function that is linear in every one of its tensors."""
    jets = _jets((args, kwargs))
    if len(jets) > 2:
        return NotImplemented
    if len(jets) == 2:
        function = _function_of(func, args, kwargs)
        return _product(function, jets[0], jets[1], torch.func.vmap)
    if "matmul" in func.__name__:
        a, b = _named(_OPERANDS, args, kwargs)
        if isinstance(a, Jet) and b.ndim < 3:
            return Jet(a.whole() @ b, a.of)
    return _linear(func, args, kwargs)


def _product(function: Callable[..., Tensor], a: Jet, b: Jet, over: Callable[..., Any]) -> Jet:
    """The product rule. ``over``: makes it a function of channels, on these axes of a and b."""
    of = a.of
    (u, U, LU), (v, V, LV) = a.components(), b.components()
    first = over(function, (0, None))(U, v) + over(function, (None, 0))(u, V)
    if not of.second:
        return _joined(function(u, v), first, None, of)
    second = 2 * over(function, (0, 0))(weighted(U, of.weights), V).sum(0)
    for term in ([] if LU is None else [(LU, v)]) + ([] if LV is None else [(u, LV)]):
        second = second + function(*term)
    return _joined(function(u, v), first, second, of)


def _quotient(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    a, b = _named(_OPERANDS, args, kwargs)
    if kwargs.get("rounding_mode") is not None:
        return NotImplemented
    if isinstance(b, Jet):
        return _mul(torch.mul, (a, apply(torch.reciprocal, (b,), {})), {})
    z = _aligned(a, b.ndim) if isinstance(b, Tensor) else a.channels
    return Jet(z / b, a.of, None if a.shift is None else a.shift / b)


# Functions of every number by itself. Each generator yields f, f′ and f″, the last None where it is zero, and f‴ for
# activations.


def _composed(jet: Jet, slopes: Slopes) -> Jet:
    """f of a jet: f′J, and f′L + f″ Σ_ij D_ij J_i J_j."""
    of = jet.of
    return Jet(composed(jet.channels, jet.shift, of.weights, slopes, of.m, of.second), of)


def _elementwise(slopes: Slopes) -> Rule:
    return lambda func, args, kwargs: _composed(args[0] if args else kwargs["input"], slopes)


def _activation(slopes: Slopes) -> Rule:
    """A function whose f‴ is given, too."""
    return lambda func, args, kwargs: Composition(args[0] if args else kwargs["input"], slopes)


@outside_inference_mode()
def _by_forward_mode(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """f′ and f″ from torch."""
    jets, function = _jets((args, kwargs)), _function_of(func, args, kwargs)

    def slopes(v: Tensor) -> Iterator[Any]:
        one = torch.ones_like(v)

        def slope(point: Tensor) -> Tensor:
            return torch.func.jvp(function, (point,), (one,))[1]

        yield function(v)
        yield slope(v)
        yield torch.func.jvp(slope, (v,), (one,))[1]

    # |z| of a complex z has no f′, and bounds with more axes than z broadcast it
    bounds = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    plain = len(jets) == 1 and not jets[0].dtype.is_complex and all(t.ndim <= jets[0].ndim for t in bounds)
    return _composed(jets[0], slopes) if plain else NotImplemented


def _tanh(v: Tensor) -> Iterator[Any]:
    f = torch.tanh(v)
    yield f
    slope = 1 - f * f
    yield slope
    curvature = -2 * f * slope
    yield curvature
    yield -2 * (slope * slope + f * curvature)


def _sigmoid(v: Tensor) -> Iterator[Any]:
    f = torch.sigmoid(v)
    yield f
    slope = f * (1 - f)
    yield slope
    curvature = slope * (1 - 2 * f)
    yield curvature
    yield curvature * (1 - 2 * f) - 2 * slope * slope


def _silu(v: Tensor) -> Iterator[Any]:
    s = torch.sigmoid(v)
    yield v * s
    slope = s * (1 - s)
    yield s + v * slope
    curvature = slope * (1 - 2 * s)
    yield 2 * slope + v * curvature
    yield 3 * curvature + v * (curvature * (1 - 2 * s) - 2 * slope * slope)


def _gelu(v: Tensor) -> Iterator[Any]:
    density = torch.exp(-0.5 * v * v) / math.sqrt(2 * math.pi)
    mass = 0.5 * (1 + torch.erf(v / math.sqrt(2)))
    yield v * mass
    yield mass + v * density
    yield (2 - v * v) * density
    yield v * (v * v - 4) * density


def _gelu_rule(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    exact = kwargs.get("approximate", "none") == "none"
    return _activation(_gelu)(func, args, kwargs) if exact else _by_forward_mode(func, args, kwargs)


def _sin(v: Tensor) -> Iterator[Any]:
    f, slope = torch.sin(v), torch.cos(v)
    yield from (f, slope, -f, -slope)


def _cos(v: Tensor) -> Iterator[Any]:
    f, slope = torch.cos(v), -torch.sin(v)
    yield from (f, slope, -f, -slope)


def _exp(v: Tensor) -> Iterator[Any]:
    f = torch.exp(v)
    yield from (f, f, f, f)


def _log(v: Tensor) -> Iterator[Any]:
    yield torch.log(v)
    slope = 1 / v
    yield slope
    yield -slope * slope


def _sqrt(v: Tensor) -> Iterator[Any]:
    f = torch.sqrt(v)
    yield f
    slope = 0.5 / f
    yield slope
    curvature = -0.5 * slope / v
    yield curvature
    yield -1.5 * curvature / v


def _reciprocal(v: Tensor) -> Iterator[Any]:
    f = torch.reciprocal(v)
    yield f
    slope = -f * f
    yield slope
    yield -2 * f * slope


def _erf(v: Tensor) -> Iterator[Any]:
    yield torch.erf(v)
    slope = torch.exp(-v * v) * (2 / math.sqrt(math.pi))
    yield slope
    yield -2 * v * slope


def _rsqrt(v: Tensor) -> Iterator[Any]:
    f = torch.rsqrt(v)
    yield f
    slope = -0.5 * f / v
    yield slope
    yield -1.5 * slope / v


# c of Σ_k c_k x^2k: sin(x)/x, its slope over x, and its curvature
_SINC, _SINC_SLOPE, _SINC_CURVATURE = (
    [(-1) ** k * factor(k) / math.factorial(2 * k + 1) for k in range(start, 10)]
    for start, factor in ((0, lambda k: 1), (1, lambda k: 2 * k), (1, lambda k: 2 * k * (2 * k - 1)))
)


def _sinc(v: Tensor) -> Iterator[Any]:
    """Near 0 by power series: there torch's second derivative is 0 in forward mode and NaN in reverse mode."""
    x = math.pi * v
    near = x.abs() < 1
    square, far = torch.where(near, x * x, 0.0), torch.where(near, 1.0, x)

    def series(coefficients: list[float]) -> Tensor:
        total = torch.zeros_like(square)
        for c in reversed(coefficients):
            total = total * square + c
        return total

    f = torch.sin(far) / far
    yield torch.where(near, series(_SINC), f)
    slope = (torch.cos(far) - f) / far
    yield math.pi * torch.where(near, x * series(_SINC_SLOPE), slope)
    yield math.pi**2 * torch.where(near, series(_SINC_CURVATURE), -f - 2 * slope / far)


def _square(v: Tensor) -> Iterator[Any]:
    yield v * v
    yield 2 * v
    yield torch.full_like(v, 2)


def _square_rule(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    x = args[0] if args else kwargs["input"]
    of_root = _under_root(x)
    return _composed(x, _square) if of_root is None else of_root


def _relu(v: Tensor) -> Iterator[Any]:
    yield torch.relu(v)
    yield (v > 0).to(v.dtype)
    yield None


def _power(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    p = _named(("input", "exponent"), args, kwargs)[1]
    if not isinstance(p, (int, float)):
        return NotImplemented
    x = args[0] if args else kwargs["input"]
    if p and p % 2 == 0 and (of_root := _under_root(x)) is not None:
        return of_root if p == 2 else of_root ** (p / 2)

    def slopes(v: Tensor) -> Iterator[Any]:
        yield v**p
        yield p * v ** (p - 1) if p else torch.zeros_like(v)
        yield p * (p - 1) * v ** (p - 2) if p not in (0, 1) else None

    return _composed(x, slopes)


# Roots. At zero they have no derivatives, and their squares have: x.norm()² is the sum of squares under the root.


def _root(x: Jet) -> Jet:
    return _composed(x, _sqrt) if x.dtype.is_complex else Composition(x, _sqrt)


def _sqrt_rule(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    return _root(args[0] if args else kwargs["input"])


def _under_root(x: Any) -> Jet | None:
    """y of x = √y, which is x² where y is not negative."""
    if not isinstance(x, Composition) or x.slopes is not _sqrt or x.version:  # changed in place
        return None
    y = x.inner.whole(1 + x.of.m + x.of.second)
    return Jet(torch.where(y[:1] < 0, torch.nan, y), x.of)


def _norm(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """The Euclidean one. With first derivatives only, torch's own, which is 0 at zero."""
    algebra = func.__name__ == "linalg_norm"
    x, p, dim, keep = _named(("input", "ord" if "linalg" in func.__name__ else "p", "dim", "keepdim"), args, kwargs)
    spectral = algebra and p == 2 and not isinstance(dim, int)
    if not isinstance(x, Jet) or p not in (None, 2, "fro") or spectral or kwargs.get("dtype") is not None:
        return NotImplemented
    if not x.of.second or x.dtype.is_complex:
        return NotImplemented
    return _root(x.square().sum(tuple(range(x.ndim)) if dim is None else dim, keepdim=bool(keep)))


def _distance(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    a, b, p = _named(("input", "other", "p"), args, kwargs)
    return apply(torch.norm, (a - b, 2 if p is None else p), {})


def _deviation(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    variance = apply(torch.var, args, kwargs)
    return _root(variance) if variance.of.second else NotImplemented


# The others.


def _normalised(x: Jet, dims: Sequence[int], eps: float, centred: bool = True) -> Jet:
    """By mean and variance over some axes. torch's own second derivative of these in forward mode is wrong."""
    each: Any = x - x.mean(dims, keepdim=True) if centred else x
    return each * (each.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    x, shape, weight, bias, eps = _named(("input", "normalized_shape", "weight", "bias", "eps"), args, kwargs)
    return _affine(_normalised(x, tuple(range(-len(shape), 0)), 1e-5 if eps is None else eps), weight, bias)


def _rms_norm(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    x, shape, weight, eps = _named(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(_normalised(x, tuple(range(-len(shape), 0)), eps, centred=False), weight, None)


def _group_norm(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    x, groups, weight, bias, eps = _named(("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
    out = _normalised(x.reshape(x.shape[0], groups, -1), (-1,), 1e-5 if eps is None else eps).reshape(x.shape)
    weight, bias = (None if t is None else t.view(-1, *[1] * (x.ndim - 2)) for t in (weight, bias))
    return _affine(out, weight, bias)


def _softmax(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """softmax, log_softmax and logsumexp; the largest value is taken off first, a constant that cancels."""
    x, dim = _named(("input", "dim"), args, kwargs)
    if dim is None or kwargs.get("dtype") is not None or not isinstance(x, Jet):
        return NotImplemented
    top = x.value.detach().amax(dim, keepdim=True)
    each: Any = (x - top).exp()
    total = each.sum(dim, keepdim=True)
    if func.__name__ == "softmax":
        return each / total
    if func.__name__ == "log_softmax":
        return x - top - total.log()
    keep = bool(_named(("input", "dim", "keepdim"), args, kwargs)[2])
    out = total.log() + top
    return out if keep else out.squeeze(dim)


def _attention(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """softmax(Q Kᵀ/√d) V."""
    names = "query", "key", "value"
    if len(args) > 3 or kwargs.keys() - {*names, "scale"}:
        return NotImplemented  # masks
    q, k, v = _named(names, args, kwargs)
    scale = kwargs.get("scale")
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return apply(torch.softmax, (scores, -1), {}) @ v if isinstance(scores, Jet) else torch.softmax(scores, -1) @ v


def _glu(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    x, dim = _named(("input", "dim"), args, kwargs)
    a, gate = x.chunk(2, -1 if dim is None else dim)
    return a * gate.sigmoid()


def _dropout(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    x, p, training = _named(("input", "p", "training"), args, kwargs)
    if training is not False and p != 0:
        raise BatchStatisticsError(
            f"the model calls {func.__name__} in training mode: a random function has no derivative. Call model.eval()"
        )
    return x


def _rrelu(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    x, lower, upper, training = _named(("input", "lower", "upper", "training"), args, kwargs)
    if training:
        return _dropout(func, (x, 1.0, True), {})
    slope = ((1 / 8 if lower is None else lower) + (1 / 3 if upper is None else upper)) / 2
    return _by_forward_mode(F.leaky_relu, (x, slope), {})


def _batch_norm(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    training = _named(("input", "mean", "var", "weight", "bias", "training"), args, kwargs)[5]
    if training:
        raise BatchStatisticsError(
            f"the model calls {func.__name__} with batch statistics: the value at one point depends on the others. "
            "Call model.eval()"
        )
    return NotImplemented


def _rules(rule: Rule, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


_RULES: dict[str, Rule] = (
    _rules(
        _linear,
        *("reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose"),
        *("swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "expand", "expand_as", "broadcast_to"),
        *("repeat", "repeat_interleave", "tile", "chunk", "split", "tensor_split", "split_with_sizes", "unbind"),
        *("getitem", "select", "narrow", "index_select", "gather", "take_along_dim", "sum", "mean", "cumsum", "neg"),
        *("negative", "clone", "contiguous", "to", "double", "float", "type_as", "cpu", "cuda", "flip", "roll"),
        *("diagonal", "trace", "tril", "triu", "diag_embed", "positive", "unfold", "atleast_1d", "atleast_2d"),
    )
    | _rules(_joins, "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack")
    | {"diff": _difference, "linear": _layer}
    | _rules(_sum, "add", "sub", "subtract", "rsub")
    | _rules(_mul, "mul", "multiply")
    | _rules(_bilinear, "matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "einsum", "tensordot", "kron")
    | _rules(_quotient, "div", "divide", "true_divide", "truediv")
    | _rules(_power, "pow")
    | _rules(_norm, "norm", "linalg_norm", "linalg_vector_norm")
    | {"square": _square_rule, "sqrt": _sqrt_rule, "dist": _distance, "std": _deviation}
    | {"layer_norm": _layer_norm, "rms_norm": _rms_norm, "group_norm": _group_norm, "glu": _glu}
    | _rules(_softmax, "softmax", "log_softmax", "logsumexp")
    | {"scaled_dot_product_attention": _attention}
    | _rules(_dropout, "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    | _rules(_dropout, "feature_dropout")
    | _rules(_rrelu, "rrelu")
    | _rules(_batch_norm, "batch_norm")
    | _rules(_gelu_rule, "gelu")
    | _rules(
        _by_forward_mode,
        *("softplus", "mish", "log_sigmoid", "logsigmoid", "tan", "atan", "arctan", "sinh", "cosh", "asinh", "acosh"),
        *("atanh", "asin", "acos", "log1p", "expm1", "exp2", "log2", "log10", "erfc", "lgamma", "digamma"),
        *("softsign", "tanhshrink", "elu", "celu", "selu", "leaky_relu", "abs", "absolute", "hardtanh", "relu6"),
        *("hardswish", "clamp", "clip", "softshrink", "hardshrink", "threshold", "logit"),
    )
    | {
        name: make(slopes)
        for make, slopes, *names in (
            *((_activation, _tanh, "tanh"), (_activation, _sigmoid, "sigmoid", "special_expit")),
            *((_activation, _silu, "silu"), (_activation, _sin, "sin"), (_activation, _cos, "cos")),
            *((_activation, _exp, "exp"), (_elementwise, _log, "log"), (_elementwise, _erf, "erf", "special_erf")),
            *((_elementwise, _rsqrt, "rsqrt"), (_elementwise, _relu, "relu")),
            *((_elementwise, _reciprocal, "reciprocal"), (_elementwise, _sinc, "sinc", "special_sinc")),
        )
        for name in names
    }
)

# What may return a view of its argument.
_VIEWS = frozenset(
    (
        *("reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose"),
        *("swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "expand", "expand_as", "broadcast_to"),
        *("chunk", "split", "tensor_split", "split_with_sizes", "unbind", "select", "narrow", "diagonal", "unfold"),
        *("contiguous", "to", "double", "float", "type_as", "positive", "atleast_1d", "atleast_2d", "real", "imag"),
    )
)

# What has no derivative, and is that of the value.
_WITHOUT = frozenset(
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isnan", "isinf", "isclose", "allclose", "equal", "all"),
        *("any", "argmax", "argmin", "argsort", "sign", "sgn", "floor", "ceil", "round", "trunc", "heaviside"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones"),
        *("new_empty", "new_full", "new_tensor", "detach", "size", "dim", "ndimension", "numel", "nelement", "stride"),
        *("is_floating_point", "is_complex", "is_contiguous", "element_size", "get_device", "bucketize", "logical_not"),
    )
)
_ATTRIBUTES = frozenset(
    ("dtype", "device", "layout", "requires_grad", "is_cuda", "is_cpu", "is_nested", "is_sparse", "is_quantized")
)
_REFUSED = {
    "setitem": "a tensor cannot hold derivatives. Build it with torch.cat, torch.stack or torch.where",
    **dict.fromkeys(("item", "tolist", "numpy", "array"), "a number has no derivative. Keep to torch operations"),
}
_KINKED = frozenset(
    (
        *("relu", "leaky_relu", "prelu", "rrelu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "threshold", "abs"),
        *("absolute", "clamp", "clip", "clamp_min", "clamp_max", "softshrink", "hardshrink", "maximum", "minimum"),
        *("max", "min", "amax", "amin", "max_pool1d", "max_pool2d", "sort", "topk"),
    )
)
_KINK = (
    "has a kink, at which its second derivative is no function: a Laplacian through it is that of the smooth pieces, "
    "zero for a network of linear layers. Use a smooth activation such as tanh, silu or gelu"
)
_BENT = frozenset(("elu", "celu", "selu", "softsign"))
_JUMP = (
    "has a second derivative that jumps: the derivative of a Laplacian by the parameters misses the jumps, and least "
    "squares through it stalls. Use a smooth activation such as tanh, silu or gelu"
)
_once = OnceLogger()

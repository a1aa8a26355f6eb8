"""The residuals of many fits as one function x [b n] ↦ r [b m], and their Jacobian."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.autograd import pull
from natgrad.accelerate.devices import in_transform
from natgrad.accelerate.temporaries import SMALL_PASSES, by_rows
from natgrad.log import OnceLogger, listed
from natgrad.residual_check import flat_activations, refuse_pairs

Unknowns: TypeAlias = Tensor | Mapping[str, Tensor]

_ROUNDING = 1e5  # in units of the machine epsilon: what two ways to compute the same may differ by


class Differentiation(Enum):
    """How J is computed."""

    COPIES = "a copy of the unknowns for each residual"
    EXAMPLES = "a call for each residual, with its row of args"
    GENERAL = "rows or columns"


@final
@dataclass
class Calls:
    """How often ``fun`` was called, and how often it may be."""

    most: int
    count: int = 0


@final
@dataclass
class _Evaluation:
    """The residuals at x, and their derivative as u ↦ Jᵀu."""

    x: Tensor
    r: Tensor  # [b m]
    leaf: Tensor  # all unknowns, or a copy of them for each residual
    end: Tensor  # what fun returned
    pull: Callable[[Tensor], Tensor]  # from a tensor like end to one like leaf

    @staticmethod
    def of(x: Tensor, leaf: Tensor, function: Callable[[Tensor], Tensor]) -> _Evaluation:
        if in_transform() or torch.is_inference_mode_enabled():  # where tensors have no graphs
            end, vjp, *_ = torch.func.vjp(function, leaf)
            return _Evaluation(x, end.detach().reshape(x.shape[0], -1), leaf, end, lambda u: vjp(u)[0])
        leaf = leaf.detach().requires_grad_()
        with torch.enable_grad():
            end = function(leaf)

        return _Evaluation(x, end.detach().reshape(x.shape[0], -1), leaf, end, lambda u: pull(end, leaf, u))

    @property
    def is_constant(self) -> bool:
        """Whether there is no path from the residuals to the unknowns; where there are no graphs, nothing shows it."""
        if in_transform() or torch.is_inference_mode_enabled():
            return False
        if not self.end.requires_grad:
            return True
        ones = torch.ones_like(self.end)
        return torch.autograd.grad(self.end, self.leaf, ones, retain_graph=True, allow_unused=True)[0] is None


@final
class FlatUnknowns:
    """A tensor, or tensors by name, of one fit or of b, as x [b n] and back; some of them may be fixed."""

    def __init__(self, like: Unknowns, batch: bool, fixed: Tensor | None) -> None:
        self.batch: bool = batch
        self.like = like
        tensors = dict(like) if isinstance(like, Mapping) else {"x": like}
        self._shapes = [p.shape[1 if batch else 0 :] for p in tensors.values()]
        self.sizes: dict[str, int] = {name: shape.numel() for name, shape in zip(tensors, self._shapes, strict=True)}
        self.start: Tensor = self.flatten(like)
        self.free: Tensor | None = (
            None if fixed is None else (~fixed).nonzero().squeeze(-1)
        )  # the indices of what is not fixed

    @property
    def free_size(self) -> int:
        """n, without the unknowns that are fixed."""
        return sum(self.sizes.values()) if self.free is None else len(self.free)

    def of(self, rows: Tensor) -> FlatUnknowns:
        """The unknowns of some of the fits."""
        some = copy.copy(self)
        some.start = self.start[rows]
        return some

    def flatten(self, x: Unknowns) -> Tensor:
        """[b n]."""
        tensors = list(x.values()) if isinstance(x, Mapping) else [x]
        if len(tensors) == 1:
            return tensors[0].reshape(tensors[0].shape[0] if self.batch else 1, -1)
        return torch.cat([p.reshape(p.shape[0] if self.batch else 1, -1) for p in tensors], 1)

    def unflatten(self, x: Tensor) -> Unknowns:
        """As ``x0`` was given, from x [b n]."""
        return self.named(x if self.batch else x.squeeze(0))

    def whole(self, x: Tensor) -> Tensor:
        """x with the unknowns that are fixed."""
        return x if self.free is None else self.start.index_copy(1, self.free, x)

    def select(self, t: Tensor) -> Tensor:
        """Of the last axis of t, the unknowns that are not fixed."""
        return t if self.free is None else t[..., self.free]

    def embed(self, t: Tensor) -> Tensor:
        """t, with zeros for the unknowns that are fixed."""
        if self.free is None:
            return t
        return t.new_zeros(*t.shape[:-1], sum(self.sizes.values())).index_copy(-1, self.free, t)

    def named(self, x: Tensor, *tail: int) -> Any:
        """The unknowns from x [*lead n *tail], as [*lead *shape *tail]."""
        at = x.ndim - 1 - len(tail)
        lead = x.shape[:at]
        if not isinstance(self.like, Mapping):
            return x if len(self._shapes[0]) == 1 else x.reshape((*lead, *self._shapes[0], *tail))
        tensors = zip(self.like, x.split(list(self.sizes.values()), at), self._shapes, strict=True)
        return {name: p.reshape((*lead, *shape, *tail)) for name, p, shape in tensors}


@final
class ResidualFunction:
    """``fun`` of one fit, or of b fits beside each other, with unknowns flattened to x [b n] and residuals to r [b m].

    The Jacobian [b m n] comes in the cheapest way that ``fun`` allows.

    - Where every residual is a function of the unknowns and of its own data alone, as in a curve fit, unknowns may be
      tensors that are broadcast against the data: residual i gets its own copy of the unknowns, and one backward pass
      of Σ r leaves row i of J at copy i.
    - Where tensors in ``args`` have one row for each residual, as the data of a network, and residual i needs row i
      alone, it is a function of the unknowns and of that row, and ``vmap`` over the rows has all gradients.
    - Else the rows come by backward passes, batched by ``vmap``, or, if there are many, the columns by forward passes.

    Whether ``fun`` is such a function, the first call tests (its values must not change, and a product Jᵀu must be that
    of an ordinary backward pass), and ``confirm`` tests it again at the solution.
    """

    def __init__(self, fun: Callable[..., Tensor], unknowns: FlatUnknowns, args: tuple[Any, ...], calls: Calls) -> None:
        self.args: tuple[Any, ...] = args
        self.batch: bool = unknowns.batch
        self.fun, self.unknowns = fun, unknowns
        self.shape: torch.Size | None = None  # of the residuals of one fit
        self._method: Differentiation | None = None  # not determined yet
        self._last: _Evaluation | None = None
        self.calls = calls

    def of(self, rows: Tensor) -> ResidualFunction:
        """The residuals of some of the fits."""
        some = copy.copy(self)
        some.args = tuple(a[rows] if isinstance(a, Tensor) else a for a in self.args)
        some.unknowns = self.unknowns.of(rows)
        some._last = None
        return some

    @property
    def left(self) -> int:
        """How often it may be called to evaluate a step: ``confirm`` needs the last call."""
        return self.calls.most - self.calls.count - (self._method is not Differentiation.GENERAL)

    def _call(self, unknowns: Any) -> Tensor:
        """What ``fun`` returns for all fits."""
        self.calls.count += 1
        return torch.vmap(self.fun)(unknowns, *self.args) if self.batch else self.fun(unknowns, *self.args)

    def __call__(self, x: Tensor) -> Tensor:
        """r [b m]."""
        self._last = self._evaluated(x)
        return self._last.r

    def _evaluated(self, x: Tensor) -> _Evaluation:
        """The residuals at x, as functions of the unknowns, or of copies of them."""
        whole = self.unknowns.whole(x)
        if self._method is Differentiation.COPIES:
            assert self.shape is not None
            lead, shape = whole.shape if self.batch else whole.shape[1:], self.shape
            copies = whole.view((*lead, *(1,) * len(shape))).expand((*lead, *shape))
            return _Evaluation.of(x, copies, lambda copies: self._call(self.unknowns.named(copies, *shape)))

        def function(leaf: Tensor) -> Tensor:
            inside = leaf.clone()  # into which fun may write
            end = self._call(self.unknowns.named(inside if self.batch else inside.squeeze(0)))
            if self.shape is None:
                self.shape = self._checked(end, x)
            return end

        is_first = self.shape is None
        try:
            evaluation = _Evaluation.of(x, whole, function)
        except RuntimeError as error:
            if not is_first:
                raise
            raise _explained(error) from error
        if is_first and self.left > 0:
            refuse_pairs(lambda: self._of_first(whole), evaluation.end.shape[int(self.batch) :])
        return evaluation

    def _checked(self, r: Any, x: Tensor) -> torch.Size:
        if not isinstance(r, Tensor):
            raise TypeError(f"fun must return a tensor of residuals, got {type(r).__name__}")
        if r.is_complex():
            raise TypeError(
                "fun returned complex residuals: return torch.view_as_real of them, so that the squares of real and "
                "imaginary parts are summed"
            )
        if r.dtype != x.dtype:
            raise TypeError(
                f"fun returned residuals of {r.dtype} for unknowns of {x.dtype}: give x0 and the data in one precision "
                "(float64 where 1e-8 is to be reached)"
            )
        if r.device != x.device:
            raise ValueError(f"fun returned residuals on {r.device} for unknowns on {x.device}: put both on one device")
        if r.numel() == 0:
            raise ValueError("fun returned no residuals: there is nothing to fit")
        return r.shape[1:] if self.batch else r.shape

    def _of_first(self, x: Tensor) -> Tensor:
        """The residuals of the first fit, with their graph."""
        self.calls.count += 1
        args = (a[0] if self.batch and isinstance(a, Tensor) else a for a in self.args)
        return self.fun(self.unknowns.named(x[0].detach().requires_grad_().clone()), *args)

    def jacobian(self, x: Tensor) -> Tensor:
        """J [b m n] at x."""
        return self._first(x) if self._method is None else self.unknowns.select(self._whole_jacobian(x))

    def _whole_jacobian(self, x: Tensor) -> Tensor:
        """With columns for the unknowns that are fixed."""
        if self._method is Differentiation.EXAMPLES:
            return self._by_examples(self.unknowns.whole(x))
        last = self._last
        if last is None or last.x is not x:
            last = self._evaluated(x)
        b, m = last.r.shape
        if self._method is Differentiation.COPIES:
            return last.pull(torch.ones_like(last.end)).reshape(b, -1, m).mT
        if by_rows(m, last.leaf.shape[1]) or self.left <= 0:
            return self._rows(last)
        if self.batch:
            return torch.vmap(self._columns)(last.leaf.detach(), *self.args)
        return self._columns(last.leaf.detach().squeeze(0), *self.args).unsqueeze(0)

    @property
    def _at_once(self) -> int:
        """How many passes stay in the cache together."""
        assert self.shape is not None
        return max(16, SMALL_PASSES // self.shape.numel())

    def _rows(self, at: _Evaluation) -> Tensor:
        """J [b m n] by backward passes."""
        b, m = at.r.shape
        ones = torch.eye(m, dtype=at.r.dtype, device=at.r.device).unsqueeze(1).expand(-1, b, -1)
        rows = torch.vmap(at.pull, chunk_size=self._at_once)
        return rows(ones.reshape(m, *at.end.shape)).transpose(0, 1)

    def _columns(self, x: Tensor, *args: Any) -> Tensor:
        """J [m n] by forward passes."""

        def column(v: Tensor) -> Tensor:
            self.calls.count += 1
            return torch.func.jvp(lambda x: self.one(x, *args), (x,), (v,))[1].detach()

        eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
        return torch.vmap(column, out_dims=1, chunk_size=self._at_once)(eye)

    def _first(self, x: Tensor) -> Tensor:
        """J in the first way that is right."""
        plain = self._last if self._last is not None and self._last.x is x else self._evaluated(x)
        J = None
        for method in (Differentiation.COPIES, Differentiation.EXAMPLES):
            if J is None and self.left >= 2:  # the last call is that of confirm
                J = self._tried(method, plain)
        if J is None:
            self._method, self._last = Differentiation.GENERAL, plain
            if plain.is_constant:  # J would be zero, and the fit would end where it starts
                raise ValueError(
                    "the residuals do not depend on the unknowns: what fun returns has no graph that leads to x; "
                    "compute it from x by torch operations, without .item(), float(), .detach(), torch.tensor, "
                    ".numpy() or no_grad"
                )
            J = self.jacobian(x)
        if not self.batch:
            self._say_unused(self.unknowns.whole(x), plain.r, J)
        return J

    def _tried(self, method: Differentiation, plain: _Evaluation) -> Tensor | None:
        """J by this method, if that is right."""
        self._method, self._last = method, None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                r = plain.r
                if method is Differentiation.COPIES:
                    self._last = self._evaluated(plain.x)
                    r = self._last.r
                J = self._whole_jacobian(plain.x)
                right = r.shape == plain.r.shape and J.shape[:-1] == r.shape and self._agrees(plain, r, J)
                return self.unknowns.select(J) if right else None
        except Exception:
            return None  # fun was not written for this, and may fail in any way

    def _say_unused(self, x: Tensor, r: Tensor, J: Tensor) -> None:
        """Name the unknowns with columns of zeros, which may be meant, or come from a ReLU, or .item() in ``fun``."""
        unused = (J[0] == 0).all(0)
        if not bool(unused.any()):
            return
        flat = listed(flat_activations(lambda: self._of_first(x)))
        if flat and bool(unused.all()) and bool((r != 0).any()):
            raise ValueError(
                f"the residuals do not depend on the unknowns at x0: {flat} returns one value for all that it gets, "
                "with the derivative zero; start elsewhere, or use an activation without a flat part"
            )
        tensors = self.unknowns.like.items() if isinstance(self.unknowns.like, Mapping) else [("x", self.unknowns.like)]
        names = [
            name + (f"[{', '.join(map(str, place))}]" if p.ndim else "")
            for name, p in tensors
            for place in product(*map(range, p.shape))
        ]
        missing = [name for name, is_unused in zip(names, unused.tolist(), strict=True) if is_unused]
        why = f"{flat} returns one value for all that it gets" if flat else ""
        # Once for what is written once, though a lambda in a loop is a new function each time
        OnceLogger.of(getattr(self.fun, "__code__", ResidualFunction)).log_once(
            logging.WARNING,
            "least_squares: %s not change the residuals: the derivative at x0 is exactly zero, %s",
            f"{listed(missing)} {'does' if len(missing) == 1 else 'do'}",
            why or "and stays so where fun reads an unknown by .item(), float() or .detach()",
        )

    def confirm(self, x: Tensor, r: Tensor, J: Tensor) -> bool:
        """Whether r and J are those of ``fun`` here; if not, they will come in the general way."""
        method, self._method = self._method, Differentiation.GENERAL
        if method is not Differentiation.GENERAL and self._agrees(self._evaluated(x), r, J):
            self._method = method
            return True
        return method is Differentiation.GENERAL

    def one(self, x: Tensor, *args: Any) -> Tensor:
        """r [m] of one fit, from all unknowns x [n]."""
        return self.fun(self.unknowns.named(x), *args).reshape(-1)

    def _by_examples(self, x: Tensor) -> Tensor:
        """Row i of J is the gradient of ``fun`` at row i of the arguments, which keep an axis of length one for it."""
        assert self.shape is not None
        m = self.shape.numel()
        by_row = [isinstance(a, Tensor) and a.ndim > 0 and len(a) == m for a in self.args]
        if self.batch or self.shape[:1] != (m,) or not any(by_row):
            raise ValueError("there is not one row for each residual")
        rows = [a.unsqueeze(1) if mapped else a for a, mapped in zip(self.args, by_row, strict=True)]
        dims = (None, *(0 if mapped else None for mapped in by_row))
        gradient = torch.func.grad(lambda x, *args: self.one(x, *args).sum())
        self.calls.count += 1
        return torch.vmap(gradient, in_dims=dims)(x.squeeze(0), *rows).detach().unsqueeze(0)

    def _agrees(self, plain: _Evaluation, r: Tensor, J: Tensor) -> bool:
        """Whether r is what ``fun`` returns, and Jᵀu that of an ordinary backward pass, for a u without symmetries.

        Up to rounding: of r, that of the terms of which residuals are differences, |J||x| or more.
        """
        b, m, _ = J.shape
        u = torch.arange(1.0, m + 1, dtype=r.dtype, device=r.device).square_().sin_()
        pulled = self.unknowns.select(plain.pull(u.expand(b, -1).reshape(plain.end.shape)))
        rounding, sizes = _ROUNDING * torch.finfo(r.dtype).eps, J.abs()
        if not torch.equal(plain.r, r):
            terms = (sizes * plain.x.abs().unsqueeze(-2)).sum(-1) + r.abs()
            if not bool(((plain.r - r).abs() <= rounding * terms).all()):
                return False
        return bool(((pulled - u @ J).abs() <= rounding * sizes.sum(-2)).all())


def _explained(error: RuntimeError) -> Exception:
    """An error of torch in words of this library, if it is about what ``fun`` must not do."""
    text = str(error)
    if "numpy()" in text or "data pointer of Tensor that doesn't have storage" in text:
        return TypeError(
            "fun must use torch functions and tensors, and a NumPy function or array meets the unknowns in it: write "
            "torch.exp for np.exp, and turn arrays into tensors by torch.as_tensor"
        )
    if text.startswith("vmap:"):
        return TypeError(
            "with batch=True fun is mapped over all fits at once, and must not ask for values of its tensors (if, "
            f"while, .item(), float(), indices by a mask): write it with torch.where; torch says: {text.split('. ')[0]}"
        )
    return error

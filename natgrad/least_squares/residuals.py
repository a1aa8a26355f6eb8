"""The residuals of many fits as one function x [b n] ↦ r [b m], and their Jacobian."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from itertools import product
from types import FunctionType
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from natgrad.accelerate.temporaries import SMALL_PASSES, by_rows
from natgrad.log import OnceLogger, listed
from natgrad.residual_check import flat_activations, refuse_pairs

Unknowns: TypeAlias = Tensor | Mapping[str, Tensor]

_FEW_UNKNOWNS = 16  # for complex steps
_STEP = 3  # of a complex step in units of the unknown at the start, as a power of the machine epsilon
_WAYS: WeakKeyDictionary[Any, dict[Any, Differentiation]] = WeakKeyDictionary()  # of functions that were seen before
_CURVED = 1e-2  # what a short step may differ by from its linear prediction
_NOISE = 8  # in units of the machine epsilon: what a residual may be off by rounding
_ROUNDING = 1e5  # in units of the machine epsilon: what two ways to compute the same may differ by


class Differentiation(Enum):
    """How J is computed."""

    COMPLEX = "complex steps, all in one call"
    SINGLE = "complex steps, a call for each"
    COPIES = "a copy of the unknowns for each residual"
    EXAMPLES = "a call for each residual, with its row of args"
    GENERAL = "rows or columns"


@final
class ResidualFunction:
    """``fun`` of one fit, or of b fits beside each other, with unknowns flattened to x [b n] and residuals to r [b m].

    The Jacobian [b m n] comes in the cheapest way that ``fun`` allows.

    - Where every residual is a function of the unknowns and of its own data alone, as in a curve fit, unknowns may be
      tensors that are broadcast against the data. With few unknowns, column j of J is then Im f(x + ih e_j)/h, exact
      for analytic functions because nothing is subtracted (Squire and Trapp 1998). With more, or in a batch, residual i
      gets its own copy of the unknowns, and one backward pass of Σ r leaves row i of J at copy i.
    - Other analytic functions of few unknowns are called with one complex step after the other.
    - Where tensors in ``args`` have one row for each residual, as the data of a network, and residual i needs row i
      alone, it is a function of the unknowns and of that row, and ``vmap`` over the rows has all gradients.
    - Else the rows come by backward passes, batched by ``vmap``, or, if there are many, the columns by forward passes.

    Whether ``fun`` is such a function, the first call tests (its values must not change, and a product Jᵀu must be that
    of an ordinary backward pass), and ``confirm`` tests it again at the solution.
    """

    def __init__(self, fun: Callable[..., Tensor], like: Unknowns, args: tuple[Any, ...], batch: bool) -> None:
        self.fun, self.args, self.batch, self.like = fun, args, batch, like
        skip = 1 if batch else 0
        tensors = list(like.values()) if isinstance(like, Mapping) else [like]
        self._shapes = [p.shape[skip:] for p in tensors]
        self._sizes = [shape.numel() for shape in self._shapes]
        self.shape: torch.Size | None = None  # of the residuals of one fit
        self._method: Differentiation | None = None  # not known yet
        self._last: tuple[Tensor, Tensor, Tensor] | None = None  # x, its residuals and its copies
        self._steps: tuple[Tensor, Tensor] | None = None  # the lengths h of complex steps [n 1], and diag(h)

    def of(self, rows: Tensor) -> ResidualFunction:
        """Those of some of the fits."""
        args = tuple(a[rows] if isinstance(a, Tensor) else a for a in self.args)
        some = ResidualFunction(self.fun, self.like, args, self.batch)
        some.shape, some._method = self.shape, self._method
        return some

    @property
    def n(self) -> int:
        return sum(self._sizes)

    def flatten(self, x: Unknowns) -> Tensor:
        """[b n]."""
        tensors = list(x.values()) if isinstance(x, Mapping) else [x]
        if len(tensors) == 1:
            return tensors[0].reshape(tensors[0].shape[0] if self.batch else 1, -1)
        return torch.cat([p.reshape(p.shape[0] if self.batch else 1, -1) for p in tensors], 1)

    def unflatten(self, x: Tensor) -> Unknowns:
        """As ``x0`` was given, from x [b n]."""
        return self._named(x if self.batch else x.squeeze(0))

    def _named(self, x: Tensor, *tail: int) -> Any:
        """The unknowns from x [*lead n *tail], as [*lead *shape *tail]."""
        at = x.ndim - 1 - len(tail)
        lead = x.shape[:at]
        if not isinstance(self.like, Mapping):
            return x if len(self._shapes[0]) == 1 else x.reshape((*lead, *self._shapes[0], *tail))
        tensors = zip(self.like, x.split(self._sizes, at), self._shapes, strict=True)
        return {name: p.reshape((*lead, *shape, *tail)) for name, p, shape in tensors}

    def _call(self, unknowns: Any) -> Tensor:
        """What ``fun`` returns for all fits."""
        return torch.vmap(self.fun)(unknowns, *self.args) if self.batch else self.fun(unknowns, *self.args)

    def __call__(self, x: Tensor) -> Tensor:
        """r [b m]."""
        if self._method is Differentiation.COPIES:
            return self._with_copies(x)[0].detach().reshape(x.shape[0], -1)
        unknowns = self._named(x if self.batch else x.squeeze(0))
        if self.shape is None:
            try:
                r = self._call(unknowns)
            except RuntimeError as error:
                raise _explained(error) from error
            self.shape = self._checked(r, x)
            refuse_pairs(lambda: self._of_first(x), self.shape)
        else:
            r = self._call(unknowns)
        return r.detach().reshape(x.shape[0], -1)

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
        args = (a[0] if self.batch and isinstance(a, Tensor) else a for a in self.args)
        return self.fun(self._named(x[0].detach().requires_grad_().clone()), *args)

    def jacobian(self, x: Tensor, r: Tensor) -> Tensor:
        """J [b m n] at x, where the residuals are r."""
        if self._method is None:
            return self._first(x, r)
        if self._method is Differentiation.COMPLEX:
            return self._by_complex_steps(x)
        if self._method is Differentiation.SINGLE:
            return self._by_single_steps(x)
        if self._method is Differentiation.COPIES:
            return self._by_copies(x)
        if self._method is Differentiation.EXAMPLES:
            return self._by_examples(x)
        differentiate = self._rows if by_rows(r.shape[-1], self.n) else self._columns
        if self.batch:
            return torch.vmap(differentiate)(x, *self.args).detach()
        return differentiate(x.squeeze(0), *self.args).detach().unsqueeze(0)

    @property
    def _at_once(self) -> int:
        """How many passes stay in the cache together."""
        assert self.shape is not None
        return max(16, SMALL_PASSES // self.shape.numel())

    def _rows(self, x: Tensor, *args: Any) -> Tensor:
        """J [m n] by backward passes."""
        return torch.func.jacrev(self.one, chunk_size=self._at_once)(x, *args)

    def _columns(self, x: Tensor, *args: Any) -> Tensor:
        """J [m n] by forward passes."""

        def column(v: Tensor) -> Tensor:
            return torch.func.jvp(lambda x: self.one(x, *args), (x,), (v,))[1]

        eye = torch.eye(self.n, dtype=x.dtype, device=x.device)
        return torch.vmap(column, out_dims=1, chunk_size=self._at_once)(eye)

    def _first(self, x: Tensor, r: Tensor) -> Tensor:
        """J in the first way that is right. What was found out about ``fun`` in an earlier call is not tested twice."""
        assert self.shape is not None
        memory = _WAYS.get(self.fun, {}) if _can_be_known(self.fun) else {}
        key = self.batch, tuple(self._shapes), self.shape, x.dtype
        if key in memory:
            self._method = memory[key]
            try:
                return self.jacobian(x, r)
            except Exception:  # other arguments may need another way
                if self._method is Differentiation.GENERAL:
                    raise
        few = not self.batch and self.n <= _FEW_UNKNOWNS and self.n * self.shape.numel() <= 2 * SMALL_PASSES
        for method in list(Differentiation)[0 if few else 2 : -1]:
            self._method = method
            J = self._tried(x, r)
            if J is not None:
                break
        else:
            self._method = method = Differentiation.GENERAL
            self._refuse_constant(x)
            J = self.jacobian(x, r)
        if not self.batch:
            self._say_unused(x, r, J)
        if _can_be_known(self.fun) and bool(r.isfinite().all()):
            _WAYS[self.fun] = {**memory, key: method}
        return J

    def _tried(self, x: Tensor, r: Tensor) -> Tensor | None:
        """J in the way that is set, if that is right."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                J = self.jacobian(x, r)
            return J if J.shape[:-1] == r.shape and self._agrees(x, r, J) else None
        except Exception:
            return None  # fun was not written for this, and may fail in any way

    def _refuse_constant(self, x: Tensor) -> None:
        """Residuals without a graph to the unknowns have the Jacobian zero, and a fit would end where it starts."""
        if torch.is_inference_mode_enabled():
            return  # there are no graphs
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                leaf = x.detach().clone().requires_grad_()
                inside = leaf.clone()  # into which fun may write
                r = self._call(self._named(inside if self.batch else inside.squeeze(0)))
                used = r.requires_grad and torch.autograd.grad(r.sum(), leaf, allow_unused=True)[0] is not None
        except RuntimeError as error:
            explained = _explained(error)
            if explained is not error:
                raise explained from error
            return  # what else fails here, may work in the way in which J is computed, or fails there again
        if not used:
            raise ValueError(
                "the residuals do not depend on the unknowns: what fun returns has no graph that leads to x; compute "
                "it from x by torch operations, without .item(), float(), .detach(), torch.tensor, .numpy() or no_grad"
            )

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
        tensors = self.like.items() if isinstance(self.like, Mapping) else [("x", self.like)]
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
        """Whether r and J are those of ``fun`` here; if not, they will come in the general way.

        A short step d is enough to see that: f(x + d) − r is nearly J d, residual by residual.
        """
        if self._method is Differentiation.GENERAL or self._predicts(x, r, J) or self._agrees(x, r, J):
            return True
        self._method = Differentiation.GENERAL
        if _can_be_known(self.fun):
            _WAYS.pop(self.fun, None)
        return False

    def _predicts(self, x: Tensor, r: Tensor, J: Tensor) -> bool:
        eps = torch.finfo(x.dtype).eps
        d = x * x.new_tensor([eps**0.4 * math.sin(k * k) for k in range(1, x.shape[-1] + 1)])
        moved = x + d
        true = self._call(self._named(moved if self.batch else moved.squeeze(0))).detach().view_as(r)
        off = (true - r - (J @ d.unsqueeze(-1)).squeeze(-1)).abs()
        terms = (J.abs() @ x.abs().unsqueeze(-1)).squeeze(-1)
        return bool((off <= _CURVED * eps**0.4 * terms + _NOISE * eps * r.abs()).all())

    def one(self, x: Tensor, *args: Any) -> Tensor:
        """r [m] of one fit, from x [n]."""
        return self.fun(self._named(x), *args).reshape(-1)

    def _with_copies(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """r, with its graph, and the unknowns [*shape *residuals] that it comes from: one copy for each residual."""
        if self._last is not None and self._last[0] is x:
            return self._last[1:]
        assert self.shape is not None
        lead = x.shape if self.batch else x.shape[1:]
        copies = x.view((*lead, *(1,) * len(self.shape))).expand((*lead, *self.shape)).requires_grad_()
        with torch.enable_grad():
            r = self._call(self._named(copies, *self.shape))
        self._last = x, r, copies
        return r, copies

    def _by_complex_steps(self, x: Tensor) -> Tensor:
        h, steps = self._complex_steps(x)
        n, *tail = steps.shape
        points = torch.complex(x.view(n, *(1,) * len(tail)), steps)  # [unknown, step, *residuals]
        columns = self._call(self._named(points, *tail)).detach().imag.reshape(n, -1)
        return (columns / h).mT.unsqueeze(0)

    def _by_single_steps(self, x: Tensor) -> Tensor:
        h, steps = self._complex_steps(x)
        points = torch.complex(x.expand(self.n, -1), steps.view(self.n, -1))  # [step, unknown]
        columns = [self._call(self._named(point)).detach().imag.reshape(-1) for point in points.unbind(0)]
        return (torch.stack(columns) / h).mT.unsqueeze(0)

    def _complex_steps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """h [n 1], from the size of the unknowns at the start, and diag(h) [n n *1]."""
        if self._steps is None:
            assert self.shape is not None
            h = torch.finfo(x.dtype).eps ** _STEP * torch.where(x != 0, x.abs(), 1.0)
            self._steps = h.mT, h[0].diag().view(self.n, self.n, *(1,) * len(self.shape))
        return self._steps

    def _by_copies(self, x: Tensor) -> Tensor:
        r, copies = self._with_copies(x)
        self._last = None  # the graph is used up
        (J,) = torch.autograd.grad(r, copies, torch.ones_like(r), materialize_grads=True)
        return J.reshape(*x.shape, -1).mT

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
        return torch.vmap(gradient, in_dims=dims)(x.squeeze(0), *rows).detach().unsqueeze(0)

    def _agrees(self, x: Tensor, r: Tensor, J: Tensor) -> bool:
        """Whether r is what ``fun`` returns, and Jᵀu that of an ordinary backward pass, for a u without symmetries.

        Up to rounding: of r, that of the terms of which residuals are differences, |J||x| or more.
        """
        b, m, _ = J.shape
        u = torch.arange(1.0, b * m + 1, dtype=x.dtype, device=x.device).square_().sin_().view(b, m)
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            true = self._call(self._named(leaf if self.batch else leaf.squeeze(0)))
        (pulled,) = torch.autograd.grad(true, leaf, u.view_as(true), materialize_grads=True)
        rounding, sizes = _ROUNDING * torch.finfo(x.dtype).eps, J.abs()
        terms = (sizes @ x.abs().unsqueeze(-1)).squeeze(-1) + r.abs()
        same = (true.detach().reshape(b, m) - r).abs() <= rounding * terms
        off = (pulled - (u.unsqueeze(-2) @ J).squeeze(-2)).abs()
        return bool(same.all()) and bool((off <= rounding * (u.abs().unsqueeze(-2) @ sizes).squeeze(-2)).all())


def _can_be_known(fun: Any) -> bool:
    """Whether it can be a key of a weak dictionary; a bound method dies with the call."""
    return isinstance(fun, FunctionType)


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

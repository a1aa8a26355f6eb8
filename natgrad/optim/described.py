"""What a metric or a solver is, in words that are the same in every process: for checkpoints, and for messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from numbers import Real
from typing import Any

from torch import Tensor

from natgrad.operators.newton import Newton
from natgrad.optim.distributed import Divided
from natgrad.output.fisher import Fisher
from natgrad.output.metric import OutputMetric, Sampled
from natgrad.output.sobolev import Sobolev
from natgrad.solve import Solver


def metric_in_words(metric: OutputMetric) -> str:
    """Which metric it is; how many samples estimate it does not matter.

    >>> import natgrad as ng
    >>> metric_in_words(ng.Fisher(ng.Categorical(), samples=1, reduction="mean"))
    "Fisher(family=Categorical(), reduction='mean')"
    """
    return in_words(_exact(metric))


def solver_in_words(solver: Solver) -> str:
    """Which inverse it makes; who makes it, and how fast, does not matter.

    >>> import natgrad as ng
    >>> solver_in_words(ng.Factored(ng.Newton()))
    'Factored()'
    """
    return in_words(solver.solver if isinstance(solver, Divided) else solver)


def in_words(value: Any) -> str:
    """As ``repr`` of a dataclass, without what has its default, and without addresses, or tensors but for numbers.

    A default is left out so that one that is added later does not make another thing of what was saved before.
    """
    if is_dataclass(value) and not isinstance(value, type):
        parts = [(f.name, in_words(getattr(value, f.name))) for f in fields(value) if _tells(f, value)]
        return f"{type(value).__name__}({', '.join(f'{name}={words}' for name, words in parts)})"
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0):
        number = float(value)
        return repr(int(number)) if number.is_integer() else repr(number)  # 1 and 1.0 are the same
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {in_words(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(in_words, value))}]"
    return "…" if callable(value) else type(value).__name__


def _tells(field: Field[Any], value: Any) -> bool:
    """Whether this field of a dataclass says something about it."""
    own = getattr(value, field.name)
    if isinstance(own, Newton):
        return False
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is MISSING or in_words(own) != in_words(default)


def _exact(metric: OutputMetric) -> OutputMetric:
    """The metric that a sampled one is an estimate of."""
    match metric:
        case Sampled():
            return _exact(metric.base)
        case Fisher():
            return replace(metric, samples=None)
        case Sobolev():
            return replace(metric, base=_exact(metric.base))
        case _:
            return metric

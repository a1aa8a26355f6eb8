"""What becomes of every parameter: the metric moves it, AdamW steps it, or it rests."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, final

from torch import Tensor, nn

from natgrad.model import Model

_log = logging.getLogger("natgrad")


class ParameterStatus(Enum):
    """What moves a parameter, and why; docs/architecture.md has the table."""

    METRIC = "the metric moves it"
    ADAMW = "AdamW steps it, by its shape, its module or its group"
    RULELESS = "AdamW steps it, as the first pass that was estimated shows no layer rule for it"
    UNSEEN = "it rests: the outputs of no estimate so far depend on it"
    PENDING = "it rests: it has a gradient, and the metric is due in every step until an estimate has seen it"
    OUTSIDE = "the loss reaches it, but not through the outputs: AdamW steps it if it may, else it rests"


@final
class ParameterTable:
    """The status of every parameter, by name, and the sets of names that a step asks for.

    ``by_adamw``: those that AdamW steps from the beginning. ``backups``: those that it steps if the metric does not see
    them, and, where a metric needs layer rules (``ruled``), if no rule covers them.

    >>> table = ParameterTable(["weight", "gain"], by_adamw=["gain"], backups=["weight"], ruled=True)
    >>> table.put(ParameterStatus.OUTSIDE, ["weight"])
    >>> sorted(table.adamw), sorted(table.unseen)
    (['gain', 'weight'], ['weight'])
    >>> table.see([])
    >>> table.status["weight"].name
    'METRIC'
    """

    def __init__(self, names: Iterable[str], *, by_adamw: Iterable[str], backups: Iterable[str], ruled: bool) -> None:
        self.backups: frozenset[str] = frozenset(backups)
        self._by_adamw = frozenset(by_adamw)
        self.ruleless_fallback: frozenset[str] = self.backups if ruled else frozenset()
        self.status: dict[str, ParameterStatus] = dict.fromkeys(names, ParameterStatus.METRIC)
        self.reset({})

    def reset(self, names: Mapping[ParameterStatus, Iterable[str]]) -> None:
        """The statuses of the beginning, but for these; a later one takes the place of an earlier."""
        self.status = {
            name: ParameterStatus.ADAMW if name in self._by_adamw else ParameterStatus.METRIC for name in self.status
        }
        for status, group in names.items():
            self.status.update(dict.fromkeys(group, status))
        self._collect()

    def put(self, status: ParameterStatus, names: Iterable[str]) -> None:
        """Give the parameters this status."""
        if fresh := dict.fromkeys(names, status):
            self.status.update(fresh)
            self._collect()

    def see(self, unseen: Iterable[str]) -> None:
        """Every estimate so far has seen all parameters of the metric but these."""
        now = frozenset(unseen) - self.without_metric
        if now == self.unseen:
            return
        self.status.update(dict.fromkeys(self.unseen - now, ParameterStatus.METRIC))
        self.status.update(dict.fromkeys(now - self.unseen, ParameterStatus.UNSEEN))
        self._collect()

    def _collect(self) -> None:
        names = {status: frozenset(n for n, its in self.status.items() if its is status) for status in ParameterStatus}
        self.ruleless: frozenset[str] = names[ParameterStatus.RULELESS]
        self.pending: frozenset[str] = names[ParameterStatus.PENDING]
        self.outside: frozenset[str] = names[ParameterStatus.OUTSIDE]
        self.unseen: frozenset[str] = names[ParameterStatus.UNSEEN] | self.pending | self.outside
        self.without_metric: frozenset[str] = names[ParameterStatus.ADAMW] | self.ruleless  # they are not in its model
        self.adamw: frozenset[str] = self.without_metric | (self.outside & self.backups)


# What AdamW steps from the beginning.


def without_metric(
    model: Model, groups: Iterable[Mapping[str, Any]], adamw: bool, *, of_gradients: bool, polar: bool
) -> tuple[list[dict[str, Any]], frozenset[str], frozenset[str]]:
    """The parameter groups without their "fallback", the names of the parameters that AdamW steps, and of those that it
    would step if the metric did not see them, or no layer rule covered them.

    A group that says "adamw" gives it all of its parameters, one that says None gives it none. Of the others, if
    ``adamw`` is the fallback of the optimizer, it has those with fewer than two axes or no entry, and the weights of
    embeddings. ``of_gradients``: the metric sees gradients alone, and ``polar``: the steps are polar factors. In both
    cases it also has parameters with three axes outside of ``nn.Conv1d``: they may be stacks of matrices [e i o], as
    those of experts. With polar factors it also has matrices with one row or one column, if there are others: they are
    vectors, the polar factor of a vector is its direction, and a step of one length never comes to rest.
    """
    modules = [] if model.module is None else list(model.module.modules())
    embeddings, kernels = embeddings_in(modules), kernels_in(modules)
    names = {id(p): name for name, p in model.params.items()}
    chosen, backups, vectors = set[str](), set[str](), set[str]()
    plain: list[dict[str, Any]] = []
    for group in groups:
        all_of_it = "fallback" in group
        if all_of_it:
            _check_group(group["fallback"])
        if group["fallback"] == "adamw" if all_of_it else adamw:
            no_matrix = {id(p) for p in group["params"] if p.ndim < 2 or not p.numel()} | embeddings
            stacks = [p for p in group["params"] if (of_gradients or polar) and p.ndim == 3 and id(p) not in kernels]
            no_matrix |= {id(p) for p in stacks}
            if stacks and not all_of_it:
                _log.info(
                    "%s: three axes outside of nn.Conv1d, maybe a stack of matrices. AdamW steps it; a group with "
                    '"fallback": None takes it for a kernel',
                    ", ".join(names[id(p)] for p in stacks),
                )
            backups |= {names[id(p)] for p in group["params"]}
            chosen |= {names[id(p)] for p in group["params"] if all_of_it or id(p) in no_matrix}
            vectors |= {names[id(p)] for p in group["params"] if polar and p.ndim > 1 and p.numel() and _is_vector(p)}
        plain.append({key: value for key, value in group.items() if key != "fallback"})
    if len(chosen | vectors) < len(model.params):
        chosen |= vectors
    if len(chosen) == len(model.params):
        raise ValueError(
            'fallback="adamw" leaves no parameter for the metric: use torch.optim.AdamW, or give groups with '
            '"fallback": None'
        )
    return plain, frozenset(chosen), frozenset(backups - chosen)


def _check_group(fallback: object) -> None:
    """Refuse what is no fallback of a group: a structure is that of the whole optimizer."""
    if fallback is not None and fallback != "adamw":
        raise ValueError(
            f'"fallback" of a parameter group is "adamw" or None, the metric, got {fallback!r}: a structure for '
            "parameters without a layer rule is for all groups, fallback= of the optimizer or Kronecker(fallback=…)"
        )


def _is_vector(p: Tensor) -> bool:
    """Whether p [o *i] is a matrix with one row or one column."""
    return min(len(p), p.numel() // len(p)) == 1


def embeddings_in(modules: Iterable[nn.Module]) -> set[int]:
    """The weights of embeddings."""
    return {id(m.weight) for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def kernels_in(modules: Iterable[nn.Module]) -> set[int]:
    """The parameters of convolutions whose kernels have three axes, also those that a kernel is made from."""
    return {id(p) for m in modules if isinstance(m, nn.Conv1d | nn.ConvTranspose1d) for p in m.parameters()}

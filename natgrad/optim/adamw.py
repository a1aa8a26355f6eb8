"""AdamW for parameters that no metric suits (embeddings, gains, biases, heads), inside the same optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.accelerate import fused
from natgrad.errors import IncompatibleError
from natgrad.model import Model, check_slots
from natgrad.structures.base import Structure
from natgrad.structures.diagonal import Diagonal
from natgrad.structures.layered import Layered
from natgrad.structures.refresh import Refresh

Fallback: TypeAlias = Structure | Literal["adamw"] | None
Members: TypeAlias = Sequence[Sequence[tuple[str, Tensor]]]  # names and parameters of every group

_log = logging.getLogger("natgrad")
_BETAS, _EPSILON = (0.9, 0.95), 1e-8


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
    embeddings, kernels = _embeddings(model), _kernels(model)
    names = {id(p): name for name, p in model.params.items()}
    chosen, backed, vectors = set[str](), set[str](), set[str]()
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
            backed |= {names[id(p)] for p in group["params"]}
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
    return plain, frozenset(chosen), frozenset(backed - chosen)


def with_fallback(structure: Structure, fallback: Fallback) -> Structure:
    """The structure, with the ``fallback`` of the optimizer for the parameters without a layer rule if it is one."""
    if fallback is None or fallback == "adamw":
        return structure
    if isinstance(fallback, type) and issubclass(fallback, Structure):
        check_slots(fallback=(fallback, Structure))
    if not isinstance(fallback, Structure):
        raise ValueError(
            'fallback= is "adamw", the structure of parameters without a layer rule, such as Diagonal(), or '
            f"None, got {fallback!r}"
        )
    inner = structure.structure if isinstance(structure, Refresh) else structure
    if not isinstance(inner, Layered):
        raise IncompatibleError(
            f"fallback={fallback!r} is for parameters without a layer rule, and {inner!r} is one structure for all "
            'parameters: use Kronecker or EigenKronecker, or fallback="adamw"'
        )
    if inner.fallback not in (Diagonal(), fallback):
        raise ValueError(f"fallback={fallback!r}, and {inner!r} has another one: leave one of them out")
    inner = replace(inner, fallback=fallback)
    return replace(structure, structure=inner) if isinstance(structure, Refresh) else inner


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


def _embeddings(model: Model) -> set[int]:
    modules = () if model.module is None else model.module.modules()
    return {id(m.weight) for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def _kernels(model: Model) -> set[int]:
    """The parameters of convolutions whose kernels have three axes, also those that a kernel is made from."""
    modules = () if model.module is None else model.module.modules()
    return {id(p) for m in modules if isinstance(m, nn.Conv1d | nn.ConvTranspose1d) for p in m.parameters()}


@final
class AdamWUpdate:
    """One step of AdamW (Loshchilov and Hutter 2019), equal to that of ``torch.optim.AdamW``, by its fused kernel.

        m ← β₁m + (1 − β₁)ω,  s ← β₂s + (1 − β₂)ω²,  θ ← (1 − lr·wd)θ − lr·m̂/(√ŝ + ε)

    with m̂ = m/(1 − β₁ᵗ), ŝ = s/(1 − β₂ᵗ), β = (0.9, 0.95) and ε = 10⁻⁸. m, s and t lie in the state of every parameter
    under the names that torch gives them, t as a tensor on the device, so that the step can be captured. A parameter
    without a gradient is left alone.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], members: Members, state: MutableMapping[Tensor, Any]
    ) -> None:
        self._groups, self._members, self._state = groups, members, state

    def gradients(self, grads: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """Those of its parameters among the gradients, in the order of the groups, and whether none is missing."""
        names = [name for pairs in self._members for name, _ in pairs]
        mine = {name: grads[name] for name in names if name in grads}
        return mine, len(mine) == len(names)

    def step(self, gradients: Mapping[str, Tensor], rates: Sequence[float | Tensor], gate: Tensor | None) -> None:
        """Move the parameters that have gradients, each group with its rate; nothing where the gate is closed."""
        for group, of_group, rate in zip(self._groups, self._members, rates, strict=True):
            moving = [(name, p) for name, p in of_group if name in gradients]
            if not moving:
                continue
            params = [p for _, p in moving]
            states = [self._state_of(p) for p in params]
            fused.adamw_(
                params,
                [gradients[name] for name, _ in moving],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                rate=rate,
                betas=_BETAS,
                epsilon=_EPSILON,
                weight_decay=group["weight_decay"],
                gate=gate,
            )

    def _state_of(self, p: Tensor) -> Any:
        begin_moments(self._state[p], p)
        return self._state[p]


def begin_moments(state: MutableMapping[str, Any], p: Tensor) -> None:
    """t = 0, m = 0 and s = 0 of a parameter that has none."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, requires_grad=False) for _ in range(2))

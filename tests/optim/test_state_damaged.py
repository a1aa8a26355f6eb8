"""A state that is damaged is refused with what is wrong with it, and nothing of it is loaded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.errors import NonFiniteError
from tests.optim.states import MAKES, Make, alike, state_of

Damage = Callable[[dict[str, Any]], object]


def _refused(make: Make, damage: Damage, error: type[Exception], match: str) -> None:
    _, state = state_of(make)
    damage(state)
    opt, before = state_of(make, seed=1, steps=1)
    with pytest.raises(error, match=match):
        opt.load_state_dict(state)
    assert alike(opt.state_dict(), before)


def _entry(*path: Any, value: Any) -> Damage:
    """Put a value at this place, or take what is there away."""

    def damage(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        if value is None:
            del state[path[-1]]
        else:
            state[path[-1]] = value

    return damage


def _operator(key: str, value: Any) -> Damage:
    return _entry("natgrad", "operator", key, value=value)


def _inverse(key: str, value: Any) -> Damage:
    return _entry("natgrad", "inverse", key, value=value)


def _poison(what: str, key: str, number: float) -> Damage:
    return lambda state: state["natgrad"][what][key].view(-1)[0].fill_(number)


def _row(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "no_S": ("kfac", _operator("hidden.weight/S", None), "hidden.weight/S of the metric is missing"),
    "no_A": ("kfac", _operator("hidden.weight/A", None), "hidden.weight/A of the metric is missing"),
    "no_D": ("ekfac", _operator("last.weight/D", None), "last.weight/D of the metric is missing"),
    "no_Q": ("ekfac", _operator("last.weight/Q", None), "last.weight/Q of the metric is missing"),
    "no_P": ("ekfac", _operator("last.weight/P", None), "last.weight/P of the metric is missing"),
    "other_S": (
        "kfac",
        _operator("hidden.weight/S", _row(1, 3, 3)),
        r"hidden.weight/S of the metric in the state has the shape \[1, 3, 3\], here it is \[1, 4, 4\]",
    ),
    "flat_A": ("ekfac", _operator("hidden.weight/A", _row(4)), r"hidden.weight/A .*shape \[4\], here .*\[1, 4, 4\]"),
    "other_D": ("ekfac", _operator("hidden.weight/D", _row(1, 1, 1)), r"hidden.weight/D .*\[1, 1, 1\].*\[1, 4, 4\]"),
    "other_Q": ("ekfac", _operator("last.weight/Q", _row(1, 4, 4)), r"last.weight/Q .*\[1, 4, 4\].*\[1, 2, 2\]"),
    "strange": ("kfac", _operator("nobody/S", _row(1)), "has nobody/S, for which there is no layer"),
    "no_rest": ("kfac", _operator("fallback/values", None), "the factors of mix are missing in the metric"),
    "other_rest": ("kfac", _operator("fallback/values", _row(3)), r"fallback/values .*shape \[3\], here it is \[16\]"),
    "other_rest_block": ("blocks", _operator("fallback/mix", _row(3, 3)), r"fallback/mix .*\[3, 3\].*\[16, 16\]"),
    "no_matrix": (
        "dense",
        lambda s: s["natgrad"]["operator"].update(x=s["natgrad"]["operator"].pop("matrix")),
        "matrix of the metric is missing",
    ),
    "other_matrix": ("dense", _operator("matrix", _row(3, 3)), r"matrix of the metric .*\[3, 3\].*\[42, 42\]"),
    "other_diagonal": ("diagonal", _operator("values", _row(3)), r"values of the metric .*\[3\].*\[42\]"),
    "no_block": ("block_dense", _operator("mix", None), "the metric in the state has 2 blocks, here it has 3"),
    "other_block": ("block_dense", _operator("mix", _row(3, 3)), r"mix of the metric .*\[3, 3\].*\[16, 16\]"),
    "no_floor": ("low_rank", _operator("floor", None), "floor of the metric is missing"),
    "other_floor": ("low_rank", _operator("floor", _row(1)), r"floor of the metric .*\[1\].*\[42\]"),
    "no_rows": ("kernel", _operator("last.weight/g", None), "last.weight/g of the metric is missing"),
    "other_rows": (
        "kernel",
        _operator("last.weight/a", _row(5, 1, 1, 5)),
        r"last.weight/a of .*\[5, 1, 1, 5\].*\[6, 1,",
    ),
    "no_inverse_S": ("kfac", _inverse("last.weight/S", None), "last.weight/S of the inverse of the metric is missing"),
    "other_inverse_A": (
        "kfac",
        _inverse("last.weight/A", _row(1, 1, 1)),
        r"last.weight/A of the inverse .*\[1, 1, 1\]",
    ),
    "other_inverse_d": (
        "exact",
        _inverse("last.weight/d", _row(1, 1, 1)),
        r"last.weight/d of the inverse .*\[1, 1, 1\]",
    ),
    "other_inverse_rest": (
        "kfac",
        _inverse("fallback/scale", _row(3)),
        "the inverse of the metric in the state do not fit",
    ),
    "other_factor": (
        "dense",
        _inverse("cholesky/0", _row(1, 3, 3)),
        "of the inverse of the metric in the state do not",
    ),
    "other_guess": ("implicit", _inverse("guess", _row(3)), r"guess of the inverse .*\[3\], here it is \[42\]"),
    "no_tensor": ("kfac", _operator("last.weight/S", 3), "last.weight/S of the metric in the state is a int, not a"),
    "no_step": ("kfac", _entry("natgrad", "step", value=None), 'the "natgrad" entry of the state has no step'),
    "no_generator": ("kfac", _entry("natgrad", "generator", value=None), "has no generator: it is incomplete"),
    "word_step": ("kfac", _entry("natgrad", "step", value="two"), '"step" of the state is a str: it is damaged'),
    "bad_generator": ("kfac", _entry("natgrad", "generator", value=_row(3)), '"generator" of the state is no state'),
    "no_state": ("kfac", _entry("state", value=None), 'the state has no "state"'),
    "no_damping": ("kfac", _entry("param_groups", 0, "damping", value=None), "group 0 of the state has no damping"),
    "bad_lr": ("kfac", _entry("param_groups", 0, "lr", value=-1.0), "lr must be finite and ≥ 0, got -1.0"),
    "other_group": (
        "kfac",
        lambda state: state["param_groups"][0]["params"].pop(),
        r"its parameter groups have \[4\] parameters, here they have \[5\]",
    ),
    "more_groups": (
        "kfac",
        lambda state: state["param_groups"].append({**state["param_groups"][0], "params": [7]}),
        r"its parameter groups have \[5, 1\] parameters, here they have \[5\]",
    ),
    "other_momentum": (
        "kfac",
        _entry("state", 1, "momentum", value=_row(2)),
        r"momentum of hidden.weight in the state has the shape \[2\], here it is \[4, 3\]",
    ),
    "strange_momentum": ("kfac", _entry("state", 9, value={}), "momentum of a parameter number 9, which no group has"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_refused_by_what_is_wrong_with_it_and_nothing_is_loaded(name: str) -> None:
    make, damage, match = DAMAGED[name]
    _refused(MAKES[make], damage, ValueError, f"{match}.*Nothing was loaded" if name != "bad_lr" else match)


POISONED: dict[str, tuple[str, Damage, str]] = {
    "factor": ("kfac", _poison("operator", "hidden.weight/S", float("nan")), "hidden.weight/S of the metric"),
    "rest": ("ekfac", _poison("operator", "fallback/values", float("inf")), "fallback/values of the metric"),
    "matrix": ("dense", _poison("operator", "matrix", float("-inf")), "matrix of the metric"),
    "inverse": (
        "kfac",
        _poison("inverse", "last.weight/A", float("nan")),
        "last.weight/A of the inverse of the metric",
    ),
    "momentum": (
        "kfac",
        lambda s: s["state"][2]["momentum"].fill_(float("nan")),
        "momentum of hidden.bias",
    ),
}


@pytest.mark.parametrize("name", POISONED)
def test_a_state_with_nan_or_infinity_is_refused_and_nothing_is_loaded(name: str) -> None:
    make, damage, match = POISONED[name]
    _refused(MAKES[make], damage, NonFiniteError, f"{match} in the state holds NaN or infinity.*earlier checkpoint")

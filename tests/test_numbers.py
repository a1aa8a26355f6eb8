"""``True`` is 1 for Python, and refused by name wherever a number is asked for: it is a switch of another argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import natgrad as ng

CASES: dict[str, Callable[[Any], object]] = {
    "Normalised(rms=…)": lambda flag: ng.Normalised(rms=flag),
    "Polar(rms=…)": lambda flag: ng.Polar(rms=flag),
    "KLClip(radius=…)": lambda flag: ng.KLClip(flag),
    "TrustRegion(radius=…)": lambda flag: ng.TrustRegion(flag),
    "TrustRegion(longest=…)": lambda flag: ng.TrustRegion(1.0, longest=flag),
    "Backtracking(tries=…)": lambda flag: ng.Backtracking(tries=flag),
    "LevenbergMarquardt(ftol=…)": lambda flag: ng.LevenbergMarquardt(ftol=flag),
    "LevenbergMarquardt(tries=…)": lambda flag: ng.LevenbergMarquardt(tries=flag),
    "GeodesicCorrected(limit=…)": lambda flag: ng.GeodesicCorrected(limit=flag),
    "GeodesicSearch(smallest=…)": lambda flag: ng.GeodesicSearch(smallest=flag),
    "GridSearch(tries=…)": lambda flag: ng.GridSearch(tries=flag),
    "Armijo(tries=…)": lambda flag: ng.Armijo(tries=flag),
    "SelfTuned(every=…)": lambda flag: ng.SelfTuned(every=flag),
    "Spring(norm=…)": lambda flag: ng.Spring(norm=flag),
    "Penalty(weight=…)": lambda flag: ng.Penalty(lambda params: params["w"].sum(), weight=flag),
    "CG(tol=…)": lambda flag: ng.CG(tol=flag),
    "CG(max_steps=…)": lambda flag: ng.CG(max_steps=flag),
    "Pinv(rtol=…)": lambda flag: ng.Pinv(rtol=flag),
    "Relative(epsilon)": lambda flag: ng.Relative(flag),
    "LowRank(rank)": lambda flag: ng.LowRank(flag),
    "Nystrom(rank)": lambda flag: ng.Nystrom(flag),
    "every": lambda flag: ng.Refresh(ng.Dense(), every=flag),
    "power": lambda flag: ng.Dense(power=flag),
    "samples": lambda flag: ng.Fisher(ng.Categorical(), samples=flag),
    "total_count": lambda flag: ng.families.NegativeBinomial(total_count=flag),
    "lr": lambda flag: ng.KFAC(torch.nn.Linear(2, 1), ng.Euclidean(), lr=flag),
    "damping": lambda flag: ng.KFAC(torch.nn.Linear(2, 1), ng.Euclidean(), lr=0.1, damping=flag),
    "lengthscale": lambda flag: ng.Sobolev(lengthscale=flag),
    "jitter": lambda flag: ng.Sobolev(jitter=flag),
}


@pytest.mark.parametrize("name", CASES)
def test_a_flag_is_not_a_number(name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=name.partition("(")[0]):
        CASES[name](True)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("=…)")])
def test_the_field_is_named_and_so_is_what_it_got(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{re.escape(name)} must be a (whole )?number, got 'one'"):
        CASES[name]("one")

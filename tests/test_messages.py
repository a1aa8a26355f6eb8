"""What a user must act on comes through ``warnings``, with the name of the library; the rest is for the log alone."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import natgrad as ng
from natgrad.errors import NatgradWarning


def stopped_early() -> None:
    """Conjugate gradients that are given too few steps."""
    model = nn.Linear(5, 3).double()
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G = ng.Implicit().estimate(ng.pullback(model, x, ng.Euclidean()))
    ω = ng.differential(model, model(x).square().sum())
    ng.sharp(G, ω, damping=1e-9, solver=ng.CG(max_steps=2))


def test_a_message_to_act_on_names_the_library_and_the_line_of_the_user() -> None:
    with pytest.warns(NatgradWarning, match="^natgrad: conjugate gradients stopped after max_steps=2") as seen:
        stopped_early()
    assert [Path(one.filename).name for one in seen] == [Path(__file__).name]


def test_it_can_be_an_error_or_be_ignored() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NatgradWarning)
        with pytest.raises(NatgradWarning):
            stopped_early()
        warnings.simplefilter("ignore", NatgradWarning)
        stopped_early()


def test_what_needs_no_action_is_logged_and_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "natgrad"):
        warnings.simplefilter("error")
        ng.Natural([nn.Parameter(torch.ones(2, 2))])
    assert "of parameters without their model" in caplog.text


def test_without_a_handler_it_is_printed_once() -> None:
    """A program of a user who has set up neither warnings nor logging."""
    program = "from tests.test_messages import stopped_early\nstopped_early()\n"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stderr.count("conjugate gradients stopped") == 1
    assert "NatgradWarning: natgrad: conjugate" in done.stderr

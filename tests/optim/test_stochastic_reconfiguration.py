"""Stochastic reconfiguration: G = Re(E[ŌO] − E[Ō]E[O]), ∇E = 2 Re E[(Ō − E[Ō]) e], with and without SPRING."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.structures import Structure

SAMPLES, λ, LR = 12, 1e-2, 0.1


class Wave(nn.Module):
    """A real log ψ [n], or a complex one."""

    def __init__(self, complex_valued: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 2)
        self.complex_valued = complex_valued
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(torch.tanh(self.body(x)))
        return torch.complex(y[:, 0], y[:, 1]) if self.complex_valued else y[:, 0] * y[:, 1]


def problem(complex_valued: bool) -> tuple[Wave, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Wave(complex_valued)
    kind = torch.complex128 if complex_valued else torch.float64
    return model, torch.randn(SAMPLES, 5, dtype=torch.float64), torch.randn(SAMPLES, dtype=kind)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def log_derivatives(model: nn.Module, x: Tensor) -> Tensor:
    """O [n p], one output and one part at a time, of a copy: a pass of the model itself would enter the metric."""
    model, rows = copy.deepcopy(model), []
    for y in model(x):
        parts = [y.real, y.imag] if y.is_complex() else [y]
        grads = [torch.autograd.grad(part, list(model.parameters()), retain_graph=True) for part in parts]
        real, *imaginary = [torch.cat([g.flatten() for g in each]) for each in grads]
        rows.append(torch.complex(real, imaginary[0]) if imaginary else real)
    return torch.stack(rows)


@pytest.mark.parametrize("structure", [ng.Kernel(), ng.Dense()])
@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("complex_valued", [False, True])
def test_a_step_is_the_solution_of_the_textbook_equations(
    complex_valued: bool, decay: float | None, structure: Structure
) -> None:
    """(S + λ)φ = ∇E + λμφ', for real parameters (Goldshlager et al. 2024); μ = 0 is Sorella (1998)."""
    model, x, e = problem(complex_valued)
    rule = ng.Fixed() if decay is None else ng.Spring(decay=decay)
    opt = ng.StochasticReconfiguration(model, lr=LR, damping=λ, step=rule, structure=structure)
    φ = torch.zeros_like(flat(model))
    for _ in range(3):
        centred = log_derivatives(model, x)
        centred = centred - centred.mean(0)
        S = (centred.conj().T @ centred).real / SAMPLES
        force = 2 * (centred.conj().T @ (e - e.mean())).real / SAMPLES
        φ = torch.linalg.solve(S + λ * torch.eye(len(S), dtype=torch.float64), force + λ * (decay or 0.0) * φ)
        before = flat(model)
        opt.zero_grad()
        (2 * ((e - e.mean()).conj() * model(x)).real.mean()).backward()
        opt.step()
        torch.testing.assert_close(before - flat(model), LR * φ, rtol=1e-9, atol=1e-12)


def test_a_factor_in_front_of_the_wave_function_is_no_direction() -> None:
    model, x, _ = problem(complex_valued=True)
    G = ng.pullback(model, x, ng.FubiniStudy(), output=torch.view_as_real)
    dense = ng.Dense().estimate(G).dense()
    assert float(dense[-2:].abs().max()) < 1e-14  # the biases of log |ψ| and of the phase
    assert float(dense.diagonal()[:-2].min()) > 0


def test_complex_outputs_without_parts_are_refused() -> None:
    model, x, _ = problem(complex_valued=True)
    with pytest.raises(TypeError, match=r"output=torch\.view_as_real"):
        ng.pullback(model, x, ng.FubiniStudy())


def test_a_momentum_beside_that_of_spring_is_refused() -> None:
    model, x, e = problem(complex_valued=False)
    two = "Spring has a momentum of its own, decay=, and a parameter group has momentum=: set the momentum"
    with pytest.raises(ValueError, match=two):
        ng.NaturalGradient(model, ng.FubiniStudy(), step=ng.Spring(), momentum=0.5)
    opt = ng.NaturalGradient(model, ng.FubiniStudy(), step=ng.Spring())
    opt.param_groups[0]["momentum"] = 0.5
    before = flat(model)
    (2 * ((e - e.mean()) * model(x)).mean()).backward()
    with pytest.raises(ValueError, match=two):
        opt.step()
    torch.testing.assert_close(flat(model), before, rtol=0, atol=0)
    opt.param_groups[0]["momentum"] = 0.0
    opt.zero_grad()
    (2 * ((e - e.mean()) * model(x)).mean()).backward()
    opt.step()
    assert not torch.equal(flat(model), before)


def test_the_divergence_has_the_metric_as_its_hessian() -> None:
    y = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    H = torch.func.hessian(lambda u: ng.FubiniStudy().divergence(y + u, y).sum())(torch.zeros_like(y))
    centring = torch.eye(4, dtype=torch.float64) - 1 / 4
    expected = torch.einsum("nm,de->ndme", centring, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(H, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker(), ng.Refresh(ng.Kronecker(), 2, 0.9)])
def test_kronecker_factors_are_refused(structure: Structure) -> None:
    with pytest.raises(IncompatibleError, match=r"zero up to rounding\. Use Kernel, Dense, or Implicit with solver=CG"):
        ng.StochasticReconfiguration(Wave(complex_valued=False), structure=structure)


def test_conjugate_gradients_solve_for_the_same_step() -> None:
    landings = []
    for structure, solver in ((ng.Kernel(), ng.Cholesky()), (ng.Implicit(), ng.CG(tol=1e-12))):
        model, x, e = problem(complex_valued=False)
        opt = ng.StochasticReconfiguration(model, structure=structure, solver=solver, damping=0.1)
        (2 * ((e - e.mean()) * model(x)).mean()).backward()
        opt.step()
        landings.append(flat(model))
    torch.testing.assert_close(*landings, rtol=1e-8, atol=1e-10)

"""The example of the Heisenberg chain: its energies, and that stochastic reconfiguration finds the ground state."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import Tensor

import natgrad as ng
from examples.heisenberg import Chain, LogPsi, ground_state


def hamiltonian(length: int) -> Tensor:
    """Σ S_i·S_{i+1} on the ring [2^L 2^L], by Kronecker products of Pauli matrices."""
    paulis = torch.tensor([[[0, 1], [1, 0]], [[0, -1j], [1j, 0]], [[1, 0], [0, -1]]], dtype=torch.complex128)
    eye = torch.eye(2, dtype=torch.complex128)
    H = torch.zeros(2**length, 2**length, dtype=torch.complex128)
    for i in range(length):
        for S in 0.5 * paulis:
            H += reduce(torch.kron, [S if k in (i, (i + 1) % length) else eye for k in range(length)])
    return H


def test_the_energy_is_that_of_the_hamiltonian_on_the_whole_space() -> None:
    """Bit i belongs to factor L − 1 − i; Marshall: a factor −1 for every spin up on an even site."""
    length, chain = 6, Chain(6)
    representatives, sizes = chain.orbits
    assert int(sizes.sum()) == 20
    log_psi = torch.randn(len(sizes), dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    x = torch.arange(2**length)
    bits = (x[:, None] >> torch.arange(length)) & 1
    at = torch.searchsorted(representatives, chain.representative(x)).clamp(max=len(sizes) - 1)
    ψ = torch.where(bits.sum(1) == 3, log_psi.exp()[at], 0.0) * (1 - 2 * (bits[:, ::2].sum(1) % 2))
    expected = (ψ.conj() @ hamiltonian(length) @ ψ).real / ψ.abs().square().sum()
    assert chain.energy(log_psi) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("phase", [False, True])
def test_stochastic_reconfiguration_finds_the_ground_state(phase: bool) -> None:
    torch.manual_seed(0)
    psi = LogPsi(6, 3, 2, phase=phase).double()
    opt = ng.StochasticReconfiguration(psi, lr=0.05, damping=1e-3, step=ng.Spring(decay=0.9, norm=0.2))
    energies = ground_state(
        Chain(8), psi, opt, steps=60, samples=100, generator=torch.Generator().manual_seed(0), every=0
    )
    exact = float(torch.linalg.eigvalsh(hamiltonian(8))[0])
    assert -1e-12 <= energies[-1] - exact <= 1e-3
    assert energies[0] - exact > 0.5

"""Matrices with a given spectrum, as operators."""

import torch
from torch import Tensor

import natgrad as ng
from natgrad.operators import DenseOperator, Layout
from tests.pulled import normal


def layout(size: int) -> Layout:
    """One parameter "w" of this size."""
    return Layout.of({"w": torch.zeros(size, dtype=torch.float64)})


def dense(matrix: Tensor) -> DenseOperator:
    """The matrix as a metric."""
    return DenseOperator(layout(len(matrix)), matrix)


def covector(values: Tensor) -> ng.Covector:
    """The covector over "w"."""
    return ng.Covector({"w": values})


def spectral(values: Tensor, seed: int = 0) -> Tensor:
    """Q diag(values) Qᵀ with a random orthogonal Q, symmetric to the last bit."""
    Q = torch.linalg.qr(normal(len(values), len(values), seed=seed)).Q
    matrix = (Q * values) @ Q.T
    return (matrix + matrix.T) / 2


def gram(rank: int, size: int, seed: int = 0) -> Tensor:
    """RᵀR of `rank` random rows."""
    R = normal(rank, size, seed=seed)
    return R.T @ R

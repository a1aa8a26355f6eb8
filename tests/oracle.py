"""The dense ground truth of the tests: no code of the library, float64, one loop per sum sign.

Everything is flattened in one order: `named_parameters()` (trainable ones, each once), each tensor row-major.
Outputs of one example are flattened row-major too. Letters: n, m example; D flattened outputs; k column of a root;
P flattened parameters. Inputs are one tensor, or a tuple of tensors (the positional arguments of the model), with the
examples along the first dimension.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Tensor, ...]

# torch leaves these untyped.
_hessian: Callable[..., Tensor] = torch.autograd.functional.hessian
_block_diag: Callable[..., Tensor] = torch.block_diag


# Parameters and Jacobians


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """θ: the trainable parameters by name, each tied one once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors → one vector [P], in the order given, each row-major."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Vector [P] → named tensors: the inverse of `flatten(like.values())`."""
    tensors, start = {}, 0
    for name, t in like.items():
        tensors[name] = vector[start : start + t.numel()].reshape(t.shape)
        start += t.numel()
    assert start == len(vector)
    return tensors


def examples(x: Inputs) -> int:
    """N: the number of examples in the inputs."""
    return len(x[0]) if isinstance(x, tuple) else len(x)


def example(x: Inputs, n: int) -> Inputs:
    """Example n as a batch of one."""
    return tuple(t[n : n + 1] for t in x) if isinstance(x, tuple) else x[n : n + 1]


def call(model: Callable[..., Any], x: Inputs, output: Callable[[Any], Tensor] | None = None) -> Tensor:
    """y = output(model(x)), the output tensor y[n *out]."""
    y = model(*x) if isinstance(x, tuple) else model(x)
    return y if output is None else output(y)


def _stack(of_example: Callable[[Inputs], Tensor], leaves: Sequence[Tensor], x: Inputs, n_examples: int) -> Tensor:
    jacobians = []
    for n in range(n_examples):
        rows = []
        for y_d in of_example(example(x, n)).reshape(-1):
            # Another backward pass through the same graph follows, and an output need not depend on every parameter.
            grads = torch.autograd.grad(y_d, leaves, retain_graph=True, materialize_grads=True)
            rows.append(flatten(grads))
        jacobians.append(torch.stack(rows))
    return torch.stack(jacobians)


def jacobian(
    f: Callable[[dict[str, Tensor], Any], Tensor], params: Mapping[str, Tensor], x: Inputs, n_examples: int
) -> Tensor:
    """J[n D P] = ∂f(θ, x_n)_D / ∂θ_P for a pure function, each example on its own as a batch of one."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    return _stack(lambda x_n: f(leaves, x_n), list(leaves.values()), x, n_examples)


def module_jacobian(model: nn.Module, x: Inputs, output: Callable[[Any], Tensor] | None = None) -> Tensor:
    """J[n D P] = ∂y_D(θ, x_n) / ∂θ_P of a module in its present mode, each example on its own as a batch of one."""
    return _stack(lambda x_n: call(model, x_n, output), list(parameters(model).values()), x, examples(x))


def differential(model: nn.Module, loss: Tensor) -> Tensor:
    """ω[P] = ∂loss/∂θ: the covector, flat."""
    leaves = list(parameters(model).values())
    return flatten(torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True))


# Output metrics h[n D D], from the textbook


def _rows(y: Tensor) -> Iterable[Tensor]:
    """For every example, its terms: rows [t c] of the last dimension."""
    return [y_n.detach().reshape(-1, y_n.shape[-1]) for y_n in y]


def euclidean(y: Tensor) -> Tensor:
    """h = I."""
    return torch.stack([torch.eye(y_n.numel(), dtype=y.dtype) for y_n in y])


def categorical(y: Tensor) -> Tensor:
    """h = diag(p) − p pᵀ with p = exp(y)/Σ exp(y) over the last dimension; one block a term for y[n t c]."""
    metrics = []
    for rows in _rows(y):
        probabilities = [row.exp() / row.exp().sum() for row in rows]
        metrics.append(_block_diag(*[torch.diag(p) - torch.outer(p, p) for p in probabilities]))
    return torch.stack(metrics)


def bernoulli(y: Tensor) -> Tensor:
    """h = diag(p(1 − p)) with p = 1/(1 + exp(−y)): every output is the logit of its own coin."""
    p = 1 / (1 + torch.exp(-y.detach()))
    return torch.stack([torch.diag((p_n * (1 - p_n)).reshape(-1)) for p_n in p])


def gaussian(y: Tensor, scale: float = 1.0) -> Tensor:
    """h = I/σ²: the outputs are means of Gaussians with the fixed standard deviation σ."""
    return euclidean(y) / scale**2


def gaussian_learned(y: Tensor) -> Tensor:
    """h = diag(1/σ², 2) for y = (μ_1..μ_d, log σ_1..log σ_d) along the last dimension."""
    metrics = []
    for rows in _rows(y):
        blocks = []
        for row in rows:
            log_scale = row[len(row) // 2 :]
            blocks.append(torch.diag(torch.cat([torch.exp(-2 * log_scale), torch.full_like(log_scale, 2.0)])))
        metrics.append(_block_diag(*blocks))
    return torch.stack(metrics)


def poisson(y: Tensor) -> Tensor:
    """h = diag(exp y): every output is a log-rate."""
    return torch.stack([torch.diag(y_n.detach().exp().reshape(-1)) for y_n in y])


def empirical(y: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """h = ∇ℓ ∇ℓᵀ with ℓ = loss(y_n, t_n) of one example without batch dimension; terms of it are summed."""
    metrics = []
    for y_n, t_n in zip(y, target, strict=True):
        u = y_n.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(u, t_n).sum(), u)
        metrics.append(torch.outer(gradient.reshape(-1), gradient.reshape(-1)))
    return torch.stack(metrics)


def hessian(phi: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """h = ∇²φ(y_n): the Bregman metric. φ sees one example without batch dimension; terms of it are summed."""
    metrics = []
    for y_n in y.detach():
        second = _hessian(lambda u: phi(u).sum(), y_n)
        metrics.append(second.reshape(y_n.numel(), y_n.numel()))
    return torch.stack(metrics)


def _swapped(f: Callable[[Tensor, Tensor], Tensor], second: Tensor, first: Tensor) -> Tensor:
    return f(first, second)


def divergence_hessian(rho: Callable[[Tensor, Tensor], Tensor], y: Tensor) -> Tensor:
    """h = ∂²ρ(u, y_n)/∂u² at u = y_n."""
    return torch.cat([hessian(partial(_swapped, rho, y_n), y_n[None]) for y_n in y.detach()])


def loss_hessian(loss: Callable[[Tensor, Tensor], Tensor], y: Tensor, target: Tensor) -> Tensor:
    """h = ∂²ℓ(u, t_n)/∂u² at u = y_n: the generalised Gauss–Newton metric."""
    pairs = zip(y.detach(), target, strict=True)
    return torch.cat([hessian(partial(_swapped, loss, t_n), y_n[None]) for y_n, t_n in pairs])


# Roots s[k n D] whose columns mean the same thing in every example, for metrics that couple examples


def euclidean_roots(y: Tensor) -> Tensor:
    """s_kn = e_k: one column an output."""
    return torch.stack([torch.eye(y_n.numel(), dtype=y.dtype) for y_n in y], dim=1)


def hellinger_roots(y: Tensor) -> Tensor:
    """s_kn = √p_k (e_k − p) for logits y[n c]: one column a class, the transposed Jacobian of y ↦ 2√p."""
    p = y.detach().exp() / y.detach().exp().sum(dim=1, keepdim=True)
    unit = torch.eye(y.shape[1], dtype=y.dtype)
    columns = [[p_n[k].sqrt() * (unit[k] - p_n) for p_n in p] for k in range(y.shape[1])]
    return torch.stack([torch.stack(column) for column in columns])


def sobolev_coupling(points: Tensor, lengthscale: float, jitter: float = 0.0) -> Tensor:
    """K⁻¹ for k(r) = (1 + r)e^{−r} (ν = 3/2), with the jitter on the diagonal and then 1 there again."""
    K = torch.zeros(len(points), len(points), dtype=torch.float64)
    for n, x_n in enumerate(points.double().flatten(1)):
        for m, x_m in enumerate(points.double().flatten(1)):
            r = (x_n - x_m).norm() / lengthscale
            K[n, m] = ((1 + r) * (-r).exp() + jitter * (n == m)) / (1 + jitter)
    return torch.linalg.inv(K)


# The metric on parameters


def dense(J: Tensor, h: Tensor) -> Tensor:
    """G[P P] = (1/N) Σ_n J_nᵀ h_n J_n."""
    G = torch.zeros(J.shape[2], J.shape[2], dtype=J.dtype)
    for J_n, h_n in zip(J, h, strict=True):
        G += J_n.T @ h_n @ J_n
    return G / len(J)


def dense_coupled(J: Tensor, roots: Tensor, coupling: Tensor) -> Tensor:
    """G[P P] = (1/N) Σ_k Σ_nm C_nm (J_nᵀ s_kn)(J_mᵀ s_km)ᵀ."""
    G = torch.zeros(J.shape[2], J.shape[2], dtype=J.dtype)
    for s_k in roots:
        for n in range(len(J)):
            for m in range(len(J)):
                G += coupling[n, m] * torch.outer(J[n].T @ s_k[n], J[m].T @ s_k[m])
    return G / len(J)


# Structures: what is kept of G


def layer_blocks(model: nn.Module) -> dict[str, list[int]]:
    """Indices into θ by the module that owns the parameter: weight and bias of one Linear are one block.

    A tied weight belongs to the module that has it first; a parametrised one to its `parametrizations.*` list.
    """
    blocks: dict[str, list[int]] = {}
    start = 0
    for name, p in parameters(model).items():
        owner = name.rpartition(".")[0]
        blocks.setdefault(owner, []).extend(range(start, start + p.numel()))
        start += p.numel()
    return blocks


def block_diagonal(G: Tensor, blocks: Iterable[Sequence[int]]) -> Tensor:
    """G_pq where p and q lie in one block (a sequence of indices, not always contiguous), 0 elsewhere."""
    kept = torch.zeros_like(G)
    for block in blocks:
        index = torch.tensor(block)
        rows, columns = index[:, None], index[None, :]
        kept[rows, columns] = G[rows, columns]
    return kept


def diagonal(G: Tensor) -> Tensor:
    """diag(G_pp)."""
    return torch.diag(torch.diag(G))


def low_rank(G: Tensor, rank: int) -> Tensor:
    """U Λ Uᵀ + diag(G − U Λ Uᵀ) with the `rank` largest eigenvalues Λ: top of the spectrum, diagonal of the rest."""
    values, vectors = torch.linalg.eigh(G)
    first = len(G) - rank  # eigh sorts upwards
    top = vectors[:, first:] @ torch.diag(values[first:]) @ vectors[:, first:].T
    return top + diagonal(G - top)


# Solves: covector → vector


def damped(G: Tensor, covector: Tensor, damping: float) -> Tensor:
    """v = (G + λI)⁻¹ ω."""
    return torch.linalg.solve(G + damping * torch.eye(len(G), dtype=G.dtype), covector)


def pinv(G: Tensor, covector: Tensor, rtol: float = 1e-10) -> Tensor:
    """v = G⁺ ω = argmin ‖y‖ over the least-squares solutions of G y = ω; eigenvalues below rtol·λ_max count as 0."""
    return torch.linalg.pinv(G, rtol=rtol, hermitian=True) @ covector


def weighted_pinv(G: Tensor, covector: Tensor, weight: Tensor, rtol: float = 1e-10) -> Tensor:
    """argmin_y {‖y‖_W : G y = ω}, ‖y‖²_W = yᵀ W y, W[P P] positive definite.

    W = F⁻¹F⁻ᵀ gives van Oostrum et al. (2023), eq. 33.
    With W = L Lᵀ and z = Lᵀ y the norm is Euclidean and the constraint G L⁻ᵀ z = ω, so y = L⁻ᵀ (G L⁻ᵀ)⁺ ω.
    """
    L_inverse_T = torch.linalg.inv(torch.linalg.cholesky(weight)).T
    return L_inverse_T @ torch.linalg.pinv(G @ L_inverse_T, rtol=rtol) @ covector


def damped_power(matrix: Tensor, damping: float, power: float) -> Tensor:
    """(G + λ)^-p."""
    values, vectors = torch.linalg.eigh(matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype))
    return (vectors * values.pow(-power)) @ vectors.T

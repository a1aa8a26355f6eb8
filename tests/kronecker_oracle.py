"""K-FAC from the textbook, for the tests: no code of the library, float64, one loop per sum sign.

A layer is W̄ acting on ā at every position: ā is what the module was given, and g what autograd says of what it
returned, one example at a time. Letters: n, m example; r position; k column of a root; o, i output and input of the
layer; P flattened parameters, as in `tests.oracle`.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import oracle

_KINDS = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.Embedding)
Use = tuple[nn.Module, Tensor, Tensor]  # a module, what it was given and what it returned


@dataclass(frozen=True)
class Layer:
    """One layer (of a grouped convolution or a normalisation: one group) at all examples."""

    index: Tensor  # [o i], where W̄ lies in θ
    a: Tensor  # [n r i]
    g: Tensor  # [k n r o], with the 1/√N of the mean
    sparse: bool = False  # one-hot inputs: of A only the diagonal is kept

    def rows(self) -> Tensor:
        """R[k n o i] = Σ_r g aᵀ."""
        K, N = self.g.shape[:2]
        R = torch.zeros(K, N, *self.index.shape, dtype=self.a.dtype)
        for k in range(K):
            for n in range(N):
                for r in range(self.a.shape[1]):
                    R[k, n] += torch.outer(self.g[k, n, r], self.a[n, r])
        return R

    def exact(self) -> Tensor:
        """The layer's block of G, Σ_kn R Rᵀ [(o i) (o i)]."""
        rows = self.rows().flatten(2).flatten(0, 1)
        return rows.T @ rows

    def factors(self, sharing: str, coupling: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """S[o o] and A[i i]. With a coupling their product has the trace it should, as far as it has it without."""
        N = len(self.a)
        S, A = self._sums(sharing, torch.eye(N, dtype=self.a.dtype))
        if coupling is None:
            return S, A
        S_c, A_c = self._sums(sharing, coupling)
        # What the coupling makes zero, as the constant input of a bias, says nothing.
        S_c, A_c = (S if S_c.trace() < 1e-12 * S.trace() else S_c), (A if A_c.trace() < 1e-12 * A.trace() else A_c)
        R = self.rows().flatten(2)
        trace = torch.zeros((), dtype=R.dtype)
        for n in range(N):
            for m in range(N):
                trace += coupling[n, m] * (R[:, n] * R[:, m]).sum()
        kappa = (trace / (S_c.trace() * A_c.trace())) / ((R**2).sum() / (S.trace() * A.trace()))
        return kappa * S_c, A_c

    def _sums(self, sharing: str, C: Tensor) -> tuple[Tensor, Tensor]:
        a, g = self.a, self.g
        if sharing == "reduce":
            a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
        N, R = a.shape[:2]
        S = torch.zeros(g.shape[3], g.shape[3], dtype=g.dtype)
        A = torch.zeros(a.shape[2], a.shape[2], dtype=a.dtype)
        for n in range(N):
            for m in range(N):
                for r in range(R):
                    A += C[n, m] * torch.outer(a[n, r], a[m, r]) / (N * R)
                    S += C[n, m] * torch.einsum("ko,kp->op", g[:, n, r], g[:, m, r])
        return S, torch.diag(torch.diag(A)) if self.sparse else A


def layers(model: nn.Module, x: oracle.Inputs, s: Tensor, output: Callable[[Any], Tensor] | None = None) -> list[Layer]:
    """All Linear, Conv2d, LayerNorm and Embedding layers, for a root s[k n *out].

    Parameters that the same modules have are one layer: a weight that two modules share is one, their biases are two.
    """
    N = oracle.examples(x)
    blocks = _blocks(model)
    seen: list[list[list[tuple[Tensor, Tensor]]]] = [[] for _ in blocks]  # by layer, example and group: a and g
    for n in range(N):
        uses, y = _watched(model, oracle.example(x, n), output)
        z = [returned for _, _, returned in uses]
        roots = [s_k[n].reshape(y.shape) / N**0.5 for s_k in s]
        grads = [torch.autograd.grad(y, z, root, retain_graph=True, materialize_grads=True) for root in roots]
        for at, (modules, names) in enumerate(blocks):
            mine = [u for u, (module, _, _) in enumerate(uses) if module in modules]
            parts = [_groups(uses[u][0], names, uses[u][1], torch.stack([g[u] for g in grads])) for u in mine]
            seen[at].append([_along(group) for group in zip(*parts, strict=True)])
    found = []
    for (modules, names), of_examples in zip(blocks, seen, strict=True):
        for index, group in zip(_indices(model, modules[0], names), zip(*of_examples, strict=True), strict=True):
            a, g = torch.stack([a for a, _ in group]), torch.stack([g for _, g in group], dim=1)
            found.append(Layer(index, a, g, isinstance(modules[0], nn.Embedding)))
    return found


def _along(uses: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """a[r i] and g[k r o] of several uses, one after the other."""
    return torch.cat([a for a, _ in uses]), torch.cat([g for _, g in uses], dim=1)


def _blocks(model: nn.Module) -> list[tuple[tuple[nn.Module, ...], tuple[str, ...]]]:
    """Modules, and the local names of the parameters that all of these and no others have."""
    modules = [m for m in model.modules() if any(p is not None for p in m._parameters.values())]
    grouped: dict[tuple[nn.Module, ...], list[str]] = {}
    for p in oracle.parameters(model).values():
        owners = {m: name for m in modules for name, own in m._parameters.items() if own is p}
        kinds, names = {type(m) for m in owners}, set(owners.values())
        if len(kinds) == 1 and kinds <= set(_KINDS) and len(names) == 1:
            grouped.setdefault(tuple(owners), []).append(names.pop())
    return [(owners, tuple(names)) for owners, names in grouped.items()]


def _watched(model: nn.Module, x: oracle.Inputs, output: Callable[[Any], Tensor] | None) -> tuple[list[Use], Tensor]:
    """All calls of layers in one forward pass, and its outputs."""
    uses: list[Use] = []

    def remember(module: nn.Module, given: tuple[Tensor, ...], returned: Tensor) -> None:
        uses.append((module, given[0].detach(), returned))

    trained = [m for m in model.modules() if type(m) in _KINDS and any(p.requires_grad for p in m.parameters())]
    hooks = [module.register_forward_hook(remember) for module in trained]
    y = oracle.call(model, x, output)
    for hook in hooks:
        hook.remove()
    return uses, y


def _groups(module: nn.Module, names: Sequence[str], x: Tensor, g: Tensor) -> list[tuple[Tensor, Tensor]]:
    """a[r i] and g[k r o] of every group, from what a module was given for one example and g[k *returned]."""
    K = len(g)
    pairs: list[tuple[Tensor, Tensor]] = []
    if isinstance(module, nn.Linear):
        pairs = [(x.reshape(-1, x.shape[-1]), g.reshape(K, -1, g.shape[-1]))]
    elif isinstance(module, nn.Embedding):
        pairs = [(F.one_hot(x.reshape(-1), module.num_embeddings).to(g.dtype), g.reshape(K, -1, g.shape[-1]))]
    elif isinstance(module, nn.LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        normal = (centred / (centred.square().mean(-1, keepdim=True) + module.eps).sqrt()).reshape(-1, x.shape[-1])
        pairs = [(normal[:, f : f + 1], g.reshape(K, -1, x.shape[-1])[..., f : f + 1]) for f in range(x.shape[-1])]
    elif isinstance(module, nn.Conv2d):
        padding: Any = module.padding
        patches = F.unfold(x, module.kernel_size, module.dilation, padding, module.stride)[0].T  # [r (channel kernel)]
        outs = g.reshape(K, g.shape[2], -1).transpose(1, 2)
        pairs = list(zip(patches.chunk(module.groups, -1), outs.chunk(module.groups, -1), strict=True))
    return [(_homogeneous(a, names), g_c) for a, g_c in pairs]


def _homogeneous(a: Tensor, names: Sequence[str]) -> Tensor:
    """(a, 1), as far as weight and bias are there."""
    one = torch.ones(len(a), 1, dtype=a.dtype)
    return torch.cat([part for part, name in ((a, "weight"), (one, "bias")) if name in names], dim=1)


def _indices(model: nn.Module, module: nn.Module, names: Sequence[str]) -> Iterator[Tensor]:
    """[o i] of every group: where W̄ lies in θ."""
    starts, start = {}, 0
    for p in oracle.parameters(model).values():
        starts[p] = torch.arange(start, start + p.numel()).reshape(p.shape)
        start += p.numel()
    parts = [starts[module.get_parameter(name)] for name in ("weight", "bias") if name in names]
    if isinstance(module, nn.Embedding):
        parts = [part.T for part in parts]
    groups = (
        module.groups if isinstance(module, nn.Conv2d) else len(parts[0]) if isinstance(module, nn.LayerNorm) else 1
    )
    for part in zip(*(p.chunk(groups) for p in parts), strict=True):
        yield torch.cat([p.reshape(len(p), -1) for p in part], dim=1)


# What is kept of G


def assembled(blocks: Sequence[tuple[Tensor, Tensor]], G: Tensor) -> Tensor:
    """[P P] from blocks at their indices, and the diagonal of G where there is none."""
    out = oracle.diagonal(G)
    for index, block in blocks:
        at = index.reshape(-1)
        out[at[:, None], at] = block
    return out


def kfac(found: Sequence[Layer], sharing: str, G: Tensor, coupling: Tensor | None = None) -> Tensor:
    """S ⊗ A in every layer, row-major, and the diagonal of G elsewhere."""
    blocks = [(layer.index, torch.kron(*layer.factors(sharing, coupling))) for layer in found]
    return assembled(blocks, G)


def ekfac(found: Sequence[Layer], bases: Sequence[tuple[Tensor, Tensor]], G: Tensor) -> Tensor:
    """(Q ⊗ P) diag((Q ⊗ P)ᵀ G (Q ⊗ P)) (Q ⊗ P)ᵀ in every layer: the diagonal of G in a basis of each."""
    blocks = []
    for layer, (Q, P) in zip(found, bases, strict=True):
        at, basis = layer.index.reshape(-1), torch.kron(Q.contiguous(), P.contiguous())
        rotated = basis.T @ G[at[:, None], at] @ basis
        blocks.append((layer.index, basis @ torch.diag(torch.diag(rotated)) @ basis.T))
    return assembled(blocks, G)


def factored(found: Sequence[Layer], sharing: str, G: Tensor, damping: float, coupling: Tensor | None = None) -> Tensor:
    """The matrix whose inverse is (S + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹ in every layer, and that of diag(G) + λ elsewhere."""
    blocks = []
    for layer in found:
        S, A = layer.factors(sharing, coupling)
        pi = math.sqrt(float((A.trace() / len(A)) / (S.trace() / len(S))))
        left = S + math.sqrt(damping) / pi * torch.eye(len(S), dtype=S.dtype)
        right = A + math.sqrt(damping) * pi * torch.eye(len(A), dtype=A.dtype)
        blocks.append((layer.index, torch.kron(left, right)))
    return assembled(blocks, G + damping * torch.eye(len(G), dtype=G.dtype))


# Fused modules, taken apart


class UnfusedAttention(nn.Module):
    """What nn.MultiheadAttention computes of (x, x, x) without masks, from four Linear layers of its values."""

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads, e = fused.num_heads, fused.embed_dim
        self.parts = nn.ModuleList(nn.Linear(e, e) for _ in range(4))
        self.double().load_state_dict(unfused(fused.state_dict()))

    def forward(self, x: Tensor, *_: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        """softmax(q kᵀ/√d) v in every head, projected."""
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.parts[:3])
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        mixed = (scores.exp() / scores.exp().sum(-1, keepdim=True)) @ v
        return self.parts[3](mixed.transpose(1, 2).flatten(2)), None


def taken_apart(model: nn.Module) -> tuple[nn.Module, Tensor]:
    """The same function without fused modules, and where its parameters lie among those of the model."""
    twin, places, start = copy.deepcopy(model), {}, 0
    for name, p in oracle.parameters(model).items():
        places[name] = torch.arange(start, start + p.numel()).reshape(p.shape)
        start += p.numel()
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            twin.set_submodule(name, UnfusedAttention(module))
            own = {key.removeprefix(f"{name}."): t for key, t in places.items() if key.startswith(f"{name}.")}
            places |= {f"{name}.{key}": t for key, t in unfused(own).items()}
    return twin, torch.cat([places[name].reshape(-1) for name in oracle.parameters(twin)])


def unfused(fused: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the four Linear layers from those of a fused attention."""
    inner = zip(fused["in_proj_weight"].chunk(3), fused["in_proj_bias"].chunk(3), strict=True)
    parts = [*inner, (fused["out_proj.weight"], fused["out_proj.bias"])]
    return {
        f"parts.{at}.{name}": t
        for at, part in enumerate(parts)
        for name, t in zip(("weight", "bias"), part, strict=True)
    }

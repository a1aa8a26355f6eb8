"""The eigenvalue-corrected Kronecker structure (EK-FAC): the diagonal in the eigenvectors of the two factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.model import Model
from natgrad.operators import EigenKroneckerOperator, Layout, Operator
from natgrad.operators.basis import Basis
from natgrad.operators.eigen import Moments
from natgrad.pullback import Block, Pullback
from natgrad.pullback.moments import second_moments
from natgrad.pullback.precision import without_autocast
from natgrad.pullback.rotated import RotatedSquares, rotated_squares
from natgrad.structures.kronecker import Layered, dtype_of


@final
@dataclass(frozen=True)
class EigenKronecker(Layered):
    """G ≈ (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ on every layer, Q and P the eigenvectors of the factors S and A of ``Kronecker``.

    D = Σ_kn (Qᵀ R_kn P)² are the second moments of the per-example gradients R_kn = Σ_r g aᵀ in that basis (George et
    al. 2018, (9)): the diagonal of G itself, in the basis where S ⊗ A is diagonal. So it is never further from G than
    ``Kronecker`` is, in the Frobenius norm, and its trace is that of G, whatever the ``sharing`` of positions, which
    here chooses the basis only. ``fallback``, ``strict`` and ``largest`` are those of ``Kronecker``.

    An optimizer keeps the basis between two inverses, and estimates D in it (``estimate_like``).

    >>> import torch, natgrad as ng
    >>> model = torch.nn.Linear(2, 2, bias=False)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> pb = ng.pullback(model, x, ng.Euclidean())
    >>> EigenKronecker().estimate(pb).dense().diagonal()
    tensor([0.5000, 2.0000, 0.5000, 2.0000])
    """

    def layer_elements(self, block: Block) -> int:
        sides = self.shapes(block)
        return block.size + sum(math.prod(shape) * (2 if len(shape) == 3 else 1) for shape in sides)

    def estimate(self, pullback: Pullback) -> EigenKroneckerOperator:
        return self.estimate_like(pullback, None)

    @without_autocast
    def estimate_like(self, pullback: Pullback, like: Operator | None) -> EigenKroneckerOperator:
        """In the basis of ``like`` where it is one of these layers: no eigenvectors, and one backward pass a root."""
        parts, dtype = self.parts(pullback, like), pullback.y.dtype
        basis = self._basis_of(like, parts.blocks)
        if basis is None or pullback.coupling is not None:
            found = second_moments(pullback, parts.seen, self.rule_of_sharing)
            if basis is None:
                own = Basis.of([s for s, _ in found], [a for _, a in found]).sides
                sides = parts.everywhere(own, lambda block: (None, None))  # until it is renewed
                basis = Basis(tuple(q for q, _ in sides), tuple(p for _, p in sides))
            scales = rotated_squares(pullback, parts.seen, parts.of_seen(basis.sides))
        else:
            squares = RotatedSquares(parts.seen, parts.of_seen(basis.sides), dtype)
            found = second_moments(pullback, parts.seen, self.rule_of_sharing, squares)
            scales = squares.totals()
        factors = parts.everywhere(found, lambda block: self.zeros(block, dtype))
        rest = None if not isinstance(like, EigenKroneckerOperator) else like.rest
        return EigenKroneckerOperator(
            Layout(pullback.model.like, dtype),
            parts.blocks,
            Moments(tuple(s for s, _ in factors), tuple(a for _, a in factors)),
            basis,
            tuple(parts.everywhere(scales, lambda block: _nothing(block, dtype))),
            None if parts.others is None else self.fallback.estimate_like(parts.others, rest),
            parts.unseen,
        )

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> EigenKroneckerOperator:
        parts, rest = self.restored(model, blocks, tensors)
        dtype = dtype_of(parts, tensors, rest)
        names = [block.names[0] for block in parts.seen]
        found = [(tensors[f"{name}/S"], tensors[f"{name}/A"]) for name in names]
        factors = parts.everywhere(found, lambda block: self.zeros(block, dtype))
        moments = Moments(tuple(s for s, _ in factors), tuple(a for _, a in factors))
        d = tuple(parts.everywhere((tensors[f"{name}/D"] for name in names), lambda block: _nothing(block, dtype)))
        q, p = (tuple(tensors.get(f"{block.names[0]}/{side}") for block in parts.blocks) for side in "QP")
        layout = Layout.of(model.params, dtype)
        return EigenKroneckerOperator(layout, parts.blocks, moments, Basis(q, p), d, rest, parts.unseen)

    def _basis_of(self, like: Operator | None, covered: Sequence[Block]) -> Basis | None:
        """The basis of an operator over the same layers."""
        if not isinstance(like, EigenKroneckerOperator):
            return None
        alike = [block.names for block in like.blocks] == [block.names for block in covered]
        return like.basis if alike else None


def _nothing(block: Block, dtype: torch.dtype) -> Tensor:
    """D of a layer that a pass did not use."""
    return torch.zeros(block.shape, dtype=dtype, device=block.device)

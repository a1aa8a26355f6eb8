"""The eigenvalue-corrected Kronecker structure (EK-FAC): the diagonal in the eigenvectors of the two factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from natgrad.model import Model
from natgrad.operators import EigenKroneckerOperator, Layout, Operator
from natgrad.operators.basis import Basis
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
        covered, others = self.parts(pullback)
        basis = self._basis_of(like, covered)
        if basis is None or pullback.coupling is not None:
            factors = second_moments(pullback, covered, self.rule_of_sharing)
            if basis is None:
                basis = Basis.of([s for s, _ in factors], [a for _, a in factors])
            scales = rotated_squares(pullback, covered, basis.sides)
        else:
            squares = RotatedSquares(covered, basis.sides, pullback.y.dtype)
            factors = second_moments(pullback, covered, self.rule_of_sharing, squares)
            scales = squares.totals()
        rest = None if not isinstance(like, EigenKroneckerOperator) else like.rest
        return EigenKroneckerOperator(
            Layout(pullback.model.like, pullback.y.dtype),
            tuple(covered),
            tuple(s for s, _ in factors),
            tuple(a for _, a in factors),
            basis,
            tuple(scales),
            None if others is None else self.fallback.estimate_like(others, rest),
        )

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> EigenKroneckerOperator:
        kept, rest = self.restored(model, blocks, tensors)
        s, a, d = (tuple(tensors[f"{block.names[0]}/{side}"] for block in kept) for side in "SAD")
        q, p = (tuple(tensors.get(f"{block.names[0]}/{side}") for block in kept) for side in "QP")
        return EigenKroneckerOperator(
            Layout.of(model.params, dtype_of(d, rest)), tuple(kept), s, a, Basis(q, p), d, rest
        )

    def _basis_of(self, like: Operator | None, covered: Sequence[Block]) -> Basis | None:
        """The basis of an operator over the same layers."""
        if not isinstance(like, EigenKroneckerOperator):
            return None
        alike = [block.names for block in like.blocks] == [block.names for block in covered]
        return like.basis if alike else None

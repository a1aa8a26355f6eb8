"""What the metric of a layer costs, in numbers kept and operations, as far as its shape tells.

Counts are of multiplications and additions, leading terms only. A Cholesky decomposition of d rows takes d³/3 and the
inverse from it 2d³/3; eigenvalues with eigenvectors take about 9d³ (Golub and Van Loan, section 8.3); a symmetric
product Σ a aᵀ takes d² a term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from natgrad.pullback.blocks import Block
from natgrad.solve import CG, Factored, Solver
from natgrad.structures import BlockDense, Dense, Diagonal, EigenKronecker, Kronecker, LowRank, Structure

EIGENVECTORS = 9  # times d³


@final
@dataclass(frozen=True)
class Cost:
    """``kept``: how many numbers the metric and its inverse are. ``invert``, ``solve``: operations of one inverse and
    of one product with it; ``position``: of the estimate, a position of an example and a column of the root.

    ``factors``: shapes of what is kept of the metric by letter, [c d d], or [c d] for a diagonal.
    """

    kept: int
    invert: int
    solve: int
    position: int
    factors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def layer_cost(structure: Structure, block: Block, solver: Solver, damped: bool) -> Cost | None:
    """Of one layer in a structure that keeps layers apart; None for others, and for those this page does not know."""
    match structure:
        case Kronecker() | EigenKronecker() if block.rule is not None:
            return _product(structure, block, isinstance(solver, Factored) or not damped)
        case Kronecker() | EigenKronecker():
            return whole_cost(structure.fallback, [block], solver)
    return None


def whole_cost(structure: Structure, blocks: Sequence[Block], solver: Solver) -> Cost | None:
    """Of all parameters together, in a structure that does not keep layers apart."""
    size = sum(block.size for block in blocks)
    match structure:
        case Diagonal():
            return Cost(2 * size, size, size, size, {"G": (1, size)})
        case BlockDense():  # a module's layers together
            sizes: Counter[str] = Counter()
            for block in blocks:
                sizes[block.names[0].rpartition(".")[0]] += block.size
            return _sum([_dense(own) for own in sizes.values()])
        case Dense() if isinstance(solver, CG):
            return Cost(size**2, 0, 2 * size**2, size**2, {"G": (1, size, size)})
        case Dense():
            return _dense(size)
        case LowRank(rank=rank):
            return Cost((rank + 1) * size, rank**2 * size, 4 * rank * size, size, {"U": (1, size, rank)})
    return None


def _dense(p: int) -> Cost:
    return Cost(2 * p**2, p**3 // 3, 2 * p**2, p**2, {"G": (1, p, p)})


def _sum(costs: Sequence[Cost]) -> Cost:
    """All of them; what is kept is known by its shape where there is one."""
    if len(costs) == 1:
        return costs[0]
    numbers = [(cost.kept, cost.invert, cost.solve, cost.position) for cost in costs]
    return Cost(*(sum(column) for column in zip(*numbers, strict=True)))


def _product(structure: Kronecker | EigenKronecker, block: Block, by_product: bool) -> Cost:
    """S ⊗ A: inverted as a product, or through eigenvectors."""
    c, o, i = block.shape
    left, right = structure.shapes(block)
    sides = [(shape, d) for shape, d in ((left, o), (right, i))]
    factors = sum(math.prod(shape) for shape, _ in sides)
    cubes = sum(c * d**3 for shape, d in sides if len(shape) == 3)
    # One product with each side: a full factor takes 2d a number of W, a diagonal one takes 1.
    products = sum(block.size * (2 * d if len(shape) == 3 else 1) for shape, d in sides)
    squares = sum(math.prod(shape) for shape, _ in sides)
    shapes = {"S": left, "A": right}
    rotations = sum(math.prod(shape) for shape, _ in sides if len(shape) == 3)
    match structure:
        case EigenKronecker():
            kept = factors + rotations + 2 * block.size
            rotate = 2 * rotations + 2 * block.size  # Qᵀg and Pᵀa, and the squares of their products
            return Cost(kept, EIGENVECTORS * cubes, 2 * products, squares + rotate, {**shapes, "D": block.shape})
        case Kronecker() if by_product:
            return Cost(2 * factors, cubes, products, squares, shapes)
    return Cost(factors + rotations + block.size, EIGENVECTORS * cubes, 2 * products, squares, shapes)

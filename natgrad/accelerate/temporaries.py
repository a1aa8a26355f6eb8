"""How much is worked on at once (larger temporaries are made in pieces), and how a Jacobian is cheapest."""

from __future__ import annotations

ROWS = 2**24  # explicit rows, per-example gradients, Jacobians: pieces are long enough for few launches
TEMPORARY = 2**22  # differences of points, exact roots, products of rows
STAYS_IN_GPU_CACHE = 2**23  # of a large GPU
STAYS_IN_CPU_CACHE = 2**21  # cotangents of a few layers
PROBED = 2**21  # rows, from which on their traces are estimated by probes
KERNEL_VALUES = 2**20
BESSEL_VALUES = 2**18  # Bessel functions need twenty temporaries of these, in double precision
SMALL_PASSES = 2**13  # numbers that several passes of a small function read or return together
CHUNK_BYTES = 2**28  # of a temporary, however much memory is allowed
HESSIAN_COLUMNS = 32  # of a dense Hessian, in one backward pass

_FEW_ROWS = 256  # up to which a Jacobian is differentiated by rows, though there are fewer columns
_MANY = 1000  # small matrices, from which on passes over all of them are faster than LAPACK
_FEW_COLUMNS = 4  # of each
_COLUMN = 2  # what a forward pass for a column takes, in units of a backward pass for a row


def by_rows(rows: int, columns: int) -> bool:
    """Whether a Jacobian is differentiated by rows, in backward passes, and not by columns, in forward passes.

    >>> by_rows(256, 3), by_rows(1000, 3), by_rows(1000, 600)
    (True, False, True)
    """
    return rows <= max(_COLUMN * columns, _FEW_ROWS)


def by_columns(matrices: int, columns: int) -> bool:
    """Whether thousands of small matrices are orthogonalised together, column by column, and not one by one by LAPACK.

    >>> by_columns(10_000, 3), by_columns(10_000, 6), by_columns(100, 3)
    (True, False, False)
    """
    return matrices >= _MANY and columns <= _FEW_COLUMNS


def at_once(size: int, limit: int = ROWS) -> int:
    """How many things of so many numbers each are worked on at once: one at least.

    >>> at_once(2**20), at_once(2**30), at_once(0)
    (16, 1, 16777216)
    """
    return max(1, limit // max(1, size))

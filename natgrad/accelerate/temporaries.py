"""How many numbers are worked on at once: larger temporaries than these are made in pieces."""

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


def at_once(size: int, limit: int = ROWS) -> int:
    """How many things of so many numbers each are worked on at once: one at least.

    >>> at_once(2**20), at_once(2**30), at_once(0)
    (16, 1, 16777216)
    """
    return max(1, limit // max(1, size))

"""Solvers: how the metric turns a covector into a vector."""

from natgrad.operators.newton import Newton as Newton
from natgrad.solve.base import Solver as Solver
from natgrad.solve.cg import CG as CG
from natgrad.solve.direct import Cholesky as Cholesky
from natgrad.solve.factored import Factored as Factored
from natgrad.solve.pinv import Pinv as Pinv

"""Solvers: how the metric turns a covector into a vector."""

from natgrad.solve.cg import CG as CG
from natgrad.solve.solvers import Cholesky as Cholesky
from natgrad.solve.solvers import Factored as Factored
from natgrad.solve.solvers import Pinv as Pinv
from natgrad.solve.solvers import Solver as Solver

"""Structures: what is kept of a pulled-back metric. Each estimates an operator from a pullback."""

from natgrad.structures.base import Refresh as Refresh
from natgrad.structures.base import Structure as Structure
from natgrad.structures.dense import BlockDense as BlockDense
from natgrad.structures.dense import Dense as Dense
from natgrad.structures.diagonal import Diagonal as Diagonal
from natgrad.structures.eigen_kronecker import EigenKronecker as EigenKronecker
from natgrad.structures.implicit import Implicit as Implicit
from natgrad.structures.kernel import Kernel as Kernel
from natgrad.structures.kronecker import Kronecker as Kronecker
from natgrad.structures.low_rank import LowRank as LowRank
from natgrad.structures.low_rank import Nystrom as Nystrom

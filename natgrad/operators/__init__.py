"""Metrics on parameter space in the structures they are kept in."""

from natgrad.structures.base import Inverse as Inverse
from natgrad.structures.base import Layout as Layout
from natgrad.structures.base import Operator as Operator
from natgrad.structures.dense import BlockDenseOperator as BlockDenseOperator
from natgrad.structures.dense import DenseOperator as DenseOperator
from natgrad.structures.diagonal import DiagonalOperator as DiagonalOperator
from natgrad.structures.eigen_kronecker import EigenKroneckerOperator as EigenKroneckerOperator
from natgrad.structures.implicit import HessianOperator as HessianOperator
from natgrad.structures.implicit import ImplicitOperator as ImplicitOperator
from natgrad.structures.kernel import KernelOperator as KernelOperator
from natgrad.structures.kronecker import KroneckerOperator as KroneckerOperator
from natgrad.structures.low_rank import LowRankOperator as LowRankOperator
from natgrad.structures.sum import SumOperator as SumOperator

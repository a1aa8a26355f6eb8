"""Metrics on parameter space in the structures they are kept in."""

from natgrad.operators.base import Inverse as Inverse
from natgrad.operators.base import Layout as Layout
from natgrad.operators.base import Operator as Operator
from natgrad.operators.dense import BlockDenseOperator as BlockDenseOperator
from natgrad.operators.dense import DenseOperator as DenseOperator
from natgrad.operators.diagonal import DiagonalOperator as DiagonalOperator
from natgrad.operators.eigen import EigenKroneckerOperator as EigenKroneckerOperator
from natgrad.operators.implicit import ImplicitOperator as ImplicitOperator
from natgrad.operators.kernel import KernelOperator as KernelOperator
from natgrad.operators.kronecker import KroneckerOperator as KroneckerOperator
from natgrad.operators.lowrank import LowRankOperator as LowRankOperator

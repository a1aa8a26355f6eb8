"""The geometry of function space: Sobolev spaces, their reproducing kernels, and gradients of functions."""

from natgrad.functionspace.descent import FunctionalGradientDescent as FunctionalGradientDescent
from natgrad.functionspace.kernels import ReproducingKernel as ReproducingKernel
from natgrad.functionspace.kernels import SobolevKernel as SobolevKernel
from natgrad.functionspace.lengthscale import Lengthscale as Lengthscale
from natgrad.functionspace.lengthscale import Median as Median
from natgrad.functionspace.rkhs import KernelSum as KernelSum
from natgrad.functionspace.rkhs import functional_gradient as functional_gradient
from natgrad.functionspace.tangent import TangentSpace as TangentSpace

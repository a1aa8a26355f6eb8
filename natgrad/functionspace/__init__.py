"""The geometry of function space: Sobolev spaces, their reproducing kernels, and gradients of functions."""

from natgrad.functionspace.basin import BasinVolume as BasinVolume
from natgrad.functionspace.basin import basin_volume as basin_volume
from natgrad.functionspace.flatness import Flatness as Flatness
from natgrad.functionspace.flatness import Volume as Volume
from natgrad.functionspace.flatness import flatness as flatness
from natgrad.functionspace.flow import Flow as Flow
from natgrad.functionspace.flow import gradient_flow as gradient_flow
from natgrad.functionspace.ntk import NTKOperator as NTKOperator
from natgrad.functionspace.ntk import layer_ntks as layer_ntks
from natgrad.functionspace.ntk import ntk as ntk
from natgrad.functionspace.quadrature import Quadrature as Quadrature
from natgrad.functionspace.quadrature import Weighted as Weighted
from natgrad.functionspace.rkhs import FunctionalGradientDescent as FunctionalGradientDescent
from natgrad.functionspace.rkhs import KernelSum as KernelSum
from natgrad.functionspace.rkhs import functional_gradient as functional_gradient
from natgrad.functionspace.tangent import NTKMap as NTKMap
from natgrad.functionspace.tangent import PushforwardMetric as PushforwardMetric
from natgrad.functionspace.tangent import TangentFrame as TangentFrame
from natgrad.functionspace.tangent import TangentKernel as TangentKernel
from natgrad.functionspace.tangent import TangentSpace as TangentSpace
from natgrad.kernels.sobolev import Alike as Alike
from natgrad.kernels.sobolev import Lengthscale as Lengthscale
from natgrad.kernels.sobolev import Median as Median
from natgrad.kernels.sobolev import ReproducingKernel as ReproducingKernel
from natgrad.kernels.sobolev import SobolevKernel as SobolevKernel

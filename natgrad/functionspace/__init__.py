"""The geometry of function space: Sobolev spaces, their reproducing kernels, and gradients of functions."""

from natgrad.functionspace.descent import FunctionalGradientDescent as FunctionalGradientDescent
from natgrad.functionspace.flatness import Flatness as Flatness
from natgrad.functionspace.flatness import Volume as Volume
from natgrad.functionspace.flatness import flatness as flatness
from natgrad.functionspace.kernels import ReproducingKernel as ReproducingKernel
from natgrad.functionspace.kernels import SobolevKernel as SobolevKernel
from natgrad.functionspace.lengthscale import Alike as Alike
from natgrad.functionspace.lengthscale import Lengthscale as Lengthscale
from natgrad.functionspace.lengthscale import Median as Median
from natgrad.functionspace.ntk import NTKOperator as NTKOperator
from natgrad.functionspace.ntk import layer_ntks as layer_ntks
from natgrad.functionspace.ntk import ntk as ntk
from natgrad.functionspace.projection import NTKMap as NTKMap
from natgrad.functionspace.projection import TangentFrame as TangentFrame
from natgrad.functionspace.projection import TangentKernel as TangentKernel
from natgrad.functionspace.pushforward import PushforwardMetric as PushforwardMetric
from natgrad.functionspace.quadrature import Quadrature as Quadrature
from natgrad.functionspace.quadrature import Weighted as Weighted
from natgrad.functionspace.rkhs import KernelSum as KernelSum
from natgrad.functionspace.rkhs import functional_gradient as functional_gradient
from natgrad.functionspace.tangent import TangentSpace as TangentSpace

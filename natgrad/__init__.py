"""natgrad: natural gradients for PyTorch.

Put a metric on a model's outputs, pull it back to the parameters, keep it in a structure that can be inverted, and
turn the differential of the loss (a covector) into a step (a vector).
"""

from types import ModuleType as _Module

from natgrad import errors as errors
from natgrad import families as families
from natgrad import functionspace as functionspace
from natgrad import integrations as integrations
from natgrad import invariance as invariance
from natgrad import mirror as mirror
from natgrad import operators as operators
from natgrad import pde as pde
from natgrad import proximal as proximal
from natgrad import rules as rules
from natgrad import vi as vi
from natgrad import watch as watch
from natgrad.diagnosis import Diagnosis as Diagnosis
from natgrad.diagnosis import diagnose as diagnose
from natgrad.families import Bernoulli as Bernoulli
from natgrad.families import Categorical as Categorical
from natgrad.families import Gaussian as Gaussian
from natgrad.families import Poisson as Poisson
from natgrad.fit import CurveFit as CurveFit
from natgrad.fit import FitResult as FitResult
from natgrad.fit import GaussNewton as GaussNewton
from natgrad.fit import LeastSquares as LeastSquares
from natgrad.fit import Residuals as Residuals
from natgrad.fit import curve_fit as curve_fit
from natgrad.fit import least_squares as least_squares
from natgrad.geometry import Covector as Covector
from natgrad.geometry import Identity as Identity
from natgrad.geometry import Jacobian as Jacobian
from natgrad.geometry import Vector as Vector
from natgrad.geometry import differential as differential
from natgrad.geometry import jacobian as jacobian
from natgrad.geometry import pullback_covector as pullback_covector
from natgrad.geometry import pushforward as pushforward
from natgrad.gradients import SOAP as SOAP
from natgrad.gradients import Muon as Muon
from natgrad.gradients import Natural as Natural
from natgrad.gradients import Shampoo as Shampoo
from natgrad.integrations.writers import log_to as log_to
from natgrad.lanczos import SpectralDensity as SpectralDensity
from natgrad.lanczos import spectral_density as spectral_density
from natgrad.linalg import Relative as Relative
from natgrad.mirror.optimizer import MirrorDescent as MirrorDescent
from natgrad.model import evaluating as evaluating
from natgrad.musical import hessian as hessian
from natgrad.musical import natural_gradient as natural_gradient
from natgrad.musical import sharp as sharp
from natgrad.optim import EKFAC as EKFAC
from natgrad.optim import KFAC as KFAC
from natgrad.optim import NaturalGradient as NaturalGradient
from natgrad.optim import SobolevKFAC as SobolevKFAC
from natgrad.optim import StochasticReconfiguration as StochasticReconfiguration
from natgrad.output import BatchGradient as BatchGradient
from natgrad.output import Bregman as Bregman
from natgrad.output import Divergence as Divergence
from natgrad.output import Empirical as Empirical
from natgrad.output import Euclidean as Euclidean
from natgrad.output import Fisher as Fisher
from natgrad.output import FubiniStudy as FubiniStudy
from natgrad.output import GradientCovariance as GradientCovariance
from natgrad.output import Heads as Heads
from natgrad.output import LossHessian as LossHessian
from natgrad.output import OutputMetric as OutputMetric
from natgrad.output import Sampled as Sampled
from natgrad.output import Sobolev as Sobolev
from natgrad.output import metric_of as metric_of
from natgrad.pullbacks import Pullback as Pullback
from natgrad.pullbacks import pullback as pullback
from natgrad.solve import CG as CG
from natgrad.solve import Cholesky as Cholesky
from natgrad.solve import Factored as Factored
from natgrad.solve import Pinv as Pinv
from natgrad.step import Armijo as Armijo
from natgrad.step import BackProjection as BackProjection
from natgrad.step import Backtracking as Backtracking
from natgrad.step import Clipping as Clipping
from natgrad.step import Constrained as Constrained
from natgrad.step import Fixed as Fixed
from natgrad.step import GeodesicCorrected as GeodesicCorrected
from natgrad.step import GeodesicSearch as GeodesicSearch
from natgrad.step import GridSearch as GridSearch
from natgrad.step import KLClip as KLClip
from natgrad.step import LevenbergMarquardt as LevenbergMarquardt
from natgrad.step import Normalised as Normalised
from natgrad.step import Penalty as Penalty
from natgrad.step import Polar as Polar
from natgrad.step import SelfTuned as SelfTuned
from natgrad.step import Spring as Spring
from natgrad.step import TrustRegion as TrustRegion
from natgrad.step import exponential as exponential
from natgrad.structures import BlockDense as BlockDense
from natgrad.structures import Dense as Dense
from natgrad.structures import Diagonal as Diagonal
from natgrad.structures import EigenKronecker as EigenKronecker
from natgrad.structures import Implicit as Implicit
from natgrad.structures import Kernel as Kernel
from natgrad.structures import Kronecker as Kronecker
from natgrad.structures import LowRank as LowRank
from natgrad.structures import Nystrom as Nystrom
from natgrad.structures import Refresh as Refresh

__version__ = "0.2.0.dev0"

_NAMESPACES = {"errors", "families", "functionspace", "integrations", "invariance", "mirror", "operators", "optim"}
_NAMESPACES |= {"output", "pde", "proximal", "pullbacks", "rules", "solve", "step", "structures", "vi", "watch"}
__all__ = [
    name
    for name, value in globals().items()
    if not name.startswith("_") and (name in _NAMESPACES or not isinstance(value, _Module))
]


def __dir__() -> list[str]:
    """The public names. Other modules of the package are its inside, and may change."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])

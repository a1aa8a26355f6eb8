"""natgrad: the natural gradient for PyTorch.

Put a metric on a model's outputs, pull it back to its parameters, keep it in a structure that can be inverted, and
turn the differential of the loss (a covector) into a step (a vector).
"""

from natgrad import errors as errors
from natgrad import families as families
from natgrad import invariance as invariance
from natgrad import operators as operators
from natgrad.diagnose import Diagnosis as Diagnosis
from natgrad.diagnose import diagnose as diagnose
from natgrad.families import Bernoulli as Bernoulli
from natgrad.families import Categorical as Categorical
from natgrad.families import Gaussian as Gaussian
from natgrad.families import Poisson as Poisson
from natgrad.geometry import Covector as Covector
from natgrad.geometry import Identity as Identity
from natgrad.geometry import Vector as Vector
from natgrad.geometry import differential as differential
from natgrad.geometry import pullback_covector as pullback_covector
from natgrad.geometry import pushforward as pushforward
from natgrad.model import evaluating as evaluating
from natgrad.natural import natural_gradient as natural_gradient
from natgrad.natural import sharp as sharp
from natgrad.optim import NaturalGradient as NaturalGradient
from natgrad.output import Bregman as Bregman
from natgrad.output import Divergence as Divergence
from natgrad.output import Empirical as Empirical
from natgrad.output import Euclidean as Euclidean
from natgrad.output import Fisher as Fisher
from natgrad.output import GradientCovariance as GradientCovariance
from natgrad.output import LossHessian as LossHessian
from natgrad.output import OutputMetric as OutputMetric
from natgrad.output import Sampled as Sampled
from natgrad.pullback import Pullback as Pullback
from natgrad.pullback import pullback as pullback
from natgrad.solve import CG as CG
from natgrad.solve import Cholesky as Cholesky
from natgrad.solve import Pinv as Pinv
from natgrad.step import BackProjection as BackProjection
from natgrad.step import Backtracking as Backtracking
from natgrad.step import Clipping as Clipping
from natgrad.step import Constrained as Constrained
from natgrad.step import Fixed as Fixed
from natgrad.step import GeodesicCorrected as GeodesicCorrected
from natgrad.step import LevenbergMarquardt as LevenbergMarquardt
from natgrad.step import Penalty as Penalty
from natgrad.step import TrustRegion as TrustRegion
from natgrad.step import exponential as exponential
from natgrad.step import proximal as proximal
from natgrad.structures import BlockDense as BlockDense
from natgrad.structures import Dense as Dense
from natgrad.structures import Diagonal as Diagonal
from natgrad.structures import Implicit as Implicit
from natgrad.structures import Kernel as Kernel
from natgrad.structures import LowRank as LowRank
from natgrad.structures import Refresh as Refresh

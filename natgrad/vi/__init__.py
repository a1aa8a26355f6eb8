"""Variational inference and Gaussian approximations of posteriors."""

from natgrad.vi.ascent import Ascent as Ascent
from natgrad.vi.ascent import ascend as ascend
from natgrad.vi.covariance import Covariance as Covariance
from natgrad.vi.covariance import Matern as Matern
from natgrad.vi.covariance import SquaredExponential as SquaredExponential
from natgrad.vi.gp import SparseGP as SparseGP
from natgrad.vi.laplace import Laplace as Laplace
from natgrad.vi.laplace import Predictive as Predictive
from natgrad.vi.latent import LatentGaussian as LatentGaussian
from natgrad.vi.likelihoods import BernoulliLogit as BernoulliLogit
from natgrad.vi.likelihoods import GaussianNoise as GaussianNoise
from natgrad.vi.likelihoods import Likelihood as Likelihood
from natgrad.vi.likelihoods import PoissonCounts as PoissonCounts
from natgrad.vi.likelihoods import Quadrature as Quadrature
from natgrad.vi.likelihoods import StudentNoise as StudentNoise
from natgrad.vi.linear import BayesianLinear as BayesianLinear
from natgrad.vi.step import Step as Step

"""Variational inference and Gaussian approximations of posteriors."""

from natgrad.vi.laplace import Laplace as Laplace
from natgrad.vi.laplace import Predictive as Predictive

"""Nonlinear least squares: small dense problems, one fit or many beside each other, and residuals of a network."""

from natgrad.fit.curve import CurveFit as CurveFit
from natgrad.fit.curve import curve_fit as curve_fit
from natgrad.fit.networks import LeastSquares as LeastSquares
from natgrad.fit.optimizer import GaussNewton as GaussNewton
from natgrad.fit.residuals import Residuals as Residuals
from natgrad.fit.result import FitResult as FitResult
from natgrad.fit.result import Record as Record
from natgrad.fit.result import Status as Status
from natgrad.fit.solve import least_squares as least_squares

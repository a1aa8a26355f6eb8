"""Nonlinear least squares: residual functions, their Jacobian in a structure, and the loop around the step rules."""

from natgrad.gauss_newton.engine import LeastSquares as LeastSquares
from natgrad.gauss_newton.engine import LeastSquaresResult as LeastSquaresResult
from natgrad.gauss_newton.engine import Record as Record
from natgrad.gauss_newton.optimizer import GaussNewton as GaussNewton
from natgrad.gauss_newton.residuals import Residuals as Residuals

"""Nonlinear least squares of small dense problems: one fit, or many beside each other."""

from natgrad.least_squares.curve_fit import CurveFit as CurveFit
from natgrad.least_squares.curve_fit import curve_fit as curve_fit
from natgrad.least_squares.result import FitResult as FitResult
from natgrad.least_squares.solve import least_squares as least_squares

"""Optimizers."""

from natgrad.optim.optimizer import NaturalGradient as NaturalGradient
from natgrad.optim.presets import EKFAC as EKFAC
from natgrad.optim.presets import KFAC as KFAC
from natgrad.optim.presets import SobolevKFAC as SobolevKFAC
from natgrad.optim.presets import StochasticReconfiguration as StochasticReconfiguration
from natgrad.optim.presets import natural_of_outputs as natural_of_outputs
from natgrad.optim.report import Diagnostics as Diagnostics
from natgrad.optim.report import Plan as Plan

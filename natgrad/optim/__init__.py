"""Optimizers."""

from natgrad.optim.optimizer import NaturalGradient as NaturalGradient
from natgrad.optim.presets import EKFAC as EKFAC
from natgrad.optim.presets import KFAC as KFAC
from natgrad.optim.presets import SOAP as SOAP
from natgrad.optim.presets import Muon as Muon
from natgrad.optim.presets import Natural as Natural
from natgrad.optim.presets import Shampoo as Shampoo
from natgrad.optim.presets import SobolevKFAC as SobolevKFAC
from natgrad.optim.presets import StochasticReconfiguration as StochasticReconfiguration
from natgrad.optim.report import Diagnostics as Diagnostics
from natgrad.optim.report import Plan as Plan

"""Optimizers."""

from natgrad.optim.optimizer import NaturalGradient as NaturalGradient
from natgrad.optim.presets import EKFAC as EKFAC
from natgrad.optim.presets import KFAC as KFAC

"""Optimizers."""

from natgrad.optim.optimizer import NaturalGradient as NaturalGradient

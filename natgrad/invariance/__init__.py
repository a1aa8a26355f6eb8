"""Checks of invariance: the same function in other coordinates."""

from natgrad.invariance.reparametrisation import Reparametrisation as Reparametrisation
from natgrad.invariance.reparametrisation import reparametrisation as reparametrisation

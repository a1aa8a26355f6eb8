"""Checks of invariance: the same function in other coordinates."""

from natgrad.invariance.affine import Bases as Bases
from natgrad.invariance.affine import Change as Change
from natgrad.invariance.affine import Chosen as Chosen
from natgrad.invariance.affine import Coordinates as Coordinates
from natgrad.invariance.affine import Original as Original
from natgrad.invariance.affine import Random as Random
from natgrad.invariance.affine import Space as Space
from natgrad.invariance.certificate import Certificate as Certificate
from natgrad.invariance.certificate import Sweep as Sweep
from natgrad.invariance.certificate import certify as certify
from natgrad.invariance.certificate import damping_sweep as damping_sweep
from natgrad.invariance.parametrisations import Comparison as Comparison
from natgrad.invariance.parametrisations import compare as compare
from natgrad.invariance.reparametrise import Reparametrisation as Reparametrisation
from natgrad.invariance.reparametrise import reparametrisation as reparametrisation
from natgrad.invariance.reparametrise import reparametrise as reparametrise

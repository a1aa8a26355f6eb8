"""Optimizers from gradients alone."""

from natgrad.gradients.assignment import Assignment as Assignment
from natgrad.gradients.assignment import GradientPlan as GradientPlan
from natgrad.gradients.muon import Muon as Muon
from natgrad.gradients.natural import Natural as Natural
from natgrad.gradients.shampoo import Shampoo as Shampoo
from natgrad.gradients.soap import SOAP as SOAP

"""Distributions of the targets given the outputs."""

from natgrad.families.base import Family as Family
from natgrad.families.continuous import Gaussian as Gaussian
from natgrad.families.discrete import Bernoulli as Bernoulli
from natgrad.families.discrete import Categorical as Categorical
from natgrad.families.discrete import Poisson as Poisson
from natgrad.families.distribution import FromDistribution as FromDistribution

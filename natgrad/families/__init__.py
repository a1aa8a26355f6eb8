"""Distributions: of the targets given a model's outputs, and exponential families with both of their charts."""

from natgrad.families.base import Family as Family
from natgrad.families.categorical import Categorical as Categorical
from natgrad.families.continuous import Gaussian as Gaussian
from natgrad.families.counts import Binomial as Binomial
from natgrad.families.counts import Geometric as Geometric
from natgrad.families.counts import NegativeBinomial as NegativeBinomial
from natgrad.families.discrete import Bernoulli as Bernoulli
from natgrad.families.discrete import Poisson as Poisson
from natgrad.families.distribution import FromDistribution as FromDistribution
from natgrad.families.exponential import ExponentialFamily as ExponentialFamily
from natgrad.families.exponential import OneParameter as OneParameter
from natgrad.families.information import Information as Information
from natgrad.families.masked import Mask as Mask
from natgrad.families.masked import Masked as Masked

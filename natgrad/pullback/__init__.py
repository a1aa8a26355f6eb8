"""The pullback of an output metric: one forward pass, its tape, and per-example gradients in factored form."""

from natgrad.pullback.factors import Factors as Factors
from natgrad.pullback.layer import Block as Block
from natgrad.pullback.pullback import LoaderPullback as LoaderPullback
from natgrad.pullback.pullback import Pullback as Pullback
from natgrad.pullback.pullback import pullback as pullback

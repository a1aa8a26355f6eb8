"""The pullback of an output metric: one forward pass, its tape, and per-example gradients in factored form."""

from natgrad.pullbacks.example_grads import ExampleGrads as ExampleGrads
from natgrad.pullbacks.layer import Block as Block
from natgrad.pullbacks.pullback import LoaderPullback as LoaderPullback
from natgrad.pullbacks.pullback import Pullback as Pullback
from natgrad.pullbacks.pullback import pullback as pullback

"""BatchGradient: the second moment of the batch gradients over the steps, which needs no metric on the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.output.metric import OutputMetric, Source


@final
@dataclass(frozen=True)
class BatchGradient(OutputMetric):
    """The metric of the batch's own gradients: the metric of Adam, Shampoo and SOAP.

    It is a choice in the metric slot of an optimizer, and no metric on outputs: nothing looks at a forward pass, and no
    layer rule is needed. ``ng.Natural`` and its relatives are the presets.

    - ``Diagonal(power=½)``: the metric of Adam (Kingma and Ba 2015);
    - ``Dense()``: the full matrix of AdaGrad (Duchi, Hazan and Singer 2011);
    - ``Kronecker(power=½)``: Shampoo (Gupta, Koren and Singer 2018);
    - ``EigenKronecker(power=½)``: SOAP (Vyas et al. 2024).

    Method:
        G = E[g gᵀ] over the steps, g the gradient of the batch: what ``.grad`` holds when ``opt.step()`` is called.

        For ``Kronecker`` and ``EigenKronecker`` every parameter of two or more axes is a matrix of its own, W [o i *k],
        whose entries k (the offsets of a convolution) share the factors: S = Σ_k G_k G_kᵀ/(i·k) and A = Σ_k G_kᵀ
        G_k/(o·k). The other parameters have the fallback structure.

        G has the scale of the loss, squared: the mean over a batch is ``1/N`` of the sum. It contains the signal beside
        the noise, and so calls for a power of ½ rather than 1.

        A parameter without a gradient in a step keeps its part of the average. The correction for the start of the
        average counts all steps, except for matrices, of which the first gradient counts in full. Where all gradients
        so far were zero, G is zero on that parameter, and with a damping so is the step.

    Example:
        >>> import torch, natgrad as ng
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> opt = ng.NaturalGradient(model, ng.BatchGradient(), structure=ng.Diagonal())
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> opt.step()
        >>> opt.tracker.average.diagonal()
        tensor([1., 4.])
    """

    @property
    def source(self) -> Source:
        return "gradients"

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        self._refuse()

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        self._refuse()

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise IncompatibleError(
            "BatchGradient is the second moment of gradients, and no metric on the outputs of a model: it has no "
            "pullback, root or divergence. Give it to an optimizer, or use Fisher, Euclidean or Empirical here"
        )

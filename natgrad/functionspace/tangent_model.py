"""A network trained in the fixed tangent space of its start: its linearisation, as a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.isolation import unfused, untouched
from natgrad.model import OpaqueNetwork


@final
class TangentModel(OpaqueNetwork):
    """A network that moves in its tangent space only, to compare ordinary training with.

    It is a module like any other: all optimizers, metrics and structures of natgrad and torch train it.

    Args:
        model: The network at the parameters where it is linearised; a copy is taken. It returns one tensor.

    Method:
        f₀(θ; x) = f(θ₀; x) + ∂f/∂θ(θ₀; x)·(θ − θ₀), by forward-mode derivatives: a model that is linear in θ, with the
        neural tangent kernel and the pulled-back metric of the network at θ₀, wherever θ goes (Jacot, Gabriel and
        Hongler 2018; Bai, Rosenberg and Xu 2022, section 5.2).

        Its state has θ alone: load it into one that was made of the same network. Buffers, such as running averages,
        stay those of θ₀.

        Its layers are those of θ₀ and are not trained, so Kronecker factors are not available; use ``Kernel``,
        ``Dense`` or ``Implicit``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> tangent, x = TangentModel(net), torch.randn(5, 2)
        >>> torch.allclose(tangent(x), net(x))
        True
        >>> opt = torch.optim.SGD(tangent.parameters(), lr=0.1)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, {name: p for name, p in model.named_parameters() if p.requires_grad})

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        network, θ = self.network, self.point
        start = {name: p for name, p in network.named_parameters() if name in θ}
        velocity = {name: θ[name] - p for name, p in start.items()}

        def f(p: Mapping[str, Tensor]) -> Any:
            with untouched(network):  # in here its buffers may be written to
                return torch.func.functional_call(network, dict(p), args, kwargs)

        with unfused(network, next(iter(θ.values())).device):
            y, change = torch.func.jvp(f, (start,), (velocity,))[:2]
        if not isinstance(y, Tensor):
            raise TypeError(
                f"TangentModel needs a network that returns one tensor, and it returned a {type(y).__name__}"
            )
        return y + change

"""ng.Natural: Muon in coordinates in which all neurons, and all inputs, have gradients of one size."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from natgrad.gradients.muon import Iteration, check_iteration, polar_factors
from natgrad.gradients.optimizer import GradientOptimizer, Groups, Parameters, ShapeBatch, of_length
from natgrad.linalg import Damping, Relative, check_power
from natgrad.model import check_types
from natgrad.optim.presets import natural_of_outputs
from natgrad.output.losses import Criterion
from natgrad.output.metric import OutputMetric
from natgrad.step.normalised import check_rms

_SHARE = Relative(1e-2)


@final
class Natural(GradientOptimizer):
    """The optimizer to start with: natural-gradient steps from the gradients alone.

    It takes AdamW's place in a training loop. ``print(opt.plan())`` shows what steps every parameter, and why. With a
    ``metric`` the result is a ``NaturalGradient``: its arguments are those of ``natgrad.optim.natural_of_outputs``.

    Args:
        params: The model, ``model.parameters()``, ``model.named_parameters()``, or parameter groups of these. Of a
            plain list it is not known which are embeddings and the head.
        metric: A metric on the outputs, or a loss, which is then estimated from the model's own passes. None, the
            default, takes the second moment of gradients.
        lr: Learning rate. AdamW's best is no guide: search in factors of 2 from the default, mostly upwards.
        weight_decay: Decoupled weight decay, as AdamW's.
        momentum: μ of the moving average of gradients.
        power: p. With ½ the metric is half-way between the identity and G.
        damping: λ ≥ 0; or ``Relative(ε)``, the default: ε·mean S and ε·mean A are added to S and A.
        rms: The root mean square of a step of full rank, as a multiple of the learning rate.
        polar: Steps by polar factors. False takes v = G^-p M, with the root mean square lr·rms.
        iteration: How polar factors are computed, "muon" or "minimax", as in ``Muon``.
        decay: That of the moving averages S and A.
        groups: Parameter groups beside ``params``. A group may have an lr, weight_decay and momentum of its own;
            ``"fallback": "adamw"`` for all of its parameters, or ``None`` for none of them (a parameter with three axes
            is then a kernel); and ``"blocks": 3`` or ``(rows, columns)``, where a matrix is several: queries, keys and
            values, gates, heads.

    Method:
        θ ← (1 − lr·wd)θ − lr·rms·√max(o, i)·v, v = G^-p/2 polar(G^-p/2 M) for every matrix W [o i]: steepest descent in
        the spectral norm of a metric (``Muon`` is that of G = 1), v scaled to the length of polar(UΣVᵀ) = UVᵀ.

        M = μm + (1 − μ)∇ with m ← μm + (1 − μ)∇ is the momentum of gradients (Nesterov 1983).

        Of G = S ⊗ A the diagonals are kept, S = E[∇²]1/i, a number for every neuron, and A = 1ᵀE[∇²]/o, one for every
        input: the statistics of Adafactor (Shazeer and Stern 2018). So neurons with large gradients, and inputs of
        large size, do not dominate the singular vectors, and steps along them are short. Whole matrices S and A are
        those of ``Shampoo``.

        A kernel [o i *k] is the matrix [o i·k]; a parameter with three axes outside of a convolution is a stack of
        matrices [e o i] (experts), every one stepped by itself.

        AdamW with the same learning rate and weight decay, and β = (0.9, 0.95), steps embeddings, vectors (also
        matrices with one row or column, if there are others), and the head: what ``model.get_output_embeddings()``
        returns, or the matrix with a side as long as the vocabulary of an embedding.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> x, t = torch.randn(32, 4), torch.arange(32) % 3
        >>> opt = ng.Natural(model, lr=1e-2)
        >>> for _ in range(3):
        ...     opt.zero_grad()
        ...     nn.functional.cross_entropy(model(x), t).backward()
        ...     opt.step()
    """

    letters: tuple[str, ...] = ("S", "A")
    largest: int = 0

    def __new__(cls, *args: Any, **arguments: Any) -> Any:
        """A metric on the outputs needs the model's passes."""
        metric = args[1] if len(args) > 1 else arguments.get("metric")
        return super().__new__(cls) if metric is None else natural_of_outputs(*args, **arguments)

    def __init__(
        self,
        params: Parameters,
        metric: OutputMetric | Criterion | None = None,
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.9,
        power: float = 0.5,
        damping: Damping = _SHARE,
        rms: float = 0.4,
        polar: bool = True,
        iteration: Iteration = "muon",
        decay: float = 0.95,
        groups: Groups = (),
    ) -> None:
        check_power(power, "the metric of Natural")
        check_rms("Natural", rms)
        check_iteration("Natural", iteration)
        check_types(polar=(polar, bool, "True or False"))
        self.power: float = power
        self.rms: float = rms
        self.polar: bool = polar
        self.decay: float = decay
        self.iteration = iteration
        super().__init__(params, groups, lr=lr, weight_decay=weight_decay, momentum=momentum, damping=damping)

    def statistics(self, batch: ShapeBatch) -> dict[str, Tensor]:
        squares = batch.G.square()
        return {"S": squares.mean((1, 3)), "A": squares.mean((1, 2))}

    def directions(self, batches: Sequence[ShapeBatch], step: int) -> list[Tensor]:
        q = self.power / 2 if self.polar else self.power  # a half of the power on each side of a polar factor
        sides, whitened = [], []
        for batch in batches:
            S, A = batch.get("S"), batch.get("A")
            λ_S, λ_A = self.shifts(S.mean(1, keepdim=True), A.mean(1, keepdim=True))
            l, r = (S + λ_S).pow_(-q)[:, None, :, None], (A + λ_A).pow_(-q)[:, None, None, :]
            sides.append((l, r))
            W = batch.M * l * r
            if self.polar:  # of length one before it is rounded: a metric has any unit
                norms = torch.linalg.vector_norm(W, dim=(1, 2, 3), keepdim=True)
                whitened.append(W.div_(norms.clamp_(min=torch.finfo(W.dtype).tiny)))
            else:
                whitened.append(of_length(W, self.rms * W[0].numel() ** 0.5, batch))
        if not self.polar:
            return whitened
        out = []
        for batch, (l, r), X in zip(batches, sides, polar_factors(whitened, self.iteration), strict=True):
            unit = self.rms * max(batch.M.shape[2:]) ** 0.5
            out.append(of_length(X * l * r, unit * torch.linalg.vector_norm(X, dim=(1, 2, 3)), batch))
        return out


# ``__new__`` would hide the arguments from ``help``, and from the parser of LightningCLI, which unwraps it.
Natural.__new__.__wrapped__ = object.__new__  # type: ignore[attr-defined]
_self, *_arguments = inspect.signature(Natural.__init__).parameters.values()
Natural.__signature__ = inspect.Signature(_arguments)  # type: ignore[attr-defined]

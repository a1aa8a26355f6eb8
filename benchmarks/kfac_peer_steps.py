"""K-FAC training steps of other libraries, where they are installed.

Each trains a network of its own by its preconditioned gradients with momentum and returns the last loss. KAISA and
singd take the factors from the gradients of the training loss, asdl from those of one sample, by another backward pass.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

import natgrad as ng
from benchmarks.contestants import Problem, gradient
from benchmarks.peers import installed

Make: TypeAlias = Callable[[Problem], Callable[[], Any]]


@final
class Rows(nn.Module):
    """The same outputs as a matrix [n·r c]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)

    def forward(self, x: Tensor) -> Tensor:
        """[n …] to [n·r c]."""
        return self.model(x).flatten(0, -2)


@final
@dataclass(frozen=True)
class Rhythm:
    """So many steps in a call; the factors and their inverses are made every so many."""

    metric_every: int
    inverse_every: int
    count: int


def gaussian(problem: Problem) -> bool:
    """Whether the loss is of squares, not of classes."""
    return isinstance(problem.family, ng.Gaussian)


def flat_targets(problem: Problem) -> Tensor:
    """The targets of ``Rows``."""
    return problem.t.flatten(0, -2) if gaussian(problem) else problem.t.flatten()


def terms(problem: Problem) -> str:
    """What the loss is a mean over, in the words of singd."""
    return "batch" if len(flat_targets(problem)) == len(problem.x) else "batch+sequence"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that all of these libraries have factors of."""
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


def kaisa() -> Any:
    """KAISA, or None. Its package is called kfac, as a script here is, which must not be taken for it."""
    here, path = Path(__file__).resolve().parent, sys.path.copy()
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != here]
    try:
        return installed("kfac.preconditioner")
    finally:
        sys.path[:] = path


def steps(metric_every: int, inverse_every: int, count: int) -> dict[str, Make]:
    """K-FAC training steps, that many in a call."""
    makers = {
        "asdl": (installed("asdl"), _asdl),
        "KAISA": (kaisa(), _kaisa),
        "singd": (installed("singd.optim.optimizer"), _singd),
    }
    rhythm = Rhythm(metric_every, inverse_every, count)
    return {name: partial(make, rhythm) for name, (library, make) in makers.items() if library}


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True)


def _asdl(rhythm: Rhythm, problem: Problem) -> Callable[[], Any]:
    library, own = installed("asdl"), Rows(problem.model)
    config = library.PreconditioningConfig(
        data_size=len(problem.x),
        damping=1e-2,
        ema_decay=0.05,
        curvature_upd_interval=rhythm.metric_every,
        preconditioner_upd_interval=rhythm.inverse_every,
    )
    kind = "mse" if gaussian(problem) else "cross_entropy"
    maker = library.KfacGradientMaker(own, config, loss_type=kind)
    optimizer = _sgd(list(own.parameters()))
    t, loss = flat_targets(problem), nn.functional.mse_loss if gaussian(problem) else nn.functional.cross_entropy

    def contestant() -> Any:
        for _ in range(rhythm.count):
            optimizer.zero_grad()
            y = maker.setup_model_call(own, problem.x)
            maker.setup_loss_call(loss, y, t)
            _, value = maker.forward_and_backward()
            optimizer.step()
        return value.detach()

    return contestant


def _kaisa(rhythm: Rhythm, problem: Problem) -> Callable[[], Tensor]:
    """In one process there is nobody to talk to: it runs without a process group."""
    own = replace(problem, model=copy.deepcopy(problem.model))
    preconditioner = kaisa().KFACPreconditioner(
        own.model,
        factor_update_steps=rhythm.metric_every,
        inv_update_steps=rhythm.inverse_every,
        damping=1e-2,
        compute_method="inverse",  # as the others, and sooner done than the eigenvectors
        kl_clip=lambda step: None,  # no clipping, which reads numbers of every layer; None itself is refused
    )
    return _training(own, rhythm, [preconditioner, _sgd(list(own.model.parameters()))])


def _singd(rhythm: Rhythm, problem: Problem) -> Callable[[], Tensor]:
    """Its variant nearest to K-FAC. It multiplies where others invert: no inverses could be made less often."""
    own = replace(problem, model=copy.deepcopy(problem.model))
    layered = {p for layer in layers_of(own.model) for p in layer.parameters()}
    rest = [p for p in own.model.parameters() if p not in layered]
    optimizer = installed("singd.optim.optimizer").SINGD(
        own.model,
        lr=1e-4,
        momentum=0.9,
        damping=1e-2,
        alpha1=0.0,
        kfac_like=True,
        T=rhythm.metric_every,
        loss_average=terms(own),
        warn_unsupported=False,
    )
    return _training(own, rhythm, [optimizer, *([_sgd(rest)] if rest else [])])


def _training(own: Problem, rhythm: Rhythm, stages: list[Any]) -> Callable[[], Tensor]:
    """So many gradients, each followed by the steps of all stages in turn."""
    passes = gradient(own)

    def contestant() -> Tensor:
        for _ in range(rhythm.count):
            loss = passes()
            for stage in stages:
                stage.step()
        return loss

    return contestant

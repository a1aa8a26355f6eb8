"""K-FAC by other libraries, where they are installed: factors with one sample per example, and training steps.

A contestant for factors starts from the model and the batch, and returns the factors. Libraries leave hooks behind:
each gets its own copy of the model. Sequences are given to them as rows of independent outputs, which all of them
accept. KAISA and singd do not sample: they use the gradients of the training loss. ``runnable`` records the error of a
library that fails. Libraries disagree on scale factors, so that input covariances are compared up to scale before they
are timed. A contestant for steps trains its network with momentum and returns the last loss.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import natgrad as ng
from benchmarks.networks import Problem, gradient
from benchmarks.peers import OneBatch, installed

Make: TypeAlias = Callable[[Problem], Callable[[], Any]]
Factors: TypeAlias = Callable[[], list[Tensor]]


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
class RefreshCycle:
    """Steps per call, and how often the factors and their inverses are refreshed."""

    metric_every: int
    inverse_every: int
    count: int


def gaussian(problem: Problem) -> bool:
    """Whether the loss is a squared error."""
    return isinstance(problem.family, ng.Gaussian)


def flat_targets(problem: Problem) -> Tensor:
    """The targets of ``Rows``."""
    return problem.t.flatten(0, -2) if gaussian(problem) else problem.t.flatten()


def terms(problem: Problem) -> str:
    """What the loss is a mean over, as singd calls it."""
    return "batch" if len(flat_targets(problem)) == len(problem.x) else "batch+sequence"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers for which all of these libraries have factors."""
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


def kaisa() -> Any:
    """KAISA, or None. Its package is called kfac like a script here, which must not be imported instead."""
    here, path = Path(__file__).resolve().parent, sys.path.copy()
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != here]
    try:
        return installed("kfac.preconditioner")
    finally:
        sys.path[:] = path


def factors() -> dict[str, Make]:
    """The libraries that compute factors."""
    makers = {
        "curvlinops": (installed("curvlinops"), _curvlinops),
        "asdl": (installed("asdl"), _asdl_factors),
        "nngeometry": (installed("nngeometry"), _nngeometry),
        "BackPACK": (installed("backpack"), _backpack),
        "KAISA": (kaisa(), _kaisa_factors),
        "kronfluence": (installed("kronfluence.analyzer"), _kronfluence),
        "singd": (installed("singd.optim.optimizer"), _singd_factors),
    }
    return {name: make for name, (library, make) in makers.items() if library}


def runnable(
    makers: Mapping[str, Make], problem: Problem, check: Callable[[Any], str | None] = lambda made: None
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The contestants that run and pass the check, and a line about what is wrong with the others."""
    tried = {name: _try(make, problem, check) for name, make in makers.items()}
    able = {name: result for name, result in tried.items() if not isinstance(result, str)}
    return able, {name: result for name, result in tried.items() if isinstance(result, str)}


def _try(make: Make, problem: Problem, check: Callable[[Any], str | None]) -> Callable[[], Any] | str:
    """The contestant, after a first run, or its error."""

    def quiet() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return contestant()

    try:
        contestant = make(problem.copy())
        return check(quiet()) or quiet
    except Exception as error:  # a library may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def input_covariances(problem: Problem) -> list[Tensor]:
    """Σ a aᵀ [i i] of every Linear and Conv2d layer over examples, positions and uses, without the homogeneous 1."""
    own, sums = copy.deepcopy(problem.model), dict[nn.Module, Tensor]()

    def see(layer: nn.Module, inputs: tuple[Tensor, ...], _: Any) -> None:
        (a,) = inputs
        if isinstance(layer, nn.Conv2d):
            shape: list[Any] = [layer.kernel_size, layer.dilation, layer.padding, layer.stride]
            a = nn.functional.unfold(a, *shape).transpose(1, 2)
        a = a.flatten(0, -2)
        sums[layer] = a.T @ a + sums.get(layer, a.new_zeros(()))

    layers = layers_of(own)
    for layer in layers:
        layer.register_forward_hook(see)
    with torch.no_grad():
        own(problem.x)
    return [sums[layer] for layer in layers]


def same_inputs(problem: Problem) -> Callable[[list[Tensor]], str | None]:
    """A check that factors, input covariances first, are those of this problem up to scale."""
    expected = input_covariances(problem)

    def check(made: list[Tensor]) -> str | None:
        for factor, A in zip(made, expected, strict=False):
            block = factor[: len(A), : len(A)]
            if float((block / block.norm() - A / A.norm()).norm()) > 1e-2:
                return f"its input covariance [{len(A)} {len(A)}] is that of something else"
        return None

    return check


def _curvlinops(problem: Problem) -> Factors:
    own = Rows(problem.model)
    params = [p for layer in layers_of(own) for p in layer.parameters()]
    data, loss = [(problem.x, flat_targets(problem))], nn.MSELoss() if gaussian(problem) else nn.CrossEntropyLoss()

    def contestant() -> list[Tensor]:
        operator = installed("curvlinops").KFACLinearOperator(
            own,
            loss,
            params,
            data,
            check_deterministic=False,
            mc_samples=1,
            separate_weight_and_bias=False,
            num_data=len(problem.x),
            num_per_example_loss_terms=len(data[0][1]) // len(problem.x),
        )
        operator.compute_kronecker_factors()
        covariances = (operator._input_covariances, operator._gradient_covariances)
        return [factors[name] for factors in covariances for name in operator._mapping]

    return contestant


def _asdl_factors(problem: Problem) -> Factors:
    library, own = installed("asdl"), Rows(problem.model)
    kind = "mse" if gaussian(problem) else "cross_entropy"
    config = library.FisherConfig("fisher_mc", ["kron"], loss_type=kind, data_size=len(problem.x))

    def contestant() -> list[Tensor]:
        maker = library.get_fisher_maker(own, config)
        maker.setup_model_call(own, problem.x)
        maker.forward_and_backward()
        made: list[Any] = [layer.fisher.kron for layer in layers_of(own)]
        return [kron.A for kron in made] + [kron.B for kron in made]

    return contestant


def _nngeometry(problem: Problem) -> Factors:
    if gaussian(problem):
        raise ValueError("FIM_MonteCarlo samples classes only")
    metrics, pspace = installed("nngeometry.metrics"), installed("nngeometry.object.pspace")
    own = Rows(problem.model) if problem.t.ndim > 1 else copy.deepcopy(problem.model)
    loader = OneBatch(TensorDataset(problem.x, problem.t), batch_size=len(problem.x))

    def contestant() -> list[Tensor]:
        fim = metrics.FIM_MonteCarlo(own, loader, pspace.PMatKFAC, variant="classif_logits", device=problem.x.device)
        pairs = list(fim.data.values())
        return [a for a, _ in pairs] + [g for _, g in pairs]

    return contestant


def _backpack(problem: Problem) -> Factors:
    library, extension = installed("backpack"), installed("backpack.extensions").KFAC(mc_samples=1)
    own = library.extend(copy.deepcopy(problem.model))
    loss = library.extend(nn.MSELoss() if gaussian(problem) else nn.CrossEntropyLoss())
    t = problem.t

    def contestant() -> list[Tensor]:
        own.zero_grad()
        with library.backpack(extension):
            loss(own(problem.x), t).backward()
        weights: list[Any] = [layer.weight for layer in layers_of(own)]
        made = [w.kfac for w in weights]
        return [kfac[1] for kfac in made] + [kfac[0] for kfac in made]

    return contestant


def _kaisa_factors(problem: Problem) -> Factors:
    own = replace(problem, model=copy.deepcopy(problem.model))
    # A layer may be used more than once: its uses are one batch only if the average is updated after the backward pass.
    made = kaisa().KFACPreconditioner(own.model, update_factors_in_hook=False)
    layers: list[Any] = [layer for _, layer in made._layers.values()]
    passes = gradient(own)

    def contestant() -> list[Tensor]:
        passes()
        for layer in layers:  # as in its step, without a moving average
            layer.update_a_factor(alpha=0.0)
            layer.update_g_factor(alpha=0.0)
        return [layer.a_factor for layer in layers] + [layer.g_factor for layer in layers]

    return contestant


def _kronfluence(problem: Problem) -> Factors:
    """The passes of its ``fit_covariance_matrices_with_loader``, without the loader and the copy to the CPU."""
    tracking, tools = installed("kronfluence.module.tracked_module"), installed("kronfluence.module.utils")
    constants = installed("kronfluence.utils.constants")
    names = (constants.ACTIVATION_COVARIANCE_MATRIX_NAME, constants.GRADIENT_COVARIANCE_MATRIX_NAME)
    own = installed("kronfluence.analyzer").prepare_model(Rows(problem.model), None).to(problem.x.device)

    def contestant() -> list[Tensor]:
        tools.set_mode(own, tracking.ModuleMode.COVARIANCE, release_memory=True)
        y = own(problem.x)
        if gaussian(problem):
            loss = (y - torch.normal(y.detach(), 1.0)).square().sum() / 2
        else:
            sampled = torch.multinomial(y.detach().softmax(-1), 1).squeeze(-1)
            loss = nn.functional.cross_entropy(y, sampled, reduction="sum")
        loss.backward()
        return [factor for name in names for factor in tools.load_factors(own, name, cpu=False).values()]

    return contestant


def _singd_factors(problem: Problem) -> Factors:
    own = replace(problem, model=copy.deepcopy(problem.model))
    made = installed("singd.optim.optimizer").SINGD(own.model, T=1, loss_average=terms(own), warn_unsupported=False)
    passes = gradient(own)

    def contestant() -> list[Tensor]:
        passes()
        found = [[sums[name].to_dense() for name in made.module_names.values()] for sums in (made.H_Ks, made.H_Cs)]
        made.H_Ks.clear()  # otherwise batches add up
        made.H_Cs.clear()
        return found[0] + found[1]

    return contestant


def steps(metric_every: int, inverse_every: int, count: int) -> dict[str, Make]:
    """The libraries that train with K-FAC, ``count`` steps per call."""
    makers = {
        "asdl": (installed("asdl"), _asdl_steps),
        "KAISA": (kaisa(), _kaisa_steps),
        "singd": (installed("singd.optim.optimizer"), _singd_steps),
    }
    cycle = RefreshCycle(metric_every, inverse_every, count)
    return {name: partial(make, cycle) for name, (library, make) in makers.items() if library}


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True)


def _asdl_steps(cycle: RefreshCycle, problem: Problem) -> Callable[[], Any]:
    library, own = installed("asdl"), Rows(problem.model)
    config = library.PreconditioningConfig(
        data_size=len(problem.x),
        damping=1e-2,
        ema_decay=0.05,
        curvature_upd_interval=cycle.metric_every,
        preconditioner_upd_interval=cycle.inverse_every,
    )
    kind = "mse" if gaussian(problem) else "cross_entropy"
    maker = library.KfacGradientMaker(own, config, loss_type=kind)
    optimizer = _sgd(list(own.parameters()))
    t, loss = flat_targets(problem), nn.functional.mse_loss if gaussian(problem) else nn.functional.cross_entropy

    def contestant() -> Any:
        for _ in range(cycle.count):
            optimizer.zero_grad()
            y = maker.setup_model_call(own, problem.x)
            maker.setup_loss_call(loss, y, t)
            _, value = maker.forward_and_backward()
            optimizer.step()
        return value.detach()

    return contestant


def _kaisa_steps(cycle: RefreshCycle, problem: Problem) -> Callable[[], Tensor]:
    """KAISA in one process, without a process group."""
    own = replace(problem, model=copy.deepcopy(problem.model))
    preconditioner = kaisa().KFACPreconditioner(
        own.model,
        factor_update_steps=cycle.metric_every,
        inv_update_steps=cycle.inverse_every,
        damping=1e-2,
        compute_method="inverse",  # as the others, and faster than eigenvectors
        kl_clip=lambda step: None,  # no clipping, which would synchronise; None itself is refused
    )
    return _training(own, cycle, [preconditioner, _sgd(list(own.model.parameters()))])


def _singd_steps(cycle: RefreshCycle, problem: Problem) -> Callable[[], Tensor]:
    """The variant closest to K-FAC. It multiplies instead of inverting, so that there are no inverses to refresh."""
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
        T=cycle.metric_every,
        loss_average=terms(own),
        warn_unsupported=False,
    )
    return _training(own, cycle, [optimizer, *([_sgd(rest)] if rest else [])])


def _training(own: Problem, cycle: RefreshCycle, stages: list[Any]) -> Callable[[], Tensor]:
    """Gradients, each followed by the steps of all stages in turn."""
    passes = gradient(own)

    def contestant() -> Tensor:
        for _ in range(cycle.count):
            loss = passes()
            for stage in stages:
                stage.step()
        return loss

    return contestant

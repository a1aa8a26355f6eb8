"""K-FAC by other libraries, where they are installed: one sample an example, as ours.

A contestant starts from the model and the batch and returns the factors it made. Libraries leave hooks behind, so each
has a copy of the model to itself. They are given sequences as rows of independent outputs, which all of them can take.
What a library cannot do it says when it runs: ``runnable`` keeps its words. Libraries disagree on factors of scale, so
only the shape of their input covariances is checked before they are timed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import natgrad as ng
from benchmarks.contestants import Problem
from benchmarks.peers import OneBatch, installed

Factors: TypeAlias = Callable[[], list[Tensor]]
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


def factors() -> dict[str, Make]:
    """How each of them makes the factors."""
    makers = {
        "curvlinops": ("curvlinops", _curvlinops),
        "asdl": ("asdl", _asdl),
        "nngeometry": ("nngeometry", _nngeometry),
        "BackPACK": ("backpack", _backpack),
    }
    return {name: make for name, (library, make) in makers.items() if installed(library)}


def runnable(
    makers: Mapping[str, Make], problem: Problem, check: Callable[[Any], str | None] = lambda made: None
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Those that can run and pass the check, and what is wrong with the others, in a line."""
    tried = {name: _try(make, problem, check) for name, make in makers.items()}
    able = {name: found for name, found in tried.items() if not isinstance(found, str)}
    return able, {name: found for name, found in tried.items() if isinstance(found, str)}


def _try(make: Make, problem: Problem, check: Callable[[Any], str | None]) -> Callable[[], Any] | str:
    """The contestant, after a first run, or its error."""

    def quiet() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a library warns about is its own business
            return contestant()

    try:
        contestant = make(problem)
        return check(quiet()) or quiet
    except Exception as error:  # a foreign library may raise anything
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

    layers = _layers(own)
    for layer in layers:
        layer.register_forward_hook(see)
    with torch.no_grad():
        own(problem.x)
    return [sums[layer] for layer in layers]


def same_inputs(problem: Problem) -> Callable[[list[Tensor]], str | None]:
    """A check that factors, the input covariances of the layers first, are those of this problem up to a scale."""
    expected = input_covariances(problem)

    def check(made: list[Tensor]) -> str | None:
        for found, A in zip(made, expected, strict=False):
            own = found[: len(A), : len(A)]
            if float((own / own.norm() - A / A.norm()).norm()) > 1e-2:
                return f"its input covariance [{len(A)} {len(A)}] is that of something else"
        return None

    return check


def _gaussian(problem: Problem) -> bool:
    return isinstance(problem.family, ng.Gaussian)


def _flat_targets(problem: Problem) -> Tensor:
    return problem.t.flatten(0, -2) if _gaussian(problem) else problem.t.flatten()


def _layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


def _curvlinops(problem: Problem) -> Factors:
    own = Rows(problem.model)
    params = [p for layer in _layers(own) for p in layer.parameters()]
    data, loss = [(problem.x, _flat_targets(problem))], nn.MSELoss() if _gaussian(problem) else nn.CrossEntropyLoss()

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


def _asdl(problem: Problem) -> Factors:
    library, own = installed("asdl"), Rows(problem.model)
    kind = "mse" if _gaussian(problem) else "cross_entropy"
    config = library.FisherConfig("fisher_mc", ["kron"], loss_type=kind, data_size=len(problem.x))

    def contestant() -> list[Tensor]:
        maker = library.get_fisher_maker(own, config)
        maker.setup_model_call(own, problem.x)
        maker.forward_and_backward()
        made: list[Any] = [layer.fisher.kron for layer in _layers(own)]
        return [kron.A for kron in made] + [kron.B for kron in made]

    return contestant


def _nngeometry(problem: Problem) -> Factors:
    if _gaussian(problem):
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
    loss = library.extend(nn.MSELoss() if _gaussian(problem) else nn.CrossEntropyLoss())
    t = problem.t

    def contestant() -> list[Tensor]:
        own.zero_grad()
        with library.backpack(extension):
            loss(own(problem.x), t).backward()
        weights: list[Any] = [layer.weight for layer in _layers(own)]
        made = [w.kfac for w in weights]
        return [kfac[1] for kfac in made] + [kfac[0] for kfac in made]

    return contestant


def steps(metric_every: int, inverse_every: int, count: int) -> dict[str, Make]:
    """K-FAC training steps, that many in a call."""

    def asdl(problem: Problem) -> Callable[[], Any]:
        library, own = installed("asdl"), Rows(problem.model)
        config = library.PreconditioningConfig(
            data_size=len(problem.x),
            damping=1e-2,
            ema_decay=0.05,
            curvature_upd_interval=metric_every,
            preconditioner_upd_interval=inverse_every,
        )
        kind = "mse" if _gaussian(problem) else "cross_entropy"
        maker = library.KfacGradientMaker(own, config, loss_type=kind)
        optimizer = torch.optim.SGD(own.parameters(), lr=1e-4, momentum=0.9, fused=True)
        t, loss = _flat_targets(problem), nn.functional.mse_loss if _gaussian(problem) else nn.functional.cross_entropy

        def contestant() -> None:
            for _ in range(count):
                optimizer.zero_grad()
                y = maker.setup_model_call(own, problem.x)
                maker.setup_loss_call(loss, y, t)
                maker.forward_and_backward()
                optimizer.step()

        return contestant

    return {"asdl": asdl} if installed("asdl") else {}

"""The same quantities by other libraries, where they are installed; a missing row was not measured.

A contestant is a function without arguments that starts from the model and the batch, as a training step does, and
returns the quantity in the order of the parameters: a product [p], a diagonal [p] or a matrix [p q], as a mean over the
examples. Libraries leave hooks behind: each gets its own copy of the model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import distributions
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Contestant: TypeAlias = Callable[[], Tensor]


def products(model: nn.Module, x: Tensor, v: Tensor) -> dict[str, Contestant]:
    """G v of the categorical Fisher metric, which is the Gauss–Newton matrix of cross-entropy."""
    out: dict[str, Contestant] = {}
    if library := installed("curvlinops"):
        operator = _curvlinops(library, copy.deepcopy(model), x)
        out["curvlinops"] = lambda: operator @ v
    if library := installed("backpack.hessianfree.ggnvp"):
        own, t = copy.deepcopy(model), _targets(model, x)
        params = list(own.parameters())
        pieces = [part.view_as(p) for part, p in zip(v.split([p.numel() for p in params]), params, strict=True)]

        def by_backpack() -> Tensor:
            y = own(x)
            return _flat(library.ggn_vector_product_from_plist(F.cross_entropy(y, t), y, params, pieces))

        out["BackPACK"] = by_backpack
    return out


def matrices(model: nn.Module, x: Tensor) -> dict[str, Contestant]:
    """The exact categorical Fisher metric as a matrix."""
    out: dict[str, Contestant] = {}
    if library := installed("curvlinops"):
        own = copy.deepcopy(model)
        eye = torch.eye(sum(p.numel() for p in model.parameters()), dtype=x.dtype, device=x.device)
        out["curvlinops"] = lambda: _curvlinops(library, own, x) @ eye
    if installed("nngeometry"):
        out["nngeometry"] = _nngeometry(model, x, "PMatDense", sampled=False)
    if installed("asdl"):
        out["asdl"] = _asdl(model, x, "full", sampled=False)
    if installed("backpack"):
        out["BackPACK"] = _backpack(model, x, "SqrtGGNExact", "sqrt_ggn_exact")
    return out


def diagonals(model: nn.Module, x: Tensor, sampled: bool) -> dict[str, Contestant]:
    """The diagonal of the categorical Fisher metric, exact or from one sample per example."""
    out: dict[str, Contestant] = {}
    if installed("nngeometry"):
        out["nngeometry"] = _nngeometry(model, x, "PMatDiag", sampled)
    if installed("asdl"):
        out["asdl"] = _asdl(model, x, "diag", sampled)
    if installed("backpack"):
        names = ("DiagGGNMC", "diag_ggn_mc") if sampled else ("DiagGGNExact", "diag_ggn_exact")
        out["BackPACK"] = _backpack(model, x, *names)
    return out


def versions() -> dict[str, str]:
    """The versions of the installed peers."""
    packages = {"curvlinops-for-pytorch", "backpack-for-pytorch", "nngeometry", "asdfghjkl"}
    packages |= {"kfac-pytorch", "kronfluence", "singd"}
    return {d.name: d.version for d in distributions() if d.name in packages}


def installed(name: str) -> Any:
    """The module, or None; its import warnings are ignored."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    except ImportError:
        return None


def _targets(model: nn.Module, x: Tensor) -> Tensor:
    """Any targets: the Fisher metric does not depend on them."""
    with torch.no_grad():
        return model(x).argmax(-1)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _curvlinops(library: Any, model: nn.Module, x: Tensor) -> Any:
    data = [(x, _targets(model, x))]
    params = list(model.parameters())
    return library.GGNLinearOperator(model, nn.CrossEntropyLoss(), params, data, check_deterministic=False)


@final
class OneBatch(DataLoader[Any]):
    """The loader that nngeometry requires, without the time to stack the examples."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield self.dataset.tensors  # type: ignore[attr-defined]


def _nngeometry(model: nn.Module, x: Tensor, kind: str, sampled: bool) -> Contestant:
    metrics, pspace = installed("nngeometry.metrics"), installed("nngeometry.object.pspace")
    own, fim = copy.deepcopy(model), metrics.FIM_MonteCarlo if sampled else metrics.FIM
    representation = getattr(pspace, kind)

    # A copy: it requires gradients of its inputs, which would slow everybody down.
    loader = OneBatch(TensorDataset(x.detach().clone(), torch.zeros(len(x))), batch_size=len(x))

    def contestant() -> Tensor:
        matrix = fim(own, loader, representation, variant="classif_logits", device=x.device)
        return (matrix.get_diag() if kind == "PMatDiag" else matrix.to_torch()).detach()

    return contestant


def _asdl(model: nn.Module, x: Tensor, shape: str, sampled: bool) -> Contestant:
    library, own = installed("asdl"), copy.deepcopy(model)
    config = library.FisherConfig(
        "fisher_mc" if sampled else "fisher_exact", [shape], loss_type="cross_entropy", data_size=len(x)
    )

    def contestant() -> Tensor:
        maker = library.get_fisher_maker(own, config)
        maker.setup_model_call(own, x)
        maker.forward_and_backward()
        if shape == "full":
            whole: Any = own.fisher
            return whole.data
        layers: list[Any] = [m.fisher.diag for m in own.modules() if m is not own and hasattr(m, "fisher")]
        return _flat([part for layer in layers for part in (layer.weight, layer.bias)])

    return contestant


def _backpack(model: nn.Module, x: Tensor, extension: str, field: str) -> Contestant:
    library, extensions = installed("backpack"), installed("backpack.extensions")
    own, t = library.extend(copy.deepcopy(model)), _targets(model, x)
    loss = library.extend(nn.CrossEntropyLoss())
    params = list(own.parameters())

    def contestant() -> Tensor:
        own.zero_grad()
        with library.backpack(getattr(extensions, extension)()):
            loss(own(x), t).backward()
        if field != "sqrt_ggn_exact":
            return _flat([getattr(p, field) for p in params])
        columns = torch.cat([getattr(p, field).flatten(2) for p in params], dim=2).flatten(0, 1)
        return columns.T @ columns

    return contestant

"""Small models in float64 with their inputs: every way of using a parameter that an estimate can get wrong.

A case builds its problem anew at every call, from a seed of its own, and leaves the global random stream alone.
All parameters are moved off their initial values, so that no zero bias or unit scale hides a mistake.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests import oracle


@dataclass(frozen=True)
class Problem:
    """A model, its inputs (a tuple means several positional ones), and how to get the output tensor y[n *out].

    A pure function f(params, x) has its `params` here; a module has None.
    """

    model: Callable[..., Any]
    x: oracle.Inputs
    output: Callable[[Any], Tensor] | None = None
    params: Mapping[str, Tensor] | None = None

    @property
    def module(self) -> nn.Module:
        """The model, where it is a module."""
        assert isinstance(self.model, nn.Module)
        return self.model

    @property
    def n_examples(self) -> int:
        """N."""
        return oracle.examples(self.x)

    def parameters(self) -> Mapping[str, Tensor]:
        """θ by name, in the order of the oracle."""
        return oracle.parameters(self.module) if self.params is None else self.params

    def outputs(self) -> Tensor:
        """y[n *out] of the whole batch."""
        if self.params is not None:
            return oracle.call(lambda x: self.model(self.params, x), self.x, self.output)
        return oracle.call(self.model, self.x, self.output)

    def jacobian(self) -> Tensor:
        """J[n D P] of the oracle."""
        if self.params is not None:
            return oracle.jacobian(self.model, self.params, self.x, self.n_examples)
        return oracle.module_jacobian(self.module, self.x, self.output)


@dataclass(frozen=True)
class Case:
    """A named problem. `linear`: every trainable parameter is used by calls of nn.Linear and by nothing else."""

    name: str
    build: Callable[[], Problem]
    linear: bool = False

    def make(self) -> Problem:
        """The problem, the same one at every call."""
        with torch.random.fork_rng(devices=[]):
            # Only the CPU generator, which fork_rng restores: torch.manual_seed would move those of devices as well.
            torch.default_generator.manual_seed(sum(map(ord, self.name)))
            problem = self.build()
            if isinstance(problem.model, nn.Module):
                problem.model.double()
                with torch.no_grad():
                    for p in problem.model.parameters():
                        p.add_(0.3 * torch.randn_like(p))
            return problem


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with tanh between them."""
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _deep_relu() -> Problem:
    first, second = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    return Problem(nn.Sequential(nn.Linear(3, 5), first, nn.Linear(5, 4), second, nn.Linear(4, 3)), _x(8, 3))


def _frozen(*names: str) -> Problem:
    model = mlp(3, 4, 4, 2)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return Problem(model, _x(5, 3))


class Tied(nn.Module):
    """Two Linear modules that share one weight and have a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Second after first."""
        return self.second(torch.tanh(self.first(x)))


class CalledTwice(nn.Module):
    """One Linear module called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The same layer after itself."""
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class WeightOutside(nn.Module):
    """A weight used by its module and, past the module's forward, by a plain function: hooks see half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """A normal call, then the same weight without it."""
        return F.linear(torch.tanh(self.lin(x)), self.lin.weight)


class BareParameter(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.mix = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        """tanh(scale · x) mixed into two outputs."""
        return torch.tanh(self.scale * x) @ self.mix


class Opaque(torch.autograd.Function):
    """x Wᵀ, as a product that no operation shows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g[0] @ weight, g[0].reshape(-1, g[0].shape[-1]).T @ x.reshape(-1, x.shape[-1])


def opaque(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ, of which no rule and no operation tells."""
    return cast(Tensor, Opaque.apply(x, weight))  # type: ignore[no-untyped-call]


class OpaqueParameters(nn.Module):
    """Parameters that no module and no operation tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] to [n 2]."""
        return opaque(torch.tanh(opaque(x, self.w)), self.v)


def opaque_parameters() -> Problem:
    """The same at every call, in float64."""
    return Case("opaque_parameters", lambda: Problem(OpaqueParameters(), _x(5, 3))).make()


class TwoInputs(nn.Module):
    """A model with two positional inputs of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 3), nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The two sides multiply."""
        return self.head(torch.tanh(self.left(a)) * torch.tanh(self.right(b)))


class DictOutput(nn.Module):
    """Outputs in a dict, next to something that is no output of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The logits and the features they come from."""
        features = torch.tanh(self.body(x))
        return {"features": features, "logits": self.head(features)}


@dataclass
class Prediction:
    """Outputs as an object, as model libraries have them."""

    logits: Tensor
    features: Tensor


class DataclassOutput(nn.Module):
    """The model above with its outputs in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DictOutput()

    def forward(self, x: Tensor) -> Prediction:
        """The logits and the features they come from."""
        return Prediction(**self.inner(x))


class ScalarOutput(nn.Module):
    """y[n]: an example's output has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number an example."""
        return self.body(x).squeeze(-1)


class Attention(nn.Module):
    """Self-attention: nn.MultiheadAttention uses the weight of its out_proj without calling out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n t 4] to outputs [n t 2]."""
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x + mixed)


class TiedEmbedding(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [n t] to logits [n t 5]."""
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def _conv() -> Problem:
    layers = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)]
    return Problem(nn.Sequential(*layers), _x(4, 1, 4, 4))


def _weight_norm() -> Problem:
    return Problem(nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), _x(5, 3))


def _pure_function() -> Problem:
    def f(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ params["w"] + params["b"]) @ params["v"]

    return Problem(f, _x(5, 3), params={"w": _x(3, 4), "b": _x(4), "v": _x(4, 2)})


ZOO = [
    Case("linear", lambda: Problem(nn.Linear(3, 2, bias=False), _x(5, 3)), linear=True),
    Case("linear_bias", lambda: Problem(nn.Linear(3, 2), _x(5, 3)), linear=True),
    Case("mlp_tanh", lambda: Problem(mlp(3, 4, 3), _x(6, 3)), linear=True),
    Case("relu_inplace", _deep_relu, linear=True),
    Case("frozen_layer", lambda: _frozen("2.weight", "2.bias"), linear=True),
    Case("frozen_weight", lambda: _frozen("2.weight"), linear=True),
    Case("frozen_bias", lambda: _frozen("0.bias"), linear=True),
    Case("scalar_output", lambda: Problem(ScalarOutput(), _x(5, 3)), linear=True),
    Case("called_twice", lambda: Problem(CalledTwice(), _x(5, 3)), linear=True),
    Case("tied_weights", lambda: Problem(Tied(), _x(5, 4)), linear=True),
    Case("sequence", lambda: Problem(mlp(3, 4, 2), _x(4, 3, 3)), linear=True),
    Case("sequence_square", lambda: Problem(mlp(3, 4, 2), _x(4, 4, 3)), linear=True),
    Case("two_inputs", lambda: Problem(TwoInputs(), (_x(5, 3), _x(5, 2))), linear=True),
    Case("dict_output", lambda: Problem(DictOutput(), _x(5, 3), lambda y: y["logits"]), linear=True),
    Case("dataclass_output", lambda: Problem(DataclassOutput(), _x(5, 3), lambda y: y.logits), linear=True),
    Case("weight_outside", lambda: Problem(WeightOutside(), _x(5, 3))),
    Case("conv", _conv),
    Case("layer_norm", lambda: Problem(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), _x(5, 3))),
    Case("bare_parameter", lambda: Problem(BareParameter(), _x(5, 3))),
    Case("attention", lambda: Problem(Attention().eval(), _x(4, 3, 4))),
    Case("tied_embedding", lambda: Problem(TiedEmbedding(), torch.randint(5, (4, 3)))),
    Case("weight_norm", _weight_norm),
    Case("pure_function", _pure_function),
]
IDS = [case.name for case in ZOO]


def between(
    name: str, build: Callable[[], nn.Module], shape: tuple[int, ...], n: int, frozen: tuple[str, ...]
) -> Problem:
    """A layer on n examples of this shape between two others, so that its inputs and cotangents are not special."""

    def made() -> Problem:
        d, layer = torch.Size(shape).numel(), build()
        model = nn.Sequential(nn.Linear(d, d), nn.Unflatten(1, shape), layer, nn.Tanh(), nn.Flatten(), nn.Linear(d, 2))
        for key, p in model.named_parameters():
            p.requires_grad_(key not in frozen)
        return Problem(model, _x(n, d))

    return Case(name, made).make()


def case(name: str) -> Case:
    return ZOO[IDS.index(name)]

"""Golden values: numbers computed once with numpy and mpmath, independently of this library and of its tests.

The data files in `golden/` hold one case a line. Parameters are ordered as torch does: W row-major, then b, layer by
layer. A case compares as `torch.testing.assert_close(got, expected, rtol=case["rtol"], atol=case["atol"])`.
`printed_wrong` is what a paper prints and a right implementation must not return.

    >>> golden("expfam.poisson")["expected"]["moments"]
    [2.5]
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

DATA = Path(__file__).with_name("golden")


class _Golden(TypedDict):
    id: str
    what: str
    paper: str
    inputs: dict[str, Any]
    expected: dict[str, Any]
    verified: list[str]
    rtol: float
    atol: float


class Golden(_Golden, total=False):
    """One golden case, with the inputs of the case it refers to already merged in."""

    printed_wrong: dict[str, Any]


@cache
def _cases() -> dict[str, Golden]:
    return {case["id"]: case for path in sorted(DATA.glob("*.json")) for case in json.loads(path.read_text())}


def names(prefix: str = "") -> list[str]:
    """The ids of all cases that start with `prefix`, to parametrise a test over."""
    return [name for name in _cases() if name.startswith(prefix)]


def golden(name: str) -> Golden:
    """The case called `name`; inputs given as {"ref": other} are those of `other`, its own inputs added to them."""
    case = _cases()[name]
    own = dict(case["inputs"])
    reference = own.pop("ref", None)
    shared = golden(reference)["inputs"] if reference else {}
    resolved = case.copy()
    resolved["inputs"] = {**shared, **own}
    return resolved


def tensor(value: Any) -> Tensor:
    """Nested lists as a tensor in float64."""
    return torch.tensor(value, dtype=torch.float64)


def golden_mlp() -> tuple[nn.Sequential, Tensor, Tensor]:
    """The network of the `mlp.*` cases, 2-3-3 with tanh and softmax logits, with its inputs [n 2] and classes [n]."""
    inputs = golden("mlp.forward")["inputs"]
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    with torch.no_grad():
        for p, name in zip(model.parameters(), ["W1", "b1", "W2", "b2"], strict=True):
            p.copy_(tensor(inputs[name]))
    return model, tensor(inputs["X"]), torch.tensor(inputs["y"])


def agrees(case: Golden, got: Tensor, key: str) -> None:
    """Assert that `got` is the expected value `key` of the case, to the tolerance of the case."""
    torch.testing.assert_close(got, tensor(case["expected"][key]), rtol=case["rtol"], atol=case["atol"])

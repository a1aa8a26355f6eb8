"""`natgrad doctor`: versions, devices, combinations that are known not to work, and a step whose result is known."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import final

import torch
from torch import nn

import natgrad as ng
from natgrad.accelerate.devices import device_bytes

OLDEST = (2, 11)
OTHERS = ("numpy", "scipy", "matplotlib", "rich", "typer", "triton", "transformers", "pytorch-lightning")


@final
@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if it is not good."""

    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{'!' if self.remedy else ' '} {self.what:<22}{self.found}" + (
            f": {self.remedy}" if self.remedy else ""
        )


def findings() -> Iterator[Finding]:
    """What is installed, what is there to compute on, and whether it computes."""
    yield Finding("natgrad", ng.__version__)
    yield Finding("Python", platform.python_version())
    yield torch_version(torch.__version__)
    yield Finding("threads of torch", str(torch.get_num_threads()))
    yield from map(package, OTHERS)
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        devices += [device for device in [torch.accelerator.current_accelerator()] if device is not None]
    elif torch.version.cuda:
        yield Finding("GPU", f"none is seen, though torch is built for CUDA {torch.version.cuda}")
    if len(devices) > 1 and importlib.util.find_spec("triton") is None:
        yield Finding("kernels", "no Triton: natgrad's kernels are replaced by torch's", "pip install triton")
    for device in devices:
        yield Finding(f"memory of {device}", f"{device_bytes(device) / 2**30:.1f} GiB")
        yield known_step(device)


def package(name: str) -> Finding:
    """The version of a package that natgrad works with."""
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed")


def torch_version(text: str) -> Finding:
    """Whether torch is new enough.

    >>> print(torch_version("2.9.1"))
    ! torch                 2.9.1: natgrad needs 2.11 or newer: pip install --upgrade torch
    """
    old = tuple(int(part) for part in text.split(".")[:2]) < OLDEST
    return Finding("torch", text, "natgrad needs 2.11 or newer: pip install --upgrade torch" if old else "")


def known_step(device: torch.device) -> Finding:
    """One undamped natural-gradient step solves a linear least-squares problem."""
    generator = torch.Generator().manual_seed(0)
    x, t = (torch.randn(64, n, generator=generator, dtype=torch.float64) for n in (5, 2))
    model = nn.Linear(5, 2, bias=False, dtype=torch.float64).to(device)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(), lr=1.0, damping=0.0)
    residual = model(x.to(device)) - t.to(device)
    (residual.square().sum() / 2 / len(x)).backward()  # type: ignore[no-untyped-call, unused-ignore]
    opt.step()
    exact = torch.linalg.lstsq(x, t).solution.T
    error = float((model.weight.detach().cpu() - exact).abs().max())
    remedy = "" if error < 1e-8 else "the result is wrong: please report this table"
    return Finding(f"a step on {device}", f"error {error:.0e}", remedy)

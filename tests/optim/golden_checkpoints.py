"""Writes a checkpoint of every optimizer below, by whatever version of natgrad is on the path:

    PYTHONPATH=<checkout of that version> python tests/optim/golden_checkpoints.py tests/golden/checkpoints/<version>

A file has the parameters and the state after ``SAVED`` steps, and the parameters after ``AFTER`` more steps of the run
that was saved. ``tests/optim/test_golden_checkpoints.py`` loads it, and goes on. Apart from the optimizers that 0.1.0
did not have, there are only public names of 0.1.0 here.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng

SAVED, AFTER = 3, 3


class Net(nn.Module):
    """Layers with a rule, with a bias and without, and a matrix that is used outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
        self.mix = nn.Parameter(torch.zeros(4, 4))
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        return self.last(torch.tanh(self.hidden(x) @ self.mix))


def _in(structure: Any) -> Callable[[nn.Module], Any]:
    schedule = ng.Refresh(structure, 2, 0.9 if structure.bounded else 0.0, 2)
    return lambda model: ng.NaturalGradient(model, METRIC, structure=schedule, lr=0.1, damping=0.1, momentum=0.5)


METRIC = ng.Fisher(ng.Categorical())
PRIOR = ng.vi.Prior(precision=1.0, examples=6)
# In periods of two, the early steps are those of all versions.
OPTIONS: dict[str, Any] = {"damping": 0.1, "metric_every": 2, "inverse_every": 2}
MAKES: dict[str, Callable[[nn.Module], Any]] = {
    "kfac": lambda model: ng.KFAC(model, METRIC, **OPTIONS),
    "kfac_with_blocks": lambda model: ng.KFAC(model, METRIC, fallback=ng.BlockDense(), **OPTIONS),
    "kfac_sampled": lambda model: ng.KFAC(model, ng.Fisher(ng.Categorical(), samples=1), **OPTIONS),
    "ekfac": lambda model: ng.EKFAC(model, METRIC, **OPTIONS),
    "sobolev_kfac": lambda model: ng.SobolevKFAC(model, METRIC, **OPTIONS),
    "dense": _in(ng.Dense()),
    "block_dense": _in(ng.BlockDense()),
    "diagonal": _in(ng.Diagonal()),
    "low_rank": _in(ng.LowRank(3)),
    "kernel": _in(ng.Kernel()),
    "posterior": lambda model: ng.vi.VariationalNetwork(model, METRIC, ng.Kronecker(), PRIOR),
}
if hasattr(ng, "Natural"):
    MAKES |= {
        "natural": lambda model: ng.Natural(model, lr=0.01, polar=False),  # polar factors are in bfloat16
        "soap": lambda model: ng.SOAP(model, lr=0.01),
        "shampoo": lambda model: ng.Shampoo(model, lr=0.01),
        "shampoo_kl": lambda model: ng.Shampoo(model, lr=0.01, fit="kl", inverse_every=2),
        "muon": lambda model: ng.Muon(model, lr=0.01, iteration="minimax"),
        "soap_published": lambda model: ng.SOAP(
            model, lr=0.01, nesterov=False, moments="sorted", early=False, damping=1e-2, basis_every=2
        ),
        "kfac_with_adamw": lambda model: ng.KFAC(model, METRIC, fallback="adamw", **OPTIONS),
    }


def train(model: nn.Module, opt: Any, first: int, steps: int) -> Tensor:
    """All parameters [p] after steps on batches that are different, and the same in every run."""
    for step in range(first, first + steps):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        t = torch.arange(6) % 2
        if isinstance(opt, ng.vi.VariationalNetwork):
            opt.step(x, t, nn.functional.cross_entropy)
        else:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), t).backward()
            opt.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main(folder: Path) -> None:
    """Write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in MAKES.items():
        torch.manual_seed(0)
        model = Net()
        opt = make(model)
        train(model, opt, 0, SAVED)
        torch.save({"model": model.state_dict(), "state": opt.state_dict()}, folder / f"{name}.pt")
        saved = torch.load(folder / f"{name}.pt", weights_only=True)
        torch.save({**saved, "after": train(model, opt, SAVED, AFTER)}, folder / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

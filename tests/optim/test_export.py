"""A model exported while its optimizer lives: the program is that of the model alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests import oracle
from tests.optim.tasks import seeded
from tests.zoo import mlp

# torch's own: what it loads is deprecated
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
WHERE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda model: model,
    "inside": lambda model: nn.Sequential(model, nn.Softmax(dim=1)),
}


def _data() -> tuple[Tensor, Tensor]:
    return seeded(lambda: (torch.randn(12, 3, dtype=torch.float64), torch.randint(2, (12,))), 1)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strict", [False, True])
def test_the_exported_program_gives_the_outputs_of_the_model(where: str, strict: bool) -> None:
    model, (x, t) = seeded(lambda: mlp(3, 4, 2).double()), _data()
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical()))
    whole = WHERE[where](model)
    for _ in range(2):
        program = torch.export.export(whole, (x,), strict=strict)
        with torch.no_grad():
            torch.testing.assert_close(program.module()(x), whole(x))
        opt.zero_grad()
        F.cross_entropy(model(x), t).backward()
        opt.step()


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_no_training_pass(strict: bool) -> None:
    """Between two steps it changes neither of them, bit for bit."""

    def trained(export: bool) -> Tensor:
        model, (x, t) = seeded(lambda: mlp(3, 4, 2).double()), _data()
        opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), metric_every=1, inverse_every=1)
        for _ in range(3):
            if export:
                torch.export.export(model, (2 * x,), strict=strict)
                assert not opt.tracker.has_estimate
            opt.zero_grad()
            F.cross_entropy(model(x), t).backward()
            opt.step()
        return oracle.flatten(model.parameters())

    assert torch.equal(trained(export=True), trained(export=False))

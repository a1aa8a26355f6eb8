"""The loss where a step would land, and exact products, with batch statistics and dropout."""

import torch
from torch import Tensor, nn

import natgrad as ng
from tests.pulled import close, normal


class _Normalised(nn.Module):
    """A batch normalisation and dropout before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 4] to [n 3]."""
        return self.head(self.drop(self.norm(x)))


def test_a_trial_leaves_buffers_and_the_random_stream_alone() -> None:
    torch.manual_seed(0)
    model, x, t = _Normalised(), torch.randn(16, 4), torch.arange(16) % 3
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), step=ng.SelfTuned(every=1))
    seen: list[Tensor] = []

    def closure() -> Tensor:
        opt.zero_grad()
        before = torch.get_rng_state()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        seen.append(before)
        return loss

    opt.step(closure)
    assert len(seen) > 1
    assert all(torch.equal(state, seen[0]) for state in seen)  # the same masks in every trial
    assert model.norm.num_batches_tracked is not None
    assert int(model.norm.num_batches_tracked) == 1
    assert not torch.equal(torch.get_rng_state(), seen[0])


def test_exact_products_are_those_of_the_function_that_is_trained() -> None:
    """Statistics of the batch move with the parameters: the outputs of one example depend on the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x = normal(6, 3)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(), damping=0.1)
    model(x).square().sum().backward()
    params = dict(model.named_parameters())
    J = torch.cat(
        [
            j.reshape(12, -1)
            for j in torch.autograd.functional.jacobian(
                lambda *θ: torch.func.functional_call(model, dict(zip(params, θ, strict=True)), x).flatten(),
                tuple(p.detach() for p in params.values()),
            )
        ],
        dim=1,
    )
    v = ng.Vector({name: normal(*p.shape, seed=3) for name, p in params.items()})
    flat = v.flatten()
    close(opt.tracker.batch_queries.curvature([v], 0.5), (flat @ J.T @ J @ flat / 6).view(1, 1), 1e-9)

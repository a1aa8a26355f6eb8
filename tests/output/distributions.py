"""Distributions of torch that outputs y build, and one that torch does not know; positive parameters are exp(y)."""

import torch
from torch import Tensor
from torch import distributions as D


def gamma(y: Tensor) -> D.Distribution:
    """Shape and rate are exp(y)."""
    return D.Gamma(y[..., 0].exp(), y[..., 1].exp())


def beta(y: Tensor) -> D.Distribution:
    """Both parameters are exp(y)."""
    return D.Beta(y[..., 0].exp(), y[..., 1].exp())


def dirichlet(y: Tensor) -> D.Distribution:
    """All parameters are exp(y)."""
    return D.Dirichlet(y.exp())


def mixture(y: Tensor) -> D.Distribution:
    """½ N(y − 1, 1) + ½ N(y + 1, 1): neither a KL in closed form nor an enumerable support."""
    centres = y.unsqueeze(-1) + torch.tensor([-1.0, 1.0], dtype=y.dtype)
    return D.MixtureSameFamily(D.Categorical(torch.ones_like(centres)), D.Normal(centres, torch.ones_like(centres)))


def weibull(y: Tensor) -> D.Distribution:
    """Scale and shape are exp(y)."""
    return D.Weibull(y[..., 0].exp(), y[..., 1].exp())


def laplace(y: Tensor) -> D.Distribution:
    """The locations are the outputs, the scale is ½."""
    return D.Laplace(y, torch.full_like(y, 0.5))


def scale_tril(y: Tensor) -> Tensor:
    """L [* 2 2] of the outputs [* 5] of `plane_normal`."""
    zero = torch.zeros_like(y[..., 0])
    rows = [y[..., 2].exp(), zero, y[..., 3], y[..., 4].exp()]
    return torch.stack(rows, dim=-1).reshape(*y.shape[:-1], 2, 2)


class Quadratic(D.Distribution):
    """p(t) ∝ exp(a t + b t²) on t = 0, 1, 2, 3, unknown to torch: an enumerable support and no registered KL."""

    arg_constraints = {}  # noqa: RUF012 torch declares it so
    has_enumerate_support = True

    def __init__(self, y: Tensor) -> None:
        t = torch.arange(4, dtype=y.dtype)
        self.logits = y[..., :1] * t + y[..., 1:] * t**2
        super().__init__(y.shape[:-1], validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(t) [k n *terms] of t [k n *terms]."""
        log_p = self.logits.log_softmax(-1)
        shape = torch.broadcast_shapes(value.shape, log_p.shape[:-1])
        index = value.long().expand(shape).unsqueeze(-1)
        return log_p.expand(*shape, 4).gather(-1, index).squeeze(-1)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """0, 1, 2, 3 along the first axis."""
        t = torch.arange(4, dtype=self.logits.dtype).view(4, *[1] * len(self.batch_shape))
        return t.expand(4, *self.batch_shape) if expand else t

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Draws from the global random stream, as the distributions of torch do."""
        count = torch.Size(sample_shape).numel()
        t = torch.multinomial(self.logits.reshape(-1, 4).softmax(-1), count, replacement=True)
        return t.T.reshape(*sample_shape, *self.batch_shape).to(self.logits.dtype)

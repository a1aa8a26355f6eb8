"""One optimizer for all parameters: AdamW for embeddings, gains and biases, the metric for the others."""

import io
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate.fused import Flag
from natgrad.accelerate.replay import GraphCache
from natgrad.errors import NonFiniteError
from natgrad.optim import optimizer, update
from natgrad.structures import Structure
from tests.optim.states import alike, whole
from tests.optim.tasks import seeded
from tests.optim.test_plain_step import Replays
from tests.zoo import opaque

METRIC = ng.Fisher(ng.Categorical(axis=-1))
BETAS = (0.9, 0.95)


class Text(nn.Module):
    """An embedding, a gain and its bias, two matrices with biases; no weight is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.hidden, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] of words [n t]."""
        out: Tensor = self.head(torch.tanh(self.hidden(self.norm(self.words(x)).mean(1))))
        return out


MATRICES = ["hidden.weight", "head.weight"]


def text(dtype: torch.dtype = torch.float64) -> Text:
    return seeded(lambda: Text().to(dtype))


def words(step: int = 0) -> Tensor:
    return torch.randint(7, (6, 3), generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, step: int, scale: float = 1.0) -> Tensor:
    x = words(step)
    loss = scale * nn.functional.cross_entropy(model(x), x[:, 0] % 3)
    loss.backward()
    return loss


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        opt.zero_grad()
        backward(model, step)
        opt.step()


def made(model: nn.Module, **options: Any) -> ng.NaturalGradient:
    numbers: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "momentum": 0.5, "weight_decay": 0.1, "fallback": "adamw"}
    return ng.NaturalGradient(model, METRIC, **{**numbers, **options})


def by_adamw(opt: ng.NaturalGradient, model: nn.Module) -> list[str]:
    """The parameters whose state is that of AdamW."""
    return [name for name, p in model.named_parameters() if "exp_avg" in opt.state.get(p, {})]


@pytest.mark.parametrize("rule", [ng.Fixed(), ng.Constrained(ng.Fixed(), ng.Clipping({}))], ids=["plain", "general"])
def test_the_others_are_stepped_by_adamw_as_torch_does(rule: Any) -> None:
    """Parameters and state, step by step, with the same gradients and a schedule."""
    model = text()
    opt = made(model, step=rule)
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters() if n not in MATRICES}
    adamw = torch.optim.AdamW(copies.values(), lr=0.05, betas=BETAS, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (opt, adamw)]
    for step in range(5):
        opt.zero_grad()
        backward(model, step)
        for name, copy in copies.items():
            copy.grad = model.get_parameter(name).grad
        opt.step()
        adamw.step()
        for schedule in schedules:
            schedule.step()
        for name, copy in copies.items():
            p = model.get_parameter(name)
            torch.testing.assert_close(p.detach(), copy.detach())
            for what in ("exp_avg", "exp_avg_sq", "step"):
                torch.testing.assert_close(opt.state[p][what], adamw.state[copy][what])
    assert by_adamw(opt, model) == list(copies)
    assert all(list(opt.state[model.get_parameter(name)]) == ["natgrad", "momentum"] for name in MATRICES)


class Bare(nn.Module):
    """A matrix, an offset and a gain that no module has, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.last = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False), nn.Linear(5, 4)
        self.matrix, self.offset = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.zeros(5))
        self.gain, self.head.weight = nn.Parameter(torch.ones(5)), self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        """[n 7] of words [n t]."""
        h = torch.tanh(self.words(x) @ self.matrix + self.offset) * self.gain
        out: Tensor = self.head(torch.tanh(self.last(h))).mean(1)
        return out


class Recurrent(nn.Module):
    """An LSTM, attention and a convolution with normalisation, all with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 2), nn.BatchNorm1d(4)
        self.lstm, self.attention = nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head, self.gain = nn.Linear(4, 3), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] of words [n t]."""
        x = nn.functional.one_hot(x, 7)[..., :4].to(self.gain)
        x = self.norm(self.conv(x.mT)).mT * self.gain
        h = self.lstm(x)[0]
        out: Tensor = self.head(self.attention(h, h, h)[0].mean(1))
        return out


@pytest.mark.parametrize(
    "structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kronecker(), ng.EigenKronecker()], ids=repr
)
@pytest.mark.parametrize("build", [Text, Recurrent, Bare])
def test_the_metric_is_that_of_the_model_with_the_others_frozen(build: type[nn.Module], structure: Structure) -> None:
    model, frozen = (seeded(lambda: build().double()) for _ in range(2))
    if structure not in (ng.Kronecker(), ng.EigenKronecker()):
        for m in (model, frozen):
            m.eval()  # the others have no batch statistics
    embeddings = {m.weight for m in frozen.modules() if isinstance(m, nn.Embedding)}
    for p in frozen.parameters():
        p.requires_grad_(p.ndim > 1 and p not in embeddings)
    opts = made(model, structure=structure), made(frozen, structure=structure, fallback=None)
    for m, opt in zip((model, frozen), opts, strict=True):
        train(m, opt, range(1))
    for name, p in frozen.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(model.get_parameter(name).detach(), p.detach())


def test_groups_say_otherwise() -> None:
    model = text()
    groups = [
        {"params": list(model.head.parameters()), "fallback": "adamw", "lr": 0.01},
        {"params": model.words.weight, "fallback": None},
    ]
    opt = made(model, groups=groups)
    train(model, opt, range(2))
    assert by_adamw(opt, model) == ["norm.weight", "norm.bias", "hidden.bias", "head.weight", "head.bias"]
    assert [len(group["params"]) for group in opt.param_groups] == [4, 2, 1]
    assert opt.last is not None
    assert list(opt.last.displacement) == ["words.weight", "hidden.weight"]
    alone = made(model, fallback=None, groups=groups[:1])  # nobody else asks for it
    train(model, alone, range(1))
    assert by_adamw(alone, model) == ["head.weight", "head.bias"]


@pytest.mark.parametrize("make", [ng.KFAC, ng.EKFAC, ng.SobolevKFAC])
def test_the_presets_have_it(make: Callable[..., ng.NaturalGradient]) -> None:
    model = text(torch.float32)
    features = {"features": lambda x: nn.functional.one_hot(x, 7).float()} if make is ng.SobolevKFAC else {}
    opt = make(model, METRIC, fallback="adamw", lr=0.01, **features)
    train(model, opt, range(3))
    assert by_adamw(opt, model) == [name for name, _ in model.named_parameters() if name not in MATRICES]
    assert "AdamW steps words.weight, norm.weight, norm.bias, hidden.bias, head.bias" in str(opt.plan())


def test_a_parameter_without_a_gradient_is_left_alone_and_all_others_move() -> None:
    model = text()
    opt = made(model)
    train(model, opt, range(1))
    for missing in ("norm.weight", "hidden.weight"):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        state = deepcopy(opt.state[model.get_parameter(missing)])
        opt.zero_grad()
        backward(model, 1)
        model.get_parameter(missing).grad = None
        opt.step()
        same = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
        assert same == [missing]
        assert alike(opt.state[model.get_parameter(missing)], state)
    opt.zero_grad()
    backward(model, 2)
    for name in MATRICES:  # only AdamW has something to do
        model.get_parameter(name).grad = None
    opt.step()


def test_resume_is_exact_from_a_file() -> None:
    def new() -> tuple[nn.Module, ng.NaturalGradient]:
        model = text()
        return model, ng.KFAC(model, METRIC, fallback="adamw", metric_every=2, inverse_every=3)

    (model, opt), (copy, again) = new(), new()
    train(model, opt, range(4))
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    file.seek(0)
    of_model, of_opt = torch.load(file, weights_only=True)
    copy.load_state_dict(of_model)
    again.load_state_dict(of_opt)
    for m, o in ((model, opt), (copy, again)):
        train(m, o, range(4, 7))
    assert alike(model.state_dict(), copy.state_dict())
    assert alike(opt.state_dict(), again.state_dict())
    with pytest.raises(ValueError, match=r"of its parameters, words\.weight is not there and here"):
        ng.KFAC(model, METRIC).load_state_dict(opt.state_dict())
    broken = opt.state_dict()
    broken["state"][0]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"exp_avg of words\.weight in the state has the shape"):
        again.load_state_dict(broken)


@pytest.mark.parametrize("name", ["words.weight", "hidden.weight"])
@pytest.mark.parametrize("rule", [ng.Fixed(), ng.Constrained(ng.Fixed(), ng.Clipping({}))], ids=["plain", "general"])
def test_a_gradient_that_is_not_finite_changes_nothing(name: str, rule: Any) -> None:
    model = text()
    opt = made(model, step=rule)
    train(model, opt, range(2))
    before = {key: t.clone() for key, t in model.state_dict().items()}, whole(opt)["state"]
    opt.zero_grad()
    backward(model, 2)
    grad = model.get_parameter(name).grad
    assert grad is not None
    grad[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match=f"the gradient of {name} holds NaN or infinity"):
        opt.step()
    assert alike((model.state_dict(), whole(opt)["state"]), before)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, a processor does what a GPU does."""

    def start() -> None:
        for module in (update, optimizer):
            monkeypatch.setattr(module, "is_asynchronous", lambda device: True)
        monkeypatch.setattr(Flag, "check", lambda self, tensors, what: self.look(tensors))
        monkeypatch.setattr(Flag, "send", lambda self, what, step: None)

    return start


@pytest.mark.parametrize("momentum_on", ["steps", "gradients"])
@pytest.mark.parametrize("name", ["words.weight", "hidden.weight"])
def test_on_a_gpu_the_gate_closes_for_all_parameters(name: str, momentum_on: str, gpu: Callable[[], None]) -> None:
    model = text(torch.float32)
    opt = made(model, momentum_on=momentum_on)
    train(model, opt, range(2))
    gpu()
    train(model, opt, range(2, 3))
    before = {key: t.clone() for key, t in model.state_dict().items()}, whole(opt)["state"]
    opt.zero_grad()
    backward(model, 3)
    grad = model.get_parameter(name).grad
    assert grad is not None
    grad[0, 0] = torch.nan
    opt.step()
    assert alike((model.state_dict(), whole(opt)["state"]), before)


class DarkText(Text):
    """No rule covers the first matrix."""

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] of words [n t]."""
        h = opaque(self.norm(self.words(x)).mean(1), self.hidden.weight) + self.hidden.bias
        out: Tensor = self.head(torch.tanh(h))
        return out


@pytest.mark.parametrize("build", [Text, DarkText])
def test_a_captured_step_is_that_of_a_processor(build: type[nn.Module], gpu: Callable[[], None]) -> None:
    def trained(captures: Replays | None) -> list[Tensor]:
        model = seeded(build)
        opt = ng.KFAC(model, METRIC, fallback="adamw", metric_every=20, inverse_every=20, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        if captures is not None:
            opt._graphs = GraphCache(capacity=1, capture=captures)
        for step in range(8):
            train(model, opt, range(step, step + 1))
            schedule.step()
        return [p.detach() for p in model.parameters()]

    expected = trained(None)
    gpu()
    captures = Replays()
    for p, right in zip(trained(captures), expected, strict=True):
        torch.testing.assert_close(p, right, rtol=1e-4, atol=1e-6)
    assert captures.captures == 1
    assert captures.replays == 6


def test_a_rule_that_tries_steps_leaves_the_gradients_of_the_others() -> None:
    """The loss is tried at other matrices, with the other parameters where they are; AdamW has the first gradient."""
    model = text()
    opt = made(model, step=ng.LevenbergMarquardt(), damping=1e-2, lr=1.0)
    copy = nn.Parameter(model.words.weight.detach().clone())
    adamw = torch.optim.AdamW([copy], lr=1.0, betas=BETAS, weight_decay=0.1)
    gradients: list[Tensor] = []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = backward(model, 0)
        assert model.words.weight.grad is not None
        gradients.append(model.words.weight.grad)
        return loss

    opt.step(closure)
    assert len(gradients) > 1
    copy.grad = gradients[0]
    adamw.step()
    torch.testing.assert_close(model.words.weight, copy)


class Refused(ng.step.StepRule):
    """Takes no step."""

    def take(self, context: ng.step.StepContext) -> ng.step.Step:
        return ng.step.Step(context.natural(), context.damping, accepted=False)


def test_an_embedding_that_was_replaced_is_refused() -> None:
    model = text()
    opt = made(model)
    train(model, opt, range(1))
    model.words = nn.Embedding(7, 4).double()
    opt.zero_grad()
    backward(model, 1)
    with pytest.raises(ng.errors.NatgradError, match=r"no longer has words\.weight, which the optimizer was made with"):
        opt.step()


def test_a_step_that_is_refused_moves_nothing() -> None:
    model = text()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    opt = made(model, step=Refused())
    train(model, opt, range(1))
    assert alike(model.state_dict(), before)
    assert by_adamw(opt, model) == []


def test_a_scaler_that_skips_a_step_leaves_the_state() -> None:
    model = text(torch.float32)
    opt = made(model)
    train(model, opt, range(1))
    before = whole(opt)["state"]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt.zero_grad()
    scaler.scale(backward(model, 1, scale=torch.inf))
    scaler.step(opt)
    scaler.update()
    assert alike(whole(opt)["state"], before)


def test_a_model_without_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leaves no parameter for the metric: use torch\.optim\.AdamW"):
        made(nn.Embedding(3, 2))


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = text()
    model.words.sparse = True
    opt = made(model)
    backward(model, 0)
    with pytest.raises(TypeError, match=r"the gradient of words\.weight is sparse: take a dense layer"):
        opt.step()


def test_polar_steps_the_matrices_of_a_model_with_biases() -> None:
    model = text()
    opt = made(model, structure=ng.Kronecker(), step=ng.Polar(), momentum_on="gradients", lr=0.1)
    losses = []
    for _ in range(30):
        opt.zero_grad()
        losses.append(float(backward(model, 0).detach()))
        opt.step()
    assert losses[-1] < 0.5 * losses[0]


class WithEmpty(nn.Module):
    """One of its layers has no inputs, as where a list of features is empty."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch initialises nothing
            self.none = nn.Linear(0, 3)
        self.some = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.some(x) + self.none(x[:, :0])


@pytest.mark.parametrize("make", [ng.Natural, ng.Muon, ng.SOAP, lambda m: ng.Natural(m, ng.Empirical())])
def test_a_weight_without_entries_changes_no_other_step(make: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, plain = WithEmpty().double(), nn.Linear(4, 3).double()
    plain.load_state_dict(model.some.state_dict())
    model.none.bias.requires_grad_(False).zero_()
    x, target = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    for of in (model, plain):
        opt = make(of)
        for _ in range(3):
            opt.zero_grad()
            nn.functional.cross_entropy(of(x), target).backward()
            opt.step()
    torch.testing.assert_close(model.some.weight, plain.weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [ng.Natural, ng.Muon])
def test_a_matrix_with_one_row_or_one_column_is_a_vector(make: Callable[..., Any]) -> None:
    """Its polar factor is its direction: only AdamW lets it come to rest. Where all are such, they stay matrices."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(8, 1)
    opt = make(model, lr=0.01, weight_decay=0.1)
    vectors = [p for p in model.parameters() if p is not model[2].weight]
    by_hand = [nn.Parameter(p.detach().clone()) for p in vectors]
    reference = torch.optim.AdamW(by_hand, lr=0.01, betas=BETAS, weight_decay=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(x).square().mean().backward()
        for mine, p in zip(by_hand, vectors, strict=True):
            assert p.grad is not None
            mine.grad = p.grad.clone()
        opt.step()
        reference.step()
    for mine, p in zip(by_hand, vectors, strict=True):
        torch.testing.assert_close(p, mine)
    assert "weight" not in str(make(nn.Linear(3, 1)).plan()).partition("AdamW steps")[2]


class Experts(nn.Module):
    """A convolution over three tokens, and two experts in a stack [e i o]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 2, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)
        return torch.einsum("ni,eio->no", h, self.experts)


@pytest.mark.parametrize("metric", [ng.Empirical(), ng.Fisher(ng.Gaussian(), samples=1)], ids=["own", "Fisher"])
def test_a_polar_factor_is_that_of_no_stack_whatever_the_metric(metric: ng.OutputMetric) -> None:
    opt = ng.Natural(Experts(), metric)
    assert "AdamW steps experts" in str(opt.plan())


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_kernel_that_is_made_from_others_is_one(norm: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(norm(nn.Conv1d(2, 6, 3)), nn.Tanh(), norm(nn.ConvTranspose1d(6, 4, 3)))
    kernels = [name for name, p in model.named_parameters() if p.ndim == 3 and p[0].numel() > 1]
    steps = str(ng.Natural(model).plan()).splitlines()[-1]
    assert kernels
    assert not [name for name in kernels if name in steps]

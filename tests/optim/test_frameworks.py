"""What people train, in the loops and with the tools that they have: one changed line, and the first step checks it.

Every test is strict: the gradient that comes to the outputs is that of the loss that the optimizer was given.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests import oracle
from tests.optim.tasks import seeded, silent
from tests.pulled import close, normal

STEPS = 12


def falls(losses: list[float], share: float = 0.9) -> None:
    """The mean of the last losses is below that of the first."""
    few = max(1, len(losses) // 4)
    assert sum(losses[-few:]) < share * sum(losses[:few]), losses


def trained(model: nn.Module, opt: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int = STEPS) -> None:
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        value = loss()
        value.backward()
        opt.step()
        losses.append(value.item())
    falls(losses)


# Pictures, words, games, tasks


class Segmenter(nn.Module):
    """Classes of pixels [n c h w]: down, up, and across."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.norm, self.up = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        out: Tensor = self.head(torch.cat([h, self.up(F.relu(self.norm(self.down(h))))], 1))
        return out


@pytest.mark.parametrize("preset", [ng.Natural, ng.KFAC])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_segmentation_net_with_unlabelled_pixels(preset: Callable[..., Any], weighted: bool) -> None:
    model, x = seeded(Segmenter), normal(4, 2, 8, 8).float()
    t = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    t[:, :2] = 255
    criterion = nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0]) if weighted else None, ignore_index=255)
    opt = preset(model, criterion, lr=1e-2, strict=True)
    trained(model, opt, lambda: criterion(model(x), t))


class Classifier(nn.Module):
    """Words [n t] with their mask, by attention and a masked mean."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = self.layer(self.words(tokens), src_key_padding_mask=~mask)
        out: Tensor = self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return out


def sentences(n: int = 16, longest: int = 6, pad: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, longest + 1, (n,), generator=g)
    tokens = torch.randint(1, 20, (n, longest + pad), generator=g)
    mask = torch.arange(longest + pad) < lengths[:, None]
    return tokens * mask, mask, tokens[:, 0] % 3


@pytest.mark.parametrize("preset", [ng.Natural, ng.KFAC])
def test_a_padded_text_classifier(preset: Callable[..., Any]) -> None:
    model, (tokens, mask, t) = seeded(Classifier), sentences()
    opt = preset(model, F.cross_entropy, lr=1e-2, strict=True)
    trained(model, opt, lambda: F.cross_entropy(model(tokens, mask), t))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_gan(frozen: bool) -> None:
    """Two players, each with its own optimizer; the judge may be frozen while the maker steps."""
    maker = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
    judge = seeded(lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
    criterion = nn.BCEWithLogitsLoss()
    of_judge = ng.Natural(judge, criterion, lr=1e-2, strict=True)  # type: ignore[call-arg]
    of_maker = ng.Natural(maker, lr=2e-2)  # what is trained is no loss of its outputs
    real = normal(16, 2).float() * 0.1 + torch.tensor([2.0, -1.0])
    ones, zeros, far = torch.ones(16, 1), torch.zeros(16, 1), []
    for step in range(60):
        made = maker(normal(16, 3, seed=step).float())
        of_judge.zero_grad()
        (criterion(judge(real), ones) + criterion(judge(made.detach()), zeros)).backward()
        of_judge.step()
        of_maker.zero_grad()
        judge.requires_grad_(not frozen)
        criterion(judge(made), ones).backward()
        judge.requires_grad_(True)
        of_maker.step()
        far.append(float((made.detach().mean(0) - real.mean(0)).norm()))
    assert far[-1] < 0.7 * far[0]


class Tasks(nn.Module):
    """A class, a number and a mask of one example, from one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.heads = nn.ModuleDict({"kind": nn.Linear(8, 3), "size": nn.Linear(8, 1), "tags": nn.Linear(8, 5)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        return {key: head(h) for key, head in self.heads.items()}


@pytest.mark.parametrize("preset", [ng.Natural, ng.KFAC])
def test_a_multi_task_net(preset: Callable[..., Any]) -> None:
    model, x = seeded(Tasks), normal(16, 4).float()
    t = {"kind": (x[:, 0] > 0).long(), "size": x[:, :1] ** 2, "tags": (x @ torch.ones(4, 5) > 0).float()}
    t["kind"][:3] = -100
    losses = {"kind": nn.CrossEntropyLoss(), "size": nn.MSELoss(), "tags": nn.BCEWithLogitsLoss()}
    weights = {"kind": 1.0, "size": 0.5, "tags": 2.0}
    opt = preset(model, ng.metric_of(losses, weights=weights, samples=1), lr=3e-2, strict=True)

    def loss() -> Tensor:
        out = model(x)
        return torch.stack([weights[key] * losses[key](out[key], t[key]) for key in losses]).sum()

    trained(model, opt, loss)


# Lightning


def test_a_lightning_module(tmp_path: Path) -> None:
    pl: Any = pytest.importorskip("pytorch_lightning")
    warnings.simplefilter("ignore")  # it reads what torch is about to change

    class Lit(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
            self.losses: list[float] = []

        def training_step(self, batch: tuple[Tensor, Tensor], at: int) -> Tensor:
            x, t = batch
            loss = F.cross_entropy(self.net(x), t)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return ng.Natural(self.net, F.cross_entropy, lr=1e-2, strict=True)  # type: ignore[call-arg]

    x = normal(32, 4).float()
    data: Any = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    model = seeded(Lit)
    trainer = pl.Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    falls(model.losses)


# Hugging Face


@pytest.fixture(scope="module")
def tr() -> Any:
    return pytest.importorskip("transformers")


def gpt(tr: Any) -> nn.Module:
    config = tr.GPT2Config(
        vocab_size=13, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model: nn.Module = seeded(lambda: tr.GPT2LMHeadModel(config))
    return model


def bert(tr: Any, kind: str, **options: Any) -> nn.Module:
    config = tr.BertConfig(
        vocab_size=13,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    model: nn.Module = seeded(lambda: getattr(tr, kind)(config))
    return model


def test_a_model_that_computes_its_own_loss_has_the_metric_of_it(tr: Any) -> None:
    """A causal language model, with ignored labels and the shift by one token: the Hessian of its own loss."""
    model = gpt(tr).double()
    tokens = torch.randint(3, 13, (3, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, 3:] = -100
    opt = ng.NaturalGradient(model, model, structure=ng.Dense(), lr=0.0, damping=1.0, strict=True)
    out = model(input_ids=tokens, labels=labels)
    out.loss.backward()
    opt.step()

    def total(y: Tensor) -> Tensor:
        return F.cross_entropy(y[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    close(total(out.logits.detach()), out.loss.detach().double(), 1e-6)
    with silent(model):
        J = oracle.module_jacobian(model, tokens, lambda out: out.logits).flatten(0, 1)
    H: Tensor = torch.autograd.functional.hessian(total, out.logits.detach())
    assert opt.tracker.average is not None
    close(opt.tracker.average.dense(), J.T @ H.reshape(len(J), len(J)) @ J, 1e-8)


KINDS: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], dict[str, Tensor]]]] = {
    "classes": ("BertForSequenceClassification", {"num_labels": 3}, lambda x: {"labels": x[:, 0] % 3}),
    "a number": ("BertForSequenceClassification", {"num_labels": 1}, lambda x: {"labels": x[:, 0] / 13}),
    "tags": (
        "BertForSequenceClassification",
        {"num_labels": 4, "problem_type": "multi_label_classification"},
        lambda x: {"labels": (x[:, :4] > 6).float()},
    ),
    "tokens": ("BertForTokenClassification", {"num_labels": 2}, lambda x: {"labels": x % 2}),
    "masked": ("BertForMaskedLM", {}, lambda x: {"labels": x.masked_fill(x % 3 > 0, -100)}),
    "questions": (
        "BertForQuestionAnswering",
        {},
        lambda x: {"start_positions": x[:, 0] % 6, "end_positions": x[:, 1] % 6},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_models_of_transformers_stand_for_their_own_loss(tr: Any, name: str) -> None:
    kind, options, labels = KINDS[name]
    model = bert(tr, kind, **options)
    x = torch.randint(1, 13, (16, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(6) < torch.arange(16)[:, None] % 3 + 4
    opt = ng.Natural(model, model, lr=5e-2, strict=True)  # type: ignore[call-arg]
    trained(model, opt, lambda: model(input_ids=x, attention_mask=mask.long(), **labels(x)).loss, steps=16)


def test_a_loss_of_transformers_without_a_metric_is_refused_by_name(tr: Any) -> None:
    model = bert(tr, "BertForSequenceClassification")
    model.loss_type = "ForObjectDetection"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="computes a loss of the kind ForObjectDetection, of which no metric is known"):
        ng.Natural(model, model)


@contextlib.contextmanager
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HF_HUB_OFFLINE", "WANDB_DISABLED"):
        monkeypatch.setenv(name, "1")
    yield


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_a_hugging_face_trainer(
    tr: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    model = bert(tr, "BertForSequenceClassification", num_labels=3)
    x = torch.randint(1, 13, (32, 6), generator=torch.Generator().manual_seed(0))
    data = [
        {"input_ids": row, "attention_mask": (torch.arange(6) < 4 + at % 3).long(), "labels": row[0] % 3}
        for at, row in enumerate(x)
    ]
    with offline(monkeypatch):
        args = tr.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            num_train_epochs=8,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        opt = ng.Natural(model, model, lr=5e-2, strict=True)  # type: ignore[call-arg]
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0)
        trainer = tr.Trainer(model=model, args=args, train_dataset=data, optimizers=(opt, schedule))
        trainer.train()
    falls([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

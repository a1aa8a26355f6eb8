"""Loops that make the optimizer themselves, from a class and keywords: every one of them trains."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.data import load_digits
from tests.optim.tasks import seeded

CLASSES = [ng.Natural, ng.Muon, ng.Shampoo, ng.SOAP]


@pytest.fixture(autouse=True)
def _their_warnings() -> Iterator[None]:
    """What other packages warn of is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits().train
    return images[:512], labels[:512]


def loss_of(model: nn.Module) -> float:
    x, t = digits()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), t))


START = 2.3  # log 10: what a network has that knows nothing


@pytest.mark.parametrize("cls", CLASSES)
def test_skorch(cls: Any) -> None:
    skorch = pytest.importorskip("skorch")
    net = skorch.NeuralNetClassifier(
        network, criterion=nn.CrossEntropyLoss, optimizer=cls, lr=0.05, max_epochs=25, train_split=None, verbose=0
    )
    x, t = digits()
    net.fit(x.numpy(), t.numpy())
    assert type(net.optimizer_) is cls
    assert loss_of(net.module_) < 0.5 * START
    again = pickle.loads(pickle.dumps(net))
    assert torch.equal(again.module_[0].weight, net.module_[0].weight)
    again.partial_fit(x.numpy(), t.numpy())
    net.partial_fit(x.numpy(), t.numpy())
    assert torch.equal(again.module_[0].weight, net.module_[0].weight)


def test_fastai(tmp_path: Path) -> None:
    pytest.importorskip("fastai")
    from functools import partial

    from fastai.callback.schedule import Learner  # type: ignore[import-not-found, unused-ignore]
    from fastai.data.core import DataLoaders  # type: ignore[import-not-found, unused-ignore]
    from fastai.optimizer import OptimWrapper  # type: ignore[import-not-found, unused-ignore]

    data = torch.utils.data.TensorDataset(*digits())
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    learner = Learner(
        DataLoaders(loader, loader),
        seeded(network),
        loss_func=nn.CrossEntropyLoss(),
        opt_func=partial(OptimWrapper, opt=ng.Natural),
        path=tmp_path,
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(4, lr=0.02)
        learner.save("end", with_opt=True)
        learner.load("end", with_opt=True)
        learner.fit_one_cycle(1, 0.02)
    assert loss_of(learner.model) < 0.5 * START


def test_timm() -> None:
    """Its registry calls the class with groups that have weight decay and that have none."""
    optim = pytest.importorskip("timm.optim")
    for cls in CLASSES:
        name = cls.__name__.lower()
        registry = optim._optim_factory.OptimizerRegistry()
        registry.register(optim.OptimInfo(name=name, opt_class=cls, description=name, has_momentum=True))
        model = seeded(network)
        opt = registry.create_optimizer(model, name, lr=0.05, weight_decay=0.1)
        assert {group["weight_decay"] for group in opt.param_groups} == {0.0, 0.1}
        train(model, opt)


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 40) -> None:
    x, t = digits()
    for _ in range(steps):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), t).backward()
        opt.step()
    assert loss_of(model) < 0.5 * START


@pytest.mark.parametrize("make", [ng.Natural, lambda m: ng.KFAC(m, nn.CrossEntropyLoss())], ids=["Natural", "KFAC"])
def test_ignite(make: Callable[..., Any]) -> None:
    engine = pytest.importorskip("ignite.engine")
    model = seeded(network)
    opt = make(model)
    for group in opt.param_groups:
        group["lr"] *= 5
    trainer = engine.create_supervised_trainer(model, opt, nn.CrossEntropyLoss())
    trainer.run([digits()], max_epochs=40)
    assert loss_of(model) < 0.5 * START


def test_optuna() -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        model = seeded(network)
        name = trial.suggest_categorical("name", ["Natural", "Muon"])
        train(model, getattr(ng, name)(model, lr=trial.suggest_float("lr", 0.01, 0.1, log=True)))
        return loss_of(model)

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=3)
    assert study.best_value < 0.5 * START


def test_accelerate_and_the_way_to_the_plan() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, rows = seeded(network), list[tuple[dict[str, float], int]]()
    model, opt = accelerator.prepare(model, ng.KFAC(model, nn.CrossEntropyLoss(), lr=0.3))
    ng.log_to(opt, lambda numbers, step: rows.append((numbers, step)), every=10)
    x, t = digits()
    for part in range(80):
        with accelerator.accumulate(model):
            half = slice(256 * (part % 2), 256 * (part % 2) + 256)
            accelerator.backward(nn.functional.cross_entropy(model(x[half]), t[half]))
            opt.step()
            opt.zero_grad()
    assert loss_of(model) < 0.5 * START
    assert [step for _, step in rows] == [1, 11, 21, 31]
    assert "Linear" in str(opt.optimizer.plan())


def lightning_module() -> Any:
    pl = pytest.importorskip("pytorch_lightning")

    class Digits(pl.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(network)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*digits()), batch_size=128)

    return pl, Digits


QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}


@pytest.mark.parametrize("cls", CLASSES)
def test_the_command_line_of_lightning(cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, Digits = lightning_module()
    pytest.importorskip("jsonargparse")
    pytest.importorskip("docstring_parser")  # jsonargparse[signatures]
    cli = pytest.importorskip("pytorch_lightning.cli")
    options = ["fit", f"--optimizer=natgrad.{cls.__name__}", "--optimizer.lr=0.05", "--trainer.max_epochs=15"]
    monkeypatch.setattr(sys, "argv", ["train"])
    done = cli.LightningCLI(
        Digits,
        args=options,
        trainer_defaults={**QUIET, "default_root_dir": str(tmp_path), "enable_checkpointing": False},
        save_config_callback=None,
    )
    (opt,) = done.trainer.optimizers
    assert type(opt) is cls
    assert loss_of(done.model.net) < 0.5 * START


def test_lightning_writes_the_numbers_into_its_loggers(tmp_path: Path) -> None:
    pl, Digits = lightning_module()
    from natgrad.integrations.lightning import LightningMetrics

    class Tuned(Digits):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            return ng.KFAC(self.net, nn.CrossEntropyLoss(), step=ng.SelfTuned())

    logger = pl.loggers.CSVLogger(tmp_path)
    trainer = pl.Trainer(
        max_epochs=3,
        callbacks=[LightningMetrics(every=2)],
        enable_checkpointing=False,
        **{**QUIET, "logger": logger},
    )
    trainer.fit(Tuned())
    text = next(tmp_path.rglob("metrics.csv")).read_text(encoding="utf-8")
    head, *rows = text.splitlines()
    assert {"natgrad/lr_effective", "natgrad/momentum_effective", "natgrad/damping"} <= set(head.split(","))
    assert len(rows) == 6


def trainer_of(folder: Path, **options: Any) -> Any:
    """A Trainer with a tiny GPT-2, on CPU."""
    tr = pytest.importorskip("transformers")
    config = tr.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, dropout, 0.0)
    torch.manual_seed(0)
    model = tr.GPT2LMHeadModel(config)
    rows = torch.randint(3, 11, (16, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    of_args = {"max_steps": 6, "save_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 8, "seed": 0}
    callbacks = options.pop("callbacks", [])
    args = tr.TrainingArguments(str(folder), **quiet, **of_args)
    return tr.Trainer(model, args, train_dataset=data, callbacks=callbacks, **options)


@pytest.mark.parametrize("name", ["NaturalFactory", "KFACFactory", "class"])
def test_a_trainer_makes_the_optimizer_and_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from natgrad.integrations import transformers as integration

    cls = ng.SOAP if name == "class" else getattr(integration, name)
    choice = {"optimizer_cls_and_kwargs": (cls, {"lr": 0.01})}
    whole = trainer_of(tmp_path / "whole", **choice)
    whole.train()
    resumed = trainer_of(tmp_path / "again", **choice)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    for (key, p), q in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q), key
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]


def test_a_factory_knows_the_embedding_and_the_head(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from natgrad.integrations.transformers import NaturalFactory, TrainerMetrics

    rows: list[tuple[dict[str, float], int]] = []
    callback = TrainerMetrics(lambda numbers, step: rows.append((numbers, step)), every=2)
    trainer = trainer_of(tmp_path, optimizer_cls_and_kwargs=(NaturalFactory, {"lr": 0.01}), callbacks=[callback])
    trainer.train()
    opt = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    by_name = {a.name: a for a in opt.plan().assignments}
    assert not by_name["transformer.wte.weight"].is_matrix
    assert [step for _, step in rows] == [1, 3, 5]


def test_pairs_with_names_take_the_steps_of_the_model() -> None:
    """GPT-2 through ``named_parameters()``, bit for bit."""
    tr = pytest.importorskip("transformers")
    config = tr.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    losses = []
    ways: list[Callable[[Any], Any]] = [lambda m: m, lambda m: m.named_parameters()]
    for give in ways:
        torch.manual_seed(0)
        x, model = torch.arange(24).view(4, 6) % 11, tr.GPT2LMHeadModel(config)
        model.eval()
        opt = ng.Natural(give(model))
        for _ in range(4):
            opt.zero_grad()
            loss = model(input_ids=x, labels=x).loss
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
    assert losses[:4] == losses[4:]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
@pytest.mark.parametrize(
    "make",
    [
        lambda m: ng.KFAC(m, nn.CrossEntropyLoss()),
        lambda m: ng.GaussNewton(m, ng.Residuals(lambda m, x: m(x), torch.ones(3, 64))),
    ],
    ids=["KFAC", "GaussNewton"],
)
def test_what_cannot_be_copied_says_what_to_do(make: Callable[..., Any], copied: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="copy the model, make a new optimizer for it, and load_state_dict"):
        copied(make(network()))

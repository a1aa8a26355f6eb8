"""Races: every optimizer on every task at a small size, what is recorded, and what the rivals compute."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import natgrad as ng
from benchmarks import pages, race_models, races, rivals

CPU = torch.device("cpu")
TASKS = {task.name: task for task in race_models.tasks(tiny=True).values()}
OURS = [name for name in rivals.CONTENDERS if name.startswith(("natural", "ng-"))]
# What differs from "natural" or "ng-kl-shampoo" by an argument alone trains a ViT and a small network.
WITH_ARGUMENTS = ("natural-", "ng-kl-shampoo-")
VARIANTS = [n for n in OURS if n.startswith(WITH_ARGUMENTS) and n not in ("natural-fisher", "natural-own")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of the kinds that the loaders read."""
    path = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name in ("wikitext2.train", "wikitext2.valid", "tinyshakespeare"):
        (path / f"{name}.txt").write_text("The quick brown fox jumps. " * 40)
    x, y = rng.integers(256, size=(60, 32, 32, 3), dtype=np.uint8), rng.integers(10, size=60)
    np.savez(path / "cifar10.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    z = rng.integers(256, size=(60, 28, 28), dtype=np.uint8)
    np.savez(path / "mnist.npz", x_train=z[:40], y_train=y[:40], x_test=z[40:], y_test=y[40:])
    test = np.zeros((1, 200), bool)
    test[:, :20] = True
    np.savez(
        path / "uci_regression.npz",
        protein_x=rng.normal(size=(200, 9)),
        protein_y=rng.normal(size=200),
        protein_test=test,
    )
    return path


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """The command sets the precision of products; other tests get theirs back."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def run(task: str = "tiny-uci", **changes: Any) -> races.Run:
    return replace(races.Run(task, "adamw", 1e-3, 0.1, 0, 4, race_models.REPORT), **changes)


@pytest.mark.parametrize("name", TASKS)
def test_every_rival_trains_every_network(name: str, folder: Path) -> None:
    task = TASKS[name]
    data = task.data(folder, race_models.REPORT, CPU)
    starts = races.Trainer(run(), task, data, CPU).validate()[0]
    for optimizer in (*rivals.RIVALS, *OURS):
        contender = rivals.CONTENDERS[optimizer]
        if contender.kinds is not None and task.kind not in contender.kinds:
            continue
        if optimizer in VARIANTS and name not in ("tiny-vit", "tiny-uci"):
            continue
        record = races.train(
            run(name, optimizer=optimizer, lr=contender.lr / 4, steps=3), task, data, CPU, races.Clock(1)
        )
        assert record is not None
        assert record.step == [1, 2, 3], optimizer
        assert 0 < record.final < 1.5 * starts, optimizer
        assert record.seconds == sorted(record.seconds)
        assert record.size == data.size


def test_ours_is_made_from_the_metric_of_the_task(folder: Path) -> None:
    for name in ("tiny-uci", "tiny-autoencoder"):
        task = TASKS[name]
        data = task.data(folder, race_models.REPORT, CPU)
        record = races.train(run(name, optimizer="kfac", lr=0.01), task, data, CPU, races.Clock(1))
        assert record is not None
        assert record.loss is not None
        assert math.isfinite(record.loss)


def test_the_same_run_has_the_same_curve(folder: Path) -> None:
    task = TASKS["tiny-decoder"]
    data = task.data(folder, race_models.REPORT, CPU)
    first, second, other = (
        races.train(run(task.name, seed=seed), task, data, CPU, races.Clock(1)) for seed in (0, 0, 1)
    )
    assert first is not None
    assert second is not None
    assert other is not None
    assert first.validation == second.validation
    assert first.validation != other.validation


def test_a_run_that_is_recorded_is_not_repeated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tiny", "--tasks", "uci", "--optimizers", "adamw", "muon", "--data", str(folder), "--device", "cpu"]
    words += ["--results", str(tmp_path), "--screen", "--confirm", "--final", "--equal-seconds", "--tries", "4"]
    races.main(words)
    lines = (tmp_path / "tiny-uci.jsonl").read_text().splitlines()
    splits = [json.loads(line)["run"]["split"] for line in lines]
    assert splits.count("tune") == 2 * (4 + 3)
    assert splits.count("report") >= 2 * 3 + 1
    monkeypatch.setattr(races, "train", None)
    capsys.readouterr()
    races.main([*words, "--report"])
    printed = capsys.readouterr().out
    assert "| adamw |" in printed
    assert "| muon |" in printed
    assert "adamw, 4 tries" in printed


def test_time_that_is_up_leaves_the_records_as_they_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tiny", "--tasks", "uci", "--data", str(folder), "--results", str(tmp_path), "--final", "--lr", "1e-3"]
    races.main([*words, "--minutes", "0"])
    assert "time is up" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    task = TASKS["tiny-uci"]
    clock = races.Clock(1)
    clock.end = 0.0
    assert races.train(run(), task, task.data(folder, race_models.REPORT, CPU), CPU, clock) is None


def test_races_without_data_say_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--data"):
        races.main(["--tiny", "--final", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"neither mnist\.npz nor mnist\.npz\.xz"):
        race_models.read_arrays(tmp_path, "mnist")
    with pytest.raises(SystemExit, match=r"neither ptb\.txt nor ptb\.txt\.xz"):
        race_models.read_text(tmp_path, "ptb")


def test_tuning_does_not_read_what_is_reported(folder: Path, tmp_path: Path) -> None:
    for name in ("wikitext2.train", "tinyshakespeare"):
        (tmp_path / f"{name}.txt").write_bytes((folder / f"{name}.txt").read_bytes())
    assert TASKS["tiny-decoder"].data(tmp_path, race_models.TUNE, CPU).size == 1080 * 9 // 10 + 540 * 9 // 10
    for name, n in (("tiny-resnet18", 36), ("tiny-autoencoder", 36), ("tiny-uci", 162)):
        data = TASKS[name].data(folder, race_models.TUNE, CPU)
        assert data.size == n
        assert sum(len(x) for x, _ in data.validation) == n // 9


def test_a_run_that_diverges_ends_and_is_recorded(folder: Path, tmp_path: Path) -> None:
    task = TASKS["tiny-uci"]
    data = task.data(folder, race_models.REPORT, CPU)
    diverged = races.train(run(lr=1e30, steps=8), task, data, CPU, races.Clock(1))
    assert diverged is not None
    assert diverged.loss is None
    assert diverged.final == math.inf
    records = races.Records(tmp_path)
    records.add(diverged)
    assert races.Records.load(tmp_path).by_run == {diverged.run: diverged}


def record(optimizer: str, seconds: list[float], validation: list[float], **changes: Any) -> races.Record:
    last, steps = validation[-1], list(range(1, len(seconds) + 1))
    numbers: dict[str, Any] = {
        "ms": 1.0,
        "total": seconds[-1],
        "wall": 0.0,
        "size": 1,
        "parameters": 1,
        "peak_mib": 0.0,
    }
    words: dict[str, Any] = {"device": "cpu", "torch": "2", "precision": "high"}
    return races.Record(
        run(optimizer=optimizer, **changes),
        steps,
        seconds,
        validation,
        validation,
        validation,
        last,
        **numbers,
        **words,
    )


def test_losses_and_times_are_interpolated() -> None:
    one = record("adamw", [1.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    assert [one.at(t) for t in (0.5, 1.5, 3.0, 9.0)] == [3.0, 2.5, 1.5, 1.0]
    assert [one.reaches(level) for level in (3.5, 2.5, 1.5, 0.5)] == [1.0, 1.5, 3.0, math.inf]


def test_the_report_compares_at_equal_seconds() -> None:
    task = replace(TASKS["tiny-uci"], steps=4)
    records = races.Records(Path())
    for seed in (0, 1):
        for each in (
            record("adamw", [1.0, 2.0], [3.0, 2.0 + seed], seed=seed),
            record("muon", [2.0, 4.0], [2.5 + seed, 1.0], seed=seed),
            record("muon", [1.0, 2.0], [2.0, 1.5], seed=seed, steps=2),
            record("muon", [0.5, 1.0], [2.5, 2.25], seed=seed, steps=1),
        ):
            records.by_run[each.run] = each
    muon, adamw = races.rows(records, task)
    # Muon is at AdamW's 2 and 3 after 2 + 2/3 and 2.4 s of AdamW's two.
    assert muon[:5] == ["muon", "0.001, 0.1", "2", "1.0000 ± 0.0000", "3.0000 ± 0.7071"]
    assert muon[5:8] == ["1.5000 ± 0.0000", "2.2500 ± 0.0000", "1.27"]
    assert adamw[3] == "2.5000 ± 0.7071"


def test_a_search_follows_the_loss_and_keeps_to_its_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(this: races.Run, *_: Any) -> races.Record:
        loss = (math.log2(this.lr / 8e-3)) ** 2 + this.weight_decay
        return replace(record("muon", [1.0], [loss]), run=this)

    monkeypatch.setattr(races, "train", fake)
    task = replace(TASKS["tiny-uci"], data=lambda *_: race_models.Data(None, [], 1))  # type: ignore[arg-type]
    for optimizer in ("adamw", "soap"):
        race = races.Race(races.Records(tmp_path / optimizer), tmp_path, CPU, races.Clock(1))
        races.screen(race, task, optimizer, 8)
        assert len(race.records.by_run) <= 8
        assert races.chosen(race.records, task, optimizer) == (8e-3, 0.01)


@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 2)])
def test_kl_shampoo_whitens_the_momentum_and_fits_each_factor_given_the_others(shape: tuple[int, ...]) -> None:
    """Against the dense metric ⊗S with S = Q Λ Qᵀ, and E over the other axes of the whitened gradient."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = rivals.KLShampoo([w], 1.0, (0.9, 0.8), 0.0, frequency=100, eps=0.0)
    letters = "abc"[: len(shape)]
    w.grad = torch.randn(shape, dtype=torch.float64)
    optimizer.step()
    assert not w.any(), "the first gradient takes no step"
    momentum = torch.zeros_like(w)
    for _ in range(3):
        state = optimizer.state[w]
        roots = [Q @ torch.diag(λ**-0.5) @ Q.T for Q, λ in zip(state["bases"], state["eigenvalues"], strict=True)]
        factors = [S.clone() for S in state["factors"]]
        w.grad = torch.randn(shape, dtype=torch.float64)
        momentum = 0.9 * momentum + 0.1 * w.grad
        step = -momentum
        for letter, root in zip(letters, roots, strict=True):
            step = torch.einsum(f"{letters},{letter}z->{letters.replace(letter, 'z')}", step, root)
        before = w.detach().clone()
        optimizer.step()
        torch.testing.assert_close(w - before, step)
        for axis, S in enumerate(factors):
            white = w.grad
            for other, root in enumerate(roots):
                if other != axis:
                    letter = letters[other]
                    white = torch.einsum(f"{letters},{letter}z->{letters.replace(letter, 'z')}", white, root)
            flat = white.movedim(axis, 0).flatten(1)
            torch.testing.assert_close(state["factors"][axis], 0.8 * S + 0.2 * flat @ flat.T / flat.shape[1])


def test_kernels_are_lent_to_muon_as_matrices() -> None:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False))
    w = nn.Parameter(conv[0].weight.detach().clone().flatten(1))  # type: ignore[operator]
    lent = rivals.CONTENDERS["muon"].make(conv, 0.01, 0.1, TASKS["tiny-resnet18"])
    plain = torch.optim.Muon([w], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        lent.zero_grad()
        conv(torch.randn(2, 3, 5, 5)).square().sum().backward()
        weight = next(conv.parameters())
        assert weight.grad is not None
        w.grad = weight.grad.flatten(1).clone()
        lent.step()
        plain.step()
        torch.testing.assert_close(weight.flatten(1), w)


def test_the_head_and_embeddings_are_left_to_adamw() -> None:
    task = TASKS["tiny-decoder"]
    model = task.network()
    names = {id(p): name for name, p in model.named_parameters()}
    hidden = {names[id(p)] for p in rivals.matrices(model, task.head)}
    assert "layers.0.attention.q.weight" in hidden
    assert not hidden & {"tokens.weight", "head.weight", "norm.weight"}
    task = TASKS["tiny-autoencoder"]
    model = task.network()
    assert len(rivals.matrices(model, task.head)) == 4


CALL = re.compile(r"`(ng\.\w+)(?:\((.*)\))?`")  # of ng.Natural(inverse_every=25), say
CALLS = {name: match for name, title in pages.NAMES_OF_RACERS.items() if (match := CALL.search(title))}


@pytest.mark.parametrize("name", CALLS)
def test_the_pages_name_an_optimizer_by_the_call_that_was_raced(name: str) -> None:
    function, arguments = CALLS[name].groups()
    call = f"{function}(model, lr=3e-3, weight_decay=0.1{', ' + arguments if arguments else ''})"
    plans, weights = [], []
    for raced in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        task = TASKS["tiny-uci"]
        opt: Any = (
            rivals.CONTENDERS[name].make(model, 3e-3, 0.1, task) if raced else eval(call, {"ng": ng, "model": model})
        )
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            opt.step()
        plans.append(str(opt.plan()))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert plans[0] == plans[1]
    assert torch.equal(weights[0], weights[1])


def test_every_optimizer_with_a_record_has_a_name_on_the_pages() -> None:
    raced = {run.optimizer for run in races.Records.load(pages.RECORDS).by_run}
    assert not raced - pages.NAMES_OF_RACERS.keys()


def test_the_order_of_a_race_tells_what_is_level(tmp_path: Path) -> None:
    records = races.Records(tmp_path)
    losses = {"natural": (1.0, 1.2), "ng-muon": (1.05, 1.25), "adamw": (2.0, 2.1)}
    for optimizer, finals in losses.items():
        for seed, final in enumerate(finals):
            each = record(optimizer, [1.0], [final], seed=seed)
            records.add(replace(each, run=replace(each.run, task="uci", steps=1500)))
    row = next(line for line in pages.winners(tmp_path).splitlines() if line.startswith("| MLP"))
    assert row.split(" | ")[1] == "**`ng.Natural`** 1.100 ≈ Muon 1.150 < AdamW 2.050"


def test_a_best_learning_rate_at_an_end_of_the_grid_is_named(tmp_path: Path) -> None:
    records = races.Records(tmp_path)
    tried = {"ng-soap": (1e-3, 2e-3, 4e-3), "adamw": (1e-3, 5e-4, 2e-3)}
    for optimizer, rates in tried.items():
        for place, lr in enumerate(rates):
            each = record(optimizer, [1.0], [1.0 + place])
            tuned = replace(each.run, task="uci", lr=lr, split=race_models.TUNE, steps=400)
            records.add(replace(each, run=tuned))
        records.add(replace(each, run=replace(each.run, task="uci", lr=rates[0], steps=1500)))
    assert pages.ends_of_the_grid(tmp_path) == "the smallest for SOAP (MLP)"


def test_a_page_says_with_which_setting_others_than_the_tuned_one_ran_in_adamws_time(tmp_path: Path) -> None:
    """The smaller weight decay is best in tuning, and only the larger one has runs of AdamW's time."""
    records = races.Records(tmp_path)
    for optimizer, decay, split, steps, final in (
        ("adamw", 0.1, race_models.REPORT, 1500, 2.0),
        ("ng-muon", 0.01, race_models.TUNE, 1500, 1.0),
        ("ng-muon", 0.1, race_models.TUNE, 1500, 1.1),
        ("ng-muon", 0.01, race_models.REPORT, 1500, 1.2),
        ("ng-muon", 0.1, race_models.REPORT, 1500, 1.3),
        ("ng-muon", 0.1, race_models.REPORT, 1400, 1.4),
    ):
        each = record(optimizer, [1.0], [final])
        setting = replace(each.run, task="uci", lr=0.003, weight_decay=decay, split=split, steps=steps)
        records.add(replace(each, run=setting))
    assert pages.race("uci", "ng-muon", "loss, equal steps", tmp_path) == "1.2000"
    assert pages.race("uci", "ng-muon", "own schedule, AdamW's seconds", tmp_path) == "1.4000 (0.003, 0.1)"


def test_the_tuning_runs_of_a_page_are_those_of_one_length_with_three_learning_rates(tmp_path: Path) -> None:
    """A run of another length or weight decay, and two rates, do not count."""
    records = races.Records(tmp_path)
    finals: dict[str, dict[float, float]] = {
        "natural": {1e-3: 1.1, 2e-3: 1.0, 4e-3: 1.3, 8e-3: 3.0},
        "adamw": {5e-4: 2.0, 1e-3: 1.6, 2e-3: 2.4},
        "ng-muon": {1e-3: 1.5, 2e-3: 1.2, 4e-3: math.inf},
    }
    for optimizer, losses in finals.items():
        for lr, final in losses.items():
            each = record(optimizer, [1.0], [min(final, 9.0)])
            tuned = replace(each.run, task="vit", lr=lr, weight_decay=0.1, split=race_models.TUNE, steps=300)
            records.add(replace(each, run=tuned, loss=final if final < math.inf else None))
        for change in ({"lr": 9.0, "steps": 1200}, {"lr": 9.0, "weight_decay": 0.0}):
            records.add(replace(each, run=replace(tuned, **change)))  # type: ignore[arg-type]
        best = min(losses, key=lambda lr: losses[lr])
        records.add(replace(each, run=replace(tuned, lr=best, split=race_models.REPORT, steps=1200)))
    (found,) = pages.screens(tmp_path).values()
    assert found.steps == 300
    assert found.losses == finals
    assert pages.nearby("natural", tmp_path) == "20.0 %, at most 30 %"
    assert pages.nearby("ng-muon", tmp_path) == "25.0 %, at most 25 %"
    assert pages.rates_below_adamw(tmp_path) == "at all but 0.008 on ViT"
    assert pages.best_rates("natural", tmp_path) == "ViT 0.002"

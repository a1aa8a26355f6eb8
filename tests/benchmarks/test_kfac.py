"""The K-FAC benchmark at tiny sizes: it times the right things, and says so in a table and a file."""

import gzip
import json
import lzma
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import curves, kfac, networks, tasks, training
from benchmarks import kfac_peers as peers
from benchmarks.harness import Race, SubprocessRunner
from benchmarks.report import Report, Target, markdown, save, table
from benchmarks.rivals import SOAP
from natgrad.cli.training import Point

CPU = torch.device("cpu")
# Other libraries, where they are installed, warn about their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (partial(networks.autoencoder, 2), 2_837_314),
        (partial(networks.lenet, 2), 61_706),
        (partial(networks.vgg, 2), 14_719_818),
        (partial(networks.vgg, 2, norm=nn.BatchNorm2d), 14_728_266),
        (partial(networks.resnet, 16, 2), 77_706),
        (partial(networks.resnet, 16, 2, blocks=3), 271_690),
        (partial(networks.gpt, 1, 256), 10_795_841),
        (partial(networks.resnet18, 2), 11_173_962),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_the_networks_have_the_sizes_of_the_literature(make: kfac.Make, size: int) -> None:
    assert make(CPU).size == size


@pytest.mark.parametrize("case", kfac.tiny(), ids=lambda case: case.make.func.__name__)
def test_every_network_learns_its_batch(case: kfac.Case) -> None:
    problem = case.make(CPU)
    before = float(problem.loss(problem.model(problem.x), problem.t))
    kfac.training(problem, kfac.sgd, 1)()
    assert float(problem.loss(problem.model(problem.x), problem.t)) == before  # a network of one's own
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.01)
    for _ in range(20):
        networks.gradient(problem)()
        optimizer.step()
    assert float(problem.loss(problem.model(problem.x), problem.t)) < before


@pytest.mark.parametrize("case", kfac.tiny(), ids=lambda case: case.make.func.__name__)
def test_peers_that_run_have_the_input_covariances_of_the_network(case: kfac.Case) -> None:
    problem = case.make(CPU)
    able, errors = peers.runnable(peers.factors(), problem, peers.same_inputs(problem))
    assert able.keys() | errors.keys() == peers.factors().keys()
    assert all("\n" not in error for error in errors.values())


def test_covariances_of_other_inputs_are_refused_and_scales_are_not() -> None:
    problem = networks.rnn(4, 3, CPU, i=3, width=4)
    check, right = peers.same_inputs(problem), peers.input_covariances(problem)
    assert check([5 * A for A in right]) is None
    assert check([right[0].roll(1, 0), *right[1:]]) == "its input covariance [3 3] is that of something else"


def test_a_peer_that_fails_is_listed_with_its_error() -> None:
    def make(problem: networks.Problem) -> Callable[[], None]:
        raise RuntimeError("two\n lines")

    able, errors = peers.runnable({"peer": make}, networks.rnn(2, 2, CPU))
    assert able == {}
    assert errors == {"peer": "RuntimeError: two lines"}


def test_times_of_several_steps_are_divided_by_their_number() -> None:
    race = Race("b", {"a": [6.0], "b": [2.0]}, {"a": [2.0], "b": [2.0]}).each({"a": 3})
    assert race.seconds == {"a": [2.0], "b": [2.0]}


def test_soap_in_the_basis_of_a_vector_is_adam() -> None:
    torch.manual_seed(0)
    w, v = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    target = torch.randn(5, dtype=torch.float64)
    soap = SOAP([w], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    adam = torch.optim.AdamW([v], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    for parameter, optimizer in ((w, soap), (v, adam)):
        for _ in range(10):
            optimizer.zero_grad()
            (parameter - target).square().sum().backward()
            optimizer.step()
    assert torch.allclose(w, v, rtol=1e-10)


def test_soap_turns_with_the_coordinates_of_a_matrix() -> None:
    """W ↦ U W Vᵀ maps the steps of one to those of the other: Adam in the eigenbasis knows no other basis."""
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for n in (4, 3))
    A, B = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)

    def trained(turn: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        w = nn.Parameter(turn(torch.ones(4, 3, dtype=torch.float64)))
        optimizer = SOAP([w], lr=0.05, betas=(0.95, 0.95), weight_decay=0.01, frequency=3)
        for _ in range(20):
            optimizer.zero_grad()
            (A @ back(w) - B).square().sum().backward()
            optimizer.step()
        return back(w.detach())

    plain = trained(lambda w: w, lambda w: w)
    turned = trained(lambda w: U @ w @ V.T, lambda w: U.T @ w @ V)
    assert torch.allclose(plain, turned, atol=1e-6)
    assert float((A @ plain - B).norm()) < float((A @ torch.ones(4, 3).double() - B).norm())


def test_a_tiny_run_makes_a_table_a_file_and_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kfac, "peak_memory", lambda prepare, *args, device: (prepare(*args)(), 2**20)[1])
    report, path = Report(CPU, rounds=1), tmp_path / "kfac.json"
    kfac.run(report, kfac.tiny(), list(kfac.sections()), lambda: save(report, path, seconds=1.0), quick=True)
    saved = json.loads(path.read_text())
    assert {"factors", "K-FAC step", "peak memory"} <= {
        t["claim"].partition(",")[0].split(" o")[0] for t in saved["targets"]
    }
    assert all(row.contestant in table(report) for row in report.rows)
    assert markdown(path).startswith("| K-FAC factors, one sample | auto-encoder 6-5-3-…, batch 8 | LeNet 16 × 16")


def test_a_section_that_is_run_again_replaces_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "kfac.json"
    for sections, again in (("ab", False), ("b", True)):
        report = Report(CPU, rounds=1)
        for section in sections:
            report.race(section, {"unit": lambda: None, "other": lambda: None}, "unit", 1)
            report.targets.append(Target(f"claim {section}", float(again), 1.0, True))
        save(report, path, 1.0, json.loads(path.read_text()) if again else None)
    saved = json.loads(path.read_text())
    assert [row["section"] for row in saved["rows"]] == ["a", "a", "b", "b"]
    assert [t["measured"] for t in saved["targets"]] == [0.0, 1.0]
    saved["machine"]["device"] = "another"
    with pytest.raises(ValueError, match=r"of another machine, \{'device': 'another'\} and not \{"):
        save(Report(CPU, rounds=1), path, 1.0, saved)


def curve(contender: str, *losses: float, seed: int = 0) -> curves.Run:
    """A second a point."""
    history = [Point(i, float(i), loss, 0.0, 0.0) for i, loss in enumerate(losses)]
    return curves.Run("task", contender, seed, history, 0.5)


def test_the_time_to_a_loss_lies_between_two_measurements() -> None:
    run = curve("a", 1.0, 0.01, 0.0001)
    assert run.reaches(0.1) == pytest.approx(0.5)
    assert run.reaches(0.001) == pytest.approx(1.5)
    assert run.reaches(1e-5) == float("inf")
    assert curve("a", 1.0, float("nan")).final == float("inf")


def test_the_claims_compare_times_to_the_final_losses_of_others() -> None:
    runs = [curve("AdamW", 1.0, 0.1, 0.01), curve("SOAP", 1.0, 0.01, 1e-9), curve(curves.KFAC, 1.0, 0.01, 0.001)]
    adamw, soap = curves.claims(runs)
    assert adamw.measured == pytest.approx(0.5)
    assert adamw.met
    assert soap.measured == float("inf")
    assert not soap.met


def test_the_claims_are_of_the_seeds_that_both_have_and_of_rivals_that_ended_nowhere_too() -> None:
    kfac = curve(curves.KFAC, 1.0, 0.1)
    assert not curves.claims([kfac, curve("AdamW", 1.0, 0.1, seed=1)])
    assert curves.claims([kfac, curve("AdamW", 1.0, float("nan"))])[0].measured == 0


def test_mnist_is_read_from_idx_files_and_from_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (3, 28, 28), np.uint8),
        "x_test": rng.integers(0, 256, (2, 28, 28), np.uint8),
    }
    for name, array in zip(("train", "t10k"), arrays.values(), strict=True):
        header = b"".join(number.to_bytes(4, "big") for number in (2051, *array.shape))
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    np.savez(tmp_path / "mnist.npz", **arrays)  # type: ignore[arg-type]
    (tmp_path / "mnist.npz.xz").write_bytes(lzma.compress((tmp_path / "mnist.npz").read_bytes()))
    expected = [torch.from_numpy(array).flatten(1).float() / 255 for array in arrays.values()]
    for path in (tmp_path, tmp_path / "mnist.npz", tmp_path / "mnist.npz.xz"):
        assert all(torch.equal(a, b) for a, b in zip(tasks.load_mnist(path), expected, strict=True))


def test_mnist_that_is_not_there_is_missed_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"holds neither train-images-idx3-ubyte\.gz nor train-images-idx3-ubyte: give"
    ):
        tasks.load_mnist(tmp_path)


def test_everyone_trains_on_the_digits_and_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.Rival, "grid", lambda self: [curves.Setting(1e-2, 0.0, 256)])
    contest = replace(tasks.digits(CPU, widths=(64, 12, 10)), seeds=(0,))
    task, path = contest.task.name, tmp_path / "training.json"
    record = curves.Record({"device": "this"}, 0.2)
    training.tune_all(contest, record, 0.02, path)
    assert set(curves.Record.load(path).chosen[task]) == {"SGD with momentum", "AdamW", "SOAP"}
    training.compete(contest, record, path)
    assert len(record.runs) == 4
    assert all(run.final < run.history[0].train_loss for run in record.runs)
    assert all(0 < run.train_score <= 1 for run in record.runs)  # accuracies
    assert task in curves.table(record)


def test_a_record_is_resumed_from_its_file_and_nothing_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    chosen = {"task": {"AdamW": curves.Setting(0.1, 0.0, 8)}}
    record = curves.Record({"device": "this"}, 2.0, chosen, [curve("AdamW", 1.0, 0.5, 0.125)])
    record.save(path)
    assert curves.Record.load(path) == record
    assert record.has("task", "AdamW", 0)
    assert not record.has("task", "AdamW", 1)
    fresh = curves.Record({"device": "this"}, 2.0)
    assert training.begin(path, fresh, "task", tuning=False, resume=True) == record
    begun = training.begin(path, fresh, "task", tuning=False, resume=False)
    assert (begun.chosen, begun.runs) == (chosen, [])


def test_a_record_that_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    curves.Record({"device": "this"}, 2.0).save(path)
    with pytest.raises(SystemExit, match=r"another machine, or of another budget: leave out --resume"):
        training.begin(path, curves.Record({"device": "that"}, 2.0), "task", tuning=True, resume=True)
    with pytest.raises(SystemExit, match=r"has no learning rates for the task: give --tune SECONDS once"):
        training.begin(path, curves.Record({"device": "this"}, 2.0), "task", tuning=False, resume=False)


def test_networks_are_chosen_by_a_part_of_their_names() -> None:
    cases = kfac.tiny()
    assert kfac.only(cases, []) is cases
    names = [case.make(torch.device("cpu")).name for case in kfac.only(cases, ["LeNet", "GPT"])]
    assert [name.split()[0] for name in names] == ["LeNet", "GPT"]
    with pytest.raises(
        ValueError, match=r"--network Nothing: no network is called so. Take a part of auto-encoder .*GPT"
    ):
        kfac.only(cases, ["Nothing"])


def noting(path: Path, loop: Callable[[torch.device], Callable[[], None]]) -> Callable[[], None]:
    """A loop that writes down which process it is in, and how often it was called."""
    steps, calls = loop(CPU), list[int]()

    def contestant() -> None:
        steps()
        calls.append(os.getpid())
        path.write_text(json.dumps([*calls, torch.get_float32_matmul_precision()]))

    return contestant


def test_a_loop_of_sobolev_kfac_is_made_once_in_another_process_under_the_same_switches(tmp_path: Path) -> None:
    loop = partial(kfac.training_loop, kfac.tiny()[0].make, kfac.sobolev_kfac, 2)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with SubprocessRunner(noting, tmp_path / "calls", loop, device=CPU) as contestant:
            contestant()
            contestant()
    finally:
        torch.set_float32_matmul_precision(before)
    first, second, precision = json.loads((tmp_path / "calls").read_text())
    assert first == second != os.getpid()
    assert precision == "high"


@pytest.mark.parametrize("case", kfac.tiny(), ids=lambda case: case.make.func.__name__)
def test_batches_of_changing_size_have_half_to_all_of_the_inputs_and_their_targets(case: kfac.Case) -> None:
    problem = case.make(CPU)
    axis = 0 if problem.x.is_floating_point() else 1
    batches = kfac.batches_of_changing_size(problem)
    sizes = set()
    for _ in range(50):
        x, t = next(batches)
        sizes.add(x.shape[axis])
        assert torch.equal(x, problem.x.narrow(axis, 0, x.shape[axis]))
        assert torch.equal(t, problem.t.narrow(axis, 0, x.shape[axis]))
    size = problem.x.shape[axis]
    assert sizes == set(range(max(1, size // 2), size + 1))


def test_the_kinds_of_steps_of_resnet18_are_timed_beside_adamw() -> None:
    report = Report(CPU, rounds=1)
    kfac.resnet18(report, kfac.resnet18_case(quick=True))
    assert [row.contestant for row in report.rows] == [kfac.ADAMW, kfac.FIRST, kfac.NEW_FACTORS, kfac.PLAIN]
    first, plain, ten = report.targets
    rows = {row.contestant: row for row in report.rows}
    assert plain.measured == rows[kfac.PLAIN].ratio.median
    assert first.measured == rows[kfac.FIRST].seconds.median / rows[kfac.PLAIN].seconds.median
    assert ten.measured == pytest.approx(
        0.9 * rows[kfac.PLAIN].ratio.median + 0.1 * rows[kfac.NEW_FACTORS].ratio.median
    )

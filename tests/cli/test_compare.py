"""`natgrad compare`, `inspect`, `certify` and `doctor`, on a model of a user's own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import natgrad as ng
from natgrad.cli.compare import best_rate
from natgrad.cli.inspection import inspect
from natgrad.cli.main import main
from natgrad.cli.training import Batches, Budget, Problem, Task, TrainingRun, compare, train
from tests.zoo import OpaqueParameters

ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch import nn

x = torch.linspace(-1, 1, 96).view(32, 3)
data = torch.utils.data.TensorDataset(x, x[:, :2].sin())


def problem():
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, nn.MSELoss(), loader, [(x, x[:, :2].sin())]


def scored():
    return *problem(), largest_error


def largest_error(y, t):
    return (y - t).abs().max()


def without_test():
    return *problem()[:3], []


def rmsprop(model, lr):
    return torch.optim.RMSprop(model.parameters(), lr=lr)


def seven_billion():
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(104)]), nn.MSELoss()
"""

NORMAL = """
import torch
from torch import nn

x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


def problem():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, nn.MSELoss(), [(x, x[:, :2].sin())], [(x, x[:, :2].sin())]
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a user's module, which is the current one."""
    (tmp_path / "mine.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def record(out: str = "natgrad-compare") -> dict[str, dict[tuple[str, int], dict[str, Any]]]:
    """The runs of summary.json by task, optimizer and seed."""
    tasks = json.loads(Path(out, "summary.json").read_text(encoding="utf-8"))["tasks"]
    return {task["name"]: {(run["optimizer"], run["seed"]): run for run in task["runs"]} for task in tasks}


FIXED = "natural=0.02,adamw=0.01,muon=0.01"


class TestCompare:
    def test_optimizers_see_the_same_weights_and_batches_and_make_a_report(self) -> None:
        assert main(["compare", "mine:scored", "--optimizers", FIXED, "--steps", "12", "--seeds", "2"]) == 0
        runs = record()["mine:scored"]
        titles = ["ng.Natural (lr 0.02)", "AdamW (lr 0.01)", "Muon (lr 0.01)"]
        assert sorted(runs) == sorted((title, seed) for title in titles for seed in (0, 1))
        for seed in (0, 1):
            assert len({runs[title, seed]["history"][0]["test_loss"] for title in titles}) == 1
        assert runs[titles[0], 0]["history"][0] != runs[titles[0], 1]["history"][0]
        page = Path("natgrad-compare/report.html").read_text(encoding="utf-8")
        means = {title: sum(min(p["test_loss"] for p in runs[title, s]["history"]) for s in (0, 1)) for title in titles}
        best = min(means, key=lambda title: means[title])
        assert f"<h1>mine:scored: {best} has the lowest test loss" in page
        assert "test largest error" in page

    def test_a_step_is_that_of_a_plain_loop(self) -> None:
        """The harness, against ten lines of torch."""
        assert main(["compare", "mine:problem", "--optimizers", "adamw=0.01", "--steps", "9", "--seeds", "1"]) == 0
        import mine  # type: ignore[import-not-found]

        torch.manual_seed(0)
        model, loss, loader, test = mine.problem()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(0)
        for _ in range(3):
            for x, t in loader:
                opt.zero_grad()
                loss(model(x), t).backward()
                opt.step()
                if int(opt.state[model[0].weight]["step"]) == 9:
                    break
        ends = record()["mine:problem"]["AdamW (lr 0.01)", 0]["history"][-1]
        assert ends["step"] == 9
        with torch.no_grad():
            assert ends["test_loss"] == pytest.approx(float(loss(model(test[0][0]), test[0][1])), rel=1e-6)

    def test_rates_are_searched_with_another_seed_and_named(self) -> None:
        assert (
            main(["compare", "mine:problem", "--optimizers", "mine:rmsprop,kfac", "--steps", "8", "--seeds", "1"]) == 0
        )
        tasks = record()
        tried = {float(name.split("lr ")[1][:-1]): run for (name, _), run in tasks["learning rates"].items()}
        assert set(tried) >= {0.003, 0.01, 0.03}
        assert {seed for _, seed in tasks["learning rates"]} == {1_000_000}
        assert all(run["history"][-1]["step"] == 2 for run in tried.values())
        best = min(tried, key=lambda rate: min(point["test_loss"] for point in tried[rate]["history"]))
        assert {name for name, _ in tasks["mine:problem"]} == {f"mine:rmsprop (lr {best:g})", "K-FAC"}
        assert f"at {best:g}" in Path("natgrad-compare/report.html").read_text(encoding="utf-8")

    def test_after_kill_9_the_same_command_goes_on(self, tmp_path: Path) -> None:
        options = ["compare", "mine:problem", "--optimizers", FIXED, "--seconds", "1", "--seeds", "2", "--threads", "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        child = subprocess.Popen([sys.executable, "-m", "natgrad.cli.main", *options], env=environment, cwd=tmp_path)
        file = Path("natgrad-compare/summary.json")
        while not file.exists():
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
        before = record()["mine:problem"]
        assert 0 < len(before) < 6
        assert main(options) == 0
        after = record()["mine:problem"]
        assert len(after) == 6
        assert all(after[key] == run for key, run in before.items() if run["status"] == "finished")

    def test_more_seeds_are_added_and_another_budget_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["compare", "mine:problem", "--optimizers", "adamw=0.01", "--steps"]
        assert main([*options, "3", "--seeds", "1"]) == 0
        first = record()["mine:problem"]
        assert main([*options, "3", "--seeds", "2"]) == 0
        assert first.items() < record()["mine:problem"].items()
        capsys.readouterr()
        assert main([*options, "4"]) == 2
        assert "give another folder with --out" in capsys.readouterr().err

    def test_a_dry_run_writes_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compare", "mine:problem", "--dry-run"]) == 0
        assert "works with ng.Natural, AdamW, Muon" in capsys.readouterr().out
        assert not Path("natgrad-compare").exists()

    @pytest.mark.parametrize(("body", "error"), [("1 / 0", ZeroDivisionError), ("open('no.csv')", FileNotFoundError)])
    def test_what_the_user_function_raises_is_not_hidden(
        self, tmp_path: Path, body: str, error: type[Exception]
    ) -> None:
        (tmp_path / "mine.py").write_text(f"def problem(): return {body}", encoding="utf-8")
        with pytest.raises(error):
            main(["compare", "mine:problem"])

    def test_a_folder_of_something_else_is_left_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("natgrad-compare").mkdir()
        Path("natgrad-compare/summary.json").write_text('{"seed": 0}', encoding="utf-8")
        assert main(["compare", "mine:problem"]) == 2
        assert "give another folder with --out" in capsys.readouterr().err
        assert Path("natgrad-compare/summary.json").read_text(encoding="utf-8") == '{"seed": 0}'

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["mine"], "is not MODULE:FUNCTION"),
            (["mien:problem"], r"no module 'mien' in .*Did you mean mine\?"),
            (["mine:problme"], r"no function 'problme'. Did you mean problem\?"),
            (["mine:x"], "mine has no function 'x'"),
            (["mine:seven_billion", "--optimizers", "adamw=0.1"], r"returned 2 values: return \(model, loss, train"),
            (["mine:without_test"], "the test batches are empty"),
            (["mine:problem", "--optimizers", "natrual"], r"no optimizer 'natrual'.*Did you mean natural\?"),
            (["mine:problem", "--optimizers", "adamw=x"], "write adamw=0.001"),
            (["mine:problem", "--optimizers", "adamw,adamw"], "is named twice"),
            (["mine:problem", "--seconds", "0"], "--seconds is 0, but must be positive"),
        ],
    )
    def test_a_wrong_command_line_says_what_to_write(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["compare", *arguments]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert error.startswith("natgrad: ")
        assert re.search(message, error), error

    def test_a_mistyped_command_or_option_has_a_suggestion(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compere"]) == 2
        assert "Did you mean 'compare'?" in capsys.readouterr().err
        assert main(["compare", "mine:problem", "--secnds", "3"]) == 2
        assert "--seconds" in capsys.readouterr().err

    def test_the_exit_codes_are_in_the_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "Exit codes: 0 done; 1 an error" in text
        assert all(f"{name} " in text for name in ("demo", "compare", "inspect", "certify", "doctor"))


class TestHarness:
    @pytest.mark.parametrize("best", [1e-5, 0.001, 0.01, 0.3, 3.0])
    def test_the_search_of_rates_finds_the_lowest_loss_of_a_valley(self, best: float) -> None:
        seen: list[float] = []

        def loss(rate: float) -> float:
            seen.append(rate)
            return abs(torch.log(torch.tensor(rate / best)).item())

        assert best_rate(loss) == best
        assert len(seen) == len(set(seen))

    def test_the_search_of_rates_goes_down_where_runs_diverge(self) -> None:
        assert best_rate(lambda rate: rate if rate < 2e-4 else float("inf")) == 1e-5

    def test_an_optimizer_that_draws_random_numbers_changes_no_batch(self) -> None:
        seen: dict[str, list[torch.Tensor]] = {"quiet": [], "loud": []}

        def make(name: str, draws: int) -> Any:
            def optimizer(problem: Problem) -> torch.optim.Optimizer:
                opt = torch.optim.SGD(problem.model.parameters(), lr=0.0)
                problem.model.register_forward_pre_hook(lambda m, x: seen[name].append(x[0][0]))
                opt.register_step_post_hook(lambda *_: torch.rand(draws))  # type: ignore[arg-type]
                return opt

            return optimizer

        def problem() -> Problem:
            x = torch.arange(24.0).view(12, 2)
            return Problem(nn.Linear(2, 1), lambda y, t: y.square().sum(), Batches(x, x, 3), [(x, x)])

        task = Task("t", problem, {"quiet": make("quiet", 0), "loud": make("loud", 7)})
        compare((task,), Budget(steps=8))
        assert torch.equal(torch.stack(seen["quiet"]), torch.stack(seen["loud"]))

    def test_a_model_that_computes_its_loss_takes_dicts(self) -> None:
        class Own(nn.Linear):
            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
                return Output(super().forward(x), labels)

        class Output:
            def __init__(self, y: torch.Tensor, t: torch.Tensor) -> None:
                self.loss = (y - t).square().mean()

        model, x = Own(2, 1), torch.ones(4, 2)
        batch = {"x": x, "labels": x[:, :1]}
        run = TrainingRun(
            Task(
                "own",
                lambda: Problem(model, model, [batch], [batch]),
                {"SGD": lambda p: torch.optim.SGD(p.model.parameters(), lr=0.1)},
            ),
            "SGD",
        )
        train(run, Budget(steps=20), lambda run, spent: None)
        assert run.history[-1].test_loss < 0.01 * run.history[0].test_loss

    def test_batches_that_end_are_refused(self) -> None:
        x = torch.ones(4, 2)
        problem = Problem(nn.Linear(2, 2), nn.functional.mse_loss, iter([(x, x)]), [(x, x)])
        task = Task("once", lambda: problem, {"SGD": lambda p: torch.optim.SGD(p.model.parameters(), lr=0.1)})
        with pytest.raises(ValueError, match="return a DataLoader or a list"):
            compare((task,), Budget(steps=3))


class TestInspect:
    def test_bytes_are_those_of_the_state_after_a_step(self) -> None:
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4), nn.Linear(4, 9), nn.Flatten(0, 1))
        x = torch.arange(12).view(3, 4) % 9
        found = inspect(Problem(model, nn.CrossEntropyLoss(), [(x, x.flatten())], []), spectrum=False)
        for make, name in ((ng.Natural, "ng.Natural"), (lambda m: ng.KFAC(m, nn.CrossEntropyLoss()), "ng.KFAC")):
            opt: Any = make(model)
            nn.functional.cross_entropy(model(x), x.flatten()).backward()
            opt.step()
            assert found.numbers["state_bytes"][name] == int(opt.metrics()["natgrad/state_bytes"])
        assert found.numbers["uncovered"] == []

    def test_the_spectrum_is_that_of_the_dense_metric(self) -> None:
        assert main(["inspect", "mine:problem", "--json", "found.json", "--html", "found.html"]) == 0
        import mine

        torch.manual_seed(0)
        model, loss, loader, _ = mine.problem()
        x, _t = next(iter(loader))
        dense = ng.Dense().estimate(ng.pullback(model, x, ng.metric_of(loss))).matrix
        largest = json.loads(Path("found.json").read_text(encoding="utf-8"))["largest_eigenvalue"]
        assert largest == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-4)
        assert "0.weight + 0.bias" in Path("found.html").read_text(encoding="utf-8")

    def test_seven_billion_parameters_without_memory(self, tmp_path: Path) -> None:
        program = "import resource, sys; from natgrad.cli.main import main; code = main(sys.argv[1:]); "
        program += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
        done = subprocess.run(
            [sys.executable, "-c", program, "inspect", "mine:seven_billion"],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert f"{104 * (8192**2 + 8192):,} parameters" in done.stdout
        assert "100.0 % of the parameters have a layer rule" in done.stdout
        assert int(done.stdout.split()[-1]) < 2e6  # kilobytes

    def test_what_no_rule_covers_is_named(self) -> None:
        x = torch.ones(4, 3)
        found = inspect(Problem(nn.Sequential(OpaqueParameters(), nn.Linear(2, 3)), nn.MSELoss(), [(x, x)]))
        assert found.numbers["uncovered"] == ["0.w", "0.v"]
        share = 100 * (1 - 20 / 29)
        assert f"{share:.1f} % of the parameters have a layer rule\nwithout: 0.w, 0.v" in str(found)


class TestCertify:
    def test_undamped_kfac_is_invariant_and_adamw_is_not(self, tmp_path: Path) -> None:
        (tmp_path / "normal.py").write_text(NORMAL, encoding="utf-8")
        assert main(["certify", "normal:problem", "--steps", "2"]) == 0
        assert (
            main(["certify", "normal:problem", "--steps", "2", "--optimizers", "kfac,adamw", "--json", "c.json"]) == 3
        )
        found = json.loads(Path("c.json").read_text(encoding="utf-8"))
        assert {name: one["invariant"] for name, one in found.items()} == {"kfac": True, "adamw": False}

    def test_a_singular_metric_is_an_error_in_one_sentence(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["certify", "mine:problem"]) == 1  # its inputs are on a line
        assert capsys.readouterr().err.startswith("natgrad: the factor A of 0.layer.weight + 0.layer.bias is singular")


class TestDoctor:
    def test_a_healthy_installation(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor"]) == 0
        text = capsys.readouterr().out
        assert f"natgrad               {ng.__version__}" in text
        assert "a step on cpu         error" in text

    def test_an_old_torch_is_told(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(torch, "__version__", "2.9.1")
        assert main(["doctor"]) == 3
        assert "natgrad needs 2.11 or newer" in capsys.readouterr().out

    def test_the_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out.startswith(f"natgrad {ng.__version__}, torch {torch.__version__}")

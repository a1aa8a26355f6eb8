"""The equations of ``experiments.pde`` hold for their solutions; runs are logged, resumed and not repeated."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import natgrad as ng
from experiments.pde.__main__ import Gap, by_solver, gap_table, gaps, main, read, row
from experiments.pde.inverse import NOISE, POINTS, exact, fitted, summary
from experiments.pde.problems import PROBLEMS
from experiments.pde.solvers import SOLVERS
from experiments.pde.step_cost import compared
from experiments.pde.step_cost import main as step_cost


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_the_solution_has_no_residuals(name: str) -> None:
    problem = PROBLEMS[name]
    classes, _ = problem.classes(0, "cpu")
    for residuals in classes.values():
        x = residuals.draw()
        assert isinstance(x, torch.Tensor)
        x = x[:20]
        size = problem.solution(x).abs().max()
        assert residuals.function(problem.solution, x).abs().max() < 1e-10 * (1 + size)


def test_the_networks_have_the_sizes_of_the_literature() -> None:
    sizes = {"poisson2d": 257, "poisson5d": 10_065, "poisson10d": 118_145, "poisson100d": 1_325_057}
    for name, size in sizes.items():
        assert sum(p.numel() for p in PROBLEMS[name].network(0, "cpu").parameters()) == size


def test_a_run_is_logged_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--problem", "poisson2d", "--minutes", "0.005", "--results", str(tmp_path), "--commit", "abc"]
    main([*command, "--solver", "natgrad", "adam", "--rate", "1e-3"])
    first = {path.name: path.read_text() for path in tmp_path.rglob("*.jsonl")}
    assert set(first) == {"natgrad_0.001-0.jsonl", "adam_0.001-0.jsonl"}
    head, *lines = read(tmp_path / "poisson2d" / "adam_0.001-0.jsonl")
    assert head["parameters"] == 257
    assert lines[-1]["done"]
    assert 0 < lines[0]["error"] < 10
    main([*command, "--solver", "natgrad", "--rate", "1e-3"])
    assert {path.name: path.read_text() for path in tmp_path.rglob("*.jsonl")} == first
    said = capsys.readouterr().out
    assert "| adam 0.001 | 1 |" in said
    assert "| poisson2d | adam 0.001 |" in said.partition("| ratio |")[2]


def test_a_checkpoint_that_could_run_a_program_is_refused(tmp_path: Path) -> None:
    class Program:
        def __reduce__(self) -> tuple[Any, tuple[Path]]:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "checkpoints").mkdir()
    torch.save({"net": Program()}, tmp_path / "checkpoints" / "poisson2d-natgrad-0.pt")
    command = ["--problem", "poisson2d", "--solver", "natgrad", "--minutes", "0.005", "--commit", "abc"]
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        main([*command, "--results", str(tmp_path)])
    assert not (tmp_path / "ran").exists()


def test_the_gap_is_to_the_best_baseline_and_counts_no_later_error_of_natgrad(tmp_path: Path) -> None:
    def log(problem: str, solver: str, seed: int, *looks: tuple[float, float]) -> None:
        head = {"solver": solver, "rate": 0.1 if solver == "adam" else None}
        lines = [{"step": 1, "seconds": seconds, "error": error} for seconds, error in looks]
        path = tmp_path / problem / f"{solver}-{seed}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))

    log("heat", "adam", 0, (10.0, 0.5))
    log("heat", "engd", 0, (5.0, 0.25), (20.0, 0.125))  # the best: it has all of its 20 s
    for seed, error in enumerate((2**-10, 2**-11, 2**-12)):
        log("heat", "natgrad", seed, (2.0, 0.5), (20.1, error), (21.0, 2**-20))  # a step may end 1 % later
    log("kovasznay", "natgrad", 0, (1.0, 0.1))  # without a baseline
    assert gaps(tmp_path) == [Gap("heat", "engd", 20.0, 0.125, "natgrad", 2**-11)]
    assert gaps(tmp_path)[0].ratio == 256
    assert gap_table(tmp_path).endswith("\n| heat | engd | 20 | 1.25e-01 | natgrad | 4.88e-04 | 256 |")
    assert row(by_solver(tmp_path / "heat")["adam 0.1"])["seconds"] == "10"


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_a_solver_goes_on_from_its_state(solver: str, tmp_path: Path) -> None:
    def classes() -> dict[str, ng.Residuals]:
        made = PROBLEMS["poisson2d"].classes(0, "cpu")[0]
        return {name: ng.Residuals(each.function, each.draw()[::20]) for name, each in made.items()}  # type: ignore[index]

    nets = [PROBLEMS["poisson2d"].network(0, "cpu") for _ in range(2)]
    steppers = [SOLVERS[solver](net, classes(), 1e-3, 2**30) for net in nets]
    for _ in range(2):
        steppers[0].step(0.1)
    nets[1].load_state_dict(nets[0].state_dict())
    torch.save(steppers[0].state(), tmp_path / "state")
    steppers[1].load(torch.load(tmp_path / "state", weights_only=True))
    assert steppers[0].step(0.2) == pytest.approx(steppers[1].step(0.2), rel=1e-12)
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    assert all(torch.allclose(p, q, rtol=1e-8, atol=1e-12) for p, q in pairs)


def test_the_steps_whose_costs_are_compared_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "step_cost.jsonl"
    step_cost(["--points", "70", "--dimension", "3", "--widths", "9", "8", "--results", str(path)])
    head, ours, theirs, both = read(path)
    assert head["parameters"] == 3 * 9 + 9 + 9 * 8 + 8 + 8 + 1
    assert (ours["name"], theirs["name"]) == ("natgrad", "torch.func")
    assert both["relative difference"] < 1e-5  # the solution is as ill-conditioned as JJᵀ + 1e-6
    assert compared({"seconds": 2.0, "memory": 100}, {"seconds": 9.0, "memory": 700}, 0.0)["times faster"] == 4.5
    assert compared({"seconds": 2.0, "memory": 100}, {"seconds": 9.0, "memory": 700}, 0.0)["times less memory"] == 7


def test_the_conductivity_is_within_its_error_bar() -> None:
    fit = fitted(0, steps=60)
    at = torch.rand(100_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slope = -(torch.pi**2) * at[:, :1] * exact(at)  # ∂u/∂κ of the exact solution
    least = NOISE / float(POINTS * slope.square().mean()) ** 0.5  # Cramér and Rao's bound, with u(0, ·) known
    assert abs(fit["in units of the bar"]) < 3
    assert 0.9 * least < fit["bar"] < 3 * least


def test_the_spread_of_the_conductivity_is_over_seeds(tmp_path: Path) -> None:
    lines = [{"kappa": 0.13, "in units of the bar": 1.0}, {"kappa": 0.06, "in units of the bar": -7.0}]
    path = tmp_path / "inverse.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summary(path) == {"seeds": 2, "over kappa": pytest.approx(0.125**0.5), "in units of the bar": 5.0}

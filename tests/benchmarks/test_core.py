"""The benchmark compares like with like: at tiny sizes and in float64 all contestants compute the same numbers."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import natgrad as ng
from benchmarks import core, kfac_peers, networks, peers
from benchmarks.harness import Race, Spread, SubprocessRunner, disagreement, duels, launch_time, peak_memory, together
from tests import oracle
from tests.benchmarks.contestants import allocate, refusing

CPU = torch.device("cpu")
# Other libraries, where they are installed, compute in their own ways and warn about their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")


def mlp(n: int = 7) -> networks.Problem:
    """Four inputs, three classes."""
    return networks.mlp((4, 5, 3), n, CPU, torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    """Equal up to rounding in float64."""
    assert disagreement({"expected": expected, "found": found}) < 1e-10


def dense(problem: networks.Problem) -> Tensor:
    """G of the oracle."""
    J = oracle.module_jacobian(problem.model, problem.x)
    return oracle.dense(J, oracle.categorical(problem.model(problem.x)))


@pytest.mark.parametrize("make", [mlp, lambda: networks.resnet(1, 2, CPU, torch.float64)], ids=["mlp", "resnet"])
def test_all_products_are_the_same_product(make: Callable[[], networks.Problem]) -> None:
    problem = make()
    v = torch.randn(problem.size, dtype=torch.float64)
    by_hand = core.product_by_hand(problem, v)()
    others = peers.products(problem.model, problem.x, v).values()
    for contestant in (core.product(problem, v), core.cold_product(problem, v), *others):
        close(contestant(), by_hand)


def test_the_product_by_hand_and_the_solve_are_those_of_the_oracle() -> None:
    problem = mlp()
    G, v = dense(problem), torch.randn(problem.size, dtype=torch.float64)
    close(core.product_by_hand(problem, v)(), G @ v)
    close(core.solve(problem, v, steps=problem.size)(), oracle.damped(G, v, 1.0))


def test_all_matrices_are_the_matrix_of_the_oracle() -> None:
    problem = mlp()
    G = dense(problem)
    for contestant in (core.matrix(problem), core.matrix_by_hand(problem)):
        close(contestant(), G)


def test_all_matrices_and_diagonals_of_the_peers_are_the_same_in_float32() -> None:
    problem = networks.mlp((4, 5, 3), 7, CPU)
    G = core.matrix_by_hand(problem)()
    for contestant in peers.matrices(problem.model, problem.x).values():
        assert disagreement({"ours": G, "theirs": contestant()}) < 1e-5
    for contestant in peers.diagonals(problem.model, problem.x, sampled=False).values():
        assert disagreement({"ours": G.diagonal(), "theirs": contestant()}) < 1e-5


def test_the_exact_diagonal_is_the_diagonal_of_the_oracle() -> None:
    problem = mlp()
    close(core.diagonal(problem, core.EXACT)(), dense(problem).diagonal())


def test_the_sampled_diagonal_is_the_mean_square_of_gradients_at_targets_drawn_from_the_model() -> None:
    problem = mlp()
    with torch.no_grad():
        y = problem.model(problem.x)
    t = (ng.Categorical().scores(y, 1, torch.Generator().manual_seed(3))[0] + y.softmax(-1)).argmax(-1)

    def loss(θ: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        y = functional_call(problem.model, θ, (x.unsqueeze(0),))
        return torch.nn.functional.cross_entropy(y, label.unsqueeze(0))

    each = vmap(grad(loss), in_dims=(None, 0, 0))(problem.params, problem.x, t)
    expected = torch.cat([g.flatten(1) for g in each.values()], dim=1).square().mean(0)
    close(core.diagonal(problem, core.ONE_SAMPLE, torch.Generator().manual_seed(3))(), expected)


def test_both_damped_steps_are_the_solution_of_the_oracle() -> None:
    problem = mlp()
    ω = torch.randn(problem.size, dtype=torch.float64)
    expected = oracle.damped(dense(problem), ω, 0.1)
    close(core.step(problem, ω, 0.1)(), expected)
    close(core.step_by_hand(problem, ω, 0.1)(), expected)


def test_ratios_are_taken_within_a_round() -> None:
    one = [1.0, 10.0, 1.0]
    result = Race("b", {"a": [2.0, 20.0, 4.0], "b": one}, {"a": one, "b": one})
    assert result.ratio("a", "b") == Spread(2.0, 2.0, 3.0)
    assert result.time("b").median == 1.0


def test_a_contestant_whose_process_ends_is_an_error() -> None:
    with (
        SubprocessRunner(refusing, device=CPU) as contestant,
        pytest.raises(RuntimeError, match="has ended with code 3"),
    ):
        contestant()


def test_two_that_never_met_are_compared_in_units() -> None:
    slow, fast = [1.0, 2.0], [10.0, 10.0]
    result = Race("unit", {"a": [3.0, 6.0], "b": [60.0, 60.0]}, {"a": slow, "b": fast}).each({"b": 2, "unit": 10})
    assert result.time("b").median == 30
    assert result.ratio("a", "b").median == pytest.approx(1.0)
    assert result.in_units("a") == pytest.approx([30.0, 30.0])


def test_everyone_takes_turns_with_the_unit_alone() -> None:
    order: list[str] = []
    contestants = {name: partial(order.append, name) for name in ("a", "b", "c")}
    result = duels(contestants, "a", rounds=2, device=CPU, warmup=1)
    assert order == ["a", "b"] * 3 + ["a", "c"] * 3
    assert {name: len(seconds) for name, seconds in result.seconds.items()} == {"a": 4, "b": 2, "c": 2}
    assert result.ratio("a", "a").median == 1
    assert duels({"a": list}, "a", rounds=2, device=CPU).ratio("a", "a").median == 1


def test_where_no_loop_is_to_settle_all_take_turns() -> None:
    order: list[str] = []
    contestants = {name: partial(order.append, name) for name in ("a", "b", "c")}
    result = together(contestants, "a", rounds=2, device=CPU, warmup=1)
    assert order == ["a", "b", "c"] * 3
    assert {name: len(seconds) for name, seconds in result.seconds.items()} == {"a": 2, "b": 2, "c": 2}
    order.clear()
    together(contestants, "a", rounds=2, device=CPU, warmup=1, turns={"b": 4, "c": 2})
    assert order == ["a", "b", "c"] * 12  # whoever has a rhythm is timed over all of it


def test_a_round_of_a_duel_is_the_mean_of_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []

    def contestant(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            clock[0] += seconds * (1 + calls.count(name) % 2)  # one call, and then twice as long

        return run

    monkeypatch.setattr("benchmarks.harness.now", lambda device: clock[0])
    entries = {"a": contestant("a", 1.0), "b": contestant("b", 3.0), "c": contestant("c", 5.0)}
    result = duels(entries, "a", rounds=2, device=CPU, warmup=1, turns={"b": 4})
    assert calls == [*("a", "b") * 12, *("a", "c") * 3]
    assert result.seconds["b"] == [4.5, 4.5]
    assert result.ratio("b", "a").median == 3


def test_different_things_are_not_timed() -> None:
    with pytest.raises(AssertionError, match="section: the contestants disagree by 1"):
        core.Report(CPU, 1).agree("section", {"a": lambda: torch.ones(2), "b": lambda: 2 * torch.ones(2)})


def test_peak_memory_is_that_of_the_tensors() -> None:
    assert 60 <= peak_memory(allocate, 64, device=CPU) / 2**20 <= 70


def test_a_tiny_run_makes_a_table_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "peak_memory", lambda prepare, *args, device: (prepare(*args)(), 2**20)[1])
    report = core.Report(CPU, rounds=1)
    problem = networks.mlp((4, 5, 3), 7, CPU)
    core.products(report, problem, steps=2)
    core.matrices(report, problem)
    core.diagonals(report, problem)
    core.diagonal_memory(report, (4, 5, 3), (70, 90), 2**12)
    core.kernels(report, (4, 5, 3), n=6, few=3)
    core.save(report, tmp_path / "core.json", seconds=1.0)
    saved = json.loads((tmp_path / "core.json").read_text())
    assert {"machine", "rows", "targets"} <= saved.keys()
    assert all(isinstance(t["met"], bool) for t in saved["targets"])
    assert max(saved["disagreement"].values()) < 1e-4
    assert all(row.contestant in core.table(report) for row in report.rows)


def test_cycles_are_timed_more_often_on_a_gpu_where_recordings_must_be_made_first() -> None:
    assert core.Report(torch.device("cuda"), rounds=7).cycles == (7, 4)
    assert core.Report(CPU, rounds=7).cycles == (3, 1)
    assert core.Report(CPU, rounds=1).cycles == (1, 1)


def test_the_time_of_a_launch_is_in_microseconds() -> None:
    assert 0.01 < launch_time(CPU, count=200) < 1000


def test_a_library_that_changes_what_it_is_given_changes_nothing_for_the_others() -> None:
    """nngeometry asks for the gradient of the inputs; forward+backward, the unit, took twice its time after that."""
    problem = networks.mlp((3, 4, 2), 5, torch.device("cpu"))

    def greedy(own: networks.Problem) -> Callable[[], None]:
        own.x.requires_grad_(True)
        own.model.requires_grad_(False)
        return lambda: None

    able, failures = kfac_peers.runnable({"greedy": greedy}, problem)
    assert list(able) == ["greedy"]
    assert not failures
    assert not problem.x.requires_grad
    assert all(p.requires_grad for p in problem.model.parameters())

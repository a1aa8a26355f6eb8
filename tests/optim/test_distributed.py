"""Two processes with ``DistributedDataParallel`` take the steps of one process on the joint batch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError
from tests.optim import ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found: one start for all tests, since it takes seconds."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    for name in ranks.RESUMED:
        case = ranks.CASES[name]
        model = ranks.build(case)
        opt = case.make(model)
        ranks.train(case, model, opt, range(ranks.HALF))
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, folder / f"{name}.pt")
    spawn(ranks.worker, (folder,), nprocs=len(ranks.SHARDS))
    return [torch.load(folder / f"found{rank}.pt", weights_only=False) for rank in range(len(ranks.SHARDS))]


def _alone(name: str) -> torch.Tensor:
    case = ranks.CASES[name]
    model = ranks.build(case)
    return ranks.train(case, model, case.make(model), range(ranks.STEPS))


@pytest.mark.parametrize("name", ranks.CASES)
def test_two_processes_take_the_steps_of_one_on_the_joint_batch(found: list[dict[str, Any]], name: str) -> None:
    expected = _alone(name)
    for each in found:
        torch.testing.assert_close(each[name], expected, rtol=1e-8, atol=1e-10)
    assert torch.equal(found[0][name], found[1][name])
    start = torch.cat([p.detach().reshape(-1) for p in ranks.build(ranks.CASES[name]).parameters()])
    assert (expected - start).norm() > 1e-2  # it did move


def test_where_ekfac_has_null_spaces_two_processes_differ_from_one_as_batches_in_another_order_do(
    found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding chooses the basis of a null space, and later examples are measured in it (docs/kfac_in_training.md)."""

    def trained() -> torch.Tensor:
        model = ranks.build(ranks.WIDE)
        return ranks.train(ranks.WIDE, model, ranks.WIDE.make(model), range(ranks.STEPS))

    def turned(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, t = data(step)
        return x.flip(0), t.flip(0)

    expected, data = trained(), ranks.data
    monkeypatch.setattr(ranks, "data", turned)
    scale = (trained() - expected).norm()
    start = torch.cat([p.detach().reshape(-1) for p in ranks.build(ranks.WIDE).parameters()])
    assert scale < 0.1 * (expected - start).norm()
    for each in found:
        assert 0.1 * scale < (each["wide"] - expected).norm() < 10 * scale
    assert torch.equal(found[0]["wide"], found[1]["wide"])


@pytest.mark.parametrize("name", ranks.RESUMED)
def test_a_run_of_one_process_is_resumed_by_two(found: list[dict[str, Any]], name: str) -> None:
    for each in found:
        torch.testing.assert_close(each[f"{name}/resumed"], _alone(name), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ranks.RESUMED)
def test_a_run_of_two_processes_is_resumed_by_one_from_the_state_of_either(
    found: list[dict[str, Any]], name: str, rank: int
) -> None:
    case, saved = ranks.CASES[name], found[rank][f"{name}/state"]
    model = ranks.build(case)
    opt = case.make(model)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    end = ranks.train(case, model, opt, range(ranks.HALF, ranks.STEPS))
    torch.testing.assert_close(end, _alone(name), rtol=1e-8, atol=1e-10)


def test_parameters_have_the_names_of_the_module_inside(found: list[dict[str, Any]]) -> None:
    assert found[0]["names"] == [name for name, _ in ranks.plain().named_parameters()]


def test_every_layer_is_inverted_by_one_process_only(found: list[dict[str, Any]]) -> None:
    first, second = found[0]["shares"], found[1]["shares"]
    assert len(first) == len(second) == 2  # four steps, an inverse every second
    assert all(a + b == 3 and a > 0 and b > 0 for a, b in zip(first, second, strict=True))


def test_an_error_of_one_process_is_raised_by_all(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "SingularMetricError: the factor S of" in each["errors"][0]


def test_an_estimate_of_one_process_that_is_not_finite_is_refused_by_all(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "NonFiniteError: at step 0: the estimate of the metric (values) holds NaN or inf" in each["errors"][1]


def test_a_structure_that_sees_one_process_only_is_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert (
            "ImplicitOperator sees the batch of its own process only: with DistributedDataParallel use"
            in (each["errors"][2])
        )


@pytest.mark.parametrize("at", [3, 4], ids=["kfac", "ekfac"])
def test_a_rule_that_only_one_process_finds_is_refused_by_all(found: list[dict[str, Any]], at: int) -> None:
    for each in found:
        assert "IncompatibleError: some processes have found a layer rule for dark, and in others" in each["errors"][at]


def test_every_process_draws_samples_of_its_own(found: list[dict[str, Any]]) -> None:
    (seed, θ, stream), (other_seed, other_θ, other_stream) = (each["sampled"] for each in found)
    assert seed != other_seed
    assert torch.equal(θ, other_θ)
    assert not torch.equal(stream, other_stream)  # after both have loaded the state of the first


def test_an_optimizer_that_was_made_before_the_processes_met_is_refused_before_they_part(
    found: list[dict[str, Any]],
) -> None:
    for each in found:
        assert "IncompatibleError: the model runs inside DistributedDataParallel, and the optimizer" in each["stranger"]
        assert "IncompatibleError: there are 2 processes, and the optimizer was given a model in" in each["unwrapped"]
        for said in (each["stranger"], each["unwrapped"]):
            assert "Wrap the model first, and give the wrapped one to the optimizer" in said


DRIFTING: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "kfac": (lambda m: ng.KFAC(m, ranks.EXACT), "a metric of its own batch"),
    "loss": (lambda m: ng.Natural(m, nn.CrossEntropyLoss()), "a metric of its own batch"),
    "own backward": (lambda m: ng.KFAC(m, ng.Empirical()), "a metric of its own batch"),
    "closure": (
        lambda m: ng.NaturalGradient(
            m, ng.BatchGradient(), structure=ng.Diagonal(power=0.0), step=ng.LevenbergMarquardt()
        ),
        "the loss of its own batch",
    ),
}


@pytest.mark.parametrize("name", DRIFTING)
def test_a_model_in_no_wrapper_whose_processes_would_drift_apart_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, own = DRIFTING[name]
    make(ranks.plain())  # there is one process
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(IncompatibleError, match=f"there are 4 processes, .* each process would step by {own}"):
        make(ranks.plain())


@pytest.mark.parametrize("name", ranks.AVERAGED)
def test_gradients_that_the_user_has_averaged_need_no_wrapper(found: list[dict[str, Any]], name: str) -> None:
    for each in found:
        torch.testing.assert_close(each["averaged"][name], _alone(name), rtol=1e-8, atol=1e-10)
    assert torch.equal(found[0]["averaged"][name], found[1]["averaged"][name])


def test_optimizers_of_gradients_say_nothing_of_other_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for preset in (ng.Natural, ng.Shampoo, ng.SOAP, ng.Muon):
        preset(ranks.plain())
    assert not caplog.messages


def test_two_stages_of_a_pipeline_take_the_steps_of_their_parts_in_one_process(found: list[dict[str, Any]]) -> None:
    """Also if a stage calls its module to learn the shapes of what it returns."""
    parts = ranks.stages()
    opts = [ranks.of_stage(at, part) for at, part in enumerate(parts)]
    for step in range(ranks.STEPS):
        for opt in opts:
            opt.zero_grad()
        for x, t in zip(*(each.chunk(2) for each in ranks.data(step)), strict=True):
            F.cross_entropy(parts[1](parts[0](x)), t).backward()
        for opt, part in zip(opts, parts, strict=True):
            for p in part.parameters():
                assert p.grad is not None
                p.grad /= 2  # as the schedule does, after the backward passes
            opt.step()
    for each, part in zip(found, parts, strict=True):
        expected = torch.cat([p.detach().reshape(-1) for p in part.parameters()])
        torch.testing.assert_close(each["pipeline"], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ranks.ALONE)
def test_an_empty_shard_or_nan_in_one_process_is_raised_by_all_and_training_goes_on(
    found: list[dict[str, Any]], name: str
) -> None:
    first, second = (each["alone"][name] for each in found)
    for step in (0, 1):
        of_first, of_second = (each[3 * step : 3 * step + 3] for each in (first, second))
        assert of_second[0].startswith("ValueError: the batch is empty: the outputs have no example")
        assert of_first[0].startswith("NatgradError: in process 1: ValueError: the batch is empty")
        assert of_second[1].startswith(f"NonFiniteError: at step {step}: the outputs are not finite")
        assert of_first[1].startswith(f"NonFiniteError: in process 1: at step {step}: the outputs are not finite")
        assert of_first[2] == of_second[2] == "nothing was raised"
    assert torch.equal(first[-1], second[-1])
    assert bool(first[-1].isfinite().all())


@pytest.mark.parametrize("name", ranks.ALONE)
def test_an_optimizer_whose_step_all_processes_refused_is_freed_at_once(found: list[dict[str, Any]], name: str) -> None:
    assert [each["freed"][name] for each in found] == [True, True]


def test_another_loss_in_one_process_is_raised_by_all_and_training_goes_on(found: list[dict[str, Any]]) -> None:
    (first, *goes_on), (second, *also) = (each["mismatched"] for each in found)
    assert second.startswith("LossMismatchError: the gradient at the outputs is 3 times that of CrossEntropyLoss()")
    assert first == second.replace("Error: ", "Error: in process 1: ")
    assert goes_on[0] == also[0] == "nothing was raised"
    assert torch.equal(goes_on[1], also[1])


def test_what_fails_when_one_process_refreshes_the_metric_is_raised_by_all(found: list[dict[str, Any]]) -> None:
    assert found[0]["refreshed"].startswith("NonFiniteError: in process 1: at step 0: the outputs are not finite")
    assert found[1]["refreshed"].startswith("NonFiniteError: at step 0: the outputs are not finite")


REFUSED = {
    "fsdp1": "FullyShardedDataParallel holds parameters as parts of one vector, .*fully_shard",
    "dense": "the parameters are divided over processes, .* Dense.. is not estimated layer by layer",
    "rule": "the parameters are divided over processes, .* TrustRegion asks for the whole metric .*: use KLClip",
    "own_backward": "the parameters are divided over processes, .* Empirical.* reads layers .*: give it the loss,",
    "all": 'owners="all" keeps the whole metric in every process, and the parameters are divided: use "one"',
    "tensor": "tensor parallelism .parallelize_module. divides layers, .*: take fully_shard alone",
    "part": "some parameters are divided over other processes than the rest, or over none, .* on the whole model, too",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_with_divided_parameters_is_refused_by_name(found: list[dict[str, Any]], name: str) -> None:
    for each in found:
        assert re.search(f"IncompatibleError: {REFUSED[name]}", each["sharded"][name]), each["sharded"][name]


def test_join_is_refused_by_name_in_the_first_pass(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["join"].startswith("IncompatibleError: with model.join() a process without batches makes no step")


def test_two_processes_go_on_from_a_checkpoint_by_torch(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert torch.equal(*each["checkpoint"])

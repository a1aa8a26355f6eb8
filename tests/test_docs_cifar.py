"""docs/cifar.md says what the experiment printed: its tables are the script's, its numbers those of the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import arms
from experiments.pairs import critical

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results" / "sobolev_cifar"
PAGE = ROOT / "docs" / "cifar.md"


def text() -> str:
    """Of the page, in one line."""
    return " ".join(PAGE.read_text().split())


def read(name: str) -> Any:
    """A file of the results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def finals() -> dict[str, Any]:
    """The curves of the schedule that the page is about, by optimizer."""
    return read("summary")["cifar10"]["tenths"]


def pair(first: str, second: str) -> dict[str, Any]:
    """The first optimizer less the second."""
    sides = [first, "tenths"], [second, "tenths"]
    (found,) = (p for p in read("pairs")["pairs"] if (p["dataset"], p["first"], p["second"]) == ("cifar10", *sides))
    return found


def reached(rival: str, quantity: str) -> tuple[dict[str, int | None], dict[str, float]]:
    """Epochs and seconds until an optimizer is where the rival ends."""
    place = "cifar10", "tenths", rival, quantity
    rows = read("pairs")["reached"]
    (found,) = (r for r in rows if (r["dataset"], r["schedule"], r["rival"], r["quantity"]) == place)
    return found["epochs"], found["seconds"]


@pytest.mark.parametrize("name", ["table", "pairs", "reached"])
def test_the_tables_of_the_page_are_those_the_script_wrote(name: str) -> None:
    assert (RESULTS / f"{name}.md").read_text() in PAGE.read_text()


def test_what_the_page_links_is_there() -> None:
    page = PAGE.read_text()
    for target in ("../experiments/results/sobolev_cifar/cifar10-tenths.svg", "sobolev.md"):
        assert f"]({target})" in page
        assert (PAGE.parent / target).exists()
    assert "docs/cifar.md" in (ROOT / "README.md").read_text()


def test_the_page_says_which_parts_have_not_been_run() -> None:
    """Delete the sentence when they have: this test fails then."""
    summary = read("summary")
    assert [name for name in summary if name != "machine"] == ["cifar10"]
    assert list(summary["cifar10"]) == ["tenths"]
    assert all(curve["seeds"] == [0, 1, 2] and curve["diverged"] == 0 for curve in finals().values())
    assert "and CIFAR-100 have not been run.**" in text()


def test_the_settings_of_the_page_are_those_of_the_runs() -> None:
    c, sobolev = arms.Constants(), arms.sobolev().metric
    for arm in ("amari", "sobolev", "independent"):
        settings = finals()[arm]["settings"]
        assert (settings["epochs"], settings["batch"]) == (50, 128)
        assert settings["arm"] == pytest.approx(arms.amari().numbers())
    assert f"learning rate {c.lr:g}, a tenth of it after 40 % and a hundredth after 80 %" in text()
    assert f"momentum {c.momentum:g}, damping {c.damping:g}, weight decay {c.weight_decay:g}" in text()
    assert f"factors every {c.metric_every} and inverses every {c.inverse_every} steps" in text()
    assert f"{c.weight_decay:g}/(1 − {c.momentum:g}) = {c.decoupled:g}" in text()
    assert f"ν = {vars(sobolev)['nu']:g} and ℓ = {vars(sobolev)['lengthscale']:g}" in text()
    assert max(max(curve["workers"]) for curve in finals().values()) == 10
    assert read("summary")["machine"]["cudnn_tf32"]
    assert "Up to ten runs shared the GPU" in text()


def test_sobolev_less_amari_is_as_the_page_says() -> None:
    found = pair("sobolev", "amari")
    accuracy, early, late = (found[name] for name in ("test_accuracy", "loss_until_40", "loss_at_end"))
    low, high = accuracy["mean"] - accuracy["margin"], accuracy["mean"] + accuracy["margin"]
    assert low < 0 < high  # "cannot tell them apart"
    assert f"+{accuracy['mean']:.2f} points, t = {accuracy['t']:.1f}, p = {accuracy['p']:.2f}" in text()
    assert f"interval from −{-low:.2f} to +{high:.2f}" in text()
    assert accuracy["margin"] > 0.25  # "a quarter of a point … would not have been seen"
    assert f"lower by {-early['mean']:.4f} of {early['of_second']:.3f} (p = {early['p']:.3f})" in text()
    assert f"at the end by {-late['mean']:.4f} of {late['of_second']:.4f} (p = {late['p']:.3f})" in text()
    assert max(early["differences"] + late["differences"]) < 0  # "in all three seeds"
    assert f"there is no difference (p = {found['loss_at_40']['p']:.2f})" in text()
    assert f"|t| has to be above {critical(0.05, 2):.2f}" in text()


def test_of_twelve_comparisons_among_the_kfacs_one_passes_the_stricter_bound() -> None:
    quantities = ("loss_until_40", "loss_at_40", "loss_at_end", "test_accuracy")
    among = [("sobolev", "amari"), ("independent", "amari"), ("sobolev", "independent")]
    p = {(one, other, name): pair(one, other)[name]["p"] for one, other in among for name in quantities}
    assert len(p) == 12
    assert f"it needs p < {0.05 / 12:.4f}" in text()
    assert [key for key, value in p.items() if value < 0.05 / 12] == [("independent", "amari", "loss_until_40")]


def test_the_effect_of_the_sampling_is_as_the_page_says() -> None:
    found, amari = pair("sobolev", "independent"), pair("independent", "amari")["loss_until_40"]
    accuracy, early, late = (found[name] for name in ("test_accuracy", "loss_until_40", "loss_at_end"))
    assert f"no effect is seen** ({accuracy['mean']:+.2f} points, p = {accuracy['p']:.0g})" in text()
    assert f"lower, by {early['mean']:.4f} (p = {early['p']:.3f})" in text()
    assert f"stricter bound, {-amari['mean']:.4f} with p = {amari['p']:.4f}" in text()
    assert f"At the end there is none (p = {late['p']:.2f})" in text()


def test_kfac_beside_sgd_and_adamw_is_as_the_page_says() -> None:
    sgd, adamw = pair("amari", "sgd")["test_accuracy"], pair("amari", "adamw")["test_accuracy"]
    assert f"by {sgd['mean']:.2f} points of test accuracy over SGD (p = {sgd['p']:.3f})" in text()
    assert f"and {adamw['mean']:.2f} over AdamW (p = {adamw['p']:.3f})" in text()
    assert min(sgd["p"], adamw["p"]) > 0.05 / 12  # "neither passes the stricter bound"
    losses = {arm: curve["train_loss"]["mean"] for arm, curve in finals().items()}
    ends = {(r["arm"], r["seed"]): r["history"] for r in read("runs")}
    for seed in (0, 1, 2):  # "every K-FAC is ahead … in every seed"
        for arm in ("amari", "sobolev", "independent"):
            ours, others = ends[arm, seed], [ends[other, seed] for other in ("sgd", "adamw")]
            assert all(ours["test_accuracy"][-1] > other["test_accuracy"][-1] for other in others)
            assert all(ours["train_loss"][-1] < other["train_loss"][-1] for other in others)
    early = {arm: loss[19] for arm, loss in losses.items()}
    assert min(early, key=lambda arm: early[arm]) == "adamw"
    quoted = f"{early['adamw']:.3f} against {early['amari']:.3f} for Amari and {early['sgd']:.3f} for SGD"
    assert quoted in text()


def test_epochs_and_seconds_to_the_ends_of_others_are_as_the_page_says() -> None:
    epochs, seconds = reached("sgd", "test accuracy, %")
    e, s = epochs, {arm: f"{value:.0f} s" for arm, value in seconds.items()}
    assert (
        f"K-FAC has after {e['amari']} epochs and {s['amari']}, Sobolev after {e['sobolev']} and {s['sobolev']}"
        in text()
    )
    assert f"SGD itself after {e['sgd']} and {s['sgd']}, AdamW never" in text()
    assert e["adamw"] is None
    (_, loss), (_, own) = reached("sgd", "training loss"), reached("adamw", "training loss")
    assert f"SGD's final loss after {loss['adamw']:.0f} s, K-FAC after {loss['amari']:.0f} s" in text()
    assert f"at its own after {own['adamw']:.0f} s, K-FAC after {own['amari']:.0f} s" in text()
    (_, end), (_, right) = reached("amari", "training loss"), reached("amari", "test accuracy, %")
    assert f"K-FAC is after {end['amari']:.0f} s and Sobolev after {end['sobolev']:.0f} s" in text()
    assert f"in test accuracy, after {right['amari']:.0f} s and {right['sobolev']:.0f} s" in text()


def test_seconds_of_an_epoch_give_the_epochs_that_others_have_in_the_same_time() -> None:
    alone = read("timing")["seconds_an_epoch"]
    assert f"takes {alone['sobolev'] / alone['amari']:.2f} times as long" in text()
    others = [int(50 * alone["amari"] / alone[arm]) for arm in ("sgd", "adamw")]
    assert f"SGD has {others[0]} and AdamW {others[1]}" in text()


def test_the_anchors_are_as_far_away_as_the_page_says() -> None:
    ours = {arm: curve["test_accuracy"]["mean"][-1] for arm, curve in finals().items()}
    gaps = f"{93.86 - ours['amari']:.2f} and {94.03 - ours['sgd']:.2f} points less"
    assert (
        f"93.86 % for K-FAC after 100 epochs and 94.03 % for SGD. Ours, after 50, are {ours['amari']:.2f} %" in text()
    )
    assert f"{ours['sgd']:.2f} %: {gaps}" in text()


def test_the_tuning_was_as_brief_as_the_page_says() -> None:
    tuned = read("tuned")["cifar10"]
    for name in ("sgd", "adamw"):
        first, last = tuned[name]["rounds"]
        sizes = first["epochs"], len(first["tried"]), last["epochs"], len(last["tried"])
        assert sizes == (4, 9, 10, 3)
        decays = {tried["weight_decay"] for tried in first["tried"]}
        chosen = tuned[name]["chosen"]
        assert chosen["weight_decay"] == max(decays)
        assert f"({chosen['lr']:g}, {chosen['weight_decay']:g})" in text()
    assert "nine pairs for 4 epochs, three finalists for 10, one seed" in text()
    rates = {tried["lr"] for tried in tuned["adamw"]["rounds"][0]["tried"]}
    assert tuned["adamw"]["chosen"]["lr"] == min(rates)
    first, last = ({(tried["lr"], tried["weight_decay"]) for tried in r["tried"]} for r in tuned["sgd"]["rounds"])
    assert (0.03, 0.001) in first - last

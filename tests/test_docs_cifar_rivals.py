"""docs/cifar.md says of SGD and AdamW, and of how they were tuned, what the experiment printed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cifar_page import finals, pair, reached, read, text


def test_kfac_beside_sgd_and_adamw_is_as_the_page_says() -> None:
    sgd, adamw = pair("amari", "sgd")["test_accuracy"], pair("amari", "adamw")["test_accuracy"]
    assert f"by {sgd['mean']:.2f} points of test accuracy over SGD, which three seeds do not establish" in text()
    assert f"(p = {sgd['p']:.2f}), and by {adamw['mean']:.2f} over AdamW (p = {adamw['p']:.3f})" in text()
    assert sgd["p"] > 0.05 > adamw["p"] > 0.05 / 24  # "does not establish", "does not pass the stricter bound"
    ends = {(r["schedule"], r["arm"], r["seed"]): r["history"] for r in read("runs")}
    for schedule, arm, seed in ends:  # "every K-FAC is ahead … in every seed, with both schedules"
        if arm in ("amari", "sobolev", "independent"):
            ours, others = ends[schedule, arm, seed], [ends[schedule, other, seed] for other in ("sgd", "adamw")]
            assert all(ours["test_accuracy"][-1] > other["test_accuracy"][-1] for other in others)
            assert all(ours["train_loss"][-1] < other["train_loss"][-1] for other in others)
    early = {arm: curve["train_loss"]["mean"][19] for arm, curve in finals().items()}
    quoted = f"{early['amari']:.3f} against {early['adamw']:.3f} for AdamW and {early['sgd']:.3f} for SGD"
    assert quoted in text()


def test_sgd_and_adamw_with_fifths_are_as_the_page_says() -> None:
    tenths, fifths = ({a: c["test_accuracy"]["mean"] for a, c in finals(s).items()} for s in ("tenths", "fifths"))
    sgd, best = fifths["sgd"], max(fifths["sgd"])
    assert f"ends at {sgd[-1]:.2f} %, {tenths['sgd'][-1] - sgd[-1]:.2f} points below itself with tenths" in text()
    assert f"falls from {best:.2f} % in epoch {sgd.index(best) + 1}" in text()
    for found in read("tuned")["cifar10"].values():  # "the choice is the same"
        assert found["tenths"]["chosen"] == found["fifths"]["chosen"]
    one, other = (pair("amari", arm, "fifths")["test_accuracy"] for arm in ("sgd", "adamw"))
    assert f"lead with fifths, {one['mean']:.2f} points (p = {one['p']:.4f})" in text()
    assert f"{fifths['adamw'][-1]:.2f} % against {tenths['adamw'][-1]:.2f} % with tenths" in text()
    assert f"{other['mean']:.2f} points behind K-FAC (p = {other['p']:.3f})" in text()


def test_epochs_and_seconds_to_the_ends_of_sgd_and_adamw_are_as_the_page_says() -> None:
    end = {arm: f"{finals()[arm]['test_accuracy']['mean'][-1]:.2f} %" for arm in ("sgd", "adamw")}
    e, s = reached("sgd", "test accuracy, %")
    ours = f"K-FAC has after {e['amari']} epochs and {s['amari']}, Sobolev after {e['sobolev']} and {s['sobolev']}"
    assert f"SGD's final test accuracy, {end['sgd']}, {ours}" in text()
    assert f"SGD itself after {e['sgd']} and {s['sgd']}, AdamW never" in text()
    assert e["adamw"] is None
    _, s = reached("adamw", "test accuracy, %")
    quoted = f"K-FAC has after {s['amari']}, SGD after {s['sgd']} and AdamW after {s['adamw']}"
    assert f"AdamW's, {end['adamw']}, {quoted}" in text()
    (_, loss), (_, own) = reached("sgd", "training loss"), reached("adamw", "training loss")
    quoted = f"at SGD's end after {loss['amari']}, AdamW after {loss['adamw']} and SGD after {loss['sgd']}"
    assert f"In training loss K-FAC is {quoted}" in text()
    assert f"AdamW is first, after {own['adamw']}, K-FAC after {own['amari']}" in text()


def shown(found: dict[str, float]) -> str:
    """A rate and a weight decay."""
    return f"({found['lr']:g}, {found['weight_decay']:g})"


def first_of(done: dict[str, Any]) -> dict[str, float]:
    """The best of a round."""
    return max(done["tried"], key=lambda tried: tried["accuracy"])


@pytest.mark.parametrize("schedule", ["tenths", "fifths"])
def test_the_tuning_was_as_brief_as_the_page_says(schedule: str) -> None:
    found = {name: read("tuned")["cifar10"][name][schedule] for name in ("sgd", "adamw")}
    sizes = [[(done["epochs"], len(done["tried"])) for done in one["rounds"]] for one in found.values()]
    assert sizes == [[(4, 16), (15, 5)], [(4, 12), (15, 5)]]
    assert "sixteen and twelve pairs for 4 epochs, five finalists for 15, one seed" in text()
    sgd, adamw = (one["chosen"] for one in found.values())
    assert f"SGD's choice is {shown(sgd)}, inside its grid, and AdamW's {shown(adamw)}, with the largest rate" in text()
    for name, number, inside in (("sgd", "lr", True), ("sgd", "weight_decay", True), ("adamw", "lr", False)):
        tried = {one[number] for one in found[name]["rounds"][0]["tried"]}
        assert (found[name]["chosen"][number] < max(tried)) == inside
        assert found[name]["chosen"][number] > min(tried)
    firsts = [first_of(one["rounds"][0]) for one in found.values()]
    assert f"After 4 epochs now {shown(firsts[0])} and {shown(firsts[1])} were first" in text()
    for one, first in zip(found.values(), firsts, strict=True):
        assert first["weight_decay"] == max(tried["weight_decay"] for tried in one["rounds"][0]["tried"])
        assert shown(first) in map(shown, one["rounds"][1]["tried"])  # "and they were behind after 15"
        assert shown(first) != shown(one["chosen"])


def test_what_the_page_says_of_other_candidates_was_found() -> None:
    tuned = read("tuned")["cifar10"]
    (before,) = tuned["adamw"]["tenths"]["before"]
    tried = before["rounds"][0]["tried"]
    large = max(one["accuracy"] for one in tried if one["lr"] == 0.003)
    best = max(one["accuracy"] for one in tried)
    assert f"had {large:.1%} at best where {best:.1%} was the best".replace("%", " %") in text()
    assert 0.003 not in {one["lr"] for one in tuned["adamw"]["tenths"]["rounds"][0]["tried"]}
    last = tuned["sgd"]["tenths"]["rounds"][1]["tried"]
    (anchor,) = (one["accuracy"] for one in last if (one["lr"], one["weight_decay"]) == (0.03, 0.001))
    chosen = max(one["accuracy"] for one in last)
    assert f"had {anchor:.1%} after 15 epochs with tenths, the choice {chosen:.1%}".replace("%", " %") in text()

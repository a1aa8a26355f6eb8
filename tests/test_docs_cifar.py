"""docs/cifar.md says what the experiment printed: its tables are the script's, its numbers those of the JSON."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from experiments import configs
from experiments.configs import FIFTHS, TENTHS
from experiments.timing import Timing
from tests.cifar_page import PAGE, RESULTS, ROOT, finals, pair, reached, read, signed, text

QUANTITIES = ("loss_until_40", "loss_at_40", "loss_at_end", "test_accuracy")
KFACS = [("sobolev", "amari"), ("independent", "amari"), ("sobolev", "independent")]


@pytest.mark.parametrize("name", ["table", "pairs", "reached"])
def test_the_tables_of_the_page_are_those_the_script_wrote(name: str) -> None:
    assert (RESULTS / f"{name}.md").read_text() in PAGE.read_text()


def test_what_the_page_links_is_there() -> None:
    page = PAGE.read_text()
    pictures = [f"../experiments/results/sobolev_cifar/cifar10-{name}.svg" for name in ("tenths", "fifths", "paper")]
    for target in (*pictures, "sobolev.md"):
        assert f"]({target})" in page
        assert (PAGE.parent / target).exists()
    assert "docs/cifar.md" in (ROOT / "README.md").read_text()


def test_the_page_says_which_parts_have_not_been_run() -> None:
    """Delete the sentence when CIFAR-100 has: this test fails then."""
    summary = read("summary")
    assert [name for name in summary if name != "machine"] == ["cifar10"]
    assert list(summary["cifar10"]) == ["tenths", "fifths"]
    for schedule in summary["cifar10"]:
        assert list(finals(schedule)) == ["amari", "sobolev", "independent", "sgd", "adamw"]
        assert all(curve["seeds"] == [0, 1, 2] and curve["diverged"] == 0 for curve in finals(schedule).values())
    assert "**CIFAR-100 has not been run.**" in text()


def test_the_settings_of_the_page_are_those_of_the_runs() -> None:
    c, sobolev = configs.Constants(), configs.sobolev().metric
    for schedule in ("tenths", "fifths"):
        for arm in ("amari", "sobolev", "independent"):
            settings = finals(schedule)[arm]["settings"]
            assert (settings["epochs"], settings["batch"]) == (50, 128)
            assert settings["arm"] == pytest.approx(configs.amari().numbers())
        assert max(max(curve["workers"]) for curve in finals(schedule).values()) == 12
    assert f"learning rate {c.lr:g}, momentum {c.momentum:g}, damping {c.damping:g}" in text()
    assert f"weight decay {c.weight_decay:g}, factors every {c.metric_every}" in text()
    assert f"inverses every {c.inverse_every} steps" in text()
    assert f"{c.weight_decay:g}/(1 − {c.momentum:g}) = {c.decoupled:g}" in text()
    assert f"ν = {vars(sobolev)['nu']:g} and ℓ = {vars(sobolev)['lengthscale']:g}" in text()
    assert read("summary")["machine"]["cudnn_tf32"]
    assert "Up to twelve runs shared the GPU" in text()


def test_the_schedules_of_the_page_are_those_of_the_runs() -> None:
    tenths, fifths = ([one.left(epoch, 50) for epoch in (0, 19, 20, 29, 30, 39, 40, 49)] for one in (TENTHS, FIFTHS))
    assert tenths == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01])
    assert fifths == pytest.approx([1, 1, 1 / 5, 1 / 5, 1 / 25, 1 / 25, 1 / 25, 1 / 25])
    assert "a tenth of the rate after 40 % and a hundredth after 80 %" in text()
    assert "a fifth after 40 % and a twenty-fifth after 60 %. Until 40 % both are the same" in text()
    times = [f / t for f, t in zip(fifths, tenths, strict=True)]
    quoted = f"{times[2]:g} times the rate of tenths from 40 to 60 % of the epochs, {times[4]:g} times from 60 to 80 %"
    assert f"{quoted}, and {times[6]:g} times in the last fifth" in text()
    lr = finals("fifths")["sgd"]["settings"]["arm"]["lr"]
    assert f"SGD ends with a rate of {lr * fifths[-1]:g} and not {lr * tenths[-1]:g}" in text()


def test_sobolev_less_amari_on_the_test_images_is_as_the_page_says() -> None:
    found = {schedule: pair("sobolev", "amari", schedule)["test_accuracy"] for schedule in ("tenths", "fifths", "both")}
    for schedule, start in (("tenths", " points"), ("fifths", ""), ("both", "")):
        one = found[schedule]
        low, high = one["mean"] - one["margin"], one["mean"] + one["margin"]
        p, interval = f"{one['p']:.2g}".ljust(4, "0"), f"from {signed(low)} to {signed(high)}"
        assert f"{signed(one['mean'])}{start} (t = {one['t']:.1f}, p = {p}," in text()
        assert interval in text()
        assert one["p"] > 0.05 / 24  # "none of the three passes"
    assert min(found["tenths"]["differences"] + found["fifths"]["differences"]) > 0  # "in all six pairs"
    apart = math.hypot(found["tenths"]["deviation"], found["fifths"]["deviation"]) / 2
    assert f"deviation, {found['both']['deviation']:.2f}, is half of the {apart:.2f}" in text()
    assert min(found["tenths"]["margin"], found["fifths"]["margin"]) > 0.25  # "a quarter of a point"
    assert f"|t| has to be above {stats.t.isf(0.025, 2):.2f}" in text()


def test_sobolev_less_amari_in_training_is_as_the_page_says() -> None:
    tenths, fifths, both = (pair("sobolev", "amari", schedule) for schedule in ("tenths", "fifths", "both"))
    one, two, mean = (found["loss_until_40"] for found in (tenths, fifths, both))
    assert f"lower by {-one['mean']:.4f} of {one['of_second']:.3f} (p = {one['p']:.3f})" in text()
    assert f"the same again so far, by {-two['mean']:.4f} (p = {two['p']:.3f})" in text()
    assert f"with both by {-mean['mean']:.4f} (p = {mean['p']:.3f}), in all six pairs" in text()
    assert max(one["differences"] + two["differences"]) < 0
    one, two, mean = (found["loss_at_end"] for found in (tenths, fifths, both))
    assert f"by {-one['mean']:.4f} of {one['of_second']:.4f} with tenths (p = {one['p']:.3f})" in text()
    assert f"with fifths by {-two['mean']:.4f} of {two['of_second']:.4f}, where one seed of three" in text()
    assert f"(p = {two['p']:.2f}); with both p = {mean['p']:.2f}" in text()
    assert sum(difference > 0 for difference in two["differences"]) == 1


def test_of_the_comparisons_among_the_kfacs_one_or_none_passes_the_stricter_bound() -> None:
    p = {(*k, s, q): pair(*k, s)[q]["p"] for k in KFACS for s in ("tenths", "fifths") for q in QUANTITIES}
    bound = 0.05 / len(p)
    assert f"so {len(p)}, and to be surprised by one of them at 5 % it needs p < {bound:.4f}" in text()
    (passes,) = (key for key, value in p.items() if value < bound)
    assert passes == ("independent", "amari", "tenths", "loss_until_40")
    again, both = (pair("independent", "amari", s)["loss_until_40"]["p"] for s in ("fifths", "both"))
    assert f"p = {p[passes]:.4f}. The same runs again, those with fifths, have p = {again:.3f} there" in text()
    assert f"both together {both:.4f}" in text()
    rows = [r for r in read("pairs")["pairs"] if not {r["first"][0], r["second"][0]} & {"sgd", "adamw"}]
    every = [row[quantity]["p"] for row in rows for quantity in QUANTITIES]
    assert (len(rows), len(every)) == (12, 48)
    assert f"48 comparisons, it needs p < {0.05 / 48:.4f}, and nothing passes" in text()
    assert min(every) > 0.05 / 48


def test_the_papers_comparison_is_split_as_the_page_says() -> None:
    whole, metric = pair("sobolev", "amari", "fifths", "tenths"), pair("sobolev", "amari", "fifths")
    schedule, first = pair("amari", "amari", "fifths", "tenths"), pair("sobolev", "amari")
    for name, digits, p, other in (("test_accuracy", 2, "", " with tenths"), ("loss_at_end", 4, ".2f", "")):
        w, m, s, f = (signed(found[name]["mean"], digits) for found in (whole, metric, schedule, first))
        all_p, its_p = whole[name]["p"], f"{schedule[name]['p']:.2g}"
        metrics = f" (p = {metric[name]['p']:{p}})" if p else ""
        points = " points" if name == "test_accuracy" else ""
        assert (
            f"{w}{points} (p = {all_p:.2g}) are {s} of the schedule (p = {its_p}) and {m} of the metric{metrics}; "
            in (text())
        )
        rest = signed(whole[name]["mean"] - first[name]["mean"], digits)
        assert f"the other way round, {f} of the metric{other} and {rest} of the schedule" in text()
    early = schedule["loss_until_40"]
    assert f"differ by {signed(early['mean'], 4)} ± {early['deviation']:.4f} in the mean loss" in text()


def test_the_speed_of_the_papers_comparison_is_split_as_the_page_says() -> None:
    (e, s), (own, clock) = (reached("amari", "test accuracy, %", name) for name in ("fifths, tenths", "tenths"))
    assert f"after {e['sobolev']} epochs and {s['sobolev']}, Amari after {own['amari']} and {clock['amari']}" in text()
    assert f"Amari with fifths is there after {e['amari']} and {s['amari']}" in text()
    assert f"Sobolev with tenths only after {own['sobolev']} and {clock['sobolev']}" in text()
    begin, end, fifths, tenths = own["amari"], e["sobolev"], e["amari"], own["sobolev"]
    saved = f"the schedule saves {begin - fifths} or {tenths - end}, the metric {fifths - end} or {begin - tenths}"
    assert f"of {begin - end} epochs {saved}" in text()
    (e, s), (own, _) = (reached("amari", "training loss", name) for name in ("fifths, tenths", "tenths"))
    quoted = f"its end after {own['amari']} epochs, with fifths after {e['amari']}, Sobolev with fifths after"
    assert f"{quoted} {e['sobolev']}" in text()
    assert f"{s['amari']} against {s['sobolev']}" in text()


def test_with_one_schedule_seconds_are_as_the_page_says() -> None:
    alone = Timing.load(RESULTS / "timing.json").of("cifar10")["seconds_an_epoch"]
    assert f"takes {alone['sobolev'] / alone['amari']:.2f} times as long" in text()
    (_, a), (_, b) = (reached("amari", "training loss", schedule) for schedule in ("tenths", "fifths"))
    assert f"K-FAC is after {a['amari']} and Sobolev after {a['sobolev']} with tenths" in text()
    assert f"after {b['amari']} and {b['sobolev']} with fifths" in text()
    (_, a), (_, b) = (reached("amari", "test accuracy, %", schedule) for schedule in ("tenths", "fifths"))
    assert f"in test accuracy, after {a['amari']} and {a['sobolev']} with tenths" in text()
    assert f"and after {b['amari']} and {b['sobolev']} with fifths" in text()
    accuracy = finals("fifths")["amari"]["test_accuracy"]["mean"]
    assert f"K-FAC has {accuracy[33]:.2f} % in epoch 34 already, of the {accuracy[-1]:.2f} %" in text()
    others = [int(50 * alone["amari"] / alone[arm]) for arm in ("sgd", "adamw")]
    assert f"SGD has {others[0]} and AdamW {others[1]}" in text()


def test_the_effect_of_the_sampling_is_as_the_page_says() -> None:
    tenths, fifths, both = (pair("sobolev", "independent", schedule) for schedule in ("tenths", "fifths", "both"))
    one, two = tenths["test_accuracy"], fifths["test_accuracy"]
    assert f"with tenths ({one['mean']:+.2f} points, p = {one['p']:.0g}) or with fifths" in text()
    assert f"({two['mean']:+.2f}, p = {two['p']:.2f})" in text()
    one, two, mean = (found["loss_until_40"] for found in (tenths, fifths, both))
    assert f"lower, by {one['mean']:.4f} (p = {one['p']:.3f})" in text()
    assert f"with fifths by {two['mean']:.4f} (p = {two['p']:.2f})" in text()
    assert f"with both by {mean['mean']:.4f} (p = {mean['p']:.3f})" in text()
    wrong, right = (-pair(arm, "amari", "both")["loss_until_40"]["mean"] for arm in ("independent", "sobolev"))
    assert f"{wrong:.4f} against {right:.4f}" in text()
    (p,) = {f"{found['loss_at_end']['p']:.2f}" for found in (tenths, fifths)}
    assert f"no difference (p = {p} with either schedule)" in text()


def test_the_anchors_are_as_far_away_as_the_page_says() -> None:
    ours = {arm: curve["test_accuracy"]["mean"][-1] for arm, curve in finals().items()}
    gaps = f"{93.86 - ours['amari']:.2f} and {94.03 - ours['sgd']:.2f} points less"
    assert (
        f"93.86 % for K-FAC after 100 epochs and 94.03 % for SGD. Ours, after 50, are {ours['amari']:.2f} %" in text()
    )
    assert f"{ours['sgd']:.2f} % with tenths: {gaps}" in text()
    ends = {(s, arm): c["test_accuracy"]["mean"][-1] for s in ("tenths", "fifths") for arm, c in finals(s).items()}
    assert max(ends, key=lambda key: ends[key]) == ("fifths", "sobolev")
    assert f"Sobolev with fifths, has {ends['fifths', 'sobolev']:.2f} %" in text()

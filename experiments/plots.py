"""Training loss and test accuracy against epochs and seconds, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.report import ORDER, PAPER, TITLES, Group


def draw(found: Sequence[Group], results: Path) -> list[Path]:
    """Means, and one standard deviation around them: a picture for every schedule, and one as the paper has it."""
    paths = []
    for dataset in dict.fromkeys(group.dataset for group in found):
        mine = [group for group in found if group.dataset == dataset and group.records]
        pictures = {
            schedule: [group for group in mine if group.schedule == schedule]
            for schedule in dict.fromkeys(group.schedule for group in mine)
        }
        paper = [group for group in mine if PAPER.get(group.arm) == group.schedule]
        if len({group.schedule for group in paper}) == 2:
            pictures["paper"] = paper
        for name, shown in pictures.items():
            paths.append(results / f"{dataset}-{name}.svg")
            _picture(shown, f"VGG16 on {dataset}, schedule: {name}", paths[-1])
    return paths


def _picture(found: Sequence[Group], title: str, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    clocks = [group.seconds for group in found]
    alone = None not in clocks  # else all as they were measured: one picture has one kind of seconds
    for group, clock in zip(found, clocks, strict=True):
        epochs = [float(epoch + 1) for epoch in range(len(group.loss.mean))]
        label = f"{TITLES[group.arm]}, {group.schedule} ({len(group.records)})"
        for row, curve in enumerate((group.loss, group.accuracy)):
            for axis, x in zip(axes[row], (epochs, clock if alone and clock else group.shared.mean), strict=True):
                colour = f"C{ORDER.index(group.arm)}"
                low = [m - d for m, d in zip(curve.mean, curve.deviation, strict=True)]
                high = [m + d for m, d in zip(curve.mean, curve.deviation, strict=True)]
                axis.plot(x, curve.mean, color=colour, label=label)
                axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes[1, 0].set_xlabel("epochs")
    axes[1, 1].set_xlabel("seconds, one run on the device" if alone else "seconds, several runs on the device")
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("test accuracy, %")
    end = max(group.accuracy.mean[-1] for group in found)
    axes[1, 0].set_ylim(max(0.0, end - 30), min(100.0, end + 2))
    axes[0, 0].legend(fontsize="small", title="mean ± deviation (seeds)")
    figure.suptitle(title)
    with matplotlib.rc_context({"svg.hashsalt": "natgrad"}):  # the same picture is the same file
        figure.savefig(path, metadata={"Date": None})

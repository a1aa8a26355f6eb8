"""Training loss and test accuracy against epochs and seconds, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.report import ORDER, TITLES, Group


def draw(found: Sequence[Group], results: Path) -> list[Path]:
    """A picture for every set of images and schedule: means, and one standard deviation around them."""
    pairs = dict.fromkeys((group.dataset, group.schedule) for group in found if group.records)
    return [
        _picture(
            [group for group in found if (group.dataset, group.schedule) == pair and group.records],
            results / f"{pair[0]}-{pair[1]}.svg",
        )
        for pair in pairs
    ]


def _picture(found: Sequence[Group], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for group in found:
        epochs = [float(epoch + 1) for epoch in range(len(group.loss.mean))]
        for row, curve in enumerate((group.loss, group.accuracy)):
            for column, x in enumerate((epochs, group.seconds)):
                colour = f"C{ORDER.index(group.arm)}"
                low = [m - d for m, d in zip(curve.mean, curve.deviation, strict=True)]
                high = [m + d for m, d in zip(curve.mean, curve.deviation, strict=True)]
                axes[row, column].plot(x, curve.mean, color=colour, label=f"{TITLES[group.arm]} ({len(group.records)})")
                axes[row, column].fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    alone = all(group.alone is not None for group in found)
    seconds = "seconds, one run on the device" if alone else "seconds, several runs on the device"
    for axis, name in zip(axes[1], ("epochs", seconds), strict=True):
        axis.set_xlabel(name)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("test accuracy, %")
    end = max(group.accuracy.mean[-1] for group in found)
    axes[1, 0].set_ylim(max(0.0, end - 30), min(100.0, end + 2))
    axes[0, 0].legend(fontsize="small", title="mean ± deviation (seeds)")
    figure.suptitle(f"VGG16 on {found[0].dataset}, schedule {found[0].schedule}")
    figure.savefig(path, metadata={"Date": None})
    return path

"""Fill in the measurements that README.md and some pages of docs/ quote, from the result files.

    python -m benchmarks.pages            # fill in every page
    python -m benchmarks.pages --figures  # draw the figures of the README and of the races as well

A page is written by hand. Where a number or a table belongs it has ``<!-- {{ expression }} -->value<!-- end -->``, of
which a reader sees the value. The expression is Python, and sees the functions of this module that are in ``NAMES``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, final

from benchmarks import curves
from benchmarks.race_models import REPORT, TUNE, Task, tasks
from benchmarks.races import HEAD, Records, chosen
from benchmarks.races import rows as race_rows
from benchmarks.rates import Records as RateRecords
from benchmarks.rates import tables as rate_tables
from benchmarks.report import claim_table, ratio_table
from experiments import powers
from experiments.files import markdown_table
from experiments.pde.__main__ import by_solver as pde_logs
from experiments.pde.__main__ import gap_table, gaps
from experiments.pde.__main__ import report as pde_report
from experiments.pde.__main__ import row as pde_row
from experiments.pde.inverse import summary as conductivity
from experiments.regression_record import tables as regression_tables
from experiments.sobolev_points import tables as points_tables

ROOT = Path(__file__).parent.parent
FIGURE = ROOT / "docs" / "figures" / "training.svg"
COST = ROOT / "docs" / "figures" / "cost.svg"
RATES = ROOT / "docs" / "figures" / "rates.svg"
RECORDS = ROOT / "benchmarks" / "results" / "races"
EQUATIONS = ROOT / "experiments" / "results" / "pde"
MARK = re.compile(r"(<!-- \{\{ (.+?) \}\} -->)(.*?)<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    """The pages that quote measurements."""
    return [
        page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if MARK.search(page.read_text())
    ]


def filled(text: str) -> str:
    """The same page, with what the expressions are today; a value on lines of its own stays between blank lines."""

    def value(match: re.Match[str]) -> str:
        found = str(eval(match[2], dict(NAMES)))
        return match[1] + (f"\n\n{found.strip()}\n\n" if match[3].startswith("\n") else found) + "<!-- end -->"

    return MARK.sub(value, text)


# ----------------------------------------------------------------------------------------------------------- benchmarks


@cache
def results(name: str) -> Any:
    """A result file, such as ``kfac-cuda`` or ``sobolev_cifar/pairs``."""
    folder = ROOT / ("experiments" if "/" in name else "benchmarks") / "results"
    return json.loads((folder / f"{name}.json").read_text())


def machine(name: str) -> str:
    """The machine of a result file, in words."""
    found = results(name)["machine"]
    return f"{found['device']}, torch {found['torch'].partition('+')[0]}"


def ratios(name: str, what: str) -> str:
    """The table of a kind of measurement: a row for each library or optimizer, a column for each network."""
    return ratio_table(results(name), what)


def claims(name: str) -> str:
    """The table of claims with their bounds."""
    return claim_table(results(name)["targets"])


def ratio(name: str, what: str, network: str, contestant: str) -> float:
    """The median of one ratio; ``network`` is the beginning of its name."""
    section = f"{what}: {network}"
    (found,) = {
        row["section"]: row["ratio"]["median"]
        for row in results(name)["rows"]
        if row["contestant"] == contestant and row["section"].startswith(section + ",")
    }.values()
    return float(found)


def claim(name: str, start: str) -> list[float]:
    """What was measured for the claims that begin with these words, smallest first."""
    return sorted(t["measured"] for t in results(name)["targets"] if t["claim"].startswith(start))


def span(values: list[float], digits: int = 2) -> str:
    """The smallest and the largest of some numbers.

    >>> span([1.1, 1.25, 1.2])
    '1.10 to 1.25'
    """
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def training(name: str) -> str:
    """The table of a training contest."""
    return curves.markdown(curves.Record.load(ROOT / "benchmarks" / "results" / f"{name}.json"))


NAMES_OF_RACERS = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "muon": "torch's Muon",
    "ng-muon": "Muon, `ng.Muon`",
    "soap": "SOAP, reference",
    "ng-soap": "SOAP, `ng.SOAP`",
    "ng-soap-published": 'SOAP, `ng.SOAP(nesterov=False, moments="sorted", early=False, damping=1e-16)`',
    "kl-shampoo": "KL-Shampoo, reference",
    "natural": "**`ng.Natural`**",
    "natural-every-25": "the slots of Natural, powers every 25 steps",
    "natural-every-25-kl": 'the slots of Natural, `fit="kl"`, powers every 25 steps',
    **{
        f"natural-{name}": f"`ng.Natural({arguments})`"
        for name, arguments in {
            "power-25": "power=0.25",
            "power-75": "power=0.75",
            "power-100": "power=1.0",
            "momentum-95": "momentum=0.95",
            "decay-90": "decay=0.9",
            "decay-98": "decay=0.98",
            "damping-1": "damping=ng.Relative(0.1)",
            "damping-3": "damping=ng.Relative(1e-3)",
            "damping-absolute-9": "damping=1e-9",
            "damping-absolute-11": "damping=1e-11",
            "rms-20": "rms=0.2",
            "not-polar": "polar=False",
            "own": "metric=ng.Empirical()",
        }.items()
    },
    "natural-kl": 'the slots of Natural, `fit="kl"`',
    "natural-momentum-after": 'the slots of Natural, `momentum_on="steps"`',
    "natural-fisher": "`Natural(model, Fisher(family, samples=1))`",
    "ng-muon-momentum-90": "`ng.Muon(momentum=0.9)`",
    **{
        f"whole-polar{name}": f'the slots of Natural, whole factors, `fit="kl"`, momentum 0.95, rms 0.2{arguments}'
        for name, arguments in {
            "": "",
            "-quarter": ", power 0.25",
            "-every-10": ", powers every 10 steps",
            "-quarter-every-10": ", power 0.25, powers every 10 steps",
        }.items()
    },
    "ng-kl-shampoo-metric-every-2": "the slots of KL-Shampoo, powers every 25 steps, decay 0.9, estimates every 2",
    "ng-kl-shampoo-mean": "Shampoo, `ng.Shampoo(inverse_every=25)`",
    **{
        f"ng-kl-shampoo{name}": f'KL-Shampoo, `ng.Shampoo(fit="kl"{arguments})`'
        for name, arguments in {
            "": ", inverse_every=25",  # what a variant does not say is as here; the default is 10
            "-every-10": "",
            "-every-50": ", inverse_every=50",
            "-every-100": ", inverse_every=100",
            "-power-25": ", inverse_every=25, power=0.25",
            "-power-375": ", inverse_every=25, power=0.375",
            "-momentum-90": ", inverse_every=25, momentum=0.9",
            "-damping-1": ", inverse_every=25, damping=ng.Relative(0.1)",
            "-damping-3": ", inverse_every=25, damping=ng.Relative(1e-3)",
            "-decay-98": ", inverse_every=25, decay=0.98",
            "-decay-90": ", inverse_every=25, decay=0.9",
            "-rms-40": ", inverse_every=25, rms=0.4",
            "-rms-10": ", inverse_every=25, rms=0.1",
        }.items()
    },
}
RACES = {
    "decoder": "Decoder 6 × 384 on the bytes of WikiText-2, nats a byte",
    "decoder-large": "Decoder 12 × 768 on the bytes of WikiText-2, nats a byte",
    "lstm": "LSTM 2 × 512 on the bytes of WikiText-2, nats a byte",
    "vit": "ViT-small on CIFAR-10",
    "resnet18": "ResNet-18 on CIFAR-10",
    "autoencoder": "Deep auto-encoder on MNIST, nats an image",
    "uci": "MLP on 288 sparse features of the UCI protein set, half the squared error",
}


def races(folder: Path = RECORDS) -> str:
    """A table of every race that has final runs, and the names of those that have none yet."""
    records, parts, missing = Records.load(folder), [], []
    for name, task in tasks().items():
        found = _tuned_rows(records, task)
        if not found:
            missing.append(RACES[name])
            continue
        columns = [0, 1, 2, 3, 5, 6, 7, *([8, 13, 9] if task.score_name == "accuracy" else []), 10]
        head = [HEAD[c] for c in columns]
        lines = [[NAMES_OF_RACERS.get(row[0], row[0]), *(row[c] for c in columns[1:])] for row in found]
        table = markdown_table(head, lines)
        sizes = {record.size for record in records.of(name, REPORT)}
        images = f", {max(sizes):,} of 50,000 training images" if task.kind == "image" else ""
        parts.append(f"{RACES[name]}{images}, {task.steps} steps:\n\n{table}")
    if missing:
        parts.append("Not yet run to the end: " + "; ".join(missing) + ".")
    return "\n\n".join(parts)


def _tuned_rows(records: Records, task: Task) -> list[list[str]]:
    """Of every optimizer the row with the setting that is best in tuning, all best first.

    The best row, where that setting has no final runs, or the tuning is not on record. Where it has no runs of AdamW's
    time, those of the best other setting are there, with that setting in brackets.
    """
    rows = [row for row in race_rows(records, task) if row[0] != "natural-every-25"]  # an earlier version
    tuned: dict[str, list[str]] = {}
    for row in rows:
        setting = chosen(records, task, row[0])
        if row[0] not in tuned or (setting is not None and row[1] == f"{setting[0]:g}, {setting[1]:g}"):
            tuned[row[0]] = row
    found = [row for row in rows if row is tuned[row[0]]]
    timed = [at for at, title in enumerate(HEAD) if title.startswith("own schedule")]
    for row in found:
        for at in timed:
            others = (f"{other[at]} ({other[1]})" for other in rows if other[0] == row[0] and other[at] != "–")
            row[at] = next(others, row[at]) if row[at] == "–" else row[at]
    return found


RACERS = {  # of the figures
    "natural": "ng.Natural",
    "ng-muon": "Muon",
    "ng-soap": "SOAP",
    "ng-kl-shampoo": "KL-Shampoo",
    "adamw": "AdamW",
}
SHORT_RACES = {
    "decoder": "decoder 6 × 384",
    "decoder-large": "decoder 12 × 768",
    "lstm": "LSTM",
    "vit": "ViT",
    "resnet18": "ResNet-18",
    "autoencoder": "auto-encoder",
    "uci": "MLP",
}


def _short(optimizer: str) -> str:
    """``Muon`` for ``ng-muon``: the name up to the arguments."""
    return NAMES_OF_RACERS[optimizer].partition(",")[0]


def winners(folder: Path = RECORDS) -> str:
    """The lowest loss of every race and the next ones, at equal steps and in AdamW's seconds.

    ``≈`` stands before a mean that is above the last one by less than the deviation of their difference.
    """
    records = Records.load(folder)
    columns = [HEAD.index(c) for c in ("loss, equal steps", "own schedule, AdamW's seconds")]
    lines = []
    for name, task in tasks().items():
        rows = _tuned_rows(records, task)
        cells = [SHORT_RACES[name]]
        for column in columns:
            found = [(row[0], *row[column].partition(" (")[0].split(" ± ")) for row in rows if " ± " in row[column]]
            cell, last = "", (math.inf, 0.0)
            for optimizer, *numbers in sorted(found, key=lambda each: float(each[1]))[:4]:
                mean, deviation = map(float, numbers)
                level = mean - last[0] < math.hypot(deviation, last[1])
                digits = f"{mean:.1f}" if mean > 10 else f"{mean:.3f}"
                cell += (" ≈ " if level else " < ") * bool(cell) + f"{_short(optimizer)} {digits}"
                last = mean, deviation
            cells.append(cell)
        lines.append(cells)
    return markdown_table(["network", "equal steps", "AdamW's seconds"], lines)


def tuning_runs(folder: Path = RECORDS) -> str:
    """How many tuning runs every optimizer has on every network: short ones + those with the whole length."""
    records, found = Records.load(folder), {}
    for name, task in tasks().items():
        for optimizer in (row[0] for row in _tuned_rows(records, task)):
            whole = len(records.of(name, TUNE, optimizer, task.steps))
            short = len(records.of(name, TUNE, optimizer)) - whole
            found[name, _short(optimizer)] = f"{short} + {whole}" if short else f"{whole}"
    columns = dict.fromkeys(optimizer for _, optimizer in found)
    rows = [[SHORT_RACES[name], *(found.get((name, one), "–") for one in columns)] for name in tasks()]
    return markdown_table(["network, short + whole", *columns], rows)


def beside_adamw(column: str, folder: Path = RECORDS) -> str:
    """On which networks a loss of ``ng.Natural`` is below AdamW's final one, and on which it is not."""
    records, at = Records.load(folder), HEAD.index(column)
    found: dict[str, list[str]] = {}
    for name, task in tasks().items():
        rows = {row[0]: row for row in _tuned_rows(records, task)}
        ours, theirs = rows["natural"][at], rows["adamw"][HEAD.index("loss, equal steps")]
        mean, final = (float(cell.partition(" ")[0]) for cell in (ours, theirs))
        found.setdefault("below it" if mean < final else "above it", []).append(SHORT_RACES[name])
    return "; ".join(f"{where} on {', '.join(networks)}" for where, networks in sorted(found.items(), reverse=True))


def best_rates(optimizer: str, folder: Path = RECORDS) -> str:
    """The learning rate of every race that is best in tuning: "decoder 6 × 384 0.0015, …"."""
    records, column, found = Records.load(folder), HEAD.index("lr, wd"), []
    for name, task in tasks().items():
        cells = [row[column] for row in _tuned_rows(records, task) if row[0] == optimizer]
        found += [f"{SHORT_RACES[name]} {cell.partition(',')[0]}" for cell in cells]
    return ", ".join(found)


@final
@dataclass(frozen=True)
class Screen:
    """Tuning runs of one length and one weight decay: the loss by optimizer and learning rate."""

    steps: int
    losses: dict[str, dict[float, float]]


def screens(folder: Path = RECORDS) -> dict[str, Screen]:
    """Of every race the length in which most racers have at least three learning rates, with weight decay 0.1.

    Races in which ``ng.Natural`` has fewer of them are left out.
    """
    records, out = Records.load(folder), {}
    for name in tasks():
        found: dict[int, dict[str, dict[float, float]]] = {}
        for record in records.of(name, TUNE):
            run = record.run
            if run.optimizer in RACERS and run.weight_decay == 0.1:
                found.setdefault(run.steps, {}).setdefault(run.optimizer, {})[run.lr] = record.final
        enough = {
            steps: {racer: dict(sorted(losses[racer].items())) for racer in RACERS if len(losses.get(racer, ())) > 2}
            for steps, losses in found.items()
        }
        steps = max(enough, key=lambda each: len(enough[each]), default=0)
        if "natural" in enough.get(steps, {}):
            out[name] = Screen(steps, enough[steps])
    return out


def nearby(optimizer: str, folder: Path = RECORDS) -> str:
    """By how much the loss is higher at half and at twice the best learning rate, in these runs: median and largest.

    Rates at which an optimizer diverges, or that were not tried, do not count.
    """
    rises = []
    for screen in screens(folder).values():
        losses = screen.losses.get(optimizer, {})
        best = min(losses, key=lambda lr: losses[lr], default=math.nan)
        for lr, loss in losses.items():
            if any(math.isclose(lr, share * best) for share in (0.5, 2.0)) and loss < math.inf:
                rises.append(loss / losses[best] - 1)
    return f"{100 * statistics.median(rises):.1f} %, at most {100 * max(rises):.0f} %"


def rate_table(index: int) -> str:
    """A table of learning rates beside AdamW's: 0 the counts, 1 every task."""
    return rate_tables(RateRecords(ROOT / "benchmarks" / "results" / "rates.jsonl"))[index]


def rates_below_adamw(folder: Path = RECORDS) -> str:
    """At which rates of these runs the loss of ``ng.Natural`` is below AdamW's best, and on which networks."""
    found: dict[str, list[str]] = {}
    for name, screen in screens(folder).items():
        best = min(screen.losses["adamw"].values())
        above = [f"{lr:g}" for lr, loss in screen.losses["natural"].items() if loss >= best]
        found.setdefault("at all but " + ", ".join(above) if above else "at all", []).append(SHORT_RACES[name])
    return "; ".join(f"{which} on {', '.join(networks)}" for which, networks in sorted(found.items()))


def ends_of_the_grid(folder: Path = RECORDS) -> str:
    """Where the best learning rate is the smallest or the largest that was tried."""
    records = Records.load(folder)
    ends: dict[str, dict[str, list[str]]] = {"smallest": {}, "largest": {}}
    for name, task in tasks().items():
        for row in _tuned_rows(records, task):
            names = {row[0], "natural-every-25"} if row[0] == "natural" else {row[0]}
            tried = {record.run.lr for each in names for record in records.of(name, TUNE, each)}
            if len(tried) < 2:
                continue
            best = float(row[1].partition(",")[0])
            for end, lr in (("smallest", min(tried)), ("largest", max(tried))):
                if best == lr:
                    ends[end].setdefault(_short(row[0]), []).append(SHORT_RACES[name])
    return "; ".join(
        f"the {end} for " + ", ".join(f"{optimizer} ({', '.join(found)})" for optimizer, found in by_name.items())
        for end, by_name in ends.items()
        if by_name
    )


def race(task: str, optimizer: str, column: str, folder: Path = RECORDS) -> str:
    """A cell of the row of an optimizer, without its deviation: race("decoder", "adamw", "loss, equal steps")."""
    rows = {row[0]: row for row in _tuned_rows(Records.load(folder), tasks()[task])}
    return re.sub(r" ± \S+", "", rows[optimizer][HEAD.index(column)])


_FEW = {
    "decoder": "decoder 6 × 384, WikiText-2",
    "decoder-large": "decoder 12 × 768, WikiText-2",
    "lstm": "LSTM, WikiText-2",
    "resnet18": "ResNet-18, half of CIFAR-10",
    "vit": "ViT, half of CIFAR-10",
    "autoencoder": "auto-encoder, MNIST",
    "uci": "MLP, UCI protein",
}


def few_races() -> str:
    """The validation losses of three optimizers, at equal steps and in AdamW's time."""
    equal, timed = "loss, equal steps", "own schedule, AdamW's seconds"
    columns = [("adamw", equal), ("ng-muon", equal), ("natural", equal), ("ng-muon", timed), ("natural", timed)]
    head = [
        "validation loss",
        "AdamW",
        "Muon",
        "`ng.Natural`",
        "Muon, AdamW's seconds",
        "`ng.Natural`, AdamW's seconds",
    ]
    return markdown_table(head, ([title, *(race(name, *column) for column in columns)] for name, title in _FEW.items()))


def ahead(column: str, optimizer: str = "natural", folder: Path = RECORDS) -> str:
    """In how many of these races the loss of an optimizer is below the one that AdamW ends with: "6 of 7"."""
    pairs = [(race(name, optimizer, column, folder), race(name, "adamw", "loss, equal steps", folder)) for name in _FEW]
    numbers = [[float(cell.split()[0].replace("–", "inf")) for cell in pair] for pair in pairs]
    return f"{sum(ours < theirs for ours, theirs in numbers)} of {len(numbers)}"


def ablation(name: str = "decoder", folder: Path = RECORDS) -> str:
    """The best tuning run of every contender of a task with the whole schedule, best first."""
    task = tasks()[name]
    best: dict[str, Any] = {}
    for record in sorted(Records.load(folder).of(name, TUNE, steps=task.steps), key=lambda r: r.final):
        best.setdefault(record.run.optimizer, record)
    rows = ([NAMES_OF_RACERS.get(one, one), f"{r.final:.3f}", f"{r.run.lr:g}"] for one, r in best.items())
    return markdown_table(["optimizer", "loss", "learning rate"], rows)


def vi_table() -> str:
    """Time to a bound on the evidence, over Adam and GPyTorch."""
    head, lines = ["over Adam", "over GPyTorch, both with Adam for the hyperparameters", "over GPyTorch"], []
    for row in results("vi")["rows"]:
        ours, like = row["ratios"]["natgrad"], row["ratios"].get("natgrad, hyperparameters by Adam")
        matched = f"{like['GPyTorch']:.3f}" if like else "–"
        lines.append([row["case"], f"{ours['Adam']:.3f}", matched, f"{ours['GPyTorch']:.3f}"])
    return markdown_table(["case", *head], lines)


# ---------------------------------------------------------------------------------------------------------- experiments


def cifar_table(name: str) -> str:
    """A table that the CIFAR experiment wrote."""
    return (ROOT / "experiments" / "results" / "sobolev_cifar" / f"{name}.md").read_text().strip()


def cifar_runs(column: str) -> str:
    """A sum over the parts of the protocol, such as that of the runs that were made."""
    head, *_, total = cifar_table("progress").splitlines()
    return dict(zip(*([cell.strip() for cell in row.split("|")] for row in (head, total)), strict=True))[column]


def cifar_figures(*names: str) -> str:
    """The figures of the CIFAR experiment with these names that have been drawn, on all images."""
    folder = ROOT / "experiments" / "results" / "sobolev_cifar"
    shown = [path.name for name in names for path in sorted(folder.glob(f"*-{name}.svg"))]
    what = "training loss and test accuracy, mean, deviation and every seed"
    return "\n\n".join(f"![{name[:-4]}: {what}](../experiments/results/sobolev_cifar/{name})" for name in shown)


def regression_table(index: int) -> str:
    """A table of the regression study: 0 the contest, 1 its steps, 2 to −2 the sweeps, −1 the confirmation."""
    return regression_tables(results("sobolev_regression/summary"))[index]


def points_table(index: int) -> str:
    """A table of the points of a kernel: 0 the errors, 1 the share of the norm."""
    return points_tables(results("sobolev_points/record"))[index]


def online_table() -> str:
    """Error over the Cramér–Rao bound after one pass over a stream."""
    rows = (
        [curve["problem"], curve["arm"], curve["settings"], f"{curve['error'][-1]:.2f}"]
        for curve in results("online_mle/record")
    )
    return markdown_table(["distribution", "optimizer", "rate", "error / bound"], rows)


def pde_tables() -> str:
    """Errors and times of every differential equation that has logs."""
    return pde_report(EQUATIONS)


def pde(problem: str, solver: str, column: str) -> str:
    """A cell of these tables: pde("poisson2d", "lbfgs", "error")."""
    return pde_row(pde_logs(EQUATIONS / problem)[solver])[column]


def pde_gaps() -> str:
    """The best baseline of every equation beside least squares."""
    return gap_table(EQUATIONS)


def step_cost() -> str:
    """The time and memory of a Gauss–Newton step, and of one that forms J."""
    lines = (EQUATIONS / "step_cost.jsonl").read_text(encoding="utf-8").splitlines()
    sizes, *rows, ratio = [json.loads(line) for line in lines]
    head = f"{sizes['points']:,} points, {sizes['parameters']:,} parameters, {sizes['device']}"
    table = [[row["name"], f"{row['seconds']:.2f}", f"{row['memory'] / 1e9:.1f}"] for row in rows]
    table.append(["torch.func over natgrad", f"{ratio['times faster']}", f"{ratio['times less memory']}"])
    return markdown_table([head, "seconds", "memory, GB"], table)


def pde_where(least: float, most: float = float("inf")) -> str:
    """The equations on which the best baseline has an error this many times that of least squares, and how many."""
    *first, last = [f"`{gap.problem}` ({gap.ratio:,.0f} times)" for gap in gaps(EQUATIONS) if least <= gap.ratio < most]
    return f"{', '.join(first)} and {last}" if first else last


NAMES: dict[str, Any] = {"powers": powers, "conductivity": conductivity} | {
    function.__name__: function
    for function in (
        *(results, machine, ratios, claims, ratio, claim, span, training, step_cost, vi_table),
        *(
            races,
            race,
            few_races,
            ahead,
            winners,
            beside_adamw,
            best_rates,
            nearby,
            rate_table,
            rates_below_adamw,
            ends_of_the_grid,
            ablation,
            tuning_runs,
            cifar_table,
            cifar_figures,
            cifar_runs,
            regression_table,
            points_table,
            online_table,
        ),
        *(pde_tables, pde, pde_gaps, pde_where),
    )
}


# --------------------------------------------------------------------------------------------------------------- figure


def draw(path: Path = FIGURE) -> None:
    """Validation loss against seconds in the race of the decoder."""
    import matplotlib
    from matplotlib.figure import Figure

    from examples.gallery import style

    with matplotlib.rc_context(style.LOOK):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        ax = figure.subplots()
        task = tasks()["decoder"]
        records = Records.load(RECORDS)
        settings = {row[0]: row[1] for row in _tuned_rows(records, task)}
        for name in ("natural", "ng-muon", "ng-soap", "adamw"):
            finals = records.of(task.name, REPORT, name, task.steps)
            tuned = [r for r in finals if settings[name] == f"{r.run.lr:g}, {r.run.weight_decay:g}"]
            for at, run in enumerate(tuned):
                seen = [(s, v) for s, v in zip(run.seconds, run.validation, strict=True) if v < 1.8]
                label = "_" if at else RACERS[name]
                ax.plot(*zip(*seen, strict=True), color=style.COLOURS[RACERS[name]], label=label, linewidth=1.2)
        ax.set(
            title="decoder 6 × 384, WikiText-2, 600 steps, three seeds", xlabel="seconds on an H200", ylim=(1.1, 1.8)
        )
        ax.set_ylabel("validation loss (lower is better)")
        style.name_lines(ax)
        style.save(figure, path, "Validation loss of a decoder against seconds")


def draw_cost(path: Path = COST) -> None:
    """The time of a K-FAC training step of four libraries over that of fused AdamW."""
    import matplotlib
    from matplotlib.figure import Figure

    from examples.gallery import style

    with matplotlib.rc_context(style.LOOK):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        ax = figure.subplots()
        networks = ["auto-encoder 784-1000-500-250-30-…", "VGG16", "GPT 6 × 384"]
        for i, name in enumerate(("natgrad", "asdl", "KAISA", "singd")):
            contestant = f"{name} K-FAC, 10 & 100"
            heights = [ratio("kfac-cuda", "training step", network, contestant) for network in networks]
            places = [x + 0.2 * (i - 1.5) for x in range(len(networks))]
            colour = style.COLOURS["K-FAC"] if name == "natgrad" else style.GREY
            ax.bar(places, heights, width=0.18, color=colour, alpha=1 - 0.15 * i)
            for x, height in zip(places, heights, strict=True):
                ax.text(x, height + 0.05, name, rotation=90, ha="center", va="bottom", color=colour, fontsize=9)
        ax.axhline(1, color=style.COLOURS["AdamW"], linewidth=1.2)
        ax.text(len(networks) - 0.5, 1, " AdamW", color=style.COLOURS["AdamW"], va="center", fontsize=9)
        ax.set(title="K-FAC: time of a step over fused AdamW's, H200", ylim=(0, 3.6), ylabel="ratio (lower is better)")
        ax.set_xticks(range(len(networks)), ["auto-encoder", *networks[1:]])
        style.save(figure, path, "The time of a K-FAC training step over fused AdamW's")


def _round_numbers(low: float, high: float) -> list[float]:
    """Up to six multiples of 1, 2 or 5 times a power of ten between two positive numbers, for a short logarithmic axis.

    >>> _round_numbers(1.28, 1.81)
    [1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
    """
    units = (Fraction(digit) * Fraction(10) ** exponent for exponent in range(-6, 7) for digit in (1, 2, 5))
    unit = next(unit for unit in units if math.floor(high / unit) - math.ceil(low / unit) < 6)
    return [float(k * unit) for k in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def draw_rates(path: Path = RATES) -> None:
    """Validation loss of the tuning runs against the learning rate, a panel for every network."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    from examples.gallery import style

    found = screens()
    with matplotlib.rc_context(style.LOOK):
        figure = Figure(figsize=(9.6, 5.2), layout="constrained")
        axes = figure.subplots(math.ceil(len(found) / 3), 3, squeeze=False, sharex=True).flatten()
        for ax, (name, screen) in zip(axes, found.items(), strict=False):
            for racer, losses in screen.losses.items():
                points = {lr: loss for lr, loss in losses.items() if loss < math.inf}
                look = {
                    "color": style.COLOURS[RACERS[racer]],
                    "label": RACERS[racer],
                    "linewidth": 1.0,
                    "markersize": 3,
                }
                ax.loglog([*points], [*points.values()], "o-", **look)
            ax.set_title(f"{SHORT_RACES[name]}, {screen.steps} steps")
            low, high = ax.get_ylim()
            ax.yaxis.set_major_locator(FixedLocator(_round_numbers(low, high)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_minor_formatter(NullFormatter())
        for ax in axes:
            style.name_lines(ax)
            ax.set_visible(bool(ax.get_lines()))
        figure.supxlabel("learning rate")
        figure.supylabel("validation loss (lower is better)")
        style.save(figure, path, "Validation loss of the tuning runs against the learning rate")


def main(arguments: list[str] | None = None) -> None:
    """Fill in the pages."""
    parser = argparse.ArgumentParser(
        description="Fill in the measurements that README.md and the pages of docs/ quote."
    )
    parser.add_argument("--figures", action="store_true", help="draw the figures of the README and the races, too")
    if parser.parse_args(arguments).figures:
        draw()
        draw_cost()
        draw_rates()
    for page in pages():
        page.write_text(filled(page.read_text()))
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()

"""Results of a benchmark: rows of ratios and targets, as a table, a JSON file and Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, final

import torch

from benchmarks import peers
from benchmarks.harness import Race, Spread, disagreement, duels, launch_time, machine
from experiments.files import markdown_table

Timed: TypeAlias = Callable[..., Race]


@final
@dataclass(frozen=True)
class Row:
    """One contestant: its time in seconds, and the ratio to the unit of its section."""

    section: str
    contestant: str
    seconds: Spread
    ratio: Spread
    unit: str


@final
@dataclass(frozen=True)
class Target:
    """A claim with the number that decides it."""

    claim: str
    measured: float
    bound: float
    at_most: bool
    note: str = ""

    @property
    def met(self) -> bool:
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound


@final
@dataclass
class Report:
    """All measurements. ``timed``: how contestants alternate, in ``duels`` with the unit or all ``together``.

    ``words``: only contestants whose names contain one of them are timed, and the units; without any, all. A word that
    is the name of a contestant stands for this one alone.
    """

    device: torch.device
    rounds: int
    timed: Timed = duels
    words: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list, init=False)
    targets: list[Target] = field(default_factory=list, init=False)
    checks: dict[str, float] = field(default_factory=dict, init=False)
    # Microseconds per kernel launch on a GPU, by section.
    launches: dict[str, float] = field(default_factory=dict, init=False)
    failures: dict[str, dict[str, str]] = field(default_factory=dict, init=False)

    @property
    def cycles(self) -> tuple[int, int]:
        """Rounds and warm-up rounds of contestants that are timed over a whole refresh cycle.

        On a GPU there are more: CUDA graphs have to be captured, and the host is noisy.
        """
        return (self.rounds, 4) if self.device.type == "cuda" else (max(1, self.rounds // 2), 1)

    def race(
        self,
        section: str,
        entries: Mapping[str, Callable[[], Any]],
        unit: str,
        rounds: int,
        steps: Mapping[str, int] | None = None,
        warmup: int = 2,
        turns: Mapping[str, int] | None = None,
    ) -> Race:
        """Time the entries and add a row each; the unit is one of them. ``steps``: steps per call of an entry.

        ``turns``: turns per round of an entry and the unit on a GPU.
        """
        on_gpu = self.device.type == "cuda"
        if self.words:
            of_word = {word: [word] if word in entries else [n for n in entries if word in n] for word in self.words}
            matching = (name for names in of_word.values() for name in names)
            entries = {name: entries[name] for name in dict.fromkeys((unit, *matching))}
        if on_gpu:
            self.launches[section] = launch_time(self.device)
        race = self.timed(entries, unit, rounds, self.device, warmup, turns if on_gpu else None)
        result = race.each(steps or {})
        for name in entries:
            self.rows.append(Row(section, name, result.time(name), result.ratio(name, unit), unit))
        return result

    def agree(self, section: str, entries: Mapping[str, peers.Contestant], tolerance: float = 1e-3) -> None:
        """Run the entries once, and refuse to time contestants that compute different things."""
        worst = disagreement({name: entry() for name, entry in entries.items()})
        self.checks[section] = worst
        if worst > tolerance:
            raise AssertionError(f"{section}: the contestants disagree by {worst:.1e}")

    def fastest_peer(self, result: Race, ours: str, names: Mapping[str, Any]) -> tuple[str, float] | None:
        """The fastest peer and its time over ours."""
        ratios = {name: result.ratio(name, ours).median for name in names if name in result.seconds}
        return min(ratios.items(), key=lambda item: item[1]) if ratios else None


def table(report: Report) -> str:
    """All rows by section, then the targets."""
    lines = []
    for section in dict.fromkeys(row.section for row in report.rows):
        rows = [row for row in report.rows if row.section == section]
        lines += ["", section, f"  {'':28}{'ms':>10}{'over ' + rows[0].unit:>22}{'quartiles':>18}"]
        for row in rows:
            r = row.ratio
            lines.append(
                f"  {row.contestant:28}{1e3 * row.seconds.median:10.1f}{r.median:22.2f}{r.low:11.2f} – {r.high:.2f}"
            )
    for section, errors in report.failures.items():
        lines += [f"  {section}: {name} fails: {error}" for name, error in errors.items()]
    return "\n".join([*lines, "", *verdicts(report.targets)])


def verdicts(targets: list[Target]) -> list[str]:
    """One line per target, and one for its note."""
    lines = ["targets"]
    for t in targets:
        verdict, sign = "met" if t.met else "NOT MET", "≤" if t.at_most else "≥"
        lines.append(f"  {verdict:8}{t.measured:8.2f} {sign} {t.bound:<6g}{t.claim}")
        lines += [f"{'':27}{t.note}"] if t.note else []
    return lines


def save(report: Report, path: Path, seconds: float, before: Mapping[str, Any] | None = None) -> None:
    """Write JSON; other sections of an earlier file (``before``) are kept, if it is of the same machine."""
    content: dict[str, Any] = {
        "machine": machine(report.device),
        "peers": peers.versions(),
        "seconds": round(seconds),
        "rows": [asdict(row) for row in report.rows],
        "targets": [{**asdict(t), "met": t.met} for t in report.targets],
        "disagreement": report.checks,
        "microseconds_a_launch": report.launches,
        "failures": {section: errors for section, errors in report.failures.items() if errors},
    }
    if before is not None:
        content = _merged(before, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _merged(old: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new content, and what the old one has beside it: other sections, and contestants that are not installed now.

    A claim about the fastest peer whose rows are older than ours is computed again from the ratios in the file.
    """
    other = [key for key in old["machine"] | new["machine"] if old["machine"].get(key) != new["machine"].get(key)]
    if other:
        was, now = ({key: content["machine"].get(key) for key in other} for content in (old, new))
        raise ValueError(f"the file is of another machine, {was} and not {now}: run all sections, or --output")
    for field_name, group_key, keys in (
        ("rows", "section", ("section", "contestant")),
        ("targets", "claim", ("claim",)),
    ):
        merged: dict[str, dict[Any, Any]] = {}
        for item in old[field_name] + new[field_name]:
            merged.setdefault(item[group_key], {})[tuple(item[key] for key in keys)] = item
        new[field_name] = [item for group in merged.values() for item in group.values()]
    ratios = {(row["section"], row["contestant"]): row["ratio"]["median"] for row in new["rows"]}
    for target in new["targets"]:
        before, claims, name = target["claim"].partition("the fastest peer's factors over natgrad's, ")
        section = f"K-FAC factors, one sample: {name}"
        if claims and not before and {(section, target["note"]), (section, "natgrad")} <= ratios.keys():
            target["measured"] = ratios[section, target["note"]] / ratios[section, "natgrad"]
            target["met"] = target["measured"] >= target["bound"]
    for field_name in ("peers", "disagreement", "failures", "microseconds_a_launch"):
        new[field_name] = {**old.get(field_name, {}), **new[field_name]}
    return {**new, "seconds": old["seconds"] + new["seconds"]}


def markdown(path: Path) -> str:
    """The saved ratios as tables, one for each kind of measurement; then the claims."""
    results = json.loads(path.read_text())
    kinds = dict.fromkeys(row["section"].partition(": ")[0] for row in results["rows"])
    return "\n\n".join([*(ratio_table(results, what) for what in kinds), claim_table(results["targets"])])


def ratio_table(results: Mapping[str, Any], what: str) -> str:
    """The sections "what: network" of a result file: a column for each network, a row for each contestant."""
    cells = {
        (row["contestant"], row["section"].partition(": ")[2]): f"{row['ratio']['median']:.2f}"
        for row in results["rows"]
        if row["section"].startswith(f"{what}: ")
    }
    cells |= {
        (name, section.partition(": ")[2]): "fails"
        for section, errors in results.get("failures", {}).items()
        for name in errors
        if section.startswith(f"{what}: ")
    }
    columns = list(dict.fromkeys(column for _, column in cells))
    names = dict.fromkeys(name for name, _ in cells)
    rows = ([name, *(cells.get((name, column), "–") for column in columns)] for name in names)
    return markdown_table([what, *columns], rows)


def claim_table(targets: list[dict[str, Any]]) -> str:
    """A row for each claim: the number and its bound. ``None`` was never reached."""
    rows = []
    for t in targets:
        sign, missed = "≤" if t["at_most"] else "≥", "" if t["met"] else ", not met"
        measured = "never" if t["measured"] is None else f"{t['measured']:.2f}"
        rows.append([t["claim"], measured, f"{sign} {t['bound']:g}{missed}"])
    return markdown_table(["claim", "measured", "bound"], rows)

"""The runs of ``protocol.md`` in its order. What is not done yet is what ``--queue`` runs and ``--report`` lists."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import final

from experiments.sobolev_cifar.arms import ARMS
from experiments.sobolev_cifar.record import Name
from experiments.sobolev_cifar.tuning import Choices, TuningKey

BOTH = ("fifths", "tenths")
BETTER = "better"  # of the two schedules, as tuned


@final
@dataclass(frozen=True)
class Planned:
    """A run of the protocol, and the part of the protocol that it belongs to."""

    part: str
    name: Name

    def named(self, choices: Choices) -> Name | None:
        """Its name in the records; None where the better schedule has not been found yet."""
        if self.name.schedule != BETTER:
            return self.name
        schedule = choices.better(self.name.dataset, self.name.arm, BOTH)
        return None if schedule is None else Name(self.name.dataset, schedule, self.name.arm, self.name.seed)

    def searches(self, choices: Choices) -> list[TuningKey]:
        """The searches that come before it and are not done."""
        if not ARMS[self.name.arm].tuned:
            return []
        schedules = BOTH if self.name.schedule == BETTER else (self.name.schedule,)
        keys = (TuningKey(self.name.dataset, self.name.arm, schedule) for schedule in schedules)
        return [key for key in keys if choices.of(key).chosen is None]


def _runs(dataset: str, schedules: Collection[str], arms: Collection[str], seeds: Collection[int]) -> Iterator[Name]:
    """The first seed of everything first."""
    return (Name(dataset, schedule, arm, seed) for seed in seeds for schedule in schedules for arm in arms)


def _parts() -> Mapping[str, list[Name]]:
    pair, four, later = ("amari", "sobolev"), range(4), range(3, 7)
    scaled = [
        name
        for seed in later
        for schedules, arms in ((("fifths",), ("literal", "amari_scaled")), (("tenths",), ("amari_scaled",)))
        for name in _runs("cifar10", schedules, arms, [seed])
    ]
    return {
        "CIFAR-100": [*_runs("cifar100", BOTH, pair, four)],
        "control": [*_runs("cifar10", ("fifths",), (*pair, "permuted"), later)],
        "seeds": [*_runs("cifar10", BOTH, pair, range(3, 8))],
        "literal method": scaled,
        "SGD and AdamW on CIFAR-100": [*_runs("cifar100", (BETTER,), ("sgd", "adamw"), four)],
        "ng.Natural": [
            *_runs("cifar100", (BETTER,), ("natural",), four),
            *_runs("cifar10", (BETTER,), ("natural",), four),
        ],
        "exact damping": [*_runs("cifar10", ("fifths",), ("amari_exact", "sobolev_exact"), range(3, 6))],
        "tuned K-FAC": [*_runs("cifar10", ("fifths",), ("amari_tuned", "sobolev_tuned"), later)],
        "control on CIFAR-100": [*_runs("cifar100", ("fifths",), ("permuted",), four)],
        "control without images": [*_runs("cifar10", ("fifths",), ("equidistant",), later)],
    }


def plan() -> list[Planned]:
    """All runs, each once, in the first part that needs it.

    >>> [f"{part}: {sum(run.part == part for run in plan())}" for part in ("CIFAR-100", "control", "seeds")]
    ['CIFAR-100: 16', 'control: 12', 'seeds: 12']
    """
    first: dict[Name, str] = {}
    for part, names in _parts().items():
        for name in names:
            first.setdefault(name, part)
    return [Planned(part, name) for name, part in first.items()]

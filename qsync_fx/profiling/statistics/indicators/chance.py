"""The method "random": QSync's other baseline. What an operator adds in the narrowest precision is drawn, and half of it in the next.

Invariant: an operator's number is drawn once, and is the same in all steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from qsync_fx.precision import FORMATS
from qsync_fx.profiling.statistics.interrupted import Values
from qsync_fx.profiling.statistics.step import Key, Step


@dataclass(frozen=True)
class Chance:
    _drawn: dict[str, float] = field(default_factory=dict)

    @property
    def learned(self) -> dict[str, Values]:
        return {"drawn": {name: {"": value} for name, value in self._drawn.items()}}

    def learn(self, learned: Mapping[str, Values]) -> None:
        self._drawn.update({name: by[""] for name, by in learned.get("drawn", {}).items()})

    def look(self, step: Step) -> dict[Key, float]:
        found: dict[Key, float] = {}
        for name, by in step.changes.items():
            drawn = self._drawn.setdefault(name, float(torch.rand((), generator=step.generator)))
            narrow = [precision for precision, change in by.items() if change.places]
            for place, precision in enumerate(sorted(narrow, key=lambda p: (FORMATS[p].bits, FORMATS[p].mantissa))):
                found[name, precision] = drawn / 2**place
        return found

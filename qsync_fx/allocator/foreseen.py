"""What a plan is expected to take on a device, as notes of it, so that whoever trains under it can compare.

Invariant: what a note of ours says is what was reckoned; a plan that has none, or whose notes someone else has written, is as good as any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from qsync_fx.allocator.judging.judge import Figures


@dataclass(frozen=True)
class Foreseen:
    """
    Attributes:
        computing: seconds of a step in which the device computes.
        peak: bytes that a step holds at most, parameters and the optimizer's state included.
        memory: bytes that it may hold.

    What is not known is None.
    """

    computing: float | None = None
    peak: float | None = None
    memory: float | None = None

    @classmethod
    def of(cls, figures: Figures, memory: float | None) -> Foreseen:
        return cls(figures.computing, figures.peak_bytes, memory)

    @classmethod
    def noted(cls, notes: Mapping[str, str]) -> Foreseen:
        """Returns what the notes of a plan say."""
        return cls(**{part.name: _number(notes.get(part.name, "")) for part in fields(cls)})

    def notes(self) -> dict[str, str]:
        """Returns it as notes."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: f"{value:.9g}" for name, value in values.items() if value is not None}


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if 0 < found < float("inf") else None

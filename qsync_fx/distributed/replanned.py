"""That the ranks have planned anew, with numbers: why, what a step took before and takes after.

Invariant: a value, the same on all ranks; what is said of it is made from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from qsync_fx.allocator.judging.judge import Judged
from qsync_fx.allocator.problem import Plans
from qsync_fx.report.numbers import duration, short


class Change(StrEnum):
    SLOWER = "slower"
    FASTER = "faster"
    TIGHT = "tight"
    ROOMY = "roomy"
    LINKS = "links"


@dataclass(frozen=True)
class Cause:
    """What a rank asks for another plan for.

    Attributes:
        rank, device: whose it is, and the class of its device; of links -1 and "", as they are those of all.
        change: of what.
        foreseen, measured: seconds that it computes in a step, or that an all-reduce takes; or bytes that the plan takes or was made for,
            and those that it may take.
    """

    rank: int
    device: str
    change: Change
    foreseen: float
    measured: float


@dataclass(frozen=True)
class Costs:
    """What plans cost.

    Attributes:
        seconds: of a step.
        variance: of the gradients.
        formats: of each class, how many operators are asked for in each format.
        codecs: how many buckets of gradients go in each codec; nothing where there was nothing to choose.
    """

    seconds: float
    variance: float
    formats: Mapping[str, Mapping[str, int]]
    codecs: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, judged: Judged, plans: Plans) -> Costs:
        formats = {name: dict(Counter(asked.values())) for name, asked in plans.items()}
        return cls(judged.seconds, judged.variance, formats, dict(Counter(judged.codecs)))


@dataclass(frozen=True)
class Replanned:
    """
    Attributes:
        step: after which step of the optimizer.
        causes: why.
        before: of the plan that was in force, as devices are now; None where it could not be judged.
        after: of the plan that is in force now; None where that is the one before.
        kept: why the plan before is kept; "" where it is not.
    """

    step: int
    causes: tuple[Cause, ...]
    before: Costs | None
    after: Costs | None = None
    kept: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Replanned:
        causes = tuple(Cause(**{**cause, "change": Change(cause["change"])}) for cause in found["causes"])
        before, after = (None if found[name] is None else Costs(**found[name]) for name in ("before", "after"))
        return cls(found["step"], causes, before, after, found["kept"])

    def __str__(self) -> str:
        why = _listed(_why(cause) for cause in self.causes)
        if self.after is None:
            lines = [f"the plan is kept after step {self.step}, though {why}", f"  why:    {self.kept}"]
            return "\n".join(lines + ([] if self.before is None else [f"  now:    {_costs(self.before)}"]))
        lines = [f"another plan is in force from step {self.step + 1} on, since {why}"]
        lines += [] if self.before is None else [f"  before: {_costs(self.before)}"]
        return "\n".join(
            [*lines, f"  after:  {_costs(self.after)}", "  the model is compiled once for it, as it is called next"]
        )


def _why(cause: Cause) -> str:
    if cause.change is Change.LINKS:
        return (
            f"an all-reduce takes {duration(cause.measured)} where {duration(cause.foreseen)} were foreseen "
            f"({cause.measured / cause.foreseen:.2f} times)"
        )
    who = f"rank {cause.rank} ({cause.device})"
    if cause.change in (Change.SLOWER, Change.FASTER):
        return (
            f"{who} computes {duration(cause.measured)} a step where {duration(cause.foreseen)} were foreseen "
            f"({cause.measured / cause.foreseen:.2f} times)"
        )
    what = "its plan takes" if cause.change is Change.TIGHT else "its plan was made for"
    return f"{who} has {short(cause.measured, 'B')} of memory for a step, and {what} {short(cause.foreseen, 'B')}"


def _costs(costs: Costs) -> str:
    formats = "; ".join(
        f"{name}: {', '.join(f'{count} in {fmt}' for fmt, count in sorted(found.items()))}"
        for name, found in costs.formats.items()
    )
    buckets = ", ".join(f"{count} in {codec}" for codec, count in sorted(costs.codecs.items()))
    sent = f"; buckets of gradients: {buckets}" if buckets else ""
    return f"{duration(costs.seconds)} a step, variance {costs.variance:.4g}; {formats}{sent}"


def _listed(texts: Any) -> str:
    found: Sequence[str] = list(texts)
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} ranks more" if len(found) > 3 else "")

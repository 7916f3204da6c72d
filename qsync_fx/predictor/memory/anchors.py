"""A predicted peak, corrected by what a profile measured of other plans.

Invariant: a plan that was measured is predicted as measured. Between plans the error counts by how much of what is kept for the backward
pass two of them keep alike, value by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from qsync_fx.errors import ProfileError
from qsync_fx.predictor.mapper import States
from qsync_fx.predictor.memory.step import Memory, step_memory
from qsync_fx.predictor.memory.training import Training


@dataclass(frozen=True)
class Anchor:
    """A plan whose peak was measured.

    Attributes:
        states: what it makes of the model.
        step_bytes: the most that a step of one rank alone held beyond what was held before it.
    """

    states: States
    step_bytes: int

    def error(self, training: Training | None) -> int:
        """Returns by how much more was measured than is predicted."""
        if training not in self._errors:
            # Without buckets, as it was measured: what these take is known.
            alone = None if training is None else replace(training, buckets=False)
            self._errors[training] = self.step_bytes - step_memory(self.states, alone).step_bytes
        return self._errors[training]

    @cached_property
    def _errors(self) -> dict[Training | None, int]:
        return {}


def anchored_bytes(
    states: States, anchors: Sequence[Anchor], training: Training | None = None, memory: Memory | None = None
) -> int:
    """Returns the most that a step holds beyond what is held before it, corrected by measured plans.

    Args:
        memory: what `step_memory` says of these states, where that is known already.

    Raises:
        ProfileError: there is no anchor, or what was measured cannot be.
    """
    if not anchors:
        raise ProfileError("no measured plan to predict from", do="measure one, or use predictor.memory.peak_bytes")
    if wrong := [anchor.step_bytes for anchor in anchors if anchor.step_bytes <= 0]:
        raise ProfileError(f"a step is said to have taken {wrong[0]} bytes", do="measure it again")
    pure = (memory or step_memory(states, training)).step_bytes
    errors = [anchor.error(training) for anchor in anchors]
    alike = [_alike(states, anchor.states) for anchor in anchors]
    if 1.0 in alike:
        return pure + errors[alike.index(1.0)]
    total = sum(alike)
    if not total:
        return pure
    return pure + round(sum(error * share for error, share in zip(errors, alike, strict=True)) / total)


def _alike(first: States, second: States) -> float:
    """The share of operators, by the elements that they give out, that are in one state in both."""
    sizes = [int(first.graph.values[operator.result].numel) for operator in first.graph.operators]
    same = [mine == theirs for mine, theirs in zip(first.names, second.names, strict=True)]
    if all(same):
        return 1.0
    return min(sum(size for size, one in zip(sizes, same, strict=True) if one) / max(sum(sizes), 1), 1 - 1e-9)

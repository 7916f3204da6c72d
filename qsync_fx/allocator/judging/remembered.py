"""Times that are asked once for each question.

Invariant: answers are those of the times that are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qsync_fx.graph.reads import State
from qsync_fx.predictor.model.value import StateNames
from qsync_fx.predictor.times import ANYBODY, Beside, Seconds, Times


def remembered(times: Times) -> Times:
    """Returns times that remember their answers; these themselves where they do."""
    return times if isinstance(times, Remembered) else Remembered(times)


class Remembered:
    """Times that are asked once for each question."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._operators: dict[tuple[str, object, tuple[object, ...]], Seconds] = {}
        self._least: dict[tuple[str, object, frozenset[tuple[int, object]]], Seconds] = {}
        self._told: dict[tuple[str, object], Sequence[Collection[StateNames] | None]] = {}
        self._casts: dict[tuple[str, str, str, int, bool], Seconds] = {}

    def operator(self, operator: str, state: State, around: Sequence[State | None]) -> Seconds:
        key = operator, state.names, tuple(None if one is None else one.names for one in around)
        if key not in self._operators:
            self._operators[key] = self._times.operator(operator, state, around)
        return self._operators[key]

    def least(self, operator: str, state: State, beside: Beside = ANYBODY) -> Seconds:
        near = frozenset((by, None if one is None else one.names) for by, one in beside.items())
        key = operator, state.names, near
        if key not in self._least:
            self._least[key] = self._times.least(operator, state, beside)
        return self._least[key]

    def told_apart(self, operator: str, state: State) -> Sequence[Collection[StateNames] | None]:
        key = operator, state.names
        if key not in self._told:
            self._told[key] = self._times.told_apart(operator, state)
        return self._told[key]

    def cast(self, operator: str, before: str, after: str, numel: int, differentiated: bool) -> Seconds:
        key = operator, before, after, numel, differentiated
        if key not in self._casts:
            self._casts[key] = self._times.cast(operator, before, after, numel, differentiated)
        return self._casts[key]

    def outside(self) -> Seconds:
        return self._times.outside()

    def optimizer(self) -> float:
        return self._times.optimizer()

"""`Times` of a profile: operator times under any plan, from the measured runs.

Kernels are fused across operators and casts, so the lookup averages the runs with the most similar
states of the operator and its neighbours. A user's plan is scaled to its measured passes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from qsync_fx.errors import ProfileError, nearest
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.cost_mapper.times import ANYBODY, NEIGHBOURS, Beside, Seconds
from qsync_fx.predictor.model.model_graph import StateNames
from qsync_fx.profiler.profile import Profile
from qsync_fx.profiler.run_statistics import MeasuredRun, fitted

_WEIGHTS = (4, 4, 1, 1)
"""Weights of equal neighbours, in the order of `NEIGHBOURS`: adjacent ones count more."""


@dataclass(frozen=True)
class _OperatorRun:
    state: StateNames
    around: tuple[StateNames | None, ...]
    seconds: Seconds
    planned: bool


class ProfiledTimes:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._runs: dict[str, list[_OperatorRun]] = defaultdict(list)
        self._quantizing = fitted(profile.runs)
        for run in profile.runs:
            states = {index: item.state for index, item in enumerate(run.operators)}
            forward, backward = self._anchored(run) if run.planned else (1.0, 1.0)
            for index, measured in enumerate(run.operators):
                seconds = Seconds(measured.forward * forward, measured.backward * backward)
                around = tuple(states.get(index + by) for by in NEIGHBOURS)
                entry = _OperatorRun(states[index], around, seconds, run.planned)
                self._runs[measured.operator].append(entry)
        measured_formats = {item.precision for run in profile.runs for item in run.operators}
        self._formats = sorted(filter(None, measured_formats))

    def _anchored(self, run: MeasuredRun) -> tuple[float, float]:
        """Return the scale factors of a run's operator times in each pass."""
        outside = self.outside()
        # Quantizers of the backward pass are not predicted, and count as time of its operators.
        calls = [call for call in run.quantized if not call.backward]
        casts = sum(self._quantizing[call.before, call.after].seconds(call.numel) for call in calls)
        forward = sum(measured.forward for measured in run.operators)
        backward = sum(measured.backward for measured in run.operators)
        forward_s = max(0.0, run.forward - outside.forward - casts)
        backward_s = max(0.0, run.backward - outside.backward)
        return (
            forward_s / forward if forward else 1.0,
            backward_s / backward if backward else 1.0,
        )

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        standing = self._standing(operator, state)
        neighbours = dict(zip(NEIGHBOURS, around, strict=False))
        # Among equal neighbours, plans of the user win.
        likeness = [(_near(visited, neighbours), visited.planned) for visited in standing]
        most = max(likeness)
        equal = [visited for visited, like in zip(standing, likeness, strict=True) if like == most]
        return Seconds(
            sum(visited.seconds.forward for visited in equal) / len(equal),
            sum(visited.seconds.backward for visited in equal) / len(equal),
            interpolated=equal[0].state != state.names,
        )

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        """Return a lower bound on `operator` over all states of the unspecified neighbours."""
        equal = self._standing(operator, state)
        available = [_near(visited, neighbours) for visited in equal]
        # The unspecified neighbours can add at most their weights to the score of another run.
        weights = zip(NEIGHBOURS, _WEIGHTS, strict=True)
        least = max(available) - sum(weight for by, weight in weights if by not in neighbours)
        may = [visited for visited, score in zip(equal, available, strict=True) if score >= least]
        return Seconds(
            min(visited.seconds.forward for visited in may),
            min(visited.seconds.backward for visited in may),
        )

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        """Return the states of each neighbour in matching runs; () if there is only one."""
        each = zip(*(visited.around for visited in self._standing(operator, state)), strict=True)
        distinct = (set(neighbours) for neighbours in each)
        return [states - {None} if len(states) > 1 else () for states in distinct]

    def _standing(self, operator: str, state: OperandState) -> list[_OperatorRun]:
        if operator not in self._runs:
            raise ProfileError(
                "the profile knows nothing of an operator",
                where=operator,
                do=f"measure the plan's model; {nearest(operator, self._runs)[:200]}",
            )
        if state.precision is not None and state.precision.name not in self._formats:
            measured = ", ".join(self._formats)
            raise ProfileError(
                f"the profile holds no time in {state.precision}",
                where=operator,
                do=f"measure it with precisions=(..., {state.precision.name!r}); "
                f"it holds {measured}",
            )
        visited = self._runs[operator]
        likeness = [_same(item, state.names) for item in visited]
        best = max(likeness)
        return [item for item, like in zip(visited, likeness, strict=True) if like == best]

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        """Return the time of a quantizer; other casts are fused, and part of operator times."""
        available = {start: line for (start, end), line in self._quantizing.items() if end == after}
        if not available:
            return Seconds(0.0, 0.0)
        line = available.get(before) or next(iter(available.values()))
        interpolated = before not in available or numel > line.largest
        return Seconds(line.seconds(numel), 0.0, interpolated=interpolated)

    def outside(self) -> Seconds:
        """Return the time outside operators: the mean of all runs."""
        forward, backward = zip(*(run.outside for run in self._profile.runs), strict=True)
        return Seconds(statistics.fmean(forward), statistics.fmean(backward))

    def optimizer(self) -> float:
        return self._profile.optimizer_seconds if self._profile.optimizer else 0.0


def _same(observed: _OperatorRun, state: StateNames) -> tuple[bool, bool, bool]:
    return observed.state == state, observed.state[0] == state[0], observed.state[1] == state[1]


def _near(observed: _OperatorRun, neighbours: Beside) -> int:
    result = 0
    for by, weight, state in zip(NEIGHBOURS, _WEIGHTS, observed.around, strict=True):
        if by in neighbours:
            other = neighbours[by]
            result += weight * (state == (other and other.names))
    return result

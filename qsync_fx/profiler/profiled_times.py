"""How long operators take under plans that were not measured, from plans that were: `Times` of a profile.

An operator's time in a compiled graph depends on its state, and on what its neighbours hand over, as kernels are fused over operators and
their casts with them. So it is looked up by its state, and among the runs that had it in that state, from those in which its neighbours
were most alike.

Where a plan of the user's was measured itself, its whole step is an anchor: its operators' times are scaled so that, with quantizers and
what is outside as they are reckoned for any plan, they make the passes that were measured. Plans near it share in that.

Invariant: a state that no run had is reckoned from the most similar one, and said to be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from qsync_fx.errors import ProfileError, nearest
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.plan import Plan
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.model.model_graph import StateNames
from qsync_fx.predictor.times import ANYBODY, NEIGHBOURS, Beside, Seconds
from qsync_fx.profiler.profile import Profile
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun
from qsync_fx.profiler.timing.attribution import fitted

_WEIGHTS = (4, 4, 1, 1)
"""What an equal neighbour counts: those beside an operator more than those one further."""


@dataclass(frozen=True)
class _OperatorRun:
    """An operator in one run."""

    state: StateNames
    around: tuple[StateNames | None, ...]
    seconds: Seconds
    own: bool


class ProfiledTimes:
    """The times of a profile, for any plan."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._seen: dict[str, list[_OperatorRun]] = defaultdict(list)
        self._quantizing = fitted(profile.runs)
        for run in profile.runs:
            states = [names(measured) for measured in run.operators]
            forward, backward = self._anchored(run) if run.planned else (1.0, 1.0)
            for index, measured in enumerate(run.operators):
                seconds = Seconds(measured.forward * forward, measured.backward * backward)
                self._seen[measured.operator].append(
                    _OperatorRun(states[index], around(states, index), seconds, run.planned)
                )
        self._formats = {
            visited.state[0]
            for item in self._seen.values()
            for visited in item
            if visited.state[0] is not None
        }

    def _anchored(self, run: MeasuredRun) -> tuple[float, float]:
        """Returns by how much operators took longer in each pass of a run than the rest leaves them, as it is reckoned for any plan."""
        outside = self.outside()
        # Those of the backward pass are foreseen by nobody, and are part of what operators take there.
        calls = [call for call in run.quantized if not call.backward]
        casts = sum(self._quantizing[call.before, call.after].seconds(call.numel) for call in calls)
        forward = sum(measured.forward for measured in run.operators)
        backward = sum(measured.backward for measured in run.operators)
        return (
            max(0.0, run.forward - outside.forward - casts) / forward if forward else 1.0,
            max(0.0, run.backward - outside.backward) / backward if backward else 1.0,
        )

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        """Returns the time of an operator: see `qsync_fx.predictor.times.Times`."""
        standing, neighbours = (
            self._standing(operator, state),
            dict(zip(NEIGHBOURS, around, strict=False)),
        )
        # The user's own plans before others.
        likeness = [(_near(visited, neighbours), visited.own) for visited in standing]
        most = max(likeness)
        equal = [visited for visited, like in zip(standing, likeness, strict=True) if like == most]
        return Seconds(
            sum(visited.seconds.forward for visited in equal) / len(equal),
            sum(visited.seconds.backward for visited in equal) / len(equal),
            interpolated=equal[0].state != state.names,
        )

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        """Returns the least of the runs that may stand for a state beside some neighbours: no mean of some of them is below it."""
        equal = self._standing(operator, state)
        available = [_near(visited, neighbours) for visited in equal]
        # What the other neighbours may count for another run.
        least = max(available) - sum(
            weight for by, weight in zip(NEIGHBOURS, _WEIGHTS, strict=True) if by not in neighbours
        )
        may = [visited for visited, score in zip(equal, available, strict=True) if score >= least]
        return Seconds(
            min(visited.seconds.forward for visited in may),
            min(visited.seconds.backward for visited in may),
        )

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        """Returns the states that neighbours had in runs that may stand for a state, where they had several."""
        each = zip(*(visited.around for visited in self._standing(operator, state)), strict=True)
        had = [set(states) for states in each]
        return [
            {item for item in states if item is not None} if len(states) > 1 else ()
            for states in had
        ]

    def _standing(self, operator: str, state: OperandState) -> list[_OperatorRun]:
        """Returns what may stand for an operator in a state, beside whatever neighbours."""
        if operator not in self._seen:
            raise ProfileError(
                "the profile knows nothing of an operator",
                where=operator,
                do=f"measure the model that the plan is for; {nearest(operator, self._seen)[:200]}",
            )
        if state.precision is not None and state.precision.name not in self._formats:
            raise ProfileError(
                f"the profile holds no time in {state.precision}",
                where=operator,
                do=f"measure it with precisions=(..., {state.precision.name!r}); it holds {', '.join(sorted(self._formats))}",
            )
        visited = self._seen[operator]
        likeness = [_same(item, state.names) for item in visited]
        best = max(likeness)
        return [item for item, like in zip(visited, likeness, strict=True) if like == best]

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        """Returns the time of a quantizer; other casts are fused with operators, and part of their times."""
        available = {start: line for (start, end), line in self._quantizing.items() if end == after}
        if not available:
            return Seconds(0.0, 0.0)
        line = available.get(before) or next(iter(available.values()))
        return Seconds(
            line.seconds(numel), 0.0, interpolated=before not in available or numel > line.largest
        )

    def outside(self) -> Seconds:
        """Returns what belongs to no operator: the mean of all runs, as it follows no format."""
        runs = self._profile.runs
        forward, backward = (
            sum(run.outside[index] for run in runs) / len(runs) for index in (0, 1)
        )
        return Seconds(forward, backward)

    def optimizer(self) -> float:
        """Returns the seconds of the optimizer's step; 0 where none was measured."""
        return self._profile.optimizer_seconds if self._profile.optimizer else 0.0


def interpolated(profile: Profile, plan: Plan) -> list[str]:
    """Returns the operators that no run of a profile had in the state that a plan puts them into."""
    measured = {(m.operator, names(m)) for run in profile.runs for m in run.operators}
    result = states(profile.graph, plan).names
    return [
        op.id
        for op, state in zip(profile.graph.operators, result, strict=True)
        if (op.id, state) not in measured
    ]


def names(measured: MeasuredOperator) -> StateNames:
    return measured.precision, measured.output


def around(states: Sequence[StateNames], index: int) -> tuple[StateNames | None, ...]:
    """Returns the states of an operator's neighbours, in the order that `Times` is asked with."""
    return tuple(states[index + by] if 0 <= index + by < len(states) else None for by in NEIGHBOURS)


def _same(observed: _OperatorRun, state: StateNames) -> tuple[bool, bool, bool]:
    """Returns how well a run stands for a state: the larger, the better."""
    return observed.state == state, observed.state[0] == state[0], observed.state[1] == state[1]


def _near(observed: _OperatorRun, neighbours: Beside) -> int:
    """Returns how well a run stands for neighbours: the larger, the better."""
    had = zip(NEIGHBOURS, _WEIGHTS, observed.around, strict=True)
    return sum(
        w
        for by, w, item in had
        if by in neighbours and item == (other.names if (other := neighbours[by]) else None)
    )

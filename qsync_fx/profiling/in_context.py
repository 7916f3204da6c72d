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
from collections.abc import Sequence
from dataclasses import dataclass

from qsync_fx.errors import ProfileError, nearest
from qsync_fx.graph.reads import State
from qsync_fx.plan import Plan
from qsync_fx.predictor.mapper import states
from qsync_fx.predictor.model.value import StateNames
from qsync_fx.predictor.times import NEIGHBOURS, Seconds
from qsync_fx.profiling.measuring.quantizing import fitted
from qsync_fx.profiling.profile import Profile
from qsync_fx.profiling.runs import Measured, Run

_WEIGHTS = (4, 4, 1, 1)
"""What an equal neighbour counts: those beside an operator more than those one further."""


@dataclass(frozen=True)
class _Seen:
    """An operator in one run."""

    state: StateNames
    around: tuple[StateNames | None, ...]
    seconds: Seconds
    own: bool


class InContext:
    """The times of a profile, for any plan."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._seen: dict[str, list[_Seen]] = defaultdict(list)
        self._quantizing = fitted(profile.runs)
        for run in profile.runs:
            states = [names(measured) for measured in run.operators]
            forward, backward = self._anchored(run) if run.planned else (1.0, 1.0)
            for at, measured in enumerate(run.operators):
                seconds = Seconds(measured.forward * forward, measured.backward * backward)
                self._seen[measured.operator].append(_Seen(states[at], around(states, at), seconds, run.planned))
        self._formats = {seen.state[0] for found in self._seen.values() for seen in found if seen.state[0] is not None}

    def _anchored(self, run: Run) -> tuple[float, float]:
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

    def operator(self, operator: str, state: State, around: Sequence[State | None]) -> Seconds:
        """Returns the time of an operator: see `qsync_fx.predictor.times.Times`."""
        wanted, beside = state.names, [None if other is None else other.names for other in around]
        alike = self._alike(operator, state, beside)
        return Seconds(
            sum(seen.seconds.forward for seen in alike) / len(alike),
            sum(seen.seconds.backward for seen in alike) / len(alike),
            interpolated=alike[0].state != wanted,
        )

    def least(self, operator: str, state: State) -> Seconds:
        """Returns the least of the runs that may stand for a state: no mean of some of them is below it."""
        alike = self._alike(operator, state, None)
        return Seconds(min(seen.seconds.forward for seen in alike), min(seen.seconds.backward for seen in alike))

    def _alike(self, operator: str, state: State, beside: Sequence[StateNames | None] | None) -> list[_Seen]:
        """Returns what stands for an operator in a state beside neighbours; with None for these, all that may."""
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
        seen = self._seen[operator]
        likeness = [(*_same(one, state.names), *(() if beside is None else _near(one, beside))) for one in seen]
        best = max(likeness)
        return [one for one, like in zip(seen, likeness, strict=True) if like == best]

    def cast(self, operator: str, before: str, after: str, numel: int, differentiated: bool) -> Seconds:
        """Returns the time of a quantizer; other casts are fused with operators, and part of their times."""
        known = {start: line for (start, end), line in self._quantizing.items() if end == after}
        if not known:
            return Seconds(0.0, 0.0)
        line = known.get(before) or next(iter(known.values()))
        return Seconds(line.seconds(numel), 0.0, interpolated=before not in known or numel > line.largest)

    def outside(self) -> Seconds:
        """Returns what belongs to no operator: the mean of all runs, as it follows no format."""
        runs = self._profile.runs
        forward, backward = (sum(run.outside[at] for run in runs) / len(runs) for at in (0, 1))
        return Seconds(forward, backward)

    def optimizer(self) -> float:
        """Returns the seconds of the optimizer's step; 0 where none was measured."""
        return self._profile.optimizer_seconds if self._profile.optimizer else 0.0


def interpolated(profile: Profile, plan: Plan) -> list[str]:
    """Returns the operators that no run of a profile had in the state that a plan puts them into."""
    measured = {(m.operator, names(m)) for run in profile.runs for m in run.operators}
    found = states(profile.graph, plan).names
    return [op.id for op, state in zip(profile.graph.operators, found, strict=True) if (op.id, state) not in measured]


def names(measured: Measured) -> StateNames:
    return measured.precision, measured.output


def around(states: Sequence[StateNames], at: int) -> tuple[StateNames | None, ...]:
    """Returns the states of an operator's neighbours, in the order that `Times` is asked with."""
    return tuple(states[at + by] if 0 <= at + by < len(states) else None for by in NEIGHBOURS)


def _same(seen: _Seen, state: StateNames) -> tuple[bool, bool, bool]:
    """Returns how well a run stands for a state: the larger, the better."""
    return seen.state == state, seen.state[0] == state[0], seen.state[1] == state[1]


def _near(seen: _Seen, beside: Sequence[StateNames | None]) -> tuple[int, bool]:
    """Returns how well a run stands for neighbours, the user's own plans before others: the larger, the better."""
    return sum(w for w, one, other in zip(_WEIGHTS, seen.around, beside, strict=False) if one == other), seen.own

"""Memory estimate at candidate peaks, as linear expressions of operator states.

Evaluated plans give the bytes that each operator contributes to the live set at each moment. For
other plans, each operator is assumed to contribute as in the evaluated plans with the most similar
state. For the plan learned last, the expressions equal the evaluator's live bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qsync_fx.allocator.milp.format_variables import Indicators
from qsync_fx.allocator.milp.linear_program import CONSTANT, Expression, add
from qsync_fx.predictor.cost_mapper import States
from qsync_fx.predictor.memory.buffers import Buffer, Task, lives
from qsync_fx.predictor.memory.peak_memory import step_tasks
from qsync_fx.predictor.model.model_graph import ModelGraph, StateNames

Moment = int
"""Position in a step: forward pass in program order, then backward pass in reverse order."""


@dataclass(frozen=True)
class _Reference:
    """Live bytes of an evaluated plan, by moment and operator that wrote them; -1 for others."""

    names: tuple[StateNames, ...]
    live_bytes: Mapping[Moment, Mapping[int, int]]
    _cache: dict[Moment, Mapping[int, int]] = field(default_factory=dict)

    def at(self, moment: Moment) -> Mapping[int, int]:
        """Return the live bytes at a moment, or at the end of the fused kernel that contains it."""
        if moment not in self._cache:
            self._cache[moment] = self.live_bytes[
                min((m for m in self.live_bytes if m >= moment), default=max(self.live_bytes))
            ]
        return self._cache[moment]

    @property
    def peak(self) -> Moment:
        return max(self.live_bytes, key=lambda moment: sum(self.live_bytes[moment].values()))


class LinearizedMemory:
    """Live bytes at the moments of peaks, learned from evaluated plans."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._references: list[_Reference] = []
        self._more: dict[Moment, float] = {}

    def learn(self, states: States, passes: float, tasks: Sequence[Task] | None = None) -> float:
        """Learn a plan; return the relative error of the previous estimate of its peak.

        `passes` is the peak of both passes by the evaluator, in bytes.
        """
        reference = _Reference(
            states.names, _live_bytes(states, step_tasks(states) if tasks is None else tasks)
        )
        before = max((self._value(moment, states.names) for moment in self.moments), default=0.0)
        if all(entry.names != reference.names for entry in self._references):
            self._references.append(reference)
        if reference.peak not in self.moments:
            self.moments.append(reference.peak)
        unknown = passes - sum(reference.at(reference.peak).values())
        for moment in self.moments:
            self._more[moment] = 0.0
            value = self._value(moment, states.names)
            self._more[moment] = unknown + sum(reference.at(moment).values()) - value
        return abs(before - passes) / max(passes, 1.0)

    def expressions(self, formats: Indicators) -> Iterator[Expression]:
        """Yield the live bytes at each of the moments."""
        for moment in self.moments:
            result: dict[int, float] = {CONSTANT: self._more[moment]}
            for index, states in enumerate(formats.states):
                for names, where in states.items():
                    add(result, where, self._wrote(moment, index, names))
            yield result

    def _value(self, moment: Moment, names: tuple[StateNames, ...]) -> float:
        return self._more.get(moment, 0.0) + sum(
            self._wrote(moment, index, state) for index, state in enumerate(names)
        )

    def _wrote(self, moment: Moment, index: int, state: StateNames) -> float:
        """Return an operator's live bytes, averaged over plans with the most similar state."""
        likeness = [_similarity(reference.names[index], state) for reference in self._references]
        best = max(likeness)
        sizes = [
            reference.at(moment).get(index, 0)
            for reference, like in zip(self._references, likeness, strict=True)
            if like == best
        ]
        return sum(sizes) / len(sizes)


def _similarity(item: StateNames, other: StateNames) -> tuple[bool, bool]:
    return item == other, item[0] == other[0]


def _live_bytes(states: States, tasks: Sequence[Task]) -> Mapping[Moment, Mapping[int, int]]:
    graph = states.graph
    wrote: dict[Buffer, int] = {}
    for task in tasks:
        for buffer in task.writes:
            wrote.setdefault(buffer, graph.places.get(task.operator, -1))
    result: dict[Moment, Mapping[int, int]] = {}
    most: dict[Moment, int] = {}
    for live in lives(tasks, wrote.__getitem__, _WORKSPACE):
        index = graph.places.get(live.operator, -1)
        moment = _moment(graph, index, live.backward)
        size = live.bytes
        if size > most.get(moment, -1):
            most[moment] = size
            live_bytes = dict(live.kinds)
            if working := live_bytes.pop(_WORKSPACE, 0):
                live_bytes[index] = live_bytes.get(index, 0) + working
            result[moment] = live_bytes
    return result


_WORKSPACE = -2


def _moment(graph: ModelGraph, index: int, backward: bool) -> Moment:
    count = len(graph.operators)
    if index < 0:
        return count
    return 2 * count - index if backward else index

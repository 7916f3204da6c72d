"""Lower bounds on operator times that depend on neighbour states, as linear expressions.

Each combination of the states of an operator and its neighbours has a variable. The variables with
one state of the operator, or of a neighbour, sum to the state's indicator. States that times do not
distinguish are merged. If there are too many combinations with all neighbours, only the nearest
two or none have variables, and the time is the minimum over the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.milp.format_variables import CostTerm, Formats
from qsync_fx.allocator.milp.linear_program import ONE, Expression, LinearProgram, total
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.cost_mapper.times import NEIGHBOURS, Seconds, Times
from qsync_fx.predictor.model.model_graph import StateNames, state_named

COLUMNS: Final = 20_000
"""Limit of combinations; above it fewer neighbours have variables."""


@dataclass(frozen=True)
class _Kind:
    """Equivalent states of a neighbour, with a representative; None if there is no neighbour."""

    state: OperandState | None
    where: Expression


class NeighbourTerms:
    """Lower bounds on operator times, with neighbours."""

    def __init__(self, part: DeviceClass) -> None:
        self.part, self.graph = part, part.graph

    @property
    def times(self) -> Times:
        return self.part.times

    def charges(self, program: LinearProgram, formats: Formats) -> Iterator[CostTerm]:
        """Yield the times of all operators, without their casts."""
        around = [self._around(index, formats) for index in range(len(formats.states))]
        for count in (len(NEIGHBOURS), 2, 0):
            sizes = [math.prod(map(len, kinds[:count])) for kinds in around]
            pairs = zip(sizes, formats.states, strict=True)
            if sum(size * len(states) for size, states in pairs) <= COLUMNS:
                break
        for index, states in enumerate(formats.states):
            yield from self._combined(program, index, states, around[index][:count])

    def _around(self, index: int, formats: Formats) -> list[list[_Kind]]:
        """Return the equivalence classes of the states of each neighbour."""
        name = self.graph.operators[index].id
        distinguished = [
            self.times.told_apart(name, state_named(state)) for state in formats.states[index]
        ]
        result: list[list[_Kind]] = []
        for number, by in enumerate(NEIGHBOURS):
            if not 0 <= index + by < len(formats.states):
                result.append([_Kind(None, ONE)])
                continue
            states = formats.states[index + by]
            sets = [entry[number] for entry in distinguished]
            alone = [item for item in states if any(s is None or item in s for s in sets)]
            rest = [item for item in states if item not in alone]
            groups = [[item] for item in alone] + ([rest] if rest else [])
            kinds = []
            for group in groups:
                where = total(*((1.0, states[item]) for item in group))
                kinds.append(_Kind(state_named(group[0]), where))
            result.append(kinds)
        return result

    def _combined(
        self,
        program: LinearProgram,
        index: int,
        states: Mapping[StateNames, Expression],
        kinds: Sequence[Sequence[_Kind]],
    ) -> Iterator[CostTerm]:
        """Yield an operator's times by the states of some neighbours, nearest first."""
        partitions = [dict(enumerate(kind.where for kind in each)) for each in kinds]
        for (state, *picked), where in program.joint(states, *partitions).items():
            chosen = [each[kind].state for each, kind in zip(kinds, picked, strict=True)]
            yield CostTerm.of(index, where, self._seconds(index, state_named(state), chosen))

    def _seconds(
        self, index: int, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        """Return the time of an operator, the minimum over the neighbours that are not given."""
        name = self.graph.operators[index].id
        if len(around) == len(NEIGHBOURS):
            return self.times.operator(name, state, around)
        return self.times.least(name, state, dict(zip(NEIGHBOURS, around, strict=False)))

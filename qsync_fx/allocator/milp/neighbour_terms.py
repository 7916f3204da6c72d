"""Operator times that depend on neighbour states, as linear expressions.

Each combination of the states of an operator and its nearest neighbours has a variable. The
variables with one state of the operator, or of a neighbour, sum to the state's indicator, so that
with integer choices one combination is charged. Farther neighbours matter if nearer ones leave
several runs of a profile equally similar: the combination is split by them if the program is small
enough, else charged the minimum over them. States that times do not distinguish are merged.

Invariant: with integer choices, charges never exceed the evaluator's times; they are equal if all
combinations are split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.milp.format_variables import CostTerm, Formats
from qsync_fx.allocator.milp.linear_program import INFINITY, ONE, Expression, LinearProgram, total
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.model.model_graph import StateNames, state_named
from qsync_fx.predictor.times import NEIGHBOURS, Seconds, Times

COLUMNS: Final = 20_000
"""Limit of combinations with the nearest neighbours; above it times are minimal over all states."""
SPLITS: Final = 60_000
"""Limit of combinations with all neighbours; above it combinations are not split."""
_NEAR: Final = 2


@dataclass(frozen=True)
class _Kind:
    """Equivalent states of a neighbour: an operator's times do not distinguish them.

    Attributes:
        state: a representative; None if there is no neighbour.
        where: indicator that the neighbour is in one of the states.
    """

    state: OperandState | None
    where: Expression


class NeighbourTerms:
    """Lower bounds on operator times, with neighbours.

    Args:
        part: the device class.
    """

    def __init__(self, part: DeviceClass) -> None:
        self.part = part
        self.graph = part.graph

    @property
    def times(self) -> Times:
        return self.part.times

    def charges(self, program: LinearProgram, formats: Formats) -> Iterator[CostTerm]:
        """Yield the times of all operators, without their casts."""
        around = [self._around(index, formats) for index in range(len(formats.states))]
        methods = list(zip(formats.states, around, strict=True))
        near = (
            sum(len(states) * _combinations(kinds[:_NEAR]) for states, kinds in methods) <= COLUMNS
        )
        split = sum(len(states) * _combinations(kinds) for states, kinds in methods) <= SPLITS
        for index, (states, kinds) in enumerate(methods):
            if near or _combinations(kinds) == 1:
                yield from self._beside(program, index, states, kinds, split)
            else:
                for state, where in states.items():
                    yield CostTerm.of(
                        index,
                        where,
                        self.times.least(self.graph.operators[index].id, state_named(state)),
                    )

    def _around(self, index: int, formats: Formats) -> list[list[_Kind]]:
        """Return the equivalence classes of the states of each neighbour."""
        name = self.graph.operators[index].id
        reported = [
            self.times.told_apart(name, state_named(state)) for state in formats.states[index]
        ]
        result: list[list[_Kind]] = []
        for number, by in enumerate(NEIGHBOURS):
            if not 0 <= index + by < len(formats.states):
                result.append([_Kind(None, ONE)])
                continue
            states = formats.states[index + by]
            apart = [
                item
                for item in states
                if any((each := entry[number]) is None or item in each for entry in reported)
            ]
            rest = [item for item in states if item not in apart]
            groups = [[item] for item in apart] + ([rest] if rest else [])
            result.append(
                [
                    _Kind(state_named(item[0]), total(*((1.0, states[it]) for it in item)))
                    for item in groups
                ]
            )
        return result

    def _beside(
        self,
        program: LinearProgram,
        index: int,
        states: Mapping[StateNames, Expression],
        kinds: Sequence[Sequence[_Kind]],
        split: bool,
    ) -> Iterator[CostTerm]:
        """Yield an operator's times by neighbour states; `split` includes far neighbours."""
        near, far = kinds[:_NEAR], kinds[_NEAR:]
        split = split or _combinations(far) == 1
        # Partitions by the operator's states, its nearest neighbours' states, and farther
        # neighbours' states.
        owned, neighbours, further = _Sums(), _Sums(), _Sums()
        for state, existing in states.items():
            for picked in itertools.product(*near):
                both = existing if _combinations(near) == 1 else owned.part(program, existing)
                neighbours.add(both, picked)
                around = {by: kind.state for by, kind in zip(NEIGHBOURS, picked, strict=False)}
                parts = self._parts(index, state, around, far) if split else []
                if not parts:
                    yield CostTerm.of(
                        index,
                        both,
                        self.times.least(
                            self.graph.operators[index].id, state_named(state), around
                        ),
                    )
                elif len({seconds for _, seconds in parts}) == 1:
                    yield CostTerm.of(index, both, parts[0][1])
                else:
                    pieces = _Sums()
                    for others, seconds in parts:
                        piece = pieces.part(program, both)
                        further.add(piece, others)
                        yield CostTerm.of(index, piece, seconds)
                    pieces.close(program)
        owned.close(program)
        if _combinations(near) > 1:
            neighbours.close(program)
        # Combinations that are not split have a share in these sums, too.
        further.close(program, full=False)

    def _parts(
        self,
        index: int,
        state: StateNames,
        neighbours: Mapping[int, OperandState | None],
        far: Sequence[Sequence[_Kind]],
    ) -> list[tuple[tuple[_Kind, ...], Seconds]]:
        """Return the time of an operator for each combination of far neighbours."""
        result: list[tuple[tuple[_Kind, ...], Seconds]] = []
        for picked in itertools.product(*far):
            around = {
                **neighbours,
                **{by: kind.state for by, kind in zip(NEIGHBOURS[_NEAR:], picked, strict=True)},
            }
            requested = [around[by] for by in NEIGHBOURS]
            used = self.times.operator(
                self.graph.operators[index].id, state_named(state), requested
            )
            result.append((picked, Seconds(used.forward, used.backward)))
        return result


class _Sums:
    """Expressions, each with the parts that sum to it."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Expression, dict[int, float]]] = {}

    def part(self, program: LinearProgram, full: Expression) -> Expression:
        """Return a new variable that is a part of an expression."""
        result = {program.variable(): 1.0}
        self._add(result, full)
        return result

    def add(self, part: Expression, kinds: Iterable[_Kind]) -> None:
        """Add a part to the indicators of neighbour states."""
        for kind in kinds:
            self._add(part, kind.where)

    def close(self, program: LinearProgram, full: bool = True) -> None:
        """Add rows: parts sum to at most their expression, and if `full` to exactly it."""
        for where, parts in self._found.values():
            program.row(total((1.0, parts), (-1.0, where)), 0.0 if full else -INFINITY, 0.0)

    def _add(self, part: Expression, full: Expression) -> None:
        # Keys are ids, so keep each expression alive: a freed id could be reused.
        _, parts = self._found.setdefault(id(full), (full, {}))
        for variable, factor in part.items():
            parts[variable] = parts.get(variable, 0.0) + factor


def _combinations(kinds: Sequence[Sequence[_Kind]]) -> int:
    return math.prod(map(len, kinds))

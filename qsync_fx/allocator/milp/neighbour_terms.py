"""What operators take beside their neighbours, as linear expressions.

Of an operator's state and those of its nearest neighbours together there is a variable for each combination: what those with one state sum
up to is whether the operator, or the neighbour, is in it. So at whole choices one of them is 1, and what it takes is charged. Neighbours
that are further away make a difference where nearer ones leave runs of a profile equally alike: such a combination is split by them where
there is room for that, and takes the least beside any elsewhere.

States of neighbours that times do not tell apart count as one, and where no neighbour makes a difference there are no variables.

Invariant: at whole choices the charges are never above what the judge says; where all are split, they are that.
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
"""Combinations with the nearest neighbours from which on all neighbours count as any: the program would take too long."""
SPLITS: Final = 60_000
"""Combinations with all neighbours up to which those with the nearest are split."""
_NEAR: Final = 2


@dataclass(frozen=True)
class _Kind:
    """States of a neighbour that an operator's times do not tell apart.

    Attributes:
        state: one of them; None where there is no neighbour.
        where: 1 where the neighbour is in one of them.
    """

    state: OperandState | None
    where: Expression


class NeighbourTerms:
    """
    Args:
        part: the class of devices.
    """

    def __init__(self, part: DeviceClass) -> None:
        self.part = part
        self.graph = part.graph

    @property
    def times(self) -> Times:
        return self.part.times

    def charges(self, program: LinearProgram, formats: Formats) -> Iterator[CostTerm]:
        """Yields what all operators take, without their casts."""
        around = [self._around(at, formats) for at in range(len(formats.states))]
        ways = list(zip(formats.states, around, strict=True))
        near = sum(len(states) * _combinations(kinds[:_NEAR]) for states, kinds in ways) <= COLUMNS
        split = sum(len(states) * _combinations(kinds) for states, kinds in ways) <= SPLITS
        for at, (states, kinds) in enumerate(ways):
            if near or _combinations(kinds) == 1:
                yield from self._beside(program, at, states, kinds, split)
            else:
                for state, where in states.items():
                    yield CostTerm.of(at, where, self.times.least(self.graph.operators[at].id, state_named(state)))

    def _around(self, at: int, formats: Formats) -> list[list[_Kind]]:
        """Returns the kinds of states of each neighbour."""
        name = self.graph.operators[at].id
        told = [self.times.told_apart(name, state_named(state)) for state in formats.states[at]]
        found: list[list[_Kind]] = []
        for number, by in enumerate(NEIGHBOURS):
            if not 0 <= at + by < len(formats.states):
                found.append([_Kind(None, ONE)])
                continue
            states = formats.states[at + by]
            apart = [one for one in states if any((each := known[number]) is None or one in each for known in told)]
            rest = [one for one in states if one not in apart]
            groups = [[one] for one in apart] + ([rest] if rest else [])
            found.append([_Kind(state_named(one[0]), total(*((1.0, states[it]) for it in one))) for one in groups])
        return found

    def _beside(
        self,
        program: LinearProgram,
        at: int,
        states: Mapping[StateNames, Expression],
        kinds: Sequence[Sequence[_Kind]],
        split: bool,
    ) -> Iterator[CostTerm]:
        """Yields what an operator takes in each state beside its neighbours, those that are further away where it is to be split."""
        near, far = kinds[:_NEAR], kinds[_NEAR:]
        split = split or _combinations(far) == 1
        # The operator's own states, those of its nearest neighbours, and those of the others: what their combinations sum up to.
        own, beside, further = _Sums(), _Sums(), _Sums()
        for state, there in states.items():
            for picked in itertools.product(*near):
                both = there if _combinations(near) == 1 else own.part(program, there)
                beside.add(both, picked)
                around = {by: kind.state for by, kind in zip(NEIGHBOURS, picked, strict=False)}
                parts = self._parts(at, state, around, far) if split else []
                if not parts:
                    yield CostTerm.of(
                        at, both, self.times.least(self.graph.operators[at].id, state_named(state), around)
                    )
                elif len({seconds for _, seconds in parts}) == 1:
                    yield CostTerm.of(at, both, parts[0][1])
                else:
                    pieces = _Sums()
                    for others, seconds in parts:
                        piece = pieces.part(program, both)
                        further.add(piece, others)
                        yield CostTerm.of(at, piece, seconds)
                    pieces.close(program)
        own.close(program)
        if _combinations(near) > 1:
            beside.close(program)
        # Combinations that are not split have a share in these, too.
        further.close(program, whole=False)

    def _parts(
        self, at: int, state: StateNames, beside: Mapping[int, OperandState | None], far: Sequence[Sequence[_Kind]]
    ) -> list[tuple[tuple[_Kind, ...], Seconds]]:
        """Returns what an operator takes beside each combination of the neighbours that are further away."""
        found: list[tuple[tuple[_Kind, ...], Seconds]] = []
        for picked in itertools.product(*far):
            around = {**beside, **{by: kind.state for by, kind in zip(NEIGHBOURS[_NEAR:], picked, strict=True)}}
            asked = [around[by] for by in NEIGHBOURS]
            taken = self.times.operator(self.graph.operators[at].id, state_named(state), asked)
            found.append((picked, Seconds(taken.forward, taken.backward)))
        return found


class _Sums:
    """Expressions, and what parts of them sum up to them."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Expression, dict[int, float]]] = {}

    def part(self, program: LinearProgram, whole: Expression) -> Expression:
        """Returns a new variable that is a part of an expression."""
        found = {program.variable(): 1.0}
        self._add(found, whole)
        return found

    def add(self, part: Expression, kinds: Iterable[_Kind]) -> None:
        """Takes what is known for a part of where neighbours are of some kinds."""
        for kind in kinds:
            self._add(part, kind.where)

    def close(self, program: LinearProgram, whole: bool = True) -> None:
        """Lets parts sum up to no more than what they are of; `whole`, to no less."""
        for where, parts in self._found.values():
            program.row(total((1.0, parts), (-1.0, where)), 0.0 if whole else -INFINITY, 0.0)

    def _add(self, part: Expression, whole: Expression) -> None:
        # An expression is known by its place: it is held here, so that none gets another one's.
        _, parts = self._found.setdefault(id(whole), (whole, {}))
        for variable, factor in part.items():
            parts[variable] = parts.get(variable, 0.0) + factor


def _combinations(kinds: Sequence[Sequence[_Kind]]) -> int:
    return math.prod(map(len, kinds))

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.exact.charge import Charge
from qsync_fx.allocator.exact.formats import Formats
from qsync_fx.allocator.exact.program import ONE, Expression, Program, total
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.graph.reads import State
from qsync_fx.predictor.model.names import state_named
from qsync_fx.predictor.model.value import StateNames
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

    state: State | None
    where: Expression


class Beside:
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

    def charges(self, program: Program, formats: Formats) -> Iterator[Charge]:
        """Yields what all operators take, without their casts."""
        around = [self._around(at, formats) for at in range(len(formats.states))]
        many = [
            len(states) * _combinations(kinds[:_NEAR]) for states, kinds in zip(formats.states, around, strict=True)
        ]
        whole = [len(states) * _combinations(kinds) for states, kinds in zip(formats.states, around, strict=True)]
        near, split = sum(many) <= COLUMNS, sum(whole) <= SPLITS
        for at, (states, kinds) in enumerate(zip(formats.states, around, strict=True)):
            if near or _combinations(kinds) == 1:
                yield from self._beside(program, at, states, kinds, split)
            else:
                for state, where in states.items():
                    yield _charge(at, where, self.times.least(self.graph.operators[at].id, state_named(state)))

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
            wheres = [total(*((1.0, states[one]) for one in group)) for group in groups]
            found.append([_Kind(state_named(group[0]), w) for group, w in zip(groups, wheres, strict=True)])
        return found

    def _beside(
        self,
        program: Program,
        at: int,
        states: Mapping[StateNames, Expression],
        kinds: Sequence[Sequence[_Kind]],
        split: bool,
    ) -> Iterator[Charge]:
        """Yields what an operator takes in each state beside its neighbours, those that are further away where it is to be split."""
        near, far = kinds[:_NEAR], kinds[_NEAR:]
        alone = _combinations(near) == 1
        sums: dict[tuple[int, int], dict[int, float]] = {}
        further: dict[tuple[int, int], dict[int, float]] = {}
        for own, (state, there) in enumerate(states.items()):
            for picked in _picked(near):
                both: Expression = there if alone else {program.variable(): 1.0}
                for part in ((-1, own), *((place, which) for place, (which, _) in enumerate(picked))):
                    sums.setdefault(part, {}).update(both)
                beside = {by: kind.state for by, (_, kind) in zip(NEIGHBOURS, picked, strict=False)}
                if not (split or _combinations(far) == 1):
                    yield _charge(at, both, self.times.least(self.graph.operators[at].id, state_named(state), beside))
                    continue
                parts = dict(self._parts(at, state, beside, far))
                if len(set(parts.values())) == 1:
                    yield _charge(at, both, next(iter(parts.values())))
                    continue
                split_into: dict[int, float] = {}
                for those, seconds in parts.items():
                    variable = program.variable()
                    split_into[variable] = 1.0
                    for place, which in enumerate(those):
                        further.setdefault((place, which), {})[variable] = 1.0
                    yield _charge(at, {variable: 1.0}, seconds)
                program.row(total((1.0, split_into), (-1.0, both)), 0.0, 0.0)
        wheres = list(states.values())
        for (place, which), parts_of in ({} if alone else sums).items():
            where = wheres[which] if place < 0 else near[place][which].where
            program.row(total((1.0, parts_of), (-1.0, where)), 0.0, 0.0)
        for (place, which), parts_of in further.items():
            program.row(total((1.0, parts_of), (-1.0, far[place][which].where)), most=0.0)

    def _parts(
        self, at: int, state: StateNames, beside: Mapping[int, State | None], far: Sequence[Sequence[_Kind]]
    ) -> Iterator[tuple[tuple[int, ...], Seconds]]:
        """Yields what an operator takes beside each combination of the neighbours that are further away."""
        for picked in _picked(far):
            others = {by: kind.state for by, (_, kind) in zip(NEIGHBOURS[_NEAR:], picked, strict=True)}
            around = {**beside, **others}
            asked = [around[by] for by in NEIGHBOURS]
            taken = self.times.operator(self.graph.operators[at].id, state_named(state), asked)
            yield tuple(which for which, _ in picked), Seconds(taken.forward, taken.backward)


def _charge(at: int, where: Expression, taken: Seconds) -> Charge:
    return Charge(at, where, taken.forward, taken.backward)


def _picked(kinds: Sequence[Sequence[_Kind]]) -> Iterator[tuple[tuple[int, _Kind], ...]]:
    return itertools.product(*(list(enumerate(each)) for each in kinds))


def _combinations(kinds: Sequence[Sequence[_Kind]]) -> int:
    found = 1
    for each in kinds:
        found *= len(each)
    return found

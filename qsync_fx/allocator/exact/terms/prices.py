"""What each state of each operator takes, as one number: a linear program has no neighbours.

A time may depend on the states of an operator's neighbours. Taken is that with neighbours as they are under the uniform plan that has the
operator in the state. Of plans that were judged, what their states took there is known better, and counts from then on. What no plan is
below is reckoned with what operators take beside their neighbours: `beside`.

Invariant: at the plan that was learned last, the prices are the judge's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from qsync_fx.allocator.exact.linear.program import Program
from qsync_fx.allocator.exact.terms.charge import Charge
from qsync_fx.allocator.exact.terms.formats import Formats
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.graph.reads import State
from qsync_fx.predictor.mapper.states import state_names
from qsync_fx.predictor.model.names import state_named
from qsync_fx.predictor.model.reachable import reachable
from qsync_fx.predictor.model.value import StateNames
from qsync_fx.predictor.times import NEIGHBOURS, Seconds, Times


class Priced(Protocol):
    """What a program takes states to take.

    Attributes:
        times: what casts are asked of.
    """

    @property
    def times(self) -> Times: ...

    def charges(self, program: Program, formats: Formats) -> Iterable[Charge]:
        """Returns what operators take, without their casts; may give the program variables and rows."""


class Prices:
    """
    Args:
        part: the class of devices.

    Attributes:
        differ: whether a state may take other times beside other neighbours.
    """

    def __init__(self, part: DeviceClass) -> None:
        self.part = part
        self._references = [state_names(part.graph, part.uniform(fmt)) for fmt in part.formats]
        self.differ = self._told_apart()
        self._learned: dict[tuple[int, StateNames], Seconds] = {}
        self._named: dict[StateNames, State] = {}

    @property
    def times(self) -> Times:
        return self.part.times

    def charges(self, program: Program, formats: Formats) -> Iterator[Charge]:
        """Yields what operators take in each state, whatever their neighbours."""
        for at, spread in enumerate(formats.states):
            for state, where in spread.items():
                yield Charge.of(at, where, self.operator(at, state))

    def operator(self, at: int, state: StateNames) -> Seconds:
        """Returns the time of an operator in a state."""
        key = at, state
        if key not in self._learned:
            # A state that no uniform plan has is like those that compute the same.
            best = max(self._references, key=lambda names: (names[at] == state, names[at][0] == state[0]))
            self._learned[key] = self._ask(at, state, best)
        return self._learned[key]

    def learn(self, names: Sequence[StateNames]) -> bool:
        """Takes from a plan what its states take there; returns whether anything is new."""
        found = {(at, state): self._ask(at, state, names) for at, state in enumerate(names)}
        new = any(self.operator(*key) != seconds for key, seconds in found.items())
        self._learned |= found
        return new

    def _told_apart(self) -> bool:
        """Whether times of any operator follow its neighbours."""
        graph = self.part.graph
        return any(
            known is None or len(known) > 0
            for operator, reached in zip(graph.operators, reachable(graph.operators, self.part.formats), strict=True)
            for names in reached
            for known in self.times.told_apart(operator.id, state_named(names))
        )

    def _ask(self, at: int, state: StateNames, names: Sequence[StateNames]) -> Seconds:
        near = (at + by for by in NEIGHBOURS)
        around = [self._state(names[n]) if 0 <= n < len(names) else None for n in near]
        return self.times.operator(self.part.graph.operators[at].id, self._state(state), around)

    def _state(self, names: StateNames) -> State:
        """Returns a state by its names: there are few, of thousands of operators."""
        if names not in self._named:
            self._named[names] = state_named(names)
        return self._named[names]

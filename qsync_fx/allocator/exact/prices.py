"""What each state of each operator takes, as one number: a linear program has no neighbours.

A time may depend on the states of an operator's neighbours. Taken is that with neighbours as they are under the uniform plan that has the
operator in the state. Of plans that were judged, what their states took there is known better, and counts from then on.

Invariant: at the plan that was learned last, the prices are the judge's.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.predictor.mapper.states import states
from qsync_fx.predictor.model.names import state_named
from qsync_fx.predictor.model.value import StateNames
from qsync_fx.predictor.times import NEIGHBOURS, Seconds


class Prices:
    """
    Args:
        part: the class of devices.

    Attributes:
        differ: whether a state was seen to take other times beside other neighbours.
    """

    def __init__(self, part: DeviceClass) -> None:
        self.part, self.times = part, part.times
        uniform = {fmt: states(part.graph, part.uniform(fmt)).names for fmt in part.formats}
        self._references = [list(names) for names in uniform.values()]
        self.differ = False
        self._learned: dict[tuple[int, StateNames], Seconds] = {}

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
        self.differ |= new
        self._learned |= found
        return new

    def _ask(self, at: int, state: StateNames, names: Sequence[StateNames]) -> Seconds:
        near = (at + by for by in NEIGHBOURS)
        around = [state_named(names[n]) if 0 <= n < len(names) else None for n in near]
        return self.times.operator(self.part.graph.operators[at].id, state_named(state), around)

"""What each state of each operator takes, as one number: a linear program has no neighbours.

A time may depend on the states of an operator's neighbours. Taken is that with neighbours as they are under the uniform plan that has the
operator in the state. Of plans that were judged, what their states took there is known better, and counts from then on. What no plan is
below is reckoned with the least beside any neighbours: `Least`.

Invariant: at the plan that was learned last, the prices are the judge's. `Least` is above the judge's for no plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final, Protocol

from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.graph.reads import State
from qsync_fx.predictor.mapper.states import states
from qsync_fx.predictor.model.names import state_named
from qsync_fx.predictor.model.reachable import reachable
from qsync_fx.predictor.model.value import StateNames
from qsync_fx.predictor.times import NEIGHBOURS, Seconds, Times

QUESTIONS: Final = 100_000
"""Times that are asked for at most to know the least; where there are more, the device's own word is taken for it."""


class Priced(Protocol):
    """What a program takes states to take.

    Attributes:
        times: what casts are asked of.
    """

    @property
    def times(self) -> Times: ...

    def operator(self, at: int, state: StateNames) -> Seconds:
        """Returns the time of an operator in a state."""


class Prices:
    """
    Args:
        part: the class of devices.

    Attributes:
        differ: whether a state was seen to take other times beside other neighbours.
    """

    def __init__(self, part: DeviceClass) -> None:
        self.part = part
        uniform = {fmt: states(part.graph, part.uniform(fmt)).names for fmt in part.formats}
        self._references = [list(names) for names in uniform.values()]
        self.differ = False
        self._learned: dict[tuple[int, StateNames], Seconds] = {}
        self._named: dict[StateNames, State] = {}

    @property
    def times(self) -> Times:
        return self.part.times

    def operator(self, at: int, state: StateNames) -> Seconds:
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
        around = [self._state(names[n]) if 0 <= n < len(names) else None for n in near]
        return self.times.operator(self.part.graph.operators[at].id, self._state(state), around)

    def _state(self, names: StateNames) -> State:
        """Returns a state by its names: there are few, of thousands of operators."""
        if names not in self._named:
            self._named[names] = state_named(names)
        return self._named[names]


class Least:
    """
    Args:
        part: the class of devices.
    """

    def __init__(self, part: DeviceClass) -> None:
        self.part = part
        self._states = reachable(part.graph.operators, part.formats)

    @property
    def times(self) -> Times:
        return self.part.times

    @cached_property
    def _few(self) -> bool:
        """Whether there are few times to ask for."""
        each = (len(states) * math.prod(map(len, self._around(at))) for at, states in enumerate(self._states))
        return sum(each) <= QUESTIONS

    def operator(self, at: int, state: StateNames) -> Seconds:
        name, own = self.part.graph.operators[at].id, state_named(state)
        if not self._few:
            return self.times.least(name, own)
        found = [
            self.times.operator(name, own, [None if one is None else state_named(one) for one in around])
            for around in itertools.product(*self._around(at))
        ]
        return Seconds(min(one.forward for one in found), min(one.backward for one in found))

    def _around(self, at: int) -> list[Sequence[StateNames | None]]:
        near = (at + by for by in NEIGHBOURS)
        return [self._states[n] if 0 <= n < len(self._states) else (None,) for n in near]

"""Who knows how long an operator takes: a profile that measured it, or a device of the catalog that reckons it.

Invariant: the cost mapper asks here and nowhere else, so that a profile, a catalog's device and a test's table stand for one another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from qsync_fx.graph.reads import State
from qsync_fx.predictor.model.value import StateNames

NEIGHBOURS = (-1, 1, -2, 2)
"""Where the neighbours of an operator stand in program order, in the order in which `Times` is asked with them."""
Beside = Mapping[int, State | None]
"""The states of some neighbours, by where they stand: one of `NEIGHBOURS`; None where there is none."""
ANYBODY: Final[Beside] = MappingProxyType({})
TOLD_BY_NONE: Final[tuple[tuple[()], ...]] = ((),) * len(NEIGHBOURS)
"""What is told apart where times follow no neighbours: see `Times.told_apart`."""


@dataclass(frozen=True)
class Seconds:
    """How long something takes.

    Attributes:
        forward: seconds in the forward pass.
        backward: seconds in the backward pass.
        interpolated: whether it was reckoned from something like it, and not measured in this state.
    """

    forward: float
    backward: float
    interpolated: bool = False

    def __add__(self, other: object) -> Seconds:
        if not isinstance(other, Seconds):
            return NotImplemented
        both = self.interpolated or other.interpolated
        return Seconds(self.forward + other.forward, self.backward + other.backward, both)


class Times(Protocol):
    """How long operators take on one device, of one model."""

    def operator(self, operator: str, state: State, around: Sequence[State | None]) -> Seconds:
        """Returns the time of an operator in a state, without the casts in front of it.

        Args:
            operator: its id.
            state: its precision and the format of its output.
            around: the states of its neighbours in program order, as `NEIGHBOURS` lists them; None where there is none.

        Raises:
            ProfileError: nothing is known of the operator.
        """

    def least(self, operator: str, state: State, beside: Beside = ANYBODY) -> Seconds:
        """Returns what an operator in a state takes no less than beside some neighbours, whatever the others are; see `operator`."""

    def told_apart(self, operator: str, state: State) -> Sequence[Collection[StateNames] | None]:
        """Returns the states of each neighbour, as `NEIGHBOURS` lists them, by which times differ: beside all others of that neighbour's an
        operator in a state takes the same. None where each may make a difference."""

    def cast(self, operator: str, before: str, after: str, numel: int, differentiated: bool) -> Seconds:
        """Returns the time of converting or quantizing a tensor; zero where that is part of the operators' own times.

        Args:
            operator: the operator that it is done for.
            before, after: names of the formats.
            numel: elements of the tensor.
            differentiated: whether a gradient flows back through it.
        """

    def outside(self) -> Seconds:
        """Returns the time of a step that belongs to no operator."""

    def optimizer(self) -> float:
        """Returns the seconds of the optimizer's step."""

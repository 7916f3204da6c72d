"""Who knows how long an operator takes: a profile that measured it, or a device of the catalog that reckons it.

Invariant: the cost mapper asks here and nowhere else, so that a profile, a catalog's device and a test's table stand for one another.

One training step of one device as a list of what it does: what the cost mapper gives and the replayer takes.

Invariant: entries stand in the order in which they run, and their seconds add up to the time that the device computes.
Nothing here knows of formats: what a plan changes are the seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Protocol

from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.model.model_graph import StateNames

NEIGHBOURS = (-1, 1, -2, 2)
"""Where the neighbours of an operator stand in program order, in the order in which `Times` is asked with them."""
Beside = Mapping[int, OperandState | None]
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

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        """Returns the time of an operator in a state, without the casts in front of it.

        Args:
            operator: its id.
            state: its precision and the format of its output.
            around: the states of its neighbours in program order, as `NEIGHBOURS` lists them; None where there is none.

        Raises:
            ProfileError: nothing is known of the operator.
        """

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        """Returns what an operator in a state takes no less than beside some neighbours, whatever the others are; see `operator`."""

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        """Returns the states of each neighbour, as `NEIGHBOURS` lists them, by which times differ: beside all others of that neighbour's an
        operator in a state takes the same. None where each may make a difference."""

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
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


class Part(StrEnum):
    """What of an operator an entry is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CAST = "cast"
    """A conversion or quantizer in front of an operator, in the forward pass or, as what differentiates it, in the backward pass."""
    OUTSIDE = "outside"
    """What belongs to no operator: the framework's own time in a pass."""


@dataclass(frozen=True)
class Entry:
    """One stretch of work.

    Attributes:
        operator: the id of the operator that it is charged to; "" for what belongs to none.
        part: what of the operator it is.
        seconds: how long it takes on this device.
    """

    operator: str
    part: Part
    seconds: float


@dataclass(frozen=True)
class Parameter:
    """A parameter that is trained, as the optimizer and DDP's buckets see it.

    Attributes:
        path: its name in the model.
        numel: number of elements.
        dtype_bytes: bytes of an element of its gradient.
    """

    path: str
    numel: int
    dtype_bytes: int = 4


@dataclass(frozen=True)
class Schedule:
    """One step of one device under one plan.

    Attributes:
        forward: what runs in the forward pass, in order.
        backward: what runs in the backward pass, in order.
        optimizer: seconds of the optimizer's step.
        parameters: what is trained, in the order in which the model registers it.
        ready: for each parameter's path, the index of the entry of `backward` after which its gradient is whole.
    """

    forward: tuple[Entry, ...]
    backward: tuple[Entry, ...]
    optimizer: float
    parameters: tuple[Parameter, ...]
    ready: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """The time that the device computes in a step, without communication."""
        return sum(entry.seconds for entry in (*self.forward, *self.backward)) + self.optimizer

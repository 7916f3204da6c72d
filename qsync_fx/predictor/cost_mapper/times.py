"""Operator times, and the schedule of one training step that is built from them.

`Times` is the only source of durations for the cost mapper; a profile and a device of the catalog
implement it. A `Schedule` is the output of the cost mapper and the input of the replayer.
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
"""Offsets of an operator's neighbours in program order, as `Times.operator` expects them."""
Beside = Mapping[int, OperandState | None]
"""States of some neighbours by offset, one of `NEIGHBOURS`; None: no operator at this offset."""
ANYBODY: Final[Beside] = MappingProxyType({})
TOLD_BY_NONE: Final[tuple[tuple[()], ...]] = ((),) * len(NEIGHBOURS)
"""Result of `Times.told_apart` for times that do not depend on neighbours."""


@dataclass(frozen=True)
class Seconds:
    """Duration in both passes, in seconds; `interpolated` if not measured in this state."""

    forward: float
    backward: float
    interpolated: bool = False

    def __add__(self, other: object) -> Seconds:
        if not isinstance(other, Seconds):
            return NotImplemented
        both = self.interpolated or other.interpolated
        return Seconds(self.forward + other.forward, self.backward + other.backward, both)


class Times(Protocol):
    """Operator times of one model on one device."""

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        """Return the time of an operator in a state, without the casts of its operands.

        `around` has the states of the neighbours in the order of `NEIGHBOURS`; None: no operator.
        An unknown time raises `ProfileError`.
        """

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        """Return a lower bound on `operator`, for all states of the other neighbours."""

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        """Return for each of `NEIGHBOURS` the states that can change the operator's time.

        Every other state of the neighbour leads to the same time. None: any state can change it.
        """

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        """Return the time of a cast or quantization; zero if operator times include it.

        It is charged to an operator. `differentiated`: a gradient flows back through the cast.
        """

    def outside(self) -> Seconds:
        """Return the time of a step that is charged to no operator."""

    def optimizer(self) -> float:
        """Return the time of the optimizer step in seconds."""


class Part(StrEnum):
    """Kind of work of a schedule entry."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CAST = "cast"
    """Conversion or quantization of an operand, or its derivative in the backward pass."""
    OUTSIDE = "outside"
    """Framework overhead of a pass, charged to no operator."""


@dataclass(frozen=True)
class Entry:
    """Piece of work, charged to the operator with this id; "" for none."""

    operator: str
    part: Part
    seconds: float


@dataclass(frozen=True)
class Parameter:
    """Trained parameter; `dtype_bytes` are the bytes per element of its gradient."""

    path: str
    numel: int
    dtype_bytes: int = 4


@dataclass(frozen=True)
class Schedule:
    """Training step of one device under one plan.

    Attributes:
        forward, backward: entries of the passes, in execution order.
        optimizer: duration of the optimizer step in seconds.
        parameters: trained parameters, in registration order.
        ready: by parameter path, the index of the `backward` entry that completes its gradient.
    """

    forward: tuple[Entry, ...]
    backward: tuple[Entry, ...]
    optimizer: float
    parameters: tuple[Parameter, ...]
    ready: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """Compute time of the device in a step in seconds, without communication."""
        return sum(entry.seconds for entry in (*self.forward, *self.backward)) + self.optimizer

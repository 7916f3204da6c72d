"""One training step of one device as a list of what it does: what the cost mapper gives and the replayer takes.

Invariant: entries stand in the order in which they run, and their seconds add up to the time that the device computes.
Nothing here knows of formats: what a plan changes are the seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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

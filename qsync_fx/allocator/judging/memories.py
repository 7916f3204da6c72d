"""What a step of a class of devices holds under a plan, in the order in which it is expected to run and in that in which it is written.

A compiler sorts each pass as it expects to need least memory, and what it expects is known roughly. A limit is kept in both orders: then
it is kept whichever the compiler takes of these, and what no plan holds less than can be said of the one that follows no plan.

Invariant: peaks are those of `qsync_fx.predictor.memory`, corrected by what was measured of other plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.predictor.mapper import States
from qsync_fx.predictor.memory import Orders, anchored_bytes, step_memory
from qsync_fx.predictor.memory.buffers import Task
from qsync_fx.predictor.memory.step import Memory


class Memories:
    """
    Args:
        part: the class.
        states: of its operators.
    """

    def __init__(self, part: DeviceClass, states: States) -> None:
        self._part, self._states = part, states

    @property
    def peak_bytes(self) -> int:
        """The most that a step holds, in whichever order that is more."""
        return self.expected_bytes + max(0, self.written.peak.bytes - self.expected.peak.bytes)

    @property
    def tasks(self) -> Sequence[Task]:
        """What a step does with memory, in that order."""
        return self._orders.written if self.worst is self.written else self._orders.expected

    @property
    def worst(self) -> Memory:
        """What a step holds at each moment in that order, uncorrected."""
        return max(self.expected, self.written, key=lambda memory: memory.peak.bytes)

    @cached_property
    def expected_bytes(self) -> int:
        """The most that a step holds, in the order in which it is expected to run."""
        found = self.expected
        if not self._part.anchors:
            return found.peak.bytes
        return found.held_bytes + anchored_bytes(self._states, self._part.anchors, self._part.training, found)

    @cached_property
    def expected(self) -> Memory:
        """What a step holds at each moment in the order in which it is expected to run, uncorrected."""
        return step_memory(self._states, self._part.training, self._orders.expected)

    @cached_property
    def written(self) -> Memory:
        """The same in the order in which it is written."""
        return step_memory(self._states, self._part.training, self._orders.written)

    @cached_property
    def _orders(self) -> Orders:
        return Orders.of(self._states, self._part.training)

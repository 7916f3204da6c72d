"""What a step of a class of devices holds at least, under any plan: what no plan is below is reckoned with it.

Invariant: at whole choices the expression is not above what the judge says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from qsync_fx.allocator.exact.formats import Formats
from qsync_fx.allocator.exact.kept import Kept
from qsync_fx.allocator.exact.program import CONSTANT, Expression, total
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.predictor.memory.buffers import Category
from qsync_fx.predictor.memory.step import Memory

_BEFORE = (Category.PARAMETERS, Category.OPTIMIZER, Category.BUCKETS)


class Holds(Protocol):
    """What a program takes a step to hold."""

    def expressions(self, formats: Formats) -> Iterable[Expression]:
        """Returns what is held, in bytes, at each moment at which it may be most."""


class Certain:
    """
    Args:
        part: the class.
        memory: what it holds under some plan.
    """

    def __init__(self, part: DeviceClass, memory: Memory) -> None:
        before = sum(memory.moments[0].of(category) for category in _BEFORE)
        self._before = before + min([0, *(anchor.error(part.training) for anchor in part.anchors)])
        self.kept = Kept(part)

    def expressions(self, formats: Formats) -> Iterable[Expression]:
        return [total((1.0, {CONSTANT: float(self._before)}), (1.0, self.kept.expression(formats)))]

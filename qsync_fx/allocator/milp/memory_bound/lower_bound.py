"""What a step of a class of devices holds at least, under any plan: what no plan is below is reckoned with it.

Invariant: at whole choices the expression is not above what the judge says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from qsync_fx.allocator.evaluator import beyond
from qsync_fx.allocator.milp.format_variables import Formats
from qsync_fx.allocator.milp.linear_program import CONSTANT, Expression, total
from qsync_fx.allocator.milp.memory_bound.backward_peaks import BackwardPeaks
from qsync_fx.allocator.milp.memory_bound.forward_peaks import OutputPeak
from qsync_fx.allocator.milp.memory_bound.saved_bound import SavedTensorsBound
from qsync_fx.allocator.milp.memory_bound.unread_values import PASSING, Moment
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.predictor.memory.buffers import Category
from qsync_fx.predictor.memory.peak_memory import StepMemory
from qsync_fx.predictor.model.model_graph import StateNames

_MORE: Final = 4
"""Moments that are added at a time."""
_ASKED: Final = 2_000_000
"""Operators at moments that are looked at in all to find these."""
_NEAR: Final = 1e-6
"""How much below a limit, of it, what the judge says that is held is taken for what may be above."""
_BEFORE = (Category.PARAMETERS, Category.OPTIMIZER, Category.BUCKETS)


class LowerBoundTerm(Protocol):
    """What a program takes a step to hold."""

    def expressions(self, formats: Formats) -> Iterable[Expression]:
        """Returns what is held, in bytes, at each moment at which it may be most."""


class MemoryLowerBound:
    """
    Args:
        part: the class.
        memory: what it holds under some plan.

    Attributes:
        behind: what is there while gradients are computed beside what `BackwardPeaks` tells of, in bytes; below 0 where there may be less.
        forward: what the forward pass computes while which it is reckoned, too.
        moments: gradients while which are computed it is reckoned, beside the begin of the backward pass.
    """

    def __init__(self, part: DeviceClass, memory: StepMemory) -> None:
        before = sum(memory.moments[0].of(category) for category in _BEFORE)
        self._before = before + min([0, *(anchor.error(part.training) for anchor in part.anchors)])
        self.kept = SavedTensorsBound(part)
        self._begun, self.behind = _with_loss(part, self.kept)
        self.during = BackwardPeaks(self.kept)
        self.forward = [
            item for item in (OutputPeak(self.kept), OutputPeak(self.kept, last=True)) if item.any
        ]
        self.moments: list[Moment] = []

    def add(self, places: Iterable[int]) -> bool:
        """Adds the products beside operators while whose gradients most may be held; returns whether any are new."""
        available = [moment for moment in self.during.moments if moment[1] != PASSING]
        products = sorted({place for place, _ in available})
        ends = [bisect_right(products, index) for index in places]
        neighbours = {
            products[index]
            for end in ends
            for index in (end - 1, end)
            if 0 <= index < len(products)
        }
        near = {moment for moment in available if moment[0] in neighbours}
        new = sorted(near - set(self.moments))
        self.moments += new
        return bool(new)

    def add_above(self, names: Sequence[StateNames], limit: float, written: StepMemory) -> bool:
        """Adds moments at which most is certainly held under a plan, of those where that is above a limit; returns whether there are.

        Args:
            names: the states that the plan puts operators into.
            limit: in bytes.
            written: what is held under it in the order in which a pass is written: no less than is certain.
        """
        more = self._before - sum(written.moments[0].of(category) for category in _BEFORE)
        high = {
            moment.operator
            for moment in written.moments
            if moment.place == "backward" and moment.bytes + more > limit * (1 - _NEAR)
        }
        above = [
            moment
            for moment in self.during.moments
            if not high.isdisjoint(self.during.last(moment))
        ]
        # Of thousands of operators all moments would take minutes.
        before = self._before + self.behind
        every = 1 + len(names) * len(above) // _ASKED
        rest = [moment for moment in above[::every] if moment not in self.moments]
        # To know it to the byte takes long, and most limits are missed by more.
        for exact in (False, True):
            result = {
                moment: before + self.during.of(names, moment, above=limit - before, exact=exact)
                for moment in rest
            }
            above = [moment for moment, live in result.items() if beyond(live, limit)]
            new = sorted(above, key=lambda moment: -result[moment])[:_MORE]
            if new:
                break
        self.moments += sorted(new)
        return bool(new)

    def expressions(self, formats: Formats) -> Iterable[Expression]:
        existing, begun, behind = (
            {CONSTANT: float(self._before + more)} for more in (0, self._begun, self.behind)
        )
        yield total((1.0, begun), (1.0, self.kept.expression(formats)))
        for returning in self.forward:
            yield total((1.0, existing), (1.0, returning.expression(formats)))
        for moment in self.moments:
            yield total((1.0, behind), (1.0, self.during.expression(formats, moment)))

    def of(self, names: Sequence[StateNames], waiting: bool = True) -> float:
        """Returns the most bytes under a plan, by the states that it puts operators into; without `waiting` sooner, and maybe less."""
        result = [
            self._begun + self.kept.of(names),
            *(returning.of(names) for returning in self.forward),
            *(self.behind + self.during.of(names, moment, waiting) for moment in self.moments),
        ]
        return self._before + max(result)


def _with_loss(part: DeviceClass, saved: SavedTensorsBound) -> tuple[int, int]:
    """Returns what is certain, beside what `Kept` and `BackwardPeaks` tell of, when the backward pass begins, and behind that.

    Those reckon with the gradients that the pass begins with as there throughout. Where the loss is known, they are held no longer than
    they are read, and without them there is less by as much at most.
    """
    loss = part.training.loss if part.training is not None else None
    inputs = [buffer.bytes for task in saved.passes[0].backward.incoming for buffer in task.writes]
    if loss is None or not inputs:
        return 0, 0
    return max(loss.held, loss.most - sum(inputs)), loss.held - sum(inputs)

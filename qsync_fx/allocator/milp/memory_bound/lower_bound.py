"""Lower bound on the peak memory of a step, over several moments.

Invariant: with integer choices, no expression exceeds the evaluator's peak memory.
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
from qsync_fx.allocator.milp.memory_bound.unread_values import Moment
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.predictor.memory.buffers import Category
from qsync_fx.predictor.memory.peak_memory import StepMemory
from qsync_fx.predictor.model.model_graph import StateNames

_ADDED_MOMENTS: Final = 4
"""Number of moments to add at a time."""
_MAX_EVALUATIONS: Final = 2_000_000
"""Limit of operators times moments that a search for moments evaluates."""
_LIMIT_TOLERANCE: Final = 1e-6
"""Relative tolerance below a limit within which evaluated memory counts as above it."""
_STATIC = (Category.PARAMETERS, Category.OPTIMIZER, Category.BUCKETS)


class LowerBoundTerm(Protocol):
    """Live bytes of a step as modelled by a program."""

    def expressions(self, formats: Formats) -> Iterable[Expression]:
        """Return the live bytes at each candidate peak."""


class MemoryLowerBound:
    """Lower bound on the live bytes of a device class at selected moments.

    Args:
        part: the device class.
        memory: memory of a step under any plan; only its state before the step is used.

    Attributes:
        loss_correction_bytes: correction of `BackwardPeaks` for the loss, in bytes; can be
            negative.
        forward_peaks: bounds at moments of the forward pass.
        moments: selected moments of the backward pass, in addition to its start.
    """

    def __init__(self, part: DeviceClass, memory: StepMemory) -> None:
        before = sum(memory.moments[0].of(category) for category in _STATIC)
        self._static_bytes = before + min(
            [0, *(anchor.error(part.training) for anchor in part.anchors)]
        )
        self.saved_tensors = SavedTensorsBound(part)
        self._loss_at_start_bytes, self.loss_correction_bytes = _loss_corrections(
            part, self.saved_tensors
        )
        self.backward_peaks = BackwardPeaks(self.saved_tensors)
        self.forward_peaks = [
            item
            for item in (OutputPeak(self.saved_tensors), OutputPeak(self.saved_tensors, last=True))
            if item.has_unsaved
        ]
        self.moments: list[Moment] = []

    def add(self, places: Iterable[int]) -> bool:
        """Add the moments at the products next to some operators; return whether any are new."""
        available = self.backward_peaks.moments
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
        """Add the moments with the highest bounds above a limit; return whether any were added.

        Args:
            names: operator states under a plan.
            limit: limit in bytes.
            written: memory of the plan in program order; no less than the bound.
        """
        more = self._static_bytes - sum(written.moments[0].of(category) for category in _STATIC)
        high = {
            moment.operator
            for moment in written.moments
            if moment.place == "backward" and moment.bytes + more > limit * (1 - _LIMIT_TOLERANCE)
        }
        above = [
            moment
            for moment in self.backward_peaks.moments
            if self.saved_tensors.graph.operators[moment[0]].id in high
        ]
        # With thousands of operators, evaluating all moments would take minutes.
        before = self._static_bytes + self.loss_correction_bytes
        every = 1 + len(names) * len(above) // _MAX_EVALUATIONS
        rest = [moment for moment in above[::every] if moment not in self.moments]
        result = {moment: before + self.backward_peaks.of(names, moment) for moment in rest}
        above = [moment for moment, live in result.items() if beyond(live, limit)]
        new = sorted(above, key=lambda moment: -result[moment])[:_ADDED_MOMENTS]
        self.moments += sorted(new)
        return bool(new)

    def expressions(self, formats: Formats) -> Iterable[Expression]:
        forward, at_start, backward = (
            {CONSTANT: float(self._static_bytes + more)}
            for more in (0, self._loss_at_start_bytes, self.loss_correction_bytes)
        )
        yield total((1.0, at_start), (1.0, self.saved_tensors.expression(formats)))
        for peak in self.forward_peaks:
            yield total((1.0, forward), (1.0, peak.expression(formats)))
        for moment in self.moments:
            yield total((1.0, backward), (1.0, self.backward_peaks.expression(formats, moment)))

    def of(self, names: Sequence[StateNames]) -> float:
        """Return the maximum bound in bytes under a plan, given its operator states."""
        result = [
            self._loss_at_start_bytes + self.saved_tensors.of(names),
            *(peak.of(names) for peak in self.forward_peaks),
            *(
                self.loss_correction_bytes + self.backward_peaks.of(names, moment)
                for moment in self.moments
            ),
        ]
        return self._static_bytes + max(result)


def _loss_corrections(part: DeviceClass, saved: SavedTensorsBound) -> tuple[int, int]:
    """Return corrections for the loss: at the start of the backward pass, and after it.

    `SavedTensorsBound` and `BackwardPeaks` count the incoming gradients as live throughout the
    backward pass. If the memory of the loss is known, they are live only until their last use, so
    that the bounds decrease by at most their size.
    """
    loss = part.training.loss if part.training is not None else None
    inputs = [buffer.bytes for task in saved.passes[0].backward.incoming for buffer in task.writes]
    if loss is None or not inputs:
        return 0, 0
    return max(loss.held, loss.most - sum(inputs)), loss.held - sum(inputs)

"""Lower bound on the live set at gradients of the backward pass, as linear expressions of states.

Moments are the gradients of product factors and max poolings, and the conversion of parameter
gradients. The order is program order, reversed, for which limits hold, too (see
`PeakMemoryEvaluator`). Live are: unread saved tensors, the factors and gradients of the product
itself, and parameter gradients of the operators after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from qsync_fx.allocator.milp.format_variables import Indicators
from qsync_fx.allocator.milp.linear_program import CONSTANT, Expression, constant
from qsync_fx.allocator.milp.memory_bound.saved_bound import SavedTensorsBound, add, factors
from qsync_fx.allocator.milp.memory_bound.unread_values import (
    Moment,
    UnreadValues,
    gradients,
    has_joint_gradients,
)
from qsync_fx.formats import FORMATS, FP32
from qsync_fx.predictor.memory.backward import INDEX, computed_in
from qsync_fx.predictor.memory.buffers import convolves, pools, whole
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead, Name, StateNames

Sizes = Mapping[Name, int]
"""Bytes by compute format."""


class BackwardPeaks:
    """Lower bound on the live bytes at moments of the backward pass.

    Args:
        saved: bound on the saved tensors.
    """

    def __init__(self, saved: SavedTensorsBound) -> None:
        self._saved, self.graph, self._forward = saved, saved.graph, saved.passes[0].forward
        self._unread = UnreadValues(saved)

    @cached_property
    def moments(self) -> Sequence[Moment]:
        """All moments with a bound, in program order."""
        result: list[Moment] = []
        for index, operator in enumerate(self.graph.operators):
            if operator.repeated or not self._unread.has_gradient(operator.result):
                continue
            if index in self._forward.matrices:
                continue  # no single moment has all of its reads and writes
            if pools(operator) or (
                self._forward.multiplies(operator) and has_joint_gradients(operator)
            ):
                result += [(index, 0)] if gradients(operator, self._forward) else []
            elif self._forward.multiplies(operator):
                computed = gradients(operator, self._forward)
                result += [(index, selected) for selected, _ in enumerate(computed)]
                if self._converted_parameter(operator) is not None:
                    result.append((index, len(computed)))
        return result

    def of(self, names: Sequence[StateNames], moment: Moment) -> float:
        """Return the bound in bytes under a plan, given its operator states."""
        result = constant(self.expression(self._saved.at_plan(names), moment))
        assert result is not None
        return result

    def expression(self, formats: Indicators, moment: Moment) -> Expression:
        """Return the bound in bytes at a moment; see `SavedTensorsBound.expression`."""
        result = dict(self._saved.expression(formats, self._unread.of(moment)))
        result[CONSTANT] = result.get(CONSTANT, 0.0) + self._parameter_gradient_bytes(moment)
        sizes = self._own_gradient_bytes(moment)
        for name, where in formats.precisions[moment[0]].items():
            add(result, where, sizes[name])
        return result

    def _own_gradient_bytes(self, moment: Moment) -> Sizes:
        """Return the live bytes of the operator's own gradients at a moment, by compute format.

        They include the incoming gradient, computed gradients, and copies of scaled factors in the
        compute dtype. A convolution writes both gradients at once. A max pooling also reads
        indices.
        """
        operator, result = self.graph.operators[moment[0]], dict[Name, int]()
        if pools(operator):
            windows = INDEX * whole(self.graph.values[operator.result].numel)
            values = operator.result, operator.reads[0].value
            for name, _ in operator.costs:
                result[name] = windows + sum(self._forward.bytes(value, name) for value in values)
            return result
        places = gradients(operator, self._forward)
        for name, _ in operator.costs:
            narrow, emulation_format = computed_in(name)
            written = {
                place: self._forward.bytes(operator.reads[place].value, emulation_format)
                for place in places
            }
            copied = {
                index: self._copy_bytes(read, name, emulation_format)
                for index, read in factors(operator, self._forward).items()
            }
            if has_joint_gradients(operator):
                workspace = (
                    2 * self._forward.bytes(operator.reads[1].value, emulation_format)
                    if convolves(operator)
                    else 0
                )
                more = sum(written.values()) + sum(copied.values()) + workspace
            elif moment[1] == len(places):
                result[name] = self._conversion_bytes(operator, emulation_format)
                continue
            else:
                now = places[moment[1]]
                before = [
                    place
                    for place in places[: moment[1]]
                    if self._unread.reads_gradient(operator.reads[place].value)
                ]
                more = (
                    sum(written[place] for place in (*before, now))
                    + copied[self._forward.other(operator, now)]
                )
            result[name] = self._forward.bytes(operator.result, narrow) + more
        return result

    def _converted_parameter(self, operator: ModelOperator) -> ModelRead | None:
        """Return the parameter whose gradient a matrix product computes last and then converts.

        The gradient is converted to FP32. Returns None if there is no such parameter.
        """
        last = gradients(operator, self._forward)[-1:]
        read = operator.reads[last[0]] if last else None
        if (
            read is None
            or not self._forward.given(read.value)
            or self.graph.values[read.value].own != FP32.name
        ):
            return None
        # A gradient of a later reader would be accumulated instead.
        alone = self._last_readers[self._forward.root(read.value)] == self.graph.places[operator.id]
        return read if alone else None

    @cached_property
    def _last_readers(self) -> Mapping[int, int]:
        """Index of the last operator that contributes to the gradient of each value."""
        reads = (
            (index, read)
            for index, operator in enumerate(self.graph.operators)
            for read in operator.reads
        )
        return {self._forward.root(read.value): index for index, read in reads if read.gradient}

    def _conversion_bytes(self, operator: ModelOperator, emulation_format: Name) -> int:
        """Return the bytes of a gradient before and after conversion, and of earlier gradients."""
        read, places = self._converted_parameter(operator), gradients(operator, self._forward)
        assert read is not None
        before = [
            place
            for place in places[:-1]
            if self._unread.reads_gradient(operator.reads[place].value)
        ]
        result = sum(
            self._forward.bytes(operator.reads[place].value, emulation_format) for place in before
        )
        stays = self._forward.bytes(read.value, FP32.name)
        narrow = (
            emulation_format is not None
            and FORMATS[emulation_format].dtype.itemsize < FP32.dtype.itemsize
        )
        return (
            result
            + stays
            + (
                (
                    self._forward.bytes(read.value, emulation_format)
                    + self._pooling_index_bytes(operator)
                )
                if narrow
                else 0
            )
        )

    def _pooling_index_bytes(self, operator: ModelOperator) -> int:
        """Return the bytes of max pooling indices that the converting kernel writes.

        Operators between two library kernels are one kernel, so that this applies if the next
        library kernel is a max pooling.
        """
        for before in reversed(self.graph.operators[: self.graph.places[operator.id]]):
            if not self._unread.has_gradient(before.result):
                continue
            if pools(before):
                return INDEX * whole(self.graph.values[before.result].numel)
            if self._unread.materializes_gradients(before):
                break
        return 0

    def _copy_bytes(self, read: ModelRead, computes: Name, emulation_format: Name) -> int:
        wanted = read.wanted.get(computes or "")
        return (
            self._forward.bytes(read.value, emulation_format)
            if wanted is not None and FORMATS[wanted].scaled
            else 0
        )

    def _parameter_gradient_bytes(self, moment: Moment) -> int:
        """Return the bytes of parameter gradients that operators after a moment have left."""
        return sum(size for index, size in self._parameter_gradients if index > moment[0])

    @cached_property
    def _parameter_gradients(self) -> Sequence[tuple[int, int]]:
        """Operators that leave parameter gradients, with bytes; minimum over all uniform plans."""
        result: dict[str, tuple[int, int]] = {}
        for item in self._saved.passes:
            for task in item.backward.tasks:
                for buffer in task.writes:
                    if buffer.stays and task.operator:
                        index = self.graph.places[task.operator]
                        result[buffer.name] = min(
                            result.get(buffer.name, (index, buffer.bytes)), (index, buffer.bytes)
                        )
        return list(result.values())

"""Lower bounds on the live set at the end of the forward pass, as linear expressions of states.

`OutputPeak` covers the kernel that computes the model output, or the input of the last product.
Live are the product results and other materialized values that the kernel reads, for instance along
residuals, and the tensors saved before the last library kernel, which ends a fused kernel. Buffers
written afterwards can reuse the memory of inputs of equal size and count only if they cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property

from qsync_fx.allocator.milp.format_variables import Indicators
from qsync_fx.allocator.milp.linear_program import Expression, constant
from qsync_fx.allocator.milp.memory_bound.saved_bound import (
    MaterializedValue,
    Passes,
    Readers,
    SavedTensorsBound,
    add,
    norms,
)
from qsync_fx.predictor.memory.buffers import Buffer, attends, draws_alone, pools
from qsync_fx.predictor.model.model_graph import StateNames


class OutputPeak:
    """Lower bound on the live bytes while a kernel at the end of the forward pass runs.

    Args:
        saved: bound on the saved tensors.
        last: whether the kernel computes the input of the last product, not the model output.
    """

    def __init__(self, saved: SavedTensorsBound, last: bool = False) -> None:
        self._saved, self.graph, self._forward = saved, saved.graph, saved.passes[0].forward
        read = [item.value for item in self.graph.outputs]
        if last:
            product = next(
                (item for item in reversed(self.graph.operators) if self._forward.multiplies(item)),
                None,
            )
            read = [product.reads[0].value] if product is not None else []
        self._outputs = {self._forward.root(value) for value in read}

    def of(self, names: Sequence[StateNames]) -> float:
        """Return the bound in bytes under a plan, given its operator states."""
        result = constant(self.expression(self._saved.at_plan(names)))
        assert result is not None
        return result

    def expression(self, formats: Indicators) -> Expression:
        """Return the bound in bytes; see `SavedTensorsBound.expression`."""
        result = dict(self._saved.expression(formats, self._unread, self.materialized))
        for by_state in (self._results, self._masks, self._random_numbers):
            for index, sizes in by_state.items():
                for state, where in formats.states[index].items():
                    add(result, where, sizes[state])
        return result

    @property
    def has_unsaved(self) -> bool:
        """Whether any live buffer is not a saved tensor."""
        return bool(self._results or self.materialized)

    @cached_property
    def _states(self) -> Sequence[_OutputState]:
        if len({operator.graph for operator in self.graph.operators}) != 1:
            return ()
        return [
            _OutputState(item, {self.graph.values[value].name for value in self._outputs})
            for item in self._saved.passes
        ]

    @cached_property
    def _names(self) -> Set[str]:
        """Names of the buffers that the kernel reads under all plans."""
        return frozenset.intersection(
            *(frozenset(buffer.name for buffer in item.read) for item in self._states)
        )

    @cached_property
    def materialized(self) -> Sequence[MaterializedValue]:
        """Materialized values that the kernel reads, without product results."""
        if not self._states:
            return ()
        makers = (self._forward.made_by(value) for value in self._outputs)
        result = {
            item.value: item
            for producer in makers
            if producer is not None
            for item in self._saved.materialized_sources(producer)
        }
        return [
            item for item in result.values() if self.graph.values[item.value].name in self._names
        ]

    @cached_property
    def _results(self) -> Mapping[int, Mapping[StateNames, int]]:
        """Bytes of product results that the kernel reads under all plans, by product and state."""
        if not self._states:
            return {}
        result: dict[int, Mapping[StateNames, int]] = {}
        for index, operator in enumerate(self.graph.operators):
            value = self.graph.values[operator.result]
            if (
                not self._forward.multiplies(operator)
                or value.name not in self._names
                or operator.result in self._saved_or_materialized
            ):
                continue
            result[index] = {state: self._bytes(index, state) for state in operator.costs}
        return result

    @cached_property
    def _saved_or_materialized(self) -> Set[int]:
        """Values that may be saved or materialized in addition to a product's result."""
        result: set[int] = set()
        for operator in self.graph.operators:
            result.update(self._saved.saved(operator))
            if self._forward.multiplies(operator) or pools(operator):
                result.update(self._forward.root(read.value) for read in operator.reads)
        return result

    @cached_property
    def _masks(self) -> Mapping[int, Mapping[StateNames, int]]:
        """Bytes of masks and statistics that cannot reuse input memory, by operator and state."""
        result: dict[int, Mapping[StateNames, int]] = {}
        for index, by in self._saved.extras.items():
            buffers = [(item, buffer) for item in self._states for buffer in item.extras(index)]
            written = all(
                buffer in item.written and buffer.bytes not in self._sizes
                for item, buffer in buffers
            )
            if buffers and written and index not in self._unread.all_unread:
                result[index] = by
        return result

    @cached_property
    def _random_numbers(self) -> Mapping[int, Mapping[StateNames, int]]:
        """Bytes of random numbers for the last dropout mask, unless a library kernel follows.

        In program order, the kernel that computes the output then also computes the mask.
        """
        if not self._results or not self._outputs.isdisjoint(self._saved_or_materialized):
            return {}
        for index, operator in reversed(list(enumerate(self.graph.operators))):
            if self._forward.multiplies(operator):
                break
            if "dropout" in operator.row and any(item.extras(index) for item in self._states):
                if index not in self._masks or draws_alone(operator):
                    break
                numbers = {
                    state: self._forward.bytes(operator.result, state[1])
                    for state in operator.costs
                }
                # A mask of the same size may reuse the memory of the random numbers.
                return {
                    index: {
                        state: size if size != self._masks[index][state] else 0
                        for state, size in numbers.items()
                    }
                }
        return {}

    def _bytes(self, index: int, state: StateNames) -> int:
        return self._forward.bytes(self.graph.operators[index].result, state[1])

    @cached_property
    def _unread(self) -> Readers:
        """Operators whose saved tensors are live under all plans, all or all but statistics."""
        if not self._states:
            return Readers(frozenset(), frozenset())
        all_unread, values_unread = set[int](), set[int]()
        for index, operator in enumerate(self.graph.operators):
            later = [set(item.saved(index)) - item.completed for item in self._states]
            if not any(later):
                all_unread.add(index)
            elif norms(operator) and all(
                item.extras(index) >= rest for item, rest in zip(self._states, later, strict=True)
            ):
                values_unread.add(index)
        for gate in self._saved.gates:
            masks = [
                (item, mask)
                for item in self._states
                if (mask := item.passes.mask(gate.index)) is not None
            ]
            if masks and all(
                mask in item.written and mask.bytes not in self._sizes for item, mask in masks
            ):
                values_unread.add(gate.index)
        return Readers(frozenset(all_unread), frozenset(values_unread))

    @cached_property
    def _sizes(self) -> Set[int]:
        """Sizes in bytes of unsaved inputs in any format; an equally large buffer can reuse one."""
        places = [
            self.graph.places[producer.id]
            for value in self.materialized
            if (producer := self._forward.made_by(value.value))
        ]
        input_sizes = {
            self._bytes(index, state)
            for index in places
            for state in self.graph.operators[index].costs
        }
        return input_sizes.union(*(sizes.values() for sizes in self._results.values()))


class _OutputState:
    """Live buffers under a plan while the output with the largest inputs is computed.

    Attributes:
        passes: both passes of the plan.
        read: buffers that the kernel reads.
        completed: buffers written up to the last library kernel before it, in program order.
        written: buffers written before it or by it.
    """

    def __init__(self, passes: Passes, names: Set[str]) -> None:
        self.passes, self._forward = passes, passes.forward
        tasks = self._forward.tasks
        last = [
            index
            for index, task in enumerate(tasks)
            if not task.library and any(buffer.name in names for buffer in task.writes)
        ]
        end = max(
            last, key=lambda index: sum(buffer.bytes for buffer in tasks[index].reads), default=-1
        )
        self.read: Set[Buffer] = tasks[end].reads if last else frozenset()
        library = max((index for index in range(end) if tasks[index].library), default=-1)
        self.completed = {buffer for task in tasks[: library + 1] for buffer in task.writes}
        self.written = {buffer for task in tasks[: end + 1] for buffer in task.writes}

    def extras(self, index: int) -> Set[Buffer]:
        """Return the masks and statistics that an operator saves."""
        return self._forward.extras(index)

    def saved(self, index: int) -> Iterator[Buffer]:
        """Yield the tensors that an operator saves, without those that exist before the step."""
        operator = self._forward.graph.operators[index]
        product = self._forward.multiplies(operator) and not attends(operator)
        for place in self._forward.multiplied(operator) if product else (0, 1):
            if (buffer := self._forward.factors.get((index, place))) is not None:
                yield buffer
        yield from (buffer for buffer in self._forward.kept.get(index, ()) if buffer.bytes)

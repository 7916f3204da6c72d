"""Lower bounds on the live set at the end of the forward pass, as linear expressions of states.

`OutputPeak` covers the kernel that computes the model output, or the input of the last product;
`FusedProducer` adds the buffers that this kernel writes for the product. Live are the product
results and other materialized values that the kernel reads, for instance along residuals, and the
tensors saved before the last library kernel, which ends a fused kernel. Buffers written afterwards
can reuse the memory of equally large inputs and do not count, except masks that cannot.

Invariant: `of` and `expression` agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from qsync_fx.allocator.milp.format_variables import Formats
from qsync_fx.allocator.milp.linear_program import ONE, Expression, total
from qsync_fx.allocator.milp.memory_bound.relu_masks import MaterializedValue, scaled
from qsync_fx.allocator.milp.memory_bound.saved_bound import (
    Passes,
    Readers,
    SavedTensorsBound,
    add,
    norms,
)
from qsync_fx.predictor.memory.buffers import Buffer, attends, draws_alone, pools, whole
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead, Name, StateNames

_ITEMS = (1, 2, 4, 8)
"""Possible bytes per element."""


@dataclass(frozen=True)
class FusedProducer:
    """Buffers that a fused kernel writes for a product: its input, and copies of its parameters.

    Parameters are copied into the product's format. If the product quantizes its input or
    parameters, they are materialized unquantized first, as quantization is a separate kernel.
    Buffers that may reuse the memory of an input do not count.

    Attributes:
        index: index of the product.
        producer: index of the operator that computes its input.
        written: bytes written, by the product's state; without states in which the product reads
            the input in its own format.
        unconverted: bytes written in the other states of the product, by the producer's state.
    """

    index: int
    producer: int
    written: Mapping[StateNames, int]
    unconverted: Mapping[StateNames, int]

    @classmethod
    def of_product(cls, saved: SavedTensorsBound, product: ModelOperator) -> FusedProducer | None:
        """Return the buffers for a product with an elementwise producer of its own, else None."""
        forward, index = saved.passes[0].forward, saved.graph.places[product.id]
        if attends(product) or index in forward.matrices or forward.multiplied(product) != (0, 1):
            return None
        data, *inputs = product.reads
        producer, root = forward.made_by(data.value), forward.root(data.value)
        if (
            producer is None
            or forward.multiplies(producer)
            or pools(producer)
            or not all(forward.given(read.value) for read in inputs)
        ):
            return None
        if not {root, *(forward.root(read.value) for read in inputs)}.isdisjoint(
            _materialized_elsewhere(saved, product)
        ):
            return None
        reusable, written = _reusable_sizes(saved, producer), dict[StateNames, int]()
        for state in product.costs:
            wanted = [_wanted(read, state) for read in product.reads]
            if wanted[0] is None or scaled(wanted[0]):
                continue
            written[state] = 0
            if all(fmt is not None and not scaled(fmt) for fmt in wanted):
                size = forward.bytes(root, wanted[0])
                copies = zip(inputs, wanted[1:], strict=True)
                written[state] = size if size not in reusable else 0
                written[state] += sum(
                    forward.bytes(r.value, fmt)
                    for r, fmt in copies
                    if fmt != _stored_format(saved, r)
                )
        live = {
            state: size if (size := forward.bytes(root, state[1])) not in reusable else 0
            for state in producer.costs
        }
        return cls(index, saved.graph.places[producer.id], written, live)

    def of(self, names: Sequence[StateNames]) -> int:
        """Return the bytes under a plan, given its operator states."""
        state = names[self.index]
        return self.written.get(state, self.unconverted[names[self.producer]])

    def expression(self, formats: Formats) -> Expression:
        """Return the bytes as an expression."""
        result: dict[int, float] = {}
        for state, existing in formats.states[self.index].items():
            add(result, existing, self.written.get(state, 0))
        is_unconverted = total(
            *(
                (1.0, e)
                for state, e in formats.states[self.index].items()
                if state not in self.written
            )
        )
        for state, existing in formats.states[self.producer].items():
            both = formats.program.at_least(
                total((1.0, is_unconverted), (1.0, existing), (-1.0, ONE))
            )
            add(result, both, self.unconverted[state])
        return result


def _wanted(read: ModelRead, state: StateNames) -> Name:
    return read.wanted.get(state[0] or "")


def _stored_format(saved: SavedTensorsBound, read: ModelRead) -> Name:
    return saved.graph.values[saved.passes[0].forward.root(read.value)].own


def _materialized_elsewhere(saved: SavedTensorsBound, product: ModelOperator) -> Set[int]:
    """Return the values that are materialized for other operators, or are model outputs."""
    forward = saved.passes[0].forward
    others = (
        item
        for item in saved.graph.operators
        if item is not product and (forward.multiplies(item) or pools(item))
    )
    result = {forward.root(read.value) for item in others for read in item.reads}
    return result | {forward.root(read.value) for read in saved.graph.outputs}


def _reusable_sizes(saved: SavedTensorsBound, producer: ModelOperator) -> Set[int]:
    """Return the sizes in bytes of all buffers whose memory an operator's result may reuse."""
    forward = saved.passes[0].forward
    result, visited, left = set[int](), set[int](), [producer]
    while left:
        operator = left.pop()
        for cost in operator.costs.values():
            result |= {
                whole(size)
                for (_, settings), size in cost.saved.items()
                if settings.startswith("extra")
            }
        computed = {
            forward.root(read.value) for read in operator.reads if not forward.given(read.value)
        }
        for value in computed - visited:
            visited.add(value)
            result |= {size * whole(saved.graph.values[value].numel) for size in _ITEMS}
            before = forward.made_by(value)
            if before is not None and not forward.multiplies(before):
                left.append(before)
    return result


class OutputPeak:
    """Lower bound on the live bytes while a kernel at the end of the forward pass runs.

    Args:
        saved: bound on the saved tensors.
        last: whether the kernel computes the input of the last product, not the model output.
    """

    def __init__(self, saved: SavedTensorsBound, last: bool = False) -> None:
        self._saved, self.graph, self._forward = saved, saved.graph, saved.passes[0].forward
        self._product: ModelOperator | None = None
        read = [item.value for item in self.graph.outputs]
        if last:
            product = next(
                (item for item in reversed(self.graph.operators) if self._forward.multiplies(item)),
                None,
            )
            read = [product.reads[0].value] if product is not None else []
            self._product = product
        self._outputs = {self._forward.root(value) for value in read}

    def of(self, names: Sequence[StateNames]) -> float:
        """Return the bound in bytes under a plan, given its operator states."""
        neighbours = (*self._results.items(), *self._masks.items(), *self._random_numbers.items())
        result = self._saved.of(names, self._unread, self.materialized) + sum(
            sizes[names[index]] for index, sizes in neighbours
        )
        return result + (self._fused_producer.of(names) if self._fused_producer is not None else 0)

    def expression(self, formats: Formats) -> Expression:
        """Return the bound in bytes as an expression."""
        result = dict(self._saved.expression(formats, self._unread, self.materialized))
        for index, sizes in (
            *self._results.items(),
            *self._masks.items(),
            *self._random_numbers.items(),
        ):
            for state, where in formats.states[index].items():
                add(result, where, sizes[state])
        if self._fused_producer is not None:
            add(result, self._fused_producer.expression(formats), 1.0)
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
        makers, materialized_values = (
            (self._forward.made_by(value) for value in self._outputs),
            self._saved.materialized_values,
        )
        result = {
            item.value: item
            for producer in makers
            if producer is not None
            for item in materialized_values.sources_of(producer)
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
    def _fused_producer(self) -> FusedProducer | None:
        """Buffers written for the last product."""
        if self._product is None or not self.has_unsaved:
            return None
        return FusedProducer.of_product(self._saved, self._product)

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

"""Lower bound on the memory of a step over all plans, as a linear expression of operator states.

The bound is the live set at the start of the backward pass. It counts tensors that are saved under
any plan: factors of products in their compute formats, product results that other operators save,
masks and statistics, and other values that no compiler can recompute. Each value counts once per
format. With integer choices it never exceeds the evaluator's peak memory of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

from qsync_fx.allocator.milp.format_variables import Indicators, PlanIndicators, Spread
from qsync_fx.allocator.milp.linear_program import CONSTANT, Expression, add, constant, total
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.cost_mapper.plan_states import States, states
from qsync_fx.predictor.memory.backward import Backward
from qsync_fx.predictor.memory.buffers import GATES, GATHERS, Buffer, Category, attends
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.memory.peak_memory import StepMemory
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead, Name, StateNames

K = TypeVar("K")

_STATIC: Final = (Category.PARAMETERS, Category.OPTIMIZER, Category.BUCKETS, Category.CUDA)


class Passes:
    """Both passes of a plan, and the buffers of the forward pass that the backward pass reads.

    Buffers that exist before the step, such as parameters, do not count.
    """

    def __init__(self, result: States) -> None:
        self.forward = Forward(result)
        self.backward = Backward(self.forward)
        made = {buffer for task in self.forward.tasks for buffer in task.writes}
        self.read = made & {buffer for task in self.backward.tasks for buffer in task.reads}

    def reads_factor(self, index: int, argument: int) -> bool:
        """Return whether the factor of a product is read again, or exists before the step."""
        if (index, argument) not in self.forward.factors:
            return False
        buffer = self.forward.factors[index, argument]
        return buffer is None or buffer in self.read

    def saved(self, index: int, value: int) -> list[Buffer]:
        """Return the buffers of a value that an operator saves."""
        name = self.forward.graph.values[value].name
        return [
            buffer for buffer in self.forward.saved_buffers.get(index, ()) if buffer.name == name
        ]

    def extras(self, index: int) -> Mapping[str, int]:
        """Return the bytes of an operator's masks and statistics that are read again, by name."""
        read = (buffer for buffer in self.forward.extras(index) if buffer in self.read)
        return {buffer.name: buffer.bytes for buffer in read}


@dataclass(frozen=True)
class Factor:
    """Factor of a product, saved for backward in its `wanted` format, by compute format.

    A factor in the format `stored` exists before the step and needs no saved copy.
    """

    index: int
    value: int
    wanted: Mapping[Name, Name]
    stored: Name


@dataclass(frozen=True)
class SavedValue:
    """Value that an operator saves in addition to factors of products.

    `product` is the index of the product that computes it, if any; its result is saved as it is if
    it has a narrower format than `saved_formats` by state.
    """

    index: int
    value: int
    product: int | None
    saved_formats: Mapping[StateNames, Name]


def factors(product: ModelOperator, forward: Forward) -> Mapping[int, ModelRead]:
    """Return the factors of a product by argument index; attention has query, key and value."""
    arguments: Iterable[int] = range(3) if attends(product) else forward.multiplied(product)
    return {index: product.reads[index] for index in arguments if index < len(product.reads)}


class SavedTensorsBound:
    """Lower bound on the live bytes of a device class at the start of the backward pass.

    Of `memory`, only the state before the step is used.
    """

    def __init__(self, part: DeviceClass, memory: StepMemory) -> None:
        self.graph = part.graph
        self.passes = [Passes(states(part.graph, part.uniform(fmt))) for fmt in part.formats]
        self.factors: list[Factor] = []
        self.results: list[SavedValue] = []
        self.extras: dict[int, Mapping[StateNames, int]] = {}
        self._forward = forward = self.passes[0].forward
        errors = [0, *(anchor.error(part.training) for anchor in part.anchors)]
        before = sum(memory.moments[0].of(category) for category in _STATIC)
        tasks = self.passes[0].backward.incoming
        incoming = sum(buffer.bytes for task in tasks for buffer in task.writes)
        loss = part.training.loss if part.training is not None else None
        if loss is not None and incoming:
            incoming += max(loss.held, loss.most - incoming)
        self._constant_bytes = before + min(errors) + incoming
        recomputes = part.training is not None and part.training.memory_budget < 1.0
        if recomputes or any(operator.repeated for operator in self.graph.operators):
            return
        for index, operator in enumerate(self.graph.operators):
            product = forward.multiplies(operator)
            if product:
                self.factors += self._saved_factors(index, operator)
            # Attention with several kernels saves masks and more, like operators that are no
            # product. Attention with one kernel saves its own result.
            if not product or attends(operator):
                self.extras[index] = self._saved_extras(index)
                for item in self._saved_values(index):
                    if not product or item.value == operator.result:
                        self.results.append(item)

    def of(self, names: Sequence[StateNames]) -> float:
        """Return the bound in bytes under a plan, given its operator states."""
        return sum(constant(e) or 0.0 for e in self.expressions(PlanIndicators(names)))

    def expressions(self, formats: Indicators) -> Iterator[Expression]:
        """Yield the bound in bytes."""
        result: dict[int, float] = {CONSTANT: float(self._constant_bytes)}
        wants: dict[tuple[int, Name], list[Expression]] = {}
        for factor in self.factors:
            by_format = _by_format(formats.precisions[factor.index], factor.wanted)
            for fmt, where in by_format.items():
                if fmt != factor.stored:
                    wants.setdefault((factor.value, fmt), []).append(where)
        for item in self.results:
            for fmt, where in self._value_formats(formats, item).items():
                wants.setdefault((item.value, fmt), []).append(where)
        for index, sizes in self.extras.items():
            for state, where in formats.states[index].items():
                add(result, where, sizes[state])
        for key, several in wants.items():
            add(result, formats.program.any_of(several), self._bytes(*key))
        yield result

    def _saved_extras(self, index: int) -> Mapping[StateNames, int]:
        """Return a lower bound on the bytes of an operator's masks and statistics, by state.

        A state that no uniform plan has gets the minimum over all of them.
        """
        available = [item.extras(index) for item in self.passes]
        least = sum(min(item.get(name, 0) for item in available) for name in available[0])
        result = dict.fromkeys(self.graph.operators[index].costs, least)
        visited: dict[StateNames, int] = {}
        for item, sizes in zip(self.passes, available, strict=True):
            state, size = item.forward.states.names[index], sum(sizes.values())
            visited[state] = min(visited.get(state, size), size)
        return result | visited

    def _value_formats(self, formats: Indicators, item: SavedValue) -> Spread:
        """Return the indicators of the format in which a value is saved."""
        by_format = _by_format(formats.states[item.index], item.saved_formats)
        if item.product is None:
            return by_format
        output, result = formats.outputs[item.product], dict[Name, Expression]()
        for fmt, where in by_format.items():
            rest = where
            for name, existing in output.items():
                if _width(name) >= _width(fmt):
                    continue
                if output.get(fmt) == where and len(output) == len(by_format):
                    break  # the output has the saved format
                # The AND must be exact: a larger value would count a too narrow format.
                both = formats.program.all_of([where, existing])
                result[name] = total((1.0, result.get(name, {})), (1.0, both))
                rest = total((1.0, rest), (-1.0, both))
            result[fmt] = total((1.0, result.get(fmt, {})), (1.0, rest))
        return result

    def _saved_factors(self, index: int, operator: ModelOperator) -> Iterator[Factor]:
        forward = self._forward
        for argument, read in factors(operator, forward).items():
            wanted = {name: read.wanted.get(name or "") for name, _ in operator.costs}
            read_again = all(item.reads_factor(index, argument) for item in self.passes)
            if not read_again or not all(wanted.values()):
                continue
            value, stored = forward.root(read.value), None
            if forward.exists_before_step(read.value):
                stored = self.graph.values[value].own
            if forward.is_part(read.value):
                value = read.value
            yield Factor(index, value, wanted, stored)

    def _saved_values(self, index: int) -> Iterator[SavedValue]:
        """Yield values saved under any plan: product results, and values never recomputed."""
        operator, forward = self.graph.operators[index], self._forward
        for value in self._saved(operator):
            producer, formats = forward.made_by(value), self._formats_of(index, value)
            if producer is None or formats is None:
                continue
            product = None
            if forward.multiplies(producer):
                product = self.graph.places[producer.id]
            # A gate saves its own result as a mask of one byte per element.
            gate = operator.row in GATES and operator.result == value
            if product is None and (gate or value not in self._not_recomputable):
                continue
            if all(not item.read.isdisjoint(item.saved(index, value)) for item in self.passes):
                yield SavedValue(index, value, product, formats)

    @cached_property
    def _not_recomputable(self) -> Set[int]:
        """Values that no compiler recomputes under any plan: unsaved sources, or a gather."""
        forward, saved, result = self._forward, set[int](), set[int]()
        for operator in self.graph.operators:
            for value in self._saved(operator):
                producer = forward.made_by(value)
                if forward.multiplies(operator) or (producer and forward.multiplies(producer)):
                    saved.add(value)
        for operator in self.graph.operators:
            reads = {forward.root(read.value) for read in operator.reads}
            unsaved = not result.isdisjoint(reads - saved)
            blocked = unsaved or forward.multiplies(operator) or operator.row in GATHERS
            if blocked and forward.root(operator.result) == operator.result:
                result.add(operator.result)
        return result

    def _saved(self, operator: ModelOperator) -> Sequence[int]:
        """Return the values that an operator saves in some state, in any form."""
        items = {item for cost in operator.costs.values() for item in cost.saved}
        names = sorted({name for name, form in items if not form.startswith("extra")})
        return list(dict.fromkeys(self._forward.root(self._indices[name]) for name in names))

    def _formats_of(self, index: int, value: int) -> Mapping[StateNames, Name] | None:
        """Return the saved format of a value by state; None if it is not saved in each state."""
        result: dict[StateNames, Name] = {}
        for state, cost in self.graph.operators[index].costs.items():
            formats = [
                form
                for name, form in cost.saved
                if not form.startswith("extra") and self._forward.root(self._indices[name]) == value
            ]
            if len(formats) != 1 or not formats[0]:
                return None
            result[state] = formats[0]
        return result

    @cached_property
    def _indices(self) -> Mapping[str, int]:
        return {value.name: index for index, value in enumerate(self.graph.values)}

    def _bytes(self, value: int, fmt: Name) -> int:
        return self._forward.bytes(value, fmt)


def _by_format(spread: Mapping[K, Expression], formats: Mapping[K, Name]) -> Spread:
    """Return the indicators of formats that several keys have in common, summed by format."""
    result: dict[Name, Expression] = {}
    for key, where in spread.items():
        fmt = formats[key]
        result[fmt] = total((1.0, result.get(fmt, {})), (1.0, where))
    return result


def _width(name: Name) -> int:
    return FORMATS[name].dtype.itemsize if name is not None else 0

"""Lower bound on the live set at the start of the backward pass, as linear expressions of states.

The bound counts tensors that are saved under any plan: factors of products in their compute
formats, product results that other operators save, masks and statistics, and other values that no
compiler can recompute. Each value counts once per format. `SavedTensorsBound.of` evaluates the
expression at the states of one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from operator import eq
from typing import TypeVar

from qsync_fx.allocator.milp.format_variables import Indicators, PlanIndicators, Spread
from qsync_fx.allocator.milp.linear_program import CONSTANT, ONE, Expression, constant, total
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.cost_mapper.plan_states import States, states
from qsync_fx.predictor.memory.backward import Backward
from qsync_fx.predictor.memory.buffers import GATES, GATHERS, Buffer, attends, pools, whole
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.model.model_graph import (
    Follows,
    ModelOperator,
    ModelRead,
    Name,
    StateNames,
)

K = TypeVar("K")


class Passes:
    """Both passes of a plan, and the buffers of the forward pass that the backward pass reads.

    Buffers that exist before the step, such as parameters, do not count.
    """

    def __init__(self, result: States) -> None:
        self.forward = Forward(result)
        self.backward = Backward(self.forward)
        made = {buffer for task in self.forward.tasks for buffer in task.writes}
        self.read = made & {buffer for task in self.backward.tasks for buffer in task.reads}

    def reads_factor(self, index: int, place: int) -> bool:
        """Return whether the factor of a product is read again, or exists before the step."""
        if (index, place) not in self.forward.factors:
            return False
        buffer = self.forward.factors[index, place]
        return buffer is None or buffer in self.read

    def reads_saved(self, index: int, name: str) -> bool:
        """Return whether a value that an operator saves is read again."""
        saved = self.forward.kept.get(index, ())
        return any(buffer.name == name and buffer in self.read for buffer in saved)

    def mask(self, index: int) -> Buffer | None:
        """Return the mask that a gate saves; None if its result is saved or recomputed instead."""
        name = self.forward.graph.values[self.forward.graph.operators[index].result].name
        saved = self.forward.kept.get(index, ())
        return next((item for item in saved if item.name == name and item.format is None), None)

    def reads_gate(self, index: int) -> bool:
        """Return whether any tensor that a gate saves is read again."""
        mask = self.mask(index)
        saved = self.forward.kept.get(index, ()) if mask is None else [mask]
        return not self.read.isdisjoint(saved)

    def extras(self, index: int) -> Mapping[str, int]:
        """Return the bytes of an operator's masks and statistics that are read again, by name."""
        read = (buffer for buffer in self.forward.extras(index) if buffer in self.read)
        return {buffer.name: buffer.bytes for buffer in read}


def _saved_extras(passes: Sequence[Passes], index: int) -> Mapping[StateNames, int]:
    """Return a lower bound on the bytes of an operator's masks and statistics, by state.

    A state that no plan in `passes` has gets the minimum over all of them.
    """
    available = [item.extras(index) for item in passes]
    least = sum(min(item.get(name, 0) for item in available) for name in available[0])
    visited: dict[StateNames, int] = {}
    for item, sizes in zip(passes, available, strict=True):
        state, size = item.forward.states.names[index], sum(sizes.values())
        visited[state] = min(visited.get(state, size), size)
    return {
        state: visited.get(state, least) for state in passes[0].forward.graph.operators[index].costs
    }


@dataclass(frozen=True)
class Factor:
    """Factor of a product, saved for backward.

    Attributes:
        index: index of the product.
        argument: argument index.
        value: index of the value.
        wanted: format in which the factor is read, by compute format.
        stored_format: format in which it exists before the step and needs no saved copy; None for
            others.
    """

    index: int
    argument: int
    value: int
    wanted: Mapping[Name, Name]
    stored_format: Name


@dataclass(frozen=True)
class SavedValue:
    """Value that an operator saves in addition to factors of products.

    Attributes:
        index: index of the operator.
        value: index of the value.
        product: index of the product that computes the value; None for other values.
        saved_formats: saved format by state; a product's result in a narrower format is saved as it
            is.
    """

    index: int
    value: int
    product: int | None
    saved_formats: Mapping[StateNames, Name]


@dataclass(frozen=True)
class FactorRead:
    """Read of a value as a factor: index of the product, and read format by compute format."""

    index: int
    wanted: Mapping[Name, Name]

    def where(self, formats: Indicators, takes: Callable[[Name], bool]) -> Expression:
        """Return the indicator that the read format satisfies a predicate."""
        result = formats.precisions[self.index].items()
        return total(*((1.0, where) for name, where in result if takes(self.wanted[name])))


@dataclass(frozen=True)
class MaterializedValue:
    """Value that products read, and from which other values are computed directly.

    Attributes:
        value: index of the value.
        producer: index of the operator that computes it.
        reads: reads by all products.
        sources: values of this kind from which it is computed.
    """

    value: int
    producer: int
    reads: Sequence[FactorRead]
    sources: Sequence[MaterializedValue]

    def materialized_formats(self, formats: Indicators) -> Iterator[tuple[Name, Expression]]:
        """Yield, for each reader, the materialized formats with their indicators."""
        for fmt, where in formats.outputs[self.producer].items():
            for item in self.reads:
                read = total(
                    (1.0, item.where(formats, scaled)), (1.0, item.where(formats, partial(eq, fmt)))
                )
                yield fmt, formats.program.at_least(total((1.0, where), (1.0, read), (-1.0, ONE)))

    def blocks_recomputation(self, formats: Indicators, cache: dict[int, Expression]) -> Expression:
        """Return the indicator that dependents of the value cannot be recomputed.

        That is so if no product saves the value at its full width, and the value is materialized
        for quantization or computed from a value that blocks it.
        """
        if self.value not in cache:
            result = []
            for fmt, where in formats.outputs[self.producer].items():
                saved = [(-1.0, item.where(formats, partial(_as_wide, fmt))) for item in self.reads]
                gone = [item.where(formats, scaled) for item in self.reads]
                gone += [item.blocks_recomputation(formats, cache) for item in self.sources]
                result += [total((1.0, where), (1.0, item), (-1.0, ONE), *saved) for item in gone]
            cache[self.value] = formats.program.any_of(map(formats.program.at_least, result))
        return cache[self.value]


@dataclass(frozen=True)
class MaskedActivation:
    """Gate (ReLU, threshold) that may save a mask of one byte per element.

    If a product saves the result in its output format, the backward passes of both read this
    tensor. Otherwise the gate saves a mask, unless a compiler recomputes the result. It cannot be
    recomputed if it depends on unsaved values: under any plan, or along a residual on which a value
    is materialized for products that quantize it and then freed.

    Attributes:
        index: index of the operator.
        saved_formats: format in which its backward pass would read its result, by state.
        reads: reads of the result by products that may save it.
        sources: values from which the result is computed; None if it can never be recomputed.
        mask: bytes of the mask.
    """

    index: int
    saved_formats: Mapping[StateNames, Name]
    reads: Sequence[FactorRead]
    sources: Sequence[MaterializedValue] | None
    mask: int

    def mask_indicator(self, formats: Indicators, cache: dict[int, Expression]) -> Expression:
        """Return the indicator that the gate saves its mask; `cache` has the blocking values."""
        blocked: list[Expression] = [ONE]
        if self.sources is not None:
            blocked = [item.blocks_recomputation(formats, cache) for item in self.sources]
        wants = []
        for fmt in dict.fromkeys(self.saved_formats.values()):
            saved = [
                (1.0, where)
                for state, where in formats.states[self.index].items()
                if self.saved_formats[state] == fmt
            ]
            shared = [(-1.0, item.where(formats, partial(eq, fmt))) for item in self.reads]
            wants += [total(*saved, *shared, (1.0, item), (-1.0, ONE)) for item in blocked]
        return formats.program.any_of(map(formats.program.at_least, wants))


@dataclass(frozen=True)
class _SavedIndicators:
    """Indicators of what is saved, equal at all moments and in the order of the bound's lists.

    Attributes:
        formats: formats of the operators.
        factors, results: indicators by saved format.
        masks: indicators that gates save their masks.
    """

    formats: Indicators
    factors: Sequence[Spread]
    results: Sequence[Spread]
    masks: Sequence[Expression]


@dataclass(frozen=True)
class Readers:
    """Operators with saved tensors that the backward pass has yet to read.

    Attributes:
        all_unread: operators whose saved tensors are all unread.
        values_unread: operators whose saved values and masks are unread; statistics may be dead.
        factors: unread factors, as product and argument index.
        unscaled: factors that are unread unless their format is scaled; of scaled factors a copy
            replaces the original.
    """

    all_unread: Set[int]
    values_unread: Set[int]
    factors: Set[tuple[int, int]] = frozenset()
    unscaled: Set[tuple[int, int]] = frozenset()

    def read_values(self, index: int) -> bool:
        """Return whether the values and masks that an operator saves are live."""
        return index in self.all_unread or index in self.values_unread

    def reads(self, factor: Factor, fmt: Name) -> bool:
        """Return whether a factor in a format is live."""
        key = factor.index, factor.argument
        if factor.index in self.all_unread or key in self.factors:
            return True
        return key in self.unscaled and not scaled(fmt)


def factors(product: ModelOperator, forward: Forward) -> Mapping[int, ModelRead]:
    """Return the factors of a product by argument index.

    Attention has query, key and value. For operators that are no product, the result contains the
    first two operands.
    """
    places: Iterable[int] = range(2)
    if attends(product):
        places = range(3)
    elif forward.multiplies(product):
        places = forward.multiplied(product)
    return {place: product.reads[place] for place in places if place < len(product.reads)}


class SavedTensorsBound:
    """Lower bound on the saved tensors and incoming gradients of a device class.

    Args:
        part: the device class.
    """

    def __init__(self, part: DeviceClass) -> None:
        self.graph = part.graph
        self.passes = [Passes(states(part.graph, part.uniform(fmt))) for fmt in part.formats]
        self.factors: list[Factor] = []
        self.results: list[SavedValue] = []
        self.extras: dict[int, Mapping[StateNames, int]] = {}
        self.gates: list[MaskedActivation] = []
        self._forward = forward = self.passes[0].forward
        self._indicators: _SavedIndicators | None = None
        self._plan: tuple[Sequence[StateNames], PlanIndicators] | None = None
        self._sources: dict[int, Sequence[MaterializedValue]] = {}
        self._incoming_bytes = 0
        if any(operator.repeated for operator in self.graph.operators):
            return
        for index, operator in enumerate(self.graph.operators):
            if forward.multiplies(operator):
                self.factors += self._saved_factors(index, operator)
            # Attention with several kernels saves masks and more, like operators that are no
            # product. Attention with one kernel saves its own result.
            if not forward.multiplies(operator) or attends(operator):
                self.extras[index] = _saved_extras(self.passes, index)
                self.results += [
                    item
                    for item in self._saved_values(index)
                    if not attends(operator) or item.value == operator.result
                ]
        self.gates += self._masked_activations()
        outputs = [read.value for read in self.graph.outputs if not forward.given(read.value)]
        self._incoming_bytes = sum(
            self._bytes(value, self.graph.values[value].own)
            for value in outputs
            if self.graph.values[value].differentiated
        )

    def of(self, names: Sequence[StateNames], readers: Readers | None = None) -> float:
        """Return the bound in bytes under a plan, given its operator states; see `expression`."""
        result = constant(self.expression(self.at_plan(names), readers))
        assert result is not None
        return result

    def at_plan(self, names: Sequence[StateNames]) -> PlanIndicators:
        """Return the indicators of a plan; those of the last plan are cached."""
        if self._plan is None or self._plan[0] is not names:
            self._plan = names, PlanIndicators(names)
        return self._plan[1]

    def expression(
        self,
        formats: Indicators,
        readers: Readers | None = None,
        materialized: Sequence[MaterializedValue] = (),
    ) -> Expression:
        """Return the bound in bytes.

        Args:
            formats: indicators of the operator states, variable or of one plan.
            readers: operators with unread saved tensors; None for the start of the backward pass.
            materialized: further values that can be materialized.
        """
        result: dict[int, float] = {CONSTANT: float(self._incoming_bytes if readers is None else 0)}
        wants: dict[tuple[int, Name], list[Expression]] = {}
        for value in materialized:
            for fmt, where in value.materialized_formats(formats):
                wants.setdefault((value.value, fmt), []).append(where)
        indicators = self._saved_indicators(formats)
        for factor, by_format in zip(self.factors, indicators.factors, strict=True):
            for fmt, where in by_format.items():
                if fmt != factor.stored_format and (readers is None or readers.reads(factor, fmt)):
                    wants.setdefault((factor.value, fmt), []).append(where)
        for item, by_format in zip(self.results, indicators.results, strict=True):
            if readers is None or readers.read_values(item.index):
                for fmt, where in by_format.items():
                    wants.setdefault((item.value, fmt), []).append(where)
        for index, sizes in self.extras.items():
            if self._extras_read(readers, index):
                for state, where in formats.states[index].items():
                    add(result, where, sizes[state])
        for gate, masked in zip(self.gates, indicators.masks, strict=True):
            if readers is None or readers.read_values(gate.index):
                add(result, masked, gate.mask)
        for key, several in wants.items():
            add(result, formats.program.any_of(several), self._bytes(*key))
        return result

    def _extras_read(self, readers: Readers | None, index: int) -> bool:
        if readers is None or index in readers.all_unread:
            return True
        return index in readers.values_unread and not norms(self.graph.operators[index])

    def _saved_indicators(self, formats: Indicators) -> _SavedIndicators:
        if self._indicators is None or self._indicators.formats is not formats:
            blocked: dict[int, Expression] = {}
            self._indicators = _SavedIndicators(
                formats,
                [
                    _by_format(formats.precisions[factor.index], factor.wanted)
                    for factor in self.factors
                ],
                [self._value_formats(formats, item) for item in self.results],
                [gate.mask_indicator(formats, blocked) for gate in self.gates],
            )
        return self._indicators

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
                # The AND must be exact: a larger value would count the tensor in a too narrow
                # format.
                both = formats.program.all_of([where, existing])
                result[name] = total((1.0, result.get(name, {})), (1.0, both))
                rest = total((1.0, rest), (-1.0, both))
            result[fmt] = total((1.0, result.get(fmt, {})), (1.0, rest))
        return result

    def _saved_factors(self, index: int, operator: ModelOperator) -> Iterator[Factor]:
        forward = self._forward
        for place, read in factors(operator, forward).items():
            wanted = {name: read.wanted.get(name or "") for name, _ in operator.costs}
            if not all(wanted.values()) or not all(
                item.reads_factor(index, place) for item in self.passes
            ):
                continue
            root, value, stored = forward.root(read.value), read.value, None
            if not forward.is_part(value):
                value = root
            if forward.given(read.value):
                stored = self.graph.values[root].own
            yield Factor(index, place, value, wanted, stored)

    def _saved_values(self, index: int) -> Iterator[SavedValue]:
        """Yield values saved under any plan: product results, and values never recomputed."""
        operator, forward = self.graph.operators[index], self._forward
        for value in self.saved(operator):
            producer, saved = forward.made_by(value), self.formats_of(index, value)
            if producer is None or saved is None:
                continue
            product = None
            if forward.multiplies(producer):
                product = self.graph.places[producer.id]
            # A gate saves its own result as a mask of one byte per element.
            gate = operator.row in GATES and operator.result == value
            if product is None and (gate or value not in self.not_recomputable):
                continue
            if all(item.reads_saved(index, self.graph.values[value].name) for item in self.passes):
                yield SavedValue(index, value, product, saved)

    def _masked_activations(self) -> Iterator[MaskedActivation]:
        """Yield the gates that save, under some plan, a tensor that no other operator saves."""
        for index, operator in enumerate(self.graph.operators):
            value = operator.result
            if operator.row not in GATES or (formats := self.formats_of(index, value)) is None:
                continue
            if not all(item.reads_gate(index) for item in self.passes):
                continue
            reads, sources = self._factor_reads(value), None
            if value not in self.not_recomputable:
                sources = self.materialized_sources(operator)
            if reads is not None and (sources is None or sources):
                mask = whole(self.graph.values[value].numel)
                yield MaskedActivation(index, formats, reads, sources, mask)

    def materialized_sources(self, operator: ModelOperator) -> Sequence[MaterializedValue]:
        """Return the values from which a result whose format follows its inputs is computed."""
        value = operator.result
        if value not in self._sources:
            result: dict[int, MaterializedValue] = {}
            if isinstance(operator.decided, Follows):
                roots = {self._forward.root(read.value): None for read in operator.reads}
                for root in roots:
                    if root != value:
                        result |= {item.value: item for item in self._materialized_at(root)}
            self._sources[value] = tuple(result.values())
        return self._sources[value]

    def _materialized_at(self, value: int) -> Sequence[MaterializedValue]:
        producer = self._forward.made_by(value)
        if producer is None or self._forward.multiplies(producer) or pools(producer):
            return ()
        reads, sources = self._factor_reads(value), self.materialized_sources(producer)
        if not reads:
            return sources
        return [MaterializedValue(value, self.graph.places[producer.id], reads, sources)]

    def _factor_reads(self, value: int) -> Sequence[FactorRead] | None:
        """Return the reads of a value as a factor; None if a saving product's format is unknown."""
        result = [
            FactorRead(item.index, item.wanted) for item in self.factors if item.value == value
        ]
        available = {read.index for read in result}
        return result if self._saving_products.get(value, set()) <= available else None

    @cached_property
    def _saving_products(self) -> Mapping[int, Set[int]]:
        """Products that save a value, by value."""
        result: dict[int, set[int]] = {}
        for index, operator in enumerate(self.graph.operators):
            if self._forward.multiplies(operator):
                for value in self.saved(operator):
                    result.setdefault(value, set()).add(index)
        return result

    @cached_property
    def not_recomputable(self) -> Set[int]:
        """Values that no compiler recomputes under any plan: unsaved sources, or a gather."""
        forward, saved, result = self._forward, set[int](), set[int]()
        for operator in self.graph.operators:
            for value in self.saved(operator):
                producer = forward.made_by(value)
                if forward.multiplies(operator) or (
                    producer is not None and forward.multiplies(producer)
                ):
                    saved.add(value)
        for operator in self.graph.operators:
            reads = {forward.root(read.value) for read in operator.reads}
            blocked = (
                forward.multiplies(operator)
                or operator.row in GATHERS
                or not result.isdisjoint(reads - saved)
            )
            if blocked and forward.root(operator.result) == operator.result:
                result.add(operator.result)
        return result

    def saved(self, operator: ModelOperator) -> Iterable[int]:
        """Return the values that an operator saves in some state, in any form."""
        names = {
            name
            for cost in operator.costs.values()
            for name, settings in cost.saved
            if not settings.startswith("extra")
        }
        return dict.fromkeys(
            self._forward.root(self._value_indices[name]) for name in sorted(names)
        )

    def formats_of(self, index: int, value: int) -> Mapping[StateNames, Name] | None:
        """Return the saved format of a value by state; None if it is not saved in each state."""
        result: dict[StateNames, Name] = {}
        for state, cost in self.graph.operators[index].costs.items():
            formats = [
                settings
                for name, settings in cost.saved
                if not settings.startswith("extra")
                and self._forward.root(self._value_indices[name]) == value
            ]
            if len(formats) != 1 or not formats[0]:
                return None
            result[state] = formats[0]
        return result

    @cached_property
    def _value_indices(self) -> Mapping[str, int]:
        return {value.name: index for index, value in enumerate(self.graph.values)}

    def _bytes(self, value: int, fmt: Name) -> int:
        assert fmt is not None
        live = self.graph.values[value]
        return FORMATS[fmt].dtype.itemsize * whole(live.numel) + whole(live.fixed)


def norms(operator: ModelOperator) -> bool:
    """Return whether an operator is a norm, with reductions before it passes a gradient on."""
    return "norm" in operator.row


def scaled(fmt: Name) -> bool:
    """Return whether a format is quantized."""
    return fmt is not None and FORMATS[fmt].scaled


def _as_wide(live: Name, fmt: Name) -> bool:
    """Return whether a read format preserves all information of the output format."""
    return not scaled(fmt) and _width(fmt) >= _width(live)


def _by_format(spread: Mapping[K, Expression], formats: Mapping[K, Name]) -> Spread:
    """Return the indicators of formats that several keys have in common, summed by format."""
    result: dict[Name, Expression] = {}
    for key, where in spread.items():
        fmt = formats[key]
        result[fmt] = total((1.0, result.get(fmt, {})), (1.0, where))
    return result


def _width(name: Name) -> int:
    return FORMATS[name].dtype.itemsize if name is not None else 0


def add(result: dict[int, float], where: Expression, size: float) -> None:
    """Add an expression, multiplied by `size`."""
    for variable, factor in where.items():
        result[variable] = result.get(variable, 0.0) + factor * size

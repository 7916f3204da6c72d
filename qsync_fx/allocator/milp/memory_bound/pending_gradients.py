"""Lower bound on the live sources of pending gradients, as linear expressions of states.

A gradient at the other branch of a residual is pending until its operator runs. It is not
materialized: it is computed from gradients that products have written and from tensors that gates
save, and these are live (`PendingGradients`). A compiler materializes a gradient with too many
sources, which is then live instead; an integer variable per gradient states this
(`fusion_read_counts.ReadCounts`), since it depends on the entire plan. `NormGradients` adds the
buffers that are written at a norm.

Invariant: minimized over these variables, an expression is at most the live bytes of the sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from qsync_fx.allocator.milp.format_variables import Spread
from qsync_fx.allocator.milp.linear_program import (
    CONSTANT,
    INFINITY,
    ONE,
    Expression,
    LinearProgram,
    constant,
    total,
)
from qsync_fx.allocator.milp.memory_bound.fusion_read_counts import (
    GradientSources,
    Norm,
    ReadCounts,
)
from qsync_fx.allocator.milp.memory_bound.relu_masks import Where, scaled
from qsync_fx.allocator.milp.memory_bound.saved_bound import SavedTensorsBound, add, factors, norms
from qsync_fx.allocator.milp.memory_bound.unary_encoding import TOP, added, where as one_where
from qsync_fx.allocator.milp.memory_bound.unread_values import (
    PASSING,
    Moment,
    UnreadValues,
    first_completed,
    gradients,
)
from qsync_fx.formats import FP32
from qsync_fx.predictor.memory.backward import READS, computed_in
from qsync_fx.predictor.memory.buffers import convolves, whole
from qsync_fx.predictor.model.model_graph import ModelOperator, StateNames


class NormGradients:
    """Lower bound on the bytes written while a norm passes a gradient on.

    A norm reads its incoming gradient twice: to reduce it, and to pass it on with the reduced
    values. Along a residual stream this gradient depends on all downstream products and gates. If a
    reading needs more than `READS` buffers, the compiler materializes the gradient first, in FP32.
    The same kernel writes the gradient of the product before the norm, copies of the product's
    quantized factors, and the converted gradient of a later weight. All of them are live at once,
    with their sources.

    The minimum number of sources follows from the graph and from which factors are scaled. It is
    not valid if a downstream gradient is materialized (`ReadCounts.materialized`), and a written
    buffer may reuse the memory of an equally large one; the bound is then 0 for that buffer.

    Args:
        saved: bound on the saved tensors.
        unread: tensors with a later use, by moment.
    """

    def __init__(self, saved: SavedTensorsBound, unread: UnreadValues) -> None:
        self.graph, self._forward = saved.graph, saved.passes[0].forward
        self._sources = GradientSources(saved, unread)

    @cached_property
    def norms(self) -> Mapping[int, Norm]:
        """Norms with a bound, by index."""
        return {norm.index: norm for norm in self._sources.norms()}

    def expression(self, counts: ReadCounts, where: Where, index: int) -> Expression:
        """Return a lower bound on the bytes written while a norm passes a gradient on."""
        norm, result = self.norms[index], dict[int, float]()
        product = self.graph.operators[norm.product]
        for state, existing in where.states[norm.product].items():
            add(result, existing, self._copy_bytes(product, state))
        if norm.next_convolution is not None:
            for state, existing in where.states[norm.next_convolution].items():
                add(
                    result,
                    existing,
                    self._converted_bytes(self.graph.operators[norm.next_convolution], state),
                )
        scales = list(self._scales(where, norm))
        unless = [
            counts.materialized[value]
            for value in sorted(norm.sources.passed)
            if value in counts.materialized
        ]
        unless += [
            where.states[place].get(state, {})
            for place, several in norm.equal_sizes.items()
            for state in several
        ]
        once = norm.sources.count + 1 + norm.extras
        # The reduction reads it first; the kernel that passes it on also reads the reduced values.
        for many in (once, once + norm.extras):
            if (few := self._few(where, scales, READS + 1 - many)) is None:
                continue
            materialized = total((1.0, ONE), (-1.0, few), *((-1.0, item) for item in unless))
            add(
                result,
                where.program.at_least(materialized),
                self._forward.bytes(product.result, FP32.name),
            )
            if many > once:
                for size, states in self._narrow_gradient_states(product).items():
                    so = total(
                        (-1.0, ONE),
                        (1.0, materialized),
                        *((1.0, where.states[norm.product].get(item, {})) for item in states),
                    )
                    add(result, where.program.at_least(so), size)
        return result

    def _few(self, where: Where, scales: Sequence[Expression], least: int) -> Expression | None:
        """Return the indicator of fewer than `least` scales; None if that cannot be excluded."""
        if least <= 0:
            return {}
        missing = len(scales) - least + 1
        if missing <= 0 or missing > TOP:
            return None
        none = [one_where(total((1.0, ONE), (-1.0, scale))) for scale in scales]
        return added(where.program, none).reaches(missing)

    def _scales(self, where: Where, norm: Norm) -> Iterator[Expression]:
        """Yield indicators that product gradients come with the scale of a parameter, once each."""
        visited: set[int] = set()
        for index, place in sorted(norm.sources.products):
            for other, read in factors(self.graph.operators[index], self._forward).items():
                root = self._forward.root(read.value)
                if other == place or root in visited or not self._forward.given(root):
                    continue
                visited.add(root)
                states = where.states[index].items()
                yield total(
                    *(
                        (1.0, existing)
                        for state, existing in states
                        if scaled(read.wanted.get(state[0] or ""))
                    )
                )

    def _narrow_gradient_states(self, product: ModelOperator) -> Mapping[int, Sequence[StateNames]]:
        """Return the states by bytes of a product's incoming gradient, if narrower than FP32."""
        result: dict[int, list[StateNames]] = {}
        for state in product.costs:
            size = self._forward.bytes(product.result, computed_in(state[0])[0])
            if size < self._forward.bytes(product.result, FP32.name):
                result.setdefault(size, []).append(state)
        return result

    def _copy_bytes(self, product: ModelOperator, state: StateNames) -> int:
        """Return the bytes of copies of a product's scaled factors in the compute dtype.

        Only convolutions count: one kernel computes all of their gradients with these copies.
        """
        if not convolves(product):
            return 0
        # If another product reads the same value, it has made the copy, and the original is dead.
        alone = (
            read
            for read in factors(product, self._forward).values()
            if self._sources.is_read_by_one_product(read.value)
        )
        emulation_format = computed_in(state[0])[1]
        return sum(
            self._forward.bytes(item.value, emulation_format)
            for item in alone
            if scaled(item.wanted.get(state[0] or ""))
        )

    def _converted_bytes(self, convolution: ModelOperator, state: StateNames) -> int:
        """Return the bytes of a convolution's weight gradient that is converted to FP32."""
        weight, emulation_format = convolution.reads[1].value, computed_in(state[0])[1]
        result = self._forward.bytes(weight, emulation_format)
        return result if result < self._forward.bytes(weight, FP32.name) else 0


Key = TypeVar("Key")


class PlanStates:
    """States of a plan, as constants instead of expressions of choices."""

    def __init__(self, names: Sequence[StateNames]) -> None:
        self.program = LinearProgram()
        self.states: Sequence[Mapping[StateNames, Expression]] = [{state: ONE} for state in names]
        self.precisions: Sequence[Spread] = [{precision: ONE} for precision, _ in names]
        self.outputs: Sequence[Spread] = [{output: ONE} for _, output in names]


@dataclass(frozen=True)
class _LiveBytes:
    """Bytes that are live where an indicator is 1 and `unless` is 0."""

    size: int
    where: Expression
    unless: Expression


class PendingGradients:
    """Lower bound on the live sources of pending gradients.

    Args:
        saved: bound on the saved tensors.
        unread: tensors with a later use, by moment.
    """

    def __init__(self, saved: SavedTensorsBound, unread: UnreadValues) -> None:
        self._saved, self._unread = saved, unread
        self.graph, self._forward = saved.graph, saved.passes[0].forward
        self.norm_gradients = NormGradients(saved, unread)
        self._read_counts: tuple[Where, ReadCounts] | None = None
        self._cache: dict[Moment, Expression] = {}
        self._repeated = any(operator.repeated for operator in self.graph.operators)
        self._counted_elsewhere = {result.value for result in saved.results}
        self._gates = {gate.index: gate for gate in saved.gates}

    def of(
        self, plan_states: PlanStates, moment: Moment, above: float = 0.0, exact: bool = True
    ) -> float:
        """Return the bound in bytes under a plan.

        The result may be lower if it is at most `above`, or if not `exact`, which is faster.
        """
        result, program = self.expression(plan_states, moment), plan_states.program
        if constant(result) is not None or program.most(result) <= above:
            return result.get(CONSTANT, 0.0)
        before, program.costs = program.costs, [0.0] * len(program.costs)
        for variable, factor in result.items():
            if variable != CONSTANT:
                program.costs[variable] = factor / _UNIT
        solved = program.solve(0.0, INFINITY, relaxed=True)
        if solved.values is None or (exact and solved.between(program.choices).any()):
            solved = program.solve(0.0, INFINITY)
        program.costs = before
        return result.get(CONSTANT, 0.0) + solved.objective * _UNIT

    def expression(self, where: Where, moment: Moment) -> Expression:
        """Return the bound in bytes as an expression, valid when minimized over its variables."""
        if self._repeated:
            return {}
        if self._read_counts is None or self._read_counts[0] is not where:
            self._read_counts, self._cache = (
                (where, ReadCounts(self._saved, self._unread, where)),
                {},
            )
        if moment not in self._cache:
            self._cache[moment] = self._expression(self._read_counts[1], where, moment)
        return self._cache[moment]

    def _expression(self, counts: ReadCounts, where: Where, moment: Moment) -> Expression:
        program, place = where.program, moment[0]
        existing: dict[int, Expression] = {}
        read: dict[int, Expression] = {}
        result: dict[int, float] = {}
        for value in self._values_with_gradients(counts, place):
            now = read[value] = self._read(counts, value, moment, existing)
            if not any(now.values()):
                existing[value] = {}
                continue
            downstream = [index for index in counts.incoming[value] if index > place or index < 0]
            written = counts.materialized.get(value, {})
            if len(downstream) < len(counts.incoming[value]):
                written = counts.materialized_from(value, downstream) if written else {}
            existing[value] = program.any_of([now], written) if written else now
            if written:
                both = (
                    written
                    if constant(now) == 1
                    else program.any_of([written], total((1.0, ONE), (-1.0, now)))
                )
                self._add_materialized(result, where, value, both)
            self._add_live(
                result,
                program,
                existing[value],
                self._gradients(where, value, [index for index in downstream if index > place]),
            )
        for value, now in read.items():
            producer = self._forward.made_by(value)
            if (
                producer is not None
                and self.graph.places[producer.id] > place
                and any(now.values())
            ):
                self._add_live(
                    result,
                    program,
                    now,
                    self._gate(counts, where, self.graph.places[producer.id], moment),
                )
        if moment[1] == PASSING:
            add(result, self.norm_gradients.expression(counts, where, place), 1.0)
        return result

    def _values_with_gradients(self, counts: ReadCounts, place: int) -> Iterator[int]:
        """Yield the values with gradients from operators after a position, in program order."""
        values = (
            value
            for value, into in counts.incoming.items()
            if any(index > place or index < 0 for index in into)
        )
        return iter(sorted(values, key=self._place))

    def _place(self, value: int) -> int:
        producer = self._forward.made_by(value)
        return -1 if producer is None else self.graph.places[producer.id]

    def _read(
        self, counts: ReadCounts, value: int, moment: Moment, existing: Mapping[int, Expression]
    ) -> Expression:
        """Return the indicator that a gradient computed from a value's gradient is pending."""
        producer = self._forward.made_by(value)
        if producer is None:
            return {}
        index = self.graph.places[producer.id]
        if index <= moment[0]:
            return (
                ONE
                if index < first_completed(moment) and self._unread.gradient_is_read[index]
                else {}
            )
        if self._unread.materializes_gradients(producer) or norms(producer):
            return {}
        passed = [
            existing.get(self._forward.root(read.value), {})
            for read in producer.reads
            if read.gradient
            and not self._forward.given(read.value)
            and not self._unread.reduces_gradient(producer, read)
        ]
        return counts.program.any_of(passed)

    def _add_materialized(
        self, result: dict[int, float], where: Where, value: int, both: Expression
    ) -> None:
        """Add a materialized gradient, in the format of the value."""
        sizes = {fmt: self._forward.bytes(value, fmt) for fmt in where.outputs[self._place(value)]}
        least = min(sizes.values())
        add(result, both, least)
        for fmt, current in where.outputs[self._place(value)].items():
            if sizes[fmt] > least:
                wide = where.program.any_of([current], total((1.0, ONE), (-1.0, both)))
                add(result, wide, sizes[fmt] - least)

    def _add_live(
        self,
        result: dict[int, float],
        program: LinearProgram,
        existing: Expression,
        items: Iterable[_LiveBytes],
    ) -> None:
        """Add bytes that are live where an indicator is 1."""
        gone = {} if constant(existing) == 1 else total((1.0, ONE), (-1.0, existing))
        for item in items:
            if constant(item.unless) != 0:
                # Several exceptions can be active at once, so that the rest is not an indicator.
                rest = program.at_least(total((1.0, item.where), (-1.0, item.unless), (-1.0, gone)))
            else:
                rest = existing if constant(item.where) == 1 else program.any_of([item.where], gone)
            add(result, rest, item.size)

    def _gradients(
        self, where: Where, value: int, downstream: Sequence[int]
    ) -> Iterator[_LiveBytes]:
        """Yield the gradients of a value that products have written."""
        for index in downstream:
            product = self.graph.operators[index]
            if not self._forward.multiplies(product):
                continue
            for place in gradients(product, self._forward):
                read = product.reads[place].value
                if self._forward.root(read) == value:
                    sizes = {
                        state: self._forward.bytes(read, computed_in(state[0])[1])
                        for state in product.costs
                    }
                    yield from self._items(where.states[index], sizes)

    def _gate(
        self, counts: ReadCounts, where: Where, index: int, moment: Moment
    ) -> Iterator[_LiveBytes]:
        """Yield the bytes that a gate saves: result if a product saves it, else mask or sources."""
        saved = counts.recomputation.saved_result(index)
        operator = self.graph.operators[index]
        if saved is None or operator.result in self._counted_elsewhere:
            return
        formats = self._saved.formats_of(index, operator.result)
        assert formats is not None
        product = self._product(counts, operator, moment)
        floor = whole(self.graph.values[operator.result].numel) if product is not None else 0
        sizes = {state: self._forward.bytes(operator.result, formats[state]) for state in saved}
        yield _LiveBytes(floor, ONE, self._mask_is_counted(where, index, moment))
        for size, least in _levels(sizes, floor):
            yield _LiveBytes(size, total(*((1.0, saved[state]) for state in least)), {})
        if product is not None:
            otherwise = total(
                *((1.0, existing) for existing in saved.values()),
                (1.0, counts.recomputation.not_recomputable(operator.result)),
            )
            yield from self._product_result(counts, where, product, floor, otherwise)

    def _mask_is_counted(self, where: Where, index: int, moment: Moment) -> Expression:
        """Return the indicator that a gate's mask counts with the unread saved tensors."""
        gate, readers = self._gates.get(index), self._unread.of(moment)
        counts = gate is not None and (
            index in readers.all_unread or index in readers.values_unread
        )
        return gate.mask_indicator(where, {}) if gate is not None and counts else {}

    def _product_result(
        self, counts: ReadCounts, where: Where, product: int, floor: int, otherwise: Expression
    ) -> Iterator[_LiveBytes]:
        """Yield the bytes beyond `floor` of the product result that recomputes a gate.

        They do not count where `otherwise` is 1.
        """
        saving_operator = counts.recomputation.saving_operator(product)
        assert saving_operator is not None
        formats = self._saved.formats_of(saving_operator, product)
        assert formats is not None
        outputs = where.outputs[self._place(product)]
        by_state = {
            state: self._forward.bytes(product, formats[state])
            for state in where.states[saving_operator]
        }
        by_output = {fmt: self._forward.bytes(product, fmt) for fmt in outputs}
        # The result is saved in the narrower of both formats.
        before = floor
        for least in sorted({*by_state.values(), *by_output.values()}):
            if before < least <= min(max(by_state.values()), max(by_output.values())):
                wide = _sum_of(
                    where.states[saving_operator],
                    [s for s, size in by_state.items() if size >= least],
                )
                narrow = _sum_of(outputs, [fmt for fmt, size in by_output.items() if size < least])
                yield _LiveBytes(least - before, wide, total((1.0, otherwise), (1.0, narrow)))
                before = least

    @staticmethod
    def _items(
        existing: Mapping[Key, Expression], sizes: Mapping[Key, int]
    ) -> Iterator[_LiveBytes]:
        for size, least in _levels({key: sizes[key] for key in existing}, 0):
            yield _LiveBytes(size, _sum_of(existing, least), {})

    def _product(self, counts: ReadCounts, gate: ModelOperator, moment: Moment) -> int | None:
        """Return the product result from which a gate, and no other gate, is recomputed, if any.

        It has the size of the gate's result. The operator that saves it has run its backward pass,
        so that it counts once.
        """
        readers = self._unread.of(moment)
        size = whole(self.graph.values[gate.result].numel)
        values = [self._forward.root(read.value) for read in gate.reads]
        for value in values:
            producer = self._forward.made_by(value)
            if (
                producer is None
                or counts.recomputation.products(value)
                or len(counts.recomputation.readers(value)) != 1
            ):
                continue
            if not self._forward.multiplies(producer):
                values += [self._forward.root(read.value) for read in producer.reads]
                continue
            saving_operator = counts.recomputation.saving_operator(value)
            if (
                saving_operator is None
                or saving_operator in readers.all_unread
                or saving_operator in readers.values_unread
                or saving_operator == moment[0]
            ):
                continue
            available = self._saved.formats_of(saving_operator, value) is not None
            if available and whole(self.graph.values[value].numel) == size:
                return value
        return None


_UNIT = 1e6
"""Bytes per unit of the objective, so that factors of a program have similar size."""


def _levels(sizes: Mapping[Key, int], before: int) -> Iterator[tuple[int, Sequence[Key]]]:
    """Yield the increments between ascending sizes, with the keys that are at least as large."""
    for size in sorted(set(sizes.values())):
        if size > before:
            yield size - before, [key for key, other in sizes.items() if other >= size]
            before = size


def _sum_of(spread: Mapping[Key, Expression], keys: Sequence[Key]) -> Expression:
    """Return the indicator that the state is one of several keys."""
    return ONE if len(keys) == len(spread) else total(*((1.0, spread[key]) for key in keys))

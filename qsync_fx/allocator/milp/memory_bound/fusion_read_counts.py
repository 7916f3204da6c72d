"""Bounds on the number of buffers from which gradients are computed, under any plan.

A compiler materializes a gradient that would read more than `READS` buffers, and computes further
gradients from it. `ReadCounts` bounds the reads from above, as linear expressions: an integer
variable states that a gradient is materialized, and only a sufficiently large count admits 1.
`GradientSources` bounds the reads of the gradients at norms from below, if no downstream gradient
is materialized: each product has written a separate gradient, and each gate saves a separate tensor
(its result, a mask, or the sources for its recomputation, such as the statistics of a norm that
only this gate follows).

Invariant: if integer variables match the compiler's decisions, `ReadCounts.sources` is an upper
bound; sources that are distinct in `GradientSource` are distinct under any plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from qsync_fx.allocator.milp.linear_program import Expression, constant, total
from qsync_fx.allocator.milp.memory_bound.recomputation import MaterializedGradients, Recomputation
from qsync_fx.allocator.milp.memory_bound.relu_masks import Where, scaled
from qsync_fx.allocator.milp.memory_bound.saved_bound import SavedTensorsBound, factors, norms
from qsync_fx.allocator.milp.memory_bound.unary_encoding import (
    TOP,
    Count,
    added,
    exactly,
    least,
    one_or_more,
    where,
    where_so,
)
from qsync_fx.allocator.milp.memory_bound.unread_values import UnreadValues, gradients
from qsync_fx.formats import FP32
from qsync_fx.predictor.memory.backward import READS, computed_in
from qsync_fx.predictor.memory.buffers import GATES, HEAVY, attends, convolves, pools, whole
from qsync_fx.predictor.model.model_graph import ModelOperator, StateNames


class ReadCounts:
    """Upper bounds on the reads of gradients.

    Args:
        saved: bound on the saved tensors.
        unread: tensors with a later use, by moment.
        where: indicators of operator states.

    Attributes:
        recomputation: rematerialization of values.
        incoming: maximum reads of a value's gradient, by value and source operator, in the order of
            the backward pass; -1 for model outputs.
        materialized: indicator that a value's gradient is materialized, by value; without values
            for which it never is.
    """

    def __init__(self, saved: SavedTensorsBound, unread: UnreadValues, where: Where) -> None:
        self.recomputation = Recomputation(saved, unread, where)
        self._unread, self._where = unread, where
        self.graph, self._forward, self.program = (
            saved.graph,
            saved.passes[0].forward,
            where.program,
        )
        self.incoming: dict[int, dict[int, Count]] = {}
        self.materialized: dict[int, Expression] = {}
        self._materialized_from: dict[tuple[int, tuple[int, ...]], Expression] = {}
        self._materialized_gradients = MaterializedGradients(
            saved, unread, where, self.recomputation
        )
        self._count_reads()

    def sources(self, value: int) -> Count:
        """Return the maximum number of buffers from which the gradient of a value is computed."""
        incoming = list(self.incoming[value].values())
        every = added(self.program, incoming)
        written = self.materialized.get(value)
        if written is None:
            return every
        rest = added(self.program, [exactly(1), *incoming[1:]])
        return least(self.program, [every, exactly(READS), where_so(written, rest)])

    def materialized_from(self, value: int, downstream: Iterable[int]) -> Expression:
        """Return the indicator that a value's gradient from some operators is materialized.

        The result is empty if it never is.
        """
        key = value, tuple(downstream)
        if key not in self._materialized_from:
            enough = added(self.program, [self.incoming[value][index] for index in key[1]]).reaches(
                TOP
            )
            result: Expression = {}
            if constant(enough) != 0:
                result = {self.program.variable(full=True): 1.0}
                self.program.row(total((1.0, result), (-1.0, enough)), most=0.0)
            self._materialized_from[key] = result
        return self._materialized_from[key]

    def _count_reads(self) -> None:
        unread, forward = self._unread, self._forward
        for read in self.graph.outputs:
            if unread.differentiated(read.value):
                self._add(forward.root(read.value), -1, exactly(1))
        for index, operator in reversed(list(enumerate(self.graph.operators))):
            value = operator.result
            if value not in self.incoming or forward.root(value) != value:
                continue
            if written := self.materialized_from(value, self.incoming[value]):
                self.materialized[value] = written
                self._materialized_gradients.add(value, written, self.incoming, self.materialized)
            outgoing = added(self.program, [self.sources(value), self._own_reads(index, operator)])
            passed: set[int] = set()
            for place, read in enumerate(operator.reads):
                root = forward.root(read.value)
                if (
                    not read.gradient
                    or forward.given(read.value)
                    or not unread.differentiated(read.value)
                ):
                    continue
                if unread.materializes_gradients(operator) or unread.reduces_gradient(
                    operator, read
                ):
                    self._add(root, index, self._product(index, operator, place))
                elif root not in passed:
                    passed.add(root)
                    self._add(root, index, outgoing)

    def _add(self, value: int, index: int, many: Count) -> None:
        into = self.incoming.setdefault(value, {})
        into[index] = added(self.program, [into[index], many]) if index in into else many

    def _product(self, index: int, operator: ModelOperator, place: int) -> Count:
        """Return the reads of a product's gradient: itself and the scale of the other factor."""
        if not self._forward.multiplies(operator):
            return exactly(2)
        wanted = [
            read.wanted
            for index, read in factors(operator, self._forward).items()
            if index != place
        ]
        also = [
            existing
            for state, existing in self._where.states[index].items()
            if any(scaled(formats.get(state[0] or "")) for formats in wanted)
        ]
        return added(self.program, [exactly(1), where(total(*((1.0, item) for item in also)))])

    def _own_reads(self, index: int, operator: ModelOperator) -> Count:
        """Return the reads that an operator adds to its own gradient for its operands."""
        if self._unread.materializes_gradients(operator):
            return exactly(0)
        saved = self.recomputation.saved_result(index)
        if saved is None:
            return exactly(self._unread.extra_reads(operator))
        existing = total(*((1.0, where) for where in saved.values()))
        several = [
            where_so(existing, exactly(1)),
            one_or_more(self.recomputation.read_count(operator.result)),
        ]
        if (downstream := self._gate_after(operator.result)) is not None:
            gate, passed = downstream
            later = self.recomputation.saved_result(gate)
            assert later is not None
            # A later gate that is recomputed from this value already reads its sources. Reads are
            # new only if that gate saves its result, the value may block it, or a gradient between
            # is materialized.
            new = [*later.values(), self.recomputation.blocks_recomputation(operator.result)]
            new += [
                self.materialized[value]
                for value in (*passed, operator.result)
                if value in self.materialized
            ]
            # Or if the later gate reads a copy of the value that a product saves in another format.
            producer = self._forward.made_by(passed[0]) if passed else None
            first = gate if producer is None else self.graph.places[producer.id]
            new.append(
                self._materialized_gradients.is_materialized(
                    operator.result, first, converted_only=True
                )
            )
            several.append(Count(0, [total(*((1.0, item) for item in new))] * TOP))
        return least(self.program, several)

    def _gate_after(self, value: int) -> tuple[int, Sequence[int]] | None:
        """Return the gate after a value and elementwise operators, and the values between."""
        for index in self.recomputation.readers(value):
            passed: list[int] = []
            now, place = value, index
            while not self._unread.materializes_gradients(
                operator := self.graph.operators[place]
            ) and not norms(operator):
                flows = [
                    read
                    for read in operator.reads
                    if self._forward.root(read.value) == now and read.gradient
                ]
                if not flows or any(
                    self._unread.reduces_gradient(operator, read) for read in flows
                ):
                    break
                if self.recomputation.saved_result(place) is not None:
                    return place, passed
                now = operator.result
                if self._forward.root(now) != now or len(self.recomputation.readers(now)) != 1:
                    break
                passed.append(now)
                (place,) = self.recomputation.readers(now)
        return None


_ADDS = ("add", "sub", "rsub")
"""Operators that pass their gradient to each operand unchanged, and save no tensor."""
_OF_ROWS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class GradientSource:
    """Minimal sources of the gradient of a value.

    Attributes:
        products: products that have written a part of it, with the argument index.
        gates: indices of the gates that it has passed.
        passed: values whose gradients it is computed from, including its own.
    """

    products: Set[tuple[int, int]]
    gates: Set[int]
    passed: Set[int]

    @property
    def count(self) -> int:
        return len(self.products) + len(self.gates)


@dataclass(frozen=True)
class Norm:
    """Norm of a product's result.

    Attributes:
        index, product: indices of the norm and the product.
        sources: sources of its incoming gradient.
        extras: minimum number of statistics that it saves.
        next_convolution: index of the convolution whose weight gradient the same kernel converts;
            None if unknown.
        equal_sizes: states, by operator index, in which a buffer as large as the written one may be
            read.
    """

    index: int
    product: int
    sources: GradientSource
    extras: int
    next_convolution: int | None
    equal_sizes: Mapping[int, Sequence[StateNames]]


class GradientSources:
    """Lower bounds on the sources of gradients at norms.

    Args:
        saved: bound on the saved tensors.
        unread: tensors with a later use, by moment.
    """

    def __init__(self, saved: SavedTensorsBound, unread: UnreadValues) -> None:
        self._saved, self._unread = saved, unread
        self.graph, self._forward = saved.graph, saved.passes[0].forward
        self._cache: dict[int, GradientSource | None] = {}

    def norms(self) -> Iterator[Norm]:
        """Yield the norms with known sources, for a single graph without recomputed operators."""
        kinds = {(operator.repeated, operator.graph) for operator in self.graph.operators}
        if len(kinds) > 1 or any(repeated for repeated, _ in kinds):
            return
        for index, operator in enumerate(self.graph.operators):
            if (
                norms(operator)
                and not operator.row.startswith(_OF_ROWS)
                and self._unread.has_gradient(operator.result)
            ):
                result = self._norm(index, operator)
                if result is not None:
                    yield result

    def is_read_by_one_product(self, value: int) -> bool:
        """Return whether exactly one read of a value is by a product."""
        root, products = (
            self._forward.root(value),
            filter(self._forward.multiplies, self.graph.operators),
        )
        return (
            sum(self._forward.root(read.value) == root for item in products for read in item.reads)
            == 1
        )

    def _norm(self, index: int, operator: ModelOperator) -> Norm | None:
        operand, *weights = (read.value for read in operator.reads)
        value = self._forward.root(operand)
        producer, only = self._forward.made_by(value), self._readers[value] == [index]
        if producer is None or not (
            self._forward.multiplies(producer) and only and operator.reads[0].gradient
        ):
            return None
        product = self.graph.places[producer.id]
        if (
            attends(producer)
            or product in self._forward.matrices
            or not gradients(producer, self._forward)
        ):
            return None
        if product != index - 1:
            return None  # another kernel may be between the norm and the product
        keeps = any(
            result.index == index and result.value == value for result in self._saved.results
        )
        origin, extras = self._sources_of(operator.result), _extras(operator)
        if origin is None or not (keeps and extras and all(map(self._forward.given, weights))):
            return None
        origin = GradientSource(
            origin.products,
            frozenset(g for g in origin.gates if self._has_distinct_source(g, index)),
            origin.passed,
        )
        equal = self._equal_size_states(self._forward.bytes(value, FP32.name), origin, value)
        return (
            None
            if equal is None
            else Norm(index, product, origin, extras, self._next_convolution(index), equal)
        )

    def _next_convolution(self, norm: int) -> int | None:
        """Return the next convolution with gradients after a norm, if it owns its weight."""
        for index, operator in enumerate(self.graph.operators[norm + 1 :], norm + 1):
            if not self._unread.has_gradient(
                operator.result
            ) or not self._unread.materializes_gradients(operator):
                continue
            read = operator.reads[1] if convolves(operator) else None
            if read is None or not read.gradient or not self._forward.given(read.value):
                return None
            root = self._forward.root(read.value)
            owned = (
                root == read.value
                and self._readers[root] == [index]
                and self.graph.values[root].own == FP32.name
            )
            return index if owned and self.graph.values[root].source == "parameter" else None
        return None

    def _sources_of(self, value: int) -> GradientSource | None:
        """Return the sources of a value's gradient; None if other operators may be involved."""
        if value not in self._cache:
            self._cache[value] = self._search_sources(value)
        return self._cache[value]

    def _search_sources(self, value: int) -> GradientSource | None:
        products, gates, passed = set[tuple[int, int]](), set[int](), {value}
        if value in self._returned:
            return None
        for index in self._readers[value]:
            operator = self.graph.operators[index]
            reads = [read for read in operator.reads if self._forward.root(read.value) == value]
            if not any(read.gradient for read in reads) or not self._unread.has_gradient(
                operator.result
            ):
                continue
            if self._forward.multiplies(operator):
                places = gradients(operator, self._forward)
                if attends(operator) or index in self._forward.matrices:
                    return None
                products |= {
                    (index, p)
                    for p in places
                    if self._forward.root(operator.reads[p].value) == value
                }
                continue
            gate = self._is_gate(operator)
            if not gate and (
                operator.row not in _ADDS
                or any(self._unread.reduces_gradient(operator, read) for read in reads)
            ):
                return None
            downstream = self._sources_of(operator.result)
            if downstream is None or self._forward.root(operator.result) != operator.result:
                return None
            products |= downstream.products
            gates |= downstream.gates | ({index} if gate else set())
            passed |= downstream.passed
        return GradientSource(products, gates, passed)

    def _is_gate(self, operator: ModelOperator) -> bool:
        """Return whether an operator is a gate that saves its result or a replacement."""
        gate = operator.row in GATES and list(self._saved.saved(operator)) == [operator.result]
        return (
            gate
            and self._saved.formats_of(self.graph.places[operator.id], operator.result) is not None
        )

    def _has_distinct_source(self, gate: int, but: int) -> bool:
        """Return whether a gate saves a tensor that no other gate on the path and no norm saves."""
        before = self._norms_before(gate)
        if before != {but}:
            return bool(before)
        producer = self._forward.made_by(self.graph.operators[gate].reads[0].value)
        if producer is None or producer.row not in _ADDS:
            return False
        # Further sources of its recomputation: a gate's result, or its sources.
        others = (self._forward.made_by(read.value) for read in producer.reads)
        return any(
            other is not None
            and self._is_gate(other)
            and self._norms_before(self.graph.places[other.id])
            for other in others
        )

    def _norms_before(self, gate: int) -> Set[int]:
        """Return the norms whose statistics are sources of the recomputation of only this gate."""
        result: set[int] = set()
        left = [read.value for read in self.graph.operators[gate].reads]
        while left:
            value = self._forward.root(left.pop())
            producer = self._forward.made_by(value)
            if producer is None or len(self._readers[value]) != 1 or value in self._returned:
                continue
            if norms(producer) and _extras(producer):
                result.add(self.graph.places[producer.id])
            elif producer.row in _ADDS:
                left += [read.value for read in producer.reads]
        return result

    def _equal_size_states(
        self, size: int, origin: GradientSource, operand: int
    ) -> Mapping[int, Sequence[StateNames]] | None:
        """Return where a buffer of a size may be read, whose memory the written one can reuse.

        Returns None if unknown.
        """
        result: defaultdict[int, list[StateNames]] = defaultdict(list)
        for index, place in sorted(origin.products):
            product = self.graph.operators[index]
            value = product.reads[place].value
            result[index] += [
                state
                for state in product.costs
                if self._forward.bytes(value, computed_in(state[0])[1]) == size
            ]
        values, left = set[int](), [operand, *origin.passed]
        while left:
            value = self._forward.root(left.pop())
            producer = self._forward.made_by(value)
            if value in values or producer is None:
                continue
            values.add(value)
            index = self.graph.places[producer.id]
            sizes = {*_extra_bytes(producer), whole(self.graph.values[value].numel)}
            if producer.row in HEAVY or size in sizes:
                return None
            result[index] += [
                state for state in producer.costs if self._forward.bytes(value, state[1]) == size
            ]
            for reader in (index, *self._readers[value]):
                result[reader] += self._reads_of(reader, value, size)
            if not self._forward.multiplies(producer) and not pools(producer):
                left += [read.value for read in producer.reads]
        return {
            index: list(dict.fromkeys(states)) for index, states in sorted(result.items()) if states
        }

    def _reads_of(self, index: int, value: int, size: int) -> Iterator[StateNames]:
        """Yield the states in which an operator materializes or saves a value in `size` bytes."""
        operator = self.graph.operators[index]
        name = self.graph.values[value].name
        producer = self._forward.made_by(value)
        # Other operators save a product's result in at most its own width.
        owned = producer is not None and self._forward.multiplies(producer)
        for state, cost in operator.costs.items():
            formats: set[str] = set()
            if not owned:
                formats |= {
                    settings
                    for entry, settings in cost.saved
                    if entry == name and settings and not settings.startswith("extra")
                }
            if self._forward.multiplies(operator):
                reads = [read for read in operator.reads if self._forward.root(read.value) == value]
                formats |= {
                    fmt for read in reads if (fmt := read.wanted.get(state[0] or "")) is not None
                }
            if any(self._forward.bytes(value, fmt) == size for fmt in formats):
                yield state

    @cached_property
    def _readers(self) -> Mapping[int, Sequence[int]]:
        result: defaultdict[int, list[int]] = defaultdict(list)
        for index, operator in enumerate(self.graph.operators):
            for value in dict.fromkeys(self._forward.root(read.value) for read in operator.reads):
                result[value].append(index)
        return result

    @cached_property
    def _returned(self) -> Set[int]:
        return {self._forward.root(read.value) for read in self.graph.outputs}


def _extras(operator: ModelOperator) -> int:
    """Return the minimum number of statistics that a norm saves."""
    return min(
        (
            sum(settings.startswith("extra") for _, settings in cost.saved)
            for cost in operator.costs.values()
        ),
        default=0,
    )


def _extra_bytes(operator: ModelOperator) -> Set[int]:
    costs = operator.costs.values()
    return {
        whole(size)
        for cost in costs
        for (_, settings), size in cost.saved.items()
        if settings.startswith("extra")
    }

"""Rematerialization of gate results, and gradients that must be materialized, under any plan.

`Recomputation` states as linear expressions whether a value can be recomputed in the backward pass,
and from how many buffers at most. A gate saves its own result if a product saves it in the same
format. Otherwise the result is recomputed from saved tensors, or, if one of its sources is
materialized and saved in a scaled format only, the gate saves a mask of one byte per element.
`MaterializedGradients` adds rows for gradients that a compiler certainly materializes.

Invariant: with integer choices, a recomputed value reads at most `read_count` buffers, values
outside `not_recomputable` can be recomputed, and rows force only gradients that are materialized.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from qsync_fx.allocator.milp.linear_program import ONE, Expression, constant, total
from qsync_fx.allocator.milp.memory_bound.relu_masks import Where, scaled
from qsync_fx.allocator.milp.memory_bound.saved_bound import SavedTensorsBound
from qsync_fx.allocator.milp.memory_bound.unary_encoding import (
    Count,
    added,
    exactly,
    least,
    one_or_more,
    where_so,
)
from qsync_fx.allocator.milp.memory_bound.unread_values import UnreadValues, extra_count
from qsync_fx.predictor.memory.backward import READS
from qsync_fx.predictor.memory.buffers import GATES, attends, pools
from qsync_fx.predictor.model.model_graph import ModelOperator, Name, StateNames


class Recomputation:
    """Rematerialization of values in the backward pass.

    Args:
        saved: bound on the saved tensors.
        unread: tensors with a later use, by moment.
        where: indicators of operator states.
    """

    def __init__(self, saved: SavedTensorsBound, unread: UnreadValues, where: Where) -> None:
        self._saved, self._unread, self._where = saved, unread, where
        self.graph, self._forward, self.program = (
            saved.graph,
            saved.passes[0].forward,
            where.program,
        )
        self._products: dict[int, list[int]] = {}
        self._saving_operators: dict[int, list[int]] = {}
        for index, operator in enumerate(self.graph.operators):
            if self._forward.multiplies(operator):
                for value in {self._forward.root(read.value) for read in operator.reads}:
                    self._products.setdefault(value, []).append(index)
            for value in saved.saved(operator):
                self._saving_operators.setdefault(value, []).append(index)
        self._readers: dict[int, list[int]] = {}
        for index, operator in enumerate(self.graph.operators):
            for value in {self._forward.root(read.value) for read in operator.reads}:
                self._readers.setdefault(value, []).append(index)
        self._returned = {self._forward.root(read.value) for read in self.graph.outputs}
        self._read_counts = self._count_reads()
        self._not_recomputable = self._find_not_recomputable()

    def products(self, value: int) -> Sequence[int]:
        """Return the indices of the products that read a value."""
        return self._products.get(value, ())

    def readers(self, value: int) -> Sequence[int]:
        """Return the indices of the operators that read a value."""
        return self._readers.get(value, ())

    def saving_operator(self, value: int) -> int | None:
        """Return the only operator that saves a product's result, if no product reads the result.

        The result then has one saved format.
        """
        operators = self._saving_operators.get(value, ())
        return operators[0] if len(operators) == 1 and not self.products(value) else None

    def read_count(self, value: int) -> Count:
        """Return the maximum number of buffers from which a value is recomputed."""
        return self._read_counts[value]

    def not_recomputable(self, value: int) -> Expression:
        """Return the indicator that a value may not be recomputable, as a source is not saved."""
        return self._not_recomputable[value]

    def blocks_recomputation(
        self, value: int, not_recomputable: Sequence[Expression] | None = None
    ) -> Expression:
        """Return the indicator that a value blocks the recomputation of its dependents.

        That is so if it is not saved, and is either materialized or not recomputable itself.
        """
        producer = self._forward.made_by(value)
        assert producer is not None
        if self._forward.multiplies(producer):
            return {} if self.saving_operator(value) is not None else ONE
        others = [
            index
            for index in self._saving_operators.get(value, ())
            if index not in self.products(value) and self.saved_result(index) is None
        ]
        pooled = [index for index in self.readers(value) if pools(self.graph.operators[index])]
        if others or pooled or len(self.products(value)) > 1 or value in self._returned:
            return ONE
        scaled = self._only_scaled(value)
        if self.products(value) and not self._has_one_saved_format(value):
            return ONE
        unsaved = total(
            (1.0, scaled),
            (
                1.0,
                (self._not_recomputable if not_recomputable is None else not_recomputable)[value],
            ),
        )
        return self.program.at_most(
            [unsaved, total((1.0, ONE), (-1.0, self._is_saved_unconverted(value)))]
        )

    def is_saved(self, value: int, fmt: Name) -> Expression:
        """Return the indicator that a product saves a value in a format."""
        wants: list[Expression] = []
        for index in self.products(value):
            formats = self._saved.formats_of(index, value)
            if formats is not None and self._reads_full_value(index, value):
                result = [
                    where
                    for state, where in self._where.states[index].items()
                    if formats[state] == fmt
                ]
                wants.append(total(*((1.0, where) for where in result)))
        if len(wants) <= 1:
            return wants[0] if wants else {}
        none = self.program.all_of([total((1.0, ONE), (-1.0, want)) for want in wants])
        return total((1.0, ONE), (-1.0, none))

    def saved_result(self, index: int) -> Mapping[StateNames, Expression] | None:
        """Return by state the indicator that a gate has it and a product saves the gate's result.

        The saved format is the one that the gate reads. Returns None for operators that are no
        gate.
        """
        operator = self.graph.operators[index]
        formats = self._saved.formats_of(index, operator.result)
        gate = operator.row in GATES and list(self._saved.saved(operator)) == [operator.result]
        if not gate or formats is None:
            return None
        return {
            state: self.program.all_of([where, self.is_saved(operator.result, formats[state])])
            for state, where in self._where.states[index].items()
        }

    def _find_not_recomputable(self) -> Sequence[Expression]:
        """Return by value the indicator that it may not be recomputable."""
        matches: list[Expression] = [ONE] * len(self.graph.values)
        for operator in self.graph.operators:
            result = operator.result
            if (
                self._forward.multiplies(operator)
                or self._unread.materializes_gradients(operator)
                or result in self._saved.not_recomputable
            ):
                continue
            used = {self._forward.root(read.value) for read in operator.reads} | set(
                self._saved.saved(operator)
            )
            parts = [
                self.blocks_recomputation(value, matches)
                for value in self._unread.computed_values(sorted(used - {result}))
            ]
            matches[result] = self.program.at_most([total(*((1.0, part) for part in parts))])
        return matches

    def _count_reads(self) -> Sequence[Count]:
        """Return by value the maximum number of buffers from which it is recomputed."""
        forward, unread = self._forward, self._unread
        matches: list[Count] = [exactly(1)] * len(self.graph.values)
        for operator in self.graph.operators:
            result = operator.result
            if forward.multiplies(operator) or result in self._saved.not_recomputable:
                continue
            reads = {forward.root(read.value) for read in operator.reads}
            used = sorted(
                unread.computed_values((reads | set(self._saved.saved(operator))) - {result})
            )
            read_count = added(
                self.program,
                [
                    exactly(extra_count(operator)),
                    *(self._part(value, matches[value]) for value in used),
                ],
            )
            cuts = [
                where_so(self._only_scaled(value), exactly(1)) for value in used if value in reads
            ]
            matches[result] = least(self.program, [read_count, *cuts])
        return matches

    def _part(self, value: int, recomputed: Count) -> Count:
        """Return the number of buffers that a value contributes to the recomputation of another."""
        producer = self._forward.made_by(value)
        assert producer is not None
        if self._forward.multiplies(producer):
            return exactly(1 if self.saving_operator(value) is not None else 2)
        if (
            len(self.products(value)) > 1
            or self._unread.materializes_gradients(producer)
            or value in self._saved.not_recomputable
        ):
            return exactly(max(2, self._unread.recomputation_reads[value]))
        return least(
            self.program,
            [where_so(self._is_saved_unconverted(value), exactly(1)), one_or_more(recomputed)],
        )

    def _is_saved_unconverted(self, value: int) -> Expression:
        """Return the indicator that a product saves a value in its output format."""
        producer = self._forward.made_by(value)
        assert producer is not None
        live = self._where.outputs[self.graph.places[producer.id]].items()
        is_saved = [self.program.all_of([where, self.is_saved(value, fmt)]) for fmt, where in live]
        return total(*((1.0, item) for item in is_saved))

    def _has_one_saved_format(self, value: int) -> bool:
        """Return whether the saved format of the only product that reads a value is known."""
        (index,) = self.products(value)
        reads = [
            read
            for read in self.graph.operators[index].reads
            if self._forward.root(read.value) == value
        ]
        return (
            self._saved.formats_of(index, value) is not None
            and len(reads) == 1
            and self._reads_full_value(index, value)
        )

    def _only_scaled(self, value: int) -> Expression:
        """Return the indicator that a value is materialized for one product, which saves it scaled.

        Its dependents cannot be recomputed from it.
        """
        producer = self._forward.made_by(value)
        if (
            producer is None
            or self._forward.multiplies(producer)
            or len(self.products(value)) != 1
            or not self._has_one_saved_format(value)
        ):
            return {}
        (index,) = self.products(value)
        formats = self._saved.formats_of(index, value)
        assert formats is not None
        (read,) = (
            item
            for item in self.graph.operators[index].reads
            if self._forward.root(item.value) == value
        )
        result = [
            where
            for state, where in self._where.states[index].items()
            if scaled(formats[state]) and scaled(read.wanted.get(state[0] or ""))
        ]
        return total(*((1.0, where) for where in result))

    def _reads_full_value(self, index: int, value: int) -> bool:
        """Return whether an operator reads a full value, not a view of a part."""
        reads = [
            read.value
            for read in self.graph.operators[index].reads
            if self._forward.root(read.value) == value
        ]
        return not any(self._forward.is_part(read) for read in reads)


class MaterializedGradients:
    """Gradients that a compiler materializes under every remaining plan.

    The gradient of a gate's operand is computed from the gradient of its result and from the tensor
    that the gate saves. If this is the recomputed result, the kernel reads product results and
    statistics, and for intermediate values that are not materialized their sources. With more than
    `READS` reads the compiler materializes the gradient. Without the rows of this class, a gradient
    computed from it would appear to read too many buffers, and be materialized instead.

    Args:
        saved: bound on the saved tensors.
        unread: tensors with a later use, by moment.
        where: indicators of operator states.
        recomputation: rematerialization of values.
    """

    def __init__(
        self,
        saved: SavedTensorsBound,
        unread: UnreadValues,
        where: Where,
        recomputation: Recomputation,
    ) -> None:
        self._saved, self._unread, self._where, self._recomputation = (
            saved,
            unread,
            where,
            recomputation,
        )
        self.graph, self._forward, self.program = (
            saved.graph,
            saved.passes[0].forward,
            where.program,
        )

    def add(
        self,
        value: int,
        written: Expression,
        arriving: Mapping[int, Mapping[int, Count]],
        others: Mapping[int, Expression],
    ) -> None:
        """Add rows that force the gradient of a value to be materialized.

        Args:
            value: index of the value.
            written: indicator that its gradient is materialized.
            arriving: `Counts.arriving`.
            others: `Counts.written`.
        """
        for index in arriving[value]:
            gate = self.graph.operators[index] if index >= 0 else None
            if gate is None or not self._has_known_states(index, gate):
                continue
            read_count = self._gradients(arriving[gate.result])
            tries: list[tuple[int, Expression]] = [(1, {})]
            if read_count > 1:
                tries.append((read_count, others.get(gate.result, {})))
            for gradients, unless in tries:
                rest = self._reads_more_than(gate, READS - gradients)
                saved = self._recomputation.saved_result(index)
                if rest is None or saved is None:
                    continue
                free = total(
                    (1.0, unless),
                    (1.0, self._recomputation.not_recomputable(gate.result)),
                    (1.0, rest),
                    *((1.0, e) for e in saved.values()),
                )
                available = constant(free)
                if available is None or available < 1:
                    self.program.row(total((1.0, written), (1.0, free)), least=1.0)

    def _has_known_states(self, index: int, gate: ModelOperator) -> bool:
        """Return whether the states in which a gate's result is saved or materialized are known."""
        return (
            self._recomputation.saved_result(index) is not None
            and self._products(gate.result) is not None
        )

    def _gradients(self, arriving: Iterable[int]) -> int:
        """Return the minimum number of gradients that an unmaterialized gradient reads."""
        elementwise = 0
        result = 0
        for index in arriving:
            operator = self.graph.operators[index] if index >= 0 else None
            if operator is None or self._unread.materializes_gradients(operator):
                result += 1
            else:
                elementwise = 1  # several can come from the same gradient
        return result + elementwise

    def _reads_more_than(self, gate: ModelOperator, read_count: int) -> Expression | None:
        """Return an expression: 0 only if a gate's recomputation reads over `read_count` buffers.

        Returns None if no plan reads so many.
        """
        result: list[Expression] = []
        visited: set[int] = {gate.result}
        frontier: deque[tuple[int, Expression]] = deque([(self.graph.places[gate.id], {})])
        count = 0
        while count <= read_count:
            if not frontier:
                return None
            index, entry = next((item for item in frontier if not item[1]), frontier[0])
            frontier.remove((index, entry))
            result.append(entry)
            operator = self.graph.operators[index]
            count += min(
                sum(settings.startswith("extra") for _, settings in cost.saved)
                for cost in operator.costs.values()
            )
            for read in operator.reads:
                value = self._forward.root(read.value)
                if value in visited or self._forward.given(read.value):
                    continue
                visited.add(value)
                producer = self._forward.made_by(value)
                assert producer is not None
                if self._forward.multiplies(producer) or pools(producer):
                    count += 1  # it is materialized, or no value is recomputed from it
                elif constant(materialized := self.is_materialized(value, index)) != 1:
                    frontier.append((self.graph.places[producer.id], materialized))
        return total(*((1.0, item) for item in result))

    def is_materialized(self, value: int, reader: int, converted_only: bool = False) -> Expression:
        """Return an expression that is 0 only if a reader finds a value nowhere materialized.

        With `converted_only`, only copies in other formats than the value's own count.
        """
        by = self._products(value)
        producer = self._forward.made_by(value)
        if by is None or producer is None:
            return ONE
        result: list[Expression] = []
        live = self._where.outputs[self.graph.places[producer.id]]
        for read in self.graph.operators[reader].reads:
            if self._forward.root(read.value) != value:
                continue
            for state, existing in self._where.states[reader].items():
                wanted = read.wanted.get(state[0] or "")
                if wanted is not None and wanted in by:
                    other = total((1.0, ONE), (-1.0, live.get(wanted, {})))
                    result.append(self.program.all_of([existing, by[wanted], other]))
        if not converted_only:
            for fmt, existing in by.items():
                if fmt is None or scaled(fmt):
                    result.append(existing)
                elif fmt in live:
                    result.append(self.program.all_of([existing, live[fmt]]))
        return total(*((1.0, item) for item in result))

    def _products(self, value: int) -> Mapping[Name, Expression] | None:
        """Return by format the indicator that products materialize a value in it.

        The key None is the value's own format. Returns None if others may materialize the value.
        """
        producer = self._forward.made_by(value)
        returned = {self._forward.root(read.value) for read in self.graph.outputs}
        if (
            producer is None
            or value in returned
            or any(
                pools(self.graph.operators[index]) for index in self._recomputation.readers(value)
            )
        ):
            return None
        result: dict[Name, list[Expression]] = {}
        for index in self._recomputation.products(value):
            product = self.graph.operators[index]
            reads = [read for read in product.reads if self._forward.root(read.value) == value]
            if (
                attends(product)
                or index in self._forward.matrices
                or any(self._forward.is_part(read.value) for read in reads)
            ):
                return None
            by: dict[Name, list[Expression]] = {}
            for state, existing in self._where.states[index].items():
                for fmt in {read.wanted.get(state[0] or "") for read in reads}:
                    by.setdefault(fmt, []).append(existing)
            for fmt, several in by.items():
                result.setdefault(fmt, []).append(total(*((1.0, item) for item in several)))
        return {fmt: self._any(several) for fmt, several in result.items()}

    def _any(self, several: list[Expression]) -> Expression:
        """Return the OR of 0/1 expressions, exact for any objective."""
        if len(several) == 1:
            return several[0]
        return total(
            (1.0, ONE),
            (-1.0, self.program.all_of([total((1.0, ONE), (-1.0, item)) for item in several])),
        )

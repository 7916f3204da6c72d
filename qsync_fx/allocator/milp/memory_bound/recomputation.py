"""What gradients are computed again from, under any plan, as linear expressions of states: whether it can be, and from how much at most.

A gate keeps its own result where a product keeps that in the same format. Else it is computed again from what is kept, unless something of
that lies in memory and is kept in a scaled format alone; then a byte an element is kept.

Invariant: at whole choices a value that is computed again is so from no more than `many` says, and is so where `lost` says nothing.

Which gradients a compiler writes down under all plans that are left, as rows.

The gradient of what a gate reads is computed from its own and from what the gate keeps. Where that is its result, computed again, that is
all that it takes: results of products, statistics, and in place of what does not lie in memory on the way what that takes. Where those
are more than `READS`, the gradient is written down. Were it taken for one that is not, what is computed from it would seem to be too much,
and be written down in its place.

Invariant: at whole choices what a row forces is so.
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
from qsync_fx.allocator.milp.memory_bound.unread_values import UnreadValues, beside
from qsync_fx.predictor.memory.backward import READS
from qsync_fx.predictor.memory.buffers import GATES, attends, pools
from qsync_fx.predictor.model.model_graph import ModelOperator, Name, StateNames


class Recomputation:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
        waiting: what of it has yet to be read.
        where: the states.
    """

    def __init__(self, saved: SavedTensorsBound, waiting: UnreadValues, where: Where) -> None:
        self._kept, self._waiting, self._where = saved, waiting, where
        self.graph, self._forward, self.program = (
            saved.graph,
            saved.passes[0].forward,
            where.program,
        )
        self._products: dict[int, list[int]] = {}
        self._keepers: dict[int, list[int]] = {}
        for index, operator in enumerate(self.graph.operators):
            if self._forward.multiplies(operator):
                for value in {self._forward.root(read.value) for read in operator.reads}:
                    self._products.setdefault(value, []).append(index)
            for value in saved.saved(operator):
                self._keepers.setdefault(value, []).append(index)
        self._readers: dict[int, list[int]] = {}
        for index, operator in enumerate(self.graph.operators):
            for value in {self._forward.root(read.value) for read in operator.reads}:
                self._readers.setdefault(value, []).append(index)
        self._returned = {self._forward.root(read.value) for read in self.graph.outputs}
        self._again = self._computed_again()
        self._lost = self._not_computed_again()

    def products(self, value: int) -> Sequence[int]:
        """Returns the places of the products that read a value."""
        return self._products.get(value, ())

    def readers(self, value: int) -> Sequence[int]:
        """Returns the places of the operators that read a value."""
        return self._readers.get(value, ())

    def keeper(self, value: int) -> int | None:
        """Returns the place of the one operator, no product, that keeps a product's result: then it is kept in one format."""
        keepers = self._keepers.get(value, ())
        return keepers[0] if len(keepers) == 1 and not self.products(value) else None

    def many(self, value: int) -> Count:
        """Returns from how many buffers a value is computed again at most, where it is."""
        return self._again[value]

    def lost(self, value: int) -> Expression:
        """Returns where a value may not be computed again, as something that it is computed from is not kept."""
        return self._lost[value]

    def lost_part(self, value: int, lost: Sequence[Expression] | None = None) -> Expression:
        """Where others may not be computed again from a value: it is not kept, and lies in memory or is not computed again itself."""
        maker = self._forward.made_by(value)
        assert maker is not None
        if self._forward.multiplies(maker):
            return {} if self.keeper(value) is not None else ONE
        others = [
            index
            for index in self._keepers.get(value, ())
            if index not in self.products(value) and self.result_kept(index) is None
        ]
        lies = [index for index in self.readers(value) if pools(self.graph.operators[index])]
        if others or lies or len(self.products(value)) > 1 or value in self._returned:
            return ONE
        scaled = self._only_scaled(value)
        if self.products(value) and not self._told(value):
            return ONE
        again = total((1.0, scaled), (1.0, (self._lost if lost is None else lost)[value]))
        return self.program.at_most(
            [again, total((1.0, ONE), (-1.0, self._certain_as_held(value)))]
        )

    def certain(self, value: int, fmt: Name) -> Expression:
        """Returns where some product keeps a value in a format."""
        wants: list[Expression] = []
        for index in self.products(value):
            hows = self._kept.formats_of(index, value)
            if hows is not None and self._whole(index, value):
                result = [
                    where
                    for state, where in self._where.states[index].items()
                    if hows[state] == fmt
                ]
                wants.append(total(*((1.0, where) for where in result)))
        if len(wants) <= 1:
            return wants[0] if wants else {}
        none = self.program.all_of([total((1.0, ONE), (-1.0, want)) for want in wants])
        return total((1.0, ONE), (-1.0, none))

    def result_kept(self, index: int) -> Mapping[StateNames, Expression] | None:
        """Returns where a gate is in a state and a product keeps its result as it does; None for what is no gate."""
        operator = self.graph.operators[index]
        hows = self._kept.formats_of(index, operator.result)
        gate = operator.row in GATES and list(self._kept.saved(operator)) == [operator.result]
        if not gate or hows is None:
            return None
        return {
            state: self.program.all_of([where, self.certain(operator.result, hows[state])])
            for state, where in self._where.states[index].items()
        }

    def _not_computed_again(self) -> Sequence[Expression]:
        """By value, where it may not be computed again."""
        matches: list[Expression] = [ONE] * len(self.graph.values)
        for operator in self.graph.operators:
            result = operator.result
            if (
                self._forward.multiplies(operator)
                or self._waiting.writes(operator)
                or result in self._kept.lost
            ):
                continue
            used = {self._forward.root(read.value) for read in operator.reads} | set(
                self._kept.saved(operator)
            )
            parts = [
                self.lost_part(value, matches)
                for value in self._waiting.computed(sorted(used - {result}))
            ]
            matches[result] = self.program.at_most([total(*((1.0, part) for part in parts))])
        return matches

    def _computed_again(self) -> Sequence[Count]:
        """From how much each value is computed again at most, where it is."""
        forward, waiting = self._forward, self._waiting
        matches: list[Count] = [exactly(1)] * len(self.graph.values)
        for operator in self.graph.operators:
            result = operator.result
            if forward.multiplies(operator) or result in self._kept.lost:
                continue
            reads = {forward.root(read.value) for read in operator.reads}
            used = sorted(waiting.computed((reads | set(self._kept.saved(operator))) - {result}))
            many = added(
                self.program,
                [exactly(beside(operator)), *(self._part(value, matches[value]) for value in used)],
            )
            cuts = [
                where_so(self._only_scaled(value), exactly(1)) for value in used if value in reads
            ]
            matches[result] = least(self.program, [many, *cuts])
        return matches

    def _part(self, value: int, again: Count) -> Count:
        """As how many buffers a value counts that another is computed again from."""
        maker = self._forward.made_by(value)
        assert maker is not None
        if self._forward.multiplies(maker):
            return exactly(1 if self.keeper(value) is not None else 2)
        if len(self.products(value)) > 1 or self._waiting.writes(maker) or value in self._kept.lost:
            return exactly(max(2, self._waiting.again[value]))
        return least(
            self.program, [where_so(self._certain_as_held(value), exactly(1)), one_or_more(again)]
        )

    def _certain_as_held(self, value: int) -> Expression:
        """Where some product keeps a value in the format that it has."""
        maker = self._forward.made_by(value)
        assert maker is not None
        live = self._where.outputs[self.graph.places[maker.id]].items()
        certain = [self.program.all_of([where, self.certain(value, fmt)]) for fmt, where in live]
        return total(*((1.0, item) for item in certain))

    def _told(self, value: int) -> bool:
        """Whether it is known how the one product that reads a value keeps it."""
        (index,) = self.products(value)
        reads = [
            read
            for read in self.graph.operators[index].reads
            if self._forward.root(read.value) == value
        ]
        return (
            self._kept.formats_of(index, value) is not None
            and len(reads) == 1
            and self._whole(index, value)
        )

    def _only_scaled(self, value: int) -> Expression:
        """Where a value lies in memory for one product alone, which keeps it in a scaled format: it is not computed again from there."""
        maker = self._forward.made_by(value)
        if (
            maker is None
            or self._forward.multiplies(maker)
            or len(self.products(value)) != 1
            or not self._told(value)
        ):
            return {}
        (index,) = self.products(value)
        hows = self._kept.formats_of(index, value)
        assert hows is not None
        (read,) = (
            item
            for item in self.graph.operators[index].reads
            if self._forward.root(item.value) == value
        )
        result = [
            where
            for state, where in self._where.states[index].items()
            if scaled(hows[state]) and scaled(read.wanted.get(state[0] or ""))
        ]
        return total(*((1.0, where) for where in result))

    def _whole(self, index: int, value: int) -> bool:
        """Whether an operator reads all of a value, and no view of a part."""
        reads = [
            read.value
            for read in self.graph.operators[index].reads
            if self._forward.root(read.value) == value
        ]
        return not any(self._forward.is_part(read) for read in reads)


class MaterializedValues:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
        waiting: what of it has yet to be read.
        where: the states.
        again: what is computed again.
    """

    def __init__(
        self, saved: SavedTensorsBound, waiting: UnreadValues, where: Where, again: Recomputation
    ) -> None:
        self._kept, self._waiting, self._where, self._again = saved, waiting, where, again
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
        """Adds rows that have the gradient of a value written down; `arriving` and `others` are `Counts.arriving` and `.written`."""
        for index in arriving[value]:
            gate = self.graph.operators[index] if index >= 0 else None
            if gate is None or not self._told_apart(index, gate):
                continue
            many = self._gradients(arriving[gate.result])
            tries: list[tuple[int, Expression]] = [(1, {})]
            if many > 1:
                tries.append((many, others.get(gate.result, {})))
            for gradients, unless in tries:
                rest = self._read_beyond(gate, READS - gradients)
                saved = self._again.result_kept(index)
                if rest is None or saved is None:
                    continue
                free = total(
                    (1.0, unless),
                    (1.0, self._again.lost(gate.result)),
                    (1.0, rest),
                    *((1.0, e) for e in saved.values()),
                )
                available = constant(free)
                if available is None or available < 1:
                    self.program.row(total((1.0, written), (1.0, free)), least=1.0)

    def _told_apart(self, index: int, gate: ModelOperator) -> bool:
        """Whether it is known in which states a gate's result is kept, and not what it is computed again from."""
        return (
            self._again.result_kept(index) is not None and self._products(gate.result) is not None
        )

    def _gradients(self, arriving: Iterable[int]) -> int:
        """Returns from how many gradients one is computed at least that is not written down itself."""
        elementwise = 0
        result = 0
        for index in arriving:
            operator = self.graph.operators[index] if index >= 0 else None
            if operator is None or self._waiting.writes(operator):
                result += 1
            else:
                elementwise = 1  # several may come from one
        return result + elementwise

    def _read_beyond(self, gate: ModelOperator, many: int) -> Expression | None:
        """Returns what is 0 only where a gate's result, computed again, is so from more buffers than `many`; None where nothing is."""
        result: list[Expression] = []
        visited: set[int] = {gate.result}
        doors: deque[tuple[int, Expression]] = deque([(self.graph.places[gate.id], {})])
        count = 0
        while count <= many:
            if not doors:
                return None
            index, door = next((item for item in doors if not item[1]), doors[0])
            doors.remove((index, door))
            result.append(door)
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
                maker = self._forward.made_by(value)
                assert maker is not None
                if self._forward.multiplies(maker) or pools(maker):
                    count += 1  # it lies in memory, or nothing is computed again from it
                elif constant(lies := self.lies(value, index)) != 1:
                    doors.append((self.graph.places[maker.id], lies))
        return total(*((1.0, item) for item in result))

    def lies(self, value: int, reader: int, but_as_held: bool = False) -> Expression:
        """Returns what is 0 only where a value lies in memory nowhere that a reader finds it; with `but_as_held` not in another format
        than it has."""
        by = self._products(value)
        maker = self._forward.made_by(value)
        if by is None or maker is None:
            return ONE
        result: list[Expression] = []
        live = self._where.outputs[self.graph.places[maker.id]]
        for read in self.graph.operators[reader].reads:
            if self._forward.root(read.value) != value:
                continue
            for state, existing in self._where.states[reader].items():
                wanted = read.wanted.get(state[0] or "")
                if wanted is not None and wanted in by:
                    other = total((1.0, ONE), (-1.0, live.get(wanted, {})))
                    result.append(self.program.all_of([existing, by[wanted], other]))
        if not but_as_held:
            for fmt, existing in by.items():
                if fmt is None or scaled(fmt):
                    result.append(existing)
                elif fmt in live:
                    result.append(self.program.all_of([existing, live[fmt]]))
        return total(*((1.0, item) for item in result))

    def _products(self, value: int) -> Mapping[Name, Expression] | None:
        """Returns by format where products have a value lie in it, None for the one that it has; None where something else may."""
        maker = self._forward.made_by(value)
        returned = {self._forward.root(read.value) for read in self.graph.outputs}
        if (
            maker is None
            or value in returned
            or any(pools(self.graph.operators[index]) for index in self._again.readers(value))
        ):
            return None
        result: dict[Name, list[Expression]] = {}
        for index in self._again.products(value):
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
        """Returns what is 1 where one of several is, and 0 elsewhere, whatever wins."""
        if len(several) == 1:
            return several[0]
        return total(
            (1.0, ONE),
            (-1.0, self.program.all_of([total((1.0, ONE), (-1.0, item)) for item in several])),
        )

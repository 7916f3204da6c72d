"""Which gradients a compiler writes down under all plans that are left, as rows.

The gradient of what a gate reads is computed from its own and from what the gate keeps. Where that is its result, computed again, that is
all that it takes: results of products, statistics, and in place of what does not lie in memory on the way what that takes. Where those
are more than `READS`, the gradient is written down. Were it taken for one that is not, what is computed from it would seem to be too much,
and be written down in its place.

Invariant: at whole choices what a row forces is so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from qsync_fx.allocator.exact.bounding.counting.again import Again
from qsync_fx.allocator.exact.bounding.counting.unary import Count
from qsync_fx.allocator.exact.bounding.gates import Where, scaled
from qsync_fx.allocator.exact.bounding.kept import Kept
from qsync_fx.allocator.exact.bounding.waiting import Waiting
from qsync_fx.allocator.exact.linear.program import ONE, Expression, constant, total
from qsync_fx.predictor.memory.backward import READS
from qsync_fx.predictor.memory.telling import attends, pools
from qsync_fx.predictor.model.value import Name, Operator


class Forced:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
        waiting: what of it has yet to be read.
        where: the states.
        again: what is computed again.
    """

    def __init__(self, kept: Kept, waiting: Waiting, where: Where, again: Again) -> None:
        self._kept, self._waiting, self._where, self._again = kept, waiting, where, again
        self.graph, self._forward, self.program = kept.graph, kept.passes[0].forward, where.program

    def add(
        self,
        value: int,
        written: Expression,
        arriving: Mapping[int, Mapping[int, Count]],
        others: Mapping[int, Expression],
    ) -> None:
        """Adds rows that have the gradient of a value written down; `arriving` and `others` are `Counts.arriving` and `.written`."""
        for at in arriving[value]:
            gate = self.graph.operators[at] if at >= 0 else None
            if gate is None or not self._told_apart(at, gate):
                continue
            many = self._gradients(arriving[gate.result])
            tries: list[tuple[int, Expression]] = [(1, {})]
            if many > 1:
                tries.append((many, others.get(gate.result, {})))
            for gradients, unless in tries:
                rest = self._read_beyond(gate, READS - gradients)
                kept = self._again.result_kept(at)
                if rest is None or kept is None:
                    continue
                free = total(
                    (1.0, unless), (1.0, self._again.lost(gate.result)), (1.0, rest), *((1.0, e) for e in kept.values())
                )
                known = constant(free)
                if known is None or known < 1:
                    self.program.row(total((1.0, written), (1.0, free)), least=1.0)

    def _told_apart(self, at: int, gate: Operator) -> bool:
        """Whether it is known in which states a gate's result is kept, and not what it is computed again from."""
        return self._again.result_kept(at) is not None and self._products(gate.result) is not None

    def _gradients(self, arriving: Iterable[int]) -> int:
        """Returns from how many gradients one is computed at least that is not written down itself."""
        elementwise = 0
        found = 0
        for at in arriving:
            operator = self.graph.operators[at] if at >= 0 else None
            if operator is None or self._waiting.writes(operator):
                found += 1
            else:
                elementwise = 1  # several may come from one
        return found + elementwise

    def _read_beyond(self, gate: Operator, many: int) -> Expression | None:
        """Returns what is 0 only where a gate's result, computed again, is so from more buffers than `many`; None where nothing is."""
        found: list[Expression] = []
        seen: set[int] = {gate.result}
        doors: deque[tuple[int, Expression]] = deque([(self.graph.places[gate.id], {})])
        count = 0
        while count <= many:
            if not doors:
                return None
            at, door = next((one for one in doors if not one[1]), doors[0])
            doors.remove((at, door))
            found.append(door)
            operator = self.graph.operators[at]
            count += min(sum(how.startswith("extra") for _, how in cost.saved) for cost in operator.costs.values())
            for read in operator.reads:
                value = self._forward.root(read.value)
                if value in seen or self._forward.given(read.value):
                    continue
                seen.add(value)
                maker = self._forward.made_by(value)
                assert maker is not None
                if self._forward.multiplies(maker) or pools(maker):
                    count += 1  # it lies in memory, or nothing is computed again from it
                elif constant(lies := self.lies(value, at)) != 1:
                    doors.append((self.graph.places[maker.id], lies))
        return total(*((1.0, one) for one in found))

    def lies(self, value: int, reader: int, but_as_held: bool = False) -> Expression:
        """Returns what is 0 only where a value lies in memory nowhere that a reader finds it; with `but_as_held` not in another format
        than it has."""
        by = self._products(value)
        maker = self._forward.made_by(value)
        if by is None or maker is None:
            return ONE
        found: list[Expression] = []
        held = self._where.outputs[self.graph.places[maker.id]]
        for read in self.graph.operators[reader].reads:
            if self._forward.root(read.value) != value:
                continue
            for state, there in self._where.states[reader].items():
                wanted = read.wanted.get(state[0] or "")
                if wanted is not None and wanted in by:
                    other = total((1.0, ONE), (-1.0, held.get(wanted, {})))
                    found.append(self.program.all_of([there, by[wanted], other]))
        if not but_as_held:
            for fmt, there in by.items():
                if fmt is None or scaled(fmt):
                    found.append(there)
                elif fmt in held:
                    found.append(self.program.all_of([there, held[fmt]]))
        return total(*((1.0, one) for one in found))

    def _products(self, value: int) -> Mapping[Name, Expression] | None:
        """Returns by format where products have a value lie in it, None for the one that it has; None where something else may."""
        maker = self._forward.made_by(value)
        returned = {self._forward.root(read.value) for read in self.graph.outputs}
        if (
            maker is None
            or value in returned
            or any(pools(self.graph.operators[at]) for at in self._again.readers(value))
        ):
            return None
        found: dict[Name, list[Expression]] = {}
        for at in self._again.products(value):
            product = self.graph.operators[at]
            reads = [read for read in product.reads if self._forward.root(read.value) == value]
            if (
                attends(product)
                or at in self._forward.matrices
                or any(self._forward.is_part(read.value) for read in reads)
            ):
                return None
            by: dict[Name, list[Expression]] = {}
            for state, there in self._where.states[at].items():
                for fmt in {read.wanted.get(state[0] or "") for read in reads}:
                    by.setdefault(fmt, []).append(there)
            for fmt, several in by.items():
                found.setdefault(fmt, []).append(total(*((1.0, one) for one in several)))
        return {fmt: self._any(several) for fmt, several in found.items()}

    def _any(self, several: list[Expression]) -> Expression:
        """Returns what is 1 where one of several is, and 0 elsewhere, whatever wins."""
        if len(several) == 1:
            return several[0]
        return total((1.0, ONE), (-1.0, self.program.all_of([total((1.0, ONE), (-1.0, one)) for one in several])))

"""From how many buffers gradients are computed at most, under any plan, as linear expressions of states.

What would be computed from more than `READS` a compiler writes down, and computes the rest from that. So of a gradient that may be one of
these a whole variable says whether it is written down, which only a count that is high enough lets be 1.

Invariant: with whole variables as a compiler decides, no gradient is computed from more than `sources` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qsync_fx.allocator.exact.bounding.counting.again import Again
from qsync_fx.allocator.exact.bounding.counting.forced import Forced
from qsync_fx.allocator.exact.bounding.counting.unary import (
    TOP,
    Count,
    added,
    exactly,
    least,
    one_or_more,
    where,
    where_so,
)
from qsync_fx.allocator.exact.bounding.gates import Where, scaled
from qsync_fx.allocator.exact.bounding.kept import Kept, factors, norms
from qsync_fx.allocator.exact.bounding.waiting import Waiting
from qsync_fx.allocator.exact.linear.program import Expression, constant, total
from qsync_fx.predictor.memory.backward import READS
from qsync_fx.predictor.model.value import Operator


class Counts:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
        waiting: what of it has yet to be read.
        where: the states.

    Attributes:
        again: what is computed again.
        arriving: by value, what its gradient is computed from at most by the operators that it comes from, in the order of the backward
            pass; -1 is who reads results.
        written: by value, whether its gradient is written down; nothing of those that never are.
    """

    def __init__(self, kept: Kept, waiting: Waiting, where: Where) -> None:
        self.again = Again(kept, waiting, where)
        self._waiting, self._where = waiting, where
        self.graph, self._forward, self.program = kept.graph, kept.passes[0].forward, where.program
        self.arriving: dict[int, dict[int, Count]] = {}
        self.written: dict[int, Expression] = {}
        self._written_of: dict[tuple[int, tuple[int, ...]], Expression] = {}
        self._forced = Forced(kept, waiting, where, self.again)
        self._arrive()

    def sources(self, value: int) -> Count:
        """Returns from how many buffers the gradient of a value is computed at most."""
        arriving = list(self.arriving[value].values())
        every = added(self.program, arriving)
        written = self.written.get(value)
        if written is None:
            return every
        rest = added(self.program, [exactly(1), *arriving[1:]])
        return least(self.program, [every, exactly(READS), where_so(written, rest)])

    def written_down(self, value: int, behind: Iterable[int]) -> Expression:
        """Returns whether the gradient of a value is written down that has come from some operators; nothing where it never is."""
        key = value, tuple(behind)
        if key not in self._written_of:
            enough = added(self.program, [self.arriving[value][at] for at in key[1]]).reaches(TOP)
            found: Expression = {}
            if constant(enough) != 0:
                found = {self.program.variable(whole=True): 1.0}
                self.program.row(total((1.0, found), (-1.0, enough)), most=0.0)
            self._written_of[key] = found
        return self._written_of[key]

    def _arrive(self) -> None:
        waiting, forward = self._waiting, self._forward
        for read in self.graph.outputs:
            if waiting.differentiated(read.value):
                self._add(forward.root(read.value), -1, exactly(1))
        for at, operator in reversed(list(enumerate(self.graph.operators))):
            value = operator.result
            if value not in self.arriving or forward.root(value) != value:
                continue
            if written := self.written_down(value, self.arriving[value]):
                self.written[value] = written
                self._forced.add(value, written, self.arriving, self.written)
            leaving = added(self.program, [self.sources(value), self._keeps(at, operator)])
            passed: set[int] = set()
            for place, read in enumerate(operator.reads):
                root = forward.root(read.value)
                if not read.gradient or forward.given(read.value) or not waiting.differentiated(read.value):
                    continue
                if waiting.writes(operator) or waiting.summed(operator, read):
                    self._add(root, at, self._product(at, operator, place))
                elif root not in passed:
                    passed.add(root)
                    self._add(root, at, leaving)

    def _add(self, value: int, at: int, many: Count) -> None:
        into = self.arriving.setdefault(value, {})
        into[at] = added(self.program, [into[at], many]) if at in into else many

    def _product(self, at: int, operator: Operator, place: int) -> Count:
        """The gradient that a product gives, and the scale of its other factor where it has one."""
        if not self._forward.multiplies(operator):
            return exactly(2)
        wanted = [read.wanted for at, read in factors(operator, self._forward).items() if at != place]
        also = [
            there
            for state, there in self._where.states[at].items()
            if any(scaled(formats.get(state[0] or "")) for formats in wanted)
        ]
        return added(self.program, [exactly(1), where(total(*((1.0, one) for one in also)))])

    def _keeps(self, at: int, operator: Operator) -> Count:
        """What the gradients of an operator's operands are computed from beside its own."""
        if self._waiting.writes(operator):
            return exactly(0)
        certain = self.again.result_kept(at)
        if certain is None:
            return exactly(self._waiting.added(operator))
        there = total(*((1.0, where) for where in certain.values()))
        several = [where_so(there, exactly(1)), one_or_more(self.again.many(operator.result))]
        if (behind := self._gate_behind(operator.result)) is not None:
            gate, passed = behind
            later = self.again.result_kept(gate)
            assert later is not None
            # What this is computed again from, or it itself, that gate keeps, too, where it is computed again from this.
            new = [*later.values(), self.again.lost_part(operator.result)]
            new += [self.written[value] for value in (*passed, operator.result) if value in self.written]
            # Unless that reads what a product keeps of it in a format that it has not itself.
            first = self.graph.places[self._forward.made_by(passed[0]).id] if passed else gate  # type: ignore[union-attr]
            new.append(self._forced.lies(operator.result, first, but_as_held=True))
            several.append(Count(0, [total(*((1.0, one) for one in new))] * TOP))
        return least(self.program, several)

    def _gate_behind(self, value: int) -> tuple[int, Sequence[int]] | None:
        """Returns the gate that is computed from a value by elementwise operators alone, and what is computed between."""
        for at in self.again.readers(value):
            passed: list[int] = []
            now, place = value, at
            while not self._waiting.writes(operator := self.graph.operators[place]) and not norms(operator):
                flows = [read for read in operator.reads if self._forward.root(read.value) == now and read.gradient]
                if not flows or any(self._waiting.summed(operator, read) for read in flows):
                    break
                if self.again.result_kept(place) is not None:
                    return place, passed
                now = operator.result
                if self._forward.root(now) != now or len(self.again.readers(now)) != 1:
                    break
                passed.append(now)
                (place,) = self.again.readers(now)
        return None

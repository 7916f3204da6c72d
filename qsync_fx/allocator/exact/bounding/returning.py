"""What a step certainly holds while it computes what the model returns, as a linear expression of states.

Results of products that this is computed from without lying in memory in between, as along residuals, are there till then. What the last
product ran behind is kept by then, too: a kernel of a library ends what compilers make one kernel. What is written behind that may be
written over what is read there, where it is as large; of that masks alone are counted, which are not, and the numbers that the last of them
is made from.

Invariant: `of` and `expression` count the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property

from qsync_fx.allocator.exact.bounding.kept import Kept, Readers, add
from qsync_fx.allocator.exact.bounding.passes import Passes
from qsync_fx.allocator.exact.linear.program import Expression
from qsync_fx.allocator.exact.terms.formats import Formats
from qsync_fx.predictor.memory.buffers import Buffer
from qsync_fx.predictor.memory.order import fused, reaching
from qsync_fx.predictor.memory.telling import attends, pools
from qsync_fx.predictor.model.value import StateNames


class Returning:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept, self.graph, self._forward = kept, kept.graph, kept.passes[0].forward

    def of(self, names: Sequence[StateNames]) -> float:
        """Returns the bytes under a plan, by the states that it puts operators into."""
        beside = (*self._results.items(), *self._masks.items(), *self._drawn.items())
        return self._kept.of(names, self._there) + sum(sizes[names[at]] for at, sizes in beside)

    def expression(self, formats: Formats) -> Expression:
        """Returns the bytes."""
        found = dict(self._kept.expression(formats, self._there))
        for at, sizes in (*self._results.items(), *self._masks.items(), *self._drawn.items()):
            for state, where in formats.states[at].items():
                add(found, where, sizes[state])
        return found

    @property
    def any(self) -> bool:
        """Whether results of products are there."""
        return bool(self._results)

    @cached_property
    def _seen(self) -> Sequence[_Seen]:
        if len({operator.graph for operator in self.graph.operators}) != 1:
            return ()
        return [_Seen(one) for one in self._kept.passes]

    @cached_property
    def _results(self) -> Mapping[int, Mapping[StateNames, int]]:
        """By product, the bytes of its result in each state, of those that what is returned is computed from under all plans."""
        if not self._seen:
            return {}
        names = frozenset.intersection(*(frozenset(buffer.name for buffer in one.read) for one in self._seen))
        found: dict[int, Mapping[StateNames, int]] = {}
        for at, operator in enumerate(self.graph.operators):
            value = self.graph.values[operator.result]
            if not self._forward.multiplies(operator) or value.name not in names or operator.result in self._lying:
                continue
            found[at] = {state: self._bytes(at, state) for state in operator.costs}
        return found

    @cached_property
    def _lying(self) -> Set[int]:
        """The values that something under some plan keeps, or has lie in memory beside what a product writes."""
        found: set[int] = set()
        for operator in self.graph.operators:
            found.update(self._kept.saved(operator))
            if self._forward.multiplies(operator) or pools(operator):
                found.update(self._forward.root(read.value) for read in operator.reads)
        return found

    @cached_property
    def _masks(self) -> Mapping[int, Mapping[StateNames, int]]:
        """By operator, what else it keeps beside values that nothing of what is read can be written over by."""
        sizes = {size for by in self._results.values() for size in by.values()}
        found: dict[int, Mapping[StateNames, int]] = {}
        for at, by in self._kept.extras.items():
            buffers = [(one, buffer) for one in self._seen for buffer in one.extras(at)]
            written = all(buffer in one.written and buffer.bytes not in sizes for one, buffer in buffers)
            if buffers and written and at not in self._there.wholly:
                found[at] = by
        return found

    @cached_property
    def _drawn(self) -> Mapping[int, Mapping[StateNames, int]]:
        """Of the last dropout the bytes of the numbers that are drawn for its mask, where no library's kernel runs behind it.

        In the order in which the pass is written one kernel makes the mask then, and computes what is returned.
        """
        returned = {self._forward.root(read.value) for read in self.graph.outputs}
        if not self._results or not returned.isdisjoint(self._lying):
            return {}
        for at, operator in reversed(list(enumerate(self.graph.operators))):
            if self._forward.multiplies(operator):
                break
            if "dropout" in operator.row and any(one.extras(at) for one in self._seen):
                if at not in self._masks:
                    break
                numbers = {state: self._forward.bytes(operator.result, state[1]) for state in operator.costs}
                # A mask that is as large may be written over them.
                return {at: {state: size if size != self._masks[at][state] else 0 for state, size in numbers.items()}}
        return {}

    def _bytes(self, at: int, state: StateNames) -> int:
        return self._forward.bytes(self.graph.operators[at].result, state[1])

    @cached_property
    def _there(self) -> Readers:
        """The operators of which all that they keep is there, under all plans."""
        if not self._seen:
            return Readers(frozenset(), frozenset())
        found = (
            at
            for at in range(len(self.graph.operators))
            if all(one.behind.issuperset(one.kept(at)) for one in self._seen)
        )
        return Readers(frozenset(found), frozenset())


class _Seen:
    """What is there under a plan while what the model returns is computed, of the result that is computed from most.

    Attributes:
        read: what that is computed from.
        behind: what was written before the last kernel of a library before it, or by that.
        written: what was written before it in any case, or with it.
    """

    def __init__(self, passes: Passes) -> None:
        self._forward = passes.forward
        groups = fused(self._forward.tasks)
        writes = [{buffer for task in group for buffer in task.writes} for group in groups]
        writer = {buffer: at for at, written in enumerate(writes) for buffer in written}
        last = [task for task in self._forward.tasks if self._forward.outputs.intersection(task.writes)]
        task = max(last, key=lambda task: sum(buffer.bytes for buffer in task.reads), default=None)
        self.read: Set[Buffer] = frozenset() if task is None or task.library else task.reads
        needs = [{writer[b] for task in group for b in task.reads if b in writer} for group in groups]
        last_group = [] if task is None else [writer[task.writes[0]]]
        before, found = reaching(needs, last_group), set[int]()
        for at in before:
            if groups[at][0].library:
                found |= {at, *reaching(needs, [at])}
        self.behind = {buffer for at in found for buffer in writes[at]}
        self.written = {buffer for at in (*before, *last_group) for buffer in writes[at]}

    def extras(self, at: int) -> Set[Buffer]:
        """Returns what the operator at a place keeps beside values."""
        return self._forward.extras(at)

    def kept(self, at: int) -> Iterator[Buffer]:
        """Yields what the operator at a place keeps, but for what is there before the step."""
        operator = self._forward.graph.operators[at]
        product = self._forward.multiplies(operator) and not attends(operator)
        for place in self._forward.multiplied(operator) if product else (0, 1):
            if (buffer := self._forward.factors.get((at, place))) is not None:
                yield buffer
        yield from (buffer for buffer in self._forward.kept.get(at, ()) if buffer.bytes)

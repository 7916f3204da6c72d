"""What a step certainly holds while it computes the gradient of a product's factor, or that of a pooling, or converts that of a parameter,
as a linear expression of states.

That is in the order in which the backward pass is written, from the last operator to the first, in which limits are kept, too
(`qsync_fx.allocator.evaluator`). All that the backward passes before it read is there, and of the product itself its factors, the
gradient that it is given, and those that are written; the gradients of all parameters that operators behind it read; and what gradients
that wait are computed from (`streams`). The same is told of a norm that passes a gradient on, with what is written then (`norming`).

Invariant: `of` and `expression` count the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property

from qsync_fx.allocator.milp.format_variables import Formats
from qsync_fx.allocator.milp.linear_program import CONSTANT, Expression
from qsync_fx.allocator.milp.memory_bound.pending_gradients import PendingGradients, PlanStates
from qsync_fx.allocator.milp.memory_bound.saved_bound import SavedTensorsBound, add, factors
from qsync_fx.allocator.milp.memory_bound.unread_values import (
    PASSING,
    Moment,
    UnreadValues,
    at_once,
    gradients,
)
from qsync_fx.formats import FORMATS, FP32
from qsync_fx.predictor.memory.backward import INDEX, computed_in
from qsync_fx.predictor.memory.buffers import convolves, pools, whole
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead, Name, StateNames

Sizes = Mapping[Name, int]
"""Bytes by what an operator computes in."""


class BackwardPeaks:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
    """

    def __init__(self, saved: SavedTensorsBound) -> None:
        self._kept, self.graph, self._forward = saved, saved.graph, saved.passes[0].forward
        self._waiting = UnreadValues(saved)
        self._streams = PendingGradients(saved, self._waiting)
        self._planned: tuple[Sequence[StateNames], PlanStates] | None = None

    @cached_property
    def moments(self) -> Sequence[Moment]:
        """All such moments, in the order of operators."""
        result: list[Moment] = []
        for index, operator in enumerate(self.graph.operators):
            if index in self._streams.norming.norms:
                result.append((index, PASSING))
            if operator.repeated or not self._waiting.arrives(operator.result):
                continue
            if index in self._forward.matrices:
                continue  # no moment has all that it reads and writes
            if pools(operator) or (self._forward.multiplies(operator) and at_once(operator)):
                result += [(index, 0)] if gradients(operator, self._forward) else []
            elif self._forward.multiplies(operator):
                computed = gradients(operator, self._forward)
                result += [(index, selected) for selected, _ in enumerate(computed)]
                if self._converted(operator) is not None:
                    result.append((index, len(computed)))
        return result

    def last(self, moment: Moment) -> Set[str]:
        """Returns the ids of the operators that the kernel of a moment may be for last: a norm's writes what the product before reads."""
        places = (moment[0], moment[0] - 1) if moment[1] == PASSING else (moment[0],)
        return {self.graph.operators[place].id for place in places}

    def of(
        self,
        names: Sequence[StateNames],
        moment: Moment,
        waiting: bool = True,
        above: float = 0.0,
        exact: bool = True,
    ) -> float:
        """Returns the bytes under a plan, by the states that it puts operators into.

        Args:
            waiting: whether what gradients that wait are computed from counts, which takes long to know.
            above: what is no more than that may come out less.
            exact: whether what counts of that is known to the byte; elsewhere it may come out less, too.
        """
        saved = self._kept.of(names, self._waiting.of(moment))
        result = saved + self._gradients(moment) + self._own(moment)[names[moment[0]][0]]
        if not waiting:
            return result
        if self._planned is None or self._planned[0] != names:
            self._planned = names, PlanStates(names)
        return result + self._streams.of(self._planned[1], moment, above - result, exact)

    def expression(self, formats: Formats, moment: Moment) -> Expression:
        """Returns the bytes."""
        result = dict(self._kept.expression(formats, self._waiting.of(moment)))
        result[CONSTANT] = result.get(CONSTANT, 0.0) + self._gradients(moment)
        for name, where in formats.precisions[moment[0]].items():
            add(result, where, self._own(moment)[name])
        add(result, self._streams.expression(formats, moment), 1.0)
        return result

    def _own(self, moment: Moment) -> Sizes:
        """The gradient that a product is given, and those that it has written, with what it reads for that: of a factor in a scaled format
        a copy in the carrier. A convolution writes both gradients at once. A pooling reads places beside the gradient that it is given."""
        operator, result = self.graph.operators[moment[0]], dict[Name, int]()
        if moment[1] == PASSING:
            return dict.fromkeys((name for name, _ in operator.costs), 0)  # `NormGradients` has it
        if pools(operator):
            windows = INDEX * whole(self.graph.values[operator.result].numel)
            values = operator.result, operator.reads[0].value
            for name, _ in operator.costs:
                result[name] = windows + sum(self._forward.bytes(value, name) for value in values)
            return result
        places = gradients(operator, self._forward)
        for name, _ in operator.costs:
            narrow, carrier = computed_in(name)
            written = {
                place: self._forward.bytes(operator.reads[place].value, carrier) for place in places
            }
            copied = {
                index: self._copied(read, name, carrier)
                for index, read in factors(operator, self._forward).items()
            }
            if at_once(operator):
                workspace = (
                    2 * self._forward.bytes(operator.reads[1].value, carrier)
                    if convolves(operator)
                    else 0
                )
                more = sum(written.values()) + sum(copied.values()) + workspace
            elif moment[1] == len(places):
                result[name] = self._converting(operator, carrier)
                continue
            else:
                now = places[moment[1]]
                before = [
                    place
                    for place in places[: moment[1]]
                    if self._waiting.uses(operator.reads[place].value)
                ]
                more = (
                    sum(written[place] for place in (*before, now))
                    + copied[self._forward.other(operator, now)]
                )
            result[name] = self._forward.bytes(operator.result, narrow) + more
        return result

    def _converted(self, operator: ModelOperator) -> ModelRead | None:
        """Returns the parameter whose gradient a matrix product computes last, and that is converted to the parameter's format behind it,
        where it is narrower; None where there is none."""
        last = gradients(operator, self._forward)[-1:]
        read = operator.reads[last[0]] if last else None
        if (
            read is None
            or not self._forward.given(read.value)
            or self.graph.values[read.value].own != FP32.name
        ):
            return None
        # To what a reader behind it has left it is added.
        alone = self._last_readers[self._forward.root(read.value)] == self.graph.places[operator.id]
        return read if alone else None

    @cached_property
    def _last_readers(self) -> Mapping[int, int]:
        """By value, the place of the last operator that a gradient of it comes from."""
        reads = (
            (index, read)
            for index, operator in enumerate(self.graph.operators)
            for read in operator.reads
        )
        return {self._forward.root(read.value): index for index, read in reads if read.gradient}

    def _converting(self, operator: ModelOperator, carrier: Name) -> int:
        """Both gradients of the parameter, as it is computed and as it stays, and those that were computed before and wait."""
        read, places = self._converted(operator), gradients(operator, self._forward)
        assert read is not None
        before = [place for place in places[:-1] if self._waiting.uses(operator.reads[place].value)]
        result = sum(self._forward.bytes(operator.reads[place].value, carrier) for place in before)
        stays = self._forward.bytes(read.value, FP32.name)
        narrow = carrier is not None and FORMATS[carrier].dtype.itemsize < FP32.dtype.itemsize
        return (
            result
            + stays
            + ((self._forward.bytes(read.value, carrier) + self._beside(operator)) if narrow else 0)
        )

    def _beside(self, operator: ModelOperator) -> int:
        """The places that are written by the kernel that converts, where a pooling's is the next one of a library: what lies between two of
        these is one kernel."""
        for before in reversed(self.graph.operators[: self.graph.places[operator.id]]):
            if not self._waiting.arrives(before.result):
                continue
            if pools(before):
                return INDEX * whole(self.graph.values[before.result].numel)
            if self._waiting.writes(before):
                break
        return 0

    def _copied(self, read: ModelRead, computes: Name, carrier: Name) -> int:
        wanted = read.wanted.get(computes or "")
        return (
            self._forward.bytes(read.value, carrier)
            if wanted is not None and FORMATS[wanted].scaled
            else 0
        )

    def _gradients(self, moment: Moment) -> int:
        """The bytes of the gradients of parameters that the operators behind a moment have left there."""
        return sum(size for index, size in self._left if index > moment[0])

    @cached_property
    def _left(self) -> Sequence[tuple[int, int]]:
        """The places of operators that leave gradients of parameters behind, and their bytes; the first of all plans to be there count."""
        result: dict[str, tuple[int, int]] = {}
        for item in self._kept.passes:
            for task in item.backward.tasks:
                for buffer in task.writes:
                    if buffer.stays and task.operator:
                        index = self.graph.places[task.operator]
                        result[buffer.name] = min(
                            result.get(buffer.name, (index, buffer.bytes)), (index, buffer.bytes)
                        )
        return list(result.values())

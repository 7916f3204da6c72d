"""Saved tensors with a later use, by moment of the backward pass.

The backward pass runs operators in reverse program order, so that saved tensors of all operators
before the current product are unread. Operators after it have run, unless they have no kernel: the
gradient of an elementwise operator is fused into its readers, and its sources stay live until then,
for instance if the gradient waits at a residual. A compiler materializes gradients that read too
many buffers. The number of reads is therefore bounded from above, and gradients that may exceed
`READS` do not count.

Invariant: tensors reported as unread are live under all plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from qsync_fx.allocator.milp.memory_bound.saved_bound import (
    Readers,
    SavedTensorsBound,
    factors,
    norms,
)
from qsync_fx.predictor.memory.backward import READS, SPREADS
from qsync_fx.predictor.memory.buffers import attends, convolves, pools, whole
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead

Moment = tuple[int, int]
"""Moment of the backward pass: index of an operator, and index of the gradient it computes.

The index after the last gradient is the conversion of a parameter's gradient.
"""


def gradients(product: ModelOperator, forward: Forward) -> Sequence[int]:
    """Return the argument indices of factors with gradients, in the order of computation."""
    return [place for place, read in factors(product, forward).items() if read.gradient]


def has_joint_gradients(product: ModelOperator) -> bool:
    """Return whether one kernel computes the gradients of all factors of a product."""
    return convolves(product) or attends(product)


class UnreadValues:
    """Liveness of saved tensors in the backward pass.

    Args:
        saved: bound on the saved tensors.
    """

    def __init__(self, saved: SavedTensorsBound) -> None:
        self.graph, self._saved, self._forward = saved.graph, saved, saved.passes[0].forward
        self._cache: dict[Moment, Readers] = {}

    def of(self, moment: Moment) -> Readers:
        """Return the operators with unread saved tensors."""
        if moment not in self._cache:
            self._cache[moment] = self._of(moment)
        return self._cache[moment]

    def _of(self, moment: Moment) -> Readers:
        place, selected = moment
        passed: set[int] = set()
        for index in range(place + 1, len(self.graph.operators)):
            operator = self.graph.operators[index]
            if any(self._is_pending(operator, read, moment, passed) for read in operator.reads):
                passed.add(index)
        owned = self.graph.operators[place]
        before, rest = frozenset(range(place)), frozenset(passed)
        if pools(owned) or (
            not has_joint_gradients(owned) and selected == len(gradients(owned, self._forward))
        ):
            return Readers(before, rest)  # the saved tensors have been read
        if has_joint_gradients(owned):
            return Readers(
                before,
                rest,
                unscaled=frozenset((place, item) for item in factors(owned, self._forward)),
            )
        # The gradient of a factor is computed with the other factor.
        now, *then = (
            (place, self._forward.other(owned, item))
            for item in gradients(owned, self._forward)[selected:]
        )
        return Readers(before, rest, frozenset(then), frozenset({now}))

    def has_gradient(self, value: int) -> bool:
        """Return whether a gradient of a value is computed at all."""
        return bool(self._incoming_reads.get(self._forward.root(value)))

    def reads_gradient(self, value: int) -> bool:
        """Return whether a kernel reads the gradient of a value."""
        producer = self._forward.made_by(value)
        return producer is not None and self.gradient_is_read[self.graph.places[producer.id]]

    def _is_pending(
        self, operator: ModelOperator, read: ModelRead, moment: Moment, passed: set[int]
    ) -> bool:
        """Return whether the gradient of an operand is pending, with its sources live."""
        producer = self._forward.made_by(read.value)
        if (
            not read.gradient
            or producer is None
            or self.materializes_gradients(operator)
            or self.reduces_gradient(operator, read)
        ):
            return False
        if self._outgoing_reads[self.graph.places[operator.id]] > READS:
            return False
        arriving = self._incoming_reads.get(self._forward.root(read.value), {}).items()
        if sum(many for index, many in arriving if not 0 <= index <= moment[0]) > READS:
            return False
        place = self.graph.places[producer.id]
        # The gradient that the product itself receives has been computed.
        return self.gradient_is_read[place] if place < moment[0] else place in passed

    @cached_property
    def gradient_is_read(self) -> Sequence[bool]:
        """Whether a kernel reads the gradient of each operator."""
        result: list[bool] = []
        for operator in self.graph.operators:
            makers = [self._forward.made_by(read.value) for read in operator.reads if read.gradient]
            on = any(
                producer is not None and result[self.graph.places[producer.id]]
                for producer in makers
            )
            result.append(on or self.materializes_gradients(operator) or norms(operator))
        return result

    @cached_property
    def _incoming_reads(self) -> Mapping[int, Mapping[int, int]]:
        """Maximum reads of each value's gradient, by source operator; -1 for model outputs."""
        return self._reads[0]

    @cached_property
    def _outgoing_reads(self) -> Sequence[int]:
        """Maximum reads of the gradients of each operator's operands."""
        return self._reads[1]

    @cached_property
    def _reads(self) -> tuple[Mapping[int, Mapping[int, int]], Sequence[int]]:
        arriving: defaultdict[int, dict[int, int]] = defaultdict(dict)
        leaving = [0] * len(self.graph.operators)
        for read in self.graph.outputs:
            if self.differentiated(read.value):
                into = arriving[self._forward.root(read.value)]
                into[-1] = into.get(-1, 0) + 1
        for index, operator in reversed(list(enumerate(self.graph.operators))):
            if (
                not arriving[operator.result]
                or self._forward.root(operator.result) != operator.result
            ):
                continue
            leaving[index] = min(
                sum(arriving[operator.result].values()) + self.extra_reads(operator), READS + 1
            )
            for read in (
                read for read in operator.reads if read.gradient and self.differentiated(read.value)
            ):
                into = arriving[self._forward.root(read.value)]
                if self.materializes_gradients(operator) or self.reduces_gradient(operator, read):
                    # A product contributes its gradient, and the scale of its other factor.
                    into[index] = into.get(index, 0) + 2
                else:
                    into[index] = max(into.get(index, 0), leaving[index])
        return arriving, leaving

    def differentiated(self, value: int) -> bool:
        return all(
            self.graph.values[index].differentiated for index in (value, self._forward.root(value))
        )

    def extra_reads(self, operator: ModelOperator) -> int:
        """Return the maximum reads that an operator adds to its own gradient for its operands."""
        extras = extra_count(operator)
        result = extras + sum(
            max(1, self.recomputation_reads[value])
            for value in self.computed_values(self._saved.saved(operator))
        )
        if norms(operator):
            weights = [read.value for read in operator.reads if read.role == "weight"]
            result += 2 * extras + sum(
                1 if self._forward.given(value) else READS + 1 for value in weights
            )
        return result

    @cached_property
    def recomputation_reads(self) -> Sequence[int]:
        """Maximum reads to recompute each value."""
        result = [1] * len(self.graph.values)
        for operator in self.graph.operators:
            if (
                self._forward.multiplies(operator)
                or operator.result in self._saved.not_recomputable
            ):
                continue
            inputs = {self._forward.root(read.value) for read in operator.reads} | set(
                self._saved.saved(operator)
            )
            parts = (
                max(2, result[value]) for value in self.computed_values(inputs - {operator.result})
            )
            result[operator.result] = min(extra_count(operator) + sum(parts), READS + 1)
        return result

    def computed_values(self, values: Iterable[int]) -> Iterable[int]:
        return (value for value in values if not self._forward.given(value))

    def materializes_gradients(self, operator: ModelOperator) -> bool:
        """Return whether the gradients of an operator's operands are materialized."""
        return self._forward.multiplies(operator) or pools(operator)

    def reduces_gradient(self, operator: ModelOperator, read: ModelRead) -> bool:
        """Return whether the gradient of a broadcast operand is reduced, and thus materialized."""
        values = self.graph.values
        return operator.row in SPREADS and whole(values[read.value].numel) < whole(
            values[operator.result].numel
        )


def extra_count(operator: ModelOperator) -> int:
    """Return the maximum number of masks and statistics that an operator saves."""
    return max(
        (
            sum(settings.startswith("extra") for _, settings in cost.saved)
            for cost in operator.costs.values()
        ),
        default=0,
    )

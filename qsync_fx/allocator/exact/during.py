"""What a step certainly holds while it computes the first gradient of a product's factors, as a linear expression of states.

What the product is computed from then waits for that gradient, in whatever order a compiler has the pass run: all that their backward
passes read is there, and of the product itself its factors, the gradient that it is given, and the one that is written. Of a product
behind it the weight's gradient is there, or else what that is computed from.

Invariant: `of` and `expression` count the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import cached_property

from qsync_fx.allocator.exact.formats import Formats
from qsync_fx.allocator.exact.kept import Kept, add
from qsync_fx.allocator.exact.program import Expression
from qsync_fx.predictor.memory.backward import computed_in
from qsync_fx.predictor.memory.telling import convolves
from qsync_fx.predictor.model.value import Name, Operator, Read, StateNames

Sizes = Mapping[Name, int]
"""Bytes by what an operator computes in."""


class During:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept, self.graph, self._forward = kept, kept.graph, kept.passes[0].forward

    @cached_property
    def moments(self) -> Sequence[int]:
        """The places of products whose gradients can be such a moment."""
        return [
            at
            for at, operator in enumerate(self.graph.operators)
            if self._forward.multiplies(operator)
            and not operator.repeated
            and self.graph.values[operator.result].differentiated
            and any(read.gradient for read in operator.reads[:2])
        ]

    def of(self, names: Sequence[StateNames], moment: int) -> float:
        """Returns the bytes under a plan, by the states that it puts operators into."""
        parts = self._beside(moment).items()
        return self._kept.of(names, self._waiting(moment)) + sum(sizes[names[at][0]] for at, sizes in parts)

    def expression(self, formats: Formats, moment: int) -> Expression:
        """Returns the bytes."""
        found = dict(self._kept.expression(formats, self._waiting(moment)))
        for at, sizes in self._beside(moment).items():
            for name, where in formats.precisions[at].items():
                add(found, where, sizes[name])
        return found

    def _waiting(self, moment: int) -> Set[int]:
        return {at for at in range(moment) if self._before[moment] >> at & 1} | {moment}

    def _beside(self, moment: int) -> Mapping[int, Sizes]:
        """What is there beside what was kept: gradients, by the products that they are of."""
        behind = {at: sizes for at, sizes in self._weights.items() if self._before[at] >> moment & 1}
        return {**behind, moment: self._own(moment)}

    @cached_property
    def _before(self) -> Sequence[int]:
        """By operator, those that its own gradients lead to, a bit each: of thousands of operators sets would be gigabytes."""
        found: list[int] = []
        for operator in self.graph.operators:
            leads = 0
            for read in self._factors(operator):
                if read.gradient and (maker := self._forward.made_by(read.value)) is not None:
                    at = self.graph.places[maker.id]
                    leads |= found[at] | 1 << at
            found.append(leads)
        return found

    def _factors(self, operator: Operator) -> Sequence[Read]:
        """What gradients lead to: of a product its factors, of others all that they read."""
        return operator.reads[:2] if self._forward.multiplies(operator) else operator.reads

    def _own(self, moment: int) -> Sizes:
        """The gradient that a product is given, and the smaller one of those that it writes; a convolution writes both at once."""
        operator, found = self.graph.operators[moment], dict[Name, int]()
        factors = [read.value for read in operator.reads[:2] if read.gradient]
        for name, _ in operator.costs:
            narrow, carrier = computed_in(name)
            written = [self._forward.bytes(value, carrier) for value in factors]
            if convolves(operator):
                more = sum(written) + 2 * self._forward.bytes(operator.reads[1].value, carrier)
            else:
                more = min(written)
            found[name] = self._forward.bytes(operator.result, narrow) + more
        return found

    @cached_property
    def _weights(self) -> Mapping[int, Sizes]:
        """By product, the least that its weight's gradient takes, or what that is computed from."""
        found: dict[int, Sizes] = {}
        for at in self.moments:
            operator = self.graph.operators[at]
            weights = [
                read.value
                for read in operator.reads[:2]
                if read.gradient and self.graph.values[self._forward.root(read.value)].source == "parameter"
            ]
            if len(weights) != 1 or at in self._together or self._readers[self._forward.root(weights[0])] > 1:
                continue
            own = self.graph.values[self._forward.root(weights[0])].own
            sizes: dict[Name, int] = {}
            for name, _ in operator.costs:
                narrow, carrier = computed_in(name)
                ways = [self._forward.bytes(weights[0], fmt) for fmt in (carrier, own)]
                sizes[name] = min(*ways, self._forward.bytes(operator.result, narrow))
            found[at] = sizes
        return found

    @cached_property
    def _readers(self) -> Mapping[int, int]:
        """By value, how many operators read it."""
        return Counter(
            root
            for operator in self.graph.operators
            for root in {self._forward.root(read.value) for read in operator.reads}
        )

    @cached_property
    def _together(self) -> Set[int]:
        """The products that are given one gradient with others, under some uniform plan."""
        found: set[int] = set()
        for one in self._kept.passes:
            of: dict[object, set[int]] = {}
            for task in one.backward.tasks:
                if task.library and task.operator:
                    for buffer in task.reads - one.made:
                        of.setdefault(buffer, set()).add(self.graph.places[task.operator])
            found |= set().union(*(places for places in of.values() if len(places) > 1))
        return found

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
from qsync_fx.allocator.exact.waiting import Waiting
from qsync_fx.precision import FORMATS
from qsync_fx.predictor.memory.backward import computed_in
from qsync_fx.predictor.memory.telling import convolves
from qsync_fx.predictor.model.value import Name, Read, StateNames

Sizes = Mapping[Name, int]
"""Bytes by what an operator computes in."""


class During:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept, self.graph, self._forward = kept, kept.graph, kept.passes[0].forward
        self._waiting = Waiting(kept)

    @cached_property
    def moments(self) -> Sequence[int]:
        """The places of products whose gradients can be such a moment."""
        return [
            at
            for at, operator in enumerate(self.graph.operators)
            if self._forward.multiplies(operator)
            and not operator.repeated
            and self._waiting.arrives(operator.result)
            and any(read.gradient for read in operator.reads[:2])
        ]

    def of(self, names: Sequence[StateNames], moment: int) -> float:
        """Returns the bytes under a plan, by the states that it puts operators into."""
        parts = self._beside(moment).items()
        return self._kept.of(names, self._waiting.of(moment)) + sum(sizes[names[at][0]] for at, sizes in parts)

    def expression(self, formats: Formats, moment: int) -> Expression:
        """Returns the bytes."""
        found = dict(self._kept.expression(formats, self._waiting.of(moment)))
        for at, sizes in self._beside(moment).items():
            for name, where in formats.precisions[at].items():
                add(found, where, sizes[name])
        return found

    def _beside(self, moment: int) -> Mapping[int, Sizes]:
        """What is there beside what was kept: gradients, by the products that they are of."""
        behind = {at: sizes for at, sizes in self._weights.items() if self._waiting.before[at] >> moment & 1}
        return {**behind, moment: self._own(moment)}

    def _own(self, moment: int) -> Sizes:
        """The gradient that a product is given, and the least that it writes, with what it reads for that: of a factor in a scaled format a
        copy in the carrier. A convolution writes both gradients at once."""
        operator, found = self.graph.operators[moment], dict[Name, int]()
        places = [place for place in (0, 1) if operator.reads[place].gradient]
        for name, _ in operator.costs:
            narrow, carrier = computed_in(name)
            written = {place: self._forward.bytes(operator.reads[place].value, carrier) for place in places}
            copied = [self._copied(read, name, carrier) for read in operator.reads[:2]]
            if convolves(operator):
                workspace = 2 * self._forward.bytes(operator.reads[1].value, carrier)
                more = sum(written.values()) + sum(copied) + workspace
            else:
                more = min(written[place] + copied[1 - place] for place in places)
            found[name] = self._forward.bytes(operator.result, narrow) + more
        return found

    def _copied(self, read: Read, computes: Name, carrier: Name) -> int:
        wanted = read.wanted.get(computes or "")
        return self._forward.bytes(read.value, carrier) if wanted is not None and FORMATS[wanted].scaled else 0

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

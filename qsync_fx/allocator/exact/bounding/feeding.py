"""What is written for a product in the kernel that computes what it reads: that, and copies of its parameters in its format.

That a product quantizes lies in memory as it is before, for a kernel of its own behind that, and so do parameters that it quantizes.

Invariant: `of` and `expression` count the same, and nothing that is written over what is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from qsync_fx.allocator.exact.bounding.gates import scaled
from qsync_fx.allocator.exact.bounding.kept import Kept, add
from qsync_fx.allocator.exact.linear.program import ONE, Expression, total
from qsync_fx.allocator.exact.terms.formats import Formats
from qsync_fx.predictor.memory.telling import attends, pools, whole
from qsync_fx.predictor.model.value import Name, Operator, Read, StateNames

_ITEMS = (1, 2, 4, 8)
"""Bytes that an element may take."""


@dataclass(frozen=True)
class Fed:
    """
    Attributes:
        at, maker: the places of the product and of what makes what it reads.
        written: by the product's state, the bytes that are written; nothing of states in which it reads the result as it is held.
        held: by the maker's state, those in these.
    """

    at: int
    maker: int
    written: Mapping[StateNames, int]
    held: Mapping[StateNames, int]

    @classmethod
    def of_product(cls, kept: Kept, product: Operator) -> Fed | None:
        """Returns what is written for a product that reads what elementwise operators compute for it alone; None for another."""
        forward, at = kept.passes[0].forward, kept.graph.places[product.id]
        if attends(product) or at in forward.matrices or forward.multiplied(product) != (0, 1):
            return None
        data, *given = product.reads
        maker, root = forward.made_by(data.value), forward.root(data.value)
        if (
            maker is None
            or forward.multiplies(maker)
            or pools(maker)
            or not all(forward.given(read.value) for read in given)
        ):
            return None
        if not {root, *(forward.root(read.value) for read in given)}.isdisjoint(_elsewhere(kept, product)):
            return None
        over, written = _over(kept, maker), dict[StateNames, int]()
        for state in product.costs:
            wanted = [_wanted(read, state) for read in product.reads]
            if wanted[0] is None or scaled(wanted[0]):
                continue
            written[state] = 0
            if all(fmt is not None and not scaled(fmt) for fmt in wanted):
                size = forward.bytes(root, wanted[0])
                copies = zip(given, wanted[1:], strict=True)
                written[state] = size if size not in over else 0
                written[state] += sum(forward.bytes(r.value, fmt) for r, fmt in copies if fmt != _own(kept, r))
        held = {state: size if (size := forward.bytes(root, state[1])) not in over else 0 for state in maker.costs}
        return cls(at, kept.graph.places[maker.id], written, held)

    def of(self, names: Sequence[StateNames]) -> int:
        """Returns the bytes under a plan, by the states that it puts operators into."""
        state = names[self.at]
        return self.written.get(state, self.held[names[self.maker]])

    def expression(self, formats: Formats) -> Expression:
        """Returns the bytes."""
        found: dict[int, float] = {}
        for state, there in formats.states[self.at].items():
            add(found, there, self.written.get(state, 0))
        as_held = total(*((1.0, e) for state, e in formats.states[self.at].items() if state not in self.written))
        for state, there in formats.states[self.maker].items():
            both = formats.program.at_least(total((1.0, as_held), (1.0, there), (-1.0, ONE)))
            add(found, both, self.held[state])
        return found


def _wanted(read: Read, state: StateNames) -> Name:
    return read.wanted.get(state[0] or "")


def _own(kept: Kept, read: Read) -> Name:
    return kept.graph.values[kept.passes[0].forward.root(read.value)].own


def _elsewhere(kept: Kept, product: Operator) -> Set[int]:
    """The values that lie in memory for other products or poolings, or are returned."""
    forward = kept.passes[0].forward
    others = (one for one in kept.graph.operators if one is not product and (forward.multiplies(one) or pools(one)))
    found = {forward.root(read.value) for one in others for read in one.reads}
    return found | {forward.root(read.value) for read in kept.graph.outputs}


def _over(kept: Kept, maker: Operator) -> Set[int]:
    """The bytes of all that what an operator makes may be written over."""
    forward = kept.passes[0].forward
    found, seen, left = set[int](), set[int](), [maker]
    while left:
        operator = left.pop()
        for cost in operator.costs.values():
            found |= {whole(size) for (_, how), size in cost.saved.items() if how.startswith("extra")}
        computed = {forward.root(read.value) for read in operator.reads if not forward.given(read.value)}
        for value in computed - seen:
            seen.add(value)
            found |= {size * whole(kept.graph.values[value].numel) for size in _ITEMS}
            before = forward.made_by(value)
            if before is not None and not forward.multiplies(before):
                left.append(before)
    return found

"""What is certainly written of the gradient behind a norm, where that comes from too much to be computed where it is read.

A norm reads the gradient that it is given twice: it sums up over it, and passes it on with these sums. Along a residual stream that comes
from all products behind, and from what gates keep there. More than `READS` of these a compiler has computed into memory before, in FP32,
for either reading. The same kernel writes the gradient that the product before the norm is given, copies of what that keeps quantized, and
the gradient of a weight behind in another format: all of it is there at once, beside what it is computed from.

From how many buffers it is at least follows from the graph, and from which factors are scaled. It may be fewer where a gradient behind is
written down itself (`Counts.written`), and what is written may be written over something as large: of these plans nothing is said.

Invariant: at whole choices, and gradients written down as a compiler does, what is said to be written is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from qsync_fx.allocator.exact.bounding.counting.counts import Counts
from qsync_fx.allocator.exact.bounding.counting.origins import Norm, Origins
from qsync_fx.allocator.exact.bounding.counting.unary import TOP, added, where as one_where
from qsync_fx.allocator.exact.bounding.gates import Where, scaled
from qsync_fx.allocator.exact.bounding.kept import Kept, add, factors
from qsync_fx.allocator.exact.bounding.waiting import Waiting
from qsync_fx.allocator.exact.linear.program import ONE, Expression, total
from qsync_fx.precision import FP32
from qsync_fx.predictor.memory.backward import READS, computed_in
from qsync_fx.predictor.memory.telling import convolves
from qsync_fx.predictor.model.value import Operator, StateNames


class Norming:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
        waiting: what of it has yet to be read.
    """

    def __init__(self, kept: Kept, waiting: Waiting) -> None:
        self.graph, self._forward = kept.graph, kept.passes[0].forward
        self._origins = Origins(kept, waiting)

    @cached_property
    def norms(self) -> Mapping[int, Norm]:
        """By place, the norms of which something is certain."""
        return {norm.at: norm for norm in self._origins.norms()}

    def expression(self, counts: Counts, where: Where, at: int) -> Expression:
        """Returns the bytes that are written while a norm passes a gradient on."""
        norm, found = self.norms[at], dict[int, float]()
        product = self.graph.operators[norm.product]
        for state, there in where.states[norm.product].items():
            add(found, there, self._copied(product, state))
        if norm.behind is not None:
            for state, there in where.states[norm.behind].items():
                add(found, there, self._converted(self.graph.operators[norm.behind], state))
        scales = list(self._scales(where, norm))
        unless = [counts.written[value] for value in sorted(norm.origins.passed) if value in counts.written]
        unless += [where.states[place].get(state, {}) for place, several in norm.alike.items() for state in several]
        once = norm.origins.many + 1 + norm.extras
        # What sums up reads it first, and what passes it on reads the sums, too.
        for many in (once, once + norm.extras):
            if (few := self._few(where, scales, READS + 1 - many)) is None:
                continue
            sure = total((1.0, ONE), (-1.0, few), *((-1.0, one) for one in unless))
            add(found, where.program.at_least(sure), self._forward.bytes(product.result, FP32.name))
            if many > once:
                for size, states in self._given(product).items():
                    so = total(
                        (-1.0, ONE), (1.0, sure), *((1.0, where.states[norm.product].get(one, {})) for one in states)
                    )
                    add(found, where.program.at_least(so), size)
        return found

    def _few(self, where: Where, scales: Sequence[Expression], least: int) -> Expression | None:
        """Returns where fewer scales than some number are there, at most; None where that is not known not to be so."""
        if least <= 0:
            return {}
        missing = len(scales) - least + 1
        if missing <= 0 or missing > TOP:
            return None
        none = [one_where(total((1.0, ONE), (-1.0, scale))) for scale in scales]
        return added(where.program, none).reaches(missing)

    def _scales(self, where: Where, norm: Norm) -> Iterator[Expression]:
        """Yields where the gradients that products behind give come with the scale of the other factor: of each parameter, once."""
        seen: set[int] = set()
        for at, place in sorted(norm.origins.products):
            for other, read in factors(self.graph.operators[at], self._forward).items():
                root = self._forward.root(read.value)
                if other == place or root in seen or not self._forward.given(root):
                    continue
                seen.add(root)
                states = where.states[at].items()
                yield total(*((1.0, there) for state, there in states if scaled(read.wanted.get(state[0] or ""))))

    def _given(self, product: Operator) -> Mapping[int, Sequence[StateNames]]:
        """By its bytes, the gradient that a product is given, in states in which that is narrower than what it is computed from."""
        found: dict[int, list[StateNames]] = {}
        for state in product.costs:
            size = self._forward.bytes(product.result, computed_in(state[0])[0])
            if size < self._forward.bytes(product.result, FP32.name):
                found.setdefault(size, []).append(state)
        return found

    def _copied(self, product: Operator, state: StateNames) -> int:
        """The bytes of copies of a product's scaled factors in the carrier, where one kernel computes all gradients with them."""
        if not convolves(product):
            return 0
        # Another product that reads the same has had the copy made, and nobody reads what it is of.
        alone = (read for read in factors(product, self._forward).values() if self._origins.alone(read.value))
        carrier = computed_in(state[0])[1]
        return sum(self._forward.bytes(one.value, carrier) for one in alone if scaled(one.wanted.get(state[0] or "")))

    def _converted(self, behind: Operator, state: StateNames) -> int:
        """The bytes of the gradient of a convolution's weight as it is computed, where that is converted to the weight's format."""
        weight, carrier = behind.reads[1].value, computed_in(state[0])[1]
        found = self._forward.bytes(weight, carrier)
        return found if found < self._forward.bytes(weight, FP32.name) else 0

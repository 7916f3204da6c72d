"""From what the gradients behind norms are computed at least, under any plan that writes none of them down.

Each product behind has written a gradient of its own, and each gate keeps something that no other does: its result, a mask, or in place of
these what it is computed again from, the statistics of a norm among that, which is followed by it alone.

Invariant: what is told apart is so under any plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from qsync_fx.allocator.exact.bounding.kept import Kept, norms
from qsync_fx.allocator.exact.bounding.waiting import Waiting, gradients
from qsync_fx.precision import FP32
from qsync_fx.predictor.memory.backward import computed_in
from qsync_fx.predictor.memory.telling import GATES, HEAVY, attends, convolves, pools, whole
from qsync_fx.predictor.model.value import Operator, StateNames

_ADDS = ("add", "sub", "rsub")
"""What passes its gradient on to each operand as it is, and keeps nothing."""
_OF_ROWS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class Origin:
    """What the gradient of a value is computed from at least.

    Attributes:
        products: the places of products that have written some of it, each with that of the factor.
        gates: the places of the gates that it has passed.
        passed: the values whose gradients it is computed from, with itself.
    """

    products: Set[tuple[int, int]]
    gates: Set[int]
    passed: Set[int]

    @property
    def many(self) -> int:
        return len(self.products) + len(self.gates)


@dataclass(frozen=True)
class Norm:
    """A norm of a product's result.

    Attributes:
        at, product: their places.
        origins: of the gradient that it is given.
        extras: how many statistics it keeps at least.
        behind: the place of the convolution the gradient of whose weight the same kernel converts; None where that is not known.
        alike: by the place of an operator, the states in which something may be read of the size that is written.
    """

    at: int
    product: int
    origins: Origin
    extras: int
    behind: int | None
    alike: Mapping[int, Sequence[StateNames]]


class Origins:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
        waiting: what of it has yet to be read.
    """

    def __init__(self, kept: Kept, waiting: Waiting) -> None:
        self._kept, self._waiting = kept, waiting
        self.graph, self._forward = kept.graph, kept.passes[0].forward
        self._known: dict[int, Origin | None] = {}

    def norms(self) -> Iterator[Norm]:
        """Yields those of which it is known, in a model of one graph of which nothing is repeated."""
        kinds = {(operator.repeated, operator.graph) for operator in self.graph.operators}
        if len(kinds) > 1 or any(repeated for repeated, _ in kinds):
            return
        for at, operator in enumerate(self.graph.operators):
            if norms(operator) and not operator.row.startswith(_OF_ROWS) and self._waiting.arrives(operator.result):
                found = self._norm(at, operator)
                if found is not None:
                    yield found

    def alone(self, value: int) -> bool:
        """Whether one product reads a value, once."""
        root, products = self._forward.root(value), filter(self._forward.multiplies, self.graph.operators)
        return sum(self._forward.root(read.value) == root for one in products for read in one.reads) == 1

    def _norm(self, at: int, operator: Operator) -> Norm | None:
        operand, *weights = (read.value for read in operator.reads)
        value = self._forward.root(operand)
        maker, only = self._forward.made_by(value), self._readers[value] == [at]
        if maker is None or not (self._forward.multiplies(maker) and only and operator.reads[0].gradient):
            return None
        product = self.graph.places[maker.id]
        if attends(maker) or product in self._forward.matrices or not gradients(maker, self._forward):
            return None
        if product != at - 1:
            return None  # another kernel may be between what is to be done for both
        keeps = any(result.at == at and result.value == value for result in self._kept.results)
        origin, extras = self._origin(operator.result), _extras(operator)
        if origin is None or not (keeps and extras and all(map(self._forward.given, weights))):
            return None
        origin = Origin(origin.products, frozenset(g for g in origin.gates if self._told(g, at)), origin.passed)
        alike = self._alike(self._forward.bytes(value, FP32.name), origin, value)
        return None if alike is None else Norm(at, product, origin, extras, self._behind(at), alike)

    def _behind(self, norm: int) -> int | None:
        """Returns the place of the convolution that is next behind a norm of what computes gradients, if its weight is its own."""
        for at, operator in enumerate(self.graph.operators[norm + 1 :], norm + 1):
            if not self._waiting.arrives(operator.result) or not self._waiting.writes(operator):
                continue
            read = operator.reads[1] if convolves(operator) else None
            if read is None or not read.gradient or not self._forward.given(read.value):
                return None
            root = self._forward.root(read.value)
            own = root == read.value and self._readers[root] == [at] and self.graph.values[root].own == FP32.name
            return at if own and self.graph.values[root].source == "parameter" else None
        return None

    def _origin(self, value: int) -> Origin | None:
        """Returns from what the gradient of a value is computed; None where something else may be done with it on the way."""
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: int) -> Origin | None:
        products, gates, passed = set[tuple[int, int]](), set[int](), {value}
        if value in self._returned:
            return None
        for at in self._readers[value]:
            operator = self.graph.operators[at]
            reads = [read for read in operator.reads if self._forward.root(read.value) == value]
            if not any(read.gradient for read in reads) or not self._waiting.arrives(operator.result):
                continue
            if self._forward.multiplies(operator):
                places = gradients(operator, self._forward)
                if attends(operator) or at in self._forward.matrices:
                    return None
                products |= {(at, p) for p in places if self._forward.root(operator.reads[p].value) == value}
                continue
            gate = self._gates_alone(operator)
            if not gate and (operator.row not in _ADDS or any(self._waiting.summed(operator, read) for read in reads)):
                return None
            behind = self._origin(operator.result)
            if behind is None or self._forward.root(operator.result) != operator.result:
                return None
            products |= behind.products
            gates |= behind.gates | ({at} if gate else set())
            passed |= behind.passed
        return Origin(products, gates, passed)

    def _gates_alone(self, operator: Operator) -> bool:
        """Whether an operator is a gate that keeps its result, or something in its place."""
        gate = operator.row in GATES and list(self._kept.saved(operator)) == [operator.result]
        return gate and self._kept.formats_of(self.graph.places[operator.id], operator.result) is not None

    def _told(self, gate: int, but: int) -> bool:
        """Whether what a gate keeps is told apart from what all others on the way keep, and from what a norm does."""
        before = self._norms_before(gate)
        if before != {but}:
            return bool(before)
        maker = self._forward.made_by(self.graph.operators[gate].reads[0].value)
        if maker is None or maker.row not in _ADDS:
            return False
        # What it is computed again from beside that norm: a gate's result, or what that is computed again from.
        others = (self._forward.made_by(read.value) for read in maker.reads)
        return any(
            other is not None and self._gates_alone(other) and self._norms_before(self.graph.places[other.id])
            for other in others
        )

    def _norms_before(self, gate: int) -> Set[int]:
        """Returns the norms whose statistics a gate's result is computed again from, and that of no other gate."""
        found: set[int] = set()
        left = [read.value for read in self.graph.operators[gate].reads]
        while left:
            value = self._forward.root(left.pop())
            maker = self._forward.made_by(value)
            if maker is None or len(self._readers[value]) != 1 or value in self._returned:
                continue
            if norms(maker) and _extras(maker):
                found.add(self.graph.places[maker.id])
            elif maker.row in _ADDS:
                left += [read.value for read in maker.reads]
        return found

    def _alike(self, size: int, origin: Origin, operand: int) -> Mapping[int, Sequence[StateNames]] | None:
        """Returns where something of a size may be read: something in whose place what is written may be; None where that is not known."""
        found: defaultdict[int, list[StateNames]] = defaultdict(list)
        for at, place in sorted(origin.products):
            product = self.graph.operators[at]
            value = product.reads[place].value
            found[at] += [
                state for state in product.costs if self._forward.bytes(value, computed_in(state[0])[1]) == size
            ]
        values, left = set[int](), [operand, *origin.passed]
        while left:
            value = self._forward.root(left.pop())
            maker = self._forward.made_by(value)
            if value in values or maker is None:
                continue
            values.add(value)
            at = self.graph.places[maker.id]
            sizes = {*_extra_bytes(maker), whole(self.graph.values[value].numel)}
            if maker.row in HEAVY or size in sizes:
                return None
            found[at] += [state for state in maker.costs if self._forward.bytes(value, state[1]) == size]
            for reader in (at, *self._readers[value]):
                found[reader] += self._reads_of(reader, value, size)
            if not self._forward.multiplies(maker) and not pools(maker):
                left += [read.value for read in maker.reads]
        return {at: list(dict.fromkeys(states)) for at, states in sorted(found.items()) if states}

    def _reads_of(self, at: int, value: int, size: int) -> Iterator[StateNames]:
        """Yields the states in which an operator has a value lie, or keeps it, in that many bytes."""
        operator = self.graph.operators[at]
        name = self.graph.values[value].name
        maker = self._forward.made_by(value)
        # Others keep a product's result as it is at widest.
        own = maker is not None and self._forward.multiplies(maker)
        for state, cost in operator.costs.items():
            formats: set[str] = set()
            if not own:
                formats |= {how for known, how in cost.saved if known == name and how and not how.startswith("extra")}
            if self._forward.multiplies(operator):
                reads = [read for read in operator.reads if self._forward.root(read.value) == value]
                formats |= {fmt for read in reads if (fmt := read.wanted.get(state[0] or "")) is not None}
            if any(self._forward.bytes(value, fmt) == size for fmt in formats):
                yield state

    @cached_property
    def _readers(self) -> Mapping[int, Sequence[int]]:
        found: defaultdict[int, list[int]] = defaultdict(list)
        for at, operator in enumerate(self.graph.operators):
            for value in dict.fromkeys(self._forward.root(read.value) for read in operator.reads):
                found[value].append(at)
        return found

    @cached_property
    def _returned(self) -> Set[int]:
        return {self._forward.root(read.value) for read in self.graph.outputs}


def _extras(operator: Operator) -> int:
    """How many statistics a norm keeps at least."""
    return min((sum(how.startswith("extra") for _, how in cost.saved) for cost in operator.costs.values()), default=0)


def _extra_bytes(operator: Operator) -> Set[int]:
    costs = operator.costs.values()
    return {whole(size) for cost in costs for (_, how), size in cost.saved.items() if how.startswith("extra")}

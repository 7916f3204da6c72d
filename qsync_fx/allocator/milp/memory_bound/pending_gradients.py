"""What gradients that wait are computed from, in the order in which the backward pass is written, as a linear expression of states.

Behind the other side of a residual a gradient waits for its operator. It lies nowhere until then: it is computed from gradients that
products have written, and from what gates keep, and these are there. What would be computed from too many of these a compiler writes down
sooner, and holds that instead: a whole variable (`counts`), as that follows from the whole plan.

Invariant: at the best of these variables the expression is no more than what is held of that.

What is certainly written of the gradient behind a norm, where that comes from too much to be computed where it is read.

A norm reads the gradient that it is given twice: it sums up over it, and passes it on with these sums. Along a residual stream that comes
from all products behind, and from what gates keep there. More than `READS` of these a compiler has computed into memory before, in FP32,
for either reading. The same kernel writes the gradient that the product before the norm is given, copies of what that keeps quantized, and
the gradient of a weight behind in another format: all of it is there at once, beside what it is computed from.

From how many buffers it is at least follows from the graph, and from which factors are scaled. It may be fewer where a gradient behind is
written down itself (`Counts.written`), and what is written may be written over something as large: of these plans nothing is said.

Invariant: at whole choices, and gradients written down as a compiler does, what is said to be written is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from qsync_fx.allocator.milp.format_variables import Spread
from qsync_fx.allocator.milp.linear_program import (
    CONSTANT,
    INFINITY,
    ONE,
    Expression,
    LinearProgram,
    constant,
    total,
)
from qsync_fx.allocator.milp.memory_bound.fusion_read_counts import Counts, GradientSources, Norm
from qsync_fx.allocator.milp.memory_bound.relu_masks import Where, scaled
from qsync_fx.allocator.milp.memory_bound.saved_bound import SavedTensorsBound, add, factors, norms
from qsync_fx.allocator.milp.memory_bound.unary_encoding import TOP, added, where as one_where
from qsync_fx.allocator.milp.memory_bound.unread_values import (
    PASSING,
    Moment,
    UnreadValues,
    gradients,
    yet,
)
from qsync_fx.formats import FP32
from qsync_fx.predictor.memory.backward import READS, computed_in
from qsync_fx.predictor.memory.buffers import convolves, whole
from qsync_fx.predictor.model.model_graph import ModelOperator, StateNames


class NormGradients:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
        waiting: what of it has yet to be read.
    """

    def __init__(self, saved: SavedTensorsBound, waiting: UnreadValues) -> None:
        self.graph, self._forward = saved.graph, saved.passes[0].forward
        self._origins = GradientSources(saved, waiting)

    @cached_property
    def norms(self) -> Mapping[int, Norm]:
        """By place, the norms of which something is certain."""
        return {norm.at: norm for norm in self._origins.norms()}

    def expression(self, counts: Counts, where: Where, index: int) -> Expression:
        """Returns the bytes that are written while a norm passes a gradient on."""
        norm, result = self.norms[index], dict[int, float]()
        product = self.graph.operators[norm.product]
        for state, existing in where.states[norm.product].items():
            add(result, existing, self._copied(product, state))
        if norm.behind is not None:
            for state, existing in where.states[norm.behind].items():
                add(result, existing, self._converted(self.graph.operators[norm.behind], state))
        scales = list(self._scales(where, norm))
        unless = [
            counts.written[value]
            for value in sorted(norm.origins.passed)
            if value in counts.written
        ]
        unless += [
            where.states[place].get(state, {})
            for place, several in norm.alike.items()
            for state in several
        ]
        once = norm.origins.many + 1 + norm.extras
        # What sums up reads it first, and what passes it on reads the sums, too.
        for many in (once, once + norm.extras):
            if (few := self._few(where, scales, READS + 1 - many)) is None:
                continue
            sure = total((1.0, ONE), (-1.0, few), *((-1.0, item) for item in unless))
            add(
                result, where.program.at_least(sure), self._forward.bytes(product.result, FP32.name)
            )
            if many > once:
                for size, states in self._given(product).items():
                    so = total(
                        (-1.0, ONE),
                        (1.0, sure),
                        *((1.0, where.states[norm.product].get(item, {})) for item in states),
                    )
                    add(result, where.program.at_least(so), size)
        return result

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
        visited: set[int] = set()
        for index, place in sorted(norm.origins.products):
            for other, read in factors(self.graph.operators[index], self._forward).items():
                root = self._forward.root(read.value)
                if other == place or root in visited or not self._forward.given(root):
                    continue
                visited.add(root)
                states = where.states[index].items()
                yield total(
                    *(
                        (1.0, existing)
                        for state, existing in states
                        if scaled(read.wanted.get(state[0] or ""))
                    )
                )

    def _given(self, product: ModelOperator) -> Mapping[int, Sequence[StateNames]]:
        """By its bytes, the gradient that a product is given, in states in which that is narrower than what it is computed from."""
        result: dict[int, list[StateNames]] = {}
        for state in product.costs:
            size = self._forward.bytes(product.result, computed_in(state[0])[0])
            if size < self._forward.bytes(product.result, FP32.name):
                result.setdefault(size, []).append(state)
        return result

    def _copied(self, product: ModelOperator, state: StateNames) -> int:
        """The bytes of copies of a product's scaled factors in the carrier, where one kernel computes all gradients with them."""
        if not convolves(product):
            return 0
        # Another product that reads the same has had the copy made, and nobody reads what it is of.
        alone = (
            read
            for read in factors(product, self._forward).values()
            if self._origins.alone(read.value)
        )
        carrier = computed_in(state[0])[1]
        return sum(
            self._forward.bytes(item.value, carrier)
            for item in alone
            if scaled(item.wanted.get(state[0] or ""))
        )

    def _converted(self, behind: ModelOperator, state: StateNames) -> int:
        """The bytes of the gradient of a convolution's weight as it is computed, where that is converted to the weight's format."""
        weight, carrier = behind.reads[1].value, computed_in(state[0])[1]
        result = self._forward.bytes(weight, carrier)
        return result if result < self._forward.bytes(weight, FP32.name) else 0


Key = TypeVar("Key")


class PlanStates:
    """The states of a plan in the place of expressions of choices."""

    def __init__(self, names: Sequence[StateNames]) -> None:
        self.program = LinearProgram()
        self.states: Sequence[Mapping[StateNames, Expression]] = [{state: ONE} for state in names]
        self.precisions: Sequence[Spread] = [{precision: ONE} for precision, _ in names]
        self.outputs: Sequence[Spread] = [{output: ONE} for _, output in names]


@dataclass(frozen=True)
class _Item:
    """Bytes that are there where an expression, 0 or 1, is 1 and nothing of `unless` is."""

    size: int
    where: Expression
    unless: Expression


class PendingGradients:
    """
    Args:
        kept: what a class of devices keeps for the backward pass.
        waiting: what of it has yet to be read.
    """

    def __init__(self, saved: SavedTensorsBound, waiting: UnreadValues) -> None:
        self._kept, self._waiting = saved, waiting
        self.graph, self._forward = saved.graph, saved.passes[0].forward
        self.norming = NormGradients(saved, waiting)
        self._counts: tuple[Where, Counts] | None = None
        self._known: dict[Moment, Expression] = {}
        self._repeated = any(operator.repeated for operator in self.graph.operators)
        self._counted_elsewhere = {result.value for result in saved.results}
        self._gates = {gate.at: gate for gate in saved.gates}

    def of(
        self, planned: PlanStates, moment: Moment, above: float = 0.0, exact: bool = True
    ) -> float:
        """Returns the bytes under a plan; less, where they are no more than `above`, and without `exact`, which is sooner known."""
        result, program = self.expression(planned, moment), planned.program
        if constant(result) is not None or program.most(result) <= above:
            return result.get(CONSTANT, 0.0)
        before, program.costs = program.costs, [0.0] * len(program.costs)
        for variable, factor in result.items():
            if variable != CONSTANT:
                program.costs[variable] = factor / _UNIT
        solved = program.solve(0.0, INFINITY, relaxed=True)
        if solved.values is None or (exact and solved.between(program.choices).any()):
            solved = program.solve(0.0, INFINITY)
        program.costs = before
        return result.get(CONSTANT, 0.0) + solved.objective * _UNIT

    def expression(self, where: Where, moment: Moment) -> Expression:
        """Returns the bytes, with variables that are at their best where these are least."""
        if self._repeated:
            return {}
        if self._counts is None or self._counts[0] is not where:
            self._counts, self._known = (where, Counts(self._kept, self._waiting, where)), {}
        if moment not in self._known:
            self._known[moment] = self._expression(self._counts[1], where, moment)
        return self._known[moment]

    def _expression(self, counts: Counts, where: Where, moment: Moment) -> Expression:
        program, place = where.program, moment[0]
        existing: dict[int, Expression] = {}
        read: dict[int, Expression] = {}
        result: dict[int, float] = {}
        for value in self._arrived(counts, place):
            now = read[value] = self._read(counts, value, moment, existing)
            if not any(now.values()):
                existing[value] = {}
                continue
            behind = [index for index in counts.arriving[value] if index > place or index < 0]
            written = counts.written.get(value, {})
            if len(behind) < len(counts.arriving[value]):
                written = counts.written_down(value, behind) if written else {}
            existing[value] = program.any_of([now], written) if written else now
            if written:
                both = (
                    written
                    if constant(now) == 1
                    else program.any_of([written], total((1.0, ONE), (-1.0, now)))
                )
                self._write(result, where, value, both)
            self._hold(
                result,
                program,
                existing[value],
                self._gradients(where, value, [index for index in behind if index > place]),
            )
        for value, now in read.items():
            maker = self._forward.made_by(value)
            if maker is not None and self.graph.places[maker.id] > place and any(now.values()):
                self._hold(
                    result,
                    program,
                    now,
                    self._gate(counts, where, self.graph.places[maker.id], moment),
                )
        if moment[1] == PASSING:
            add(result, self.norming.expression(counts, where, place), 1.0)
        return result

    def _arrived(self, counts: Counts, place: int) -> Iterator[int]:
        """Yields the values whose gradients have come from operators behind a place, those of later operators later."""
        values = (
            value
            for value, into in counts.arriving.items()
            if any(index > place or index < 0 for index in into)
        )
        return iter(sorted(values, key=self._place))

    def _place(self, value: int) -> int:
        maker = self._forward.made_by(value)
        return -1 if maker is None else self.graph.places[maker.id]

    def _read(
        self, counts: Counts, value: int, moment: Moment, existing: Mapping[int, Expression]
    ) -> Expression:
        """Returns where what is computed from the gradient of a value has yet to be."""
        maker = self._forward.made_by(value)
        if maker is None:
            return {}
        index = self.graph.places[maker.id]
        if index <= moment[0]:
            return ONE if index < yet(moment) and self._waiting.used[index] else {}
        if self._waiting.writes(maker) or norms(maker):
            return {}
        passed = [
            existing.get(self._forward.root(read.value), {})
            for read in maker.reads
            if read.gradient
            and not self._forward.given(read.value)
            and not self._waiting.summed(maker, read)
        ]
        return counts.program.any_of(passed)

    def _write(self, result: dict[int, float], where: Where, value: int, both: Expression) -> None:
        """Adds a gradient that is written down, in the format of the value."""
        sizes = {fmt: self._forward.bytes(value, fmt) for fmt in where.outputs[self._place(value)]}
        least = min(sizes.values())
        add(result, both, least)
        for fmt, current in where.outputs[self._place(value)].items():
            if sizes[fmt] > least:
                wide = where.program.any_of([current], total((1.0, ONE), (-1.0, both)))
                add(result, wide, sizes[fmt] - least)

    def _hold(
        self,
        result: dict[int, float],
        program: LinearProgram,
        existing: Expression,
        items: Iterable[_Item],
    ) -> None:
        """Adds bytes that are held where an expression is 1."""
        gone = {} if constant(existing) == 1 else total((1.0, ONE), (-1.0, existing))
        for item in items:
            if constant(item.unless) != 0:
                # Several things may be otherwise at once, so that what is left is no expression of its own.
                rest = program.at_least(total((1.0, item.where), (-1.0, item.unless), (-1.0, gone)))
            else:
                rest = existing if constant(item.where) == 1 else program.any_of([item.where], gone)
            add(result, rest, item.size)

    def _gradients(self, where: Where, value: int, behind: Sequence[int]) -> Iterator[_Item]:
        """The gradients of a value that products have written."""
        for index in behind:
            product = self.graph.operators[index]
            if not self._forward.multiplies(product):
                continue
            for place in gradients(product, self._forward):
                read = product.reads[place].value
                if self._forward.root(read) == value:
                    sizes = {
                        state: self._forward.bytes(read, computed_in(state[0])[1])
                        for state in product.costs
                    }
                    yield from self._items(where.states[index], sizes)

    def _gate(self, counts: Counts, where: Where, index: int, moment: Moment) -> Iterator[_Item]:
        """What a gate keeps: its result where a product keeps that; elsewhere a byte an element, or what it is computed again from."""
        saved = counts.again.result_kept(index)
        operator = self.graph.operators[index]
        if saved is None or operator.result in self._counted_elsewhere:
            return
        hows = self._kept.formats_of(index, operator.result)
        assert hows is not None
        product = self._product(counts, operator, moment)
        floor = whole(self.graph.values[operator.result].numel) if product is not None else 0
        sizes = {state: self._forward.bytes(operator.result, hows[state]) for state in saved}
        yield _Item(floor, ONE, self._counted(where, index, moment))
        for size, least in _levels(sizes, floor):
            yield _Item(size, total(*((1.0, saved[state]) for state in least)), {})
        if product is not None:
            otherwise = total(
                *((1.0, existing) for existing in saved.values()),
                (1.0, counts.again.lost(operator.result)),
            )
            yield from self._computed_from(counts, where, product, floor, otherwise)

    def _counted(self, where: Where, index: int, moment: Moment) -> Expression:
        """Returns where the mask of a gate counts as what the operators before it keep does."""
        gate, readers = self._gates.get(index), self._waiting.of(moment)
        counts = gate is not None and (index in readers.wholly or index in readers.passed)
        return gate.masked(where, {}) if gate is not None and counts else {}

    def _computed_from(
        self, counts: Counts, where: Where, product: int, floor: int, otherwise: Expression
    ) -> Iterator[_Item]:
        """A product's result that a gate keeps, beyond a number of bytes, but where something is otherwise."""
        keeper = counts.again.keeper(product)
        assert keeper is not None
        hows = self._kept.formats_of(keeper, product)
        assert hows is not None
        outputs = where.outputs[self._place(product)]
        by_state = {
            state: self._forward.bytes(product, hows[state]) for state in where.states[keeper]
        }
        by_output = {fmt: self._forward.bytes(product, fmt) for fmt in outputs}
        # It is kept in the narrower of the two.
        before = floor
        for least in sorted({*by_state.values(), *by_output.values()}):
            if before < least <= min(max(by_state.values()), max(by_output.values())):
                wide = _sum_of(
                    where.states[keeper], [s for s, size in by_state.items() if size >= least]
                )
                narrow = _sum_of(outputs, [fmt for fmt, size in by_output.items() if size < least])
                yield _Item(least - before, wide, total((1.0, otherwise), (1.0, narrow)))
                before = least

    @staticmethod
    def _items(existing: Mapping[Key, Expression], sizes: Mapping[Key, int]) -> Iterator[_Item]:
        for size, least in _levels({key: sizes[key] for key in existing}, 0):
            yield _Item(size, _sum_of(existing, least), {})

    def _product(self, counts: Counts, gate: ModelOperator, moment: Moment) -> int | None:
        """Returns the product's result, of its size, that a gate is computed again from, and no other gate; None for none.

        What keeps it has run, so that it counts once.
        """
        readers = self._waiting.of(moment)
        size = whole(self.graph.values[gate.result].numel)
        values = [self._forward.root(read.value) for read in gate.reads]
        for value in values:
            maker = self._forward.made_by(value)
            if (
                maker is None
                or counts.again.products(value)
                or len(counts.again.readers(value)) != 1
            ):
                continue
            if not self._forward.multiplies(maker):
                values += [self._forward.root(read.value) for read in maker.reads]
                continue
            keeper = counts.again.keeper(value)
            if (
                keeper is None
                or keeper in readers.wholly
                or keeper in readers.passed
                or keeper == moment[0]
            ):
                continue
            available = self._kept.formats_of(keeper, value) is not None
            if available and whole(self.graph.values[value].numel) == size:
                return value
        return None


_UNIT = 1e6
"""Bytes that variables are in: rows of a program are to be of one size."""


def _levels(sizes: Mapping[Key, int], before: int) -> Iterator[tuple[int, Sequence[Key]]]:
    """Yields by how much sizes grow beyond one, and which are as large."""
    for size in sorted(set(sizes.values())):
        if size > before:
            yield size - before, [key for key, other in sizes.items() if other >= size]
            before = size


def _sum_of(spread: Mapping[Key, Expression], keys: Sequence[Key]) -> Expression:
    """Returns where something is in one of several states, of which it is in one."""
    return ONE if len(keys) == len(spread) else total(*((1.0, spread[key]) for key in keys))

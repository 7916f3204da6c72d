"""Lower bound on the live set behind pending gradients, as linear expressions of states.

A gradient at the other branch of a residual is pending until its operator runs. It is not
materialized: it is computed from gradients that products have written and from tensors that gates
save, and these are live (`PendingGradients`). A compiler materializes a gradient with too many
sources, which is then live instead; an integer variable per gradient states this
(`fusion_read_counts.Counts`), since it depends on the entire plan. `NormGradients` adds the buffers
that are written at a norm.

Invariant: minimized over these variables, an expression is at most the live bytes of the sources.
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
    """Lower bound on the bytes written while a norm passes a gradient on.

    A norm reads its incoming gradient twice: to reduce it, and to pass it on with the reduced
    values. Along a residual stream this gradient depends on all products and gates behind. If a
    reading needs more than `READS` buffers, the compiler materializes the gradient first, in FP32.
    The same kernel writes the gradient of the product before the norm, copies of the product's
    quantized factors, and the converted gradient of a later weight. All of them are live at once,
    with their sources.

    The minimum number of sources follows from the graph and from which factors are scaled. It is
    not valid if a gradient behind is materialized (`Counts.written`), and a written buffer may
    reuse the memory of an equally large one; the bound is then 0 for that buffer.

    Args:
        saved: bound on the saved tensors.
        waiting: tensors with a later use, by moment.
    """

    def __init__(self, saved: SavedTensorsBound, waiting: UnreadValues) -> None:
        self.graph, self._forward = saved.graph, saved.passes[0].forward
        self._origins = GradientSources(saved, waiting)

    @cached_property
    def norms(self) -> Mapping[int, Norm]:
        """Norms with a bound, by index."""
        return {norm.at: norm for norm in self._origins.norms()}

    def expression(self, counts: Counts, where: Where, index: int) -> Expression:
        """Return a lower bound on the bytes written while a norm passes a gradient on."""
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
        # The reduction reads it first; the kernel that passes it on also reads the reduced values.
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
        """Return the indicator of fewer than `least` scales; None if that cannot be excluded."""
        if least <= 0:
            return {}
        missing = len(scales) - least + 1
        if missing <= 0 or missing > TOP:
            return None
        none = [one_where(total((1.0, ONE), (-1.0, scale))) for scale in scales]
        return added(where.program, none).reaches(missing)

    def _scales(self, where: Where, norm: Norm) -> Iterator[Expression]:
        """Yield indicators that product gradients come with the scale of a parameter, once each."""
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
        """Return the states by bytes of a product's incoming gradient, if narrower than FP32."""
        result: dict[int, list[StateNames]] = {}
        for state in product.costs:
            size = self._forward.bytes(product.result, computed_in(state[0])[0])
            if size < self._forward.bytes(product.result, FP32.name):
                result.setdefault(size, []).append(state)
        return result

    def _copied(self, product: ModelOperator, state: StateNames) -> int:
        """Return the bytes of copies of a product's scaled factors in the compute dtype.

        Only convolutions count: one kernel computes all of their gradients with these copies.
        """
        if not convolves(product):
            return 0
        # If another product reads the same value, it has made the copy, and the original is dead.
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
        """Return the bytes of a convolution's weight gradient that is converted to FP32."""
        weight, carrier = behind.reads[1].value, computed_in(state[0])[1]
        result = self._forward.bytes(weight, carrier)
        return result if result < self._forward.bytes(weight, FP32.name) else 0


Key = TypeVar("Key")


class PlanStates:
    """States of a plan, as constants instead of expressions of choices."""

    def __init__(self, names: Sequence[StateNames]) -> None:
        self.program = LinearProgram()
        self.states: Sequence[Mapping[StateNames, Expression]] = [{state: ONE} for state in names]
        self.precisions: Sequence[Spread] = [{precision: ONE} for precision, _ in names]
        self.outputs: Sequence[Spread] = [{output: ONE} for _, output in names]


@dataclass(frozen=True)
class _Item:
    """Bytes that are live where an indicator is 1 and `unless` is 0."""

    size: int
    where: Expression
    unless: Expression


class PendingGradients:
    """Lower bound on the live sources of pending gradients.

    Args:
        saved: bound on the saved tensors.
        waiting: tensors with a later use, by moment.
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
        """Return the bound in bytes under a plan.

        The result may be lower if it is at most `above`, or if not `exact`, which is faster.
        """
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
        """Return the bound in bytes as an expression, valid when minimized over its variables."""
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
        """Yield the values with gradients from operators behind a place, in program order."""
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
        """Return the indicator that a gradient computed from a value's gradient is pending."""
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
        """Add a materialized gradient, in the format of the value."""
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
        """Add bytes that are live where an indicator is 1."""
        gone = {} if constant(existing) == 1 else total((1.0, ONE), (-1.0, existing))
        for item in items:
            if constant(item.unless) != 0:
                # Several exceptions can be active at once, so that the rest is not an indicator.
                rest = program.at_least(total((1.0, item.where), (-1.0, item.unless), (-1.0, gone)))
            else:
                rest = existing if constant(item.where) == 1 else program.any_of([item.where], gone)
            add(result, rest, item.size)

    def _gradients(self, where: Where, value: int, behind: Sequence[int]) -> Iterator[_Item]:
        """Yield the gradients of a value that products have written."""
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
        """Yield the bytes that a gate saves: result if a product saves it, else mask or sources."""
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
        """Return the indicator that a gate's mask counts with the unread saved tensors."""
        gate, readers = self._gates.get(index), self._waiting.of(moment)
        counts = gate is not None and (index in readers.wholly or index in readers.passed)
        return gate.masked(where, {}) if gate is not None and counts else {}

    def _computed_from(
        self, counts: Counts, where: Where, product: int, floor: int, otherwise: Expression
    ) -> Iterator[_Item]:
        """Yield a product's result behind a gate, beyond `floor` bytes, unless `otherwise`."""
        keeper = counts.again.keeper(product)
        assert keeper is not None
        hows = self._kept.formats_of(keeper, product)
        assert hows is not None
        outputs = where.outputs[self._place(product)]
        by_state = {
            state: self._forward.bytes(product, hows[state]) for state in where.states[keeper]
        }
        by_output = {fmt: self._forward.bytes(product, fmt) for fmt in outputs}
        # The result is saved in the narrower of both formats.
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
        """Return the product result from which a gate, and no other gate, is recomputed, if any.

        It has the size of the gate's result. The operator that saves it has run its backward pass,
        so that it counts once.
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
"""Bytes per unit of the objective, so that factors of a program have similar size."""


def _levels(sizes: Mapping[Key, int], before: int) -> Iterator[tuple[int, Sequence[Key]]]:
    """Yield the increments between ascending sizes, with the keys that are at least as large."""
    for size in sorted(set(sizes.values())):
        if size > before:
            yield size - before, [key for key, other in sizes.items() if other >= size]
            before = size


def _sum_of(spread: Mapping[Key, Expression], keys: Sequence[Key]) -> Expression:
    """Return the indicator that the state is one of several keys."""
    return ONE if len(keys) == len(spread) else total(*((1.0, spread[key]) for key in keys))

"""What a step certainly holds when its backward pass begins, as a linear expression of states.

All that the backward pass reads of the forward pass is there then, and the gradients that it begins with. Certain of that are the factors
of products, in the formats that these compute in, the results of products that others keep, masks and statistics (of ReLUs: `gates`), and
what others keep that no compiler can compute again: what follows from a product's result that nobody keeps (`lost`). Each value counts once
a format. What may be computed again under some plan is left out. So at whole choices the expression is no more than the judge says of any
plan, and in most plans the better part of it.

Invariant: `of` and `expression` count the same.

Both passes of a plan as the judge of plans has them, and what the second reads of the first.

Invariant: says what is read of buffers that the forward pass writes, of nothing that is there before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from qsync_fx.allocator.milp.format_variables import Formats, Spread
from qsync_fx.allocator.milp.linear_program import CONSTANT, Expression, total
from qsync_fx.allocator.milp.memory_bound.relu_masks import Lying, MaskedActivation, Residing, gates
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.cost_mapper.plan_states import States, states
from qsync_fx.predictor.memory.backward import Backward
from qsync_fx.predictor.memory.buffers import GATES, GATHERS, Buffer, attends, whole
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead, Name, StateNames


class Passes:
    """Both passes of a plan, and what the second reads of the first."""

    def __init__(self, result: States) -> None:
        self.forward = Forward(result)
        self.backward = Backward(self.forward)
        self.made = {buffer for task in self.forward.tasks for buffer in task.writes}
        self.read = self.made & {buffer for task in self.backward.tasks for buffer in task.reads}

    def reads_factor(self, index: int, place: int) -> bool:
        """Whether the factor of a product is read again; of one that is there before the step, nothing is held."""
        if (index, place) not in self.forward.factors:
            return False
        buffer = self.forward.factors[index, place]
        return buffer is None or buffer in self.read

    def reads_kept(self, index: int, name: str) -> bool:
        """Whether what an operator keeps of a value is read again."""
        return any(
            buffer.name == name and buffer in self.read
            for buffer in self.forward.kept.get(index, ())
        )

    def mask(self, index: int) -> Buffer | None:
        """Returns what the gate at a place keeps in place of its result; None where that is kept, or computed again."""
        name = self.forward.graph.values[self.forward.graph.operators[index].result].name
        saved = self.forward.kept.get(index, ())
        return next((item for item in saved if item.name == name and item.format is None), None)

    def reads_gate(self, index: int) -> bool:
        """Whether what the gate at a place keeps is read again; of several that its result is computed from, some."""
        mask = self.mask(index)
        return not self.read.isdisjoint(
            self.forward.kept.get(index, ()) if mask is None else [mask]
        )

    def extras(self, index: int) -> Mapping[str, int]:
        """Returns the bytes of what an operator keeps beside values and reads again, by name."""
        return {
            buffer.name: buffer.bytes
            for buffer in self.forward.extras(index)
            if buffer in self.read
        }


def extras_kept(passes: Sequence[Passes], index: int) -> Mapping[StateNames, int]:
    """By state, the bytes of masks and statistics that an operator keeps: what it does in that state, or in all that were seen."""
    available = [item.extras(index) for item in passes]
    least = sum(min(item.get(name, 0) for item in available) for name in available[0])
    visited: dict[StateNames, int] = {}
    for item, sizes in zip(passes, available, strict=True):
        state = item.forward.states.names[index]
        visited[state] = min(visited.get(state, sum(sizes.values())), sum(sizes.values()))
    return {
        state: visited.get(state, least) for state in passes[0].forward.graph.operators[index].costs
    }


Key = tuple[int, Name]
"""A value, by its place, and the format that it is kept in."""


@dataclass(frozen=True)
class Factor:
    """A factor of a product: by what that computes in, the format that it is read in; `own` is what is there before the step."""

    at: int
    place: int
    value: int
    wanted: Mapping[Name, Name]
    own: Name


@dataclass(frozen=True)
class _Result:
    """What another operator keeps of a value: by its state, in which format, and of a product's result in a narrower one that it has."""

    at: int
    value: int
    maker: int | None
    kept: Mapping[StateNames, Name]


_One = TypeVar("_One", _Result, MaskedActivation)


@dataclass(frozen=True)
class _Spread:
    """Where things are kept in which format: the same at all moments.

    Attributes:
        formats: of the operators.
        factors, results: of each of them, in the order of `Kept`.
        masks: where gates keep them.
    """

    formats: Formats
    factors: Sequence[Spread]
    results: Sequence[Spread]
    masks: Sequence[Expression]


@dataclass(frozen=True)
class Readers:
    """Operators by what of theirs the backward pass has yet to read.

    Attributes:
        wholly: the places of those of which it is all.
        passed: of those of which it is what they keep of values, and masks: statistics may have been used.
        factors: of a product, which of its factors it is.
        unscaled: of a product, which of its factors it is unless they are in a scaled format, of which a copy has been made.
    """

    wholly: Set[int]
    passed: Set[int]
    factors: Set[tuple[int, int]] = frozenset()
    unscaled: Set[tuple[int, int]] = frozenset()

    def reads(self, factor: Factor, fmt: Name) -> bool:
        """Whether a factor is there, in a format."""
        key = factor.at, factor.place
        if factor.at in self.wholly or key in self.factors:
            return True
        return key in self.unscaled and not (fmt is not None and FORMATS[fmt].scaled)


def factors(product: ModelOperator, forward: Forward) -> Mapping[int, ModelRead]:
    """Returns what a product multiplies, by its place among the readings: of attention query, key and value; of what is no product the
    first two that it reads."""
    places = (
        range(3)
        if attends(product)
        else forward.multiplied(product)
        if forward.multiplies(product)
        else range(2)
    )
    return {place: product.reads[place] for place in places if place < len(product.reads)}


class SavedTensorsBound:
    def __init__(self, part: DeviceClass) -> None:
        self.graph = part.graph
        uniform = [states(part.graph, part.uniform(fmt)) for fmt in part.formats]
        self.passes = passes = [Passes(item) for item in uniform]
        self.factors: list[Factor] = []
        self.results: list[_Result] = []
        self.extras: dict[int, Mapping[StateNames, int]] = {}
        self.gates: list[MaskedActivation] = []
        self._forward = forward = passes[0].forward
        self._spread: _Spread | None = None
        self._incoming = 0
        if any(operator.repeated for operator in self.graph.operators):
            return
        for index, operator in enumerate(self.graph.operators):
            for place, read in (
                factors(operator, forward).items() if forward.multiplies(operator) else ()
            ):
                available = {name: read.wanted.get(name or "") for name, _ in operator.costs}
                if all(available.values()) and all(
                    item.reads_factor(index, place) for item in passes
                ):
                    root = forward.root(read.value)
                    value = read.value if forward.is_part(read.value) else root
                    owned = self.graph.values[root].own if forward.given(read.value) else None
                    self.factors.append(Factor(index, place, value, available, owned))
            # Attention of several kernels keeps masks and more, as others do.
            if not forward.multiplies(operator) or attends(operator):
                self.extras[index] = extras_kept(passes, index)
            if not forward.multiplies(operator):
                self.results += self._values_kept(passes, index)
            elif attends(operator):
                # Attention of one kernel keeps its own result.
                self.results += [
                    item
                    for item in self._values_kept(passes, index)
                    if item.value == operator.result
                ]
        self.gates += gates(self)
        outputs = [read.value for read in self.graph.outputs if not forward.given(read.value)]
        incoming = [value for value in outputs if self.graph.values[value].differentiated]
        self._incoming = sum(self._bytes(value, self.graph.values[value].own) for value in incoming)

    def of(
        self,
        names: Sequence[StateNames],
        readers: Readers | None = None,
        layout: Sequence[Lying] = (),
    ) -> float:
        """Returns the bytes under a plan, by the states that it puts operators into; with `readers` what their backward passes read, and
        values that lie in memory beside."""
        matches: set[Key] = {
            (item.value, fmt) for item in layout if (fmt := item.held(names)) is not None
        }
        for factor in self.factors:
            fmt = factor.wanted[names[factor.at][0]]
            if fmt != factor.own and (readers is None or readers.reads(factor, fmt)):
                matches.add((factor.value, fmt))
        for result in _of(readers, self.results):
            fmt = result.kept[names[result.at]]
            live = fmt if result.maker is None else names[result.maker][1]
            matches.add((result.value, min((fmt, live), key=_width)))
        extras = sum(
            sizes[names[index]]
            for index, sizes in self.extras.items()
            if self._extras_read(readers, index)
        )
        lost: dict[int, bool] = {}
        masks = sum(gate.of(names, lost) for gate in _of(readers, self.gates))
        return (
            sum(self._bytes(*key) for key in matches)
            + extras
            + masks
            + (self._incoming if readers is None else 0)
        )

    def expression(
        self, formats: Formats, readers: Readers | None = None, layout: Sequence[Lying] = ()
    ) -> Expression:
        """Returns the bytes; with `readers` those of what their backward passes read, and of values that lie in memory beside."""
        wants: dict[Key, list[Expression]] = {}
        for item in layout:
            for fmt, where in item.held_in(formats):
                wants.setdefault((item.value, fmt), []).append(where)
        matches: dict[int, float] = {CONSTANT: float(self._incoming if readers is None else 0)}
        if self._spread is None or self._spread.formats is not formats:
            lost: dict[int, Expression] = {}
            self._spread = _Spread(
                formats,
                [self._factor(formats, factor) for factor in self.factors],
                [self._parts(formats, result) for result in self.results],
                [gate.masked(formats, lost) for gate in self.gates],
            )
        for factor, by_format in zip(self.factors, self._spread.factors, strict=True):
            for fmt, where in by_format.items():
                if fmt != factor.own and (readers is None or readers.reads(factor, fmt)):
                    wants.setdefault((factor.value, fmt), []).append(where)
        for result, by_format in zip(self.results, self._spread.results, strict=True):
            if _is_read(readers, result):
                for fmt, where in by_format.items():
                    wants.setdefault((result.value, fmt), []).append(where)
        for index, sizes in self.extras.items():
            if self._extras_read(readers, index):
                for state, where in formats.states[index].items():
                    add(matches, where, sizes[state])
        for gate, masked in zip(self.gates, self._spread.masks, strict=True):
            if _is_read(readers, gate):
                add(matches, masked, gate.mask)
        for key, several in wants.items():
            add(matches, formats.program.any_of(several), self._bytes(*key))
        return matches

    def _extras_read(self, readers: Readers | None, index: int) -> bool:
        if readers is None or index in readers.wholly:
            return True
        return index in readers.passed and not norms(self.graph.operators[index])

    @staticmethod
    def _factor(formats: Formats, factor: Factor) -> Spread:
        """Returns where a factor is read in each format."""
        result: dict[Name, Expression] = {}
        for name, where in formats.precisions[factor.at].items():
            fmt = factor.wanted[name]
            result[fmt] = total((1.0, result.get(fmt, {})), (1.0, where))
        return result

    def _parts(self, formats: Formats, result: _Result) -> Spread:
        """Returns where a value is kept in each format: in one, so that parts of where it is that one are one part."""
        matches: dict[Name, Expression] = {}
        for fmt, where in self._result(formats, result):
            matches[fmt] = total((1.0, matches.get(fmt, {})), (1.0, where))
        return matches

    def _result(self, formats: Formats, result: _Result) -> Iterator[tuple[Name, Expression]]:
        live: Spread = {} if result.maker is None else formats.outputs[result.maker]
        by_format: dict[Name, Expression] = {}
        for state, where in formats.states[result.at].items():
            fmt = result.kept[state]
            by_format[fmt] = total((1.0, by_format.get(fmt, {})), (1.0, where))
        for fmt, where in by_format.items():
            narrower = {
                name: existing for name, existing in live.items() if _width(name) < _width(fmt)
            }
            rest = where
            for name, existing in narrower.items():
                if live.get(fmt) == where and len(live) == len(by_format):
                    break  # it has the format of what it keeps
                # More than both at once would be held as something narrower than it is.
                both = formats.program.all_of([where, existing])
                yield name, both
                rest = total((1.0, rest), (-1.0, both))
            yield fmt, rest

    def _values_kept(self, passes: Sequence[Passes], index: int) -> Iterator[_Result]:
        """Yields what an operator keeps under any plan, but for factors: results of products, and what is lost otherwise."""
        operator, forward = self.graph.operators[index], self._forward
        for value in self.saved(operator):
            maker, saved = forward.made_by(value), self.formats_of(index, value)
            product = maker is not None and forward.multiplies(maker)
            # Of its own result a gate keeps a byte an element.
            gate = operator.row in GATES and operator.result == value
            if maker is None or saved is None or not (product or (value in self.lost and not gate)):
                continue
            if all(item.reads_kept(index, self.graph.values[value].name) for item in passes):
                yield _Result(index, value, self.graph.places[maker.id] if product else None, saved)

    @cached_property
    def residing(self) -> Residing:
        """Finds the values in memory that others are computed from."""
        return Residing(self)

    @cached_property
    def lost(self) -> Set[int]:
        """The values that no compiler computes again, under any plan: they follow from what is not kept, or are gathered."""
        forward, saved, result = self._forward, set[int](), set[int]()
        for operator in self.graph.operators:
            for value in self.saved(operator):
                maker = forward.made_by(value)
                if forward.multiplies(operator) or (
                    maker is not None and forward.multiplies(maker)
                ):
                    saved.add(value)
        for operator in self.graph.operators:
            reads = {forward.root(read.value) for read in operator.reads}
            lost = (
                forward.multiplies(operator)
                or operator.row in GATHERS
                or not result.isdisjoint(reads - saved)
            )
            if lost and forward.root(operator.result) == operator.result:
                result.add(operator.result)
        return result

    def saved(self, operator: ModelOperator) -> Iterable[int]:
        """Returns the values of which an operator keeps something in some state."""
        names = {
            name
            for cost in operator.costs.values()
            for name, settings in cost.saved
            if not settings.startswith("extra")
        }
        return dict.fromkeys(self._forward.root(self._places[name]) for name in sorted(names))

    def formats_of(self, index: int, value: int) -> Mapping[StateNames, Name] | None:
        """The format by state in which an operator keeps a value; None where it does not in each."""
        result: dict[StateNames, Name] = {}
        for state, cost in self.graph.operators[index].costs.items():
            hows = [
                settings
                for name, settings in cost.saved
                if not settings.startswith("extra")
                and self._forward.root(self._places[name]) == value
            ]
            if len(hows) != 1 or not hows[0]:
                return None
            result[state] = hows[0]
        return result

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {value.name: index for index, value in enumerate(self.graph.values)}

    def _bytes(self, value: int, fmt: Name) -> int:
        assert fmt is not None
        live = self.graph.values[value]
        return FORMATS[fmt].dtype.itemsize * whole(live.numel) + whole(live.fixed)


def _of(readers: Readers | None, result: Sequence[_One]) -> Iterator[_One]:
    return (item for item in result if _is_read(readers, item))


def _is_read(readers: Readers | None, result: _Result | MaskedActivation) -> bool:
    return readers is None or result.at in readers.wholly or result.at in readers.passed


def norms(operator: ModelOperator) -> bool:
    """Whether its backward pass sums up what it keeps of statistics before it passes anything on."""
    return "norm" in operator.row


def _width(name: Name) -> int:
    return FORMATS[name].dtype.itemsize if name is not None else 0


def add(result: dict[int, float], where: Expression, size: float) -> None:
    """Adds an expression, as often as `size` says."""
    for variable, factor in where.items():
        result[variable] = result.get(variable, 0.0) + factor * size

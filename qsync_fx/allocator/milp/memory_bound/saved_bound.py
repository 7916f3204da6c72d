"""Lower bound on the live set at the start of the backward pass, as linear expressions of states.

The live set contains the saved tensors and the incoming gradients. The bound counts tensors that
are saved under any plan: factors of products in their compute formats, product results that other
operators save, masks and statistics (for ReLUs: `relu_masks.gates`), and other saved values that no
compiler can recompute (`SavedTensorsBound.not_recomputable`). Each value counts once per format.
Tensors that can be rematerialized under some plan do not count.

Invariant: `of` and `expression` agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from qsync_fx.allocator.milp.format_variables import Formats, Spread
from qsync_fx.allocator.milp.linear_program import CONSTANT, Expression, total
from qsync_fx.allocator.milp.memory_bound.relu_masks import (
    MaskedActivation,
    MaterializedValue,
    MaterializedValueFinder,
    gates,
)
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.cost_mapper.plan_states import States, states
from qsync_fx.predictor.memory.backward import Backward
from qsync_fx.predictor.memory.buffers import GATES, GATHERS, Buffer, attends, whole
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.model.model_graph import ModelOperator, ModelRead, Name, StateNames


class Passes:
    """Both passes of a plan, and the buffers of the forward pass that the backward pass reads.

    Buffers that exist before the step, such as parameters, do not count.
    """

    def __init__(self, result: States) -> None:
        self.forward = Forward(result)
        self.backward = Backward(self.forward)
        self.made = {buffer for task in self.forward.tasks for buffer in task.writes}
        self.read = self.made & {buffer for task in self.backward.tasks for buffer in task.reads}

    def reads_factor(self, index: int, place: int) -> bool:
        """Return whether the factor of a product is read again, or exists before the step."""
        if (index, place) not in self.forward.factors:
            return False
        buffer = self.forward.factors[index, place]
        return buffer is None or buffer in self.read

    def reads_saved(self, index: int, name: str) -> bool:
        """Return whether a value that an operator saves is read again."""
        return any(
            buffer.name == name and buffer in self.read
            for buffer in self.forward.kept.get(index, ())
        )

    def mask(self, index: int) -> Buffer | None:
        """Return the mask that a gate saves; None if its result is saved or recomputed instead."""
        name = self.forward.graph.values[self.forward.graph.operators[index].result].name
        saved = self.forward.kept.get(index, ())
        return next((item for item in saved if item.name == name and item.format is None), None)

    def reads_gate(self, index: int) -> bool:
        """Return whether any tensor that a gate saves is read again."""
        mask = self.mask(index)
        return not self.read.isdisjoint(
            self.forward.kept.get(index, ()) if mask is None else [mask]
        )

    def extras(self, index: int) -> Mapping[str, int]:
        """Return the bytes of an operator's masks and statistics that are read again, by name."""
        return {
            buffer.name: buffer.bytes
            for buffer in self.forward.extras(index)
            if buffer in self.read
        }


def saved_extras(passes: Sequence[Passes], index: int) -> Mapping[StateNames, int]:
    """Return a lower bound on the bytes of an operator's masks and statistics, by state.

    A state that no plan in `passes` has gets the minimum over all of them.
    """
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
"""Index of a value, and the format in which it is saved."""


@dataclass(frozen=True)
class Factor:
    """Factor of a product, saved for backward.

    Attributes:
        index: index of the product.
        argument: argument index.
        value: index of the value.
        wanted: format in which the factor is read, by compute format.
        stored_format: format in which it exists before the step and needs no saved copy; None for
            others.
    """

    index: int
    argument: int
    value: int
    wanted: Mapping[Name, Name]
    stored_format: Name


@dataclass(frozen=True)
class SavedValue:
    """Value that an operator saves in addition to factors of products.

    Attributes:
        index: index of the operator.
        value: index of the value.
        product: index of the product that computes the value; None for other values.
        saved_formats: saved format by state; a product's result in a narrower format is saved as it
            is.
    """

    index: int
    value: int
    product: int | None
    saved_formats: Mapping[StateNames, Name]


_Saved = TypeVar("_Saved", SavedValue, MaskedActivation)


@dataclass(frozen=True)
class _Spread:
    """Indicators of the saved formats, which are equal at all moments.

    Attributes:
        formats: formats of the operators.
        factors, results: indicators by format, in the order of `SavedTensorsBound`.
        masks: indicators that gates save their masks.
    """

    formats: Formats
    factors: Sequence[Spread]
    results: Sequence[Spread]
    masks: Sequence[Expression]


@dataclass(frozen=True)
class Readers:
    """Operators with saved tensors that the backward pass has yet to read.

    Attributes:
        all_unread: operators whose saved tensors are all unread.
        values_unread: operators whose saved values and masks are unread; statistics may be dead.
        factors: unread factors, as product and argument index.
        unscaled: factors that are unread unless their format is scaled; of scaled factors a copy
            replaces the original.
    """

    all_unread: Set[int]
    values_unread: Set[int]
    factors: Set[tuple[int, int]] = frozenset()
    unscaled: Set[tuple[int, int]] = frozenset()

    def reads(self, factor: Factor, fmt: Name) -> bool:
        """Return whether a factor in a format is live."""
        key = factor.index, factor.argument
        if factor.index in self.all_unread or key in self.factors:
            return True
        return key in self.unscaled and not (fmt is not None and FORMATS[fmt].scaled)


def factors(product: ModelOperator, forward: Forward) -> Mapping[int, ModelRead]:
    """Return the factors of a product by argument index.

    Attention has query, key and value. For operators that are no product, the result contains the
    first two operands.
    """
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
        self.results: list[SavedValue] = []
        self.extras: dict[int, Mapping[StateNames, int]] = {}
        self.gates: list[MaskedActivation] = []
        self._forward = forward = passes[0].forward
        self._spread: _Spread | None = None
        self._incoming_bytes = 0
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
            # Attention with several kernels saves masks and more, like operators that are no
            # product.
            if not forward.multiplies(operator) or attends(operator):
                self.extras[index] = saved_extras(passes, index)
            if not forward.multiplies(operator):
                self.results += self._saved_values(passes, index)
            elif attends(operator):
                # Attention with one kernel saves its own result.
                self.results += [
                    item
                    for item in self._saved_values(passes, index)
                    if item.value == operator.result
                ]
        self.gates += gates(self)
        outputs = [read.value for read in self.graph.outputs if not forward.given(read.value)]
        incoming = [value for value in outputs if self.graph.values[value].differentiated]
        self._incoming_bytes = sum(
            self._bytes(value, self.graph.values[value].own) for value in incoming
        )

    def of(
        self,
        names: Sequence[StateNames],
        readers: Readers | None = None,
        materialized: Sequence[MaterializedValue] = (),
    ) -> float:
        """Return the bound in bytes under a plan, given its operator states.

        Args:
            names: state of each operator.
            readers: operators with unread saved tensors; None for the start of the backward pass.
            materialized: further values that can be materialized.
        """
        matches: set[Key] = {
            (item.value, fmt)
            for item in materialized
            if (fmt := item.materialized_format(names)) is not None
        }
        for factor in self.factors:
            fmt = factor.wanted[names[factor.index][0]]
            if fmt != factor.stored_format and (readers is None or readers.reads(factor, fmt)):
                matches.add((factor.value, fmt))
        for result in _of(readers, self.results):
            fmt = result.saved_formats[names[result.index]]
            live = fmt if result.product is None else names[result.product][1]
            matches.add((result.value, min((fmt, live), key=_width)))
        extras = sum(
            sizes[names[index]]
            for index, sizes in self.extras.items()
            if self._extras_read(readers, index)
        )
        blocked: dict[int, bool] = {}
        masks = sum(gate.of(names, blocked) for gate in _of(readers, self.gates))
        return (
            sum(self._bytes(*key) for key in matches)
            + extras
            + masks
            + (self._incoming_bytes if readers is None else 0)
        )

    def expression(
        self,
        formats: Formats,
        readers: Readers | None = None,
        materialized: Sequence[MaterializedValue] = (),
    ) -> Expression:
        """Return the bound in bytes as an expression; see `of`."""
        wants: dict[Key, list[Expression]] = {}
        for item in materialized:
            for fmt, where in item.materialized_format_indicators(formats):
                wants.setdefault((item.value, fmt), []).append(where)
        matches: dict[int, float] = {
            CONSTANT: float(self._incoming_bytes if readers is None else 0)
        }
        if self._spread is None or self._spread.formats is not formats:
            blocked: dict[int, Expression] = {}
            self._spread = _Spread(
                formats,
                [self._factor(formats, factor) for factor in self.factors],
                [self._parts(formats, result) for result in self.results],
                [gate.mask_indicator(formats, blocked) for gate in self.gates],
            )
        for factor, by_format in zip(self.factors, self._spread.factors, strict=True):
            for fmt, where in by_format.items():
                if fmt != factor.stored_format and (readers is None or readers.reads(factor, fmt)):
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
        if readers is None or index in readers.all_unread:
            return True
        return index in readers.values_unread and not norms(self.graph.operators[index])

    @staticmethod
    def _factor(formats: Formats, factor: Factor) -> Spread:
        """Return the indicators of the format in which a factor is read."""
        result: dict[Name, Expression] = {}
        for name, where in formats.precisions[factor.index].items():
            fmt = factor.wanted[name]
            result[fmt] = total((1.0, result.get(fmt, {})), (1.0, where))
        return result

    def _parts(self, formats: Formats, result: SavedValue) -> Spread:
        """Return the indicators of the format in which a value is saved, merged by format."""
        matches: dict[Name, Expression] = {}
        for fmt, where in self._result(formats, result):
            matches[fmt] = total((1.0, matches.get(fmt, {})), (1.0, where))
        return matches

    def _result(self, formats: Formats, result: SavedValue) -> Iterator[tuple[Name, Expression]]:
        live: Spread = {} if result.product is None else formats.outputs[result.product]
        by_format: dict[Name, Expression] = {}
        for state, where in formats.states[result.index].items():
            fmt = result.saved_formats[state]
            by_format[fmt] = total((1.0, by_format.get(fmt, {})), (1.0, where))
        for fmt, where in by_format.items():
            narrower = {
                name: existing for name, existing in live.items() if _width(name) < _width(fmt)
            }
            rest = where
            for name, existing in narrower.items():
                if live.get(fmt) == where and len(live) == len(by_format):
                    break  # the output has the saved format
                # The AND must be exact: a larger value would count the tensor in a too narrow
                # format.
                both = formats.program.all_of([where, existing])
                yield name, both
                rest = total((1.0, rest), (-1.0, both))
            yield fmt, rest

    def _saved_values(self, passes: Sequence[Passes], index: int) -> Iterator[SavedValue]:
        """Yield values saved under any plan: product results, and values never recomputed."""
        operator, forward = self.graph.operators[index], self._forward
        for value in self.saved(operator):
            producer, saved = forward.made_by(value), self.formats_of(index, value)
            product = producer is not None and forward.multiplies(producer)
            # A gate saves its own result as a mask of one byte per element.
            gate = operator.row in GATES and operator.result == value
            if (
                producer is None
                or saved is None
                or not (product or (value in self.not_recomputable and not gate))
            ):
                continue
            if all(item.reads_saved(index, self.graph.values[value].name) for item in passes):
                yield SavedValue(
                    index, value, self.graph.places[producer.id] if product else None, saved
                )

    @cached_property
    def materialized_values(self) -> MaterializedValueFinder:
        """Materialized values from which others are computed."""
        return MaterializedValueFinder(self)

    @cached_property
    def not_recomputable(self) -> Set[int]:
        """Values that no compiler recomputes under any plan: unsaved sources, or a gather."""
        forward, saved, result = self._forward, set[int](), set[int]()
        for operator in self.graph.operators:
            for value in self.saved(operator):
                producer = forward.made_by(value)
                if forward.multiplies(operator) or (
                    producer is not None and forward.multiplies(producer)
                ):
                    saved.add(value)
        for operator in self.graph.operators:
            reads = {forward.root(read.value) for read in operator.reads}
            blocked = (
                forward.multiplies(operator)
                or operator.row in GATHERS
                or not result.isdisjoint(reads - saved)
            )
            if blocked and forward.root(operator.result) == operator.result:
                result.add(operator.result)
        return result

    def saved(self, operator: ModelOperator) -> Iterable[int]:
        """Return the values that an operator saves in some state, in any form."""
        names = {
            name
            for cost in operator.costs.values()
            for name, settings in cost.saved
            if not settings.startswith("extra")
        }
        return dict.fromkeys(self._forward.root(self._places[name]) for name in sorted(names))

    def formats_of(self, index: int, value: int) -> Mapping[StateNames, Name] | None:
        """Return the saved format of a value by state; None if it is not saved in each state."""
        result: dict[StateNames, Name] = {}
        for state, cost in self.graph.operators[index].costs.items():
            formats = [
                settings
                for name, settings in cost.saved
                if not settings.startswith("extra")
                and self._forward.root(self._places[name]) == value
            ]
            if len(formats) != 1 or not formats[0]:
                return None
            result[state] = formats[0]
        return result

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {value.name: index for index, value in enumerate(self.graph.values)}

    def _bytes(self, value: int, fmt: Name) -> int:
        assert fmt is not None
        live = self.graph.values[value]
        return FORMATS[fmt].dtype.itemsize * whole(live.numel) + whole(live.fixed)


def _of(readers: Readers | None, result: Sequence[_Saved]) -> Iterator[_Saved]:
    return (item for item in result if _is_read(readers, item))


def _is_read(readers: Readers | None, result: SavedValue | MaskedActivation) -> bool:
    return (
        readers is None
        or result.index in readers.all_unread
        or result.index in readers.values_unread
    )


def norms(operator: ModelOperator) -> bool:
    """Return whether an operator is a norm, with reductions before it passes a gradient on."""
    return "norm" in operator.row


def _width(name: Name) -> int:
    return FORMATS[name].dtype.itemsize if name is not None else 0


def add(result: dict[int, float], where: Expression, size: float) -> None:
    """Add an expression, multiplied by `size`."""
    for variable, factor in where.items():
        result[variable] = result.get(variable, 0.0) + factor * size

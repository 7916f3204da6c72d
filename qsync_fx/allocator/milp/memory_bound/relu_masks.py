"""Masks that gates (ReLU, threshold) save, and materialized values that their results depend on.

If a product saves the result of a ReLU in its output format, the backward passes of both read this
tensor. Otherwise, for instance if all products read it quantized, the ReLU saves a mask of one byte
per element, unless a compiler recomputes the result. It cannot be recomputed if it depends on
unsaved values: under any plan, or along a residual on which a value is materialized for products
that quantize it and then freed.

Invariant: `of` and `mask_indicator` agree, and never exceed the evaluator's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from operator import eq
from typing import TYPE_CHECKING, Protocol

from qsync_fx.allocator.milp.format_variables import Spread
from qsync_fx.allocator.milp.linear_program import ONE, Expression, LinearProgram, total
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.memory.buffers import GATES, pools, whole
from qsync_fx.predictor.model.model_graph import Follows, ModelOperator, Name, StateNames

if TYPE_CHECKING:
    from qsync_fx.allocator.milp.memory_bound.saved_bound import SavedTensorsBound


class Where(Protocol):
    """Indicators of operator states: program expressions, or constants of a plan."""

    @property
    def program(self) -> LinearProgram: ...

    @property
    def precisions(self) -> Sequence[Spread]: ...

    @property
    def outputs(self) -> Sequence[Spread]: ...

    @property
    def states(self) -> Sequence[Mapping[StateNames, Expression]]: ...


@dataclass(frozen=True)
class MaskRead:
    """Read of a value as a factor: index of the product, and read format by compute format."""

    index: int
    wanted: Mapping[Name, Name]

    def under(self, names: Sequence[StateNames]) -> Name:
        """Return the read format under a plan, given its operator states."""
        return self.wanted[names[self.index][0]]

    def where(self, formats: Where, takes: Callable[[Name], bool]) -> Expression:
        """Return the indicator that the read format satisfies a predicate."""
        result = formats.precisions[self.index].items()
        return total(*((1.0, where) for name, where in result if takes(self.wanted[name])))


@dataclass(frozen=True)
class MaterializedValue:
    """Value that products read, and from which other values are computed directly.

    Attributes:
        value: index of the value.
        producer: index of the operator that computes it.
        reads: reads by all products.
        sources: values of this kind from which it is computed.
    """

    value: int
    producer: int
    reads: Sequence[MaskRead]
    sources: Sequence[MaterializedValue]

    def materialized_format(self, names: Sequence[StateNames]) -> Name:
        """Return the materialized format; None if the value is fused into its readers."""
        fmt = names[self.producer][1]
        return (
            fmt
            if any(scaled(item.under(names)) or item.under(names) == fmt for item in self.reads)
            else None
        )

    def materialized_format_indicators(self, formats: Where) -> Iterator[tuple[Name, Expression]]:
        """Yield, for each reader, the materialized formats with their indicators."""
        for fmt, where in formats.outputs[self.producer].items():
            for item in self.reads:
                read = total(
                    (1.0, item.where(formats, scaled)), (1.0, item.where(formats, partial(eq, fmt)))
                )
                yield fmt, formats.program.at_least(total((1.0, where), (1.0, read), (-1.0, ONE)))

    def blocks_recomputation(self, names: Sequence[StateNames], cache: dict[int, bool]) -> bool:
        """Return whether dependents of the value cannot be recomputed under a plan.

        That is so if no product saves the value at its full width, and the value is materialized
        for quantization or computed from a value that blocks it.
        """
        if self.value not in cache:
            wanted, fmt = [item.under(names) for item in self.reads], names[self.producer][1]
            saved = any(_as_wide(fmt, name) for name in wanted)
            gone = any(map(scaled, wanted)) or any(
                item.blocks_recomputation(names, cache) for item in self.sources
            )
            cache[self.value] = not saved and gone
        return cache[self.value]

    def blocks_recomputation_indicator(
        self, formats: Where, cache: dict[int, Expression]
    ) -> Expression:
        """Return the indicator that dependents of the value cannot be recomputed."""
        if self.value not in cache:
            result = []
            for fmt, where in formats.outputs[self.producer].items():
                saved = [(-1.0, item.where(formats, partial(_as_wide, fmt))) for item in self.reads]
                gone = [item.where(formats, scaled) for item in self.reads]
                gone += [
                    item.blocks_recomputation_indicator(formats, cache) for item in self.sources
                ]
                result += [total((1.0, where), (1.0, item), (-1.0, ONE), *saved) for item in gone]
            cache[self.value] = formats.program.any_of(map(formats.program.at_least, result))
        return cache[self.value]


@dataclass(frozen=True)
class MaskedActivation:
    """Gate that may save a mask.

    Attributes:
        index: index of the operator.
        saved_formats: format in which its backward pass would read its result, by state.
        reads: reads of the result by products that may save it.
        sources: values from which the result is computed; None if it can never be recomputed.
        mask: bytes of the mask, saved if no product saves the result in this format.
    """

    index: int
    saved_formats: Mapping[StateNames, Name]
    reads: Sequence[MaskRead]
    sources: Sequence[MaterializedValue] | None
    mask: int

    def of(self, names: Sequence[StateNames], cache: dict[int, bool]) -> int:
        """Return the bytes of the mask under a plan; `cache` stores which values block it."""
        fmt = self.saved_formats[names[self.index]]
        shared = any(item.under(names) == fmt for item in self.reads)
        recomputed = self.sources is not None and not any(
            item.blocks_recomputation(names, cache) for item in self.sources
        )
        return 0 if shared or recomputed else self.mask

    def mask_indicator(self, formats: Where, cache: dict[int, Expression]) -> Expression:
        """Return the indicator that the gate saves its mask."""
        blocked = (
            [ONE]
            if self.sources is None
            else [item.blocks_recomputation_indicator(formats, cache) for item in self.sources]
        )
        wants = []
        for fmt in dict.fromkeys(self.saved_formats.values()):
            saved = [
                (1.0, where)
                for state, where in formats.states[self.index].items()
                if self.saved_formats[state] == fmt
            ]
            shared = [(-1.0, item.where(formats, partial(eq, fmt))) for item in self.reads]
            wants += [total(*saved, *shared, (1.0, item), (-1.0, ONE)) for item in blocked]
        return formats.program.any_of(map(formats.program.at_least, wants))


class MaterializedValueFinder:
    """Finder of values that products read and from which others are computed directly.

    Args:
        saved: bound on the saved tensors.
    """

    def __init__(self, saved: SavedTensorsBound) -> None:
        self._saved, self.graph, self._forward = saved, saved.graph, saved.passes[0].forward
        self._cache: dict[int, Sequence[MaterializedValue]] = {}

    def sources_of(self, operator: ModelOperator) -> Sequence[MaterializedValue]:
        """Return such values from which an operator's result is computed, if its format follows."""
        value = operator.result
        if value not in self._cache:
            result: dict[int, MaterializedValue] = {}
            if isinstance(operator.decided, Follows):
                reads = (self._forward.root(read.value) for read in operator.reads)
                result = {
                    item.value: item
                    for root in reads
                    if root != value
                    for item in self._at_value(root)
                }
            self._cache[value] = tuple(result.values())
        return self._cache[value]

    def _at_value(self, value: int) -> Sequence[MaterializedValue]:
        producer = self._forward.made_by(value)
        if producer is None or self._forward.multiplies(producer) or pools(producer):
            return ()
        reads, sources = self.reads_of(value), self.sources_of(producer)
        return (
            sources
            if not reads
            else [MaterializedValue(value, self.graph.places[producer.id], reads, sources)]
        )

    def reads_of(self, value: int) -> Sequence[MaskRead] | None:
        """Return the reads of a value as a factor; None if a saving product's format is unknown."""
        result = [
            MaskRead(item.index, item.wanted) for item in self._saved.factors if item.value == value
        ]
        available = {reading.index for reading in result}
        return result if self._saving_products.get(value, set()) <= available else None

    @cached_property
    def _saving_products(self) -> Mapping[int, Set[int]]:
        """Products that save a value, by value."""
        result: dict[int, set[int]] = {}
        for index, operator in enumerate(self.graph.operators):
            for value in self._saved.saved(operator) if self._forward.multiplies(operator) else ():
                result.setdefault(value, set()).add(index)
        return result


def gates(saved: SavedTensorsBound) -> Iterator[MaskedActivation]:
    """Yield the gates that save, under some plan, a tensor that no other operator saves."""
    materialized_values = saved.materialized_values
    for index, operator in enumerate(saved.graph.operators):
        value = operator.result
        formats = saved.formats_of(index, value) if operator.row in GATES else None
        if formats is None or not all(item.reads_gate(index) for item in saved.passes):
            continue
        reads, sources = (
            materialized_values.reads_of(value),
            None if value in saved.not_recomputable else materialized_values.sources_of(operator),
        )
        if reads is not None and (sources is None or sources):
            yield MaskedActivation(
                index, formats, reads, sources, whole(saved.graph.values[value].numel)
            )


def scaled(fmt: Name) -> bool:
    """Return whether a format is quantized."""
    return fmt is not None and FORMATS[fmt].scaled


def _as_wide(live: Name, fmt: Name) -> bool:
    """Return whether a read format preserves all information of the output format."""
    assert fmt is not None and live is not None
    return not scaled(fmt) and FORMATS[fmt].dtype.itemsize >= FORMATS[live].dtype.itemsize

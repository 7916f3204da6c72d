"""Masks that gates (ReLU, threshold) save, and materialized values behind their results.

If a product saves the result of a ReLU in its output format, the backward passes of both read this
tensor. Otherwise, for instance if all products read it quantized, the ReLU saves a mask of one byte
per element, unless a compiler recomputes the result. It cannot be recomputed if it depends on
unsaved values: under any plan, or along a residual on which a value is materialized for products
that quantize it and then freed.

Invariant: `of` and `masked` agree, and never exceed the evaluator's memory.
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

    at: int
    wanted: Mapping[Name, Name]

    def under(self, names: Sequence[StateNames]) -> Name:
        """Return the read format under a plan, given its operator states."""
        return self.wanted[names[self.at][0]]

    def where(self, formats: Where, takes: Callable[[Name], bool]) -> Expression:
        """Return the indicator that the read format satisfies a predicate."""
        result = formats.precisions[self.at].items()
        return total(*((1.0, where) for name, where in result if takes(self.wanted[name])))


@dataclass(frozen=True)
class Lying:
    """Value that products read, and from which other values are computed directly.

    Attributes:
        value: index of the value.
        made: index of the operator that computes it.
        readings: reads by all products.
        behind: values of this kind from which it is computed.
    """

    value: int
    made: int
    readings: Sequence[MaskRead]
    behind: Sequence[Lying]

    def held(self, names: Sequence[StateNames]) -> Name:
        """Return the materialized format; None if the value is fused into its readers."""
        fmt = names[self.made][1]
        return (
            fmt
            if any(scaled(item.under(names)) or item.under(names) == fmt for item in self.readings)
            else None
        )

    def held_in(self, formats: Where) -> Iterator[tuple[Name, Expression]]:
        """Yield, for each reader, the materialized formats with their indicators."""
        for fmt, where in formats.outputs[self.made].items():
            for item in self.readings:
                read = total(
                    (1.0, item.where(formats, scaled)), (1.0, item.where(formats, partial(eq, fmt)))
                )
                yield fmt, formats.program.at_least(total((1.0, where), (1.0, read), (-1.0, ONE)))

    def lost(self, names: Sequence[StateNames], available: dict[int, bool]) -> bool:
        """Return whether dependents of the value cannot be recomputed under a plan.

        That is so if no product saves the value at its full width, and the value is materialized
        for quantization or computed from a lost value.
        """
        if self.value not in available:
            wanted, fmt = [item.under(names) for item in self.readings], names[self.made][1]
            saved = any(_as_wide(fmt, name) for name in wanted)
            gone = any(map(scaled, wanted)) or any(
                item.lost(names, available) for item in self.behind
            )
            available[self.value] = not saved and gone
        return available[self.value]

    def lost_in(self, formats: Where, available: dict[int, Expression]) -> Expression:
        """Return the indicator that dependents of the value cannot be recomputed."""
        if self.value not in available:
            result = []
            for fmt, where in formats.outputs[self.made].items():
                saved = [
                    (-1.0, item.where(formats, partial(_as_wide, fmt))) for item in self.readings
                ]
                gone = [item.where(formats, scaled) for item in self.readings]
                gone += [item.lost_in(formats, available) for item in self.behind]
                result += [total((1.0, where), (1.0, item), (-1.0, ONE), *saved) for item in gone]
            available[self.value] = formats.program.any_of(map(formats.program.at_least, result))
        return available[self.value]


@dataclass(frozen=True)
class MaskedActivation:
    """Gate that may save a mask.

    Attributes:
        at: index of the operator.
        kept: format in which its backward pass would read its result, by state.
        readings: reads of the result by products that may save it.
        behind: values from which the result is computed; None if it can never be recomputed.
        mask: bytes of the mask, saved if no product saves the result in this format.
    """

    at: int
    kept: Mapping[StateNames, Name]
    readings: Sequence[MaskRead]
    behind: Sequence[Lying] | None
    mask: int

    def of(self, names: Sequence[StateNames], available: dict[int, bool]) -> int:
        """Return the bytes of the mask under a plan; `available` caches which values are lost."""
        fmt = self.kept[names[self.at]]
        shared = any(item.under(names) == fmt for item in self.readings)
        again = self.behind is not None and not any(
            item.lost(names, available) for item in self.behind
        )
        return 0 if shared or again else self.mask

    def masked(self, formats: Where, available: dict[int, Expression]) -> Expression:
        """Return the indicator that the gate saves its mask."""
        lost = (
            [ONE]
            if self.behind is None
            else [item.lost_in(formats, available) for item in self.behind]
        )
        wants = []
        for fmt in dict.fromkeys(self.kept.values()):
            saved = [
                (1.0, where)
                for state, where in formats.states[self.at].items()
                if self.kept[state] == fmt
            ]
            shared = [(-1.0, item.where(formats, partial(eq, fmt))) for item in self.readings]
            wants += [total(*saved, *shared, (1.0, item), (-1.0, ONE)) for item in lost]
        return formats.program.any_of(map(formats.program.at_least, wants))


class Residing:
    """Finder of values that products read and from which others are computed directly.

    Args:
        saved: bound on the saved tensors.
    """

    def __init__(self, saved: SavedTensorsBound) -> None:
        self._kept, self.graph, self._forward = saved, saved.graph, saved.passes[0].forward
        self._known: dict[int, Sequence[Lying]] = {}

    def behind(self, operator: ModelOperator) -> Sequence[Lying]:
        """Return such values behind an operator's result, if its format is dependent."""
        value = operator.result
        if value not in self._known:
            result: dict[int, Lying] = {}
            if isinstance(operator.decided, Follows):
                reads = (self._forward.root(read.value) for read in operator.reads)
                result = {
                    item.value: item for root in reads if root != value for item in self._at(root)
                }
            self._known[value] = tuple(result.values())
        return self._known[value]

    def _at(self, value: int) -> Sequence[Lying]:
        maker = self._forward.made_by(value)
        if maker is None or self._forward.multiplies(maker) or pools(maker):
            return ()
        readings, behind = self.readings(value), self.behind(maker)
        return (
            behind
            if not readings
            else [Lying(value, self.graph.places[maker.id], readings, behind)]
        )

    def readings(self, value: int) -> Sequence[MaskRead] | None:
        """Return the reads of a value as a factor; None if a saving product's format is unknown."""
        result = [
            MaskRead(item.at, item.wanted) for item in self._kept.factors if item.value == value
        ]
        available = {reading.at for reading in result}
        return result if self._keepers.get(value, set()) <= available else None

    @cached_property
    def _keepers(self) -> Mapping[int, Set[int]]:
        """Products that save a value, by value."""
        result: dict[int, set[int]] = {}
        for index, operator in enumerate(self.graph.operators):
            for value in self._kept.saved(operator) if self._forward.multiplies(operator) else ():
                result.setdefault(value, set()).add(index)
        return result


def gates(saved: SavedTensorsBound) -> Iterator[MaskedActivation]:
    """Yield the gates that save, under some plan, a tensor that no other operator saves."""
    residing = saved.residing
    for index, operator in enumerate(saved.graph.operators):
        value = operator.result
        formats = saved.formats_of(index, value) if operator.row in GATES else None
        if formats is None or not all(item.reads_gate(index) for item in saved.passes):
            continue
        readings, behind = (
            residing.readings(value),
            None if value in saved.lost else residing.behind(operator),
        )
        if readings is not None and (behind is None or behind):
            yield MaskedActivation(
                index, formats, readings, behind, whole(saved.graph.values[value].numel)
            )


def scaled(fmt: Name) -> bool:
    """Return whether a format is quantized."""
    return fmt is not None and FORMATS[fmt].scaled


def _as_wide(live: Name, fmt: Name) -> bool:
    """Return whether a read format preserves all information of the output format."""
    assert fmt is not None and live is not None
    return not scaled(fmt) and FORMATS[fmt].dtype.itemsize >= FORMATS[live].dtype.itemsize

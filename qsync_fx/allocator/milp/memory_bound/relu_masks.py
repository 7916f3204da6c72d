"""What gates keep of results that no product keeps: a mask of a byte an element; and which values in memory others are computed from.

Where a product keeps the result of a ReLU in the format in which the ReLU has it, the backward pass of both reads that. Elsewhere, as where
all products read it quantized, a mask is kept, unless a compiler computes the result again. It does not where that follows from what nobody
keeps: under any plan, or along residuals where a value lies in memory for products that read it quantized, and is thrown away behind them.

Invariant: `of` and `masked` say the same, and not more than the judge of plans says.
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
    """Where operators are in which state, as expressions: of what is chosen, or of a plan."""

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
    """A product that reads a value as a factor: its place, and the format that it is read in, by what the product computes in."""

    at: int
    wanted: Mapping[Name, Name]

    def under(self, names: Sequence[StateNames]) -> Name:
        """Returns the format under a plan, by the states that it puts operators into."""
        return self.wanted[names[self.at][0]]

    def where(self, formats: Where, takes: Callable[[Name], bool]) -> Expression:
        """Returns where it is a format that is taken."""
        result = formats.precisions[self.at].items()
        return total(*((1.0, where) for name, where in result if takes(self.wanted[name])))


@dataclass(frozen=True)
class Lying:
    """A value that products read, and that is computed from others at once.

    Attributes:
        value, made: its place, and that of the operator that gives it.
        readings: of all products that read it.
        behind: the values of this kind that it is computed from.
    """

    value: int
    made: int
    readings: Sequence[MaskRead]
    behind: Sequence[Lying]

    def held(self, names: Sequence[StateNames]) -> Name:
        """Returns the format in which it lies in memory; None where what it is computed from is read in its place."""
        fmt = names[self.made][1]
        return (
            fmt
            if any(scaled(item.under(names)) or item.under(names) == fmt for item in self.readings)
            else None
        )

    def held_in(self, formats: Where) -> Iterator[tuple[Name, Expression]]:
        """Yields formats with where it lies in memory in them, for each of its readers."""
        for fmt, where in formats.outputs[self.made].items():
            for item in self.readings:
                read = total(
                    (1.0, item.where(formats, scaled)), (1.0, item.where(formats, partial(eq, fmt)))
                )
                yield fmt, formats.program.at_least(total((1.0, where), (1.0, read), (-1.0, ONE)))

    def lost(self, names: Sequence[StateNames], available: dict[int, bool]) -> bool:
        """Whether a compiler cannot compute again what is computed from it, under a plan.

        It lies in memory till it has been quantized, and is not kept as it is; or it is computed from what is lost.
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
        """Returns where it cannot."""
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
    """
    Attributes:
        at: place of the operator.
        kept: by its state, the format in which its backward pass would read its result.
        readings: of the products that may keep that.
        behind: what its result is computed from; None where it cannot be computed again under any plan.
        mask: bytes of what is kept where none of them has it in this format.
    """

    at: int
    kept: Mapping[StateNames, Name]
    readings: Sequence[MaskRead]
    behind: Sequence[Lying] | None
    mask: int

    def of(self, names: Sequence[StateNames], available: dict[int, bool]) -> int:
        """Returns the bytes of its mask under a plan; `known` are the values that are known to be lost under it."""
        fmt = self.kept[names[self.at]]
        shared = any(item.under(names) == fmt for item in self.readings)
        again = self.behind is not None and not any(
            item.lost(names, available) for item in self.behind
        )
        return 0 if shared or again else self.mask

    def masked(self, formats: Where, available: dict[int, Expression]) -> Expression:
        """Returns where it keeps its mask."""
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
    """Finds values that products read and others are computed from at once.

    Args:
        kept: what a class of devices keeps for the backward pass.
    """

    def __init__(self, saved: SavedTensorsBound) -> None:
        self._kept, self.graph, self._forward = saved, saved.graph, saved.passes[0].forward
        self._known: dict[int, Sequence[Lying]] = {}

    def behind(self, operator: ModelOperator) -> Sequence[Lying]:
        """Returns those that an operator's result is computed from, where it follows the formats of what it reads."""
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
        """Returns who reads a value as a factor; None where a product that is not known to keeps it."""
        result = [
            MaskRead(item.at, item.wanted) for item in self._kept.factors if item.value == value
        ]
        available = {reading.at for reading in result}
        return result if self._keepers.get(value, set()) <= available else None

    @cached_property
    def _keepers(self) -> Mapping[int, Set[int]]:
        """By value, the places of the products that keep it."""
        result: dict[int, set[int]] = {}
        for index, operator in enumerate(self.graph.operators):
            for value in self._kept.saved(operator) if self._forward.multiplies(operator) else ():
                result.setdefault(value, set()).add(index)
        return result


def gates(saved: SavedTensorsBound) -> Iterator[MaskedActivation]:
    """Yields the gates of which something is kept, under some plan, that no other operator keeps."""
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
    """Whether values are quantized to a format."""
    return fmt is not None and FORMATS[fmt].scaled


def _as_wide(live: Name, fmt: Name) -> bool:
    """Whether what others read of a value that is held in a format may be what a product reads in another."""
    assert fmt is not None and live is not None
    return not scaled(fmt) and FORMATS[fmt].dtype.itemsize >= FORMATS[live].dtype.itemsize

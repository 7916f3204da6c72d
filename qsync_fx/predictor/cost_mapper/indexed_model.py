"""Integer tables of a `ModelGraph`, which make the update after one operator's change fast.

A format is its index in `NAMES`; index 0 is "no format". Operators, values and cast points are
referred to by index. The tables contain no information beyond the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qsync_fx.formats import FORMATS
from qsync_fx.graph.cascade_rules import wants_wide
from qsync_fx.graph.operator_costs import changes_format, needs_cast
from qsync_fx.ops import Kind
from qsync_fx.predictor.cost_mapper.plan_states import unpacked_format
from qsync_fx.predictor.model.model_graph import (
    Follows,
    ModelGraph,
    ModelOperator,
    ModelRead,
    Name,
    chosen,
    followed,
    format_named,
    widest,
)

NAMES: tuple[Name, ...] = (None, *FORMATS)
NUMBERS = {name: number for number, name in enumerate(NAMES)}
BASE = 16
"""Radix that encodes several format numbers as one integer; at least the number of formats."""
assert len(NAMES) <= BASE
REACH = 2
"""Number of neighbours on either side that `Times.operator` depends on."""

SCALED = tuple(name is not None and FORMATS[name].scaled for name in NAMES)
PLAIN = tuple(name is not None and FORMATS[name].plain for name in NAMES)
_FORMATS = tuple(map(format_named, NAMES))
NEEDED = tuple(
    tuple(needs_cast(before, before, wanted) for wanted in _FORMATS) for before in _FORMATS
)
"""Whether a cast is needed, by current and required format."""
CHANGED = {
    requested: tuple(
        tuple(changes_format(before, after, requested) for after in _FORMATS) for before in _FORMATS
    )
    for requested in (False, True)
}
"""Whether an operator converts a value, by whether the model requests it, and both formats."""
WIDE = {kind: tuple(wants_wide(kind, fmt) for fmt in _FORMATS) for kind in Kind}


@dataclass(frozen=True, slots=True)
class IndexedFormat:
    """Format of a value: the output format of an operator, or `own`.

    Attributes:
        operator: index of the operator; -1 for none.
        own: format of the value if the operator has no output format.
    """

    operator: int
    own: int


@dataclass(frozen=True, slots=True)
class IndexedReader:
    """Reader of a value at a cast point.

    Attributes:
        operator: index of the reader; -1 for the model's caller.
        wanted: required format, by the reader's precision.
        used: format of the value that it reads if the model converts the value in between;
            None if it reads the value of the cast point directly.
        kept: plain format that its saved scaled operand is converted to in the backward pass, by
            the reader's precision; 0 for none.
    """

    operator: int
    wanted: tuple[int, ...]
    used: IndexedFormat | None
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """Cast point: readings of one value that share one cast per format.

    Attributes:
        value: index of the value to convert.
        held: its format.
        readers: the readers in execution order.
    """

    value: int
    held: IndexedFormat
    readers: tuple[IndexedReader, ...]


@dataclass(frozen=True, slots=True)
class IndexedChange:
    """Format change within an operator.

    Attributes:
        operator, value: indices of the operator and of the value that it converts.
        held: format before the change.
        wanted: whether the model itself requests the conversion.
    """

    operator: int
    value: int
    held: IndexedFormat
    wanted: bool


Key = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Indices of the operators that determine the casts of a point: see `Tables.keys`."""


class Tables:
    """Tables of a model graph, indexed by operator unless stated otherwise.

    Attributes:
        follow: formats as a function of the input formats; None for adjustable operators.
        inputs: operators whose outputs determine its formats.
        followers: operators that have it among their `inputs`.
        outputs: output format by precision; None for operators that are not adjustable.
        wide: output format if all `wide_readers` compute in a wide format; 0 for never.
        wide_readers: reader operators, each with a table that marks its wide precisions.
        widens: operators that have it among their `wide_readers`.
        points: cast points, and format changes within operators.
        keys: by point, the operators that determine its casts: the producer of the value, the
            operators whose precision matters, and the operators whose output matters.
        alone: points whose casts depend on the precision of this operator alone.
        touched: all other points whose casts depend on its state.
        near: operators whose time can depend on its state.
        chosen: precision by planned format; None for operators that are not adjustable.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        count = len(graph.operators)
        self.follow: list[Followed | None] = []
        self.inputs: list[tuple[int, ...]] = []
        self.followers: list[list[int]] = [[] for _ in range(count)]
        self.outputs: list[tuple[int, ...] | None] = []
        self.wide = [0] * count
        self.wide_readers: list[tuple[tuple[int, tuple[bool, ...]], ...]] = [()] * count
        self.widens: list[list[int]] = [[] for _ in range(count)]
        for index, operator in enumerate(graph.operators):
            self._decided(index, operator)
        self.chosen = [_chosen(operator, graph.formats) for operator in graph.operators]
        self.points: list[Point | IndexedChange] = _points(graph)
        self.keys = [_key(point) for point in self.points]
        self.alone: list[list[int]] = [[] for _ in range(count)]
        self.touched: list[list[int]] = [[] for _ in range(count)]
        for number, (live, readers, others) in enumerate(self.keys):
            result = {index for index in (live, *readers, *others) if index >= 0}
            single = result == set(readers) and len(result) == 1
            for index in result:
                (self.alone if single else self.touched)[index].append(number)
        self.near = [
            range(max(index - REACH, 0), min(index + REACH + 1, count)) for index in range(count)
        ]

    def _decided(self, index: int, operator: ModelOperator) -> None:
        decided = operator.decided
        if isinstance(decided, Follows):
            self.follow.append(Followed(decided))
            self.inputs.append(decided.operators)
            self.outputs.append(None)
            for used in decided.operators:
                self.followers[used].append(index)
            return
        self.follow.append(None)
        self.inputs.append(())
        self.outputs.append(tuple(NUMBERS[decided.outputs.get(name or "")] for name in NAMES))
        self.wide[index] = NUMBERS[decided.wide]
        kinds = self.graph.operators
        self.wide_readers[index] = tuple(
            (reader, WIDE[Kind(kinds[reader].kind)]) for reader in decided.readers
        )
        if decided.wide is not None:
            for reader in set(decided.readers):
                self.widens[reader].append(index)


def _chosen(operator: ModelOperator, formats: Iterable[str]) -> dict[str, int] | None:
    decided = operator.decided
    if isinstance(decided, Follows):
        return None
    return {fmt: NUMBERS[chosen(decided, fmt, explicit=True)] for fmt in formats}


class Followed(dict[int, tuple[int, int]]):
    """Lazy table of precision and output format, by input formats encoded in radix `BASE`."""

    def __init__(self, follows: Follows) -> None:
        self.follows = follows

    def __missing__(self, key: int) -> tuple[int, int]:
        promotion, rest = self.follows.given, key
        while rest:
            rest, output = divmod(rest, BASE)
            promotion = widest(promotion, NAMES[output])
        name = followed(self.follows, promotion)
        self[key] = NUMBERS[name], NUMBERS[self.follows.named or name]
        return self[key]


def _key(point: Point | IndexedChange) -> Key:
    if isinstance(point, IndexedChange):
        return point.held.operator, (), (point.operator,)
    used = (reader.used.operator for reader in point.readers if reader.used is not None)
    return point.held.operator, tuple(reader.operator for reader in point.readers), tuple(used)


def _points(graph: ModelGraph) -> list[Point | IndexedChange]:
    readers: list[list[tuple[ModelRead, IndexedReader]]] = [[] for _ in range(graph.points)]
    result: list[Point | IndexedChange] = []
    for index, operator in enumerate(graph.operators):
        if operator.converts:
            value = operator.reads[0].value
            result.append(IndexedChange(index, value, _held(graph, value), wanted=True))
            continue
        for read in operator.reads:
            if read.point is not None:
                readers[read.point].append((read, _reader(graph, index, operator, read)))
        if operator.converted:
            source = IndexedFormat(-1, NUMBERS[graph.values[operator.result].own])
            result.append(IndexedChange(index, operator.result, source, wanted=False))
    for read in graph.outputs:
        if read.point is not None:
            readers[read.point].append((read, _reader(graph, -1, None, read)))
    for at_point in readers:
        if at_point:
            origin = at_point[0][0].origin
            indexed = tuple(reader for _, reader in at_point)
            result.append(Point(origin, _held(graph, origin), indexed))
    return result


def _held(graph: ModelGraph, index: int) -> IndexedFormat:
    value = graph.values[index]
    return IndexedFormat(-1 if value.operator is None else value.operator, NUMBERS[value.own])


def _reader(
    graph: ModelGraph, index: int, operator: ModelOperator | None, read: ModelRead
) -> IndexedReader:
    wanted = tuple(NUMBERS[read.wanted[name or ""]] for name in NAMES)
    saved = (0,) * len(NAMES)
    if operator is not None:
        saved = tuple(NUMBERS[unpacked_format(operator, read, name)] for name in NAMES)
    used = None
    if read.value != read.origin:
        used = _held(graph, read.value)
    return IndexedReader(index, wanted, used, saved)

"""A `ModelGraph` as tables of small numbers, so that one operator's change is followed in microseconds.

Invariant: says what the graph says and nothing else. A format is its place in `NAMES`, the first of which is none at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qsync_fx.formats import FORMATS
from qsync_fx.graph.cascade_rules import wants_wide
from qsync_fx.graph.operator_costs import needs_cast
from qsync_fx.ops import Kind
from qsync_fx.predictor.model.model_graph import (
    Choices,
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
"""More than there are formats: several of them make one number."""
assert len(NAMES) <= BASE
REACH = 2
"""`Times.operator` is told of so many neighbours on either side."""

SCALED = tuple(name is not None and FORMATS[name].scaled for name in NAMES)
PLAIN = tuple(name is not None and FORMATS[name].plain for name in NAMES)
_FORMATS = tuple(map(format_named, NAMES))
NEEDED = tuple(
    tuple(needs_cast(before, before, wanted) for wanted in _FORMATS) for before in _FORMATS
)
"""By the format that a value has and the one that it is read in: whether it is converted."""
WIDE = {kind: tuple(wants_wide(kind, fmt) for fmt in _FORMATS) for kind in Kind}


@dataclass(frozen=True, slots=True)
class IndexedFormat:
    """The format of a value: that of an operator's result, or `own`.

    Attributes:
        operator: the place of the operator; -1 for none, which gives out nothing.
        own: its format where the operator gives none.
    """

    operator: int
    own: int


@dataclass(frozen=True, slots=True)
class IndexedReader:
    """One that reads at a place.

    Attributes:
        operator: its place; -1 for the model's caller.
        wanted: by what it computes in, the format that it reads.
        used: what it reads, where that is behind conversions of the model's own, else None.
        kept: by what it computes in, the format that it converts what it keeps to in the backward pass; 0 for none.
    """

    operator: int
    wanted: tuple[int, ...]
    used: IndexedFormat | None
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """A place where casts may stand.

    Attributes:
        value: what they convert.
        held: its format.
        readers: those that share them, in the order in which they run.
    """

    value: int
    held: IndexedFormat
    readers: tuple[IndexedReader, ...]


@dataclass(frozen=True, slots=True)
class IndexedChange:
    """A change of format that is an operator's own.

    Attributes:
        operator, value: which, and what it converts.
        held: the format before.
        wanted: whether the model itself asks for it.
    """

    operator: int
    value: int
    held: IndexedFormat
    wanted: bool


Key = tuple[int, tuple[int, ...], tuple[int, ...]]
"""What the casts at a place follow from: see `Tables.keys`."""


class Tables:
    """
    Attributes:
        follow: by operator, the formats that those follow from which its inputs give out; None for adjustable ones.
        inputs: by operator, those whose outputs decide its format.
        followers: by operator, those that it is one of the inputs of.
        outputs: by operator, by what it computes in, what it gives out; None for those that no plan chooses.
        wide: by operator, what it gives out where all of `wide_readers` compute wide; 0 for never.
        widens: by operator, those that look at what it computes in for that.
        points: the places where casts may stand, and the changes of operators' own.
        keys: by place, what the casts there follow from: the operator whose output they convert, those whose precisions and those whose
            outputs have a say.
        alone: by operator, the places where casts follow from nothing but what it computes in: those of its weights.
        touched: by operator, the other places that its state has a say in.
        near: by operator, those whose time its state may have a say in.
        chosen: by operator, by what a plan asks for, what it computes in; None for those that no plan chooses.
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
        for reader in set(decided.readers) if decided.wide is not None else ():
            self.widens[reader].append(index)


def _chosen(operator: ModelOperator, formats: Iterable[str]) -> dict[str, int] | None:
    decided = operator.decided
    if isinstance(decided, Follows):
        return None
    return {fmt: NUMBERS[chosen(decided, fmt, explicit=True)] for fmt in formats}


class Followed(dict[int, tuple[int, int]]):
    """What an operator computes in and gives out, by the outputs of its inputs as one number."""

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
        owned = graph.values[operator.result].own
        if operator.converted and owned is not None:
            result.append(
                IndexedChange(
                    index, operator.result, IndexedFormat(-1, NUMBERS[owned]), wanted=False
                )
            )
    for read in graph.outputs:
        if read.point is not None:
            readers[read.point].append((read, _reader(graph, -1, None, read)))
    for at_point in readers:
        if at_point:
            origin = at_point[0][0].origin
            result.append(
                Point(origin, _held(graph, origin), tuple(reader for _, reader in at_point))
            )
    return result


def _held(graph: ModelGraph, index: int) -> IndexedFormat:
    value = graph.values[index]
    return IndexedFormat(-1 if value.operator is None else value.operator, NUMBERS[value.own])


def _reader(
    graph: ModelGraph, index: int, operator: ModelOperator | None, read: ModelRead
) -> IndexedReader:
    wanted = tuple(NUMBERS[read.wanted[name or ""]] for name in NAMES)
    saved = [0] * len(NAMES)
    if operator is not None and isinstance(operator.decided, Choices):
        for name, unpacked in operator.decided.unpacked.items():
            # A factor is kept for the gradient of the other one.
            others = (
                other
                for other in operator.reads
                if other is not read and other.wanted.get(name) == name
            )
            if read.wanted[name] == name and any(other.gradient for other in others):
                saved[NUMBERS[name]] = NUMBERS[unpacked]
    used = _held(graph, read.value) if read.value != read.origin else None
    return IndexedReader(index, wanted, used, tuple(saved))

"""JSON files of model graphs.

Sizes, tables of required formats and pieces of work are stored once and referred to by index.
`restored` returns a consistent graph or raises `ProfileError`: references are valid, operators
follow from earlier ones, formats are known, and every reachable state has a cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from qsync_fx.errors import PlanError, ProfileError
from qsync_fx.formats import FORMATS
from qsync_fx.graph.cost_algebra import WORKS, Cost, Size, Work
from qsync_fx.plan.operator_id import OpId
from qsync_fx.predictor.model.model_graph import (
    Choices,
    Follows,
    ModelGraph,
    ModelOperator,
    ModelParameter,
    ModelRead,
    Name,
    Value,
    reachable,
)
from qsync_fx.predictor.model.symbolic_sizes import read as read_file, sizes_of, written
from qsync_fx.serialization.schema import Schema
from qsync_fx.serialization.strict_json import Malformed


def check(graph: ModelGraph) -> None:
    """Raise `Malformed`, or `PlanError` for an invalid operator id, if a graph is inconsistent."""
    reads = [read for operator in graph.operators for read in operator.reads] + list(graph.outputs)
    if not 0 <= graph.points <= len(reads):
        raise Malformed(f" has {graph.points} places of casts, and {len(reads)} readings")
    _places(graph, reads)
    if unknown := set(_formats(graph, reads)) - {None, *FORMATS}:
        raise Malformed(
            f" speaks of formats that there are not: {', '.join(sorted(map(str, unknown)))[:120]}"
        )
    for operator in graph.operators:
        _operator(graph, operator)
        for read in operator.reads:
            _answers(read, operator.id)
    for read in graph.outputs:
        _answers(read, "the model's caller")
    origins = {read.point: read.origin for read in reads}
    if any(read.point is not None and origins[read.point] != read.origin for read in reads):
        raise Malformed(" has a place of casts at which two values are converted")
    if len(graph.places) != len(graph.operators):
        raise Malformed(" has two operators of one id")
    if len({parameter.path for parameter in graph.parameters}) != len(graph.parameters):
        raise Malformed(" has two parameters of one path")
    if any(
        parameter.numel < 0 or not 0 < parameter.dtype_bytes <= 16 for parameter in graph.parameters
    ):
        raise Malformed(" has a parameter whose size is none")
    if any(isinstance(size, int) and size < 0 for size in sizes_of(graph)):
        raise Malformed(" has a size below zero")
    for operator, states in zip(
        graph.operators, reachable(graph.operators, graph.formats), strict=True
    ):
        if missing := next((state for state in states if state not in operator.costs), None):
            raise Malformed(f" has no cost of {operator.id} in {' and '.join(map(str, missing))}")


def _places(graph: ModelGraph, reads: Iterable[ModelRead]) -> None:
    values, operators = range(len(graph.values)), range(len(graph.operators))
    for value in graph.values:
        _in(value.tensor, values, f"the memory of {value.name}")
        if value.operator is not None:
            _in(value.operator, operators, f"what makes {value.name}")
    for read in reads:
        _in(read.value, values, f"the operand {read.role}")
        _in(read.origin, values, f"the operand {read.role}")
        if read.point is not None:
            _in(read.point, range(graph.points), f"where {read.role} is read")
    for parameter in graph.parameters:
        for reader in parameter.readers:
            _in(reader, operators, f"a reader of {parameter.path}")
    for number, operator in enumerate(graph.operators):
        _in(operator.result, values, f"the result of {operator.id}")
        decided = operator.decided
        if isinstance(decided, Choices):
            for other in decided.readers:
                _in(other, operators, f"a reader of {operator.id}")
        else:
            for other in decided.operators:
                _in(other, range(number), f"an operator before {operator.id}")


def _in(place: int, existing: range, description: str) -> None:
    if place not in existing:
        raise Malformed(f" names the {place}th of {len(existing)} as {description[:120]}")


def _formats(graph: ModelGraph, reads: Iterable[ModelRead]) -> Iterator[Name]:
    yield from graph.formats
    for value in graph.values:
        yield value.own
    for read in reads:
        yield from (name or None for name in read.wanted)
        yield from read.wanted.values()
    for operator in graph.operators:
        decided = operator.decided
        if isinstance(decided, Choices):
            for table in (decided.runs, decided.outputs, decided.unpacked):
                yield from (*table, *table.values())
            yield from (decided.held, *decided.keeps, decided.wide, decided.pinned)
        else:
            yield from (decided.given, decided.own, decided.named)
        for state in operator.costs:
            yield from state


def _operator(graph: ModelGraph, operator: ModelOperator) -> None:
    OpId.parse(operator.id)
    decided = operator.decided
    if isinstance(decided, Choices) is not (operator.kind == "adjustable"):
        raise Malformed(
            f" has the {operator.kind} operator {operator.id}, whose rule is of the kind "
            f"{decided.kind}"
        )
    if isinstance(decided, Choices):
        if missing := {decided.held, *graph.formats} - decided.runs.keys():
            raise Malformed(
                f" does not say what {operator.id} makes of {', '.join(sorted(missing))}"
            )
    elif not math.isfinite(decided.scalar):
        raise Malformed(f" has a scalar of {operator.id} that is none")
    if operator.converts and not operator.reads:
        raise Malformed(f" has the conversion {operator.id} without an operand")


def _answers(read: ModelRead, reader: str) -> None:
    if read.point is not None and (missing := {"", *FORMATS} - read.wanted.keys()):
        raise Malformed(
            f" does not say what {reader} reads in {', '.join(sorted(missing)) or 'no format'}"
        )


Source = Literal["operator", "parameter", "buffer", "input", "constant"]


@dataclass(frozen=True)
class StoredRead:
    """Stored `ModelRead`; `wanted` is an index into `StoredGraph.tables`."""

    value: int
    role: str
    wanted: int
    point: int | None
    origin: int
    gradient: bool


@dataclass(frozen=True)
class StoredValue:
    """Stored `Value`; `numel` and `fixed` are indices into `StoredGraph.sizes`."""

    name: str
    tensor: int
    operator: int | None
    source: Source
    own: str | None
    numel: int
    fixed: int
    differentiated: bool


@dataclass(frozen=True)
class StoredCost:
    """Cost of an operator in one state.

    Attributes:
        precision, output: the state.
        works: index into `StoredGraph.works`.
        saved: name, format and size index of each saved tensor.
    """

    precision: str | None
    output: str | None
    works: int
    saved: list[tuple[str, str, int]]


@dataclass(frozen=True)
class StoredOperator:
    """Stored `ModelOperator`."""

    id: str
    kind: Literal["adjustable", "dependent", "fixed"]
    row: str
    shape: str
    line: str
    graph: int
    repeated: bool
    result: int
    reads: list[StoredRead]
    decided: Choices | Follows
    converts: bool
    converted: bool
    costs: list[StoredCost]
    method: str = ""


@dataclass(frozen=True)
class StoredGraph:
    """Stored `ModelGraph`.

    Attributes:
        sizes: sizes as text.
        tables: required formats by the reader's precision.
        works: indices into `sizes`: operations and bytes of each piece of work of a cost.
    """

    device: str
    formats: list[str]
    sizes: list[str]
    tables: list[Mapping[str, str | None]]
    works: list[list[int]]
    values: list[StoredValue]
    operators: list[StoredOperator]
    outputs: list[StoredRead]
    parameters: list[ModelParameter]
    points: int


FILE: Final = Schema(
    StoredGraph,
    noun="model graph",
    error=ProfileError,
    remedy="create it again: qsync_fx.profiler.model_graph_builder.build_model_graph("
    "qsync_fx.explain(model, ...)).save(path)",
    name="qsync-model-graph",
    largest=256 * 2**20,
    smaller="make it for fewer formats: model_graph(explanation, formats=...)",
)


class _Once:
    """List of distinct things, with their indices by key."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._places: dict[Any, int] = {}

    def place(self, key: Any, thing: Any) -> int:
        if key not in self._places:
            self._places[key] = len(self.found)
            self.found.append(thing)
        return self._places[key]


def stored(graph: ModelGraph) -> StoredGraph:
    """Return a model graph as it is stored in a file, or in a part of one."""
    sizes, tables, works = _Once(), _Once(), _Once()

    def size(value: Size) -> int:
        return sizes.place(value, written(value))

    def reads(value: Iterable[ModelRead]) -> list[StoredRead]:
        tabled = (
            (read, tables.place(tuple(read.wanted.items()), dict(read.wanted))) for read in value
        )
        return [
            StoredRead(r.value, r.role, table, r.point, r.origin, r.gradient) for r, table in tabled
        ]

    def cost(state: tuple[Name, Name], value: Cost) -> StoredCost:
        all_works: Iterator[Work] = (getattr(value, name) for name in WORKS)
        places = [index for work in all_works for index in (size(work.flops), size(work.bytes))]
        saved = [(tensor, settings, size(n)) for (tensor, settings), n in value.saved.items()]
        return StoredCost(*state, works.place(tuple(places), places), saved)

    operators = [
        StoredOperator(
            **{name: getattr(op, name) for name in _SAME},
            reads=reads(op.reads),
            costs=[cost(state, value) for state, value in op.costs.items()],
        )
        for op in graph.operators
    ]
    values = [
        StoredValue(**{**_fields(value), "numel": size(value.numel), "fixed": size(value.fixed)})
        for value in graph.values
    ]
    outputs = reads(graph.outputs)
    return StoredGraph(
        graph.device,
        list(graph.formats),
        sizes.found,
        tables.found,
        works.found,
        values,
        operators,
        outputs,
        list(graph.parameters),
        graph.points,
    )


def restored(result: StoredGraph) -> ModelGraph:
    """Return the model graph of a file's contents; raise `ProfileError` if it is inconsistent."""
    try:
        graph = _restored(result)
        check(graph)
    except (Malformed, PlanError, IndexError, KeyError) as wrong:
        message = f" refers to {wrong}, which it does not contain"
        if isinstance(wrong, (Malformed, PlanError)):
            message = wrong.what
        if message.startswith(" "):
            message = f"the model graph{message}"
        raise ProfileError(message, do=FILE.remedy) from None
    return graph


def _restored(result: StoredGraph) -> ModelGraph:
    sizes = list(map(read_file, result.sizes))
    works = [[_at(sizes, index) for index in places] for places in result.works]
    if any(len(places) != 2 * len(WORKS) for places in works):
        raise Malformed(f" has works that are not {2 * len(WORKS)} sizes")

    def cost(value: StoredCost) -> Cost:
        pairs = iter(_at(works, value.works))
        parts = {
            name: Work(flops, moved) for name, flops, moved in zip(WORKS, pairs, pairs, strict=True)
        }
        return Cost(
            **parts,
            saved={
                (tensor, settings): _at(sizes, index) for tensor, settings, index in value.saved
            },
        )

    def reads(value: Iterable[StoredRead]) -> tuple[ModelRead, ...]:
        return tuple(
            ModelRead(r.value, r.role, _at(result.tables, r.wanted), r.point, r.origin, r.gradient)
            for r in value
        )

    return ModelGraph(
        result.device,
        tuple(
            ModelOperator(
                **{name: getattr(op, name) for name in _SAME},
                reads=reads(op.reads),
                costs={(value.precision, value.output): cost(value) for value in op.costs},
            )
            for op in result.operators
        ),
        tuple(
            Value(
                **{
                    **_fields(value),
                    "numel": _at(sizes, value.numel),
                    "fixed": _at(sizes, value.fixed),
                }
            )
            for value in result.values
        ),
        reads(result.outputs),
        tuple(result.parameters),
        result.points,
        tuple(result.formats),
    )


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


_SAME: Final = [
    field.name
    for field in dataclasses.fields(StoredOperator)
    if field.name not in ("reads", "costs")
]


def _at(things: list[Any], index: int) -> Any:
    if not 0 <= index < len(things):
        raise Malformed(f" refers to the {index}th of {len(things)} things")
    return things[index]

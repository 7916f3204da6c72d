"""JSON files of model graphs.

Sizes, tables of required formats and pieces of work are stored once and referred to by index.
`restored` returns a consistent graph or raises `ProfileError`: references are valid, operators
follow from earlier ones, formats are known, and every reachable state has a cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    StateNames,
    Value,
    reachable,
)
from qsync_fx.predictor.model.symbolic_sizes import read as parsed, sizes_of, written
from qsync_fx.serialization.schema import Schema
from qsync_fx.serialization.strict_json import Malformed


def check(graph: ModelGraph) -> None:
    """Raise `Malformed`, or `PlanError` for an invalid operator id, if a graph is inconsistent."""
    reads = [read for operator in graph.operators for read in operator.reads] + list(graph.outputs)
    for index, count, where in _references(graph, reads):
        if not 0 <= index < count:
            raise Malformed(f" refers to number {index} of {count} at {where[:120]}")
    if unknown := set(_formats(graph, reads)) - {None, *FORMATS}:
        raise Malformed(f" has unknown formats: {', '.join(sorted(map(str, unknown)))[:120]}")
    for operator in graph.operators:
        _check_operator(graph, operator)
    origins = {read.point: read.origin for read in reads}
    for read in reads:
        if read.point is None:
            continue
        if missing := {"", *FORMATS} - read.wanted.keys():
            raise Malformed(f" lacks the required format of {read.role} for {sorted(missing)}")
        if origins[read.point] != read.origin:
            raise Malformed(" has a cast point at which two values are converted")
    if len(graph.places) != len(graph.operators):
        raise Malformed(" has two operators of one id")
    if len({parameter.path for parameter in graph.parameters}) != len(graph.parameters):
        raise Malformed(" has two parameters of one path")
    if any(p.numel < 0 or not 0 < p.dtype_bytes <= 16 for p in graph.parameters):
        raise Malformed(" has a parameter with an invalid size")
    if any(isinstance(size, int) and size < 0 for size in sizes_of(graph)):
        raise Malformed(" has a negative size")
    states = reachable(graph.operators, graph.formats)
    for operator, possible in zip(graph.operators, states, strict=True):
        if not operator.costs.keys() >= set(possible):
            raise Malformed(f" has no cost of {operator.id} in a reachable state")


def _references(graph: ModelGraph, reads: Sequence[ModelRead]) -> Iterator[tuple[int, int, str]]:
    """Yield each index of a graph with the number of things it may refer to, and its location."""
    values, operators = len(graph.values), len(graph.operators)
    yield graph.points, len(reads) + 1, "the number of cast points"
    for value in graph.values:
        yield value.tensor, values, value.name
        if value.operator is not None:
            yield value.operator, operators, value.name
    for read in reads:
        yield read.value, values, read.role
        yield read.origin, values, read.role
        if read.point is not None:
            yield read.point, graph.points, read.role
    for parameter in graph.parameters:
        for reader in parameter.readers:
            yield reader, operators, parameter.path
    for number, operator in enumerate(graph.operators):
        yield operator.result, values, operator.id
        if isinstance(operator.decided, Choices):
            yield from ((other, operators, operator.id) for other in operator.decided.readers)
        else:
            yield from ((other, number, operator.id) for other in operator.decided.operators)


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


def _check_operator(graph: ModelGraph, operator: ModelOperator) -> None:
    OpId.parse(operator.id)
    decided = operator.decided
    if isinstance(decided, Choices) is not (operator.kind == "adjustable"):
        raise Malformed(f" has the {operator.kind} operator {operator.id}, which is {decided.kind}")
    if isinstance(decided, Choices) and not {decided.held, *graph.formats} <= decided.runs.keys():
        raise Malformed(f" lacks the precision of {operator.id} for a format")
    if operator.converts and not operator.reads:
        raise Malformed(f" has the conversion {operator.id} without an operand")


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
    source: Literal["operator", "parameter", "buffer", "input", "constant"]
    own: str | None
    numel: int
    fixed: int
    differentiated: bool


@dataclass(frozen=True)
class StoredCost:
    """Cost of an operator in the state of `precision` and `output`.

    Each saved tensor has a name, a format and a size index.
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
    """Stored `ModelGraph`; `tables` are required formats, `works` pairs of indices of `sizes`."""

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


def stored(graph: ModelGraph) -> StoredGraph:
    """Return a model graph as it is stored in a file, or in a part of one."""
    sizes: dict[Size, int] = {}
    tables: dict[tuple[tuple[str, Name], ...], int] = {}
    works: dict[tuple[int, ...], int] = {}

    def size(value: Size) -> int:
        return sizes.setdefault(value, len(sizes))

    def read(value: ModelRead) -> StoredRead:
        table = tables.setdefault(tuple(value.wanted.items()), len(tables))
        return StoredRead(**{**vars(value), "wanted": table})

    def cost(state: StateNames, value: Cost) -> StoredCost:
        each = [getattr(value, name) for name in WORKS]
        places = tuple(index for work in each for index in (size(work.flops), size(work.bytes)))
        saved = [(tensor, settings, size(n)) for (tensor, settings), n in value.saved.items()]
        return StoredCost(*state, works.setdefault(places, len(works)), saved)

    def operator(value: ModelOperator) -> StoredOperator:
        reads = [read(item) for item in value.reads]
        costs = [cost(state, item) for state, item in value.costs.items()]
        return StoredOperator(**{**vars(value), "reads": reads, "costs": costs})

    operators = [operator(value) for value in graph.operators]
    values = [
        StoredValue(**{**vars(value), "numel": size(value.numel), "fixed": size(value.fixed)})
        for value in graph.values
    ]
    outputs = [read(value) for value in graph.outputs]
    return StoredGraph(
        device=graph.device,
        formats=list(graph.formats),
        sizes=[written(value) for value in sizes],
        tables=[dict(table) for table in tables],
        works=[list(places) for places in works],
        values=values,
        operators=operators,
        outputs=outputs,
        parameters=list(graph.parameters),
        points=graph.points,
    )


def restored(result: StoredGraph) -> ModelGraph:
    """Return the model graph of a file's contents; raise `ProfileError` if it is inconsistent."""
    try:
        graph = _restored(result)
        check(graph)
    except (Malformed, PlanError) as wrong:
        message = wrong.what
        if message.startswith(" "):
            message = f"the model graph{message}"
        raise ProfileError(message, do=FILE.remedy) from None
    return graph


def _restored(result: StoredGraph) -> ModelGraph:
    sizes = [parsed(text) for text in result.sizes]
    works = [[_item(sizes, index) for index in places] for places in result.works]
    if any(len(places) != 2 * len(WORKS) for places in works):
        raise Malformed(f" has works that are not {2 * len(WORKS)} sizes")

    def read(value: StoredRead) -> ModelRead:
        return ModelRead(**{**vars(value), "wanted": _item(result.tables, value.wanted)})

    def cost(value: StoredCost) -> Cost:
        places = _item(works, value.works)
        parts = dict(zip(WORKS, map(Work, places[::2], places[1::2]), strict=True))
        saved = {(tensor, settings): _item(sizes, index) for tensor, settings, index in value.saved}
        return Cost(**parts, saved=saved)

    def operator(value: StoredOperator) -> ModelOperator:
        reads = tuple(read(item) for item in value.reads)
        costs = {(item.precision, item.output): cost(item) for item in value.costs}
        return ModelOperator(**{**vars(value), "reads": reads, "costs": costs})

    def tensor(value: StoredValue) -> Value:
        numel, fixed = _item(sizes, value.numel), _item(sizes, value.fixed)
        return Value(**{**vars(value), "numel": numel, "fixed": fixed})

    return ModelGraph(
        device=result.device,
        operators=tuple(operator(value) for value in result.operators),
        values=tuple(tensor(value) for value in result.values),
        outputs=tuple(read(value) for value in result.outputs),
        parameters=tuple(result.parameters),
        points=result.points,
        formats=tuple(result.formats),
    )


def _item(things: list[Any], index: int) -> Any:
    if not 0 <= index < len(things):
        raise Malformed(f" refers to number {index} of {len(things)}")
    return things[index]

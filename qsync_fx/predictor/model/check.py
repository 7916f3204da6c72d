"""Whether a model graph that came from elsewhere holds together.

Invariant: what passes can be asked for any plan: every reference points to what is there, operators follow from earlier ones, formats are
known, and there is a cost for every state that a plan leads to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from qsync_fx.codec import Malformed
from qsync_fx.plan.opid import OpId
from qsync_fx.precision import FORMATS
from qsync_fx.predictor.model.reachable import reachable
from qsync_fx.predictor.model.sizing import sizes_of
from qsync_fx.predictor.model.value import Choices, ModelGraph, Name, Operator, Read


def check(graph: ModelGraph) -> None:
    """Raises `Malformed`, or `PlanError` for an id that is none, where a graph does not hold together."""
    reads = [read for operator in graph.operators for read in operator.reads] + list(graph.outputs)
    if not 0 <= graph.points <= len(reads):
        raise Malformed(f" has {graph.points} places of casts, and {len(reads)} readings")
    _places(graph, reads)
    if unknown := set(_formats(graph, reads)) - {None, *FORMATS}:
        raise Malformed(f" speaks of formats that there are not: {', '.join(sorted(map(str, unknown)))[:120]}")
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
    if any(parameter.numel < 0 or not 0 < parameter.dtype_bytes <= 16 for parameter in graph.parameters):
        raise Malformed(" has a parameter whose size is none")
    if any(isinstance(size, int) and size < 0 for size in sizes_of(graph)):
        raise Malformed(" has a size below zero")
    for operator, states in zip(graph.operators, reachable(graph.operators, graph.formats), strict=True):
        if missing := next((state for state in states if state not in operator.costs), None):
            raise Malformed(f" has no cost of {operator.id} in {' and '.join(map(str, missing))}")


def _places(graph: ModelGraph, reads: Iterable[Read]) -> None:
    values, operators = range(len(graph.values)), range(len(graph.operators))
    for value in graph.values:
        _in(value.tensor, values, f"the memory of {value.name}")
        if value.operator is not None:
            _in(value.operator, operators, f"what makes {value.name}")
    for read in reads:
        _in(read.value, values, f"what is read as {read.role}")
        _in(read.origin, values, f"what is read as {read.role}")
        if read.point is not None:
            _in(read.point, range(graph.points), f"where {read.role} is read")
    for parameter in graph.parameters:
        for reader in parameter.readers:
            _in(reader, operators, f"a reader of {parameter.path}")
    for number, operator in enumerate(graph.operators):
        _in(operator.result, values, f"the result of {operator.id}")
        decided = operator.decided
        for other in decided.readers if isinstance(decided, Choices) else ():
            _in(other, operators, f"a reader of {operator.id}")
        for other in () if isinstance(decided, Choices) else decided.operators:
            _in(other, range(number), f"an operator before {operator.id}")


def _in(place: int, there: range, what: str) -> None:
    if place not in there:
        raise Malformed(f" names the {place}th of {len(there)} as {what[:120]}")


def _formats(graph: ModelGraph, reads: Iterable[Read]) -> Iterator[Name]:
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


def _operator(graph: ModelGraph, operator: Operator) -> None:
    OpId.parse(operator.id)
    decided = operator.decided
    if isinstance(decided, Choices) is not (operator.kind == "adjustable"):
        raise Malformed(f" says of {operator.id} that it is {operator.kind}, and that {decided.kind} decides on it")
    if isinstance(decided, Choices):
        if missing := {decided.held, *graph.formats} - decided.runs.keys():
            raise Malformed(f" does not say what {operator.id} makes of {', '.join(sorted(missing))}")
    elif not math.isfinite(decided.scalar):
        raise Malformed(f" has a scalar of {operator.id} that is none")
    if operator.converts and not operator.reads:
        raise Malformed(f" has the conversion {operator.id}, which reads nothing")


def _answers(read: Read, reader: str) -> None:
    if read.point is not None and (missing := {"", *FORMATS} - read.wanted.keys()):
        raise Malformed(f" does not say what {reader} reads in {', '.join(sorted(missing)) or 'no format'}")

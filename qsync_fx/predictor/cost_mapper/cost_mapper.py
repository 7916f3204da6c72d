"""Cost mapper: the compute time of a plan on a device, also while single operators change format.

It implements QSync, Algorithm 1, with the cast condition corrected (docs/predictor.md). A change
visits only operators whose formats change, their operands and their neighbours. After any changes
and undos, the result equals that of a new mapper for the same plan, bit for bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from qsync_fx.errors import PlanError, ProfileError
from qsync_fx.formats import FORMATS
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.graph.operator_costs import changes_format, needs_cast
from qsync_fx.predictor.cost_mapper.plan_states import (
    Asked,
    PlannedCast,
    States,
    check_format,
    is_wide,
    operator_state,
    planned,
    settled,
    unpacked_format,
)
from qsync_fx.predictor.cost_mapper.times import (
    NEIGHBOURS,
    Entry,
    Parameter,
    Part,
    Schedule,
    Seconds,
    Times,
)
from qsync_fx.predictor.model.model_graph import (
    Choices,
    Follows,
    ModelGraph,
    ModelOperator,
    ModelRead,
    Name,
    StateNames,
    chosen,
    format_named,
    state_named,
)

NAMES: tuple[Name, ...] = (None, *FORMATS)
NUMBERS = {name: number for number, name in enumerate(NAMES)}
REACH = 2
"""Number of neighbours on either side that `Times.operator` depends on."""

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


@dataclass(frozen=True, slots=True)
class IndexedFormat:
    """Format of a value: the output format of operator number `operator`, if any, else `fixed`."""

    operator: int
    fixed: int


@dataclass(frozen=True, slots=True)
class IndexedReader:
    """Reader of a value at a cast point; the index is -1 for the model's caller.

    Formats are by the reader's precision. `used` is the format that it reads if the model converts
    the value in between, `saved` the plain format of a saved scaled operand in backward; 0: none.
    """

    operator: int
    wanted: tuple[int, ...]
    used: IndexedFormat | None
    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """Cast point: readings of one value, in execution order, that share one cast per format."""

    value: int
    before: IndexedFormat
    readers: tuple[IndexedReader, ...]


@dataclass(frozen=True, slots=True)
class IndexedChange:
    """Conversion of a value from `before` within an operator; `wanted`: the model requests it."""

    operator: int
    value: int
    before: IndexedFormat
    wanted: bool


Key = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Indices of the operators that determine the casts of a point: see `Tables.keys`."""


class Tables:
    """Casts of a model graph, and the operators that they depend on.

    Attributes:
        points: cast points, and format changes within operators.
        keys: by point, the operators that determine its casts: the producer of the value, the
            operators whose precision matters, and the operators whose output matters.
        touched: by operator, the points whose casts depend on its state.
        near: by operator, the operators whose time can depend on its state, and vice versa.
    """

    @classmethod
    def of(cls, graph: ModelGraph) -> Tables:
        """Return the tables of a graph, which are built once for all of its sizes."""
        cache = graph.independent_of_sizes
        if "tables" not in cache:
            cache["tables"] = cls(graph)
        result: Tables = cache["tables"]
        return result

    def __init__(self, graph: ModelGraph) -> None:
        count = len(graph.operators)
        self.points: list[Point | IndexedChange] = _points(graph)
        self.keys = [_key(point) for point in self.points]
        self.touched: list[list[int]] = [[] for _ in range(count)]
        for number, (live, readers, others) in enumerate(self.keys):
            for index in {live, *readers, *others} - {-1}:
                self.touched[index].append(number)
        self.near = [
            range(max(index - REACH, 0), min(index + REACH + 1, count)) for index in range(count)
        ]


def _key(point: Point | IndexedChange) -> Key:
    if isinstance(point, IndexedChange):
        return point.before.operator, (), (point.operator,)
    used = (reader.used.operator for reader in point.readers if reader.used is not None)
    return point.before.operator, tuple(reader.operator for reader in point.readers), tuple(used)


def _points(graph: ModelGraph) -> list[Point | IndexedChange]:
    readers: list[list[tuple[ModelRead, IndexedReader]]] = [[] for _ in range(graph.points)]
    result: list[Point | IndexedChange] = []
    for index, operator in enumerate(graph.operators):
        if operator.converts:
            value = operator.reads[0].value
            result.append(IndexedChange(index, value, _indexed_format(graph, value), wanted=True))
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
            result.append(Point(origin, _indexed_format(graph, origin), indexed))
    return result


def _indexed_format(graph: ModelGraph, index: int) -> IndexedFormat:
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
        used = _indexed_format(graph, read.value)
    return IndexedReader(index, wanted, used, saved)


def cast_seconds(
    graph: ModelGraph,
    times: Times,
    owner: int,
    value: int,
    before: str,
    after: str,
    differentiated: bool = True,
) -> Seconds:
    """Return the time of a cast of value number `value` that operator number `owner` causes."""
    live, operator = graph.values[value], graph.operators[owner]
    if not isinstance(live.numel, int):
        message = f"the time of a cast of {live.numel} elements is not known"
        do = "give sizes first: graph.at(batch=...)"
        raise ProfileError(message, where=operator.where, do=do)
    return times.cast(
        operator.id, before, after, live.numel, differentiated and live.differentiated
    )


FEMTO = 10**15


def _femtoseconds(time: Seconds, where: str) -> tuple[int, int]:
    """Return forward and backward time in femtoseconds; raise `ProfileError` if invalid."""
    for seconds in (time.forward, time.backward):
        if not math.isfinite(seconds) or seconds < 0:
            message = f"the time of {seconds} seconds is not valid"
            raise ProfileError(message, where=where, do="measure the model again")
    return round(time.forward * FEMTO), round(time.backward * FEMTO)


class IncrementalCascade:
    """Formats of all operators, updated as one adjustable operator changes.

    The output format of a scaled operator depends on its readers' precisions, but never widens
    them. The cascade therefore runs twice: first without wide outputs, then with them.

    Attributes:
        chosen: precision of each adjustable operator, by index.
        precisions, outputs: formats by operator. The last entry, None, is the model's caller.
    """

    def __init__(self, graph: ModelGraph, chosen: Mapping[int, str]) -> None:
        count = len(graph.operators)
        self.graph, self.chosen = graph, dict(chosen)
        self.precisions: list[Name] = [None] * (count + 1)
        self.outputs: list[Name] = [None] * (count + 1)
        self._narrow, self._narrow_outputs = self.precisions[:], self.outputs[:]
        self._followers: list[list[int]] = [[] for _ in range(count)]
        self._widens: list[list[int]] = [[] for _ in range(count)]
        for index, operator in enumerate(graph.operators):
            if isinstance(operator.decided, Follows):
                for used in operator.decided.operators:
                    self._followers[used].append(index)
            else:
                for reader in operator.decided.readers:
                    self._widens[reader].append(index)
        self._wide: set[int] = set()
        self._cascade(list(range(count)), self._narrow, self._narrow_outputs, self._wide)
        self._wide = {index for index in self.chosen if self._is_wide(index)}
        self._cascade(list(range(count)), self.precisions, self.outputs, self._wide)

    def change(self, index: int, precision: str) -> list[int]:
        """Set the precision of an adjustable operator; return the operators that change."""
        self.chosen[index] = precision
        changed = self._cascade([index], self._narrow, self._narrow_outputs, set())
        affected = set(changed).union(*(self._widens[item] for item in changed))
        for item in affected:
            if item in self.chosen and self._is_wide(item) is not (item in self._wide):
                self._wide ^= {item}
                changed.append(item)
        return self._cascade(changed, self.precisions, self.outputs, self._wide)

    def _is_wide(self, index: int) -> bool:
        return is_wide(self.graph, index, self.chosen[index], self._narrow)

    def _cascade(
        self, todo: list[int], precisions: list[Name], outputs: list[Name], wide: Set[int]
    ) -> list[int]:
        """Update the formats of operators and of their followers; return those that change."""
        changed = []
        heapq.heapify(todo)
        while todo:
            index = heapq.heappop(todo)
            decided, planned = self.graph.operators[index].decided, self.chosen.get(index)
            precision, output = operator_state(decided, outputs, planned, index in wide)
            if output != outputs[index]:
                for follower in self._followers[index]:
                    heapq.heappush(todo, follower)
            elif precision == precisions[index]:
                continue
            precisions[index], outputs[index] = precision, output
            changed.append(index)
        return changed


@dataclass(frozen=True)
class Totals:
    """Time of a training step on one device by kind of work, in seconds, without communication.

    `unpacking` are conversions of saved scaled tensors in the backward pass, `outside` is work that
    is charged to no operator.
    """

    forward: float
    backward: float
    casts: float
    casts_backward: float
    unpacking: float
    outside: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Sum of all fields."""
        return math.fsum(vars(self).values())


class CostMapper:
    """Compute time of a model on a device, updated as single operators change their format."""

    def __init__(self, graph: ModelGraph, times: Times, requested: Asked) -> None:
        self.graph, self.times = graph, times
        self._tables = tables = Tables.of(graph)
        self._outside, self._optimizer = times.outside(), times.optimizer()
        self._cascade = IncrementalCascade(graph, planned(graph, requested))
        self._undo: list[tuple[int, str]] = []
        count, points = len(graph.operators), len(tables.points)
        self._operator_times = [(0, 0)] * count
        self._cast_times = [(0, 0, 0)] * points
        self._known_operators: list[dict[tuple[Name, ...], tuple[int, int]]]
        self._known_operators = [{} for _ in range(count)]
        self._known_casts: list[dict[tuple[Name, ...], tuple[int, int, int]]]
        self._known_casts = [{} for _ in range(points)]
        self._forward = self._backward = 0
        self._casts = self._casts_backward = self._unpacking = 0
        self._update(range(count), range(points))

    def set(self, operator: str, precision: str) -> None:
        """Set the planned format of an adjustable operator and update all dependent formats.

        Raises:
            PlanError: the operator is not adjustable, or the graph does not include the format.
            ProfileError: a time is unknown or invalid; the mapper is unchanged.
        """
        index = self.graph.places.get(operator, -1)
        decided = self.graph.operators[index].decided
        if index < 0 or not isinstance(decided, Choices):
            do = "name one of kind adjustable in graph.operators; the others follow"
            raise PlanError("no plan decides on this operator", where=f"operator {operator}", do=do)
        check_format(self.graph, precision, self.graph.operators[index].where)
        before = self._cascade.chosen[index]
        try:
            self._change(index, chosen(decided, precision, explicit=True))
        except ProfileError:
            self._change(index, before)
            raise
        self._undo.append((index, before))

    def undo(self) -> None:
        """Undo the last `set` that is not undone yet; raise `PlanError` if none is left."""
        if not self._undo:
            do = "call undo once for each call of set, at most"
            raise PlanError("there is no change to take back", do=do)
        self._change(*self._undo.pop())

    @property
    def totals(self) -> Totals:
        return Totals(
            forward=self._forward / FEMTO,
            backward=self._backward / FEMTO,
            casts=self._casts / FEMTO,
            casts_backward=self._casts_backward / FEMTO,
            unpacking=self._unpacking / FEMTO,
            outside=self._outside.forward + self._outside.backward,
            optimizer=self._optimizer,
        )

    @property
    def seconds(self) -> float:
        """Compute time of the device in a step in seconds, without communication."""
        return self.totals.seconds

    def states(self) -> States:
        """Return the current formats of all operators, and the casts between them."""
        count = len(self.graph.operators)
        return settled(self.graph, [self._state(index) for index in range(count)])

    def schedule(self, whole_graphs: bool = False) -> Schedule:
        """Return the training step as a schedule; see `scheduled`."""
        return scheduled(self.states(), self.times, whole_graphs)

    def _change(self, index: int, precision: str) -> None:
        changed, tables = self._cascade.change(index, precision), self._tables
        operators = set().union(*[tables.near[index] for index in changed])
        self._update(operators, set().union(*[tables.touched[index] for index in changed]))

    def _update(self, operators: Iterable[int], points: Iterable[int]) -> None:
        """Update the times of operators and of casts; a `ProfileError` leaves them unchanged."""
        precisions, outputs = self._cascade.precisions, self._cascade.outputs
        new_times, new_casts = [], []
        for index in operators:
            near = self._tables.near[index]
            key = (*[precisions[i] for i in near], *[outputs[i] for i in near])
            times = self._known_operators[index]
            if key not in times:
                times[key] = self._operator_time(index)
            new_times.append((index, times[key]))
        for number in points:
            live, readers, others = self._tables.keys[number]
            key = (outputs[live], *[precisions[i] for i in readers], *[outputs[i] for i in others])
            casts = self._known_casts[number]
            if key not in casts:
                casts[key] = self._cast_time(number)
            new_casts.append((number, casts[key]))
        for index, time in new_times:
            old = self._operator_times[index]
            self._operator_times[index] = time
            self._forward += time[0] - old[0]
            self._backward += time[1] - old[1]
        for number, cast in new_casts:
            before = self._cast_times[number]
            self._cast_times[number] = cast
            self._casts += cast[0] - before[0]
            self._casts_backward += cast[1] - before[1]
            self._unpacking += cast[2] - before[2]

    def _state(self, index: int) -> StateNames:
        return self._cascade.precisions[index], self._cascade.outputs[index]

    def _operator_time(self, index: int) -> tuple[int, int]:
        operators = self.graph.operators
        near = [index + by for by in NEIGHBOURS]
        around = [state_named(self._state(n)) if n in range(len(operators)) else None for n in near]
        operator, state = operators[index], state_named(self._state(index))
        return _femtoseconds(self.times.operator(operator.id, state, around), operator.where)

    def _cast_time(self, number: int) -> tuple[int, int, int]:
        """Return the times of a point's casts forward and backward, and of unpacking."""
        precisions, outputs = self._cascade.precisions, self._cascade.outputs
        point = self._tables.points[number]
        before = _current(point.before, outputs)
        if isinstance(point, IndexedChange):
            after = NUMBERS[outputs[point.operator]]
            if not CHANGED[point.wanted][before][after]:
                return 0, 0, 0
            return *self._one_cast(point.operator, point.value, before, after), 0
        forward = backward = unpacking = 0
        made: set[int] = set()
        saved: dict[int, tuple[int, int]] = {}
        for reader in point.readers:
            precision = NUMBERS[precisions[reader.operator]]
            after = reader.wanted[precision]
            if reader.saved[precision]:
                saved[after] = reader.operator, reader.saved[precision]
            if not NEEDED[before][after] or after in made:
                continue
            if reader.used is not None and PLAIN[after] and _current(reader.used, outputs) == after:
                continue
            made.add(after)
            owner = reader.operator if reader.operator >= 0 else point.before.operator
            seconds, gradient = self._one_cast(owner, point.value, before, after)
            forward, backward = forward + seconds, backward + gradient
        for fmt, (owner, plain) in saved.items():
            unpacking += self._one_cast(owner, point.value, fmt, plain, differentiated=False)[0]
        return forward, backward, unpacking

    def _one_cast(
        self, owner: int, value: int, before: int, after: int, differentiated: bool = True
    ) -> tuple[int, int]:
        names = NAMES[before] or "", NAMES[after] or ""
        time = cast_seconds(self.graph, self.times, owner, value, *names, differentiated)
        where = self.graph.operators[owner].where
        return _femtoseconds(time, f"the cast from {' to '.join(names)} before {where}")


def _current(live: IndexedFormat, outputs: list[Name]) -> int:
    """Return the format of a value: the output format of its operator, else its own."""
    return NUMBERS[outputs[live.operator]] or live.fixed


def scheduled(states: States, times: Times, whole_graphs: bool = False) -> Schedule:
    """Return the training step of a model in these states.

    With `whole_graphs`, all gradients of a graph become ready at the end of its backward pass, as a
    compiled backward pass returns them. Otherwise a gradient is ready after the backward pass of
    the first operator that reads the parameter. Unknown times and sizes raise `ProfileError`.
    """
    graph = states.graph
    seconds = list(_operators(states, times))
    casts = _by_owner(graph, states.casts, times)
    unpacked = _by_owner(graph, states.unpacked, times, differentiated=False)
    outside = times.outside()
    forward = [Entry("", Part.OUTSIDE, outside.forward)]
    backward = [Entry("", Part.OUTSIDE, outside.backward)]
    for index, operator in enumerate(graph.operators):
        forward += [Entry(operator.id, Part.CAST, cast.forward) for cast in casts[index]]
        forward.append(Entry(operator.id, Part.FORWARD, seconds[index].forward))
    ends: dict[int, int] = {}
    for index, operator in reversed(list(enumerate(graph.operators))):
        name = operator.id
        backward += [Entry(name, Part.CAST, cast.forward) for cast in unpacked[index]]
        backward.append(Entry(name, Part.BACKWARD, seconds[index].backward))
        backward += [Entry(name, Part.CAST, cast.backward) for cast in reversed(casts[index])]
        ends[index] = len(backward) - 1
    parameters = [parameter for parameter in graph.parameters if parameter.trained]
    ready = {
        p.path: ends.get(_last(graph, p.readers, whole_graphs), len(backward) - 1)
        for p in parameters
    }
    trained = tuple(Parameter(p.path, p.numel, p.dtype_bytes) for p in parameters)
    return Schedule(tuple(forward), tuple(backward), times.optimizer(), trained, ready)


def _last(graph: ModelGraph, readers: Sequence[int], whole_graphs: bool) -> int:
    """Return the operator whose backward pass completes a gradient; -1 if no operator reads it."""
    if not readers or not whole_graphs:
        return min(readers, default=-1)
    part = graph.operators[min(readers)].graph
    return next(index for index, operator in enumerate(graph.operators) if operator.graph == part)


def _operators(states: States, times: Times) -> Iterator[Seconds]:
    result = list(map(state_named, states.names))
    existing: dict[int, OperandState] = dict(enumerate(result))
    for index, operator in enumerate(states.graph.operators):
        around = [existing.get(index + by) for by in NEIGHBOURS]
        yield times.operator(operator.id, result[index], around)


def _by_owner(
    graph: ModelGraph, casts: Sequence[PlannedCast], times: Times, differentiated: bool = True
) -> list[list[Seconds]]:
    result: list[list[Seconds]] = [[] for _ in graph.operators]
    for cast in casts:
        arguments = cast.owner, cast.value, cast.before, cast.after, differentiated
        result[cast.owner].append(cast_seconds(graph, times, *arguments))
    return result

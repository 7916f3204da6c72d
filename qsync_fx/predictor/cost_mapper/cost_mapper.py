"""Cost mapper: the compute time of a plan on a device, also while single operators change format.

It implements QSync, Algorithm 1, with the cast condition corrected (docs/cost-mapper.md). A change
visits only operators whose formats change, their operands and their neighbours. Invariant: after
any changes and undos, the result equals that of a new mapper for the same plan, bit for bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qsync_fx.errors import PlanError, ProfileError
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.cost_mapper.indexed_model import (
    BASE,
    CHANGED,
    NAMES,
    NEEDED,
    NUMBERS,
    PLAIN,
    REACH,
    SCALED,
    IndexedChange,
    IndexedFormat,
    Tables,
)
from qsync_fx.predictor.cost_mapper.plan_states import (
    Asked,
    PlannedCast,
    States,
    check_format,
    planned,
    settled,
)
from qsync_fx.predictor.model.model_graph import ModelGraph, state_named
from qsync_fx.predictor.times import NEIGHBOURS, Entry, Parameter, Part, Schedule, Seconds, Times


def cast_seconds(
    graph: ModelGraph,
    times: Times,
    owner: int,
    value: int,
    before: str,
    after: str,
    differentiated: bool = True,
) -> Seconds:
    """Return the time of a cast.

    Args:
        owner: index of the operator that the cast is charged to.
        value: index of the value.
        before, after: names of the formats.
        differentiated: whether gradients of the value flow back through the cast.

    Raises:
        ProfileError: the time is unknown, or the size is symbolic.
    """
    live, operator = graph.values[value], graph.operators[owner]
    if not isinstance(live.numel, int):
        message = f"the time of a cast of {live.numel} elements is not known"
        raise ProfileError(
            message, where=operator.where, do="give sizes first: graph.at(batch=...)"
        )
    return times.cast(
        operator.id, before, after, live.numel, differentiated and live.differentiated
    )


FEMTO = 10**15
Price = tuple[int, int, int, int, int]
"""Femtoseconds of operators forward and backward, of casts forward and backward, and of unpacking:
conversions of saved scaled tensors in the backward pass."""
NOTHING: Price = (0, 0, 0, 0, 0)


def femtoseconds(seconds: float, where: str) -> int:
    """Return seconds as whole femtoseconds; raise `ProfileError` if negative or not finite."""
    if not math.isfinite(seconds) or seconds < 0:
        raise ProfileError(
            f"the time of {seconds} seconds is not valid", where=where, do="measure the model again"
        )
    return round(seconds * FEMTO)


class CostCache:
    """Prices of one model on one device, and a cache of its operator states."""

    def __init__(self, tables: Tables, times: Times) -> None:
        self.tables, self.times = tables, times
        self._states: dict[int, OperandState] = {}

    def state(self, code: int) -> OperandState:
        """Return the state of a code: precision + `BASE` * output."""
        if code not in self._states:
            self._states[code] = state_named((NAMES[code % BASE], NAMES[code // BASE]))
        return self._states[code]

    def operator(
        self, index: int, codes: list[int], precisions: list[int], outputs: list[int]
    ) -> Price:
        """Return the price of an operator and of the casts that depend on its precision alone."""
        operators = self.tables.graph.operators
        near = [index + by for by in NEIGHBOURS]
        around = [self.state(codes[n + REACH]) if 0 <= n < len(operators) else None for n in near]
        result = self.times.operator(operators[index].id, self.state(codes[index + REACH]), around)
        forward, backward = self._checked(result, operators[index].where)
        alone = [self.point(number, precisions, outputs) for number in self.tables.alone[index]]
        _, _, casts, casts_backward, unpacking = map(sum, zip(NOTHING, *alone, strict=True))
        return forward, backward, casts, casts_backward, unpacking

    def cast(
        self, owner: int, value: int, before: int, after: int, differentiated: bool = True
    ) -> tuple[int, int]:
        """Return the time of a cast forward and backward, in femtoseconds."""
        graph, names = self.tables.graph, (NAMES[before] or "", NAMES[after] or "")
        result = cast_seconds(graph, self.times, owner, value, *names, differentiated)
        return self._checked(
            result, f"the cast from {' to '.join(names)} before {graph.operators[owner].where}"
        )

    def point(self, number: int, precisions: list[int], outputs: list[int]) -> Price:
        """Return the price of the casts of point `number` for these precisions and outputs."""
        point = self.tables.points[number]
        before = _now(point.held, outputs)
        if isinstance(point, IndexedChange):
            after = outputs[point.operator]
            if not CHANGED[point.wanted][before][after]:
                return NOTHING
            return 0, 0, *self.cast(point.operator, point.value, before, after), 0
        forward = backward = unpacking = 0
        made: set[int] = set()
        saved: dict[int, tuple[int, int]] = {}
        for reader in point.readers:
            precision = precisions[reader.operator]
            after = reader.wanted[precision]
            if reader.kept[precision]:
                saved[after] = reader.operator, reader.kept[precision]
            if not NEEDED[before][after] or after in made:
                continue
            if reader.used is not None and PLAIN[after] and _now(reader.used, outputs) == after:
                continue
            made.add(after)
            owner = reader.operator if reader.operator >= 0 else point.held.operator
            existing, back = self.cast(owner, point.value, before, after)
            forward, backward = forward + existing, backward + back
        for fmt, (owner, plain) in saved.items():
            unpacking += self.cast(owner, point.value, fmt, plain, differentiated=False)[0]
        return 0, 0, forward, backward, unpacking

    def _checked(self, result: Seconds, where: str) -> tuple[int, int]:
        return femtoseconds(result.forward, where), femtoseconds(result.backward, where)


def _now(live: IndexedFormat, outputs: list[int]) -> int:
    """Return the format of a value: the output format of its operator, else its own."""
    return outputs[live.operator] or live.own


class IncrementalCascade:
    """Formats of all operators, updated as one adjustable operator changes.

    The output format of a scaled operator depends on its readers' precisions, but never widens
    them. The cascade therefore runs twice: first without wide outputs, then with them.

    Args:
        chosen: precision of each adjustable operator, by index.

    Attributes:
        precisions, outputs: format numbers by operator. The last entry, 0, is the model's caller.
        codes: precision + `BASE` * output by operator, with `REACH` zeros before and after.
    """

    def __init__(self, tables: Tables, chosen: Mapping[int, int]) -> None:
        count = len(tables.inputs)
        self.tables = tables
        self.precisions, self.outputs, self.codes = (
            [0] * (count + 1),
            [0] * (count + 1),
            [0] * (count + 2 * REACH),
        )
        self._narrow, self._narrow_out = [0] * (count + 1), [0] * (count + 1)
        self._wide = [False] * count
        for index, outputs in enumerate(tables.outputs):
            if outputs is not None:
                result = chosen[index], outputs[chosen[index]]
            else:
                result = self._followed(index, self._narrow_out)
            self._narrow[index], self._narrow_out[index] = result
        for index in range(count):
            self._wide[index] = self._is_wide(index)
            self._settle(index)

    def chosen(self, index: int) -> int:
        """Return the precision of an adjustable operator."""
        return self._narrow[index]

    def change(self, index: int, precision: int) -> list[int]:
        """Set the precision of an adjustable operator; return the operators that change."""
        changed: list[int] = []
        if self._narrow[index] == precision:
            return changed
        outputs, followers = self.outputs, self.tables.followers
        todo = self._spread(index, precision)
        while todo:
            now = heapq.heappop(todo)
            before = outputs[now]
            if self._settle(now):
                changed.append(now)
                if outputs[now] != before:
                    for follower in followers[now]:
                        heapq.heappush(todo, follower)
        return changed

    def _spread(self, first: int, precision: int) -> list[int]:
        """Cascade a change without wide outputs; return a heap of operators to settle."""
        tables, narrow, out = self.tables, self._narrow, self._narrow_out
        outputs = tables.outputs[first]
        assert outputs is not None, "adjustable operators have outputs"
        narrow[first] = precision
        looked, requested = [first], [first, *tables.widens[first]]
        todo: list[int] = []
        if out[first] != outputs[precision]:
            out[first] = outputs[precision]
            todo += tables.followers[first]
        while todo:
            index = heapq.heappop(todo)
            matches, result = self._followed(index, out)
            if matches == narrow[index] and result == out[index]:
                continue
            looked.append(index)
            if matches != narrow[index]:
                narrow[index] = matches
                requested += tables.widens[index]
            if result != out[index]:
                out[index] = result
                for follower in tables.followers[index]:
                    heapq.heappush(todo, follower)
        for index in requested:
            if tables.wide[index] and self._is_wide(index) != self._wide[index]:
                self._wide[index] = not self._wide[index]
                looked.append(index)
        heapq.heapify(looked)
        return looked

    def _settle(self, index: int) -> bool:
        """Update the formats of an operator; return whether they changed."""
        if self.tables.outputs[index] is None:
            precision, output = self._followed(index, self.outputs)
        else:
            precision = self._narrow[index]
            output = self._narrow_out[index]
            if self._wide[index]:
                output = self.tables.wide[index]
        code = precision + BASE * output
        if code == self.codes[index + REACH]:
            return False
        self.codes[index + REACH], self.precisions[index], self.outputs[index] = (
            code,
            precision,
            output,
        )
        return True

    def _followed(self, index: int, outputs: list[int]) -> tuple[int, int]:
        available, key = self.tables.follow[index], 0
        assert available is not None, "others are chosen"
        for used in self.tables.inputs[index]:
            key = key * BASE + outputs[used]
        return available[key]

    def _is_wide(self, index: int) -> bool:
        wide, narrow = self.tables.wide[index], self._narrow
        return (
            bool(wide)
            and SCALED[narrow[index]]
            and all(w[narrow[r]] for r, w in self.tables.wide_readers[index])
        )


STATES = BASE * BASE


@dataclass(frozen=True)
class Totals:
    """Time of a training step on one device by kind of work, in seconds, without communication.

    Attributes:
        forward, backward: operators.
        casts, casts_backward: casts and quantizations, and their derivatives.
        unpacking: conversions of saved scaled tensors in the backward pass.
        outside: work that is charged to no operator.
        optimizer: optimizer step.
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
        existing = self.forward + self.casts
        back = self.backward + self.casts_backward + self.unpacking
        return existing + back + self.outside + self.optimizer


class CostMapper:
    """Compute time of a model on a device, updated as single operators change their format.

    Args:
        graph: the model.
        times: operator times of the model on a device.
        requested: the initial plan, or the format of each adjustable operator by its id.

    Raises:
        PlanError: the plan does not fit the model.
        ProfileError: a time is unknown or invalid.
    """

    def __init__(self, graph: ModelGraph, times: Times, requested: Asked) -> None:
        self.graph, self.times = graph, times
        self._tables = tables = Tables(graph)
        self._prices = CostCache(tables, times)
        self._outside, self._optimizer = times.outside(), times.optimizer()
        self._following = IncrementalCascade(
            tables, {index: NUMBERS[name] for index, name in planned(graph, requested).items()}
        )
        self._undo: list[tuple[int, int]] = []
        count, points = len(graph.operators), len(tables.points)
        self._operator_prices: list[Price] = [NOTHING] * count
        self._point_prices: list[Price] = [NOTHING] * points
        self._known_operators: list[dict[int, Price]] = [{} for _ in range(count)]
        self._known_points: list[dict[int, Price]] = [{} for _ in range(points)]
        self._sums: Price = NOTHING
        self._reprice(range(count), {number for touched in tables.touched for number in touched})

    def set(self, operator: str, precision: str) -> None:
        """Set the planned format of an adjustable operator and update all dependent formats.

        Raises:
            PlanError: the operator is not adjustable, or the graph does not include the format.
            ProfileError: a time is unknown or invalid; the mapper is unchanged.
        """
        index = self.graph.places.get(operator)
        takes = self._tables.chosen[index] if index is not None else None
        if index is None or takes is None:
            do = "name one of kind adjustable in graph.operators; the others follow"
            raise PlanError("no plan decides on this operator", where=f"operator {operator}", do=do)
        if precision not in takes:
            check_format(self.graph, precision, self.graph.operators[index].where)
        before = self._following.chosen(index)
        try:
            self._change(index, takes[precision])
        except ProfileError:
            self._change(index, before)
            raise
        self._undo.append((index, before))

    def undo(self) -> None:
        """Undo the last `set` that is not undone yet; raise `PlanError` if none is left."""
        if not self._undo:
            raise PlanError(
                "there is no change to take back", do="call undo once for each call of set, at most"
            )
        self._change(*self._undo.pop())

    @property
    def totals(self) -> Totals:
        outside = self._outside.forward + self._outside.backward
        forward, backward, casts, casts_backward, unpacking = (
            femto / FEMTO for femto in self._sums
        )
        return Totals(forward, backward, casts, casts_backward, unpacking, outside, self._optimizer)

    @property
    def seconds(self) -> float:
        """Compute time of the device in a step in seconds, without communication."""
        return self.totals.seconds

    def states(self) -> States:
        """Return the current formats of all operators, and the casts between them."""
        names = zip(self._following.precisions[:-1], self._following.outputs[:-1], strict=True)
        return settled(
            self.graph, [(NAMES[precision], NAMES[output]) for precision, output in names]
        )

    def schedule(self, whole_graphs: bool = False) -> Schedule:
        """Return the training step as a schedule; see `scheduled`."""
        return scheduled(self.states(), self.times, whole_graphs)

    def _change(self, index: int, precision: int) -> None:
        changed, tables = self._following.change(index, precision), self._tables
        if changed:
            near, touched = tables.near, tables.touched
            self._reprice(
                set().union(*[near[index] for index in changed]),
                set().union(*[touched[index] for index in changed]),
            )

    def _reprice(self, operators: Iterable[int], points: Iterable[int]) -> None:
        """Update the prices of operators and cast points.

        After a `ProfileError` the sums contain exactly the prices updated before it.
        """
        forward, backward, casts, casts_backward, unpacking = self._sums
        codes, precisions, outputs = (
            self._following.codes,
            self._following.precisions,
            self._following.outputs,
        )
        available, prices, keys = self._known_operators, self._operator_prices, self._tables.keys
        try:
            for index in operators:
                first, second, owned, fourth, fifth = codes[index : index + 2 * REACH + 1]
                key = (
                    ((first * STATES + second) * STATES + owned) * STATES + fourth
                ) * STATES + fifth
                price = available[index].get(key)
                if price is None:
                    price = available[index][key] = self._prices.operator(
                        index, codes, precisions, outputs
                    )
                old = prices[index]
                if price is not old:
                    prices[index] = price
                    forward += price[0] - old[0]
                    backward += price[1] - old[1]
                    casts += price[2] - old[2]
                    casts_backward += price[3] - old[3]
                    unpacking += price[4] - old[4]
            available, prices = self._known_points, self._point_prices
            for number in points:
                live, readers, others = keys[number]
                key = outputs[live]
                for index in readers:
                    key = key * BASE + precisions[index]
                for index in others:
                    key = key * BASE + outputs[index]
                price = available[number].get(key)
                if price is None:
                    price = available[number][key] = self._prices.point(number, precisions, outputs)
                old = prices[number]
                if price is not old:
                    prices[number] = price
                    casts += price[2] - old[2]
                    casts_backward += price[3] - old[3]
                    unpacking += price[4] - old[4]
        finally:
            self._sums = forward, backward, casts, casts_backward, unpacking


def scheduled(states: States, times: Times, whole_graphs: bool = False) -> Schedule:
    """Return the training step of a model in these states.

    Args:
        whole_graphs: whether all gradients of a graph become ready at the end of its backward pass,
            as a compiled backward pass returns them. Otherwise a gradient is ready after the
            backward pass of the first operator in program order that reads the parameter.

    Raises:
        ProfileError: a time or a size is unknown.
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

"""Incremental cost mapper: the compute time of a plan while single operators change their format.

It implements QSync, Algorithm 1, with the cast condition corrected (docs/predictor.md). A change
visits only the operators whose formats change, their operands and their neighbours.

Invariant: after any sequence of changes and undos, formats and times equal the results of a
new mapper for the same plan, bit for bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qsync_fx.errors import PlanError, ProfileError
from qsync_fx.predictor.cost_mapper.cost_cache import FEMTO, CostCache, Price, scheduled
from qsync_fx.predictor.cost_mapper.indexed_model import BASE, NAMES, NUMBERS, REACH, SCALED, Tables
from qsync_fx.predictor.cost_mapper.plan_states import Asked, States, check_format, planned, settled
from qsync_fx.predictor.model.model_graph import ModelGraph
from qsync_fx.predictor.times import Schedule, Times


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
            output = self.tables.wide[index] if self._wide[index] else self._narrow_out[index]
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
        self._operator_prices: list[Price] = [(0, 0, 0, 0, 0)] * count
        self._point_prices: list[Price] = [(0, 0, 0, 0, 0)] * points
        self._known_operators: list[dict[int, Price]] = [{} for _ in range(count)]
        self._known_points: list[dict[int, Price]] = [{} for _ in range(points)]
        self._sums: Price = (0, 0, 0, 0, 0)
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

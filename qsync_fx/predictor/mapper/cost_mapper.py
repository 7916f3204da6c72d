"""What a plan takes on a device, as it is changed operator by operator (paper, Algorithm 1, read rightly: docs/predictor.md).

Invariant: after any number of changes, and of changes undone, everything equals what a new mapper finds for the same plan, to the last bit.
A change looks at the operators whose formats it changes, at what these read and at their neighbours, and at nothing else.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from qsync_fx.errors import PlanError, ProfileError
from qsync_fx.predictor.mapper.prices import FEMTO, Price, Prices
from qsync_fx.predictor.mapper.schedule import scheduled
from qsync_fx.predictor.mapper.states import Asked, States, check_format, planned, settled
from qsync_fx.predictor.mapper.tables import BASE, NAMES, NUMBERS, SCALED, Tables
from qsync_fx.predictor.model.reachable import chosen
from qsync_fx.predictor.model.value import Choices, ModelGraph
from qsync_fx.predictor.schedule import Schedule
from qsync_fx.predictor.times import Times

Places = set[int]

_REACH = (-2, -1, 0, 1, 2)
"""Whose time a state has a say in: `Times.operator` is told of two neighbours on either side."""


@dataclass(frozen=True)
class Totals:
    """Seconds of a training step on one device, without communication.

    Attributes:
        forward, backward: of operators.
        casts, casts_backward: of conversions and quantizers, and of what differentiates them.
        unpacking: of converting in the backward pass what is kept in a scaled format.
        outside: of what belongs to no operator.
        optimizer: of its step.
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
        """All of it."""
        there = self.forward + self.casts
        back = self.backward + self.casts_backward + self.unpacking
        return there + back + self.outside + self.optimizer


class CostMapper:
    """
    Args:
        graph: the model.
        times: of its operators on a device.
        asked: the plan to start from, or the format of each adjustable operator by its id.

    Raises:
        PlanError: the plan does not fit the model.
        ProfileError: a time is not known, or is none.
    """

    def __init__(self, graph: ModelGraph, times: Times, asked: Asked) -> None:
        self.graph, self.times = graph, times
        self._tables = Tables(graph)
        self._prices = Prices(self._tables, times)
        self._outside, self._optimizer = times.outside(), times.optimizer()
        count, points = len(graph.operators), len(self._tables.points)
        # What operators compute in and give out, first as if no scaled one gave out anything wide, then as it is.
        self._narrow, self._narrow_out = [0] * count, [0] * count
        self._precisions, self._outputs, self._codes = [0] * count, [0] * count, [0] * count
        self._wide = [False] * count
        self._operator_prices: list[tuple[int, int]] = [(0, 0)] * count
        self._point_prices: list[Price] = [(0, 0, 0)] * points
        self._known_operators: list[dict[int, tuple[int, int]]] = [{} for _ in range(count)]
        self._known_points: list[dict[int, Price]] = [{} for _ in range(points)]
        self._sums = [0, 0, 0, 0, 0]
        self._undo: list[list[tuple[list[Any], int, Any]]] = []
        self._log: list[tuple[list[Any], int, Any]] = []
        for at, name in planned(graph, asked).items():
            self._narrow[at] = NUMBERS[name]
        self._start()

    def set(self, operator: str, precision: str) -> None:
        """Gives an adjustable operator what a plan asks for, and all that depends on it what follows.

        Raises:
            PlanError: the operator is not adjustable, or the graph was not made for the format.
            ProfileError: a time is not known, or is none; all is as before.
        """
        at = self._tables.places.get(operator)
        decided = self.graph.operators[at].decided if at is not None else None
        if at is None or not isinstance(decided, Choices):
            known = "operators of the model that are adjustable are in graph.operators"
            raise PlanError("no plan decides on this operator", where=f"operator {operator}", do=known)
        if precision not in self.graph.formats:
            check_format(self.graph, precision, self.graph.operators[at].where)
        self._log = []
        try:
            self._change(at, NUMBERS[chosen(decided, precision, explicit=True)])
        except ProfileError:
            self._revert(self._log)
            raise
        self._undo.append(self._log)

    def undo(self) -> None:
        """Takes back the last change that was not taken back yet; raises `PlanError` where there is none."""
        if not self._undo:
            raise PlanError("there is no change to take back", do="call undo once for each call of set, at most")
        self._revert(self._undo.pop())

    @property
    def totals(self) -> Totals:
        outside = self._outside.forward + self._outside.backward
        forward, backward, casts, casts_backward, unpacking = (femto / FEMTO for femto in self._sums)
        return Totals(forward, backward, casts, casts_backward, unpacking, outside, self._optimizer)

    @property
    def seconds(self) -> float:
        """The time that the device computes in a step, without communication."""
        return self.totals.seconds

    def seconds_of(self, operator: str) -> tuple[float, float]:
        """Returns the seconds of an operator in its state, forward and backward, without casts."""
        forward, backward = self._operator_prices[self.graph.place(operator)]
        return forward / FEMTO, backward / FEMTO

    def states(self) -> States:
        """Returns what operators compute in and give out now, and the casts that this takes."""
        names = zip(self._precisions, self._outputs, strict=True)
        return settled(self.graph, [(NAMES[precision], NAMES[output]) for precision, output in names])

    def schedule(self, whole_graphs: bool = False) -> Schedule:
        """Returns the step as what runs after what; see `scheduled`."""
        return scheduled(self.states(), self.times, whole_graphs)

    # How a change spreads.

    def _start(self) -> None:
        tables = self._tables
        for at, outputs in enumerate(tables.outputs):
            if outputs is not None:
                self._narrow_out[at] = outputs[self._narrow[at]]
            else:
                self._narrow[at], self._narrow_out[at] = self._followed(at, self._narrow_out)
        for at in range(len(self._narrow)):
            self._wide[at] = self._is_wide(at)
            self._settle(at)
        for at in range(len(self._narrow)):
            self._price_operator(at)
        for number in range(len(tables.points)):
            self._price_point(number)
        self._log = []

    def _change(self, at: int, precision: int) -> None:
        if self._narrow[at] == precision:
            return
        outputs = self._tables.outputs[at]
        assert outputs is not None, "adjustable operators have outputs"
        looked = self._spread(at, precision, outputs[precision])
        changed: dict[int, None] = {}
        todo: list[int] = list(looked)
        heapq.heapify(todo)
        while todo:
            now = heapq.heappop(todo)
            before = self._outputs[now]
            if not self._settle(now):
                continue
            changed[now] = None
            if self._outputs[now] != before:
                for follower in self._tables.followers[now]:
                    heapq.heappush(todo, follower)
        self._reprice(changed)

    def _spread(self, first: int, precision: int, output: int) -> Places:
        """Follows a change as if no scaled operator gave out anything wide; returns the operators that may have to settle anew."""
        tables, looked = self._tables, {first}
        self._put(self._narrow, first, precision)
        asked = {first, *tables.widens[first]}
        todo: list[int] = []
        if self._narrow_out[first] != output:
            self._put(self._narrow_out, first, output)
            todo = list(tables.followers[first])
        while todo:
            at = heapq.heappop(todo)
            found = self._followed(at, self._narrow_out)
            if found == (self._narrow[at], self._narrow_out[at]):
                continue
            looked.add(at)
            if found[0] != self._narrow[at]:
                self._put(self._narrow, at, found[0])
                asked.update(tables.widens[at])
            if found[1] != self._narrow_out[at]:
                self._put(self._narrow_out, at, found[1])
                for follower in tables.followers[at]:
                    heapq.heappush(todo, follower)
        for at in asked:
            wide = self._is_wide(at)
            if wide != self._wide[at]:
                self._put(self._wide, at, wide)
                looked.add(at)
        return looked

    def _settle(self, at: int) -> bool:
        """Gives an operator its formats; returns whether they are others than before."""
        if self._tables.outputs[at] is None:
            precision, output = self._followed(at, self._outputs)
        else:
            precision = self._narrow[at]
            output = self._tables.wide[at] if self._wide[at] else self._narrow_out[at]
        code = precision + BASE * output
        if code == self._codes[at]:
            return False
        self._put(self._codes, at, code)
        self._put(self._precisions, at, precision)
        self._put(self._outputs, at, output)
        return True

    def _followed(self, at: int, outputs: list[int]) -> tuple[int, int]:
        follow = self._tables.follow[at]
        assert follow is not None, "others are chosen"
        return follow(*[outputs[used] for used in self._tables.inputs[at]])

    def _is_wide(self, at: int) -> bool:
        wide, narrow = self._tables.wide[at], self._narrow
        return bool(wide) and SCALED[narrow[at]] and all(w[narrow[r]] for r, w in self._tables.wide_readers[at])

    # What it takes.

    def _reprice(self, changed: dict[int, None]) -> None:
        tables, last = self._tables, len(self._codes)
        for at in {at + step for at in changed for step in _REACH}:
            if 0 <= at < last:
                self._price_operator(at)
        numbers: set[int] = set()
        for at in changed:
            numbers.update(tables.read[at])
            numbers.update(tables.made[at])
        for number in numbers:
            self._price_point(number)

    def _price_operator(self, at: int) -> None:
        codes, known, key = self._codes, self._known_operators[at], 0
        for code in codes[max(at - 2, 0) : at + 3]:
            key = key * BASE * BASE + code
        found = known.get(key)
        if found is None:
            found = known[key] = self._prices.operator(at, codes)
        before = self._operator_prices[at]
        if found != before:
            self._put(self._operator_prices, at, found)
            self._add(0, found[0] - before[0])
            self._add(1, found[1] - before[1])

    def _price_point(self, number: int) -> None:
        point, known = self._tables.points[number], self._known_points[number]
        key = self._tables.key(point, self._precisions, self._outputs)
        found = known.get(key)
        if found is None:
            found = known[key] = self._prices.point(point, self._precisions, self._outputs)
        before = self._point_prices[number]
        if found != before:
            self._put(self._point_prices, number, found)
            for part, (new, old) in enumerate(zip(found, before, strict=True)):
                self._add(2 + part, new - old)

    # What is taken back.

    def _add(self, part: int, femto: int) -> None:
        if femto:
            self._put(self._sums, part, self._sums[part] + femto)

    def _put(self, where: list[Any], at: int, value: Any) -> None:
        self._log.append((where, at, where[at]))
        where[at] = value

    def _revert(self, log: list[tuple[list[Any], int, Any]]) -> None:
        for where, at, before in reversed(log):
            where[at] = before

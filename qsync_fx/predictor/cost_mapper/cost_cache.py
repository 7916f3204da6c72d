"""Prices of operators and casts on a device, and the schedule of one training step.

`CostCache` queries `Times` and returns prices in whole femtoseconds. Integer sums do not depend on
their order, so undoing a change restores them exactly. `scheduled` builds the step of one device
from operator states: each operator runs forward in program order after its casts, and backward in
reverse order before the derivatives of its casts. The recomputation of activation checkpointing is
part of an operator's backward time.

Invariant: prices and schedule entries query `Times` with the same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from qsync_fx.errors import ProfileError
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.cost_mapper.indexed_model import (
    BASE,
    NAMES,
    NEEDED,
    PLAIN,
    REACH,
    IndexedChange,
    IndexedFormat,
    Tables,
)
from qsync_fx.predictor.cost_mapper.plan_states import PlannedCast, States
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


def femtoseconds(seconds: float, where: str) -> int:
    """Return seconds as whole femtoseconds; raise `ProfileError` if negative or not finite."""
    if not math.isfinite(seconds) or seconds < 0:
        raise ProfileError(
            f"a time of {seconds} seconds is none", where=where, do="measure the model anew"
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
        casts, casts_backward, unpacking = (
            sum(price[part] for price in alone) for part in (2, 3, 4)
        )
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
            same = before == after if point.wanted else not NEEDED[before][after]
            if same or not before or not after:
                return 0, 0, 0, 0, 0
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
    owned = list(_operators(states, times))
    casts = _by_owner(graph, states.casts, times)
    unpacked = _by_owner(graph, states.unpacked, times, differentiated=False)
    outside = times.outside()
    forward = [Entry("", Part.OUTSIDE, outside.forward)]
    backward = [Entry("", Part.OUTSIDE, outside.backward)]
    for index, operator in enumerate(graph.operators):
        forward += [Entry(operator.id, Part.CAST, cast.forward) for cast in casts.get(index, ())]
        forward.append(Entry(operator.id, Part.FORWARD, owned[index].forward))
    ends: dict[int, int] = {}
    for index, operator in reversed(list(enumerate(graph.operators))):
        backward += [
            Entry(operator.id, Part.CAST, cast.forward) for cast in unpacked.get(index, ())
        ]
        backward.append(Entry(operator.id, Part.BACKWARD, owned[index].backward))
        backward += [
            Entry(operator.id, Part.CAST, cast.backward) for cast in reversed(casts.get(index, ()))
        ]
        ends[index] = len(backward) - 1
    parameters = [parameter for parameter in graph.parameters if parameter.trained]
    last = [_last(graph, parameter.readers, whole_graphs) for parameter in parameters]
    return Schedule(
        tuple(forward),
        tuple(backward),
        times.optimizer(),
        tuple(Parameter(p.path, p.numel, p.dtype_bytes) for p in parameters),
        {
            p.path: ends.get(index, len(backward) - 1)
            for p, index in zip(parameters, last, strict=True)
        },
    )


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
) -> Mapping[int, list[Seconds]]:
    result: dict[int, list[Seconds]] = {}
    for cast in casts:
        used = cast_seconds(
            graph, times, cast.owner, cast.value, cast.before, cast.after, differentiated
        )
        result.setdefault(cast.owner, []).append(used)
    return result

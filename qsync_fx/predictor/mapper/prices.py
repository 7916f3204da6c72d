"""What states and casts of a model take on a device: the `Times`, asked once for each question.

Invariant: every answer is checked, and is a whole number of femtoseconds, so that sums do not depend on the order in which they are made
and what is undone is as it was.
"""

from __future__ import annotations

import math

from qsync_fx.errors import ProfileError
from qsync_fx.graph.reads import State
from qsync_fx.predictor.mapper.asking import cast_seconds
from qsync_fx.predictor.mapper.tables import BASE, NAMES, NEEDED, PLAIN, REACH, Change, Held, Tables
from qsync_fx.predictor.model.names import state_named
from qsync_fx.predictor.times import NEIGHBOURS, Seconds, Times

FEMTO = 10**15
Price = tuple[int, int, int, int, int]
"""Femtoseconds of operators forward and backward, of casts forward and backward, and of converting backward what is kept scaled."""


def femtoseconds(seconds: float, where: str) -> int:
    """Returns seconds as a whole number; raises `ProfileError` for what is no time."""
    if not math.isfinite(seconds) or seconds < 0:
        raise ProfileError(f"a time of {seconds} seconds is none", where=where, do="measure the model anew")
    return round(seconds * FEMTO)


class Prices:
    """What is known so far of the times of one model on one device."""

    def __init__(self, tables: Tables, times: Times) -> None:
        self.tables, self.times = tables, times
        self._states: dict[int, State] = {}

    def state(self, code: int) -> State:
        """Returns the state of a code: what an operator computes in, and `BASE` times what it gives out."""
        if code not in self._states:
            self._states[code] = state_named((NAMES[code % BASE], NAMES[code // BASE]))
        return self._states[code]

    def operator(self, at: int, codes: list[int], precisions: list[int], outputs: list[int]) -> Price:
        """Returns the time of an operator, and of the casts that follow from nothing but what it computes in."""
        operators = self.tables.graph.operators
        near = [at + by for by in NEIGHBOURS]
        around = [self.state(codes[n + REACH]) if 0 <= n < len(operators) else None for n in near]
        found = self.times.operator(operators[at].id, self.state(codes[at + REACH]), around)
        forward, backward = self._checked(found, operators[at].where)
        alone = [self.point(number, precisions, outputs) for number in self.tables.alone[at]]
        casts, casts_backward, unpacking = (sum(price[part] for price in alone) for part in (2, 3, 4))
        return forward, backward, casts, casts_backward, unpacking

    def cast(self, owner: int, value: int, before: int, after: int, differentiated: bool = True) -> tuple[int, int]:
        """Returns the time of a cast, forward and backward."""
        graph, names = self.tables.graph, (NAMES[before] or "", NAMES[after] or "")
        found = cast_seconds(graph, self.times, owner, value, *names, differentiated)
        return self._checked(found, f"the cast from {' to '.join(names)} before {graph.operators[owner].where}")

    def point(self, number: int, precisions: list[int], outputs: list[int]) -> Price:
        """Returns the time of the casts at a place, where operators compute in `precisions` and give out `outputs`."""
        point = self.tables.points[number]
        before = _now(point.held, outputs)
        if isinstance(point, Change):
            after = outputs[point.operator]
            same = before == after if point.wanted else not NEEDED[before][after]
            if same or not before or not after:
                return 0, 0, 0, 0, 0
            return 0, 0, *self.cast(point.operator, point.value, before, after), 0
        forward = backward = unpacking = 0
        made: set[int] = set()
        kept: dict[int, tuple[int, int]] = {}
        for reader in point.readers:
            precision = precisions[reader.operator]
            after = reader.wanted[precision]
            if reader.kept[precision]:
                kept[after] = reader.operator, reader.kept[precision]
            if not NEEDED[before][after] or after in made:
                continue
            if reader.used is not None and PLAIN[after] and _now(reader.used, outputs) == after:
                continue
            made.add(after)
            owner = reader.operator if reader.operator >= 0 else point.held.operator
            there, back = self.cast(owner, point.value, before, after)
            forward, backward = forward + there, backward + back
        for fmt, (owner, plain) in kept.items():
            unpacking += self.cast(owner, point.value, fmt, plain, differentiated=False)[0]
        return 0, 0, forward, backward, unpacking

    def _checked(self, found: Seconds, where: str) -> tuple[int, int]:
        return femtoseconds(found.forward, where), femtoseconds(found.backward, where)


def _now(held: Held, outputs: list[int]) -> int:
    """The format of a value: what its operator gives out, or its own."""
    return outputs[held.operator] or held.own

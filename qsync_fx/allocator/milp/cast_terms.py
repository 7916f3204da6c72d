"""Casts and quantizers as linear expressions, one cast per value and format for all readers.

Most values have one reader per format: their cost depends on the format of the value and the format
that is read (`_edge`). If several operators read a value in one format, the first reader owns the
cast: it determines the segment of the backward pass, and can determine the cost (`_shared`). With
integer choices, the casts are the casts of `plan_states.states`, with the same owners or owners of
equal cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from qsync_fx.allocator.milp.format_variables import CostTerm, Formats, Spread, renamed
from qsync_fx.allocator.milp.linear_program import ONE, Expression, LinearProgram, constant, total
from qsync_fx.predictor.cost_mapper.cost_mapper import (
    CHANGED,
    NAMES,
    NEEDED,
    NUMBERS,
    PLAIN,
    IndexedChange,
    IndexedFormat,
    IndexedReader,
    Point,
    Tables,
    cast_seconds,
)
from qsync_fx.predictor.cost_mapper.times import Seconds, Times
from qsync_fx.predictor.model.model_graph import Follows, Name, followed, widest


@dataclass(frozen=True)
class _Want:
    """Reader of a value in a format; `reader` is its index among the readers of the value."""

    reader: int
    owner: int
    where: Expression


class Casting:
    """Casts of a device class; `segment` is the segment of the backward pass, by operator."""

    def __init__(
        self, program: LinearProgram, formats: Formats, times: Times, segment: Sequence[int]
    ) -> None:
        self.program, self.formats, self.times, self.segment = program, formats, times, segment
        self.graph = formats.graph
        self.tables = Tables.of(formats.graph)

    def charges(self) -> Iterator[CostTerm]:
        """Yield the times of all casts."""
        for point in self.tables.points:
            if isinstance(point, IndexedChange):
                yield from self._change(point)
            else:
                yield from self._point(point)

    def _change(self, change: IndexedChange) -> Iterator[CostTerm]:
        """Yield the times of a value's change from its own format to its operator's output."""
        before, after = self._format_spread(change.before), self.formats.outputs[change.operator]
        changed = CHANGED[change.wanted]
        pairs = [(s, t) for s in before for t in after if changed[NUMBERS[s]][NUMBERS[t]]]
        if not pairs:
            return
        both = self.program.joint(before, after)
        for source, target in pairs:
            used = self._seconds_of_cast(change.operator, change.value, source, target)
            yield CostTerm.of(change.operator, both[source, target], used)

    def _point(self, point: Point) -> Iterator[CostTerm]:
        """Yield the times of all casts of one value."""
        before = self._format_spread(point.before)
        wants: dict[int, list[_Want]] = {}
        saved: dict[tuple[int, int], list[_Want]] = {}
        behind: set[int] = set()
        for place, reader in enumerate(point.readers):
            owner = _owner(point, place)
            result: dict[int, Expression] = {}
            for name, where in self._precisions(reader).items():
                number = NUMBERS[name]
                after = reader.wanted[number]
                if after and self._may_convert(point.before, before, reader, name):
                    result[after] = total((1.0, result.get(after, {})), (1.0, where))
                if reader.saved[number]:
                    key = after, reader.saved[number]
                    saved.setdefault(key, []).append(_Want(place, owner, where))
            for after, where in result.items():
                already = None
                if reader.used is not None and PLAIN[after]:
                    already = self._format_spread(reader.used).get(NAMES[after])
                if already is not None:
                    if constant(already) == 1:
                        continue
                    where = self.program.any_of([where], already)
                    behind.add(after)
                wants.setdefault(after, []).append(_Want(place, owner, where))
        edges: dict[int, dict[int, Expression]] = {}
        for after, readers in wants.items():
            if len(readers) == 1 and after not in behind:
                edges.setdefault(readers[0].reader, {})[after] = readers[0].where
            else:
                yield from self._shared(point.value, before, after, readers)
        for place, edge in edges.items():
            yield from self._edge(_owner(point, place), point.value, before, edge)
        for (fmt, plain), readers in saved.items():
            # In the backward pass the last reader runs first and performs the cast.
            costs = {}
            for want in readers:
                used = self._seconds_of_cast(
                    want.owner, point.value, NAMES[fmt], NAMES[plain], False
                )
                costs[want.owner] = Seconds(0.0, used.forward)
            yield from self._first(readers[::-1], costs, None)

    def _precisions(self, reader: IndexedReader) -> Spread:
        if reader.operator < 0:
            return {None: ONE}
        return self.formats.precisions[reader.operator]

    def _may_convert(
        self, live: IndexedFormat, before: Spread, reader: IndexedReader, name: Name
    ) -> bool:
        """Return whether the value can have a format that the reader must convert."""
        sources = self._sources(before, reader.wanted[NUMBERS[name]])
        if reader.operator < 0:
            return bool(sources)
        decided = self.graph.operators[reader.operator].decided
        if (
            isinstance(decided, Follows)
            and live.operator in decided.operators
            and followed(decided, name) == name
        ):
            # An operator that depends on the value is at least as wide as the value.
            return any(widest(source, name) == name for source in sources)
        return bool(sources)

    def _edge(
        self, owner: int, value: int, before: Spread, wants: Mapping[int, Expression]
    ) -> Iterator[CostTerm]:
        """Yield the times of the casts of one reader that shares none of them."""
        read = {**wants, 0: total((1.0, ONE), *((-1.0, where) for where in wants.values()))}
        both = self.program.joint(before, read)
        for after in wants:
            for name in self._sources(before, after):
                used = self._seconds_of_cast(owner, value, name, NAMES[after])
                yield CostTerm.of(owner, both[name, after], used)

    def _shared(
        self, value: int, before: Spread, after: int, readers: Sequence[_Want]
    ) -> Iterator[CostTerm]:
        """Yield the times of a cast that several readers share."""
        sources = self._sources(before, after)
        costs = {
            name: {
                want.owner: self._seconds_of_cast(want.owner, value, name, NAMES[after])
                for want in readers
            }
            for name in sources
        }
        if all(cost == costs[sources[0]] for cost in costs.values()):
            rest = [(1.0, where) for name, where in before.items() if name not in sources]
            yield from self._first(readers, costs[sources[0]], total(*rest))
            return
        for name in sources:
            others = total((1.0, ONE), (-1.0, before[name]))
            yield from self._first(readers, costs[name], others)

    def _first(
        self, readers: Sequence[_Want], costs: Mapping[int, Seconds], unless: Expression | None
    ) -> Iterator[CostTerm]:
        """Yield the times of a cast that its first reader owns.

        Readers are processed in order, in groups of equal segment and cost, with an indicator that
        this group or an earlier one needs the cast.
        """
        if unless is not None and (never := constant(unless)) is not None:
            if never == 1:
                return
            unless = None
        groups = self._groups(readers, costs)
        before: Expression = {}
        wants: list[Expression] = []
        for number, group in enumerate(groups):
            wants += [want.where for want in group]
            now = self.program.any_of(wants, unless)
            if constant(now) is None:
                if number + 1 < len(groups):
                    self._no_more_than(now, wants, unless)
                if before:
                    self.program.row(total((1.0, before), (-1.0, now)), most=0.0)
            first = total((1.0, now), (-1.0, before))
            yield CostTerm.of(group[0].owner, first, costs[group[0].owner])
            before = now

    def _no_more_than(
        self, result: Expression, wants: Sequence[Expression], unless: Expression | None
    ) -> None:
        """Bound an indicator from above, as a too large value could reduce later times."""
        self.program.row(total((1.0, result), *((-1.0, want) for want in wants)), most=0.0)
        if unless is not None:
            self.program.row(total((1.0, result), (1.0, unless)), most=1.0)

    def _groups(self, readers: Sequence[_Want], costs: Mapping[int, Seconds]) -> list[list[_Want]]:
        def equal(want: _Want) -> tuple[int, Seconds]:
            return self.segment[want.owner], costs[want.owner]

        return [list(group) for _, group in groupby(readers, key=equal)]

    def _sources(self, before: Spread, after: int) -> list[Name]:
        """Return the formats of a value that must be converted to be read in a format."""
        return [name for name in before if name is not None and NEEDED[NUMBERS[name]][after]]

    def _format_spread(self, live: IndexedFormat) -> Spread:
        """Return the indicators of a value's format: its operator's output, or its own."""
        owned = NAMES[live.fixed]
        if live.operator < 0:
            return {owned: ONE}
        inputs = self.formats.outputs[live.operator]
        return renamed(inputs, {name: name or owned for name in inputs})

    def _seconds_of_cast(
        self, owner: int, value: int, before: Name, after: Name, differentiated: bool = True
    ) -> Seconds:
        return cast_seconds(
            self.graph, self.times, owner, value, before or "", after or "", differentiated
        )


def _owner(point: Point, place: int) -> int:
    """Return the operator that a reader's casts belong to; outputs belong to the producer."""
    operator = point.readers[place].operator
    return operator if operator >= 0 else point.before.operator

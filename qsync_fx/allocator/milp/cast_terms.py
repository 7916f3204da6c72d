"""Casts and quantizers as linear expressions, one cast per value and format for all readers.

Most values have one reader per format. Their cost depends on the format of the value and the format
that is read (`_edge`). If several operators read a value in one format, the first reader owns the
cast: it determines the segment of the backward pass, and can determine the cost. `_first` processes
readers in order, in groups of equal segment and cost, with an indicator that this group or an
earlier one needs the cast.

Invariant: with integer choices, the casts are the casts of `plan_states.states`, with the same
owners or owners of equal cost.
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
    cast_seconds,
)
from qsync_fx.predictor.model.model_graph import Follows, Name, followed, widest
from qsync_fx.predictor.times import Seconds, Times

ZERO = Seconds(0.0, 0.0)


@dataclass(frozen=True)
class _Want:
    """Reader of a value in a format; `reader` is its index among the readers of the value."""

    reader: int
    owner: int
    where: Expression


class Casting:
    """Casts of a device class.

    Args:
        program: program that receives variables and rows.
        formats: formats of the operators.
        times: times of the device.
        segment: segment of the backward pass, by operator.
    """

    def __init__(
        self, program: LinearProgram, formats: Formats, times: Times, segment: Sequence[int]
    ) -> None:
        self.program, self.formats, self.times, self.segment = program, formats, times, segment
        self.graph = formats.graph
        self.tables = formats.part.tables

    def charges(self) -> Iterator[CostTerm]:
        """Yield the times of all casts."""
        for point in self.tables.points:
            if isinstance(point, IndexedChange):
                yield from self._change(point)
            else:
                yield from self._point(point)

    def _change(self, change: IndexedChange) -> Iterator[CostTerm]:
        before, after = self._held(change.held), self.formats.outputs[change.operator]
        for source, existing in before.items():
            for target, current in after.items():
                if not CHANGED[change.wanted][NUMBERS[source]][NUMBERS[target]]:
                    continue
                if (both := self._both(existing, current)) is not None:
                    used = self._taken(change.operator, change.value, source, target)
                    yield CostTerm.of(change.operator, both, used)

    def _point(self, point: Point) -> Iterator[CostTerm]:
        before = self._held(point.held)
        wants: dict[int, list[_Want]] = {}
        saved: dict[tuple[int, int], list[_Want]] = {}
        behind: set[int] = set()
        partly: set[int] = set()
        for place, reader in enumerate(point.readers):
            owner = reader.operator if reader.operator >= 0 else point.held.operator
            spread: Spread = (
                self.formats.precisions[reader.operator] if reader.operator >= 0 else {None: ONE}
            )
            result: dict[int, Expression] = {}
            for name, where in spread.items():
                number = NUMBERS[name]
                after = reader.wanted[number]
                if after and self._may_convert(point.held, before, reader, name):
                    result[after] = (
                        total((1.0, result[after]), (1.0, where)) if after in result else where
                    )
                else:
                    partly.add(place)
                if reader.kept[number]:
                    saved.setdefault((after, reader.kept[number]), []).append(
                        _Want(place, owner, where)
                    )
            for after, where in result.items():
                used = self._held(reader.used) if reader.used is not None and PLAIN[after] else {}
                already = used.get(NAMES[after])
                if already is None or constant(already) != 1:
                    if already is not None:
                        where = self.program.any_of([where], already)
                        behind.add(after)
                    wants.setdefault(after, []).append(_Want(place, owner, where))
        edges: dict[int, dict[int, Expression]] = {}
        for after, readers in wants.items():
            if len(readers) == 1 and after not in behind:
                edges.setdefault(readers[0].reader, {})[after] = readers[0].where
            else:
                yield from self._converted(point.value, before, after, readers)
        for place, edge in edges.items():
            reader = point.readers[place]
            owner = reader.operator if reader.operator >= 0 else point.held.operator
            names = self.formats.precisions[reader.operator] if reader.operator >= 0 else (None,)
            full = place not in partly and all(
                reader.wanted[NUMBERS[name]] in edge for name in names
            )
            yield from self._edge(owner, point.value, before, edge, full)
        for (fmt, plain), readers in saved.items():
            # In the backward pass the last reader runs first and performs the cast.
            selected = {
                want.owner: self._taken(want.owner, point.value, NAMES[fmt], NAMES[plain], False)
                for want in readers
            }
            costs = {owner: Seconds(0.0, seconds.forward) for owner, seconds in selected.items()}
            yield from self._first(readers[::-1], costs, None)

    def _may_convert(
        self, live: IndexedFormat, before: Spread, reader: IndexedReader, name: Name
    ) -> bool:
        """Return whether the value can have a format that the reader must convert."""
        after = reader.wanted[NUMBERS[name]]
        sources = [
            source for source in before if source is not None and NEEDED[NUMBERS[source]][after]
        ]
        decided = self.graph.operators[reader.operator].decided if reader.operator >= 0 else None
        if (
            isinstance(decided, Follows)
            and live.operator in decided.operators
            and followed(decided, name) == name
        ):
            # An operator that depends on the value is at least as wide as the value.
            return any(widest(source, name) == name for source in sources)
        return bool(sources)

    def _edge(
        self, owner: int, value: int, before: Spread, wants: Mapping[int, Expression], full: bool
    ) -> Iterator[CostTerm]:
        """Yield the times of the casts of one reader that shares none of them.

        The costs of two source formats differ by an amount that depends on the format that is read.
        The read formats are sorted by this difference. One indicator per position states that the
        value has the source format and is read in a format from this position on. This is as tight
        as a variable for each pair of formats.

        Args:
            owner: index of the operator that owns the casts.
            value: index of the value.
            before: indicators of the format of the value.
            wants: indicators of the format that the reader reads.
            full: whether the reader always reads a format in `wants`.
        """
        sources = [name for name in before if name is not None]
        costs = {
            name: {
                after: self._taken(owner, value, name, NAMES[after])
                if NEEDED[NUMBERS[name]][after]
                else ZERO
                for after in wants
            }
            for name in sources
        }
        if not sources:
            return
        base = costs[sources[0]]
        for after, where in wants.items():
            yield CostTerm.of(owner, where, base[after])
        rest = total((1.0, ONE), *((-1.0, where) for where in wants.values()))
        for name in sources[1:]:
            levels: dict[tuple[float, float], list[Expression]] = {}
            if not full:
                levels[0.0, 0.0] = [rest]
            for after, where in wants.items():
                item, other = costs[name][after], base[after]
                levels.setdefault(
                    (item.forward - other.forward, item.backward - other.backward), []
                ).append(where)
            ahead, back = 0.0, 0.0
            below: list[Expression] = []
            for (forward, backward), existing in sorted(
                levels.items(), key=lambda level: (sum(level[0]), level[0])
            ):
                if below:
                    now = self.program.any_of(
                        [before[name]], total(*((1.0, where) for where in below))
                    )
                    if (forward < ahead or backward < back) and constant(now) is None:
                        self._no_more_than(
                            now, [before[name]], total(*((1.0, where) for where in below))
                        )
                else:
                    now = before[name]
                yield CostTerm(owner, now, forward - ahead, backward - back)
                ahead, back = forward, backward
                below += existing

    def _converted(
        self, value: int, before: Spread, after: int, readers: Sequence[_Want]
    ) -> Iterator[CostTerm]:
        sources = {
            name: where
            for name, where in before.items()
            if name is not None and NEEDED[NUMBERS[name]][after]
        }
        if not sources:
            return
        rest = [where for name, where in before.items() if name not in sources]
        already = total(*((1.0, where) for where in rest)) if rest else None
        target = NAMES[after]
        costs = {
            name: {want.owner: self._taken(want.owner, value, name, target) for want in readers}
            for name in sources
        }
        least = min(
            costs,
            key=lambda name: sum(item.forward + item.backward for item in costs[name].values()),
        )
        if len(self._groups(readers, costs[least])) > 1 and any(
            costs[name] != costs[least] for name in costs
        ):
            for name, where in sources.items():
                yield from self._first(readers, costs[name], total((1.0, ONE), (-1.0, where)))
            return
        yield from self._first(readers, costs[least], already)
        for name, where in sources.items():
            if costs[name] != costs[least]:
                more = {
                    owner: Seconds(
                        item.forward - costs[least][owner].forward,
                        item.backward - costs[least][owner].backward,
                    )
                    for owner, item in costs[name].items()
                }
                yield from self._first(readers, more, total((1.0, ONE), (-1.0, where)))

    def _first(
        self, readers: Sequence[_Want], costs: dict[int, Seconds], unless: Expression | None
    ) -> Iterator[CostTerm]:
        """Yield the times of a cast that its first reader owns."""
        available = constant(unless) if unless is not None else 0.0
        if available == 1:
            return
        unless = None if available == 0 else unless
        groups = self._groups(readers, costs)
        before: Expression | None = None
        wants: list[Expression] = []
        for number, group in enumerate(groups):
            wants += [want.where for want in group]
            now = self.program.any_of(wants, unless)
            last = number + 1 == len(groups)
            if not last and constant(now) is None:
                self._no_more_than(now, wants, unless)
            if before is not None and constant(now) is None:
                self.program.row(total((1.0, before), (-1.0, now)), most=0.0)
            where = now if before is None else total((1.0, now), (-1.0, before))
            cost = costs[group[0].owner]
            yield CostTerm.of(group[0].owner, where, cost)
            before = now

    def _no_more_than(
        self, result: Expression, wants: Sequence[Expression], unless: Expression | None
    ) -> None:
        """Bound an indicator from above, as a too large value could reduce later times."""
        self.program.row(total((1.0, result), *((-1.0, want) for want in wants)), most=0.0)
        if unless is not None:
            self.program.row(total((1.0, result), (1.0, unless)), most=1.0)

    def _groups(self, readers: Sequence[_Want], costs: dict[int, Seconds]) -> list[list[_Want]]:
        def equal(want: _Want) -> tuple[int, Seconds]:
            return self.segment[want.owner], costs[want.owner]

        return [list(group) for _, group in groupby(readers, key=equal)]

    def _both(self, first: Expression, second: Expression) -> Expression | None:
        """Return the AND of two indicators; None if it is always 0."""
        item, other = constant(first), constant(second)
        if 0 in (item, other):
            return None
        if item is not None:
            return second
        return (
            first
            if other is not None
            else self.program.any_of([second], total((1.0, ONE), (-1.0, first)))
        )

    def _held(self, live: IndexedFormat) -> Spread:
        """Return the indicators of a value's format: its operator's output, or its own."""
        owned = NAMES[live.own]
        if live.operator < 0:
            return {owned: ONE}
        inputs = self.formats.outputs[live.operator]
        return renamed(inputs, {name: name or owned for name in inputs})

    def _taken(
        self, owner: int, value: int, before: Name, after: Name, differentiated: bool = True
    ) -> Seconds:
        return cast_seconds(
            self.graph, self.times, owner, value, before or "", after or "", differentiated
        )

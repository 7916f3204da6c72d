"""The plan that recovery starts from: the fastest in which each part of the model keeps to its share of the memory.

What a part may keep for the backward pass is shared out by how far it can be compressed: by what it keeps in the widest formats beyond what
it keeps in the narrowest ones. Whether the whole fits, the memory model says; where it does not, all shares shrink.

Invariant: the plan that is returned fits into memory where the uniform one in the narrowest format does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from qsync_fx.allocator.judging.judge import Judge, beyond
from qsync_fx.allocator.judging.remembered import Remembered
from qsync_fx.allocator.paper.blocks import Parts, parts
from qsync_fx.allocator.paper.units import Unit, spread
from qsync_fx.allocator.problem import Asked, DeviceClass
from qsync_fx.predictor.mapper import CostMapper

_SHRINKS: Final = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
"""What of the memory that is left is shared out, one after the other until the plan fits."""

_Formats = tuple[str, ...]


@dataclass(frozen=True)
class _Tried:
    """A plan of a part.

    Attributes:
        formats: of its units.
        seconds: of both passes of the model, all else in the narrowest formats.
        omega: what the part adds to the variance.
        extra: bytes that it keeps beyond what it keeps in the narrowest formats.
    """

    formats: _Formats
    seconds: float
    omega: float
    extra: float


def initial(part: DeviceClass, units: Sequence[Unit], judge: Judge, name: str) -> Asked:
    """Returns the plan of a class of devices to start from; `judge` has all of its units in their narrowest formats."""
    lowest = {unit: unit.formats[0] for unit in units}
    searched = [(equal, _tried(part, equal.first, lowest)) for equal in parts(part.graph, units)]
    if part.memory is None:
        return spread(_chosen(searched, lowest, None))
    room = part.memory - (judge.peak(name) or 0)
    for share in _SHRINKS:
        found = spread(_chosen(searched, lowest, max(0.0, room) * share))
        if _peak(judge, name, found) <= part.memory:
            return found
    return spread(lowest)


def _chosen(
    searched: Sequence[tuple[Parts, list[_Tried]]], lowest: Mapping[Unit, str], room: float | None
) -> dict[Unit, str]:
    """Returns the fastest plan of each part within its share of the room."""
    found = dict(lowest)
    whole = sum(_compressible(tried) * len(equal.units) for equal, tried in searched)
    for equal, tried in searched:
        budget = None if room is None else (room * _compressible(tried) / whole if whole else 0.0)
        fit = [one for one in tried if budget is None or not beyond(one.extra, budget)]
        best = min(fit, key=lambda one: (one.seconds, one.omega))
        for units in equal.units:
            found.update(zip(units, best.formats, strict=True))
    return found


def _compressible(tried: Sequence[_Tried]) -> float:
    return max(0.0, tried[-1].extra)


def _tried(part: DeviceClass, units: Sequence[Unit], lowest: Mapping[Unit, str]) -> list[_Tried]:
    """Returns all plans of a part, from the one in the narrowest formats to that in the widest ones."""
    mapper = CostMapper(part.graph, Remembered(part.times), spread(lowest))
    kept = _kept(units, mapper) if part.memory is not None else {}
    now = {unit: lowest[unit] for unit in units}
    found = []
    for formats in product(*(unit.formats for unit in units)):
        for unit, fmt in zip(units, formats, strict=True):
            if now[unit] != fmt:
                _set(mapper, unit, fmt)
                now[unit] = fmt
        pairs = list(zip(units, formats, strict=True))
        omega = sum(part.omega(operator, fmt) for unit, fmt in pairs for operator in unit.operators)
        found.append(_Tried(formats, mapper.seconds, omega, sum(kept.get(pair, 0.0) for pair in pairs)))
    return found


def _kept(units: Sequence[Unit], mapper: CostMapper) -> dict[tuple[Unit, str], float]:
    """Returns the bytes that a unit keeps in each format beyond those in its narrowest one, others in theirs."""

    def saved() -> float:
        return float(sum(map(float, mapper.states().saved().values())))

    least = saved()
    found = {}
    for unit, fmt in _wider(units):
        _set(mapper, unit, fmt)
        found[unit, fmt] = saved() - least
        for _ in unit.operators:
            mapper.undo()
    return found


def _wider(units: Sequence[Unit]) -> Iterator[tuple[Unit, str]]:
    return ((unit, fmt) for unit in units for fmt in unit.formats[1:])


def _set(mapper: CostMapper, unit: Unit, fmt: str) -> None:
    for operator in unit.operators:
        mapper.set(operator, fmt)


def _peak(judge: Judge, name: str, asked: Asked) -> float:
    """Returns the peak under a plan; the judge is left as it was."""
    before = judge.plans[name]
    changed = [operator for operator, fmt in asked.items() if before[operator] != fmt]
    for operator in changed:
        judge.set(name, operator, asked[operator])
    peak = judge.peak(name) or 0
    for _ in changed:
        judge.undo()
    return peak

"""The plan that recovery starts from: the fastest in which each part of the model keeps to its share of the memory.

What a part may keep for the backward pass is shared out by how far it can be compressed: by what it keeps in the widest formats beyond what
it keeps in the narrowest ones. Whether the whole fits, the memory model says; where it does not, all shares shrink.

Invariant: the plan that is returned fits into memory where the uniform one in the narrowest format does.

What an allocator decides at once: an operator, or operators that are tied.

Invariant: each adjustable operator is in one unit, and every format of a unit is one that all of its operators can be asked for.

The parts of a model that are searched one by one: blocks that are equal to others, and what is in none of these.

Invariant: each unit is in one part. Parts have so few units that all of their plans can be tried: a block that has more is cut, and so is
what is in no block.

Operators get wider formats again, those first that add most to the variance in the ones that they have.

Each class of devices has a heap of its units by Omega(b) - Omega(next higher b). Classes take turns: the unit on top of the heap is
widened, which is taken back where it breaks a limit; else it is put into the heap again with its next format.

Invariant: where the judge said that limits are kept it says so afterwards.

The allocator of the paper: `PrecisionRecovery`.

The paper leaves open what is done where the fastest plan is no good start: no plan of blocks fits, or recovery gets stuck before it reaches
what a uniform plan has. So each uniform plan that keeps the limits is a start, too, where it is better than what was found.

Invariant: the answer keeps all limits, and is no worse than any uniform plan that does. Where there is such a uniform plan, there is an
answer.

The allocator of QSync, as its section V has it: from the fastest plan that fits into memory, operators get wider formats again.

`units` is what is decided together, `blocks` the parts of a model that are searched alone, `initial` the fastest plan of each, `recovery`
the heaps of operators to be widened, and `greedy` the allocator.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from qsync_fx.allocator.evaluator import CachedTimes, Evaluation, PlanEvaluator, beyond
from qsync_fx.allocator.feasibility import unfit
from qsync_fx.allocator.plan_result import PlanResult
from qsync_fx.allocator.problem import Asked, DeviceClass, Plans, Problem, uniforms
from qsync_fx.errors import PlanError
from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper
from qsync_fx.predictor.model.model_graph import ModelGraph
from qsync_fx.predictor.repeated_blocks import isomorphic_blocks

__all__ = ["PrecisionRecovery"]


@dataclass(frozen=True)
class DecisionGroup:
    """
    Attributes:
        operators: their ids, in the order in which they run.
        formats: what may be asked for, from the narrowest up.
    """

    operators: tuple[str, ...]
    formats: tuple[str, ...]


def units(part: DeviceClass, tied: Iterable[Sequence[str]] = ()) -> tuple[DecisionGroup, ...]:
    """Returns the units of a class of devices, in the order in which the first operator of each runs.

    Raises:
        PlanError: operators are tied that no format is common to.
    """
    leader = {operator: group[0] for group in tied for operator in group}
    groups: dict[str, list[str]] = {}
    for operator in part.choices:
        groups.setdefault(leader.get(operator, operator), []).append(operator)
    return tuple(DecisionGroup(tuple(group), _common(part, group)) for group in groups.values())


def spread(chosen: Mapping[DecisionGroup, str]) -> dict[str, str]:
    """Returns the plan that formats of units are."""
    return {operator: fmt for unit, fmt in chosen.items() for operator in unit.operators}


def _common(part: DeviceClass, group: Sequence[str]) -> tuple[str, ...]:
    first, *others = group
    result = tuple(
        fmt for fmt in part.choices[first] if all(fmt in part.choices[other] for other in others)
    )
    if not result:
        do = "tie operators that take the same formats, such as those of equal blocks"
        raise PlanError(
            f"{len(group)} operators are tied that have no format in common", where=first, do=do
        )
    return result


TRIED: Final = 3**7
"""How many plans of a part are tried at most."""


@dataclass(frozen=True)
class Parts:
    """Equal parts of a model.

    Attributes:
        units: of each part, in order; those at one place get one format.
    """

    units: tuple[tuple[DecisionGroup, ...], ...]

    @property
    def first(self) -> tuple[DecisionGroup, ...]:
        """The units of the part that is searched for all."""
        return self.units[0]


def parts(graph: ModelGraph, units: Sequence[DecisionGroup]) -> tuple[Parts, ...]:
    """Returns the parts of a model, equal ones together."""
    alone = {unit.operators[0]: unit for unit in units if len(unit.operators) == 1}
    result: list[Parts] = []
    used: set[DecisionGroup] = set()
    for equal in isomorphic_blocks(graph):
        blocks = [tuple(alone[op] for op in block if op in alone) for block in equal.operators]
        # Operators that are tied belong to no block alone, and equal blocks then differ in what is left of them.
        if blocks[0] and len({tuple(unit.formats for unit in block) for block in blocks}) == 1:
            result += [Parts(tuple(block[cut] for block in blocks)) for cut in _cuts(blocks[0])]
            used.update(unit for block in blocks for unit in block)
    rest = [unit for unit in units if unit not in used]
    return (*result, *(Parts((tuple(rest[cut]),)) for cut in _cuts(rest)))


def _cuts(units: Sequence[DecisionGroup]) -> list[slice]:
    """Returns what units are cut into, each as long as can be tried."""
    result, start = [], 0
    for index in range(1, len(units) + 1):
        if (
            index == len(units)
            or math.prod(len(unit.formats) for unit in units[start : index + 1]) > TRIED
        ):
            result.append(slice(start, index))
            start = index
    return result


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


def initial(
    part: DeviceClass, units: Sequence[DecisionGroup], judge: PlanEvaluator, name: str
) -> Asked:
    """Returns the plan of a class of devices to start from; `judge` has all of its units in their narrowest formats."""
    lowest = {unit: unit.formats[0] for unit in units}
    searched = [(equal, _tried(part, equal.first, lowest)) for equal in parts(part.graph, units)]
    if part.memory is None:
        return spread(_chosen(searched, lowest, None))
    room = part.memory - (judge.peak(name) or 0)
    for share in _SHRINKS:
        result = spread(_chosen(searched, lowest, max(0.0, room) * share))
        if _peak(judge, name, result) <= part.memory:
            return result
    return spread(lowest)


def _chosen(
    searched: Sequence[tuple[Parts, list[_Tried]]],
    lowest: Mapping[DecisionGroup, str],
    room: float | None,
) -> dict[DecisionGroup, str]:
    """Returns the fastest plan of each part within its share of the room."""
    result = dict(lowest)
    full = sum(_compressible(tried) * len(equal.units) for equal, tried in searched)
    for equal, tried in searched:
        budget = None if room is None else (room * _compressible(tried) / full if full else 0.0)
        fit = [item for item in tried if budget is None or not beyond(item.extra, budget)]
        best = min(fit, key=lambda item: (item.seconds, item.omega))
        for units in equal.units:
            result.update(zip(units, best.formats, strict=True))
    return result


def _compressible(tried: Sequence[_Tried]) -> float:
    return max(0.0, tried[-1].extra)


def _tried(
    part: DeviceClass, units: Sequence[DecisionGroup], lowest: Mapping[DecisionGroup, str]
) -> list[_Tried]:
    """Returns all plans of a part, from the one in the narrowest formats to that in the widest ones."""
    mapper = CostMapper(part.graph, CachedTimes(part.times), spread(lowest))
    saved = _kept(units, mapper) if part.memory is not None else {}
    now = {unit: lowest[unit] for unit in units}
    result = []
    for formats in product(*(unit.formats for unit in units)):
        for unit, fmt in zip(units, formats, strict=True):
            if now[unit] != fmt:
                _set(mapper, unit, fmt)
                now[unit] = fmt
        pairs = list(zip(units, formats, strict=True))
        omega = sum(part.omega(operator, fmt) for unit, fmt in pairs for operator in unit.operators)
        result.append(
            _Tried(formats, mapper.seconds, omega, sum(saved.get(pair, 0.0) for pair in pairs))
        )
    return result


def _kept(
    units: Sequence[DecisionGroup], mapper: CostMapper
) -> dict[tuple[DecisionGroup, str], float]:
    """Returns the bytes that a unit keeps in each format beyond those in its narrowest one, others in theirs."""

    def saved() -> float:
        return float(sum(map(float, mapper.states().saved().values())))

    least = saved()
    result = {}
    for unit, fmt in _wider(units):
        _set(mapper, unit, fmt)
        result[unit, fmt] = saved() - least
        for _ in unit.operators:
            mapper.undo()
    return result


def _wider(units: Sequence[DecisionGroup]) -> Iterator[tuple[DecisionGroup, str]]:
    return ((unit, fmt) for unit in units for fmt in unit.formats[1:])


def _set(mapper: CostMapper, unit: DecisionGroup, fmt: str) -> None:
    for operator in unit.operators:
        mapper.set(operator, fmt)


def _peak(judge: PlanEvaluator, name: str, requested: Asked) -> float:
    """Returns the peak under a plan; the judge is left as it was."""
    before = judge.plans[name]
    changed = [operator for operator, fmt in requested.items() if before[operator] != fmt]
    for operator in changed:
        judge.set(name, operator, requested[operator])
    peak = judge.peak(name) or 0
    for _ in changed:
        judge.undo()
    return peak


Indicator = Callable[[str, str, str], float]
"""What an operator of a class adds in a format, by the class's name, its id and the format."""

_Entry = tuple[float, int, str]
"""Minus what is gained, the unit's place, and its next format."""


def recover(
    judge: PlanEvaluator,
    units: Mapping[str, Sequence[DecisionGroup]],
    indicator: Indicator,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Widens what can be widened within the judge's limits.

    Args:
        judge: of the plans to start from; it is changed.
        units: of each class that is open to choice.
        indicator: what the heaps are ordered by.
        enough: asked after each change that is kept; where it says so, nothing more is changed.
    """
    requested = judge.plans

    def next_of(name: str, index: int) -> list[_Entry]:
        unit = units[name][index]
        now = unit.formats.index(requested[name][unit.operators[0]])

        def omega(fmt: str) -> float:
            return sum(indicator(name, operator, fmt) for operator in unit.operators)

        # Formats of as many bits may add more, not less: none of those is higher.
        gains = ((omega(unit.formats[now]) - omega(fmt), fmt) for fmt in unit.formats[now + 1 :])
        return [(-gain, index, fmt) for gain, fmt in gains if gain > 0][:1]

    heaps = {
        name: [entry for index in range(len(owned)) for entry in next_of(name, index)]
        for name, owned in units.items()
    }
    for heap in heaps.values():
        heapq.heapify(heap)
    while any(heaps.values()):
        for name, heap in heaps.items():
            if not heap:
                continue
            _, index, fmt = heapq.heappop(heap)
            changed = units[name][index].operators
            for operator in changed:
                judge.set(name, operator, fmt)
            if judge.fits():
                requested[name].update(dict.fromkeys(changed, fmt))
                for entry in next_of(name, index):
                    heapq.heappush(heap, entry)
                if enough():
                    return
            else:
                for _ in changed:
                    judge.undo()


@dataclass(frozen=True)
class PrecisionRecovery:
    """
    Attributes:
        indicator: what orders operators; what the problem's sensitivities say where None.
        called: its name.
    """

    indicator: Indicator | None = None
    called: str = "paper"

    @property
    def name(self) -> str:
        return self.called

    def allocate(self, problem: Problem) -> PlanResult:
        """Returns the plan that it chooses; see `Allocator`."""
        began = time.perf_counter()
        search = _Search(
            problem, self.indicator or (lambda name, op, fmt: problem.classes[name].omega(op, fmt))
        )
        plans, judged = search.best()
        took = time.perf_counter() - began
        return PlanResult(problem, plans, judged, self.name, took=took)


class _Search:
    def __init__(self, problem: Problem, indicator: Indicator) -> None:
        self.problem, self.indicator = problem, indicator
        self.units: Mapping[str, Sequence[DecisionGroup]] = {
            name: units(problem.classes[name], problem.tied) for name in problem.open
        }
        # While seconds are to be few, recovery is what brings the variance below its limit.
        self.judge = PlanEvaluator(replace(problem, variance=None), self._narrowest())

    def best(self) -> tuple[Plans, Evaluation]:
        """Returns the best of what the starts lead to; raises `PlanError` where none leads to a plan that fits."""
        result = [self._recovered(self._fastest())]
        for start in self._uniform():
            judged = self.judge.become(start)
            available = min((_order(self.problem, each) for _, each in result))
            if _order(self.problem, judged) < available:
                result += [(start, judged), self._recovered(start)]
        plans, judged = min(result, key=lambda pair: _order(self.problem, pair[1]))
        if judged.exceeds(self.problem):
            raise unfit(self.problem, [each for _, each in result])
        return plans, judged

    def _recovered(self, start: Plans) -> tuple[Plans, Evaluation]:
        judge, problem = self.judge, self.problem
        judge.become(start)
        if judge.fits():

            def enough() -> bool:
                return problem.least == "seconds" and (
                    problem.variance is None or judge.variance <= problem.variance
                )

            if not enough():
                recover(judge, self.units, self.indicator, enough)
        return judge.plans, judge.judged()

    def _fastest(self) -> Plans:
        problem = self.problem
        result = {
            name: initial(problem.classes[name], owned, self.judge, name)
            for name, owned in self.units.items()
        }
        return problem.completed(result)

    def _narrowest(self) -> Plans:
        chosen = {
            name: spread({unit: unit.formats[0] for unit in owned})
            for name, owned in self.units.items()
        }
        return self.problem.completed(chosen)

    def _uniform(self) -> list[Plans]:
        """Returns the uniform plans that units can have."""

        def fits(plans: Plans) -> bool:
            formats = (
                (unit, {plans[name][op] for op in unit.operators})
                for name in self.units
                for unit in self.units[name]
            )
            return all(
                len(requested) == 1 and requested <= set(unit.formats)
                for unit, requested in formats
            )

        return [plans for plans in uniforms(self.problem).values() if fits(plans)]


def _order(problem: Problem, judged: Evaluation) -> tuple[float, float, float]:
    """Returns what plans are sorted by: whether they keep the limits, what is to be least, and then the other."""
    other = judged.seconds if problem.least == "variance" else judged.variance
    return (bool(judged.exceeds(problem)), judged.value(problem), other)

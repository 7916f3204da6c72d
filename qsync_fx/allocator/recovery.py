"""Precision recovery, the allocator of QSync (Section V).

The search starts from the fastest plan that fits into memory (`initial`) and restores operators to
higher precision (`recover`). The paper does not say what to do if no block plan fits, or if
recovery stops short of a uniform plan. Each uniform plan that is better than the best plan so far
is therefore another start.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from qsync_fx.allocator.evaluator import CachedTimes, Evaluation, PlanEvaluator, beyond
from qsync_fx.allocator.feasibility import unfit
from qsync_fx.allocator.plan_result import PlanResult
from qsync_fx.allocator.problem import Asked, DeviceClass, Plans, Problem, uniforms
from qsync_fx.errors import PlanError
from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper
from qsync_fx.predictor.model.model_graph import ModelGraph, isomorphic_blocks

__all__ = ["PrecisionRecovery"]

TRIED: Final = 3**7
"""Maximum number of plans that are enumerated for a part of the model."""
_SHRINKS: Final = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
"""Shares of the free memory to distribute, tried in order until the plan fits."""


@dataclass(frozen=True)
class DecisionGroup:
    """Operator, or tied operators, that get one of their common formats, narrowest first."""

    operators: tuple[str, ...]
    formats: tuple[str, ...]


Part = tuple[DecisionGroup, ...]
"""Part of a model that is searched exhaustively."""
Indicator = Callable[[str, str, str], float]
"""Variance that an operator adds: by class name, operator id and format."""


def units(part: DeviceClass, tied: Iterable[Sequence[str]] = ()) -> tuple[DecisionGroup, ...]:
    """Return the decision groups in program order; each adjustable operator is in exactly one."""
    leader = {operator: group[0] for group in tied for operator in group}
    groups: dict[str, list[str]] = {}
    for operator in part.choices:
        groups.setdefault(leader.get(operator, operator), []).append(operator)
    result = []
    for group in groups.values():
        common = set.intersection(*(set(part.choices[operator]) for operator in group))
        if not common:
            do = "tie operators that take the same formats, such as those of equal blocks"
            message = f"{len(group)} operators are tied that have no format in common"
            raise PlanError(message, where=group[0], do=do)
        formats = tuple(fmt for fmt in part.choices[group[0]] if fmt in common)
        result.append(DecisionGroup(tuple(group), formats))
    return tuple(result)


def spread(chosen: Mapping[DecisionGroup, str]) -> dict[str, str]:
    """Return the plan that corresponds to formats of decision groups."""
    return {operator: fmt for unit, fmt in chosen.items() for operator in unit.operators}


def parts(graph: ModelGraph, units: Sequence[DecisionGroup]) -> list[list[Part]]:
    """Return the parts of a model, with equal parts together: they are searched once.

    Each decision group is in one part. A part with more than `TRIED` plans is cut.
    """
    alone = {unit.operators[0]: unit for unit in units if len(unit.operators) == 1}
    result: list[list[Part]] = []
    used: set[DecisionGroup] = set()
    for equal in isomorphic_blocks(graph):
        blocks = [tuple(alone[op] for op in block if op in alone) for block in equal.operators]
        # Tied operators belong to no single block, so that equal blocks can differ in the rest.
        if blocks[0] and len({tuple(unit.formats for unit in block) for block in blocks}) == 1:
            result += [[block[cut] for block in blocks] for cut in _cuts(blocks[0])]
            used.update(unit for block in blocks for unit in block)
    rest = tuple(unit for unit in units if unit not in used)
    return [*result, *([rest[cut]] for cut in _cuts(rest))]


def _cuts(units: Part) -> list[slice]:
    """Return the slices of a part, each small enough to enumerate its plans."""
    starts, plans = [0], 1
    for index, unit in enumerate(units):
        plans *= len(unit.formats)
        if plans > TRIED:
            starts.append(index)
            plans = len(unit.formats)
    ends = [*starts[1:], len(units)]
    return [slice(*ends) for ends in zip(starts, ends, strict=True) if ends[0] < ends[1]]


@dataclass(frozen=True)
class _Tried:
    """Plan of a part, with the seconds of the model if all other groups are in narrowest formats.

    `omega` is the variance that it adds, `extra` the additional bytes that it saves for backward.
    """

    formats: tuple[str, ...]
    seconds: float
    omega: float
    extra: float


def initial(
    part: DeviceClass, units: Sequence[DecisionGroup], evaluator: PlanEvaluator, name: str
) -> Asked:
    """Return the fastest plan in which each part of the model stays within its memory share.

    Memory beyond the narrowest plan is shared in proportion to the additional bytes that a part
    saves for backward in its widest formats. If the memory model rejects the plan, all shares
    shrink. The plan fits if the plan in the narrowest formats fits.
    """
    lowest = {unit: unit.formats[0] for unit in units}
    searched = [(equal, _tried(part, equal[0], lowest)) for equal in parts(part.graph, units)]
    if part.memory is None:
        return spread(lowest | _chosen(searched, math.inf))
    room = max(0.0, part.memory - (evaluator.peak(name) or 0))
    for share in _SHRINKS:
        result = spread(lowest | _chosen(searched, room * share))
        if _peak(evaluator, name, result) <= part.memory:
            return result
    return spread(lowest)


def _chosen(
    searched: Sequence[tuple[list[Part], list[_Tried]]], room: float
) -> dict[DecisionGroup, str]:
    """Return the fastest plan of each part within its share of the free memory."""
    result: dict[DecisionGroup, str] = {}
    widest = [max(0.0, tried[-1].extra) for _, tried in searched]
    full = sum(extra * len(equal) for extra, (equal, _) in zip(widest, searched, strict=True))
    for extra, (equal, tried) in zip(widest, searched, strict=True):
        budget = room
        if room < math.inf:
            budget = room * extra / (full or 1.0)
        fit = [item for item in tried if not beyond(item.extra, budget)]
        best = min(fit, key=lambda item: (item.seconds, item.omega))
        for units in equal:
            result.update(zip(units, best.formats, strict=True))
    return result


def _tried(part: DeviceClass, units: Part, lowest: Mapping[DecisionGroup, str]) -> list[_Tried]:
    """Return all plans of a part, from the narrowest to the widest formats."""
    mapper = CostMapper(part.graph, CachedTimes(part.times), spread(lowest))
    saved = _saved_bytes(units, mapper) if part.memory is not None else {}
    now = {unit: lowest[unit] for unit in units}
    result = []
    for formats in product(*(unit.formats for unit in units)):
        pairs = list(zip(units, formats, strict=True))
        for unit, fmt in pairs:
            if now[unit] != fmt:
                _set(mapper, unit, fmt)
                now[unit] = fmt
        omega = sum(part.omega(operator, fmt) for unit, fmt in pairs for operator in unit.operators)
        extra = sum(saved.get(pair, 0.0) for pair in pairs)
        result.append(_Tried(formats, mapper.seconds, omega, extra))
    return result


def _saved_bytes(units: Part, mapper: CostMapper) -> dict[tuple[DecisionGroup, str], float]:
    """Return the bytes that a group saves for backward beyond its narrowest format, by format."""

    def saved() -> float:
        return float(sum(map(float, mapper.states().saved().values())))

    least, result = saved(), {}
    for unit in units:
        for fmt in unit.formats[1:]:
            _set(mapper, unit, fmt)
            result[unit, fmt] = saved() - least
            for _ in unit.operators:
                mapper.undo()
    return result


def _set(mapper: CostMapper, unit: DecisionGroup, fmt: str) -> None:
    for operator in unit.operators:
        mapper.set(operator, fmt)


def _peak(evaluator: PlanEvaluator, name: str, requested: Asked) -> float:
    """Return the peak memory under a plan; the evaluator is restored."""
    before = evaluator.plans[name]
    changed = [operator for operator, fmt in requested.items() if before[operator] != fmt]
    for operator in changed:
        evaluator.set(name, operator, requested[operator])
    peak = evaluator.peak(name) or 0
    for _ in changed:
        evaluator.undo()
    return peak


def recover(
    evaluator: PlanEvaluator,
    units: Mapping[str, Sequence[DecisionGroup]],
    indicator: Indicator,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Restore operators to higher precision within the evaluator's limits (QSync, Section V).

    Each device class has a heap of its groups, ordered by Omega(b) - Omega(next higher b). The
    classes alternate. The top group is widened; if that exceeds a limit the change is undone, else
    the group returns to the heap with its next format.

    The evaluator has the initial plans and is modified; `enough` ends the recovery early.
    """
    requested = evaluator.plans

    def next_of(name: str, index: int) -> list[tuple[float, int, str]]:
        """Return the negative gain of a group's next format, the group and the format, if any."""
        unit = units[name][index]
        now = unit.formats.index(requested[name][unit.operators[0]])

        def omega(fmt: str) -> float:
            return sum(indicator(name, operator, fmt) for operator in unit.operators)

        # A format with as many bits can add more variance; such a format is not higher.
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
            if enough():
                return
            _, index, fmt = heapq.heappop(heap)
            changed = units[name][index].operators
            for operator in changed:
                evaluator.set(name, operator, fmt)
            if not evaluator.fits():
                for _ in changed:
                    evaluator.undo()
                continue
            requested[name].update(dict.fromkeys(changed, fmt))
            for entry in next_of(name, index):
                heapq.heappush(heap, entry)


@dataclass(frozen=True)
class PrecisionRecovery:
    """Precision recovery from the fastest plan and from uniform plans (QSync, Section V).

    `indicator` replaces the problem's sensitivities.
    """

    indicator: Indicator | None = None
    called: str = "paper"

    @property
    def name(self) -> str:
        return self.called

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the best plan; see `Allocator`."""
        began = time.perf_counter()
        plans, evaluation = _Search(problem, self.indicator or problem.omega).best()
        took = time.perf_counter() - began
        return PlanResult(problem, plans, evaluation, self.name, took=took)


class _Search:
    def __init__(self, problem: Problem, indicator: Indicator) -> None:
        self.problem, self.indicator = problem, indicator
        self.units: Mapping[str, Sequence[DecisionGroup]] = {
            name: units(problem.classes[name], problem.tied) for name in problem.open
        }
        narrowest = {
            name: spread({unit: unit.formats[0] for unit in owned})
            for name, owned in self.units.items()
        }
        # If time is the objective, recovery starts above the variance limit.
        without_limit = replace(problem, variance=None)
        self.evaluator = PlanEvaluator(without_limit, problem.completed(narrowest))

    def best(self) -> tuple[Plans, Evaluation]:
        """Return the best plan over all starts; raise `PlanError` if no plan meets the limits."""
        fastest = {
            name: initial(self.problem.classes[name], owned, self.evaluator, name)
            for name, owned in self.units.items()
        }
        results = [self._recovered(self.problem.completed(fastest))]
        for start in filter(self._is_representable, uniforms(self.problem).values()):
            result = start, self.evaluator.set_plans(start)
            if self._order(result) < min(map(self._order, results)):
                results += [result, self._recovered(start)]
        plans, evaluation = min(results, key=self._order)
        if evaluation.exceeds(self.problem):
            raise unfit(self.problem, [each for _, each in results])
        return plans, evaluation

    def _recovered(self, start: Plans) -> tuple[Plans, Evaluation]:
        evaluator, problem = self.evaluator, self.problem
        evaluator.set_plans(start)

        def enough() -> bool:
            return problem.least == "seconds" and (
                problem.variance is None or evaluator.variance <= problem.variance
            )

        if evaluator.fits():
            recover(evaluator, self.units, self.indicator, enough)
        return evaluator.plans, evaluator.evaluate()

    def _is_representable(self, plans: Plans) -> bool:
        """Return whether each decision group has one of its formats in the plans."""
        for name, owned in self.units.items():
            for unit in owned:
                formats = {plans[name][operator] for operator in unit.operators}
                if len(formats) > 1 or not formats <= set(unit.formats):
                    return False
        return True

    def _order(self, result: tuple[Plans, Evaluation]) -> tuple[float, float, float]:
        """Return the sort key of plans: limits exceeded, objective, then the other metric."""
        problem, evaluation = self.problem, result[1]
        metrics = evaluation.variance, evaluation.seconds
        if problem.least == "seconds":
            metrics = metrics[::-1]
        return (bool(evaluation.exceeds(problem)), *metrics)


ALLOCATORS: Final = (PrecisionRecovery(),)

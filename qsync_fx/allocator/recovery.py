"""Precision recovery, the allocator of QSync (Section V).

The search starts from the fastest plan that fits into memory (`initial`) and restores operators to
higher precision (`recover`). A `DecisionGroup` is an operator, or a group of tied operators, that
gets one format. `parts` divides the model into blocks that are searched exhaustively; equal blocks
are searched once.

The paper does not say what to do if no block plan fits, or if recovery stops short of a uniform
plan. Each uniform plan that is better than the best plan so far is therefore another start. The
result meets all limits and is no worse than any feasible uniform plan that the groups can
represent.
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
from qsync_fx.predictor.model.model_graph import ModelGraph, isomorphic_blocks

__all__ = ["PrecisionRecovery"]


@dataclass(frozen=True)
class DecisionGroup:
    """Operators that get one format.

    Attributes:
        operators: operator ids, in program order.
        formats: formats common to all operators of the group, narrowest first.
    """

    operators: tuple[str, ...]
    formats: tuple[str, ...]


def units(part: DeviceClass, tied: Iterable[Sequence[str]] = ()) -> tuple[DecisionGroup, ...]:
    """Return the decision groups of a device class, in program order of their first operators.

    Each adjustable operator is in exactly one group.

    Raises:
        PlanError: tied operators have no format in common.
    """
    leader = {operator: group[0] for group in tied for operator in group}
    groups: dict[str, list[str]] = {}
    for operator in part.choices:
        groups.setdefault(leader.get(operator, operator), []).append(operator)
    return tuple(DecisionGroup(tuple(group), _common(part, group)) for group in groups.values())


def spread(chosen: Mapping[DecisionGroup, str]) -> dict[str, str]:
    """Return the plan that corresponds to formats of decision groups."""
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
"""Maximum number of plans that are enumerated for a part."""


@dataclass(frozen=True)
class Parts:
    """Equal parts of a model.

    Attributes:
        units: decision groups of each part, in order; groups at one index get one format.
    """

    units: tuple[tuple[DecisionGroup, ...], ...]

    @property
    def first(self) -> tuple[DecisionGroup, ...]:
        """Decision groups of the part that represents all."""
        return self.units[0]


def parts(graph: ModelGraph, units: Sequence[DecisionGroup]) -> tuple[Parts, ...]:
    """Return the parts of a model, with equal parts together.

    Each decision group is in one part. A part with more than `TRIED` plans is cut.
    """
    alone = {unit.operators[0]: unit for unit in units if len(unit.operators) == 1}
    result: list[Parts] = []
    used: set[DecisionGroup] = set()
    for equal in isomorphic_blocks(graph):
        blocks = [tuple(alone[op] for op in block if op in alone) for block in equal.operators]
        # Tied operators belong to no single block, so that equal blocks can differ in the rest.
        if blocks[0] and len({tuple(unit.formats for unit in block) for block in blocks}) == 1:
            result += [Parts(tuple(block[cut] for block in blocks)) for cut in _cuts(blocks[0])]
            used.update(unit for block in blocks for unit in block)
    rest = [unit for unit in units if unit not in used]
    return (*result, *(Parts((tuple(rest[cut]),)) for cut in _cuts(rest)))


def _cuts(units: Sequence[DecisionGroup]) -> list[slice]:
    """Return the slices of a sequence of groups, each small enough to enumerate its plans."""
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
"""Shares of the free memory to distribute, tried in order until the plan fits."""

_Formats = tuple[str, ...]


@dataclass(frozen=True)
class _Tried:
    """Plan of a part.

    Attributes:
        formats: format of each decision group.
        seconds: seconds of both passes of the model, with all other groups in their narrowest
            formats.
        omega: variance that the part adds.
        extra: bytes saved for backward beyond those in the narrowest formats.
    """

    formats: _Formats
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

    Args:
        part: the device class.
        units: its decision groups.
        evaluator: evaluator with all groups in their narrowest formats.
        name: name of the class.
    """
    lowest = {unit: unit.formats[0] for unit in units}
    searched = [(equal, _tried(part, equal.first, lowest)) for equal in parts(part.graph, units)]
    if part.memory is None:
        return spread(_chosen(searched, lowest, None))
    room = part.memory - (evaluator.peak(name) or 0)
    for share in _SHRINKS:
        result = spread(_chosen(searched, lowest, max(0.0, room) * share))
        if _peak(evaluator, name, result) <= part.memory:
            return result
    return spread(lowest)


def _chosen(
    searched: Sequence[tuple[Parts, list[_Tried]]],
    lowest: Mapping[DecisionGroup, str],
    room: float | None,
) -> dict[DecisionGroup, str]:
    """Return the fastest plan of each part within its share of the free memory."""
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
    """Return all plans of a part, from the narrowest to the widest formats."""
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
    """Return the bytes that a group saves for backward beyond its narrowest format, by format."""

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


Indicator = Callable[[str, str, str], float]
"""Variance that an operator adds: by class name, operator id and format."""

_Entry = tuple[float, int, str]
"""Negative gain, index of the group, and its next format."""


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

    Args:
        evaluator: evaluator with the initial plans; it is modified.
        units: decision groups of each open class.
        indicator: Omega, the order of the heaps.
        enough: called after each accepted change; true ends the recovery.
    """
    requested = evaluator.plans

    def next_of(name: str, index: int) -> list[_Entry]:
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
            _, index, fmt = heapq.heappop(heap)
            changed = units[name][index].operators
            for operator in changed:
                evaluator.set(name, operator, fmt)
            if evaluator.fits():
                requested[name].update(dict.fromkeys(changed, fmt))
                for entry in next_of(name, index):
                    heapq.heappush(heap, entry)
                if enough():
                    return
            else:
                for _ in changed:
                    evaluator.undo()


@dataclass(frozen=True)
class PrecisionRecovery:
    """Precision recovery from the fastest plan and from uniform plans (QSync, Section V).

    Attributes:
        indicator: Omega of an operator; None for the problem's sensitivities.
        called: name of the allocator.
    """

    indicator: Indicator | None = None
    called: str = "paper"

    @property
    def name(self) -> str:
        return self.called

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the best plan; see `Allocator`."""
        began = time.perf_counter()
        search = _Search(
            problem, self.indicator or (lambda name, op, fmt: problem.classes[name].omega(op, fmt))
        )
        plans, evaluation = search.best()
        took = time.perf_counter() - began
        return PlanResult(problem, plans, evaluation, self.name, took=took)


class _Search:
    def __init__(self, problem: Problem, indicator: Indicator) -> None:
        self.problem, self.indicator = problem, indicator
        self.units: Mapping[str, Sequence[DecisionGroup]] = {
            name: units(problem.classes[name], problem.tied) for name in problem.open
        }
        # If time is the objective, recovery starts above the variance limit and lowers the
        # variance.
        self.evaluator = PlanEvaluator(replace(problem, variance=None), self._narrowest())

    def best(self) -> tuple[Plans, Evaluation]:
        """Return the best plan over all starts; raise `PlanError` if no plan meets the limits."""
        result = [self._recovered(self._fastest())]
        for start in self._uniform():
            evaluation = self.evaluator.set_plans(start)
            available = min((_order(self.problem, each) for _, each in result))
            if _order(self.problem, evaluation) < available:
                result += [(start, evaluation), self._recovered(start)]
        plans, evaluation = min(result, key=lambda pair: _order(self.problem, pair[1]))
        if evaluation.exceeds(self.problem):
            raise unfit(self.problem, [each for _, each in result])
        return plans, evaluation

    def _recovered(self, start: Plans) -> tuple[Plans, Evaluation]:
        evaluator, problem = self.evaluator, self.problem
        evaluator.set_plans(start)
        if evaluator.fits():

            def enough() -> bool:
                return problem.least == "seconds" and (
                    problem.variance is None or evaluator.variance <= problem.variance
                )

            if not enough():
                recover(evaluator, self.units, self.indicator, enough)
        return evaluator.plans, evaluator.evaluate()

    def _fastest(self) -> Plans:
        problem = self.problem
        result = {
            name: initial(problem.classes[name], owned, self.evaluator, name)
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
        """Return the uniform plans that the decision groups can represent."""

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


def _order(problem: Problem, evaluation: Evaluation) -> tuple[float, float, float]:
    """Return the sort key of plans: limits exceeded, objective, then the other metric."""
    other = evaluation.seconds if problem.least == "variance" else evaluation.variance
    return (bool(evaluation.exceeds(problem)), evaluation.value(problem), other)


ALLOCATORS: Final = (PrecisionRecovery(),)

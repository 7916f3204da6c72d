"""Baseline allocators: uniform plans and dynamic batch sizes.

If no plan meets the limits, a baseline returns a plan that exceeds them, and a note on the limits.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from qsync_fx.allocator.evaluator import (
    CachedTimes,
    Evaluation,
    PeakMemoryEvaluator,
    PlanEvaluator,
    beyond,
    recomputing,
)
from qsync_fx.allocator.feasibility import excess
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import Asked, DeviceClass, Plans, Problem, uniforms
from qsync_fx.errors import PlanError, nearest, shown
from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper
from qsync_fx.predictor.cost_mapper.plan_states import states

__all__ = ["DynamicBatches", "Uniform"]


@dataclass(frozen=True)
class Uniform:
    """One format for all operators; None selects the best uniform plan that meets the limits."""

    fmt: str | None = None

    @property
    def name(self) -> str:
        return "uniform" if self.fmt is None else f"uniform-{self.fmt}"

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the plan, which may exceed limits; raise `PlanError` for an unsupported format."""
        available = uniforms(problem)
        if self.fmt is None:
            return _best(problem, available.values(), self.name)
        if self.fmt not in available:
            message = f"not all devices support plans with {self.fmt!r}"
            raise PlanError(message, do=nearest(self.fmt, available))
        return _best(problem, [available[self.fmt]], self.name)


def full(problem: Problem) -> Plans:
    """Return plans in the widest format of each open class."""
    parts = {name: problem.classes[name] for name in problem.open}
    return problem.completed({name: part.uniform(part.widest) for name, part in parts.items()})


def _best(problem: Problem, tried: Iterable[Plans], name: str) -> PlanResult:
    """Return the best plan that meets the limits; if none does, the plan with the least excess."""
    began = time.perf_counter()
    evaluator = PlanEvaluator(problem, problem.uniform())
    results = [(plans, evaluator.set_plans(plans)) for plans in tried]

    def order(result: tuple[Plans, Evaluation]) -> tuple[float, float, float]:
        evaluation = result[1]
        return excess(problem, evaluation), evaluation.value(problem), evaluation.seconds

    plans, evaluation = min(results, key=order)
    took, notes = time.perf_counter() - began, exceeded(problem, evaluation)
    return PlanResult(problem, plans, evaluation, name, took=took, notes=notes)


def exceeded(problem: Problem, evaluation: Evaluation) -> tuple[PlanNote, ...]:
    """Return the note on exceeded limits, if any."""
    if over := evaluation.exceeds(problem):
        return (PlanNote(PlanNoteKind.UNFIT, numbers=over),)
    return ()


Resized = Callable[[str, int], DeviceClass]
"""Constructor of a device class with another batch, from its name and samples per device."""

_ROUNDS: Final = 8


@dataclass(frozen=True)
class DynamicBatches:
    """Dynamic batch sizing (QSync, Section VII; Chen et al., SoCC 2020).

    All devices train in full precision, or in the plans that `formats` returns for a problem. Each
    class gets a batch in proportion to its speed, so that the global batch and the learning rate
    stay the same. If memory limits the batches, the global batch shrinks, and the learning rate
    with it (linear scaling rule, Goyal et al.).

    The mean over ranks must weight gradients by samples. DDP weights ranks equally, so each rank
    multiplies its loss by the weight in the result's notes. The result's problem contains the new
    batches. No batch is below `min_batch`, unless memory limits it.
    """

    resized: Resized
    formats: Callable[[Problem], Plans] = full
    min_batch: int = 1

    @property
    def name(self) -> str:
        return "dynamic-batches"

    def allocate(self, problem: Problem) -> PlanResult:
        """Return full-precision plans; raise `PlanError` if the batch of a class is unknown."""
        began = time.perf_counter()
        before = local_batches(problem)
        sized = SizedProblems(problem, self.resized)
        after = balanced_batches(sized, self.formats, self.min_batch)
        result = sized.problem(after)
        answer = _best(result, [self.formats(result)], self.name)
        notes = (*answer.notes, *_notes(problem, before, after))
        took = time.perf_counter() - began
        return replace(answer, took=took, notes=notes, batches=after)


class SizedProblems:
    """Problem with variable batches; classes are built once per batch, peaks evaluated once."""

    def __init__(self, problem: Problem, resized: Resized) -> None:
        self.requested, self._resized = problem, resized
        self._parts: dict[tuple[str, int], DeviceClass] = {}
        self._peaks: dict[object, int | None] = {}

    def problem(self, batches: Mapping[str, int]) -> Problem:
        cluster = self.requested.cluster
        devices = {
            name: replace(device, batch=batches[name]) for name, device in cluster.devices.items()
        }
        classes = {name: self.part(name, batch) for name, batch in batches.items()}
        return replace(self.requested, classes=classes, cluster=replace(cluster, devices=devices))

    def part(self, name: str, batch: int) -> DeviceClass:
        key, before = (name, batch), self.requested.classes[name]
        if key not in self._parts:
            result = self._resized(name, batch)
            result = replace(result, memory=before.memory, fixed_plan=before.fixed_plan)
            self._parts[key] = replace(result, times=CachedTimes.of(result.times))
        return self._parts[key]

    def peak(self, name: str, batch: int, plan: Asked, budget: float = 1.0) -> int | None:
        """Return the peak memory of a class in bytes; None if it is unknown.

        `budget` is its activation memory budget.
        """
        key = name, batch, budget, tuple(plan.items())
        if key not in self._peaks:
            part, result = recomputing(self.part(name, batch), budget), None
            if part.training is not None:
                result = PeakMemoryEvaluator(part, states(part.graph, plan)).peak_bytes
            self._peaks[key] = result
        return self._peaks[key]


class _Speeds:
    """Evaluations of the classes of a problem in some formats, by batch."""

    def __init__(self, sized: SizedProblems, formats: Callable[[Problem], Plans]) -> None:
        self._sized, self._formats = sized, formats
        self._before = local_batches(sized.requested)
        self._seconds: dict[tuple[str, int], float] = {}

    def seconds(self, name: str, batch: int) -> float:
        """Return the seconds of a step of a class without communication."""
        key = name, batch
        if key not in self._seconds:
            part, plan = self._sized.part(name, batch), self._plan(name, batch)
            slowdown = self._sized.requested.cluster.devices[name].slowdown
            self._seconds[key] = CostMapper(part.graph, part.times, plan).seconds * slowdown
        return self._seconds[key]

    def fits(self, name: str, batch: int) -> bool:
        """Return whether a step of a class fits into its memory."""
        limit = self._sized.requested.classes[name].memory
        if limit is None:
            return True
        peak = self._sized.peak(name, batch, self._plan(name, batch))
        return not beyond(float(peak or 0), limit)

    def _plan(self, name: str, batch: int) -> Asked:
        # The time and memory of one class do not depend on the batches of the others.
        return self._formats(self._sized.problem({**self._before, name: batch}))[name]


def local_batches(problem: Problem) -> dict[str, int]:
    """Return the samples per device of each class; raise `PlanError` if a batch is unknown."""
    result = {}
    for name, device in problem.cluster.devices.items():
        if device.batch is None:
            do = "set it in the file of the cluster: batch = 32"
            message = f"the batch size of {shown(name)} is unknown"
            raise PlanError(message, where=f"devices.{name}", do=do)
        result[name] = device.batch
    return result


def balanced_batches(
    sized: SizedProblems, formats: Callable[[Problem], Plans], least: int = 1
) -> dict[str, int]:
    """Return batches in proportion to speed; the other classes absorb samples that do not fit.

    `formats` returns the plans of a problem, whose speed counts. No batch is below `least`, unless
    memory limits it.
    """
    speeds, before = _Speeds(sized, formats), local_batches(sized.requested)
    counts = {name: device.count for name, device in sized.requested.cluster.devices.items()}
    left = sum(counts[name] * batch for name, batch in before.items())
    most: dict[str, int] = {}
    while len(most) < len(before):
        free = [name for name in before if name not in most]
        result = _by_speed(speeds, {name: before[name] for name in free}, counts, left, least)
        full_up = [name for name in free if not speeds.fits(name, result[name])]
        if not full_up:
            return {name: {**most, **result}[name] for name in before}
        for name in full_up:
            most[name] = _most(speeds, name, result[name])
            left -= counts[name] * most[name]
    return {name: most[name] for name in before}


def _by_speed(
    speeds: _Speeds,
    start: Mapping[str, int],
    counts: Mapping[str, int],
    samples: int,
    least: int,
) -> dict[str, int]:
    """Return batches of at least `least` in proportion to speed by fixed-point iteration."""
    now, visited = {name: max(least, batch) for name, batch in start.items()}, []
    for _ in range(_ROUNDS):
        if now in visited:
            break
        visited.append(now)
        speed = {name: batch / speeds.seconds(name, batch) for name, batch in now.items()}
        now = _integer_batches(_proportional(speed, counts, samples, least), counts, samples, least)
    return min(
        visited, key=lambda result: (_off(result, counts, samples), _slowest(speeds, result))
    )


def _slowest(speeds: _Speeds, batches: Mapping[str, int]) -> float:
    return max(speeds.seconds(name, batch) for name, batch in batches.items())


def _proportional(
    speed: Mapping[str, float], counts: Mapping[str, int], samples: int, least: int
) -> dict[str, float]:
    """Return samples per device in proportion to speed, with at least `least` on each."""
    result, free = dict.fromkeys(speed, float(least)), list(speed)
    while free:
        left = samples - sum(counts[name] * least for name in speed if name not in free)
        full = sum(counts[name] * speed[name] for name in free)
        result |= {name: left * speed[name] / full for name in free}
        small = [name for name in free if result[name] < least]
        if not small:
            break
        result |= dict.fromkeys(small, float(least))
        free = [name for name in free if name not in small]
    return result


def _integer_batches(
    shares: Mapping[str, float], counts: Mapping[str, int], samples: int, least: int
) -> dict[str, int]:
    """Return integer batches with a total as near as possible to `samples`, then to the shares."""
    sides = [
        [int(share) + more for more in (-1, 0, 1, 2) if int(share) + more >= least]
        for share in shares.values()
    ]
    rounded = (dict(zip(shares, chosen, strict=True)) for chosen in itertools.product(*sides))

    def distance(result: Mapping[str, int]) -> tuple[int, float]:
        apart = sum(abs(result[name] - share) for name, share in shares.items())
        return _off(result, counts, samples), apart

    return min(rounded, key=distance)


def _off(batches: Mapping[str, int], counts: Mapping[str, int], samples: int) -> int:
    return abs(sum(counts[name] * batch for name, batch in batches.items()) - samples)


def _most(speeds: _Speeds, name: str, batch: int) -> int:
    """Return the largest batch below `batch` that fits into memory; 1 if none does."""
    low, high = 1, batch
    while high - low > 1:
        middle = (low + high) // 2
        if speeds.fits(name, middle):
            low = middle
        else:
            high = middle
    return low


def _notes(problem: Problem, before: Mapping[str, int], after: Mapping[str, int]) -> list[PlanNote]:
    devices = problem.cluster.devices
    samples, now = (
        sum(devices[name].count * batch for name, batch in each.items()) for each in (before, after)
    )
    weight, rate = problem.cluster.ranks / now, now / samples
    result = []
    for name, batch in after.items():
        numbers = {"batch": batch, "before": before[name], "weight of its loss": batch * weight}
        numbers["learning rate"] = rate
        result.append(PlanNote(PlanNoteKind.BATCH, name, numbers=numbers))
    return result


ALLOCATORS: Final = (Uniform(),)

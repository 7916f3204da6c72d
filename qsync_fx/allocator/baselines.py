"""What allocators are compared with: uniform and full precision, the paper's allocator with the orders of others, and batches by speed.

Invariant: where an allocator would say that no plan is within the limits, a baseline answers, and says that it exceeds them.

One format for all operators: `Uniform` and `FullPrecision`.

The paper's allocator with other orders of operators: `Random` and `Hessian` (QSync, Table II).

As there, what an operator adds in its narrowest format is drawn, or HAWQ's number, and is halved with each wider one.

Invariant: only the order is another's. What the answer says of the variance is the judge's.

Dynamic batch sizing (QSync, section VII; Chen et al., Semi-Dynamic Load Balancing, SoCC 2020): `DynamicBatches`.

All devices train in full precision, and each class with as many samples as its speed has a share in: the global batch stays what it is,
and so does the learning rate. The mean over ranks weighs gradients by samples, which DDP's does not: a rank multiplies its loss with its
weight. Where memory holds fewer samples the global batch shrinks, and the learning rate with it (Goyal et al., the linear rule).

Invariant: the problem of the answer is that of the other batches, and its figures are the judge's.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from qsync_fx.allocator.evaluator import Evaluation, PlanEvaluator, beyond, evaluate_plan
from qsync_fx.allocator.feasibility import excess
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import DeviceClass, Plans, Problem, uniforms
from qsync_fx.allocator.recovery import Indicator, PrecisionRecovery
from qsync_fx.errors import PlanError, nearest, shown
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity

__all__ = ["DynamicBatches", "FullPrecision", "HessianGreedy", "RandomGreedy", "Uniform"]


@dataclass(frozen=True)
class Uniform:
    """
    Attributes:
        fmt: the format; the best one of those that keep the limits where None.
    """

    fmt: str | None = None

    @property
    def name(self) -> str:
        return "uniform" if self.fmt is None else f"uniform-{self.fmt}"

    def allocate(self, problem: Problem) -> PlanResult:
        """Returns the plan, which may exceed limits; raises `PlanError` where the format is not one of all classes'."""
        began = time.perf_counter()
        available = uniforms(problem)
        if self.fmt is not None and self.fmt not in available:
            raise PlanError(
                f"not all devices take plans with {self.fmt!r}", do=nearest(self.fmt, available)
            )
        tried = available.values() if self.fmt is None else [available[self.fmt]]
        plans, judged = best(problem, tried)
        took = time.perf_counter() - began
        return PlanResult(
            problem, plans, judged, self.name, took=took, notes=exceeded(problem, judged)
        )


@dataclass(frozen=True)
class FullPrecision:
    """The widest format of each class."""

    @property
    def name(self) -> str:
        return "full-precision"

    def allocate(self, problem: Problem) -> PlanResult:
        """Returns the plan, which may exceed limits."""
        began = time.perf_counter()
        plans, judged = best(problem, [full(problem)])
        took = time.perf_counter() - began
        return PlanResult(
            problem, plans, judged, self.name, took=took, notes=exceeded(problem, judged)
        )


def full(problem: Problem) -> Plans:
    """Returns plans of the widest format of each open class."""
    parts = {name: problem.classes[name] for name in problem.open}
    return problem.completed({name: part.uniform(part.widest) for name, part in parts.items()})


def best(problem: Problem, tried: Iterable[Plans]) -> tuple[Plans, Evaluation]:
    """Returns the best of plans that keep the limits; where none does, the nearest to that."""
    judge = PlanEvaluator(problem, problem.uniform())
    result = [(plans, judge.become(plans)) for plans in tried]
    return min(
        result, key=lambda pair: (excess(problem, pair[1]), pair[1].value(problem), pair[1].seconds)
    )


def exceeded(problem: Problem, judged: Evaluation) -> tuple[PlanNote, ...]:
    """Returns the note of plans that exceed limits."""
    over = judged.exceeds(problem)
    return (PlanNote(PlanNoteKind.UNFIT, numbers=over),) if over else ()


@dataclass(frozen=True)
class RandomGreedy:
    """
    Attributes:
        seed: of what is drawn.
    """

    seed: int = 0

    @property
    def name(self) -> str:
        return "random"

    def allocate(self, problem: Problem) -> PlanResult:
        """Returns the plan, which exceeds limits where none was found within them."""

        def drawn(name: str, operator: str) -> float:
            return random.Random(f"{self.seed} {operator}").random()

        return _ordered(problem, halved(problem, drawn), self.name)


@dataclass(frozen=True)
class HessianGreedy:
    """
    Attributes:
        sensitivity: that the method "hessian" found, of the model or of each class.
    """

    sensitivity: Sensitivity | Mapping[str, Sensitivity] = field(repr=False)

    @property
    def name(self) -> str:
        return "hessian"

    def allocate(self, problem: Problem) -> PlanResult:
        """Returns the plan, which exceeds limits where none was found within them; raises `ProfileError` where an operator is not known."""

        def available(name: str, operator: str) -> float:
            part = problem.classes[name]
            result = (
                self.sensitivity
                if isinstance(self.sensitivity, Sensitivity)
                else self.sensitivity[name]
            )
            return result.of(operator, part.runs(operator, part.choices[operator][0]))

        return _ordered(problem, halved(problem, available), self.name)


def halved(problem: Problem, narrowest: Callable[[str, str], float]) -> Indicator:
    """Returns what orders operators by a number for the narrowest format of each: half of it in the next wider one, nothing in FP32."""

    def indicator(name: str, operator: str, fmt: str) -> float:
        part = problem.classes[name]
        if FORMATS[part.runs(operator, fmt)].bits >= FP32_BITS:
            return 0.0
        return float(narrowest(name, operator) * 0.5 ** part.choices[operator].index(fmt))

    return indicator


FP32_BITS = FORMATS["fp32"].bits


def _ordered(problem: Problem, indicator: Indicator, name: str) -> PlanResult:
    try:
        return PrecisionRecovery(indicator, name).allocate(problem)
    except PlanError:
        plans, judged = best(problem, uniforms(problem).values())
        return PlanResult(problem, plans, judged, name, notes=exceeded(problem, judged))


Resized = Callable[[str, int], DeviceClass]
"""A class of devices with another batch, by its name and the samples of one device in a step."""

_ROUNDS: Final = 8


@dataclass(frozen=True)
class DynamicBatches:
    """
    Attributes:
        resized: what a class of devices is with another batch.
    """

    resized: Resized

    @property
    def name(self) -> str:
        return "dynamic-batches"

    def allocate(self, problem: Problem) -> PlanResult:
        """Returns plans in full precision on devices with other batches; raises `PlanError` where batches are not known."""
        began = time.perf_counter()
        before = _batches(problem)
        sized = _Sized(problem, self.resized)
        after = _within_memory(sized, before)
        result = sized.problem(after)
        plans = full(result)
        text = evaluate_plan(result, plans)
        took = time.perf_counter() - began
        return PlanResult(
            result,
            plans,
            text,
            self.name,
            took=took,
            notes=(*exceeded(result, text), *_notes(problem, before, after)),
        )


class _Sized:
    """A problem with other batches; each size is made once."""

    def __init__(self, problem: Problem, resized: Resized) -> None:
        self.asked, self._resized = problem, resized
        self._known: dict[tuple[str, int], DeviceClass] = {}
        self._figures: dict[tuple[str, int], tuple[float, float]] = {}

    def problem(self, batches: Mapping[str, int]) -> Problem:
        devices = {
            name: replace(device, batch=batches[name])
            for name, device in self.asked.cluster.devices.items()
        }
        classes = {name: self.part(name, batch) for name, batch in batches.items()}
        return replace(
            self.asked, classes=classes, cluster=replace(self.asked.cluster, devices=devices)
        )

    def part(self, name: str, batch: int) -> DeviceClass:
        key, before = (name, batch), self.asked.classes[name]
        if key not in self._known:
            result = self._resized(name, batch)
            self._known[key] = replace(result, memory=before.memory, kept=before.kept)
        return self._known[key]

    def figures(self, name: str, batch: int) -> tuple[float, float]:
        """Returns seconds of a step in full precision without communication, and its peak."""
        key = name, batch
        if key not in self._figures:
            # The others' batches do not matter to what one class computes and holds.
            now = self.problem({**_batches(self.asked), name: batch})
            judge = PlanEvaluator(now, full(now))
            self._figures[key] = judge.computing(name), float(judge.peak(name) or 0)
        return self._figures[key]

    def holds(self, name: str, batch: int) -> bool:
        limit = self.asked.classes[name].memory
        return limit is None or not beyond(self.figures(name, batch)[1], limit)


def _batches(problem: Problem) -> dict[str, int]:
    result = {}
    for name, device in problem.cluster.devices.items():
        if device.batch is None:
            do = "say it in the cluster's file: batch = 32"
            raise PlanError(
                f"how many samples {shown(name)} trains with is not known",
                where=f"devices.{name}",
                do=do,
            )
        result[name] = device.batch
    return result


def _within_memory(sized: _Sized, before: Mapping[str, int]) -> dict[str, int]:
    """Returns batches by speed; a class that cannot hold its own has what it can, and the others the rest."""
    counts = {name: device.count for name, device in sized.asked.cluster.devices.items()}
    left = sum(counts[name] * batch for name, batch in before.items())
    most: dict[str, int] = {}
    while len(most) < len(before):
        free = [name for name in before if name not in most]
        result = _by_speed(sized, {name: before[name] for name in free}, counts, left)
        full_up = [name for name in free if not sized.holds(name, result[name])]
        if not full_up:
            return {name: {**most, **result}[name] for name in before}
        for name in full_up:
            most[name] = _most(sized, name, result[name])
            left -= counts[name] * most[name]
    return {name: most[name] for name in before}


def _by_speed(
    sized: _Sized, start: Mapping[str, int], counts: Mapping[str, int], samples: int
) -> dict[str, int]:
    """Returns batches in proportion to speed, which changes with them: the same again until they stay."""
    now, visited = dict(start), []
    for _ in range(_ROUNDS):
        if now in visited:
            break
        visited.append(now)
        speed = {name: batch / sized.figures(name, batch)[0] for name, batch in now.items()}
        full = sum(counts[name] * speed[name] for name in now)
        now = _whole(
            {name: max(1.0, samples * speed[name] / full) for name in now}, counts, samples
        )
    return min(visited, key=lambda result: (_off(result, counts, samples), _slowest(sized, result)))


def _slowest(sized: _Sized, batches: Mapping[str, int]) -> float:
    return max(sized.figures(name, batch)[0] for name, batch in batches.items())


def _whole(shares: Mapping[str, float], counts: Mapping[str, int], samples: int) -> dict[str, int]:
    """Returns shares as whole numbers that add up to the samples as nearly as they can, and are as near to the shares."""
    sides = [
        [int(share) + more for more in (-1, 0, 1, 2) if int(share) + more >= 1]
        for share in shares.values()
    ]
    rounded = (dict(zip(shares, chosen, strict=True)) for chosen in itertools.product(*sides))
    return min(
        rounded,
        key=lambda result: (
            _off(result, counts, samples),
            sum(abs(result[name] - share) for name, share in shares.items()),
        ),
    )


def _off(batches: Mapping[str, int], counts: Mapping[str, int], samples: int) -> int:
    return abs(sum(counts[name] * batch for name, batch in batches.items()) - samples)


def _most(sized: _Sized, name: str, batch: int) -> int:
    """Returns the largest batch below one that a class cannot hold; 1 where it holds none."""
    low, high = 1, batch
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sized.holds(name, middle) else (low, middle)
    return low


def _notes(problem: Problem, before: Mapping[str, int], after: Mapping[str, int]) -> list[PlanNote]:
    devices = problem.cluster.devices
    samples, now = (
        sum(devices[name].count * batch for name, batch in each.items()) for each in (before, after)
    )
    return [
        PlanNote(
            PlanNoteKind.BATCH,
            name,
            numbers={
                "batch": batch,
                "before": before[name],
                "weight of its loss": batch * problem.cluster.ranks / now,
                "learning rate": now / samples,
            },
        )
        for name, batch in after.items()
    ]

"""Planning problem: a model on device classes, the formats to choose from, and the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from qsync_fx.allocator.codec_choice import CodecSearchSpace
from qsync_fx.errors import PlanError, shown
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.cost_mapper.times import Times
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.memory.peak_memory import Anchor, TrainingMemory
from qsync_fx.predictor.model.model_graph import Choices, ModelGraph, chosen
from qsync_fx.predictor.replayer.cluster import Cluster

Asked = Mapping[str, str]
"""Requested format of each adjustable operator of a device class, by operator id."""

Plans = Mapping[str, Asked]
"""Requested formats of each device class, by class name."""


@dataclass(frozen=True)
class DeviceClass:
    """Identical devices that share one plan; the cluster stores their number.

    Attributes:
        formats: formats that a plan may request; the model graph must support each of them.
        fixed_plan: fixed plan of the class; None if the class is open to choice.
        training: memory of a step outside both passes; None if it and all peaks are unknown.
        memory: limit of the peak memory of a step in bytes; None for no limit.
        anchors: plans with a measured peak that correct predicted peaks.
        conditions: text on non-default conditions under which the times were measured.
    """

    graph: ModelGraph = field(repr=False)
    times: Times = field(repr=False)
    sensitivity: Sensitivity = field(repr=False)
    formats: tuple[str, ...]
    fixed_plan: Asked | None = field(default=None, repr=False)
    training: TrainingMemory | None = field(default_factory=TrainingMemory)
    memory: float | None = None
    anchors: tuple[Anchor, ...] = field(default=(), repr=False)
    conditions: str = ""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.formats if name not in self.graph.formats]:
            message = f"the model graph was not made for plans with {shown(unknown[0])}"
            do = f"measure with it too, or plan with {', '.join(self.graph.formats)}"
            raise PlanError(message, do=do)
        if not self.formats:
            raise PlanError("there is no format to choose from", do="allow one at least")
        if self.memory is not None and not self.memory > 0:
            raise PlanError(f"a step cannot take {self.memory} bytes", do="give a limit above 0")
        if self.memory is not None and self.training is None:
            do = "measure with the optimizer, or give its memory"
            raise PlanError("memory is limited, but the memory of a step is unknown", do=do)

    @cached_property
    def choices(self) -> Mapping[str, tuple[str, ...]]:
        """Formats to choose from per adjustable operator, in program order, narrowest first.

        If several requested formats lead to the same compute format, they count as one choice. It
        is named after the compute format if that is among them.
        """
        return {
            op.id: self._choices(op.decided)
            for op in self.graph.operators
            if isinstance(op.decided, Choices)
        }

    @property
    def lowest(self) -> str:
        """Narrowest format of the class."""
        return min(self.formats, key=width)

    @property
    def widest(self) -> str:
        """Widest format of the class."""
        return max(self.formats, key=width)

    def runs(self, operator: str, requested: str) -> str:
        """Return the compute format of an adjustable operator for a requested format."""
        decided = self.graph.operator(operator).decided
        assert isinstance(decided, Choices)
        return chosen(decided, requested, explicit=True)

    def omega(self, operator: str, requested: str) -> float:
        """Return the variance that an operator adds to the gradients under a requested format."""
        key = operator, requested
        if key not in self._omegas:
            self._omegas[key] = self.sensitivity.of(operator, self.runs(operator, requested))
        return self._omegas[key]

    def variance(self, requested: Asked) -> float:
        """Return the variance that all operators add to the gradients of one device."""
        return sum(self.omega(operator, fmt) for operator, fmt in requested.items())

    def uniform(self, fmt: str) -> dict[str, str]:
        """Return the plan that requests one format for all operators, in the names of `choices`."""
        return {operator: self.called(operator, fmt) for operator in self.choices}

    def called(self, operator: str, fmt: str) -> str:
        """Return the name in `choices` for a requested format of an operator."""
        available = self.choices[operator]
        if fmt in available:
            return fmt
        runs = self.runs(operator, fmt)
        return next((name for name in available if self.runs(operator, name) == runs), available[0])

    @cached_property
    def _omegas(self) -> dict[tuple[str, str], float]:
        return {}

    def _choices(self, decided: Choices) -> tuple[str, ...]:
        named: dict[str, str] = {}
        for fmt in self.formats:
            runs = chosen(decided, fmt, explicit=True)
            if runs not in named or fmt == runs:
                named[runs] = fmt
        return tuple(named[runs] for runs in sorted(named, key=width))


@dataclass(frozen=True)
class Problem:
    """Device classes, cluster, objective and limits of a planning request.

    Attributes:
        least: objective to minimize: variance of the mean gradient, or seconds per step.
        seconds: limit of the seconds per step of the cluster; None for no limit.
        variance: limit of the variance of the mean gradient; None for no limit.
        tied: groups of operators that share one format on each class.
        coding: codecs available for gradient buckets; None if all buckets are sent in FP32.
    """

    classes: Mapping[str, DeviceClass]
    cluster: Cluster
    least: Literal["variance", "seconds"] = "variance"
    seconds: float | None = None
    variance: float | None = None
    tied: Sequence[Sequence[str]] = ()
    coding: CodecSearchSpace | None = None

    def __post_init__(self) -> None:
        self.cluster.check_names(self.classes, "classes")
        if not self.open:
            do = "leave at least one class without a fixed plan"
            raise PlanError("no class of devices is open to choice", do=do)
        for name, limit in (("seconds", self.seconds), ("variance", self.variance)):
            if limit is not None and not limit >= 0:
                raise PlanError(f"the limit of the {name} is {limit}", do="give a number from 0")

    @cached_property
    def open(self) -> tuple[str, ...]:
        """Names of the classes that are open to choice."""
        return tuple(name for name, item in self.classes.items() if item.fixed_plan is None)

    def limit(self, subject: str) -> float | None:
        """Return a limit: "seconds", "variance" or "memory NAME"; None for no limit."""
        match subject:
            case "seconds":
                return self.seconds
            case "variance":
                return self.variance
        return self.classes[subject.removeprefix("memory ")].memory

    def weight(self, name: str) -> float:
        """Return the weight of a class's per-device variance in the mean gradient's.

        The mean is over samples, so a device with `b` of the `B` samples of a step has the share
        `b / B` of the mean, and its class the weight `count * (b / B)**2`. If the batch of a class
        is unknown, all devices count as equal.
        """
        device, samples = self.cluster.devices[name], self.cluster.samples
        if device.batch is None or samples is None:
            return device.count / self.cluster.ranks**2
        return device.count * (device.batch / samples) ** 2

    def omega(self, name: str, operator: str, requested: str) -> float:
        """Return the variance that an operator adds on each device of a class."""
        return self.classes[name].omega(operator, requested)

    def variance_of(self, plans: Plans) -> float:
        """Return the variance of the mean gradient, for independent rounding errors of ranks."""
        return sum(
            self.weight(name) * item.variance(plans[name]) for name, item in self.classes.items()
        )

    @property
    def noise(self) -> float | None:
        """Variance of the mean gradient between batches; None if a class has no measurement."""
        noises = {name: item.sensitivity.noise for name, item in self.classes.items()}
        if None in noises.values():
            return None
        return sum(self.weight(name) * (noise or 0.0) for name, noise in noises.items())

    def completed(self, plans: Plans) -> dict[str, Asked]:
        """Return plans of all classes, given plans of the open ones."""
        saved = {name: item.fixed_plan for name, item in self.classes.items()}
        return {name: plans[name] if owned is None else owned for name, owned in saved.items()}

    def uniform(self, fmt: str | None = None) -> dict[str, Asked]:
        """Return plans with one format per open class; default: the narrowest of each class."""
        parts = {name: self.classes[name] for name in self.open}
        plans = {name: part.uniform(fmt or part.lowest) for name, part in parts.items()}
        return self.completed(plans)


def width(fmt: str) -> tuple[int, int, int]:
    """Return the sort key of a format, narrowest first: bits, gradient bits, mantissa bits."""
    result = FORMATS[fmt]
    return result.bits, result.gradient.bits, result.mantissa


def uniforms(problem: Problem) -> Mapping[str, Plans]:
    """Return the uniform plans by format, narrowest first, for formats common to all open classes.

    If the narrowest formats of the classes differ, the first entry combines the narrowest format of
    each class. Its key joins their names with "/".
    """
    parts = [problem.classes[name] for name in problem.open]
    lowest = sorted({part.lowest for part in parts}, key=width)
    common = sorted(set.intersection(*(set(part.formats) for part in parts)), key=width)
    result = {} if common[:1] == lowest else {"/".join(lowest): problem.uniform()}
    return result | {fmt: problem.uniform(fmt) for fmt in common}

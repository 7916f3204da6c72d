"""What an allocator is asked: a model on classes of devices, what may be chosen, and the limits.

Invariant: frozen, and whole: what a plan costs follows from it and the plan alone. Two formats are two choices of an operator only where
it computes in two formats.

Plans in which all operators of a class of devices are asked for one format.

Invariant: each is one that `Problem.uniform` makes; the first is that of the narrowest format of each class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from qsync_fx.allocator.codec_choice import CodecSearchSpace
from qsync_fx.errors import PlanError, shown
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.cost_mapper.indexed_model import Tables
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.memory.outside_passes import TrainingMemory
from qsync_fx.predictor.memory.peak_memory import Anchor
from qsync_fx.predictor.model.model_graph import Choices, ModelGraph, chosen
from qsync_fx.predictor.replayer.cluster import Cluster
from qsync_fx.predictor.times import Times

Asked = Mapping[str, str]
"""The format of each adjustable operator of a class, by its id."""

Plans = Mapping[str, Asked]
"""The same of each class, by its name."""


@dataclass(frozen=True)
class DeviceClass:
    """Devices that are alike, and get one plan. How many there are, the cluster says.

    Attributes:
        graph: the model.
        times: how long its operators take there.
        sensitivity: what each operator adds to the variance of the gradients.
        formats: what a plan may ask for; without those that the model graph was not made for.
        kept: the plan that it has whatever is chosen for others; None where it is open to choice.
        training: what a step holds beside both passes; None where that is not known, and peaks are not.
        memory: bytes that a step may take; None for any.
        anchors: plans whose peak was measured, which predicted ones are corrected by.
        conditions: in words, what was not as by default when its times were measured.
    """

    graph: ModelGraph = field(repr=False)
    times: Times = field(repr=False)
    sensitivity: Sensitivity = field(repr=False)
    formats: tuple[str, ...]
    kept: Asked | None = field(default=None, repr=False)
    training: TrainingMemory | None = field(default_factory=TrainingMemory)
    memory: float | None = None
    anchors: tuple[Anchor, ...] = field(default=(), repr=False)
    conditions: str = ""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.formats if name not in self.graph.formats]:
            message = f"the model graph was not made for plans with {shown(unknown[0])}"
            raise PlanError(
                message, do=f"measure with it too, or plan with {', '.join(self.graph.formats)}"
            )
        if not self.formats:
            raise PlanError("there is no format to choose from", do="allow one at least")
        if self.memory is not None and not self.memory > 0:
            raise PlanError(f"a step cannot take {self.memory} bytes", do="give a limit above 0")
        if self.memory is not None and self.training is None:
            do = "say what the optimizer keeps: measure with the optimizer, or give its memory"
            raise PlanError("memory is limited, and what a step holds is not known", do=do)

    @cached_property
    def choices(self) -> Mapping[str, tuple[str, ...]]:
        """For each adjustable operator, in the order in which they run, what plans may ask for, from the narrowest format up.

        Where an operator computes in one format for several that are asked for, the one that is called as it computes stands for them.
        """
        return {
            op.id: self._choices(op.decided)
            for op in self.graph.operators
            if isinstance(op.decided, Choices)
        }

    @property
    def lowest(self) -> str:
        """The narrowest of its formats."""
        return min(self.formats, key=width)

    @property
    def widest(self) -> str:
        """The widest of its formats."""
        return max(self.formats, key=width)

    def runs(self, operator: str, requested: str) -> str:
        """Returns what an adjustable operator computes in where a plan asks for a format."""
        decided = self.graph.operator(operator).decided
        assert isinstance(decided, Choices)
        return chosen(decided, requested, explicit=True)

    def omega(self, operator: str, requested: str) -> float:
        """Returns what an operator adds to the variance of the gradients where a plan asks for a format; raises as `Sensitivity.of`."""
        key = operator, requested
        if key not in self._omegas:
            self._omegas[key] = self.sensitivity.of(operator, self.runs(operator, requested))
        return self._omegas[key]

    def variance(self, requested: Asked) -> float:
        """Returns the sum over all operators."""
        return sum(self.omega(operator, fmt) for operator, fmt in requested.items())

    def uniform(self, fmt: str) -> dict[str, str]:
        """Returns the plan that asks for a format everywhere, in the words of `choices`."""
        return {operator: self.called(operator, fmt) for operator in self.choices}

    def called(self, operator: str, fmt: str) -> str:
        """Returns a format that is asked for an operator in the words of `choices`."""
        available = self.choices[operator]
        if fmt in available:
            return fmt
        runs = self.runs(operator, fmt)
        return next((name for name in available if self.runs(operator, name) == runs), available[0])

    @cached_property
    def tables(self) -> Tables:
        """The graph as tables, made once for all programs."""
        return Tables(self.graph)

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
    """
    Attributes:
        classes: of devices, by the names that the cluster has.
        cluster: how many there are of each, and what links them.
        least: what is to be as small as it can be: the variance of the mean gradient, or the seconds of a step.
        seconds: what a step of the cluster may take; None for any.
        variance: what the variance may be; None for any.
        tied: groups of operators that get one format, on each class.
        coding: codecs that a bucket of gradients may be sent in; None where all are sent in FP32.
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
            raise PlanError(
                "no class of devices is open to choice",
                do="leave one at least without a plan of its own",
            )
        for name, limit in (("seconds", self.seconds), ("variance", self.variance)):
            if limit is not None and not limit >= 0:
                raise PlanError(f"a limit of {limit} {name} is none", do="give a number from 0")

    @cached_property
    def open(self) -> tuple[str, ...]:
        """The classes that are open to choice."""
        return tuple(name for name, item in self.classes.items() if item.kept is None)

    def weight(self, name: str) -> float:
        """Returns what the variance of one device of a class counts in that of the mean gradient of all ranks."""
        return self.cluster.devices[name].count / self.cluster.ranks**2

    def variance_of(self, plans: Plans) -> float:
        """Returns the variance of the mean gradient that plans of all classes lead to: roundings of ranks are independent."""
        return sum(
            self.weight(name) * item.variance(plans[name]) for name, item in self.classes.items()
        )

    def completed(self, plans: Plans) -> dict[str, Asked]:
        """Returns plans of all classes, from those of the open ones."""
        saved = {name: item.kept for name, item in self.classes.items()}
        return {name: plans[name] if owned is None else owned for name, owned in saved.items()}

    def uniform(self, fmt: str | None = None) -> dict[str, Asked]:
        """Returns plans that ask for one format on all open classes; for the narrowest of each where none is given."""
        return self.completed(
            {
                name: self.classes[name].uniform(fmt or self.classes[name].lowest)
                for name in self.open
            }
        )


def width(fmt: str) -> tuple[int, int, int]:
    """Returns what formats are sorted by, from the narrowest up: bits, bits of gradients, and bits of the mantissa."""
    result = FORMATS[fmt]
    return result.bits, result.gradient.bits, result.mantissa


def uniforms(problem: Problem) -> Mapping[str, Plans]:
    """Returns uniform plans by the format asked for, from the narrowest up, of those that all open classes have.

    Where classes have different ones, that of each class's narrowest format comes first, under the names of all of these.
    """
    parts = [problem.classes[name] for name in problem.open]
    lowest = sorted({part.lowest for part in parts}, key=width)
    common = sorted(set.intersection(*(set(part.formats) for part in parts)), key=width)
    result = {} if common[:1] == lowest else {"/".join(lowest): problem.uniform()}
    return result | {fmt: problem.uniform(fmt) for fmt in common}

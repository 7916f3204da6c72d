"""`Profile`: the measurements of one model on one device, its file format and its table; `Samples`
of an interrupted measurement.

All times are in seconds and all sizes in bytes; none is negative or NaN. A profile contains the
model graph, so predictions need no model.
"""

from __future__ import annotations

import functools
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qsync_fx.devices.machine import Machine, here_for
from qsync_fx.errors import ProfileError
from qsync_fx.formatting import duration, many, milliseconds, short
from qsync_fx.html_view import HtmlView
from qsync_fx.passes.cached_plan import Fingerprint
from qsync_fx.plan.plan import Plan
from qsync_fx.predictor.cost_mapper.plan_states import states
from qsync_fx.predictor.cost_mapper.times import Times
from qsync_fx.predictor.indicator.sensitivity_map import SENSITIVITY, Sensitivity
from qsync_fx.predictor.memory.peak_memory import Anchor, LossMemory, OptimizerMemory
from qsync_fx.predictor.model.model_file import StoredGraph, restored
from qsync_fx.predictor.model.model_graph import ModelGraph
from qsync_fx.predictor.replayer.cluster import CHECKS as CLUSTER_CHECKS, Exchange
from qsync_fx.profiler.run_statistics import (
    MeasuredOperator,
    MeasuredRun,
    Quantized,
    check_numbers,
    check_run,
    fitted,
)
from qsync_fx.serialization.schema import Path, Schema
from qsync_fx.text_tables import plain, table_of


@dataclass(frozen=True)
class Model:
    """Identity of the profiled model.

    Attributes:
        digest: of its operators, all shapes, the modules in eval mode, and the backend's options;
            "" for a batch size between measured ones.
        parameters: number of parameter elements.
        options: non-default options of the backend.
        evaluated: number of modules in eval mode.
    """

    name: str
    digest: str
    parameters: int
    options: str = ""
    evaluated: int = 0

    @property
    def conditions(self) -> str:
        """Non-default options and modes, under which alone times are valid."""
        conditions = [self.options]
        if self.evaluated:
            conditions.append(f"{self.evaluated} modules in eval mode")
        return ", ".join(filter(None, conditions))

    def check(self, current: Model) -> None:
        same = self.digest == current.digest if self.digest else self == replace(current, digest="")
        if not same:
            raise ProfileError(
                f"it was taken of another model: {self}, and this is {current}",
                do="measure this model, with these input shapes, options and modes (train or eval)",
            )

    def __str__(self) -> str:
        text = f"{self.name} of {self.parameters} parameters ({self.digest[:8]})"
        return f"{text} with {self.conditions}" if self.conditions else text


@dataclass(frozen=True)
class Collective:
    """Durations of all-reduces, and their effect on concurrent computation.

    Attributes:
        seconds: pairs of bytes per rank and seconds of the slowest rank.
        busy: delay of concurrent computation on a rank, as a fraction of `seconds`.
        coding: the same fraction of the seconds in which codecs encode and decode.
        slowdown: factor on this rank's step time while other ranks train without sending.
        copies: seconds per byte in which DistributedDataParallel copies gradients into a bucket,
            and again out of it, at the profile's machine speed.
        buffers: seconds per step to broadcast rank 0's buffers, such as batch norm statistics.
        exchanges: exchanges of compressed gradients between the same ranks, by transport and group.
    """

    backend: str
    ranks: int
    seconds: list[tuple[int, float]]
    busy: float = 0.0
    slowdown: float = 1.0
    copies: float | None = None
    buffers: float = 0.0
    coding: float | None = None
    exchanges: list[Exchange] = field(default_factory=list)


@dataclass(frozen=True)
class CodecSpeed:
    """Bytes of FP32 gradients that a codec encodes, or decodes and accumulates, per second.

    Coded bytes of a GPU are copied to and from host memory, unless they stay `on_device`.
    """

    codec: str
    encode: float
    decode: float
    on_device: bool = False


@dataclass(frozen=True)
class BatchMeasurement:
    """Measurements of a profile's model with another number of samples in a batch.

    `model`, `stored`, `runs` and `loss_memory` have the meaning of the profile's, for this batch.
    """

    batch_size: int
    model: Model
    stored: StoredGraph
    runs: list[MeasuredRun]
    loss_memory: LossMemory | None = None

    @functools.cached_property
    def graph(self) -> ModelGraph:
        return restored(self.stored)


@dataclass(frozen=True)
class Profile(HtmlView):
    """Measurements of one model on one device.

    Attributes:
        stored: the model graph in its serialized form.
        precisions: names of the measured formats.
        runs: one per plan; first the plans of every profile, then user plans.
        collectives: one per backend of torch.distributed.
        fingerprint: identity for the plan cache; None if the model was not run here.
        batch_size: number of samples in the batch of a step; None if it was not measured.
        memory_budget: share of the saved activations that stayed saved; see the backend's option.
        batches: measurements at other batch sizes, from which `at_batch` interpolates.
    """

    machine: Machine
    model: Model
    stored: StoredGraph
    precisions: list[str]
    runs: list[MeasuredRun]
    optimizer: str = ""
    collectives: list[Collective] = field(default_factory=list)
    sensitivity: Sensitivity | None = None
    optimizer_memory: OptimizerMemory | None = None
    fingerprint: Fingerprint | None = None
    codecs: list[CodecSpeed] = field(default_factory=list)
    loss_memory: LossMemory | None = None
    batch_size: int | None = None
    memory_budget: float = 1.0
    batches: list[BatchMeasurement] = field(default_factory=list)

    @functools.cached_property
    def graph(self) -> ModelGraph:
        return restored(self.stored)

    @property
    def optimizer_seconds(self) -> float:
        return statistics.median(step[2] for run in self.runs for step in run.steps)

    def save(self, path: Path) -> pathlib.Path:
        """Write the profile atomically, and return its path; `qsync_fx.cache_plan` caches it."""
        PROFILE.write(path, self.to_json())
        return pathlib.Path(path)

    def to_json(self) -> str:
        sensitivity = self.sensitivity and self.sensitivity.finite()
        return PROFILE.encode(replace(self, sensitivity=sensitivity))

    @classmethod
    def load(cls, path: Path, *, any_machine: bool = False) -> Profile:
        """Load a profile that `save` wrote.

        Args:
            any_machine: accept profiles of other machines or other versions of torch or qsync_fx,
                for the other devices of a cluster.

        Raises:
            ProfileError: the file is no valid profile, or was measured on another machine.
        """
        result = PROFILE.load(path)
        try:
            if not any_machine:
                result.machine.check(here_for(result.machine))
            _check_operators(result)
        except ProfileError as error:
            raise PROFILE.within(path, error) from None
        return result

    def times(self) -> Times:
        from qsync_fx.profiler.profiled_times import ProfiledTimes

        return ProfiledTimes(self)

    def at_batch(self, batch: int) -> Profile:
        """Return the profile for another batch size, interpolated if it was not measured.

        Raises `ProfileError` if the profile has one batch size.
        """
        from qsync_fx.profiler.batch_interpolation import BatchInterpolation

        return BatchInterpolation(self).at(batch)

    def interpolated(self, plan: Plan) -> list[str]:
        """Return the operators whose state under a plan is in no run, and is interpolated."""
        measured = {entry for run in self.runs for entry in run.states}
        ids = [operator.id for operator in self.graph.operators]
        planned = zip(ids, states(self.graph, plan).names, strict=True)
        return [operator for operator, state in planned if (operator, state) not in measured]

    def __repr__(self) -> str:
        run, formats = self.runs[0], ", ".join(self.precisions)
        operators, passes = many(len(run.operators), "operator"), duration(run.passes)
        summary = f"{self.model}, {self.machine.name}, {formats}, {operators}"
        return f"Profile({summary}, {passes} in {run.label})"

    def __str__(self) -> str:
        return plain(profile_table(self), None)


def _check_collective(collective: Collective) -> str | None:
    if not collective.slowdown:
        return " has the slowdown 0, which no measurement gives"
    if not collective.seconds:
        return " has an empty table of seconds"
    before = 0
    for nbytes, seconds in collective.seconds:
        if not (before < nbytes and 0 < seconds < math.inf):
            return f" has {seconds} seconds for {nbytes} bytes; both are positive, and bytes grow"
        before = nbytes
    return check_numbers(collective)


def _check_codec(speed: CodecSpeed) -> str | None:
    if 0 < speed.encode < math.inf and 0 < speed.decode < math.inf:
        return None
    return f" has the speeds {speed.encode} and {speed.decode}; both are positive"


def _check_runs(profile: Profile | BatchMeasurement) -> str | None:
    if not profile.runs:
        return " holds no run"
    first = profile.runs[0]
    operators = [measured.operator for measured in first.operators]
    for run in profile.runs:
        if [measured.operator for measured in run.operators] != operators:
            return f" holds other operators in the run {run.label!r} than in {first.label!r}"
    if profile.batch_size is not None and profile.batch_size < 1:
        return f" has the batch size {profile.batch_size}, which is not positive"
    return None


def _check_profile(profile: Profile) -> str | None:
    if (wrong := _check_runs(profile)) is not None:
        return wrong
    sizes = [profile.batch_size, *(item.batch_size for item in profile.batches)]
    if profile.batches and (None in sizes or len(set(sizes)) < len(sizes)):
        return f" has the batch sizes {sizes}, which are not different numbers"
    if not 0 <= profile.memory_budget <= 1:
        return f" has the memory budget {profile.memory_budget}, which is not from 0 to 1"
    return check_numbers(profile)


def _check_operators(profile: Profile) -> None:
    parts: list[Profile | BatchMeasurement] = [profile, *profile.batches]
    for part in parts:
        measured = [item.operator for item in part.runs[0].operators]
        expected = [operator.id for operator in part.graph.operators]
        if measured != expected:
            raise ProfileError(
                "the runs are of another model than the model graph",
                where=(sorted({*measured} ^ {*expected}) or measured)[0],
                do="measure the model again",
            )
    if profile.batches:
        profile.at_batch(profile.batches[0].batch_size)


_CHECKS: Final[Mapping[Any, Any]] = {
    **dict.fromkeys((MeasuredOperator, Quantized, Model, LossMemory), check_numbers),
    MeasuredRun: check_run,
    Collective: _check_collective,
    Exchange: CLUSTER_CHECKS[Exchange],
    CodecSpeed: _check_codec,
    BatchMeasurement: _check_runs,
    Profile: _check_profile,
    **SENSITIVITY.checks,
}

PROFILE = Schema(
    Profile,
    noun="profile",
    error=ProfileError,
    remedy="write profiles with Profile.save",
    name="qsync-profile",
    largest=64 * 2**20,
    smaller="measure fewer plans",
    checks=_CHECKS,
)


def anchors(profile: Profile, planned: bool = False) -> list[Anchor]:
    """Return each run's states and peak memory; if `planned`, only of user plans with a peak."""
    graph = profile.graph
    adjustable = {operator.id for operator in graph.operators if operator.kind == "adjustable"}
    result: list[Anchor] = []
    for run in profile.runs:
        if planned and not (run.planned and run.peak_bytes):
            continue
        requested = {
            item.operator: item.precision
            for item in run.operators
            if item.operator in adjustable and item.precision
        }
        result.append(Anchor(states(graph, requested), run.peak_bytes))
    return result


def profile_table(profile: Profile) -> RenderableType:
    """Return the profile for a rich console: a table of operators, one of runs, and notes.

    The time of an operator in a format is from the uniform run in that format.
    """
    uniform = [run for run in profile.runs if run.label in profile.precisions] or profile.runs[:1]
    free = {item.operator for item in uniform[0].operators} - {
        item.operator
        for run in uniform
        for item in run.operators
        if item.seconds > 0 or _saved_bytes(profile, item)
    }
    parts: list[RenderableType] = [_operators(profile, uniform, free)]
    if free:
        parts.append(f"{many(len(free), 'operator')} more: no time, and nothing saved for backward")
    return Group(*parts, _runs(profile), *map(Text, _notes(profile)))


def _saved_bytes(profile: Profile, measured: MeasuredOperator) -> Any:
    return profile.graph.operator(measured.operator).costs[measured.state].saved_bytes


def _operators(profile: Profile, uniform: Sequence[MeasuredRun], free: Set[str]) -> Table:
    first, *others = uniform
    columns = ["share", *_columns(profile, first)]
    for run in others:
        columns += [*_columns(profile, run), "wins ms"]
    table = _empty_table("operator", columns)
    measured_in = {run.label: {item.operator: item for item in run.operators} for run in uniform}
    for measured in sorted(first.operators, key=lambda item: -item.seconds):
        if measured.operator in free:
            continue
        share = f"{measured.seconds / first.passes:.1%}"
        cells = [measured.operator, share, *_cells(profile, first, measured)]
        for run in others:
            other = measured_in[run.label][measured.operator]
            cells += _cells(profile, run, other)
            cells.append(milliseconds(measured.seconds - other.seconds))
        table.add_row(*map(Text, cells))
    return table


def _columns(profile: Profile, run: MeasuredRun) -> list[str]:
    columns = [f"{run.label} ms", "saved"]
    if _variances(profile, run):
        columns.append("variance")
    return columns


def _cells(profile: Profile, run: MeasuredRun, measured: MeasuredOperator) -> list[str]:
    cells = [milliseconds(measured.seconds), short(_saved_bytes(profile, measured), "B")]
    if variances := _variances(profile, run):
        value = variances.get(measured.operator, {}).get(run.label)
        cells.append("" if value is None else f"{value:.2g}")
    return cells


def _variances(profile: Profile, run: MeasuredRun) -> Mapping[str, Mapping[str, float]]:
    sensitivity = profile.sensitivity
    if sensitivity is None or run.label not in sensitivity.precisions:
        return {}
    return sensitivity.variance


def _runs(profile: Profile) -> Table:
    columns = ["forward ms", "backward ms", "outside ms", "spread", "peak beyond state"]
    table = _empty_table("plan", columns)
    for run in profile.runs:
        times = map(milliseconds, (run.forward, run.backward, sum(run.outside)))
        cells = (run.label, *times, f"{run.spread:.1%}", short(run.peak_bytes, "B"))
        table.add_row(*map(Text, cells))
    return table


def _empty_table(name: str, numbers: Sequence[str]) -> Table:
    table = table_of([name, *numbers], right=numbers)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


_GROUPS: Final = {"all": "all ranks", "inside": "inside nodes", "between": "between nodes"}


def _notes(profile: Profile) -> list[str]:
    machine = profile.machine
    lines = [str(profile.model)]
    if profile.batches:
        sizes = sorted(item.batch_size for item in profile.batches)
        others = ", ".join(map(str, sizes))
        lines.append(f"batches of {profile.batch_size} samples above; also measured: {others}")
    if profile.optimizer:
        lines.append(f"optimizer {profile.optimizer}: {milliseconds(profile.optimizer_seconds)} ms")
    lines.append("peak beyond state: without parameters, buffers, batch and optimizer state")
    if profile.loss_memory is None:
        lines.append("memory of the loss: not known; peaks count its gradients in all of backward")
    for (before, after), line in fitted(profile.runs).items():
        fixed_us, element_ps = line.fixed * 1e6, line.each * 1e12
        cost = f"{fixed_us:.0f} us and {element_ps:.0f} ps per element"
        lines.append(f"quantizing {before} to {after}: {cost}")
    for collective in profile.collectives:
        size, seconds = collective.seconds[-1]
        text = f"{short(size, 'B')} in {milliseconds(seconds)} ms"
        if collective.busy:
            text += f", which delays computation by {collective.busy:.0%} of that"
        if collective.copies:
            text += f"; copies into and out of buckets at {short(1 / collective.copies, 'B/s')}"
        if collective.buffers:
            text += f"; buffers in {milliseconds(collective.buffers)} ms"
        lines.append(f"all-reduce over {collective.backend}, {collective.ranks} ranks: {text}")
        for exchange in collective.exchanges:
            nbytes, seconds = exchange.seconds[-1]
            kind = f"{_GROUPS[exchange.group]}, {exchange.ranks} ranks each"
            text = f"{short(nbytes, 'B')} in {milliseconds(seconds)} ms"
            lines.append(f"exchange of coded gradients by {exchange.transport}, {kind}: {text}")
    versions = f"{many(machine.threads, 'thread')}, torch {machine.torch}"
    machine_text = f"{machine.device} {machine.name}, {versions}, qsync_fx {machine.qsync_fx}"
    return [*lines, machine_text]


_LEAST_SPREAD: Final = 0.02
"""Minimum relative spread of steps, as few samples underestimate it."""
_OF_MEDIAN: Final = 1.86
"""Standard error of a median of n normal values, in median absolute deviations / sqrt(n)."""


def corrected(profile: Profile, result: Profile) -> Profile:
    """Return a profile with the user plans of a new measurement, which replace equal ones.

    The run of the profile's first plan shows the speed of the machine, and scales the new runs. If
    the batch size of the profile was not measured, it shows the error of the interpolation, and
    scales the profile instead.
    """
    first = profile.runs[0]
    same = (run for run in result.runs if not run.planned or run.states == first.states)
    pace = _pace(first, next(same, first))
    if not profile.model.digest:
        profile = replace(
            profile, model=result.model, runs=[run.at_pace(1 / pace) for run in profile.runs]
        )
        pace = 1.0
    runs = [run.at_pace(pace) for run in result.runs if run.planned]
    replaced = [run.states for run in runs]
    saved = [run for run in profile.runs if not (run.planned and run.states in replaced)]
    wider = not set(result.graph.formats) <= set(profile.graph.formats)
    return replace(
        profile,
        stored=result.stored if wider else profile.stored,
        runs=[*saved, *runs],
        loss_memory=profile.loss_memory or result.loss_memory,
    )


def _pace(before: MeasuredRun, now: MeasuredRun) -> float:
    """Return the speed of the machine relative to the profile's; 1 within the standard error."""
    pace = before.passes / now.passes
    return pace if abs(pace - 1) > math.hypot(_uncertain(before), _uncertain(now)) else 1.0


def _uncertain(run: MeasuredRun) -> float:
    return _OF_MEDIAN * max(_LEAST_SPREAD, run.spread) / math.sqrt(len(run.steps))


@dataclass(frozen=True)
class Samples:
    """Runs on a machine: one per round, by the label of the plan."""

    machine: Machine
    model: Model
    optimizer: str
    plans: dict[str, list[MeasuredRun]]

    @property
    def rounds(self) -> int:
        return min(map(len, self.plans.values()), default=0)


SAMPLES = Schema(
    Samples,
    noun="interrupted measurement",
    error=ProfileError,
    remedy="remove it to measure from the start",
    name="qsync-measurement",
    largest=256 * 2**20,
    smaller="measure fewer rounds",
)


def resumed(path: Path, empty: Samples) -> Samples:
    """Return the samples of an interrupted measurement, or `empty` if there is no file."""

    def differs(result: Samples) -> str | None:
        try:
            result.machine.check(empty.machine)
            result.model.check(empty.model)
        except ProfileError as error:
            return error.what
        same = result.optimizer == empty.optimizer and result.plans.keys() == empty.plans.keys()
        return None if same else "it was measured with another optimizer or under other plans"

    result = SAMPLES.resumed(path, empty, differs)
    complete = {name: used[: result.rounds] for name, used in result.plans.items()}
    return replace(result, plans=complete)
